"""Folders, compressed files and archives; hostile ones stay data."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest

from meshwright.doctor.readers import archives
from meshwright.doctor.readers.archives import Limits
from meshwright.doctor.readers.walk import SPOOL_BYTES, read_incident
from meshwright.errors import InputError
from tests.doctor import log_maker as make
from tests.doctor.test_readers_lines import of

LOG = make.text(make.watchdog_lines("2.6", 3))
OTHER = make.text(make.watchdog_lines("2.6", 5))


def ranks(path: Path, limits: Limits | None = None) -> set[int | None]:
    return {f.rank for f in of(read_incident(path, limits=limits), "watchdog_timeout")}


@pytest.mark.parametrize(
    "data",
    [
        LOG,
        gzip.compress(LOG),
        bz2.compress(LOG),
        lzma.compress(LOG),
        make.zip_of({"a/b.log": LOG}),
        *(make.tar_of({"a/b.log": LOG}, mode) for mode in ("w", "w:gz", "w:bz2", "w:xz")),
        gzip.compress(gzip.compress(LOG)),
        make.tar_of({"x": make.zip_of({"y": gzip.compress(LOG)})}, "w:gz"),
        make.zip_of({"x": make.tar_of({"y": bz2.compress(LOG)})}),
    ],
    ids=["plain", "gz", "bz2", "xz", "zip", "tar", "tar.gz", "tar.bz2", "tar.xz", "gz.gz", "tgz>zip>gz", "zip>tar>bz2"],
)
def test_every_packing_whatever_its_name(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "thing.bin").write_bytes(data)
    assert ranks(tmp_path) == {3}
    assert ranks(tmp_path / "deep" / "er" / "thing.bin") == {3}


def test_names_of_members_are_kept(tmp_path: Path) -> None:
    (tmp_path / "logs.tar.gz").write_bytes(make.tar_of({"a/one.log": LOG, "b/two.log": OTHER}, "w:gz"))
    found = of(read_incident(tmp_path), "watchdog_timeout")
    assert {f.source for f in found} == {"logs.tar!/a/one.log:1", "logs.tar!/b/two.log:1"}


def test_zst_is_named_where_it_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.log.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    (tmp_path / "b.log").write_bytes(LOG)

    def absent(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr(archives.importlib, "import_module", absent)
    from meshwright.doctor.readers import walk

    monkeypatch.setattr(walk, "reader_for", lambda head, name: walk.text)
    incident = read_incident(tmp_path)
    assert [line for line in incident.lacks if "a.log.zst" in line and "pip install zstandard" in line]
    assert len(of(incident, "watchdog_timeout")) == 1


def test_zst_is_read_where_it_can_be(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "a").write_bytes(zstandard.compress(LOG))
    assert ranks(tmp_path) == {3}


def test_bomb_stops_and_the_rest_is_read(tmp_path: Path) -> None:
    limits = Limits(free_bytes=4 << 20, ratio=50)
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"loss 1.0\n" * (8 << 20)))
    (tmp_path / "b.log").write_bytes(LOG)
    incident = read_incident(tmp_path, limits=limits)
    assert any("a.gz" in line and "expand to more than" in line for line in incident.lacks)
    assert len(of(incident, "watchdog_timeout")) == 1


def test_many_small_bombs_share_one_bound(tmp_path: Path) -> None:
    limits = Limits(free_bytes=4 << 20, ratio=50)
    inner = gzip.compress(b"loss 1.0\n" * 300_000)
    (tmp_path / "a.zip").write_bytes(make.zip_of({f"{i}.gz": inner for i in range(40)}))
    incident = read_incident(tmp_path, limits=limits)
    assert any("expand to more than" in line for line in incident.lacks)


def test_nesting_is_bounded(tmp_path: Path) -> None:
    data = LOG
    for _ in range(9):
        data = make.zip_of({"x": data})
    (tmp_path / "a.zip").write_bytes(data)
    incident = read_incident(tmp_path)
    assert not incident.facts
    assert any("nested deeper than 4" in line for line in incident.lacks)


def test_number_of_members_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(make.tar_of({f"{i:03d}": LOG for i in range(50)}))
    incident = read_incident(tmp_path, limits=Limits(members=10))
    assert any("more than 10 files" in line for line in incident.lacks)


def test_nothing_is_written_and_links_in_archives_are_nothing(tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in ("../../escape.log", "/tmp/absolute.log"):
            info = tarfile.TarInfo(name)
            info.size = len(LOG)
            tar.addfile(info, io.BytesIO(LOG))
        link = tarfile.TarInfo("passwd")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        for kind in (tarfile.FIFOTYPE, tarfile.CHRTYPE):
            node = tarfile.TarInfo("node")
            node.type = kind
            tar.addfile(node)
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.tar").write_bytes(out.getvalue())
    assert ranks(folder) == {3}
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a.tar", "in"]


def test_a_header_that_asks_for_gigabytes(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 8 << 30
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(4096))
    (tmp_path / "b.log").write_bytes(LOG)
    incident = read_incident(tmp_path)
    assert any("a header asks for" in line for line in incident.lacks)
    assert len(of(incident, "watchdog_timeout")) == 1


def test_encrypted_broken_and_cut(tmp_path: Path) -> None:
    data = bytearray(make.zip_of({"x.log": LOG}))
    for signature, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = data.index(signature) + at
        data[place : place + 2] = struct.pack("<H", 1)
    (tmp_path / "a.zip").write_bytes(bytes(data))
    (tmp_path / "b.gz").write_bytes(gzip.compress(random.Random(0).randbytes(9000))[:4000])
    (tmp_path / "c.zip").write_bytes(b"PK\x03\x04" + bytes(100))
    (tmp_path / "d.tar").write_bytes(make.tar_of({"x": LOG, "y": OTHER})[:1500])
    (tmp_path / "e.log").write_bytes(LOG)
    incident = read_incident(tmp_path)
    assert len(of(incident, "watchdog_timeout")) >= 1
    said = " ".join(incident.lacks)
    assert "encrypted" in said
    assert all(name in said for name in ("a.zip", "b.gz", "c.zip"))
    assert "inside meshwright" not in said


def test_a_log_cut_in_the_middle_of_its_gz_counts_until_there(tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(200_000).hex().encode()
    data = gzip.compress(LOG + b"\n".join(noise[i : i + 100] for i in range(0, len(noise), 100)))
    (tmp_path / "a.log.gz").write_bytes(data[: len(data) // 2])
    incident = read_incident(tmp_path)
    assert len(of(incident, "watchdog_timeout")) == 1
    assert any("a.log: cannot be read to its end" in line for line in incident.lacks)


def test_large_members_go_through_the_temporary_file(tmp_path: Path) -> None:
    filler = b'XPU_TIMER_X{rank="1"} 1\n' * (SPOOL_BYTES // 24 + 5)
    hang = b'XPU_TIMER_COMMON_HANG{rank="6"} 1\n'
    members = {"a.prom": filler + hang, "b.prom": filler + hang.replace(b"6", b"7")}
    (tmp_path / "a.tgz").write_bytes(make.tar_of(members, "w:gz"))
    found = [f.rank for f in of(read_incident(tmp_path), "metric") if f.data.get("hung")]
    assert sorted(map(str, found)) == ["6", "7"]


def test_links_out_pipes_and_unreadable_things(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (tmp_path / "out.log").write_bytes(OTHER)
    (folder / "a.log").write_bytes(LOG)
    (folder / "link.log").symlink_to(tmp_path / "out.log")
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "pipe")
    (folder / "empty").touch()
    (folder / "noise.bin").write_bytes(bytes(range(256)) * 20)
    incident = read_incident(folder)
    assert {f.rank for f in of(incident, "watchdog_timeout")} == {3}
    said = " ".join(incident.lacks)
    assert "link.log: a link that leads out" in said
    assert "1 files of no known format" in said


def test_progress_and_nothing_there(tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    (tmp_path / "a.log").write_bytes(LOG)
    read_incident(tmp_path, progress=lambda done, files, name: calls.append((done, files, name)))
    assert calls[-1] == (len(LOG), 1, "a.log")
    with pytest.raises(InputError, match="no such file or folder"):
        read_incident(tmp_path / "absent")


def test_order_and_names_of_files_do_not_matter(tmp_path: Path) -> None:
    def facts(names: list[str]) -> set[tuple[object, ...]]:
        folder = tmp_path / "".join(names)
        folder.mkdir()
        for name, rank in zip(names, range(4), strict=True):
            (folder / name).write_bytes(make.text(make.watchdog_lines("2.6", rank, seq=rank)))
        return {(f.kind, f.rank, f.data.get("seq")) for f in read_incident(folder).facts}

    assert facts(["a0", "b1", "c2", "d3"]) == facts(["d9", "c8", "b7", "a6"])


def test_zip_with_a_lying_size(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as held:
        held.writestr("x.log", LOG)
    data = bytearray(out.getvalue())
    place = data.index(b"PK\x01\x02") + 24
    data[place : place + 4] = struct.pack("<I", 1 << 30)
    (tmp_path / "a.zip").write_bytes(bytes(data))
    assert "inside meshwright" not in " ".join(read_incident(tmp_path).lacks)

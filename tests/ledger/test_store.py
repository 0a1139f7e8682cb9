"""A ledger comes back as it was written; broken and hostile files end in one line."""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import fields, replace
from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.ledger import store
from meshwright.ledger.schema import Entry, Holding, Ledger, Rank
from meshwright.ledger.store import read, read_jsonl, read_parquet, write, write_jsonl, write_parquet

words = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
numbers = st.integers(-(2**63) + 1, 2**63 - 1)
opt = st.one_of
lists = st.lists(numbers, max_size=4).map(tuple)

entries = st.builds(
    Entry,
    rank_class=words,
    op=words,
    **{n: opt(st.none(), numbers) for n in ("step", "microbatch", "layer", "seq", "peer", "payload_bytes", "flops")},
    **{n: opt(st.none(), numbers) for n in ("wire_bytes", "enqueued_ns", "started_ns", "ended_ns")},
    **{n: opt(st.none(), words) for n in ("phase", "stream", "group", "name", "dtype", "state", "call_site", "source")},
    splits=opt(st.none(), lists),
    shapes=opt(st.none(), st.lists(lists, max_size=3).map(tuple)),
    count=numbers,
)
holdings = st.builds(Holding, words, words, opt(st.none(), words), numbers, words)
axes = st.dictionaries(st.sampled_from(["tp", "pp", "dp", "ep"]), numbers, max_size=3)
ranks = st.builds(Rank, numbers, axes, words, numbers, opt(st.none(), words), opt(st.none(), numbers))
ledgers = st.builds(
    Ledger,
    st.lists(entries, max_size=4),
    st.lists(holdings, max_size=3),
    st.lists(ranks, max_size=3),
    st.dictionaries(words, words, max_size=3),
)

SMALL = Ledger(
    [
        Entry("s0", "all_reduce", layer=0, group="tp", shapes=((4, 8),), splits=(), payload_bytes=64),
        Entry("s0", "barrier", shapes=((),), splits=(3, 0)),
        Entry("s0", "matmul", shapes=()),
    ],
    [Holding("s0", "weights", None, 5, "exact")],
    [Rank(0, {"tp": 0, "pp": 1}, "s0", 4), Rank(4, {}, "s1")],
    {"model": "toy"},
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ledgers)
def test_both_formats_give_back_what_was_written(ledger: Ledger) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_jsonl(ledger, Path(folder) / "l.jsonl")
        assert read_jsonl(Path(folder) / "l.jsonl") == ledger
        write_parquet(ledger, Path(folder) / "l")
        assert read_parquet(Path(folder) / "l") == ledger


def test_none_and_empty_stay_apart(tmp_path: Path) -> None:
    write(SMALL, tmp_path / "l")
    write(SMALL, tmp_path / "l.jsonl")
    for back in (read(tmp_path / "l"), read(tmp_path / "l.jsonl")):
        assert back == SMALL
        assert [e.splits for e in back.entries] == [(), (3, 0), None]
        assert [e.shapes for e in back.entries] == [((4, 8),), ((),), ()]
        assert back.entries[0].flops is None
    wrong = replace(SMALL, holdings=[Holding("s0", "weights", None, 6, "exact")])
    assert read_parquet(tmp_path / "l") != wrong


def test_an_empty_ledger(tmp_path: Path) -> None:
    write_parquet(Ledger(), tmp_path / "l")
    assert read_parquet(tmp_path / "l") == Ledger()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no version"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"version": 2, "meta": {}}', "version 2 is not known"),
        ('{"version": true}', "version True is not known"),
        ('{"version": 1, "meta": {"a": 3}}', "not a text"),
        ('{"version": 1}\n{"table": "entries", "op": "x"}', "value is missing"),
        ('{"version": 1}\n{"table": "entries", "rank_class": "a", "op": "x", "flops": "many"}', "whole number"),
        ('{"version": 1}\n{"table": "entries", "rank_class": "a", "op": "x", "flops": 1e400}', "whole number"),
        ('{"version": 1}\n{"table": "entries", "rank_class": "a", "op": "x", "flops": NaN}', "not JSON"),
        (
            '{"version": 1}\n{"table": "entries", "rank_class": "a", "op": "x", "flops": 99999999999999999999}',
            "64 bits",
        ),
        ('{"version": 1}\n{"table": "entries", "rank_class": "a", "op": "x", "shapes": [[[1]]]}', "whole number"),
        ('{"version": 1}\n{"table": "entries", "rank_class": "a", "op": "x", "evil": 1}', "unknown field"),
        ('{"version": 1}\n{"table": "secrets"}', "no row of"),
        ('{"version": 1}\n[1, 2]', "no row of"),
        ('{"version": 1}\n{"table": ["entries"]}', "no row of"),
    ],
)
def test_broken_lines_name_the_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "l.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        read_jsonl(path)


def test_unreadable_and_oversized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_jsonl(tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
        read_parquet(tmp_path / "absent")
    with pytest.raises(InputError, match="cannot be written"):
        write_jsonl(SMALL, tmp_path / "no" / "where.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        read_jsonl(tmp_path / "b.jsonl")
    write_jsonl(SMALL, tmp_path / "l.jsonl")
    monkeypatch.setattr(store, "MAX_ROWS", 3)
    with pytest.raises(InputError, match="3 lines"):
        read_jsonl(tmp_path / "l.jsonl")
    monkeypatch.setattr(store, "MAX_LINE_BYTES", 20)
    with pytest.raises(InputError, match="longer than 20"):
        read_jsonl(tmp_path / "l.jsonl")
    monkeypatch.setattr(store, "MAX_FILE_BYTES", 10)
    with pytest.raises(InputError, match="at most 10"):
        read_jsonl(tmp_path / "l.jsonl")


def test_broken_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "l"
    table = folder / "entries.parquet"
    write_parquet(SMALL, folder)
    whole = table.read_bytes()
    for broken in (b"", b"PAR1", whole[: len(whole) // 2], b"not parquet at all", whole[:-8] + b"\xff\xff\xff\x7fPAR1"):
        table.write_bytes(broken)
        with pytest.raises(InputError, match="not a readable parquet table"):
            read_parquet(folder)
    table.unlink()
    with pytest.raises(InputError):
        read_parquet(folder)
    table.write_bytes(whole)
    frame = pl.read_parquet(table)
    for odd in (frame.drop("op"), frame.with_columns(extra=1), frame.with_columns(flops=pl.lit("x"))):
        odd.write_parquet(table)
        with pytest.raises(InputError, match="missing, unknown or of another type"):
            read_parquet(folder)
    for name, text in (("shapes", "1x?"), ("splits", "1;2"), ("shapes", "99999999999999999999")):
        frame.with_columns(pl.lit(text).alias(name)).write_parquet(table)
        with pytest.raises(InputError, match="whole number"):
            read_parquet(folder)
    frame.with_columns(op=pl.lit("x" * 5000)).write_parquet(table)
    with pytest.raises(InputError, match="longer than"):
        read_parquet(folder)
    frame.with_columns(op=pl.lit(None, pl.String)).write_parquet(table)
    with pytest.raises(InputError, match="value is missing"):
        read_parquet(folder)
    frame.write_parquet(table)
    assert read_parquet(folder) == SMALL
    monkeypatch.setattr(store, "MAX_ROWS", 2)
    with pytest.raises(InputError, match="at most 2"):
        read_parquet(folder)


def test_flipped_bytes_end_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Seeded damage to either format is read or refused with an InputError; the reader's own panic stays unseen."""
    rng = random.Random(7)
    ledger = Ledger([Entry("s0", "all_reduce", layer=i, shapes=((4, 8),), payload_bytes=64 * i) for i in range(50)])
    write_parquet(ledger, tmp_path)
    write_jsonl(ledger, tmp_path / "l.jsonl")
    refused: list[str] = []
    for path in (tmp_path / "entries.parquet", tmp_path / "l.jsonl"):
        whole = path.read_bytes()
        for _ in range(60):
            damaged = bytearray(whole)
            for _ in range(rng.randint(1, 4)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            path.write_bytes(bytes(damaged))
            try:
                read(tmp_path if path.suffix == ".parquet" else path)
            except InputError as error:
                refused.append(str(error))
    assert len(refused) > 60
    assert not any("\n" in line for line in refused)
    assert capfd.readouterr().err == ""


def test_unknown_version_of_a_folder(tmp_path: Path) -> None:
    write_parquet(SMALL, tmp_path)
    (tmp_path / "ledger.json").write_text(json.dumps({"version": 7, "meta": {}}))
    with pytest.raises(InputError, match="version 7"):
        read_parquet(tmp_path)


def test_what_cannot_be_held_is_refused(tmp_path: Path) -> None:
    for bad in (
        Ledger(ranks=[Rank(0, {"a=b": 0}, "c")]),
        Ledger(entries=[Entry("c", "x", flops=1 << 70)]),
        Ledger(entries=[Entry("c", "x" * 10_000)]),
    ):
        with pytest.raises(InputError):
            write_parquet(bad, tmp_path / "l")


def test_the_columns_are_the_fields_of_the_schema() -> None:
    for cls, columns in store.TABLES.values():
        assert [f.name for f in fields(cls)] == list(columns)

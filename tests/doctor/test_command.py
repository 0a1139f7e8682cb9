"""``meshwright doctor``: verdict lines, exit codes, JSON, the page, the trace, bad input; nothing of it needs torch."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.doctor.findings import KINDS

from .fr_maker import Simulator, dump, write
from .fr_mistakes import LAYOUTS, MISTAKES
from .log_maker import dump_signal_line, pyspy_lines, torchrun_table, watchdog_lines

Doctor = Callable[..., tuple[int, str, str]]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Runs the command in this process: exit code, output, errors."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["meshwright", "doctor", *map(str, words)])
        monkeypatch.setenv("COLUMNS", "120")
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run


def stalled(folder: Path, mistake: str, layout: str = "tp4dp2", **options: Any) -> Path:
    """Dumps of a simulated job with a mistake."""
    write(Simulator(MISTAKES[mistake][2](LAYOUTS[layout]())).run(), folder, **options)
    return folder


def logs_of_a_silent_rank(folder: Path) -> Path:
    """Seven ranks time out, the eighth sits in its loader on another machine."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [line for rank in range(7) for line in watchdog_lines("2.6", rank)]
    lines += [dump_signal_line(7, 3, 59957, 59957), "[rank0]: RuntimeError: Connection closed by peer [10.1.2.3]:4711"]
    lines += torchrun_table(7, 3, 4711, -15, "SIGTERM") + torchrun_table(0, 0, 1, -6, "SIGABRT")
    (folder / "train.log").write_text("\n".join(lines).replace("gpu-03", "gpu-01", 0) + "\n")
    loader = "/home" + "/ann/job/loader.py"
    frames = [("recv_into", "socket.py", 720), ("load_batch", loader, 35), ("main", "train.py", 9)]
    (folder / "stack_7.txt").write_text("\n".join(pyspy_lines(4711, frames)) + "\n")
    return folder


def test_the_verdict_reads_as_promised(doctor: Doctor, tmp_path: Path) -> None:
    code, out, _ = doctor(logs_of_a_silent_rank(tmp_path / "incident"))
    lines = out.splitlines()
    assert code == 1
    assert lines[0] == "rank 7 never entered all_reduce #59958 of default_pg; it sits in load_batch, loader.py:35."
    assert lines[1].startswith("7 ranks wait for it, the first since ")
    assert lines[1].endswith("Confidence high.")


@pytest.mark.parametrize("mistake", ["host stands still", "skipped call", "another shape", "checkpoint on rank 0"])
def test_dumps_give_kind_ranks_and_line(doctor: Doctor, tmp_path: Path, mistake: str) -> None:
    kind, guilty, _ = MISTAKES[mistake]
    code, out, _ = doctor(stalled(tmp_path / "a", mistake), "--json")
    first = json.loads(out)["findings"][0]
    assert (code, first["kind"], set(first["guilty_ranks"])) == (1, kind, guilty)
    assert first["kind"] in KINDS
    assert set(first) >= {"kind", "guilty_ranks", "waiting_ranks", "call_site", "since", "confidence", "evidence"}
    assert isinstance(first["unknown"], list)
    code, out, _ = doctor(tmp_path / "a")
    assert out.startswith(first["headline"][:40])


def test_healthy_is_exit_0(doctor: Doctor, tmp_path: Path) -> None:
    code, out, _ = doctor(stalled(tmp_path / "a", "none"))
    assert code == 0
    assert "nothing disagrees" in out
    assert json.loads(doctor(tmp_path / "a", "--json")[1])["healthy"] is True


def test_what_a_folder_lacks_is_said(doctor: Doctor, tmp_path: Path) -> None:
    folder = stalled(tmp_path / "a", "host stands still", leave_out=(6,), frames=False)
    (folder / "photo.bin").write_bytes(bytes(range(256)) * 8)
    data = json.loads(doctor(folder, "--json")[1])
    assert any("rank 6" in line for line in data["findings"][0]["unknown"])
    assert any("photo.bin" in line for line in data["lacks"]), data["lacks"]


@pytest.mark.parametrize("case", ["missing", "empty", "unreadable", "none"])
def test_bad_input_is_one_line_and_exit_2(doctor: Doctor, tmp_path: Path, case: str) -> None:
    if case == "missing":
        code, out, err = doctor(tmp_path / "nowhere")
    elif case == "empty":
        code, out, err = doctor(tmp_path)
    elif case == "unreadable":
        if os.geteuid() == 0:
            pytest.skip("root reads everything")
        file = tmp_path / "dump_0"
        file.write_bytes(b"x")
        file.chmod(0)
        code, out, err = doctor(file)
    else:
        code, out, err = doctor()
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.strip().splitlines()) <= 2
    assert "Traceback" not in err


def test_an_output_that_cannot_be_written_is_one_line(doctor: Doctor, tmp_path: Path) -> None:
    folder = stalled(tmp_path / "a", "host stands still")
    for flag in ("--html", "--perfetto", "--reproduce"):
        code, _, err = doctor(folder, flag, tmp_path / "no" / "such" / "folder" / "x")
        assert (code, err.startswith("error: ")) == (2, True), flag


HOSTILE = '<script>alert("x")</script>&\'"[bold]{0}%s\x1b[31m'


def hostile(folder: Path) -> Path:
    """Dumps with markup, escapes and format characters wherever a text may stand."""
    folder.mkdir()
    simulator = Simulator(MISTAKES["skipped call"][2](LAYOUTS["dp8"]())).run()
    for rank in range(simulator.job.world):
        data = dump(simulator, rank)
        for entry in data["entries"]:
            name, desc = entry["process_group"]
            entry["process_group"] = (name, desc + HOSTILE)
            entry["input_dtypes"] = [HOSTILE]
            for frame in entry["frames"]:
                frame["name"] += HOSTILE
                frame["filename"] = frame["filename"].replace("train", HOSTILE)
        for config in data["pg_config"].values():
            config["desc"] += HOSTILE
        (folder / f"d_{rank}").write_bytes(pickle.dumps(data, protocol=2))
    (folder / "x.log").write_text(f"[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: {HOSTILE}\n")
    return folder


def test_hostile_texts_stay_text(doctor: Doctor, tmp_path: Path) -> None:
    page, trace = tmp_path / "p.html", tmp_path / "t.json"
    code, out, _ = doctor(hostile(tmp_path / "a"), "--html", page, "--perfetto", trace)
    assert code == 1
    assert "\x1b[31m" not in out
    html = page.read_text()
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "")
    json.loads(trace.read_text())
    assert "\x1b[31m" not in doctor(tmp_path / "a", "--json")[1]


def test_the_trace_has_a_process_a_rank_and_no_negative_times(doctor: Doctor, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    doctor(stalled(tmp_path / "a", "another operation"), "--perfetto", path)
    data = json.loads(path.read_text())
    events = data["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert named == {rank: f"rank {rank}" for rank in range(8)}
    calls = [e for e in events if e["ph"] == "X"]
    assert len(calls) > 60
    assert all(e["ts"] >= 0 and e["dur"] > 0 and isinstance(e["tid"], int) for e in calls)
    assert {e["args"]["state"] for e in calls} >= {"completed", "scheduled"}
    by_lane: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in calls:
        by_lane.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for rows in by_lane.values():
        rows.sort()
        done = [(a, b) for a, b in rows if b < max(end for _, end in rows)]
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(done))


def test_the_page_marks_the_divergence_and_names_what_to_do(doctor: Doctor, tmp_path: Path) -> None:
    path = tmp_path / "p.html"
    doctor(stalled(tmp_path / "a", "another operation"), "--html", path)
    html = path.read_text()
    first = json.loads(doctor(tmp_path / "a", "--json")[1])["findings"][0]
    assert f">#{first['seq']}</text>" in html
    assert '<rect x="' in html
    assert html.count("<svg") == 1
    assert "What to do" in html
    assert ">rank 3</text>" in html


def test_how_says_what_to_set(doctor: Doctor, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = doctor("--how")
    assert code == 0
    for word in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "meshwright.record", "NCCL_DEBUG", "py-spy"):
        assert word in out

"""A sample of the fuzzer, proof that it finds planted defects, and the bounds of time and memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from bench.doctor_fuzz_text import fuzz, read
from bench.doctor_log_speed import RANKS, SILENT_RANK, read_once, write_log

from meshwright.doctor.readers import troubles
from meshwright.doctor.readers.walk import read_incident
from tests.doctor import log_maker as make
from tests.doctor.test_readers_lines import of


def test_a_thousand_mutants() -> None:
    outcome = fuzz(1000, seed=7)
    assert outcome.inputs == 1000
    assert not outcome.crashes, outcome.crashes[0]
    assert not outcome.slow
    assert outcome.most_facts > 10, "the mutants still reach the parsers"


def test_every_seed_is_read() -> None:
    for name, data in make.samples().items():
        incident = read(name, data)
        assert incident.facts, name
        assert not incident.lacks, name


def test_the_fuzzer_sees_a_parser_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(*_: object) -> None:
        raise IndexError("planted")

    monkeypatch.setattr(troubles, "_death", planted)
    assert fuzz(200, seed=7).crashes


@pytest.mark.parametrize(
    "data",
    [
        b"A" * (3 << 20),
        b"[rank1]: Traceback (most recent call last):\n" * 4000,
        b"Traceback (most recent call last):\n" + b'  File "x.py", line 1, in f\n' * 50_000,
        b"Thread 0x00007f12 (most recent call first):\n" * 4000,
        b"NCCL WARN " * 200_000,
        b"(" * 300_000 + b"NCCL ",
        b"".join(b"[rank%d]:[E304 05:06:07.1 x.cpp:1] Received a dump signal\n" % r for r in range(3000)),
        b"".join(b"h%d:1:2 [0] NCCL INFO AllReduce: opCount 0 sendbuff 0x1 x\n" % r for r in range(3000)),
        b"rror: " * 100_000 + b"\n" + b"exitcode " * 100_000,
        b'{"coll_perf":' + b"[" * 100_000,
        b'{"communicators": [' + b"[" * 100_000,
        b'[{"thread_id": 1, "frames": ' + b"[" * 100_000,
    ],
    ids=[
        "one long line", "tracebacks", "frames", "threads", "warnings", "brackets", "ranks", "processes", "errors",
        "deep inspector", "deep ras", "deep stacks",
    ],
)  # fmt: skip
def test_hostile_text_is_bounded(data: bytes) -> None:
    tracemalloc.start()
    incident = read("x", data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 96 << 20
    assert not any("inside meshwright" in line for line in incident.lacks)


def test_ten_mebibytes_are_streamed_and_right(tmp_path: Path) -> None:
    """No bound on time, which the machine decides; ``bench.doctor_log_speed`` measures a gibibyte."""
    write_log(tmp_path / "job.log", 10 << 20)
    assert (tmp_path / "job.log").stat().st_size == pytest.approx(10 << 20, rel=0.01)
    assert read_once(tmp_path / "job.log")["right"] is True
    incident = read_incident(tmp_path)
    (error,) = of(incident, "exception")
    assert (error.rank, error.data["call_site"]) == (SILENT_RANK, "/job/loader.py:35")
    assert incident.world == RANKS


def test_lines_are_counted_across_pieces(tmp_path: Path) -> None:
    lines = [f"step {n}" for n in range(300_000)]
    for place in (0, 1, 123_456, 299_999):
        lines[place] = f"[rank{place}]: ValueError: here"
    (tmp_path / "job.log").write_text("\n".join(lines))
    found = of(read_incident(tmp_path), "exception")
    assert sorted((f.rank, f.source) for f in found if f.rank is not None) == [
        (place, f"job.log:{place + 1}") for place in (0, 1, 123_456, 299_999)
    ]

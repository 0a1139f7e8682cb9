"""Verdicts from stacks alone; rows of two recorders are not held together; the first process to end."""

from __future__ import annotations

from meshwright.doctor.hang import diagnose
from meshwright.doctor.incident import Incident, Trace

WAITS = [("all_reduce", "/x/site-packages/torch/distributed/distributed_c10d.py", 3252), ("step", "/job/train.py", 40)]
LOADS = [("recv_into", "socket.py", 720), ("load_batch", "/job/loader.py", 35), ("main", "/job/train.py", 9)]


def _stack(found: Incident, rank: int, frames: list[tuple[str, str, int]], main: bool = True) -> None:
    data: dict[str, object] = {"frames": frames, "main": main}
    if frames is WAITS:
        data["where"] = "collective"
    found.add_fact("stack", frames[0][0], f"stack_{rank}:1", rank, None, data)


def test_who_is_in_no_collective_is_late() -> None:
    found = Incident()
    for rank in range(4):
        _stack(found, rank, LOADS if rank == 1 else WAITS)
    first = diagnose(found)[0]
    assert (first.kind, first.guilty_ranks, first.waiting_ranks) == ("host_stuck", (1,), (0, 2, 3))
    assert first.call_site == "loader.py:35"
    assert first.confidence == "medium"
    assert first.alternative is not None


def test_stacks_of_other_threads_and_ties_tell_nothing() -> None:
    found = Incident()
    for rank in range(4):
        _stack(found, rank, WAITS)
        _stack(found, rank, LOADS, main=False)
    assert diagnose(found)[0].kind == "unknown"
    for late in ((0, 1), (0, 1, 2), (0, 1, 2, 3)):
        found = Incident()
        for rank in range(4):
            _stack(found, rank, LOADS if rank in late else WAITS)
        assert diagnose(found)[0].kind == "unknown", late


def test_one_recorder_counts() -> None:
    found = Incident()
    for rank in range(4):
        found.add_trace(Trace(rank, f"dump_{rank}"))
    for rank in (1, 2):
        found.add_trace(Trace(rank, f"rank{rank}.jsonl", "ledger"))
    found.settle()
    assert {t.recorder for t in found.traces.values()} == {"flight_recorder"}
    assert sorted(found.traces) == [0, 1, 2, 3]
    assert any("ledgers of 2 ranks are left out" in line for line in found.lacks)
    for rank in range(4):
        found.add_trace(Trace(rank, f"rank{rank}.jsonl", "ledger"))
    found.settle()
    assert {t.recorder for t in found.traces.values()} == {"ledger"}


def test_the_first_to_end_without_its_error_is_a_guess() -> None:
    found = Incident()
    found.add_fact("exited", "exit code 1 of process 7", "l:5", 2, 100.0, {"first_observed": True, "exitcode": 1})
    found.add_fact("exited", "exit code 1 of process 8", "l:9", 3, 101.0, {"exitcode": 1})
    first = diagnose(found)[0]
    assert (first.kind, first.guilty_ranks, first.confidence) == ("dead_rank", (2,), "medium")
    assert any("error with which it ended" in line for line in first.unknown)
    found.add_fact("gloo_error", "Connection closed by peer", "r2:5", 2, 99.0, {"consequence": True})
    assert not any(f.guilty_ranks == (2,) for f in diagnose(found))

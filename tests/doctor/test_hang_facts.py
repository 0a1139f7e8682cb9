"""Verdicts from logs alone, and what logs add to dumps."""

from __future__ import annotations

import pytest

from meshwright.doctor.findings import Finding
from meshwright.doctor.hang import diagnose
from meshwright.doctor.incident import Incident

from .fr_maker import Simulator
from .fr_mistakes import GUILTY, LAYOUTS, MISTAKES, incident


def _watchdog(found: Incident, rank: int, seq: int, op: str = "all_reduce", numel: int = 1) -> None:
    data: dict[str, object] = {"seq": seq, "op": op, "numel_in": numel, "numel_out": numel, "group": "default_pg"}
    found.add_fact("watchdog_timeout", f"Watchdog caught {op} {seq}", f"log{rank}:1", rank, 1000.0 + rank, data)


def _counters(found: Incident, rank: int, enqueued: int, kind: str = "pg_status") -> None:
    data: dict[str, object] = {"last_enqueued": enqueued, "last_completed": enqueued - 1, "group": "default_pg"}
    found.add_fact(kind, f"last enqueued {enqueued}", f"log{rank}:2", rank, 1000.0, data)


def _stalled(mistake: str = "host stands still") -> Incident:
    return incident(Simulator(MISTAKES[mistake][2](LAYOUTS["tp4dp2"]())).run())


def test_the_silent_rank_is_the_one_that_is_behind() -> None:
    found = Incident()
    for rank in range(8):
        if rank != 7:
            _watchdog(found, rank, 59958)
        _counters(found, rank, 59998 if rank != 7 else 59957, "pg_status" if rank != 7 else "dump_signal")
    first = diagnose(found)[0]
    assert (first.kind, first.guilty_ranks, first.seq, first.confidence) == ("host_stuck", (7,), 59958, "high")
    assert first.waiting_ranks == tuple(range(7))


@pytest.mark.parametrize(
    ("op", "numel", "kind"), [("broadcast", 1, "wrong_op"), ("all_reduce", 262_144, "wrong_shape")]
)
def test_the_call_that_differs(op: str, numel: int, kind: str) -> None:
    found = Incident()
    for rank in range(4):
        _watchdog(found, rank, 12, op if rank == 2 else "all_reduce", numel if rank == 2 else 1)
    first = diagnose(found)[0]
    assert (first.kind, first.guilty_ranks, first.confidence) == (kind, (2,), "medium")


def test_a_death_explains_who_waits_and_its_echoes_do_not() -> None:
    found = _stalled()
    found.add_fact("exception", "RuntimeError: Connection closed by peer", "r0.log:9", 0, 1005.0)
    found.add_fact("oom", "CUDA out of memory. Tried to allocate 2 GiB", "r3.log:5", GUILTY, 1001.0)
    found.add_fact("killed", "exitcode: -15", "launcher.log:1", 1, 1006.0, {"signal": "SIGTERM", "consequence": True})
    first = diagnose(found)[0]
    assert (first.kind, first.guilty_ranks, first.confidence) == ("dead_rank", (GUILTY,), "high")
    assert any("closed by peer" in line for line in first.consequences)


def test_a_mismatch_before_a_death_is_the_cause() -> None:
    found = _stalled("another operation")
    found.add_fact("killed", "exitcode: -9", "l:1", 5, 4e9, {"signal": "SIGKILL"})
    assert [f.kind for f in diagnose(found)][:2] == ["wrong_op", "dead_rank"]


def test_a_process_that_vanished() -> None:
    found = _stalled()
    found.add_fact("gloo_error", "Connection closed by peer [10.0.0.1]:5", "r0.log:9", 0, 1005.0)
    first = diagnose(found)[0]
    assert (first.kind, first.guilty_ranks, first.confidence) == ("dead_rank", (GUILTY,), "medium")
    slow = _stalled()
    slow.add_fact("gloo_error", "Timed out waiting 6000ms for recv", "r1.log:9", 1, 1004.0)
    slow.add_fact("gloo_error", "Connection closed by peer [10.0.0.1]:5", "r0.log:9", 0, 1005.0)
    assert diagnose(slow)[0].kind == "host_stuck"


def test_a_stack_says_where_the_host_sits() -> None:
    found = _stalled()
    frames = [("read", "/usr/lib/python3.11/socket.py", 700), ("load_batch", "/job/loader.py", 35)]
    found.add_fact("stack", "load_batch (loader.py:35)", "py-spy:1", GUILTY, None, {"frames": frames})
    first = diagnose(found)[0]
    assert first.call_site == "loader.py:35"
    assert "it sits in load_batch, loader.py:35" in first.headline


def test_environment_that_differs() -> None:
    found = Incident()
    for rank in range(4):
        value = "2.21.5" if rank == 3 else "2.27.3"
        found.add_fact("env", f"NCCL {value}", f"r{rank}:1", rank, None, {"name": "nccl", "value": value})
    first = diagnose(found)[0]
    assert (first.kind, first.guilty_ranks) == ("environment_mismatch", (3,))


def test_reports_of_torch_itself() -> None:
    found = Incident()
    found.add_fact("missing_at_barrier", "Ranks 2 failed to pass monitoredBarrier", "r0:1", 0, None, {"ranks": [2]})
    assert _answer(found) == ("host_stuck", (2,))
    found = Incident()
    for rank in range(3):
        sides = [
            {"rank": r, "seq": 4, "op": "all_reduce", "shape": [8 if r != 1 else 9], "dtype": "Float"} for r in range(3)
        ]
        found.add_fact("fingerprint_mismatch", "CollectiveFingerPrint", f"r{rank}:1", rank, None, {"sides": sides})
    assert _answer(found) == ("wrong_shape", (1,))
    found = Incident()
    found.add_fact("desync_report", "", "r0:1", 0, None, {"ranks": [0, 1], "joined": True, "seq": 5})
    found.add_fact("desync_report", "", "r0:2", 0, None, {"ranks": [2], "joined": False, "seq": 4})
    assert _answer(found) == ("host_stuck", (2,))


def _answer(found: Incident) -> tuple[str, tuple[int, ...]]:
    first: Finding = diagnose(found)[0]
    return first.kind, first.guilty_ranks


def test_nothing_is_unknown() -> None:
    first = diagnose(Incident())[0]
    assert (first.kind, first.guilty_ranks, first.confidence) == ("unknown", (), "low")
    assert first.advice

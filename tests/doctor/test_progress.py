"""Two dumps of the same ranks: a job that goes on is slow, one that does not is stuck."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshwright.doctor.findings import Finding
from meshwright.doctor.hang import diagnose
from meshwright.doctor.readers.walk import read_incident
from tests.doctor import fr_maker as fr


def _stalled_at(nth: int) -> fr.Simulator:
    """Rank 2 of 4 has not come to the loss of step ``nth`` yet; the others wait for it there."""
    job = fr.layout(tp=2, dp=2, steps=6)
    at = fr.index(job, 2, "default_pg", nth, "all_reduce")
    job = fr.edit(job, 2, lambda ops: [*ops[:at], fr.Op("host_hang"), *ops[at:]])
    return fr.Simulator(replace(job))


def _diagnosed(folder: Path, *moments: int) -> Finding:
    for number, nth in enumerate(moments):
        sim = _stalled_at(nth)
        sim.run()
        fr.write(sim, folder / f"dump{number}", seed=number)
    return diagnose(read_incident(folder))[0]


def test_a_job_that_goes_on_between_two_dumps_is_slow(tmp_path: Path) -> None:
    found = _diagnosed(tmp_path, 1, 4)
    assert found.kind == "slow_not_stuck", found
    assert found.guilty_ranks == (2,)
    assert found.confidence == "medium"
    assert "went on" in found.headline


def test_one_moment_or_the_same_moment_twice_is_a_hang(tmp_path: Path) -> None:
    for folder, moments in (("one", (4,)), ("twice", (4, 4))):
        found = _diagnosed(tmp_path / folder, *moments)
        assert (found.kind, found.guilty_ranks) == ("host_stuck", (2,)), found


def test_a_timeout_says_that_it_no_longer_moves(tmp_path: Path) -> None:
    line = (
        "[rank0]:[E924 10:00:00.000000000 ProcessGroupNCCL.cpp:685] [Rank 0] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600001 "
        "milliseconds before timing out.\n"
    )
    (tmp_path / "rank0.log").write_text(line)
    assert _diagnosed(tmp_path, 1, 4).kind == "host_stuck"

"""Pipelined jobs played again: the recorded step comes out, and the cause that was put in is named with its share."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from meshwright.doctor.findings import Finding
from meshwright.doctor.judge import judge
from meshwright.doctor.readers.walk import read_incident
from meshwright.doctor.slow_job import loss_of
from meshwright.ledger.pipeline_graph import graph_of
from tests.doctor import job_maker

COPIES, STAGES, BATCHES, STEPS = 2, 4, 8, 3
TIME = {"forward": 0.1, "backward": 0.2}


def usual(copy: int, stage: int, step: int, batch: int, kind: str) -> float:
    return TIME[kind]


def slow_worker(copy: int, stage: int, step: int, batch: int, kind: str) -> float:
    return TIME[kind] * (2.0 if (copy, stage) == (1, 2) else 1.0)


def slow_last_stage(copy: int, stage: int, step: int, batch: int, kind: str) -> float:
    return TIME[kind] * (1.8 if stage == STAGES - 1 else 1.0)


def sequences(copy: int, stage: int, step: int, batch: int, kind: str) -> float:
    return TIME[kind] * random.Random(f"{copy} {step} {batch}").choice((0.3, 0.5, 1.0, 2.5))


def found(folder: Path, seconds: job_maker.Seconds) -> Finding:
    table = job_maker.rows(COPIES, STAGES, BATCHES, STEPS, seconds)
    return judge(read_incident(job_maker.write(folder / "x.parquet", table)))[0]


def test_the_recorded_step_comes_out_again(tmp_path: Path) -> None:
    for n, seconds in enumerate((usual, slow_worker, slow_last_stage, sequences)):
        table = job_maker.rows(COPIES, STAGES, BATCHES, STEPS, seconds)
        job = read_incident(job_maker.write(tmp_path / f"{n}.parquet", table)).jobs[0]
        loss = loss_of(job)
        assert loss.step_s == pytest.approx(loss.recorded_s, rel=0.01)


def test_chunks_of_virtual_stages_find_their_partners(tmp_path: Path) -> None:
    for n, seconds in enumerate((usual, slow_worker)):
        table = job_maker.rows(COPIES, STAGES, BATCHES, STEPS, seconds, chunks=2)
        job = read_incident(job_maker.write(tmp_path / f"{n}.parquet", table)).jobs[0]
        graph = graph_of(job.ops)
        sizes = [len(places) for places in graph.meetings]
        assert sizes.count(2) == 2 * 7 * BATCHES, "every hand-off between the eight chunks, both ways"
        loss = loss_of(job)
        assert loss.step_s == pytest.approx(loss.recorded_s, rel=0.02)
    assert (loss.workers, loss.workers_share > 0.85) == ((20,), True)


def test_slow_worker(tmp_path: Path) -> None:
    finding = found(tmp_path, slow_worker)
    numbers = dict(finding.numbers)
    assert (finding.kind, finding.guilty_ranks, finding.confidence) == ("compute_straggler", (20,), "high")
    assert numbers["share_of_worst_workers"] > 0.85
    assert "2x as long as its peers" in finding.headline


def test_two_slow_workers_are_both_named(tmp_path: Path) -> None:
    def two(copy: int, stage: int, step: int, batch: int, kind: str) -> float:
        return TIME[kind] * (1.7 if (copy, stage) in ((1, 2), (3, 0)) else 1.0)

    table = job_maker.rows(4, STAGES, BATCHES, STEPS, two)
    finding = judge(read_incident(job_maker.write(tmp_path / "x.parquet", table)))[0]
    assert (finding.kind, set(finding.guilty_ranks)) == ("compute_straggler", {20, 12})
    assert "ranks 12 and 20 compute up to 1.7x as long" in finding.headline


@pytest.mark.parametrize(
    ("kind", "guilty", "slow"), [("sequence_imbalance", set(), None), ("compute_straggler", {4}, 1)]
)
def test_without_a_pipeline_no_stage_is_blamed(tmp_path: Path, kind: str, guilty: set[int], slow: int | None) -> None:
    def took(copy: int, stage: int, step: int, batch: int, kind: str) -> float:
        return (
            TIME[kind] * (2.0 if copy == slow else 1.0) if slow is not None else sequences(copy, 0, step, batch, kind)
        )

    findings = judge(read_incident(job_maker.write(tmp_path / "x.parquet", job_maker.rows(4, 1, BATCHES, 3, took))))
    assert (findings[0].kind, set(findings[0].guilty_ranks)) == (kind, guilty)
    assert all(f.kind != "stage_imbalance" for f in findings)


def test_slow_last_stage(tmp_path: Path) -> None:
    finding = found(tmp_path, slow_last_stage)
    assert (finding.kind, finding.guilty_ranks) == ("stage_imbalance", (24, 28))
    assert dict(finding.numbers)["share_of_last_stage"] > 0.8


def test_unequal_sequences(tmp_path: Path) -> None:
    finding = found(tmp_path, sequences)
    assert finding.kind == "sequence_imbalance"


@pytest.mark.parametrize("lower", [0, 1, 2])
def test_a_slow_link_between_two_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lower: int) -> None:
    """Hand-offs of one pair take a hundred times as long; the workers at its ends compute like the others."""
    monkeypatch.setitem(job_maker.SLOW_LINKS, (1, lower), 100.0)
    finding = found(tmp_path, usual)
    assert (finding.kind, finding.guilty_ranks) == ("slow_link", (8 * lower + 4, 8 * lower + 12))
    assert "x as long as others" in finding.headline


def test_equal_work_is_healthy(tmp_path: Path) -> None:
    finding = found(tmp_path, usual)
    assert finding.kind == "healthy"
    assert dict(finding.numbers)["slowdown"] == pytest.approx(1.0, abs=0.03)


def test_a_table_of_something_else_is_said(tmp_path: Path) -> None:
    import polars as pl

    pl.DataFrame({"a": [1, 2]}).write_parquet(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1" + bytes(200) + b"PAR1")
    incident = read_incident(tmp_path)
    assert not incident.jobs
    assert any("without dp_rank" in line for line in incident.lacks)
    assert any("not a readable parquet table" in line for line in incident.lacks)

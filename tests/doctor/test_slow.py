"""Every kind of slowness from traces made for it: the kind, the ranks, and the amounts that were put in."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.doctor.findings import Finding
from meshwright.doctor.judge import judge
from meshwright.doctor.readers.walk import read_incident
from tests.doctor.trace_maker import TraceMaker

MIB = 1 << 18  # elements of 4 bytes
WITHIN = 0.1


def found(maker: TraceMaker, folder: Path) -> Finding:
    return judge(read_incident(maker.write(folder)))[0]


def number(finding: Finding, name: str) -> float:
    return dict(finding.numbers)[name]


def step(m: TraceMaker, r: int, factor: float = 1.0) -> None:
    m.work(r, "forward", 0.010 * factor)
    m.work(r, "backward", 0.020 * factor)


def finish(m: TraceMaker, elements: int = MIB, transfer: float = 0.001) -> None:
    m.meet("all_reduce", elements, transfer)
    for r in m.ranks:
        m.work(r, "optimizer", 0.002)
    m.end()


@pytest.mark.parametrize("device", [True, False])
def test_data_stall_of_one_rank(tmp_path: Path, device: bool) -> None:
    m = TraceMaker(4, device=device)
    for _ in range(4):
        m.begin()
        for r in m.ranks:
            m.data(r, 0.142 if r == 1 else 0.0005)
            step(m, r)
        finish(m)
    finding = found(m, tmp_path)
    assert (finding.kind, finding.guilty_ranks, finding.confidence) == ("input_bound", (1,), "high")
    assert number(finding, "own_s") == pytest.approx(0.142, rel=WITHIN)
    assert number(finding, "wait_s") == pytest.approx(0.1415, rel=WITHIN)
    assert number(finding, "step_without_s") == pytest.approx(0.0335, rel=WITHIN)
    assert "True transfer 1" in finding.headline


def test_data_stall_of_all_ranks(tmp_path: Path) -> None:
    m = TraceMaker(2)
    for _ in range(4):
        m.begin()
        for r in m.ranks:
            m.data(r, 0.050)
            step(m, r)
        finish(m)
    finding = found(m, tmp_path)
    assert (finding.kind, finding.guilty_ranks) == ("input_bound", (0, 1))
    assert number(finding, "own_s") == pytest.approx(0.05, rel=WITHIN)


def test_slow_clocks_are_told_from_more_work(tmp_path: Path) -> None:
    for name, pieces, kind in (("same", 6, "throttled"), ("more", 9, "compute_straggler")):
        m = TraceMaker(4)
        for _ in range(4):
            m.begin()
            for r in m.ranks:
                slow = r == 2
                m.work(r, "forward", 0.010 * (1.5 if slow else 1), pieces if slow else 6)
                m.work(r, "backward", 0.020 * (1.5 if slow else 1), pieces if slow else 6)
            finish(m)
        finding = found(m, tmp_path / name)
        assert (finding.kind, finding.guilty_ranks) == (kind, (2,))
        assert number(finding, "excess_s") == pytest.approx(0.015, rel=WITHIN)
        assert number(finding, "step_without_s") == pytest.approx(0.033, rel=WITHIN)


def test_compute_straggler_on_cpu(tmp_path: Path) -> None:
    m = TraceMaker(2, device=False)
    for _ in range(4):
        m.begin()
        for r in m.ranks:
            step(m, r, 1.8 if r == 0 else 1.0)
        finish(m)
    finding = found(m, tmp_path)
    assert (finding.kind, finding.guilty_ranks, finding.waiting_ranks) == ("compute_straggler", (0,), (1,))
    assert number(finding, "excess_s") == pytest.approx(0.024, rel=WITHIN)


def test_clocks_that_differ_are_set(tmp_path: Path) -> None:
    m = TraceMaker(3, clocks=(0.0, 5.0, 3.0))
    for _ in range(5):
        m.begin()
        for r in m.ranks:
            m.data(r, 0.06 if r == 2 else 0.0005)
            step(m, r)
        finish(m)
    finding = found(m, tmp_path)
    assert (finding.kind, finding.guilty_ranks) == ("input_bound", (2,))
    assert number(finding, "wait_s") == pytest.approx(0.0595, rel=WITHIN)


def test_bandwidth_bound(tmp_path: Path) -> None:
    m = TraceMaker(4)
    for _ in range(3):
        m.begin()
        for r in m.ranks:
            step(m, r)
        finish(m, 256 * MIB, 0.030)
    finding = found(m, tmp_path)
    assert finding.kind == "bandwidth_bound_comm"
    assert number(finding, "exposed_transfer_s") == pytest.approx(0.030, rel=WITHIN)
    wire = 2 * 3 / 4 * (256 << 20)
    assert number(finding, "bus_bytes_s") == pytest.approx(wire / 0.030, rel=WITHIN)
    assert "of the peak of nvlink4" in finding.headline


def test_hidden_transfer_costs_nothing(tmp_path: Path) -> None:
    m = TraceMaker(2)
    for _ in range(3):
        m.begin()
        for r in m.ranks:
            m.work(r, "forward", 0.01)
        m.meet("all_gather", 256 * MIB, 0.009, hidden=True)
        for r in m.ranks:
            m.work(r, "backward", 0.02)
        finish(m, MIB, 0.0005)
    finding = found(m, tmp_path)
    assert finding.kind == "healthy"
    assert number(finding, "exposed_transfer_s") == pytest.approx(0.0005, rel=0.2)


def test_tiny_buckets(tmp_path: Path) -> None:
    m = TraceMaker(2)
    for _ in range(3):
        m.begin()
        for r in m.ranks:
            step(m, r)
        for _ in range(100):
            m.meet("all_reduce", 1024, 0.0002)
        finish(m, 1024, 0.0002)
    finding = found(m, tmp_path)
    assert finding.kind == "tiny_buckets"
    assert number(finding, "exposed_transfer_s") == pytest.approx(0.0202, rel=WITHIN)
    assert number(finding, "step_without_s") == pytest.approx(0.0322, rel=WITHIN)


def test_latency_bound(tmp_path: Path) -> None:
    m = TraceMaker(2)
    for _ in range(3):
        m.begin()
        for _ in range(20):
            for r in m.ranks:
                m.work(r, "forward", 0.0005, 1)
            m.meet("all_reduce", 4096, 0.0002)
        m.end()
    finding = found(m, tmp_path)
    assert finding.kind == "latency_bound_comm"
    assert number(finding, "exposed_transfer_s") == pytest.approx(0.004, rel=WITHIN)


@pytest.mark.parametrize("device", [True, False])
def test_collections_on_changing_ranks(tmp_path: Path, device: bool) -> None:
    m = TraceMaker(4, device=device)
    for n in range(6):
        m.begin()
        for r in m.ranks:
            if r == n % 4:
                m.host(r, "Python GC", 0.024, "python_function")
            step(m, r)
        finish(m)
    finding = found(m, tmp_path)
    assert finding.kind == "gc_pauses"
    assert number(finding, "wait_s") == pytest.approx(0.024, rel=WITHIN)


def test_synchronization_in_the_loop(tmp_path: Path) -> None:
    m = TraceMaker(1)
    for _ in range(4):
        m.begin()
        for _ in range(10):
            m.work(0, "forward", 0.002)
            m.host(0, "cudaStreamSynchronize", 0.0001, "cuda_runtime")
            m.nothing(0, 0.0009)
        m.end()
    finding = found(m, tmp_path)
    assert finding.kind == "sync_bound"
    assert number(finding, "own_s") == pytest.approx(0.010, rel=WITHIN)


def test_launch_bound(tmp_path: Path) -> None:
    m = TraceMaker(1)
    for _ in range(4):
        m.begin()
        m.work(0, "forward", 0.004, 200, gap=30e-6)
        m.work(0, "backward", 0.006, 200, gap=30e-6)
        m.end()
    finding = found(m, tmp_path)
    assert finding.kind == "launch_bound"
    assert number(finding, "own_s") == pytest.approx(0.012, rel=WITHIN)


def test_barriers_in_the_loop(tmp_path: Path) -> None:
    m = TraceMaker(2, device=False)
    for _ in range(4):
        m.begin()
        for _ in range(10):
            for r in m.ranks:
                m.work(r, "forward", 0.002)
            m.meet("barrier", 1, 0.0008)
        m.end()
    finding = found(m, tmp_path)
    assert finding.kind == "sync_bound"
    assert number(finding, "own_s") == pytest.approx(0.008, rel=WITHIN)


def test_unequal_stages(tmp_path: Path) -> None:
    m = TraceMaker(2, device=False)
    for _ in range(3):
        m.begin()
        for _ in range(4):
            m.work(0, "forward", 0.005)
            m.hand_off(0, 1, MIB, 0.0002)
            m.work(1, "forward", 0.015)
        for _ in range(4):
            m.work(1, "backward", 0.030)
            m.hand_off(1, 0, MIB, 0.0002)
            m.work(0, "backward", 0.010)
        finish(m)
    finding = found(m, tmp_path)
    assert (finding.kind, finding.guilty_ranks) == ("stage_imbalance", (1,))
    assert number(finding, "excess_s") == pytest.approx(4 * 0.030, rel=WITHIN)
    assert number(finding, "step_without_s") < 0.8 * number(finding, "step_s")
    assert any(
        "pipeline of 2 stages and 8 micro-batches" in line or "pipeline of 2 stages and 4" in line
        for line in finding.evidence
    )


def test_unequal_experts(tmp_path: Path) -> None:
    m = TraceMaker(4)
    for _ in range(3):
        m.begin()
        for _ in range(4):
            m.meet("all_to_all", MIB, 0.0003)
            for r in m.ranks:
                m.work(r, "forward", 0.006 if r == 3 else 0.002)
            m.meet("all_to_all", MIB, 0.0003)
        m.end()
    finding = found(m, tmp_path)
    assert (finding.kind, finding.guilty_ranks) == ("expert_imbalance", (3,))
    assert number(finding, "wait_s") == pytest.approx(4 * 0.004, rel=WITHIN)


def test_unequal_sequences(tmp_path: Path) -> None:
    m = TraceMaker(4)
    for n in range(8):
        m.begin()
        for r in m.ranks:
            step(m, r, 1.6 if r == (3 * n) % 4 else 1.0)
        finish(m)
    finding = found(m, tmp_path)
    assert finding.kind == "sequence_imbalance"
    assert number(finding, "wait_s") == pytest.approx(0.018, rel=WITHIN)


def test_slow_link(tmp_path: Path) -> None:
    m = TraceMaker(4)
    for _ in range(4):
        m.begin()
        for r in m.ranks:
            step(m, r)
        m.meet("all_reduce", 4 * MIB, 0.0005, (0, 1))
        m.meet("all_reduce", 4 * MIB, 0.0025, (2, 3))
        for r in m.ranks:
            m.work(r, "optimizer", 0.002)
        m.end()
    kinds = {f.kind: f for f in judge(read_incident(m.write(tmp_path)))}
    assert kinds["slow_link"].guilty_ranks == (2, 3)
    assert number(kinds["slow_link"], "share") == pytest.approx(0.2, rel=WITHIN)


@pytest.mark.parametrize("device", [True, False])
def test_healthy(tmp_path: Path, device: bool) -> None:
    m = TraceMaker(4, device=device)
    for _ in range(4):
        m.begin()
        for r in m.ranks:
            m.data(r, 0.0003)
            step(m, r, 1 + 0.005 * r)
        finish(m)
    finding = found(m, tmp_path)
    assert (finding.kind, finding.confidence) == ("healthy", "high")


def test_one_rank_of_many_cannot_tell_waiting_from_transfer(tmp_path: Path) -> None:
    m = TraceMaker(1, world=8)
    for _ in range(3):
        m.begin()
        step(m, 0)
        finish(m, MIB, 0.030)
    finding = found(m, tmp_path)
    assert (finding.kind, finding.confidence) == ("unknown", "low")
    assert any("7 of 8 ranks" in line for line in finding.unknown)

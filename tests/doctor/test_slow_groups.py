"""Slowness in jobs with several groups a rank: it is told through the groups that it passes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from meshwright.doctor.findings import Finding
from meshwright.doctor.judge import judge
from meshwright.doctor.readers.walk import read_incident
from tests.doctor.trace_maker import TraceMaker

TENSOR = ((0, 1, 2, 3), (4, 5, 6, 7))


def made(folder: Path, maker: TraceMaker) -> list[Finding]:
    return judge(read_incident(maker.write(folder)))


def both(data: Sequence[int] = (), slow: int = -1, link: int = -1, transfer_s: float = 1e-3) -> TraceMaker:
    """Tensor parallel in two groups of four, data parallel in four pairs across them."""
    m = TraceMaker(8)
    for _ in range(4):
        m.begin()
        for r in data:
            m.data(r, 0.05)
        for phase, seconds in (("forward", 0.005), ("backward", 0.01)):
            for _ in range(4):
                for r in m.ranks:
                    m.work(r, phase, seconds * (1.5 if r == slow else 1.0))
                for group in TENSOR:
                    m.meet("all_reduce", 1 << 20, 1e-4, group)
        for n in range(4):
            m.meet("reduce_scatter", 1 << 24, transfer_s * (8 if n == link else 1), (n, n + 4))
        for r in m.ranks:
            m.work(r, "optimizer", 0.005)
        m.end()
    return m


@pytest.mark.parametrize("data", [(6,), (4, 5, 6, 7), tuple(range(8))])
def test_who_waits_for_data(tmp_path: Path, data: tuple[int, ...]) -> None:
    """A whole tensor parallel group is late together: nobody waits in it, only its partners of other groups do."""
    finding = made(tmp_path, both(data=data))[0]
    assert (finding.kind, finding.guilty_ranks) == ("input_bound", data)
    assert dict(finding.numbers)["own_s"] == pytest.approx(0.05, rel=0.1)
    assert dict(finding.numbers)["step_without_s"] == pytest.approx(0.067, rel=0.1)


def test_a_slow_device(tmp_path: Path) -> None:
    finding = made(tmp_path, both(slow=5))[0]
    assert (finding.kind, finding.guilty_ranks) == ("throttled", (5,))


@pytest.mark.parametrize("transfer_s", [1e-3, 4e-3])
def test_a_slow_pair(tmp_path: Path, transfer_s: float) -> None:
    """It comes before what all pairs take."""
    finding = made(tmp_path, both(link=2, transfer_s=transfer_s))[0]
    assert (finding.kind, finding.guilty_ranks) == ("slow_link", (2, 6))


def test_nothing(tmp_path: Path) -> None:
    assert made(tmp_path, both())[0].kind == "healthy"


def test_tiny_pieces_of_parameters_and_gradients(tmp_path: Path) -> None:
    """Fully sharded: as many small gathers before the backward pass as reductions in it."""
    m = TraceMaker(8)
    for _ in range(3):
        m.begin()
        for phase, op, seconds in (("forward", "all_gather", 0.002), ("backward", "reduce_scatter", 0.004)):
            for _ in range(40):
                for r in m.ranks:
                    m.work(r, phase, seconds)
                m.meet(op, 1 << 10, 4e-4)
        m.end()
    finding = made(tmp_path, m)[0]
    assert (finding.kind, finding.op) == ("tiny_buckets", "reduce_scatter")


@pytest.mark.parametrize("device", [True, False])
def test_ranks_that_take_turns_at_long_sequences(tmp_path: Path, device: bool) -> None:
    """Over all steps they compute about equally long; each step waits for another."""
    m = TraceMaker(4, device=device)
    for n in range(6):
        m.begin()
        for r in m.ranks:
            factor = random.Random(f"{n} {r}").choice((0.5, 1, 1, 2.2))
            m.work(r, "forward", 0.02 * factor)
            m.work(r, "backward", 0.04 * factor)
        m.meet("all_reduce", 1 << 22, 0.001)
        for r in m.ranks:
            m.work(r, "optimizer", 0.005)
        m.end()
    assert made(tmp_path, m)[0].kind == "sequence_imbalance"

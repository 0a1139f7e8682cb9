"""Slowness of real processes on gloo, recorded by torch.profiler: the kind, the ranks, and the amounts put in."""

from __future__ import annotations

import json
import random
import shutil
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshwright.doctor.findings import Finding
from meshwright.doctor.judge import judge
from meshwright.doctor.readers.walk import read_incident
from meshwright.runtime.launch.local import run_local

from .live import slow_programs as cases
from .live.slow_programs import EXPECTED, run_cases

#: Run in ``make test``.
SAMPLE = ("data_stall", "stages", "healthy")
RANKS = 2
WITHIN = 0.1
#: Of a step without what was put in: what a busy machine adds to the rest of it is in it as well.
WITHOUT_WITHIN = 0.25
#: A step without anything put in: its plain work.
PLAIN_S = cases.FORWARD_S + cases.BACKWARD_S + cases.OPTIMIZER_S
#: The numbers of the finding that together tell how many seconds were put in, and how many that are; None: what the
#: ranks measured themselves, of transfers and of a collection. Small all_reduces wait a little for each other.
AMOUNTS: dict[str, tuple[tuple[str, ...], float | None]] = {
    "data_stall": (("own_s",), cases.STALL_S),
    "straggler": (("excess_s",), cases.MORE_S),
    "communication": (("exposed_transfer_s",), None),
    "tiny_buckets": (("exposed_transfer_s", "wait_s"), None),
    "gc_pause": (("own_s",), None),
    "host_sync": (("own_s",), cases.SYNC_S),
    "stages": (("excess_s",), 2 * cases.MICRO_BATCHES * cases.STAGE_S),
    "experts": (("excess_s",), cases.EXPERT_S),
    "healthy": (("compute_s",), PLAIN_S),
}
#: Collectives of a step and bytes of each, exact.
SENT = {
    "communication": (cases.LARGE, 4 * cases.LARGE_ELEMENTS),
    "tiny_buckets": (cases.TINY, 4 * cases.TINY_ELEMENTS),
}
#: A step without what was put in: its plain work.
WITHOUT = ("data_stall", "straggler", "gc_pause", "host_sync", "experts")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slow")


@cache
def _ran(scratch: Path, names: tuple[str, ...]) -> Path:
    folder = scratch / str(len(names))
    folder.mkdir()
    run_local(run_cases, RANKS, (str(folder), names), 300)
    return folder


def _found(left: Path, name: str, target: Path) -> tuple[Finding, float]:
    """The first finding, from traces under random names; and what the ranks measured, the most of any."""
    target.mkdir()
    words = random.Random(name).sample(range(10**6, 10**7), RANKS)
    for rank, word in enumerate(words):
        shutil.copy(left / name / f"{rank}.pt.trace.json", target / f"{word}.json")
    spent = [json.loads((left / name / f"seconds_{rank}.json").read_text()) for rank in range(RANKS)]
    incident = read_incident(target)
    assert len(incident.tracks) == RANKS, incident.lacks
    return judge(incident)[0], max(spent)


def _check(finding: Finding, name: str, spent: float) -> None:
    kind, guilty = EXPECTED[name]
    assert (finding.kind, set(finding.guilty_ranks)) == (kind, guilty), finding.headline
    numbers = dict(finding.numbers)
    keys, amount = AMOUNTS[name]
    told = sum(numbers[key] for key in keys)
    assert told == pytest.approx(spent if amount is None else amount, rel=WITHIN), finding.headline
    if name == "gc_pause":
        assert spent > cases.PAUSE_S
    if name in SENT:
        assert (numbers["per_step"], numbers["payload_bytes"]) == SENT[name]
    if name in WITHOUT:
        assert numbers["step_without_s"] == pytest.approx(PLAIN_S, rel=WITHOUT_WITHIN), finding.headline


@pytest.mark.parametrize("name", SAMPLE)
def test_right_answer_of_a_real_slow_step(scratch: Path, tmp_path: Path, name: str) -> None:
    finding, spent = _found(_ran(scratch, SAMPLE), name, tmp_path / "in")
    _check(finding, name, spent)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_real_slow_steps(scratch: Path, tmp_path: Path) -> None:
    """Nine of nine."""
    left = _ran(scratch, tuple(EXPECTED))
    for name in EXPECTED:
        finding, spent = _found(left, name, tmp_path / name)
        _check(finding, name, spent)

"""The labelled incidents: right answers from the dumps alone, whatever their names, order and completeness."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import pytest

from meshwright.doctor.findings import Finding
from meshwright.doctor.hang import diagnose
from meshwright.doctor.incident import Incident
from meshwright.doctor.readers import flight_recorder
from tests.shared import shared_dir

from .fr_mistakes import source

ANSWERS = {
    "fr_synth_nccl/tutorial": ("extra_call", {0}, "crash.py:30"),
    "fr_synth_nccl/skip_varying_8x400": ("skipped_call", {3}, "model.py:109"),
    "fr_nvrx/gpu_error_2nd": ("device_stuck", {9, 14}, None),
    "fr_nvrx/lock_gil_1st": ("host_stuck", {9, 14}, None),
}


def _dumps(name: str) -> dict[int, bytes]:
    """Only the dumps: the log of the injection beside them is no evidence."""
    folder: Path = shared_dir("incidents", name)
    found = {p: p.name.rpartition("_")[2] for p in folder.iterdir() if p.suffix != ".log"}
    return {int(rank): path.read_bytes() for path, rank in found.items() if rank.isdecimal()}


def _findings(dumps: dict[int, bytes], chance: random.Random, last: bool = True) -> list[Finding]:
    """Findings from dumps under random names, which end in the rank or do not."""
    sources = []
    for rank, data in dumps.items():
        stem = "".join(chance.choice("ghijklmn") for _ in range(8))
        sources.append(source(f"{stem}_{rank}" if last else stem, data))
    chance.shuffle(sources)
    incident = Incident()
    flight_recorder.read_many(sources, incident)
    return diagnose(incident)


def _is_honest(findings: list[Finding], guilty: set[int]) -> bool:
    return not any(f.confidence == "high" and set(f.guilty_ranks) - guilty for f in findings)


@pytest.mark.parametrize("name", ANSWERS)
def test_right_answer_whatever_the_order_of_files(name: str) -> None:
    kind, guilty, where = ANSWERS[name]
    dumps, chance = _dumps(name), random.Random(1)
    texts = set()
    for _ in range(20):
        found = _findings(dumps, chance)[0]
        assert (found.kind, set(found.guilty_ranks), found.call_site) == (kind, guilty, where)
        assert not set(found.waiting_ranks) & guilty
        texts.add(found.headline)
    assert len(texts) == 1


@pytest.mark.parametrize("name", [n for n in ANSWERS if "tutorial" not in n])
def test_ranks_come_from_the_content(name: str) -> None:
    kind, guilty, _ = ANSWERS[name]
    found = _findings(_dumps(name), random.Random(2), last=False)[0]
    assert (found.kind, set(found.guilty_ranks)) == (kind, guilty)


def test_two_dumps_that_say_no_rank_blame_none() -> None:
    found = _findings(_dumps("fr_synth_nccl/tutorial"), random.Random(2), last=False)[0]
    assert (found.kind, found.guilty_ranks, found.confidence) == ("extra_call", (), "low")


@pytest.mark.parametrize("name", ANSWERS)
def test_removed_dumps_and_wrapped_rings_never_mislead(name: str) -> None:
    kind, guilty, _ = ANSWERS[name]
    dumps, chance = _dumps(name), random.Random(3)
    for gone in dumps:
        findings = _findings({r: d for r, d in dumps.items() if r != gone}, chance)
        assert _is_honest(findings, guilty), (gone, findings[0].headline)
        if gone not in guilty and len(dumps) > 2:
            assert (findings[0].kind, set(findings[0].guilty_ranks)) == (kind, guilty), gone
    for _ in range(12):
        half = chance.sample(sorted(dumps), len(dumps) // 2)
        assert _is_honest(_findings({r: dumps[r] for r in half}, chance), guilty), half
    for ring in (2, 30, 100):
        cut = {}
        for rank, data in dumps.items():
            plain = pickle.loads(data)
            cut[rank] = pickle.dumps({**plain, "entries": plain["entries"][-ring:]}, protocol=2)
        assert _is_honest(_findings(cut, chance), guilty), ring

"""The published layouts of the dry-run bench: what the result file says, and all of them again where time allows."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from bench.dryrun import CASES, NODE, RESULTS, Case, held_bytes, spent

from meshwright.prove.dry import dry_run
from meshwright.specs.atlas.models import find


def test_the_result_file_holds_equal_ledgers_of_at_least_eight_models() -> None:
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    assert all(row["equal"] for row in rows)
    assert len({row["model"] for row in rows if row["source"] != NODE}) >= 8
    known = {(case.model, case.layout) for case in CASES}
    assert {(row["model"], row["layout"]) for row in rows} <= known


def test_every_case_is_a_model_of_the_atlas() -> None:
    assert all(find(case.model) is not None for case in CASES)


def test_memory_and_time_of_a_process_are_seen() -> None:
    import os

    assert held_bytes(os.getpid()) > 1 << 20
    assert spent(os.getpid())[os.getpid()] > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model} {case.layout}")
def test_dry_runs_equal_their_predictions(case: Case) -> None:
    proof = dry_run(case.model, case.layout, timeout_s=600)
    assert proof.proven, proof.first

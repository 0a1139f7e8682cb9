"""Micro-batches in flight: stages work at the same time, and the bubble is (p - 1) / (m + p - 1)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.runtime.generate import Generation
from meshwright.runtime.job import GenerateJob, run_job
from meshwright.runtime.launch.local import run_local
from meshwright.runtime.models.decoder import Decoder
from tests.runtime import tiny

#: What a pass of one stage is made to take, so that the machine's load hardly matters: sleeping needs no core.
PASS_S = 0.15


def _slow_stages(rank: int, job: GenerateJob) -> Generation:
    honest = Decoder.stage

    def slow(self: Decoder, *args: Any) -> Any:
        time.sleep(PASS_S)
        return honest(self, *args)

    Decoder.stage = slow  # type: ignore[method-assign]
    return run_job(rank, job)


@pytest.mark.parametrize(("micro_batches", "new"), [(1, 1), (2, 1), (4, 1), (2, 4)])
def test_stages_overlap(checkpoint: Callable[[str], Path], micro_batches: int, new: int) -> None:
    job = tiny.job(checkpoint("llama"), "pp=2", new=new, micro_batches=micro_batches)
    total_s = run_local(_slow_stages, 2, (job,), 60)[1].total_s
    passes = micro_batches * new + 1  # p - 1 = 1 pass of waiting, once: decode steps follow without a gap
    assert passes * PASS_S <= total_s < (passes + 2) * PASS_S, total_s / PASS_S

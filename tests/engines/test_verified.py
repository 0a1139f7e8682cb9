"""What an engine's configuration cannot state is refused or said, never changed on the way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.engines.accelerate import ENGINE as ACCELERATE
from meshwright.engines.base import Engine
from meshwright.engines.deepspeed import ENGINE as DEEPSPEED
from meshwright.engines.torchrun import ENGINE as TORCHRUN
from meshwright.engines.transformers import ENGINE as TRANSFORMERS
from meshwright.engines.verified import verified, words_of
from meshwright.errors import InputError
from meshwright.specs.layout import Fsdp, Layout
from meshwright.specs.workload import Train
from tests.engines.training import request
from tests.specs.clusters import cluster

WORK = Train(seq=1024, global_batch=8, recompute="full")


@pytest.mark.parametrize(
    ("engine", "layout", "names"),
    [
        (DEEPSPEED, Layout(dp=8, zero=3, fsdp=Fsdp(reshard_after_forward=False)), "reshard_after_forward False"),
        (DEEPSPEED, Layout(dp=8, zero=3, fsdp=Fsdp(wrap="model")), "wrap model"),
        (DEEPSPEED, Layout(tp=2, dp=4, sp=True), "sp True"),
        (ACCELERATE, Layout(dp=8, dcp=2), "dcp 2"),
        (ACCELERATE, Layout(dp=8, zero=3, virtual=2, schedule="interleaved"), "schedule interleaved"),
        (TRANSFORMERS, Layout(dp=8, zero=3, fsdp=Fsdp(reshard_after_forward=False)), "reshard_after_forward False"),
        (TRANSFORMERS, Layout(dp=8, etp=2, zero=3), "etp 2"),
        (TORCHRUN, Layout(dp=8, schedule="gpipe"), "schedule gpipe"),
    ],
)
def test_layouts_that_cannot_be_stated(engine: Engine, layout: Layout, names: str) -> None:
    with pytest.raises(InputError, match=names) as error:
        engine.emit(request("m", layout, cluster(1, 8), WORK))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("engine", [ACCELERATE, TRANSFORMERS])
def test_selective_recompute_is_not_the_trainers(engine: Engine) -> None:
    with pytest.raises(InputError, match="recompute selective"):
        engine.emit(request("m", Layout(dp=8, zero=3), cluster(1, 8), replace(WORK, recompute="selective")))


@pytest.mark.parametrize("engine", [DEEPSPEED, ACCELERATE, TRANSFORMERS])
def test_the_plans_default_workload_can_be_started(engine: Engine) -> None:
    for work in (Train(global_batch=256), Train(global_batch=256, seq=8192, recompute="full")):
        emission = engine.emit(request("m", Layout(dp=16, zero=3), cluster(2, 8), work))
        assert emission.notes == () or "asked" not in emission.notes[-1]


def test_other_precision_is_said() -> None:
    emission = TORCHRUN.emit(request("m", Layout(dp=8), cluster(1, 8), replace(WORK, param_dtype="bf16")))
    assert "param_dtype f32 (asked: bf16)" in emission.notes[-1]


def test_a_changed_file_is_found() -> None:
    asked = request("m", Layout(tp=2, dp=4, zero=1), cluster(1, 8), WORK)
    good = DEEPSPEED.emit(asked)
    assert words_of(good)[:2] == ["deepspeed", "--num_gpus"]
    bad = replace(good.files[0], text=good.files[0].text.replace('"stage": 1', '"stage": 2'))
    with pytest.raises(InputError, match="zero 1"):
        verified(DEEPSPEED, asked, replace(good, files=(bad,)))

"""Predicted steps and memory over columns equal the predictions row by row, layout by layout, to 1e-9."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from meshwright.plan.search.columns import MODES, SCHEDULES, Columns
from meshwright.plan.search.data import DataSeconds
from meshwright.plan.search.evaluate import Coster
from meshwright.plan.search.space import RELIEVED
from meshwright.plan.train_engine import TrainEngine, engine_preset
from meshwright.plan.train_memory import train_memory
from meshwright.plan.training_time import training_time
from meshwright.specs.cluster import Driver, MeasuredShare, parse_cluster
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import place
from meshwright.specs.workload import Train
from tests.plan.search.spaces import DENSE, MIXTURE, TIED, coster, sample

ENGINES = [
    (DENSE, "meshwright", "4x8xH100-SXM@ib-400g"),
    (TIED, "meshwright", "2x4xA100-SXM-40GB"),
    (MIXTURE, "meshwright", "4x8xH100-SXM@ib-400g"),
    (MIXTURE, "megatron", "8x8xH100-SXM@ib-400g"),
    (MIXTURE, "torchtitan", "4x4xH200-SXM@ib-400g"),
    (TIED, "megatron", "1x8xH100-SXM"),
]


def named(value: object) -> str | None:
    return value.name if isinstance(value, ModelSpec) else value if isinstance(value, str) else None


def worst_error(c: Coster, x: Columns, rows: list[int]) -> float:
    """Largest difference of step, rate and parts from the row prediction, in shares of the step."""
    mode = np.arange(len(x)) % len(MODES)
    found = c.cost(x, mode, parts=True)
    worst = 0.0
    for i in rows:
        work = replace(c.work, recompute=MODES[mode[i]])
        placement = place(c.spec, x.layout(i), c.profile, sections=("decoder", "vision"))
        row = training_time(placement, c.cluster, work, c.engine)
        errors = [abs(found[name][i] - seconds) for name, seconds in row.parts]
        errors.append(abs(found["step_s"][i] - row.step.value))
        rate = abs(found["tokens_per_s"][i] / row.tokens_per_s - 1)
        worst = max(worst, rate, *(error / row.step.value for error in errors))
    return worst


@pytest.mark.parametrize(("spec", "engine", "on"), ENGINES, ids=named)
def test_cost_equals_the_row_prediction(spec: ModelSpec, engine: str, on: str) -> None:
    c, x = coster(spec, on, Train(seq=4096, global_batch=128), engine)
    assert worst_error(c, x, sample(x, 50)) < 1e-9


def test_cost_on_calibrated_cpu_ranks_equals_the_row_prediction() -> None:
    """Where the host is the device nothing hides its launches; what lies between products was measured."""
    work = Train(seq=512, global_batch=32, param_dtype="f32", grad_dtype="f32")
    c, x = coster(TIED, "1x8xH100-SXM", work, "meshwright")
    shares = (MeasuredShare("dense", "bf16", 0.6, 0.8), MeasuredShare("passes", "f32", 0.15, 1.0))
    for kind in ("cpu", "gpu"):
        device = replace(c.cluster.device, kind=kind, measured=shares, driver=Driver(6e-6, 1e-4, 4e-4, 8e-5))
        c = Coster(c.spec, c.profile, replace(c.cluster, device=device), work, TrainEngine())
        assert worst_error(c, x, sample(x, 20)) < 1e-9
    placement = place(c.spec, Layout(), c.profile, sections=("decoder", "vision"))
    on_cpu = replace(c.cluster, device=replace(c.cluster.device, kind="cpu"))
    seconds = {
        kind: dict(training_time(placement, on, work).parts) for kind, on in (("cpu", on_cpu), ("gpu", c.cluster))
    }
    assert seconds["cpu"]["launch"] > 2 * seconds["gpu"]["launch"] > 0
    assert seconds["cpu"]["elementwise"] == seconds["gpu"]["elementwise"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("spec", "engine", "on"), ENGINES, ids=named)
def test_cost_of_ten_thousand_layouts_equals_the_row_prediction(spec: ModelSpec, engine: str, on: str) -> None:
    c, x = coster(spec, on, Train(seq=4096, global_batch=128), engine)
    assert worst_error(c, x, sample(x, 2000, seed=1)) < 1e-9


@pytest.mark.parametrize("preset", ["megatron-core", "torchtitan"])
def test_cost_follows_the_software_and_the_workload(preset: str) -> None:
    """FP8 or partial recompute, unfused attention, an engine with kernels of its own, uneven shares of layers."""
    work = Train(seq=8192, global_batch=96, attention="unfused", optimizer="muon", grad_dtype="bf16")
    engine = engine_preset(preset, fp8=preset == "megatron-core")
    c, x = coster(MIXTURE, "6x4xB200-SXM@ib-400g", work, "meshwright", engine)
    assert len(set(x.pp.tolist())) > 3
    assert worst_error(c, x, sample(x, 40)) < 1e-9


def test_stages_with_lighter_ends_equal_the_row_prediction() -> None:
    c, x = coster(DENSE, "8x8xH100-SXM@ib-400g", Train(seq=4096, global_batch=128), "meshwright")
    uneven = x.take(x.split > 0)
    assert set(RELIEVED) == {SCHEDULES[i] for i in uneven.schedule}
    assert worst_error(c, uneven, sample(uneven, 40)) < 1e-9


def test_a_wrong_wire_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: gradients of parameters that are gathered twice."""
    once = DataSeconds._gather
    monkeypatch.setattr(DataSeconds, "_gather", lambda self, unit, width: 2 * once(self, unit, width))
    c, x = coster(DENSE, "2x8xH100-SXM@ib-400g", Train(seq=4096, global_batch=64), "meshwright")
    assert worst_error(c, x, sample(x, 20)) > 1e-3


def test_a_wrong_pipeline_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.plan.search.step.waits", lambda f, b, behind, after, micro: behind * 0.9)
    c, x = coster(DENSE, "2x8xH100-SXM@ib-400g", Train(seq=4096, global_batch=64), "meshwright")
    deep = x.take(x.schedule == SCHEDULES.index("interleaved"))
    assert worst_error(c, deep, sample(deep, 20)) > 1e-3


WORKS = [
    (Train(seq=4096, global_batch=128), engine_preset("torch")),
    (Train(seq=4096, global_batch=128, optimizer="muon", grad_dtype="bf16"), engine_preset("megatron-core")),
    (
        Train(seq=4096, global_batch=128, offload="optimizer", dropout=0.1, attention="unfused"),
        engine_preset("torchtitan"),
    ),
    (
        Train(seq=4096, global_batch=128, offload="activations", param_dtype="f32"),
        TrainEngine(
            receive_buffers=True, deferred_head=3, on_host=("gradients",), half_shards=True, gather_buffer=True
        ),
    ),
    (
        Train(seq=4096, global_batch=128, optimizer="sgd", fused_cross_entropy=False),
        TrainEngine(offload_modules=("core_attn",), weight_gradient_bytes=2.0, optimizer_instances=2, reserved=True),
    ),
]


@pytest.mark.parametrize("spec", [TIED, MIXTURE], ids=lambda s: s.name)
@pytest.mark.parametrize(("work", "engine"), WORKS, ids=range(len(WORKS)))
def test_memory_equals_the_row_prediction(spec: ModelSpec, work: Train, engine: TrainEngine) -> None:
    c, x = coster(spec, "2x8xH100-SXM@ib-400g", work, "meshwright", engine)
    found = c.memory(x)
    for i in sample(x, 40):
        for mode, name in enumerate(MODES):
            rows = train_memory(spec, x.layout(i), c.cluster, replace(work, recompute=name), engine, few=True).ranks
            want = max(r.total_bytes for r in rows)
            assert found[mode, i] == pytest.approx(want, rel=1e-9), (str(x.layout(i)), name)


def test_the_fullest_stage_may_be_an_inner_one() -> None:
    """Small dense layers in front: the third of 32 stages holds more experts than the first, as many layers, and more
    in flight than the last."""
    spec = read_model("deepseek-v3")
    layout, work = Layout(pp=32, dp=32, ep=8, cp=2, zero=1, schedule="zb-h1"), Train(seq=4096, global_batch=15360)
    cluster = parse_cluster("256x8xH100-SXM@ib-400g")
    few = train_memory(spec, layout, cluster, work, few=True)
    every = train_memory(spec, layout, cluster, work)
    assert few.worst.total_bytes == every.worst.total_bytes
    assert every.worst.coordinate.pp == 2


def test_no_other_stage_is_fuller() -> None:
    """What a search looks at holds the fullest rank of all stages, whatever the schedule and the mix of layers."""
    cluster, rng = parse_cluster("256x8xH100-SXM@ib-400g"), random.Random(0)
    for spec in (read_model("deepseek-v3"), MIXTURE):
        for _ in range(25):
            schedule = rng.choice(SCHEDULES)
            layout = Layout(
                pp=rng.choice([2, 4, 8, 12]),
                dp=rng.choice([2, 8, 16]),
                zero=rng.choice([0, 1, 3]),
                schedule=schedule,
                virtual=2 if schedule == "interleaved" else 1,
            )
            batch = layout.dp * rng.choice([1, 4, 16, 24])
            work = Train(seq=4096, global_batch=batch, recompute=rng.choice(MODES))
            few = train_memory(spec, layout, cluster, work, few=True).worst.total_bytes
            assert few == train_memory(spec, layout, cluster, work).worst.total_bytes, str(layout)

"""transformers: what is emitted is accepted by its tables, and reads back as the layout it came from."""

from __future__ import annotations

import json
import random

import pytest

from meshwright.engines.base import Request
from meshwright.engines.transformers import ENGINE
from meshwright.engines.transformers.config import fields
from meshwright.errors import InputError
from meshwright.specs.layout import Fsdp, Layout
from meshwright.specs.workload import Serve, Train
from tests.engines.training import back, request, world
from tests.specs.clusters import cluster


def random_request(rng: random.Random) -> Request:
    """A layout that DistributedConfig can state, with lengths and precision."""
    tp, replicas = rng.choice((1, 2, 4)), rng.choice((1, 1, 2))
    zero = rng.choice((0, 3, 3))
    dp = replicas * rng.choice((2, 4)) if zero else rng.choice((1, 2))
    if tp * dp > 8:
        dp = -(-tp * dp // 8) * 8 // tp
    mixed = rng.random() < 0.5
    knobs = Fsdp(param_dtype="bf16", reduce_dtype="f32" if mixed else "bf16", replicas=replicas)
    layout = Layout(tp=tp, dp=dp, zero=zero, micro_batch=rng.choice((1, 4)), fsdp=knobs if zero else None)
    if zero and rng.random() < 0.4:
        layout = layout.with_(ep=rng.choice((tp, dp // replicas * tp)), etp=1)
    if layout.ep == 1:
        layout = layout.with_(etp=None)
    work = Train(
        seq=rng.choice((512, 8192)),
        global_batch=dp * layout.micro_batch * rng.choice((1, 2)),
        recompute=rng.choice(("none", "full")),
        param_dtype="bf16" if zero or not mixed else "f32",
        grad_dtype="f32" if mixed else "bf16",
        master_weights=mixed,
        state_dtype="f32" if mixed else "bf16",
        fused_cross_entropy=rng.random() < 0.5,
    )
    options = {"on_host": ("parameters", "gradients", "optimizer")} if zero and rng.random() < 0.3 else {}
    return request("org/model", layout, world(rng, layout.world), work, **options)


def round_trip(count: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        asked = random_request(rng)
        emission, found = back(ENGINE, asked)
        assert [r.message for r in found.findings] == []
        assert found.layout == asked.layout
        assert found.workload == asked.workload
        assert found.model == asked.model
        assert found.train_options.get("on_host") == asked.train_options.get("on_host")
        assert set(json.loads(emission.files[0].text)) <= fields()


def test_sample_reads_back() -> None:
    round_trip(100, 1)


@pytest.mark.slow
def test_two_thousand_read_back() -> None:
    round_trip(2000, 2)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout(pp=2), "backward"),
        (Layout(cp=2, dp=4, zero=3), "context"),
        (Layout(dp=8, zero=2), "ZeRO-2"),
        (Layout(dp=2, zero=3, fsdp=Fsdp(replicas=2)), "one rank"),
        (Layout(dp=8, zero=3, fsdp=Fsdp(wrap="model")), "one unit"),
    ],
)
def test_what_cannot_be_started_is_refused(layout: Layout, says: str) -> None:
    with pytest.raises(InputError, match=says):
        ENGINE.emit(request("m", layout, cluster(1, 8), Train(global_batch=16)))


def test_serving_is_refused() -> None:
    with pytest.raises(InputError, match="serve with"):
        ENGINE.emit(Request("m", Layout(), cluster(1, 8), Serve()))


def test_muon_is_not_the_trainers() -> None:
    with pytest.raises(InputError, match="no muon"):
        ENGINE.emit(request("m", Layout(dp=8, zero=3), cluster(1, 8), Train(global_batch=8, optimizer="muon")))

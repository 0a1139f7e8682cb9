"""accelerate: what is emitted is accepted by its tables, and reads back as the layout it came from."""

from __future__ import annotations

import random

import pytest

from meshwright.engines.accelerate import ENGINE
from meshwright.engines.accelerate.settings import check_keys, load
from meshwright.engines.base import Request
from meshwright.errors import InputError
from meshwright.specs.layout import Fsdp, Layout
from meshwright.specs.workload import Serve, Train
from tests.engines.training import back, request, words_of, world
from tests.specs.clusters import cluster


def random_request(rng: random.Random) -> Request:
    """A layout that accelerate allows, with lengths and precision."""
    zero = rng.choice((0, 3, 3, 3))
    tp = rng.choice((1, 1, 2, 4))
    cp = rng.choice((1, 1, 2)) if zero else 1
    dtype = rng.choice(("bf16", "f16", "f32"))
    replicas = rng.choice((1, 1, 2)) if zero else 1
    dp = replicas * rng.choice((2, 4)) if zero else (1 if tp > 1 else rng.choice((1, 2, 8)))
    if tp * cp * dp > 8:
        dp = -(-tp * cp * dp // 8) * 8 // (tp * cp)
    knobs = Fsdp(
        wrap=rng.choice(("layer", "model")),
        reshard_after_forward=rng.random() < 0.7,
        param_dtype=dtype,
        replicas=replicas,
    )
    layout = Layout(tp=tp, cp=cp, dp=dp, zero=zero, micro_batch=rng.choice((1, 2, 5)), fsdp=knobs if zero else None)
    work = Train(
        seq=rng.choice((2048, 8192)),
        global_batch=layout.dp * layout.micro_batch * rng.choice((1, 3)),
        optimizer=rng.choice(("adamw", "sgd")),
        recompute=rng.choice(("none", "full")),
        param_dtype=dtype if zero else "f32",
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
        config = load(emission.files[0].text.encode(), "f.yaml")
        assert config is not None
        assert list(check_keys(config)) == []


def test_sample_reads_back() -> None:
    round_trip(100, 1)


@pytest.mark.slow
def test_two_thousand_read_back() -> None:
    round_trip(2000, 2)


def test_every_node_has_its_own_rank() -> None:
    asked = request("m", Layout(dp=16, zero=3, fsdp=Fsdp()), cluster(2, 8), Train(global_batch=16))
    emission = ENGINE.emit(asked)
    files = {f.path: f.text.encode() for f in emission.files}
    ranks = [ENGINE.parse(words_of(c.text), {}, files.get).node_rank for c in emission.commands]
    assert ranks == [0, 1]
    many = ENGINE.emit(request("m", Layout(dp=160, zero=3, fsdp=Fsdp()), cluster(20, 8), Train(global_batch=160)))
    assert [c.node for c in many.commands] == [0, None]


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout(pp=2, dp=4), "pipeline"),
        (Layout(ep=2, dp=8), "expert"),
        (Layout(dp=8, zero=1), "ZeRO-1"),
        (Layout(tp=2, dp=4), "DDP"),
        (Layout(dp=16, zero=3), "has 8 devices"),
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

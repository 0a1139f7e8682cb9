"""DeepSpeed: what is emitted is accepted by its flag and key tables, and reads back as the layout it came from."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from meshwright import engines
from meshwright.engines.base import Request
from meshwright.engines.deepspeed import ENGINE
from meshwright.engines.deepspeed.keys import check_keys
from meshwright.errors import InputError
from meshwright.specs.layout import Fsdp, Layout
from meshwright.specs.workload import Serve, Train
from tests.engines.training import back, request, world
from tests.specs.clusters import cluster


def random_request(rng: random.Random) -> Request:
    """A layout that DeepSpeed allows, with lengths and precision."""
    zero = rng.choice((0, 1, 2, 3))
    kind = rng.choice(("tp", "sp", "pp", "dp", "ep"))
    degree = rng.choice((2, 4, 8))
    layout = Layout(dp=rng.choice((1, 2, 4, 8, 16)), zero=zero, micro_batch=rng.choice((1, 2, 3, 8)))
    if kind == "tp":
        layout = layout.with_(tp=degree)
    elif kind == "sp":
        layout = layout.with_(cp=degree)
    elif kind == "pp":
        layout = layout.with_(pp=degree, zero=min(zero, 1))
    elif kind == "ep":
        layout = layout.with_(dp=degree * rng.choice((1, 2)), ep=degree, etp=1)
    if layout.world > 8:
        layout = layout.with_(dp=max(1, -(-layout.world // 8) * 8 // (layout.world // layout.dp)))
    half = rng.choice(("bf16", "f16", "f32"))
    master = half == "f32" or layout.zero == 0 or rng.random() < 0.7
    work = Train(
        seq=rng.choice((1024, 4096, 32768)),
        global_batch=layout.dp * layout.micro_batch * rng.choice((1, 2, 5)),
        optimizer=rng.choice(("adamw", "muon", "sgd")),
        recompute=rng.choice(("none", "full")),
        param_dtype=half,
        grad_dtype=rng.choice((half, "f32")),
        master_weights=master,
        state_dtype="bf16" if not master and half == "bf16" and rng.random() < 0.5 else "f32",
        attention=rng.choice(("flash", "unfused")),
        fused_cross_entropy=rng.random() < 0.3,
    )
    hosted: tuple[str, ...] = ()
    if layout.zero and rng.random() < 0.3:
        hosted = ("optimizer", "gradients") + (("parameters",) if layout.zero == 3 and rng.random() < 0.5 else ())
    name = rng.choice(("meta-llama/Llama-3.1-8B", "./my model", "llama-3.1-8b"))
    options = {"on_host": hosted} if hosted else {}
    return request(name, layout, world(rng, layout.world), work, **options)


def round_trip(count: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        asked = random_request(rng)
        emission, found = back(ENGINE, asked)
        assert [r.message for r in found.findings] == []
        assert found.layout == asked.layout
        assert found.workload == asked.workload
        assert found.model == asked.model
        assert found.train_options.get("on_host", ()) == asked.train_options.get("on_host", ())
        assert check_keys(json.loads(emission.files[0].text)) == []


def test_sample_reads_back() -> None:
    round_trip(100, 1)


@pytest.mark.slow
def test_two_thousand_read_back() -> None:
    round_trip(2000, 2)


def test_a_changed_number_is_seen() -> None:
    """The round trip can fail: another degree in the emitted file gives another layout."""
    asked = request("m", Layout(tp=2, dp=4, zero=1), cluster(1, 8), Train(global_batch=8))
    emission = ENGINE.emit(asked)
    text = emission.files[0].text.replace('"autotp_size": 2', '"autotp_size": 4')
    found = ENGINE.parse(["deepspeed", "--num_gpus", "8", "t.py", "--deepspeed", "c"], {}, {"c": text.encode()}.get)
    assert found.layout != asked.layout


def test_several_nodes_get_a_host_file() -> None:
    asked = request("m", Layout(dp=16, zero=3), cluster(2, 8), Train(global_batch=16))
    emission, found = back(ENGINE, asked)
    assert [c.node for c in emission.commands] == [0]
    assert (found.nodes, found.devices) == (2, 16)
    assert emission.files[1].text == "node-0 slots=8\nnode-1 slots=8\n"


@pytest.mark.parametrize(
    ("layout", "work", "says"),
    [
        (Layout(dp=8, zero=3, fsdp=Fsdp(replicas=2)), Train(global_batch=8), "replicas"),
        (Layout(pp=2, dp=4, stage_layers=(3, 1)), Train(global_batch=8), "1f1b"),
        (Layout(dp=8), Train(global_batch=12), "not a multiple"),
        (Layout(dp=64), Train(global_batch=64), "has 8 devices"),
        (Layout(dp=8), Serve(), "serve with"),
        (Layout(dp=8), Train(global_batch=8, recompute="selective"), "selective"),
    ],
)
def test_what_cannot_be_started_is_refused(layout: Layout, work: Train | Serve, says: str) -> None:
    with pytest.raises(InputError, match=says):
        ENGINE.emit(Request("m", layout, cluster(1, 8), work))


def test_a_name_that_looks_like_a_flag_stays_a_name() -> None:
    asked = request("--version; rm -rf /", Layout(dp=8, zero=1), cluster(1, 8), Train(global_batch=8))
    _, found = back(ENGINE, asked)
    assert found.model == "./--version; rm -rf /"


def test_profile_and_flags_by_version() -> None:
    assert engines.load("deepspeed").profile("0.19").version == "0.19.8"
    assert replace(ENGINE.profile(), version="x").trains
    assert len(ENGINE.flags("0.19").flags) > 20
    with pytest.raises(InputError, match="no profile"):
        ENGINE.profile("0.1")

"""Plain torchrun: the world of an unknown script, written and read."""

from __future__ import annotations

import random

import pytest

from meshwright.engines.torchrun import ENGINE
from meshwright.errors import InputError
from meshwright.specs.layout import Layout
from meshwright.specs.workload import Train
from tests.engines.training import back, request, words_of, world
from tests.specs.builders import gqa
from tests.specs.clusters import cluster


def round_trip(count: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        dp = rng.choice((1, 2, 5, 8, 16, 40))
        layout = Layout(dp=dp, micro_batch=rng.choice((1, 3)))
        work = Train(
            seq=rng.choice((128, 4096)),
            global_batch=dp * layout.micro_batch * rng.choice((1, 4)),
            param_dtype="f32",
            recompute=rng.choice(("none", "full")),
            fused_cross_entropy=rng.random() < 0.5,
        )
        asked = request("org/model", layout, world(rng, dp), work)
        _, found = back(ENGINE, asked)
        assert [r.message for r in found.findings] == []
        assert (found.layout, found.workload, found.model) == (layout, work, "org/model")


def test_sample_reads_back() -> None:
    round_trip(100, 1)


@pytest.mark.slow
def test_two_thousand_read_back() -> None:
    round_trip(2000, 2)


def test_one_command_a_node_and_one_for_many() -> None:
    two = ENGINE.emit(request("m", Layout(dp=16), cluster(2, 8), Train(global_batch=16)))
    assert [ENGINE.parse(words_of(c.text), {}, lambda _: None).node_rank for c in two.commands] == [0, 1]
    many = ENGINE.emit(request("m", Layout(dp=160), cluster(20, 8), Train(global_batch=160)))
    assert [c.node for c in many.commands] == [0, None]
    assert '"$NODE_RANK"' in many.commands[1].text


def test_the_machine_gives_a_world_that_is_not_stated() -> None:
    found = ENGINE.parse(["torchrun", "--nproc-per-node", "gpu", "t.py"], {}, lambda _: None)
    assert found.devices is None
    done = ENGINE.complete(found, gqa(), cluster(2, 4))
    assert done.layout.dp == 4
    assert isinstance(done.workload, Train)
    assert done.workload.global_batch == 4


@pytest.mark.parametrize("layout", [Layout(tp=2, dp=4), Layout(dp=8, zero=1), Layout(pp=2, dp=4), Layout(dp=8, ep=8)])
def test_other_layouts_name_engines_that_have_them(layout: Layout) -> None:
    with pytest.raises(InputError, match="--engine"):
        ENGINE.emit(request("m", layout, cluster(1, 8), Train(global_batch=8)))


def test_worlds_that_do_not_fill_nodes_are_refused() -> None:
    with pytest.raises(InputError, match="do not fill whole nodes"):
        ENGINE.emit(request("m", Layout(dp=12), cluster(2, 8), Train(global_batch=12)))


def test_what_is_not_known_is_said() -> None:
    found = ENGINE.parse(["torchrun", "--nproc-per-node", "4", "mine.py"], {}, lambda _: None)
    assert "mine.py" in found.notes[-1]
    assert "4 processes" in found.notes[-1]


@pytest.mark.parametrize("words", [["ls"], ["vllm", "serve", "m"], ["torchrun"]])
def test_no_script_is_no_command_of_its_own(words: list[str]) -> None:
    assert not ENGINE.recognises(words)

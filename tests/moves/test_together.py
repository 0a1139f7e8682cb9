"""Ranks that must share a node: tp groups of one layout and of two pools."""

from __future__ import annotations

from meshwright import engines
from meshwright.moves.together import tp_groups
from meshwright.specs.hf.read import model_from_config
from meshwright.specs.layout import parse_layout
from meshwright.specs.placement import Placement, place

MODEL = model_from_config(
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 64,
    },
    "tiny",
    "test",
)


def placed(layout: str) -> Placement:
    return place(MODEL, parse_layout(layout), engines.profile("meshwright"))


def test_groups_of_pools_follow_one_another() -> None:
    assert tp_groups([placed("tp=2,pp=2")]) == [(0, 1), (2, 3)]
    assert tp_groups([placed("tp=1"), placed("tp=2,pp=2")]) == [(0,), (1, 2), (3, 4)]
    assert tp_groups([placed("tp=2"), placed("dp=2")]) == [(0, 1), (2,), (3,)]


def test_every_rank_of_the_world_is_in_one_group() -> None:
    for first, second in (("tp=4", "tp=2,dp=2"), ("pp=4", "tp=2,pp=2"), ("dp=2,tp=2", "tp=8")):
        pools = [placed(first), placed(second)]
        ranks = [rank for group in tp_groups(pools) for rank in group]
        assert sorted(ranks) == list(range(sum(p.layout.world for p in pools)))


def test_without_a_layout_nothing_is_said() -> None:
    assert tp_groups([]) == []

"""SGLang's rules on layouts: each names both numbers, where it stands, a way out, and legal neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.engines.sglang import ENGINE
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import parse_layout
from meshwright.specs.nearest import explain
from meshwright.specs.placement import Coordinate, place
from meshwright.specs.workload import Train
from tests.specs import builders
from tests.specs.clusters import cluster

PROFILE = ENGINE.profile()


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [(61, 2, (30, 31)), (80, 3, (26, 27, 27)), (61, 4, (15, 15, 15, 16)), (5, 1, (5,)), (7, 4, (1, 2, 2, 2))],
)
def test_the_last_stages_get_one_layer_more(layers: int, stages: int, counts: tuple[int, ...]) -> None:
    assert PROFILE.split_layers(layers, stages) == counts


@pytest.mark.parametrize(
    ("model", "layout", "code", "severity"),
    [
        ("llama-2-13b", "tp=3", "heads_divide_tp", "illegal"),
        ("qwen3-8b", "tp=3", "heads_divide_tp", "illegal"),
        ("qwen3-30b-a3b", "tp=3,dp=2", "heads_divide_tp", "illegal"),
        ("deepseek-v3", "tp=32", "quant_block", "illegal"),
        ("deepseek-v3", "tp=8,ep=3", "ep_divides_tp_size", "illegal"),
        ("deepseek-v3", "tp=8,dp=4,ep=2,etp=2", "moe_grid", "illegal"),
        ("deepseek-v3", "dp=512,ep=256", "tp_size_exceeds_experts", "illegal"),
        ("deepseek-v3", "tp=8,dcp=3", "dcp_divides_tp", "illegal"),
        ("deepseek-v3", "tp=4,cp=2,dcp=2", "dcp_with_prefill_cp", "illegal"),
        ("deepseek-v3", "tp=4,cp=2,pp=2,ep=4,etp=1", "moe_dp_with_pp", "illegal"),
        ("deepseek-v3", "pp=62", "more_stages_than_layers", "illegal"),
        ("deepseek-v3", "pp=2,stage_layers=30+30", "stage_sum", "illegal"),
        ("qwen3-8b", "tp=2,ep=2", "ep_without_experts", "illegal"),
        ("qwen3-30b-a3b", "dp=12,ep=12", "experts_divide_ep", "illegal"),
        ("qwen3-8b", "tp=2,zero=1", "not_of_this_engine", "illegal"),
        ("deepseek-v3", "tp=8", "latent_cache_replicated", "unwise"),
        ("qwen3-8b", "tp=16", "kv_heads_replicated", "unwise"),
        ("deepseek-v3", "tp=8,pp=2", "uneven_stages", "unwise"),
        ("qwen3-30b-a3b", "tp=32,dcp=4", "dcp_leaves_copies", "unwise"),
    ],
)
def test_rules(model: str, layout: str, code: str, severity: str) -> None:
    rules = {r.code: r for r in explain(read_model(model), parse_layout(layout), PROFILE)}
    assert code in rules, sorted(rules)
    rule = rules[code]
    assert rule.severity == severity
    assert rule.way_out
    assert rule.numbers or code == "not_of_this_engine"
    if severity == "illegal":
        for _, number in rule.numbers:
            assert f"{number}" in f"{rule.message} {rule.way_out}"
        for near in rule.nearest:
            assert not [r for r in PROFILE.check(read_model(model), near, None, None) if r.severity == "illegal"]


@pytest.mark.parametrize(
    "layout",
    [
        "tp=8",
        "tp=8,ep=8",
        "dp=8",
        "dp=8,ep=8",
        "tp=2,dp=4",
        "tp=4,dp=2,ep=8",
        "tp=4,cp=2",
        "tp=8,dcp=8",
        "tp=4,dp=2,etp=4",
        "tp=4,cp=2,ep=4,etp=1",
        "dp=32,ep=32",
        "tp=2,dp=8,ep=16",
    ],
)
def test_layouts_that_people_run(layout: str) -> None:
    rules = PROFILE.check(read_model("deepseek-v3"), parse_layout(layout), None, None)
    assert [r.code for r in rules if r.severity == "illegal"] == []


def test_training_is_refused() -> None:
    rules = PROFILE.check(builders.gqa(), parse_layout("tp=2"), None, Train())
    assert rules[0].code == "does_not_train"


def test_every_node_of_one_server_has_as_many_ranks() -> None:
    spec = builders.moe(heads=12, kv_heads=12, experts=12, width=48)
    rules = PROFILE.check(spec, parse_layout("tp=6,pp=2"), cluster(2, 8), None)
    assert "ranks_over_nodes" not in {r.code for r in rules}
    odd = PROFILE.check(spec, parse_layout("tp=3,pp=3"), cluster(2, 8), None)
    assert "ranks_over_nodes" in {r.code for r in odd}


def test_ranks_count_attention_replicas_inside_a_stage() -> None:
    """tp_rank = (attention dp rank x cp + cp rank) x attention tp + attention tp rank; stages outermost."""
    placed = place(builders.moe(experts=8), parse_layout("tp=2,dp=2,pp=2"), PROFILE)
    assert placed.coordinate(5) == replace(placed.coordinate(5), dp=0, pp=1, tp=1)
    assert [placed.rank(Coordinate(dp=dp, pp=1, tp=0)) for dp in (0, 1)] == [4, 6]


def test_shared_experts_stay_whole_where_tokens_travel() -> None:
    """2048 / 32 ends inside a block of 128; with an all-to-all the shared experts are not cut at all."""
    spec = read_model("deepseek-v3")
    cut = PROFILE.check(spec, parse_layout("tp=2,dp=16"), None, None)
    whole = PROFILE.check(spec, parse_layout("tp=2,dp=16,ep=32"), None, None)
    assert any("shared expert" in rule.message for rule in cut)
    assert not any("shared expert" in rule.message for rule in whole)

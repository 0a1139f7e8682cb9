"""Every reason a layout is illegal or unwise: reported cases, each beside its legal neighbour, with both numbers.

The numbers are those of reported configurations (case numbers of the shared collection in the ids); the models are
built here. Case C281 (an engine generation before the profiles) is out of scope.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from meshwright.engines import profile
from meshwright.engines.vllm.rules import balanced_experts, offline_replicas
from meshwright.errors import IllegalLayoutError, InputError
from meshwright.specs import checks
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import Layout, parse_layout
from meshwright.specs.model import ModelSpec, Quantization
from meshwright.specs.nearest import describe, explain, nearest_legal, refuse
from meshwright.specs.placement import Coordinate, place
from meshwright.specs.profile import EngineProfile
from meshwright.specs.rules import Rule
from meshwright.specs.workload import Serve, Train
from tests.specs import builders
from tests.specs.clusters import cluster

VLLM, OWN = profile("vllm"), profile("meshwright")


def found(spec: ModelSpec, layout: str, by: EngineProfile = VLLM, **given: object) -> dict[str, Rule]:
    rules = by.check(spec, parse_layout(layout), given.get("cluster"), given.get("workload"))  # type: ignore[arg-type]
    return {rule.code: rule for rule in rules}


def illegal(spec: ModelSpec, layout: str, by: EngineProfile = VLLM, **given: object) -> list[str]:
    return [code for code, rule in found(spec, layout, by, **given).items() if rule.severity == "illegal"]


def dense(heads: int, kv_heads: int, vocab: int, intermediate: int, layers: int = 4, hidden: int = 512) -> ModelSpec:
    return builders.gqa(heads, kv_heads, 128, hidden, intermediate, vocab, layers)


def experts(width: int, shared: int = 0, heads: int = 32, kv_heads: int = 8, count: int = 16) -> ModelSpec:
    return builders.moe(heads, kv_heads, count, width, shared, layers=2, dense=0, hidden=256, head_dim=128)


FP8_EXPERTS_320 = builders.block_fp8(experts(320), 128)

REFUSED = [
    # id, model, refused layout, rule, numbers in the message, legal neighbour
    ("C001", dense(52, 52, 32000, 17920), "tp=8", "heads_divide_tp", (52, 8), "tp=4"),
    ("C001b", dense(28, 4, 151936, 18944), "tp=8", "heads_divide_tp", (28, 8), "tp=4"),
    ("C001c", dense(32, 32, 32000, 11008), "tp=3", "heads_divide_tp", (32, 3), "tp=2"),
    ("C004", dense(40, 40, 32000, 13824), "tp=3", "heads_divide_tp", (40, 3), "tp=2"),
    ("C004b", dense(64, 8, 32000, 28672), "tp=5", "heads_divide_tp", (64, 5), "tp=4"),
    ("C005", dense(28, 4, 152064, 18944), "tp=8", "heads_divide_tp", (28, 8), "tp=4,dp=2"),
    ("C169", dense(40, 8, 151936, 17408), "tp=5", "vocab_over_tp", (151936, 5), "tp=4"),
    ("C265", dense(40, 40, 32016, 13824), "tp=5", "vocab_over_tp", (32064, 5), "tp=4"),
    ("C265b", dense(40, 40, 32016, 13824), "tp=6", "heads_divide_tp", (40, 6), "tp=2"),
    ("C202", dense(32, 32, 32000, 11008), "tp=10", "heads_divide_tp", (32, 10), "tp=8"),
    ("C203", dense(48, 8, 64000, 12288), "tp=12", "kv_heads_over_tp", (8, 12), "tp=16"),
    ("C041", builders.int4(dense(64, 8, 152064, 29568), 128), "tp=2", "quant_group", (14784, 128), "tp=1"),
    ("C041b", builders.int4(dense(64, 8, 152064, 29696), 128), "tp=16", "quant_group", (1856, 128), "tp=2"),
    ("C043", builders.block_fp8(dense(128, 128, 129280, 18432), 128), "tp=32", "quant_block", (576, 128), "tp=16"),
    ("C044", FP8_EXPERTS_320, "tp=8", "quant_block", (320, 40), "tp=8,ep=8"),
    ("C044b", FP8_EXPERTS_320, "tp=2", "quant_block", (160, 128), "tp=1"),
    ("C045", builders.block_fp8(experts(768), 128), "tp=4", "quant_block", (192, 128), "tp=2"),
    ("C046", builders.block_fp8(experts(1280, 1280), 128), "tp=4,ep=4", "quant_block", (320, 128), "tp=2,ep=2"),
    ("C047", builders.block_fp8(experts(1536), 128), "tp=8", "quant_block", (192, 128), "tp=4"),
]


@pytest.mark.parametrize(("case", "spec", "layout", "code", "numbers", "neighbour"), REFUSED, ids=lambda v: str(v)[:12])
def test_refused_cases_and_their_legal_neighbours(
    case: str, spec: ModelSpec, layout: str, code: str, numbers: tuple[int, ...], neighbour: str
) -> None:
    rules = found(spec, layout)
    assert code in rules, f"{case}: only {list(rules)}"
    rule = rules[code]
    assert rule.severity == "illegal"
    assert all(str(number) in rule.message for number in numbers), rule.message
    assert rule.way_out
    assert illegal(spec, neighbour) == []
    place(spec, parse_layout(neighbour), VLLM)
    with pytest.raises(IllegalLayoutError):
        place(spec, parse_layout(layout), VLLM)


def test_a_block_of_64_takes_what_a_block_of_128_does_not() -> None:
    spec = experts(1536)
    assert "quant_block" in illegal(builders.block_fp8(spec, 128), "tp=8")
    assert illegal(builders.block_fp8(spec, 64), "tp=8") == []
    assert illegal(spec, "tp=8") == []


def test_stages_cure_memory_where_one_node_does_not() -> None:
    """Case C153: eight-way tensor parallel times two stages is legal on two nodes."""
    assert illegal(experts(1536), "tp=8,pp=2", cluster=cluster(2, 8)) == []


def test_an_unknown_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case C217: a guide names a model that does not exist."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError):
        read_model("meta-llama/Llama-3.2-70B-Instruct")


def test_forty_heads_on_four_devices_name_the_three_neighbours() -> None:
    spec = dense(40, 40, 32000, 13824, layers=40)
    rules = explain(spec, Layout(tp=3), VLLM, cluster(1, 4))
    near = [describe(n, spec, VLLM) for n in rules[0].nearest]
    assert {"tp=2", "tp=4", "pp=3 (stages of 13, 14, 13 layers)"} <= set(near)
    with pytest.raises(IllegalLayoutError, match=r"(?s)40 attention heads.*size 3.*nearest legal layouts: .*tp=2"):
        refuse(rules)


def test_twenty_eight_heads_on_eight_devices_suggest_replicas_first() -> None:
    spec = dense(28, 4, 152064, 18944, layers=28)
    assert str(nearest_legal(spec, Layout(tp=8), VLLM, cluster(1, 8))[0]) == "tp=4,dp=2"


def test_narrow_experts_suggest_whole_ones() -> None:
    assert "tp=8,ep=8" in [str(n) for n in nearest_legal(FP8_EXPERTS_320, Layout(tp=8), VLLM, cluster(1, 8))]


@pytest.mark.parametrize("layout", ["tp=3", "tp=16,ep=4", "pp=9", "tp=8,dcp=3", "tp=2,pp=2,stage_layers=1+1"])
def test_nearest_layouts_are_legal_and_within_the_cluster(layout: str) -> None:
    spec, on = builders.moe(experts=8), cluster(2, 8)
    near = nearest_legal(spec, parse_layout(layout), VLLM, on)
    assert near
    for option in near:
        assert illegal(spec, str(option), cluster=on) == []
        assert option.world <= on.devices


def test_the_search_is_bounded() -> None:
    spec = dense(52, 52, 32000, 17920, layers=60)
    started = time.perf_counter()
    assert nearest_legal(spec, Layout(tp=7919, pp=7), VLLM, cluster(16384, 8))
    assert time.perf_counter() - started < 1.5


KV = builders.gqa(heads=32, kv_heads=8, vocab=64, intermediate=96)


@pytest.mark.parametrize(
    ("spec", "layout", "code"),
    [
        (KV, "ep=2", "ep_without_experts"),
        (builders.moe(experts=8), "tp=4,ep=2", "ep_is_tp_dp"),
        (builders.moe(experts=4, heads=8), "tp=2,dp=4,ep=8", "ep_exceeds_experts"),
        (builders.moe(width=12), "tp=8", "width_over_tp"),
        (builders.moe(width=16), "tp=2,dp=3", "width_over_tp"),
        (builders.moe(shared=6, heads=8), "tp=4,ep=4", "width_over_tp"),
        (KV, "pp=5", "more_stages_than_layers"),
        (KV, "pp=2,stage_layers=1+1+2", "stage_count"),
        (KV, "pp=2,stage_layers=1+2", "stage_sum"),
        (KV, "tp=8,dcp=3", "dcp_divides_tp"),
        (KV, "tp=8,dcp=2", "dcp_needs_copies"),
        (KV, "tp=16,dcp=4", "dcp_needs_copies"),
        (KV, "tp=4,cp=2,dcp=4", "dcp_with_pcp"),
        (builders.gqa(heads=24, kv_heads=8, vocab=192, intermediate=96), "tp=24,dcp=3,cp=1", ""),
        (builders.gqa(heads=40, kv_heads=4, vocab=640, intermediate=40), "tp=40,dcp=4", "dcp_divides_group"),
        (builders.state_space(heads=6), "tp=4", "state_heads_over_tp"),
        (builders.state_space(heads=8, groups=2), "tp=4", "state_groups_over_tp"),
        (builders.state_space(heads=8, groups=1), "tp=4", ""),
        (KV, "zero=1", "not_of_this_engine"),
        (KV, "virtual=2", "not_of_this_engine"),
        (KV, "pp=2,schedule=zbv", "not_of_this_engine"),
    ],
    ids=lambda v: str(v)[:24],
)
def test_rules_of_vllm(spec: ModelSpec, layout: str, code: str) -> None:
    codes = illegal(spec, layout)
    assert (code in codes) if code else codes == []


@pytest.mark.parametrize(
    ("layout", "legal"),
    [("tp=8", True), ("tp=32", True), ("tp=16,dcp=2", True), ("tp=32,dcp=4", True), ("tp=24", False)],
)
def test_kv_heads_are_divided_replicated_or_refused(layout: str, legal: bool) -> None:
    assert (illegal(KV, layout) == []) is legal
    parsed = parse_layout(layout)
    copies = parsed.tp // 8 // parsed.dcp
    assert ("kv_heads_replicated" in found(KV, layout)) is (copies > 1 and parsed.tp >= 8)


def test_a_latent_cache_is_replicated_unless_split() -> None:
    mla = builders.moe(heads=8, mla=True, experts=8)
    assert "latent_cache_replicated" in found(mla, "tp=8")
    assert "latent_cache_replicated" not in found(mla, "tp=8,dcp=8")
    assert "latent_cache_replicated" not in found(mla, "dp=8,ep=8")
    assert illegal(mla, "tp=8,dcp=8") == []


def test_world_size_and_nodes() -> None:
    on = cluster(2, 4)
    over = found(KV, "tp=8,pp=2", cluster=on)["world_exceeds_cluster"]
    assert (over.severity, dict(over.numbers)) == ("illegal", {"world": 16, "devices": 8})
    assert "tp_crosses_node" in found(KV, "tp=8", cluster=on)
    assert "tp_crosses_node" not in found(KV, "tp=4,pp=2", cluster=on)
    assert "tp_crosses_node" not in found(KV, "tp=8", cluster=cluster(1, 8))
    idle = found(KV, "tp=2", cluster=on)["devices_idle"]
    assert idle.way_out == "raise dp to 4"
    assert "ranks_over_nodes" in found(KV, "pp=3,dp=1,tp=1", cluster=cluster(2, 2))


def test_replicas_do_not_cure_a_model_that_does_not_fit() -> None:
    gib = 1 << 30
    (rule,) = checks.dp_does_not_cure(Layout(dp=4), 131 * gib, 79 * gib)
    assert "131.0 GiB" in rule.message
    assert "79.0 GiB" in rule.message
    assert checks.dp_does_not_cure(Layout(dp=4), 60 * gib, 79 * gib) == []
    assert checks.dp_does_not_cure(Layout(tp=4), 131 * gib, 79 * gib) == []
    assert checks.dp_does_not_cure(Layout(dp=4, zero=3), 131 * gib, 79 * gib) == []


def test_the_balancer_needs_even_experts_and_offline_replicas_need_experts() -> None:
    spec = builders.moe(experts=8)
    uneven = found(spec, "dp=3,ep=3")["experts_uneven"]
    assert uneven.severity == "unwise"
    (rule,) = balanced_experts(spec, Layout(dp=3, ep=3))
    assert rule.way_out == "use 1 redundant experts"
    assert balanced_experts(spec, Layout(dp=3, ep=3), redundant=1) == []
    assert [r.code for r in balanced_experts(spec, Layout(tp=4))] == ["eplb_needs_ep"]
    assert [r.code for r in offline_replicas(KV, Layout(dp=2))] == ["offline_dp_dense"]
    assert offline_replicas(spec, Layout(dp=2)) == []


TRAIN = Train(seq=4096, global_batch=64)


@pytest.mark.parametrize(
    ("layout", "code", "severity"),
    [
        ("dp=5", "batch_not_whole", "illegal"),
        ("dp=4,micro_batch=32", "batch_not_whole", "illegal"),
        ("pp=4,dp=32", "few_micro_batches", "unwise"),
        ("pp=2,virtual=2", "virtual_without_chunks", "illegal"),
        ("schedule=interleaved,virtual=2", "chunks_without_stages", "illegal"),
        ("pp=4,schedule=interleaved,virtual=2", "more_chunks_than_layers", "illegal"),
        ("pp=2,schedule=zbv,virtual=3", "two_chunks", "illegal"),
        ("zero=1", "zero_on_one_rank", "unwise"),
        ("pp=2,dp=2,zero=3", "zero3_under_pipeline", "unwise"),
        ("dp=4,zero=3,replicas=3", "fsdp_replicas", "illegal"),
        ("sp=on", "sp_without_tp", "unwise"),
        ("tp=64", "fewer_units_than_tp", "illegal"),
        ("tp=3", "uneven_units", "unwise"),
        ("tp=12", "kv_heads_over_tp", "illegal"),
        ("pp=3", "uneven_stages", "unwise"),
        ("ep=2", "ep_without_experts", "illegal"),
        ("dp=3,ep=2", "ep_over_ranks", "illegal"),
        ("cp=3", "heads_over_ulysses", "unwise"),
        ("cp=3", "sequence_over_cp", "illegal"),
        ("tp=4,dcp=3", "dcp_divides_tp", "illegal"),
    ],
)
def test_rules_of_our_runtime(layout: str, code: str, severity: str) -> None:
    rules = found(KV, layout, OWN, workload=TRAIN)
    assert code in rules
    assert rules[code].severity == severity


@pytest.mark.parametrize("layout", ["tp=2,pp=2,dp=2", "tp=4,sp=on", "dp=4,zero=3", "cp=2", "pp=2,dp=2,zero=1"])
def test_wise_layouts_break_no_rule(layout: str) -> None:
    assert found(KV, layout, OWN, workload=TRAIN) == {}


def test_micro_batches_of_an_interleaved_schedule_come_in_rounds() -> None:
    layout = "pp=2,schedule=interleaved,virtual=2"
    assert illegal(KV, layout, OWN, workload=Train(global_batch=7)) == ["interleaved_micro_batches"]
    assert illegal(KV, layout, OWN, workload=Train(global_batch=8)) == []


def test_sequences_that_do_not_divide() -> None:
    """Case C264, and sequence parallelism over tp."""
    assert illegal(KV, "cp=4", OWN, workload=Train(seq=1002, global_batch=4)) == ["sequence_over_cp"]
    assert illegal(KV, "tp=4,sp=on", OWN, workload=Train(seq=1002, global_batch=4)) == ["sequence_over_sp"]
    assert illegal(KV, "cp=4", OWN, workload=Train(seq=1008, global_batch=4)) == []


@pytest.mark.parametrize(("heads", "degree", "legal"), [(28, 8, False), (28, 4, True), (48, 64, False), (48, 16, True)])
def test_ulysses_must_divide_the_heads(heads: int, degree: int, legal: bool) -> None:
    """Cases C260 and C261."""
    assert (checks.ulysses(heads, heads, degree) == []) is legal


def test_equal_stages_where_an_engine_wants_them() -> None:
    """Cases C197 and C201: 46 layers over 4 stages; our own runtime deals them unevenly."""
    spec = builders.gqa(layers=46)
    (rule,) = checks.even_stages(spec, Layout(pp=4))
    assert (rule.severity, dict(rule.numbers)) == ("illegal", {"layers": 46, "stages": 4})
    assert checks.even_stages(spec, Layout(pp=2)) == []
    assert illegal(spec, "pp=4", OWN) == []


def test_our_runtime_refuses_to_cut_a_block() -> None:
    assert illegal(builders.block_fp8(dense(8, 8, 64, 320), 128), "tp=2", OWN) == ["quant_block"]
    assert illegal(builders.block_fp8(dense(8, 8, 64, 384), 128), "tp=2", OWN) == []


def test_vllm_does_not_train_and_illegal_rules_come_first() -> None:
    rules = VLLM.check(KV, parse_layout("tp=24,zero=1"), cluster(4, 8), TRAIN)
    severities = [rule.severity for rule in rules]
    assert severities == sorted(severities, key=lambda s: s != "illegal")
    assert {"does_not_train", "not_of_this_engine"} <= {rule.code for rule in rules}
    assert explain(KV, Layout(tp=8), VLLM, None, Serve()) == []


def test_named_numbers_are_those_nearest_to_the_asked_one() -> None:
    assert checks.divisors(40, 64) == (1, 2, 4, 8)
    assert checks.named(checks.divisors(36), 10, 4) == "4, 6, 9, 12"
    assert checks.named((1, 2, 3), 2) == "1, 2, 3"


def test_a_tile_on_one_side_does_not_hide_a_group_on_the_other() -> None:
    spec = builders.int4(builders.gqa(4, 1, 128, 16, 192, 64), 128)
    codes = [rule.code for rule in VLLM.check(spec, Layout(tp=4), None, None)]
    assert codes[0] == "quant_group"
    assert "marlin_tile" in codes


def test_a_grouped_output_is_dealt_by_whole_groups() -> None:
    spec = builders.grouped_output(builders.gqa(heads=16, kv_heads=1), 4)
    assert illegal(spec, "tp=8") == ["head_groups_over_tp"]
    assert illegal(spec, "tp=4") == []
    assert "fewer_units_than_tp" in illegal(spec, "tp=5", OWN)
    shards = place(spec, Layout(tp=3), OWN).shards
    rows = [{s.family.op: s.shape for s in shards(Coordinate(tp=index))} for index in range(3)]
    assert [(r["q"][0], r["o"][1]) for r in rows] == [(32, 32), (16, 16), (16, 16)]


def test_blocks_are_read_from_the_shapes_of_the_scales() -> None:
    """A checkpoint of several formats states no block for the part that has one."""
    spec = builders.block_fp8(experts(1536, 1536), 128)
    mixed = replace(spec, quantization=Quantization("nvfp4", 4, 16))
    assert illegal(mixed, "tp=8,ep=8") == ["quant_block"]
    assert illegal(mixed, "tp=4,ep=4") == []

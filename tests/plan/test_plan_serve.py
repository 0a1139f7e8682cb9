"""``plan serve``: the decisions that the issue states, each shown with its number, on specs built here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import engines
from meshwright.plan.candidates import bound_of, smallest_tp
from meshwright.plan.plan import Plan
from meshwright.plan.serve import plan_serve
from meshwright.specs.build import decoder
from meshwright.specs.cluster import parse_cluster
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import Layout, parse_layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import ServeSettings
from meshwright.specs.units import GIB
from meshwright.specs.workload import Serve

LLAMA_70B = decoder(hidden=8192, layers=80, heads=64, kv_heads=8, ffn=28672, vocab=128256, tied=False, name="llama-70b")
LLAMA_405B = decoder(
    hidden=16384, layers=126, heads=128, kv_heads=8, ffn=53248, vocab=128256, tied=False, name="llama-405b"
)
SMALL = decoder(hidden=2048, layers=16, heads=32, kv_heads=8, ffn=8192, vocab=128256, tied=False, name="small-1b")
MIXTURE = decoder(
    hidden=4096,
    layers=94,
    heads=64,
    kv_heads=4,
    ffn=12288,
    vocab=151936,
    tied=False,
    experts=128,
    topk=8,
    moe_ffn=1536,
    name="mixture-235b",
)


def plan(spec: ModelSpec, on: str, layout: str | None = None, engine: str = "vllm", **workload: float) -> Plan:
    return plan_serve(
        spec,
        parse_cluster(on),
        Serve(**workload),  # type: ignore[arg-type]
        engines.profile(engine),
        ServeSettings(),
        parse_layout(layout) if layout else None,
    )


def bytes_of_a_parameter(spec: ModelSpec, packed: bool = False) -> float:
    """What one parameter takes in the tensor table: of all tensors, or of those that pack several into an element."""
    rows = [f for f in spec.select("decoder") if f.elements > 1 or not packed]
    return sum(f.total_bytes for f in rows) / sum(f.parameters for f in rows)


@pytest.mark.parametrize(
    ("parameters", "model", "packed", "gib"),
    [
        (7.6e9, "qwen2.5-7b", False, 14),
        (70e9, "llama-3.1-70b", False, 130),
        (405e9, "llama-3.1-405b", False, 754),
        (70e9, "Qwen/Qwen2.5-72B-Instruct-AWQ", True, 33),
    ],
)
def test_weights_in_gib(parameters: float, model: str, packed: bool, gib: int) -> None:
    assert round(parameters * bytes_of_a_parameter(read_model(model), packed) / GIB) == gib


def test_the_builders_models_weigh_what_their_names_say() -> None:
    assert round(LLAMA_70B.weight_bytes() / GIB) == 131
    assert round(LLAMA_405B.weight_bytes() / GIB) == 756


@pytest.mark.parametrize(("parameters", "tp"), [(7.6e9, 1), (70e9, 8), (405e9, 64)])
def test_smallest_power_of_two_tp_on_24_gib_cards_with_6_kept(parameters: float, tp: int) -> None:
    assert smallest_tp(parameters * 2, 24 * GIB, 6 * GIB) == tp


def test_smallest_tp_needs_room() -> None:
    with pytest.raises(ValueError, match="no room"):
        smallest_tp(1.0, 6 * GIB, 6 * GIB)


def test_405b_on_24_gib_cards_in_nodes_of_8_is_tp_times_pp_and_not_tp_64() -> None:
    found = plan(LLAMA_405B, "8x8xRTX-3090@ib-100g", isl=1000, osl=200, concurrency=8)
    assert found.ok
    assert found.layout is not None
    assert found.layout.tp == 8
    assert found.layout.pp >= 6
    assert all(a.candidate.layout.tp != 64 for a in found.alternatives[:1])
    assert found.motive == "capacity"


def test_70b_on_two_nodes_of_four_a100_40g_is_tp4_pp2_for_capacity() -> None:
    found = plan(LLAMA_70B, "2x4xA100-40G@ib-200g", isl=8000, osl=500, concurrency=32)
    assert found.ok
    assert found.layout == Layout(tp=4, pp=2)
    assert found.motive == "capacity"
    reason = found.reasons[0]
    assert reason.code == "capacity"
    assert "131 GiB of weights and 83 GiB of KV cache" in reason.text
    assert "do not fit one node's 158 GiB" in reason.text


def test_70b_on_two_nodes_of_four_a100_80g_is_tp4_dp2_with_tp4_pp2_beside_it() -> None:
    found = plan(LLAMA_70B, "2x4xA100-80G@ib-200g", isl=8000, osl=500, concurrency=32)
    assert found.ok
    assert found.layout == Layout(tp=4, dp=2)
    assert Layout(tp=4, pp=2) in [a.candidate.layout for a in found.alternatives]
    assert {r.code for r in found.reasons} >= {"capacity", "throughput", "tp_inside_node"}


def test_a_small_model_is_replicated_and_the_reason_is_throughput() -> None:
    found = plan(SMALL, "1x8xH100-SXM", isl=500, osl=200, concurrency=256)
    assert found.layout == Layout(dp=8)
    assert found.motive == "throughput"
    assert found.reasons[0].code == "throughput"


def test_tp_does_not_cross_nodes_while_something_else_works() -> None:
    found = plan(LLAMA_70B, "2x4xA100-40G@ib-200g", isl=8000, osl=500, concurrency=32)
    crossing = [a for a in found.alternatives if a.candidate.layout.tp > 4]
    assert all("TP crosses nodes" in a.lost_by for a in crossing)
    given = plan(LLAMA_70B, "2x4xA100-40G@ib-200g", "tp=8", isl=8000, osl=500, concurrency=32)
    assert given.ok
    assert "tp_crosses_node" in [r.code for r in given.rules]


def test_every_rejected_layout_names_the_number_that_killed_it() -> None:
    found = plan(LLAMA_70B, "2x4xA100-40G@ib-200g", isl=8000, osl=500, concurrency=32)
    by_layout = {(r.layout.tp, r.layout.pp): r.reason for r in found.rejected}
    assert "131.4 GiB" in by_layout[(1, 1)]
    assert "65.7 GiB" in by_layout[(2, 1)]
    assert "20.8 GiB of KV cache for 32 requests" in by_layout[(4, 1)]


def test_nothing_fits_says_how_many_devices_would() -> None:
    found = plan(LLAMA_405B, "1x8xRTX-3090", isl=1000, osl=100, concurrency=1)
    assert not found.fits
    assert found.layout is None
    budget = parse_cluster("RTX-3090").device.memory_bytes * 0.92
    bound = bound_of(LLAMA_405B)
    least = -(-(bound.dense_bytes + bound.expert_bytes) // int(budget))
    assert f"at least {least} x RTX-3090" in found.verdict


def test_a_part_of_the_requests_fits() -> None:
    found = plan(LLAMA_70B, "1x4xA100-40G", isl=8000, osl=500, concurrency=32)
    assert not found.fits
    assert found.layout is not None
    assert "of 32 requests fit at a time" in found.verdict


def test_a_latency_target_asks_for_more_tp_than_capacity() -> None:
    """Weights of 14 GiB are read in a token's time, so that two devices are faster; of 2 GiB that hardly is so."""
    spec = decoder(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256, tied=False, name="some-8b")
    loose = plan(spec, "1x8xH100-SXM", isl=500, osl=200, concurrency=8)
    assert loose.chosen is not None
    target = loose.chosen.cost.tpot_s * 0.9
    strict = plan(spec, "1x8xH100-SXM", isl=500, osl=200, concurrency=8, tpot_s=target)
    assert strict.layout is not None
    assert loose.layout == Layout(dp=8)
    assert strict.layout.tp == 2
    assert strict.motive == "latency"
    assert strict.ok


def test_a_target_out_of_reach_is_said_with_both_numbers() -> None:
    found = plan(SMALL, "1x8xH100-SXM", isl=500, osl=200, concurrency=64, tpot_s=1e-5)
    assert found.fits
    assert not found.ok
    assert found.verdict.startswith("too slow")
    assert "0.01 ms are asked" in found.verdict


def test_a_rate_becomes_requests_in_flight() -> None:
    slow = plan(SMALL, "1x2xH100-SXM", isl=500, osl=200, rate=1.0)
    fast = plan(SMALL, "1x2xH100-SXM", isl=500, osl=200, rate=60.0)
    assert slow.chosen is not None
    assert fast.chosen is not None
    few, many = slow.chosen.workload, fast.chosen.workload
    assert isinstance(few, Serve)
    assert isinstance(many, Serve)
    assert few.concurrency is not None
    assert many.concurrency is not None
    assert few.concurrency < many.concurrency


def test_a_rate_beyond_the_peaks_is_refused_with_both_numbers() -> None:
    found = plan(LLAMA_70B, "1x4xA100-80G", isl=500, osl=200, rate=1e6)
    assert not found.ok
    assert any(r.code == "rate_too_high" and "1,000,000.00 are asked" in r.reason for r in found.rejected)


def test_experts_are_kept_whole_where_cutting_them_is_dearer() -> None:
    found = plan(MIXTURE, "1x8xH200-SXM", isl=2000, osl=300, concurrency=64)
    assert found.ok
    assert found.layout is not None
    assert any(r.code in {"experts_parallel", "experts_cut"} for r in found.reasons)
    dense = plan(LLAMA_70B, "1x8xH200-SXM", "tp=8,ep=8", isl=2000, osl=300)
    assert not dense.legal
    assert dense.rules[0].code == "ep_without_experts"


def test_an_illegal_layout_names_both_numbers_and_the_nearest_legal_ones() -> None:
    found = plan(LLAMA_70B, "1x8xH100-SXM", "tp=3")
    assert not found.legal
    assert found.chosen is None
    assert "64" in found.verdict
    assert "3" in found.verdict
    assert found.rules[0].nearest


def test_our_own_runtime_splits_unevenly() -> None:
    spec = decoder(hidden=576, layers=30, heads=9, kv_heads=3, ffn=1536, vocab=49152, tied=True, name="smollm2")
    refused = plan(spec, "1x2xRTX-3090", "tp=2", isl=100, osl=10)
    assert not refused.legal
    own = plan(spec, "1x2xRTX-3090", "tp=2", engine="meshwright", isl=100, osl=10)
    assert own.legal
    assert own.chosen is not None
    weights = [r.weights_bytes for r in own.chosen.memory.ranks]
    assert len(weights) == 2
    assert weights[0] > weights[1]


def test_cost_counts_two_all_reduces_a_layer() -> None:
    one = plan(LLAMA_70B, "1x8xH200-SXM", "tp=1", isl=100, osl=10, concurrency=1)
    eight = plan(LLAMA_70B, "1x8xH200-SXM", "tp=8", isl=100, osl=10, concurrency=1)
    assert eight.chosen is not None
    assert eight.chosen.cost.messages >= 160
    assert one.chosen is None or one.chosen.cost.wire_bytes == 0


def test_a_degree_whose_caches_starve_is_not_the_smallest_that_fits() -> None:
    """Without a stated concurrency TP 2 fits an 80 GB node with room for 16 requests; TP 4 serves ten times as much."""
    found = plan(LLAMA_70B, "8xH100")
    assert found.layout is not None
    assert (found.layout.tp, found.layout.dp) == (4, 2)
    best = max(a.candidate.cost.tokens_per_s for a in found.alternatives)
    assert found.chosen is not None
    assert found.chosen.cost.tokens_per_s > 0.9 * best
    stated = plan(LLAMA_70B, "8xH100", concurrency=16)
    assert stated.layout is not None
    assert stated.layout.tp == 2, "with a stated concurrency the smallest TP that holds it wins"


def test_a_token_target_without_a_concurrency_is_judged_at_a_batch_that_can_keep_it() -> None:
    """16 ms a token: the full caches of TP 8 take longer, fewer requests do not; a target that one request breaks is
    out of reach."""
    found = plan(LLAMA_70B, "8xH100", tpot_s=0.016)
    assert found.ok
    assert found.layout == Layout(tp=8)
    assert found.chosen is not None
    assert found.chosen.cost.step_s <= found.chosen.cost.tpot_s <= 0.016
    assert isinstance(found.chosen.workload, Serve)
    assert (found.chosen.workload.concurrency or 0) > 1
    for other in found.alternatives:
        assert other.candidate.cost.tpot_s > 0.016
        assert "a token takes" in other.lost_by
    out_of_reach = plan(LLAMA_70B, "8xH100", tpot_s=0.001)
    assert not out_of_reach.ok
    assert out_of_reach.chosen is not None
    assert out_of_reach.chosen.cost.requests == 1
    assert out_of_reach.verdict.startswith("too slow")


def test_a_faster_alternative_says_why_it_lost_and_the_fastest_comes_first() -> None:
    found = plan(LLAMA_70B, "7xA100-80G", concurrency=8)
    assert found.layout == Layout(tp=2, dp=3)
    assert any("more tokens/s" in a.lost_by for a in found.alternatives)
    speeds = [a.candidate.cost.tokens_per_s for a in found.alternatives]
    assert speeds == sorted(speeds, reverse=True)
    for other in found.alternatives:
        if "more tokens/s" in other.lost_by:
            assert "; but " in other.lost_by or "; a tie" in other.lost_by


def test_a_shallower_split_is_not_called_deeper() -> None:
    found = plan(LLAMA_70B, "2x4xA100-80G@ib-200g", layout="tp=4,pp=2", isl=8000, osl=500, concurrency=32)
    replicas = next(a for a in found.alternatives if a.candidate.layout == Layout(tp=4, dp=2))
    assert "deeper" not in replicas.lost_by


def test_requests_longer_than_the_positions_are_warned_of() -> None:
    spec = replace(SMALL, max_positions=4096)
    found = plan(spec, "1xH100", isl=spec.max_positions, osl=1)
    codes = {r.code: r for r in found.rules}
    assert dict(codes["context_beyond_positions"].numbers) == {
        "context": spec.max_positions + 1,
        "positions": spec.max_positions,
    }
    assert "context_beyond_positions" not in {r.code for r in plan(spec, "1xH100", isl=100, osl=1).rules}


def test_one_request_gains_nothing_from_pipeline_stages() -> None:
    """The stages before and behind the one at work stand idle, in the prefill too."""
    alone = plan(SMALL, "4xH100", layout="tp=1", isl=2000, osl=1, concurrency=1)
    staged = plan(SMALL, "4xH100", layout="pp=4", isl=2000, osl=1, concurrency=1)
    assert alone.chosen is not None
    assert staged.chosen is not None
    assert staged.chosen.cost.tokens_per_s <= alone.chosen.cost.tokens_per_s


def test_the_best_partial_layout_is_not_listed_as_rejected() -> None:
    found = plan(SMALL, "1xRTX-4090", isl=100_000, osl=1000, concurrency=512)
    assert not found.fits
    assert found.layout is not None
    assert found.layout not in [r.layout for r in found.rejected]

"""Separate pools: the best split of a cluster, its ratio, and that both sides get what they need."""

from __future__ import annotations

import json

import pytest

from meshwright import Serve, plan_serve
from meshwright.api import plan_pools, plan_split
from meshwright.plan.plan import Plan
from meshwright.plan.search.serve_pools import SplitFound
from meshwright.plan.serving_time_pools import transfer_rate
from meshwright.report.as_json import plan_json
from meshwright.specs.cluster import parse_cluster

WORK = Serve(isl=4000, osl=500, ttft_s=2.0, tpot_s=0.025)
ON = "4x8xH200-SXM@ib-400g"
WHOLE = plan_serve("llama-3.1-70b", ON, WORK)


def split_of(plan: Plan) -> SplitFound:
    assert plan.served is not None
    assert plan.served.split is not None
    return plan.served.split


def test_the_best_split_keeps_the_targets_on_the_devices_there_are() -> None:
    found = split_of(WHOLE)
    assert found.time.ttft.value <= 2.0
    assert found.time.tpot.value <= 0.025
    assert found.best.devices <= 32
    assert found.best.goodput == max(s.goodput for s in found.ratios if s.ttft_s <= 2.0 and s.tpot_s <= 0.025)


def test_the_split_is_what_two_stated_pools_are_predicted_to_do() -> None:
    found = split_of(WHOLE).best
    _, decode = plan_pools(
        "llama-3.1-70b", ON, Serve(isl=4000, osl=500, concurrency=found.users), prefill=found.prefill.layout,
        decode=found.decode.layout, workers=(found.prefill_workers, found.decode_workers),
    )  # fmt: skip
    assert decode.chosen is not None
    time = decode.chosen.cost.predicted
    assert time is not None
    assert time.tpot.value == pytest.approx(found.tpot_s, rel=0.05)
    assert time.ttft.value == pytest.approx(found.ttft_s, rel=0.05)
    assert time.tokens_per_s.value == pytest.approx(split_of(WHOLE).time.tokens_per_s.value)


def test_longer_outputs_move_workers_to_the_decode_side() -> None:
    shares = []
    for isl, osl in ((8000, 100), (2000, 1000)):
        best = split_of(plan_serve("llama-3.1-70b", ON, Serve(isl=isl, osl=osl, ttft_s=3.0, tpot_s=0.025))).best
        shares.append(best.prefill.layout.world * best.prefill_workers / best.devices)
    assert shares[0] > 0.5 > shares[1]


def test_split_chooses_both_layouts_and_names_the_ratio() -> None:
    decode, prefill = plan_split("llama-3.1-70b", ON, WORK)
    best = split_of(decode).best
    assert prefill is not None
    assert prefill.layout == best.prefill.layout
    assert decode.layout == best.decode.layout
    assert decode.ok
    assert f"(ratio {best.prefill_workers}:{best.decode_workers})" in decode.verdict
    assert [r.code for r in decode.reasons] == ["separate_pools"]
    data = plan_json(decode)["search"]["split"]
    assert data["prefill_workers"] == best.prefill_workers
    assert len(data["ratios"]) == len(split_of(decode).ratios)
    json.dumps(data)


def test_no_split_is_a_no_with_the_best_single_pool() -> None:
    plan, prefill = plan_split("llama-3.1-70b", "1x4xH100-SXM", Serve(isl=4000, osl=500, ttft_s=0.1))
    assert prefill is None
    assert not plan.ok
    assert plan.verdict.startswith("no split works")


def test_a_slow_link_takes_longer_to_move_a_cache() -> None:
    fast, slow = parse_cluster("2x8xH100-SXM@ib-400g"), parse_cluster("2x8xH100-SXM@eth-25g")
    assert transfer_rate(16, slow) < 4e9 < transfer_rate(16, fast)
    assert transfer_rate(8, slow) == transfer_rate(8, fast), "both workers on one node"

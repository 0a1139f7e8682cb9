"""Predicted serving times of a layout: parts add up, loads and rates behave, pools and targets are judged by them."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf

import pytest

from meshwright import Serve, plan_serve
from meshwright.api import plan_pools
from meshwright.plan.plan import Candidate, Plan
from meshwright.plan.serving_time import ServingTime, log_width, serving_time
from meshwright.plan.serving_time_pools import Pool, best_ratio, pool_time
from meshwright.plan.serving_time_steps import Conditions, accepted_tokens, stage_ranks
from meshwright.plan.timing.step import launches_of, quantizing_of
from meshwright.report.as_json import plan_json
from meshwright.specs.profile import ServeSettings

WORK = Serve(isl=1000, osl=500, concurrency=32)


def found(model: str = "llama-3.1-70b", on: str = "1x8xH100-SXM", layout: str = "tp=8", **asked: object) -> Plan:
    plan = plan_serve(model, on, replace(WORK, **asked), layout=layout)  # type: ignore[arg-type]
    assert plan.chosen is not None
    return plan


def timed(plan: Plan, work: Serve = WORK, conditions: Conditions | None = None, **set_to: object) -> ServingTime:
    chosen = plan.chosen
    assert isinstance(chosen, Candidate)
    assert plan.settings is not None
    settings = replace(plan.settings, **set_to)  # type: ignore[arg-type]
    most = chosen.memory.max_requests  # type: ignore[union-attr]
    return serving_time(chosen.placement, plan.cluster, work, most, settings, conditions)


LLAMA = found()


def test_parts_add_up_to_the_means() -> None:
    for plan in (
        LLAMA,
        found(on="2x4xH100-SXM@ib-400g", layout="tp=4,pp=2"),
        found("qwen3-30b-a3b", layout="tp=2,dp=4,ep=8"),
    ):
        time = plan.chosen.cost.predicted  # type: ignore[union-attr]
        assert time is not None
        assert sum(s for _, s in time.tpot_parts) == pytest.approx(time.tpot.value)
        assert sum(s for _, s in time.ttft_parts) == pytest.approx(time.ttft.value)
        assert all(s >= 0 for _, s in (*time.tpot_parts, *time.ttft_parts))
        assert time.tpot.low < time.tpot.value < time.tpot.high


def test_no_prediction_is_faster_than_the_lower_bounds() -> None:
    for model, layout in (
        ("llama-3.1-8b", "tp=1"),
        ("llama-3.1-70b", "tp=4"),
        ("qwen3-30b-a3b", "tp=2"),
        ("gpt-oss-120b", "tp=4"),
    ):
        for users in (1, 16, 128):
            cost = found(model, layout=layout, concurrency=users).chosen.cost  # type: ignore[union-attr]
            assert cost.tpot_s > 0.9 * cost.step_s
            assert cost.ttft_s > cost.prefill_s


def test_throughput_is_that_of_the_loop() -> None:
    time = timed(LLAMA)
    inside = time.ttft.value + (WORK.osl - 1) * time.tpot.value
    assert time.requests_per_s == pytest.approx(32 / inside)
    assert time.tokens_per_s.value == pytest.approx(500 * time.requests_per_s)


def test_places_are_limited_by_the_caches() -> None:
    chosen = LLAMA.chosen
    assert chosen is not None
    assert LLAMA.settings is not None
    time = serving_time(chosen.placement, LLAMA.cluster, WORK, 8, LLAMA.settings)
    assert (time.running, time.capacity, time.asked) == (8, 8, 32)
    assert time.ttft.value > timed(LLAMA).ttft.value + 3 * 500 * 0.9 * time.tpot.value


def test_a_request_decodes_beside_what_is_inside_on_average() -> None:
    """Arrivals see time averages: at a rate at which half a request is inside, another one is met half of the time."""
    alone = timed(LLAMA, Serve(isl=1000, osl=500, concurrency=1)).tpot.value
    for inside in (0.1, 0.9, 3.0):
        found = timed(LLAMA, Serve(isl=1000, osl=500, rate=inside / (500 * alone)))
        assert found.running == pytest.approx(1 + inside, abs=0.6)


def test_a_rate_settles_or_grows_without_end() -> None:
    low, high = (timed(LLAMA, Serve(isl=1000, osl=500, rate=r)) for r in (0.5, 4.0))
    assert low.stable
    assert high.stable
    assert low.ttft.value < high.ttft.value
    assert low.tpot.value < high.tpot.value
    assert high.running == pytest.approx(1 + 4.0 * 500 * high.tpot.value, abs=1)
    too_much = timed(LLAMA, Serve(isl=1000, osl=500, rate=1000.0))
    assert not too_much.stable
    assert too_much.ttft.value == inf
    assert too_much.requests_per_s < 1000


def test_percentiles_are_ordered_and_goodput_is_a_share() -> None:
    for time in (timed(LLAMA), timed(LLAMA, Serve(isl=1000, osl=500, rate=3.0))):
        assert time.ttft_percentile(10) <= time.ttft_percentile(50) <= time.ttft_percentile(99)
        assert time.tpot_percentile(10) < time.tpot.value < time.tpot_percentile(90)
        assert sum(time.ttft_points) / len(time.ttft_points) == pytest.approx(time.ttft.value, rel=0.15)
        assert time.goodput() == time.requests_per_s
        assert 0.5 * time.requests_per_s <= time.goodput(time.ttft_percentile(50), None) < time.requests_per_s
        assert time.goodput(time.ttft_percentile(1) * 0.9, None) == 0
        assert time.goodput(None, time.tpot.value) == pytest.approx(time.requests_per_s / 2)


def test_flags_change_what_they_should() -> None:
    plain = timed(LLAMA)
    assert timed(LLAMA, enforce_eager=True).tpot.value > 1.3 * plain.tpot.value
    drafted = timed(LLAMA, replace(WORK, concurrency=1), speculative=True, speculative_tokens=2)
    assert drafted.tpot.value < 0.8 * timed(LLAMA, replace(WORK, concurrency=1)).tpot.value
    assert accepted_tokens(ServeSettings()) == 1.0
    assert 1.5 < accepted_tokens(ServeSettings(speculative=True, speculative_tokens=2)) < 2.5
    assert timed(LLAMA, conditions=Conditions(poll_steps=30)).ttft.value > plain.ttft.value
    assert timed(LLAMA, conditions=Conditions(prompts_per_user=1)).ttft.value > plain.ttft.value


def test_a_deeper_pipeline_is_modelled_and_a_token_takes_longer() -> None:
    staged = timed(found(layout="tp=4,pp=2"))
    assert staged.tpot.word == "modelled"
    assert timed(LLAMA).tpot.word == "calibrated"
    assert log_width("tpot", "aggregated", False, "modelled") > log_width("tpot", "aggregated", False, "calibrated")


def test_launches_are_counted_from_the_structure() -> None:
    """Kernels of a dense layer: 2 norms, 5 of attention, 3 of the MLP; more for latent attention."""
    assert LLAMA.chosen is not None
    kind = next(iter(stage_ranks(LLAMA.chosen.placement)[0].own.kinds.values()))
    assert launches_of(kind) == 10
    assert quantizing_of(kind, block=True) == 0
    deepseek = found("deepseek-v3", "1x8xH200", "tp=8")
    assert deepseek.chosen is not None
    last = list(stage_ranks(deepseek.chosen.placement)[0].own.kinds.values())[-1]
    assert launches_of(last) >= 14
    assert quantizing_of(last, block=True) >= 5


def test_targets_are_judged_by_the_prediction() -> None:
    time = timed(LLAMA)
    between = (LLAMA.chosen.cost.step_s + time.tpot.value) / 2  # type: ignore[union-attr]
    plan = found(tpot_s=between)
    assert not plan.ok
    assert "a token is predicted to take" in plan.verdict
    assert found(tpot_s=time.tpot.value * 1.05).ok
    late = found(ttft_s=time.ttft.value * 0.9)
    assert "the first token is predicted to take" in late.verdict


def test_json_holds_the_prediction_and_no_infinity() -> None:
    plan = found(rate=1000.0, concurrency=None)
    out = json.loads(json.dumps(plan_json(plan), allow_nan=False))
    assert out["cost"]["predicted"]["stable"] is False
    assert out["cost"]["predicted"]["ttft_s"]["value"] is None
    good = json.loads(json.dumps(plan_json(LLAMA), allow_nan=False))["cost"]["predicted"]
    assert good["tpot_s"]["low"] < good["tpot_s"]["value"] < good["tpot_s"]["high"]


def test_pools_and_their_best_ratio() -> None:
    plan = found(layout="tp=2")
    chosen = plan.chosen
    assert chosen is not None
    assert plan.settings is not None
    side = Pool(chosen.placement, plan.cluster, 1)
    work = Serve(isl=4000, osl=200, concurrency=64)
    one = pool_time(side, replace(side, workers=3), work, plan.settings)
    three = pool_time(replace(side, workers=3), side, work, plan.settings)
    assert three.ttft.value < one.ttft.value
    assert three.tpot.value > one.tpot.value
    assert sum(s for _, s in one.ttft_parts) == pytest.approx(one.ttft.value)
    ratios = best_ratio(side, side, work, plan.settings, devices=8)
    assert [(r.prefill_workers + r.decode_workers) for r in ratios] == [4, 4, 4]
    assert ratios[0].tokens_per_s_device == max(r.tokens_per_s_device for r in ratios)
    strict = replace(work, ttft_s=three.ttft.value * 1.01)
    assert best_ratio(side, side, strict, plan.settings, devices=8)[0].prefill_workers == 3


def test_planned_pools_have_one_prediction_and_keep_their_targets() -> None:
    asked = {"prefill": "tp=2", "decode": "tp=2"}
    first, second = plan_pools("llama-3.1-70b", "1x4xH200", Serve(isl=1000, osl=200, concurrency=16), **asked)
    assert first.chosen is not None
    assert second.chosen is not None
    assert first.chosen.cost.predicted is None
    time = second.chosen.cost.predicted
    assert time is not None
    assert dict(time.ttft_parts)["transfer"] > 0
    work = Serve(isl=1000, osl=200, concurrency=16, tpot_s=time.tpot.value * 0.9)
    _, late = plan_pools("llama-3.1-70b", "1x4xH200", work, **asked)
    assert not late.ok
    assert "the pair fits, but a token is predicted to take" in late.verdict

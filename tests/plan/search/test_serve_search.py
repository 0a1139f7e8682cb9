"""The serving search: goodput within targets, loads, copies, limits, fronts; every figure checked by the prediction of
the stated layout."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from time import process_time

import pytest

from meshwright import Serve, plan_serve
from meshwright.plan.plan import Candidate, Plan
from meshwright.plan.search.serve import ServeFound
from meshwright.specs.layout import Layout

TARGETS = Serve(isl=2000, osl=300, ttft_s=2.0, tpot_s=0.03)
LLAMA = plan_serve("llama-3.1-70b", "8xH100-SXM", TARGETS)
MIXTURE = plan_serve("deepseek-v3", "2x8xH200-SXM@ib-400g", Serve(isl=4000, osl=500, ttft_s=2.0, tpot_s=0.04))


def chosen(plan: Plan) -> Candidate:
    assert plan.chosen is not None
    return plan.chosen


def searched(plan: Plan) -> ServeFound:
    assert plan.served is not None
    return plan.served


def inside(candidate: Candidate) -> int:
    assert isinstance(candidate.workload, Serve)
    return candidate.workload.concurrency or 0


def goodput(candidate: Candidate, work: Serve) -> float:
    """Requests a second of all copies that keep the targets."""
    time = candidate.cost.predicted
    assert time is not None
    return time.goodput(work.ttft_s, work.tpot_s) * candidate.copies


@pytest.mark.parametrize("plan", [LLAMA, MIXTURE], ids=["dense", "mixture"])
def test_the_chosen_layout_keeps_the_targets_and_no_runner_up_serves_more(plan: Plan) -> None:
    assert plan.ok
    work = plan.workload
    assert isinstance(work, Serve)
    best = chosen(plan)
    assert best.cost.tpot_s <= (work.tpot_s or 0)
    assert best.cost.ttft_s <= (work.ttft_s or 0)
    for other in plan.alternatives:
        assert goodput(other.candidate, work) <= goodput(best, work) * 1.03
    assert "within the targets" in plan.verdict


@pytest.mark.parametrize("plan", [LLAMA, MIXTURE], ids=["dense", "mixture"])
def test_more_requests_than_the_chosen_load_break_a_target_or_serve_less(plan: Plan) -> None:
    best, work = chosen(plan), plan.workload
    assert isinstance(work, Serve)
    more = replace(work, concurrency=int(inside(best) * 1.25) + best.layout.dp)
    cluster = f"{best.layout.world // 8 or 1}x8x{plan.cluster.device.name}@ib-400g"
    beyond = plan_serve(plan.asked, cluster, more, layout=best.layout)
    assert not beyond.ok or goodput(chosen(beyond), work) < goodput(best, work) / best.copies * 1.02


def test_the_load_becomes_the_engines_limit() -> None:
    best = chosen(LLAMA)
    assert LLAMA.settings is not None
    assert LLAMA.settings.max_num_seqs == -(-inside(best) // best.layout.dp)
    assert any(f"--max-num-seqs {LLAMA.settings.max_num_seqs} " in c.text for c in LLAMA.commands)


def test_a_mixture_on_a_part_of_the_cluster_is_started_several_times() -> None:
    best = chosen(MIXTURE)
    assert best.copies * best.layout.world == MIXTURE.cluster.devices
    assert "copies" in MIXTURE.verdict
    assert "copies" in {r.code for r in MIXTURE.reasons}
    assert not any(r.code == "devices_idle" for r in MIXTURE.rules)
    stated = plan_serve("deepseek-v3", "2x8xH200-SXM@ib-400g", Serve(isl=4000, osl=500, concurrency=64, tpot_s=0.04))
    assert inside(chosen(stated)) * chosen(stated).copies == 64


def test_what_people_ask_is_answered_by_predicted_figures() -> None:
    """DeepSeek-V3 on two nodes: EP and attention replicas pay, TP across nodes does not, pools are named."""
    said = {r.code: r for r in MIXTURE.reasons}
    assert said["tp_inside_or_across"].text.startswith("TP across nodes does not pay: ")
    assert (
        said["tp_inside_or_across"].numbers["other_wire_share"] > 2 * said["tp_inside_or_across"].numbers["wire_share"]
    )
    assert said["attention_dp_or_tp"].text.startswith("DP attention pays: ")
    assert "predicted" in said["attention_dp_or_tp"].text
    assert "separate_pools" in said


def test_what_bounds_a_token_adds_up() -> None:
    said = next(r for r in LLAMA.reasons if r.code == "bound_by")
    shares = {name: value for name, value in said.numbers.items() if name.endswith("_share")}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert said.numbers["tpot_s"] == chosen(LLAMA).cost.tpot_s
    assert "would break the" in said.text


def test_many_prompts_bound_a_token_by_themselves_and_short_ones_by_memory() -> None:
    def first(isl: int, osl: int) -> str:
        found = plan_serve("llama-3.1-70b", "8xH100-SXM", Serve(isl=isl, osl=osl, concurrency=32), layout="tp=8")
        text: str = next(r.text for r in found.reasons if r.code == "bound_by")
        return text

    assert first(8000, 100).startswith("prompts of other requests bound a token")
    assert first(100, 2000).startswith("memory traffic bounds a token")
    assert "all_reduce over 8 ranks" in first(100, 2000)


@pytest.mark.parametrize("plan", [LLAMA, MIXTURE], ids=["dense", "mixture"])
def test_nothing_in_the_search_beats_its_front(plan: Plan) -> None:
    found = searched(plan)
    assert found.costed <= found.size
    assert found.size >= found.illegal + found.unfit + found.costed
    for a, b in pairwise(found.front):
        assert a.point.tpot_s < b.point.tpot_s
        assert a.point.tokens_s_device < b.point.tokens_s_device
    for probe in found.ranked:
        for point in probe.seen():
            assert any(
                f.point.tpot_s <= point.tpot_s and f.point.tokens_s_device >= point.tokens_s_device for f in found.front
            )


def test_what_stops_more_requests_is_named() -> None:
    limits = {p.layout: p.best.limit for p in searched(LLAMA).ranked if p.best.meets}
    assert limits[chosen(LLAMA).layout] in {"tpot", "ttft"}
    loose = plan_serve("llama-3.1-70b", "4xH100-SXM", Serve(isl=2000, osl=300, tpot_s=10.0))
    assert {p.best.limit for p in searched(loose).ranked} <= {"cache", "sequences"}
    late = plan_serve("llama-3.1-8b", "1xH100-SXM", Serve(isl=8000, osl=50, ttft_s=1.0))
    assert searched(late).ranked[0].best.limit == "ttft"


def test_stricter_targets_never_serve_more() -> None:
    served = []
    for tpot in (0.08, 0.04, 0.02):
        plan = plan_serve("llama-3.1-70b", "8xH100-SXM", Serve(isl=1000, osl=300, tpot_s=tpot))
        assert plan.ok
        served.append(goodput(chosen(plan), plan.workload))  # type: ignore[arg-type]
    assert served == sorted(served, reverse=True)


def test_goodput_at_a_rate_counts_the_requests_that_keep_the_targets() -> None:
    work = Serve(isl=1000, osl=200, rate=8.0, ttft_s=0.5, tpot_s=0.03)
    plan = plan_serve("llama-3.1-8b", "4xH100-SXM", work)
    assert plan.ok
    time = chosen(plan).cost.predicted
    assert time is not None
    assert 0.9 * 8.0 < time.goodput(0.5, 0.03) <= 8.0
    assert time.goodput(time.ttft_percentile(1) * 0.99, None) == 0.0, "no request keeps less than the fastest one takes"
    assert time.ttft_percentile(50) <= time.ttft_percentile(99)
    for percent in (90, 95):
        kept = time.goodput(time.ttft_percentile(percent), None) / time.requests_per_s
        assert percent / 100 - 0.02 <= kept <= 1, "at least so many requests keep the percentile"


def test_caches_that_are_split_over_tp_are_tried() -> None:
    layouts = {p.layout for p in searched(MIXTURE).ranked}
    assert any(layout.dcp > 1 for layout in layouts)
    assert any(layout.dp > 1 and layout.ep > 1 for layout in layouts)
    assert any(layout.pp > 1 for layout in layouts)
    assert any(layout.tp > MIXTURE.cluster.devices_per_node for layout in layouts)
    assert Layout(tp=8) in layouts


def test_long_prompts_try_context_parallel_prefill() -> None:
    plan = plan_serve("llama-3.1-8b", "8xH100-SXM", Serve(isl=32000, osl=100, ttft_s=1.0))
    assert any(p.layout.cp > 1 for p in searched(plan).ranked)
    short = plan_serve("llama-3.1-8b", "8xH100-SXM", Serve(isl=2000, osl=100, ttft_s=1.0))
    assert not any(p.layout.cp > 1 for p in searched(short).ranked)


def test_a_search_takes_seconds_of_cpu_at_most() -> None:
    """1.5 s on a quiet machine; the limit leaves room for a busy one."""
    started = process_time()
    plan = plan_serve("deepseek-v3", "4x8xH200-SXM@ib-400g", Serve(isl=4000, osl=500, ttft_s=2.0, tpot_s=0.04))
    assert process_time() - started < 6
    assert searched(plan).size > 200

"""Layouts side by side: figures of the table are those of the plan."""

from __future__ import annotations

import pytest

from meshwright import Serve, plan_serve
from meshwright.api import plan_split
from meshwright.report.as_json import plan_json
from meshwright.report.page import render
from meshwright.report.serving import cells, head, judged, layout_rows, ratio_rows

PLAN = plan_serve("qwen3-235b-a22b", "2x8xH200-SXM@ib-400g", Serve(isl=2000, osl=300, ttft_s=2.0, tpot_s=0.03))


def test_the_first_row_is_the_plan_and_runners_up_say_what_they_lost_by() -> None:
    rows = list(layout_rows(PLAN))
    chosen = PLAN.chosen
    assert chosen is not None
    first = rows[0]
    assert first.said == "chosen"
    assert first.devices == chosen.layout.world * chosen.copies
    assert first.tpot_s == chosen.cost.tpot_s
    assert first.goodput_s_device <= first.tokens_s_device * 1.001
    assert f"{first.goodput_s_device:,.0f} tokens/s/GPU within the targets" in PLAN.verdict
    assert [row.said for row in rows[1 : 1 + len(PLAN.alternatives)]] == [a.lost_by for a in PLAN.alternatives]
    assert rows[-1].said.startswith("separate pools, ")
    assert judged(PLAN)
    assert all(len(cells(row, True)) == len(head(True)) for row in rows)


def test_every_ratio_has_a_row_and_the_chosen_one_a_mark() -> None:
    assert PLAN.served is not None
    found = PLAN.served.split
    assert found is not None
    rows = list(ratio_rows(found, 300))
    assert [row[0] for row in rows if row[-1]] == [f"{found.best.prefill_workers} : {found.best.decode_workers}"]


def test_the_search_as_json() -> None:
    data = plan_json(PLAN)
    search = data["search"]
    assert search["size"] > search["costed"] > 5
    best = search["ranked"][0]
    assert best["layout"] == data["layout"]["text"]
    assert best["copies"] == data["copies"]
    good = data["cost"]["predicted"]["goodput_per_s"] * 300 * data["copies"]
    assert best["goodput_tokens_s"] == pytest.approx(good, rel=1e-6)
    ups = [point["users_s"] for point in search["pareto"]]
    assert ups == sorted(ups, reverse=True)
    assert {"p50", "p90", "p99"} <= set(data["cost"]["predicted"]["ttft_percentiles_s"])


def test_the_page_of_two_pools_has_their_ratios_and_that_of_one_pool_its_layouts() -> None:
    decode, prefill = plan_split("llama-3.1-70b", "2x8xH100-SXM@ib-400g", Serve(isl=2000, osl=300, tpot_s=0.03))
    assert prefill is not None
    assert "<h2>Ratios of workers</h2>" in render(decode, None, None, prefill)
    assert "<h2>Layouts side by side</h2>" in render(PLAN, None)

"""The page of ``plan``: offline, escaped, complete for every kind of plan, and of sane size."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from meshwright import Serve, Train, fill_ledger, plan_serve, plan_train
from meshwright.api import plan_pools, step_time, timelines, train_engine
from meshwright.ledger.schema import Ledger
from meshwright.plan.plan import Alternative, Plan, Reason
from meshwright.report.page import render
from meshwright.report.page_parts import duration, script, stacked
from meshwright.report.page_times import Times

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'"
WORK = Serve(isl=2000, osl=200, concurrency=16)
SERVED = plan_serve("llama-3.1-70b", "2x4xA100-80G@ib-200g", WORK, layout="tp=4,pp=2")
TRAINED = plan_train("llama-3.1-8b", "2x8xH100-SXM@ib-400g", Train(global_batch=64), layout="tp=2,pp=4,dp=2")


def page_of(plan: Plan, ledger: Ledger | None = None, prefill: Plan | None = None) -> str:
    """The page with everything that can be timed."""
    times = None
    if plan.chosen is not None:
        known = (step_time(plan), train_engine(plan)) if plan.kind == "train" else ()
        times = Times(timelines(plan, prefill), *known)
    return render(plan, ledger, times, prefill)


def own(page: str) -> str:
    """The page without plotly itself."""
    return page.replace(script(), "")


def charts(page: str) -> dict[str, list[dict[str, object]]]:
    """The traces of every chart by its name."""
    found = {}
    for match in re.finditer(r'Plotly\.newPlot\(\s*"([^"]+)",\s*(\[.*?\]),\s*\{"', own(page), re.DOTALL):
        found[match[1]] = json.loads(match[2])
    return found


def headings(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


def test_a_serving_page_has_every_picture() -> None:
    page = page_of(SERVED, fill_ledger(SERVED))
    wanted = ["Layouts compared", "Where the time goes", "One layer, op by op", "Pipeline: two rounds of decoding"]
    assert [h for h in headings(page) if h in wanted] == wanted
    assert {"pareto", "layer-prefill-0", "layer-decode-0", "pipeline", "memory-"} <= set(charts(page))
    assert "First token: " in page


def test_a_training_page_has_every_picture() -> None:
    page = page_of(TRAINED, fill_ledger(TRAINED))
    assert {"pareto", "layer-forward-0", "layer-backward-0", "pipeline", "memory-"} == set(charts(page))
    assert "Pipeline: 1f1b, one step" in headings(page)
    for name, seconds in step_time(TRAINED).parts:
        if seconds > step_time(TRAINED).step.value / 100:
            assert f"{name} <b>{duration(seconds)}</b>" in page


@pytest.mark.parametrize(
    "plan",
    [
        plan_serve("llama-3.1-70b", "8xH100-SXM", layout="tp=3"),
        plan_serve("llama-3.1-405b", "1x8xA100-40G", layout="tp=8"),
        plan_serve("llama-3.1-405b", "1x8xA100-40G"),
        plan_serve("llama-3.1-8b", "1xH100-SXM", Serve(rate=5000.0)),
        plan_train("llama-3.1-8b", "1x8xH100-SXM", Train(global_batch=12), layout="dp=8,zero=3"),
        plan_train("llama-3.1-70b", "1x8xH100-SXM", Train(global_batch=8), layout="dp=8"),
    ],
    ids=["illegal", "given, too large", "nothing works", "too slow", "batch does not divide", "training too large"],
)
def test_a_refused_plan_has_a_page(plan: Plan) -> None:
    assert not plan.ok
    page = page_of(plan, None)
    assert 'class="verdict no"' in page
    assert (plan.chosen is None) == ("plotly" not in page)
    assert "nan" not in own(page).lower().replace("nant", "")


def test_two_pools_are_both_on_the_page() -> None:
    first, second = plan_pools("llama-3.1-8b", "2x8xH100-SXM", WORK, prefill="tp=2", decode="tp=4")
    page = page_of(second, None, first)
    assert "prefill pool: Memory of every rank" in headings(page)
    assert "decode pool: Memory of every rank" in headings(page)
    assert {"memory-prefill", "memory-decode"} <= set(charts(page))


@pytest.mark.parametrize("plan", [SERVED, TRAINED], ids=["serve", "train"])
def test_what_a_user_wrote_is_escaped_everywhere(plan: Plan) -> None:
    assert plan.chosen is not None
    other = Alternative(plan.chosen, EVIL)
    hostile = replace(
        plan,
        spec=replace(plan.spec, name=EVIL),
        verdict=EVIL,
        engine=EVIL if plan.kind == "serve" else plan.engine,
        reasons=(Reason("x", EVIL),),
        notes=(EVIL,),
        alternatives=(other,),
    )
    page = own(page_of(hostile, None))
    assert "<img src=x" not in page
    assert "<script>alert" not in page
    assert page.count("&lt;img src=x") >= 6
    assert page.count("<script") == len(charts(page))
    hover = json.dumps(charts(page)["pareto"])
    assert "&lt;/script&gt;" in hover
    assert "<img" not in hover


@pytest.mark.parametrize("plan", [SERVED, TRAINED], ids=["serve", "train"])
def test_the_page_opens_offline(plan: Plan) -> None:
    page = own(page_of(plan, fill_ledger(plan)))
    assert re.search(r"""(?:src|href|action)\s*=|url\(|@import|https?:""", page) is None
    assert page.count("<html") == 1
    assert page.count('name="viewport"') == 1


def test_plotly_is_there_once_and_the_rest_is_small() -> None:
    page = page_of(SERVED, fill_ledger(SERVED))
    assert page.count(script()) == 1
    assert len(own(page)) < 700_000


def test_a_large_cluster_stays_small() -> None:
    work = Train(seq=8192, global_batch=2048)
    layout = "tp=8,pp=16,dp=16,schedule=interleaved,virtual=7,zero=1"
    plan = plan_train("llama-3.1-405b", "256x8xH100-SXM@ib-400g", work, layout=layout)
    page = page_of(plan, None)
    marks = sum(len(trace.get("x") or ()) for traces in charts(page).values() for trace in traces)  # type: ignore[arg-type]
    assert 200 < marks < 6000
    assert len(own(page)) < 1_500_000


def test_times_as_people_read_them() -> None:
    assert [duration(s) for s in (0, 4e-9, 3.456e-6, 0.01234, 2.5, 1234.0)] == [
        "0 s", "4 ns", "3.46 us", "12.3 ms", "2.5 s", "1,234 s",
    ]  # fmt: skip


def test_parts_are_as_wide_as_they_last() -> None:
    text = stacked("<a>", [("one", 3.0, "#111"), ("<two>", 1.0, "#222"), ("dust", 1e-6, "#333")])
    assert "width:75.0000%" in text
    assert "width:25.0000%" in text
    assert "&lt;two&gt; <b>1 s</b> 25%" in text
    assert "dust" not in text
    assert stacked("nothing", []) == ""

"""``plan --perfetto``: real plans as traces that open, end at the predicted time and carry hostile names as data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright import Serve, Train, plan_serve, plan_train
from meshwright.api import plan_pools, timelines
from meshwright.errors import InputError
from meshwright.plan.plan import Plan
from meshwright.report.trace import plan_trace, write_trace
from tests.ledger.test_perfetto import problems

WORK = Serve(isl=2000, osl=200, concurrency=16)
PLANS = {
    "dense": plan_serve("llama-3.1-70b", "2x4xA100-80G@ib-200g", WORK, layout="tp=4,pp=2"),
    "mixture": plan_serve("deepseek-v3", "2x8xH200-SXM@ib-400g", WORK, layout="tp=8,dp=2,ep=16"),
    "1f1b": plan_train("llama-3.1-8b", "2x8xH100-SXM", Train(global_batch=64), layout="tp=2,pp=4,dp=2"),
    "fsdp": plan_train("llama-3.1-8b", "2x8xH100-SXM", Train(global_batch=32), layout="dp=16,zero=3"),
    "experts": plan_train("mixtral-8x7b", "2x8xH100-SXM", Train(global_batch=64), layout="pp=2,dp=8,ep=8,schedule=zbv"),
}


def end_s(trace: dict[str, Any]) -> float:
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    return float(max(e["ts"] + e["dur"] for e in slices)) / 1e6


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_a_trace_that_opens(name: str, tmp_path: Path) -> None:
    plan, path = PLANS[name], tmp_path / "new" / "trace.json"
    found = timelines(plan)
    write_trace(plan, found, path)
    trace = json.loads(path.read_text("utf-8"))
    assert problems(trace) == []
    assert end_s(trace) == pytest.approx(sum(t.seconds for t in found), abs=1e-7)
    assert trace["otherData"]["seconds"] == {t.phase: t.seconds for t in found}
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert plan.layout is not None
    assert [n.partition(":")[0] for n in names] == [f"stage {stage}" for stage in range(plan.layout.pp)]


def test_the_longest_product_says_what_it_is() -> None:
    trace = plan_trace(PLANS["dense"], timelines(PLANS["dense"]))
    products = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["args"]["op"] == "matmul"]
    longest = max(products, key=lambda e: e["dur"])
    facts = longest["args"]
    assert longest["name"].startswith("mlp.")
    assert facts["shapes"] == "2000x8192 . 8192x7168"
    assert facts["FLOPs"] == 2 * 2000 * 8192 * 7168
    assert facts["seconds"] == pytest.approx(longest["dur"] / 1e6)


def test_pools_are_processes_of_their_own() -> None:
    first, second = plan_pools("llama-3.1-8b", "2x8xH100-SXM", WORK, prefill="tp=2", decode="tp=4")
    trace = plan_trace(second, timelines(second, first), pools=True)
    assert problems(trace) == []
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert [n.partition(",")[0] for n in names] == ["prefill pool", "decode pool"]


def test_hostile_names_stay_data(tmp_path: Path) -> None:
    plan: Plan = PLANS["dense"]
    evil = '"}],"x":[{<script>\x00\u2028'
    path = tmp_path / "evil.json"
    write_trace(replace(plan, spec=replace(plan.spec, name=evil), verdict=evil), timelines(plan), path)
    assert json.loads(path.read_text("utf-8"))["otherData"]["model"] == evil


def test_a_path_that_cannot_be_written_is_one_line() -> None:
    with pytest.raises(InputError, match=r"--perfetto /proc/nope/x\.json: "):
        write_trace(PLANS["dense"], [], Path("/proc/nope/x.json"))

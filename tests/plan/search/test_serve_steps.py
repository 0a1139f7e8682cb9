"""Steps read from lines between timed loads are those that are timed."""

from __future__ import annotations

import pytest

from meshwright import engines
from meshwright.plan.search.serve_steps import StepCurve
from meshwright.plan.serve_memory import resolve_settings
from meshwright.plan.serving_time_steps import Conditions, StepTimer, stage_ranks
from meshwright.specs.cluster import parse_cluster
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import parse_layout
from meshwright.specs.placement import place
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve


def timer(model: str, on: str, layout: str) -> StepTimer:
    spec, cluster, profile = read_model(model), parse_cluster(on), engines.profile("vllm")
    work = Serve(isl=4000, osl=500)
    settings = resolve_settings(ServeSettings(), profile, cluster, work, None, spec)
    placement = place(spec, parse_layout(layout), profile)
    return StepTimer(placement, cluster, settings, work, Conditions(), stage_ranks(placement))


@pytest.mark.parametrize(
    ("model", "on", "layout", "most"),
    [
        ("llama-3.1-70b", "8xH100-SXM", "tp=4,dp=2", 0.01),
        ("deepseek-v3", "4x8xH200-SXM@ib-400g", "dp=32,ep=32", 0.04),
        ("deepseek-v3", "4x8xH200-SXM@ib-400g", "tp=16,pp=2", 0.04),
    ],
)
def test_lines_between_timed_loads_are_close_to_timed_steps(model: str, on: str, layout: str, most: float) -> None:
    timed = timer(model, on, layout)
    curve = StepCurve(timed)
    for running in (1, 2, 3, 6, 11, 23, 96, 190):
        wanted, found = timed.at(running).steps, curve.at(running).steps
        assert found.dec == pytest.approx(wanted.dec, rel=most)
        assert found.prompt == pytest.approx(wanted.prompt, rel=0.01)
        assert found.prompt + found.fill == pytest.approx(wanted.prompt + wanted.fill)
        assert found.floor == pytest.approx(wanted.floor, rel=0.01)
        assert found.each == pytest.approx(wanted.each, rel=0.15)


def test_a_knot_is_the_timed_step_and_parts_add_up() -> None:
    timed = timer("llama-3.1-70b", "8xH100-SXM", "tp=4,dp=2")
    curve = StepCurve(timed)
    for running in (1, 16, 256):
        assert curve.at(running).steps.dec == timed.at(running).steps.dec
    between = curve.at(24)
    assert between.decode.seconds == pytest.approx(between.steps.dec)


def test_the_stage_that_the_others_wait_for_is_found() -> None:
    uneven = timer("llama-3.1-70b", "8xH100-SXM", "pp=2,stage_layers=30+50")
    assert StepCurve(uneven).slowest == 1
    assert StepCurve(timer("llama-3.1-70b", "8xH100-SXM", "pp=2,stage_layers=50+30")).slowest == 0

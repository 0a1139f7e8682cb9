"""Public reports about TensorRT-LLM that a plan decides (issue numbers are those of NVIDIA/TensorRT-LLM)."""

from __future__ import annotations

import pytest

from meshwright.api import plan_serve
from meshwright.specs.layout import Layout
from meshwright.specs.workload import Serve


@pytest.mark.parametrize("model", ["llama-13b", "llama-2-7b"])
def test_stages_inside_a_node_are_the_last_choice(model: str) -> None:
    """Issues 1144 and 1819: PP4 and PP2 x TP2 lose to TP4 in a node of four A100; a batch of 16 fills no stages."""
    plan = plan_serve(model, "1x4xA100-40G", Serve(isl=26, osl=1000, concurrency=16), engine="trtllm")
    assert plan.layout is not None
    order = [plan.layout, *(a.candidate.layout for a in plan.alternatives)]
    assert plan.layout.pp == 1
    assert Layout(tp=4) in order
    staged = [place for place, layout in enumerate(order) if layout.pp > 1]
    assert all(order.index(Layout(tp=4)) < place for place in staged)
    four = plan_serve(model, "1x4xA100-40G", Serve(isl=26, osl=1000, concurrency=16), engine="trtllm", layout="tp=4")
    deep = plan_serve(model, "1x4xA100-40G", Serve(isl=26, osl=1000, concurrency=16), engine="trtllm", layout="pp=4")
    assert four.chosen is not None
    assert deep.chosen is not None
    assert four.chosen.cost.step_s < deep.chosen.cost.step_s


def test_one_sequence_must_fit_the_paged_cache() -> None:
    """Issue 542: the cache must hold one sequence of the stated length; a shorter one or a larger share starts."""
    long = plan_serve("llama-2-7b", "1x1xA10", Serve(isl=30000, osl=2000), engine="trtllm", layout="tp=1")
    short = plan_serve("llama-2-7b", "1x1xA10", Serve(isl=3000, osl=1000), engine="trtllm", layout="tp=1")
    assert not long.fits
    assert short.fits

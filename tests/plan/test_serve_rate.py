"""A rate is judged by what a layout can finish with as many requests in flight as it holds."""

from __future__ import annotations

import pytest

from meshwright import Serve, plan_serve
from meshwright.plan.plan import Plan


def plan(on: str, rate: float, layout: str | None = None) -> Plan:
    return plan_serve("llama-3.1-8b", on, Serve(isl=2000, osl=200, rate=rate), layout=layout)


def test_replicas_carry_a_rate_that_one_device_cannot() -> None:
    assert plan("1xH100-SXM", 50).verdict.startswith("too slow: TP 1, at most ")
    found = plan("8xH100-SXM", 50)
    assert found.ok
    assert found.layout is not None
    assert found.layout.dp == 8


@pytest.mark.parametrize(("rate", "ok"), [(10.0, True), (500.0, False)])
def test_a_stated_layout_is_judged_by_its_rate(rate: float, ok: bool) -> None:
    found = plan("8xH100-SXM", rate, "tp=8")
    assert (found.legal, found.fits, found.fast_enough, found.ok) == (True, True, ok, ok)
    assert found.verdict.startswith("fits: " if ok else "too slow: TP 8, at most ")


def test_a_rate_out_of_reach_names_both_numbers_and_no_shortage_of_memory() -> None:
    found = plan("8xH100-SXM", 5000)
    assert not found.ok
    assert not found.fast_enough
    assert "does not fit" not in found.verdict
    assert "5,000.00 are asked" in found.verdict


def test_a_rate_that_the_peaks_allow_but_the_prediction_does_not() -> None:
    found = plan("8xH100-SXM", 50, "tp=8")
    assert not found.ok
    assert found.chosen is not None
    assert found.chosen.cost.predicted is not None
    assert not found.chosen.cost.predicted.stable
    assert "50.00 requests/s are asked and about" in found.verdict

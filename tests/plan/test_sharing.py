"""Requests that share a device at a rate: against closed forms and a simulation."""

from __future__ import annotations

import random

import pytest

from meshwright.plan.timing.sharing import shared


@pytest.mark.parametrize("load", [0.05, 0.8, 7.0])
def test_requests_that_do_not_disturb_each_other(load: float) -> None:
    """M/G/inf: the number inside is Poisson; one of them meets all others and itself."""
    found = shared(load / 3.0, 10_000, [(1, 3.0)])
    assert found is not None
    assert (found.inside, found.waiting, found.met) == pytest.approx((load, 0.0, 1 + load))


@pytest.mark.parametrize("load", [0.3, 0.9])
def test_requests_that_divide_a_device(load: float) -> None:
    """M/G/1 processor sharing: load / (1 - load) inside."""
    found = shared(load, 100_000, [(1, 1.0), (2, 2.0)])
    assert found is not None
    assert found.inside == pytest.approx(load / (1 - load), rel=1e-6)


@pytest.mark.parametrize(("places", "load"), [(1, 0.5), (4, 3.0)])
def test_beyond_the_places_requests_wait(places: int, load: float) -> None:
    """M/M/c: Erlang's formula."""
    found = shared(load, places, [(1, 1.0)])
    assert found is not None
    weights = [1.0]
    for n in range(1, places + 1):
        weights.append(weights[-1] * load / n)
    last = weights[-1] / (1 - load / places)
    assert found.waiting == pytest.approx(last / (sum(weights[:-1]) + last) * load / (places - load))
    assert found.inside == pytest.approx(load)
    assert shared(places + 0.1, places, [(1, 1.0)]) is None


def test_a_simulation_agrees() -> None:
    """Fixed work, steps that grow with the number inside."""
    points = [(1, 1.0), (4, 2.5), (16, 6.0)]
    found = shared(1.6, 16, points)
    assert found is not None
    draw, clock, area, inside = random.Random(4), 0.0, 0.0, list[float]()
    arrives = draw.expovariate(1.6)
    while clock < 4000:
        n = len(inside)
        pace = 1 / (1.0 + (n - 1) * 0.5 if n <= 4 else 2.5 + (n - 4) * 3.5 / 12) if n else 0.0
        ends = min(inside) / pace if n else float("inf")
        step = min(ends, arrives - clock)
        area, clock = area + n * step, clock + step
        inside = [left - step * pace for left in inside]
        inside = [left for left in inside if left > 1e-12]
        if clock >= arrives:
            inside.append(1.0)
            arrives += draw.expovariate(1.6)
    assert found.inside == pytest.approx(area / clock, rel=0.1)

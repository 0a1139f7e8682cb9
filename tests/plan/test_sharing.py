"""Requests that share a device at a rate: against closed forms and a simulation."""

from __future__ import annotations

import random

import pytest

from meshwright.plan.timing.sharing import _line, bunches, shared


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


@pytest.mark.parametrize(("places", "load"), [(1, 0.6), (50, 0.6)])
def test_bunches_of_two_and_more(places: int, load: float) -> None:
    """M/M/1 with bunches: load / (1 - load) times half of one and the mean size that a request sees of its bunch."""
    r = 0.3
    found = shared(load, places, [(1, 1.0), (2, 2.0)], r)
    assert found is not None
    assert sum(bunches(r)) == pytest.approx(1 / (1 - r))
    seen = 1 / (1 - r) + r / (1 - r) ** 2  # E[X^2] / E[X] of Borel's distribution
    assert found.inside + found.waiting == pytest.approx(load / (1 - load) * (1 + seen) / 2, rel=1e-4)


@pytest.mark.parametrize(("rate", "near"), [(1.3, 0.03), (2.6, 0.06), (3.6, 0.12)])
def test_steps_with_prompts_as_a_server_takes_them(rate: float, near: float) -> None:
    """Prompts stall all decoding requests; those who come meanwhile start together. Step by step beside the formula,
    at 30, 60 and 85 % of what the server can do."""
    times, prompt, tokens = [(1, 0.0117), (2, 0.0135), (4, 0.0153), (8, 0.021), (16, 0.032), (64, 0.09)], 0.095, 64
    free = 1 - rate * prompt
    found = shared(rate, 1000, [(n, tokens * t / free) for n, t in times], 1 - free)
    assert found is not None
    simulated = _simulated(rate, prompt, tokens, times)
    assert found.inside / rate / tokens == pytest.approx(simulated, rel=near)


def _simulated(rate: float, prompt: float, tokens: int, times: list[tuple[int, float]]) -> float:
    """Mean seconds between two tokens of a request, of 6,000 requests."""
    draw, clock, arrives = random.Random(2), 0.0, 0.0
    inside: list[list[float]] = []
    spans: list[float] = []
    while len(spans) < 6000:
        if not inside:
            clock = max(clock, arrives)
        come = 0
        while arrives <= clock:
            come, arrives = come + 1, arrives + draw.expovariate(rate)
        clock += prompt * come + (_line(times, len(inside)) if inside else 0.0)
        for one in inside:
            one[1] += 1
        spans += [(clock - one[0]) / tokens for one in inside if one[1] == tokens]
        inside = [one for one in inside if one[1] < tokens] + [[clock, 0] for _ in range(come)]
    return sum(spans) / len(spans)

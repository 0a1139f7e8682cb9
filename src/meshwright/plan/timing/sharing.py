"""Requests that share a device: how many are inside at a rate of random arrivals.

Requests arrive as a Poisson process and are served together; with n inside each takes ``seconds(n)`` in all. That is
processor sharing with a rate that depends on the state, whose distribution is that of a birth and death process for any
distribution of the work (Cohen, "The multiple phase service network with generalized processor sharing", Acta
Informatica 12, 1979). Beyond the places that there are requests wait.

While prompts are worked on nobody decodes. Seen from the decode steps, whose clock stands still meanwhile, those who
arrive during a prompt join together with it: bunches as large as the number served in a busy period of a queue whose
load is the share of time that prompts take (Borel's distribution for prompts of one length; Takacs, "Introduction to
the Theory of Queues", 1962, for busy periods). That sharing with bunched arrivals forgets the distribution of the work
is an approximation; ``tests/plan/test_sharing.py`` holds it against a simulation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from math import exp, lgamma, log
from typing import NamedTuple

#: Weight, over the largest, below which more requests are not looked at; and how many there may be.
NEGLIGIBLE, MOST = 1e-12, 20_000
#: Sizes of a bunch that are looked at, and the largest share of time for prompts whose bunches are.
LARGEST_BUNCH, BUSIEST = 512, 0.95
#: The share of weights of following numbers is constant where it changes by less.
STEADY = 1e-10


class Crowd(NamedTuple):
    """How many requests there are: ``inside`` (served, mean), ``waiting`` (mean), ``met``: inside as one of them sees
    it, itself included."""

    inside: float
    waiting: float
    met: float


def shared(rate: float, places: int, seconds: Sequence[tuple[int, float]], prompts: float = 0.0) -> Crowd | None:
    """Mean numbers at ``rate`` arrivals a second; None where they grow without end.

    Args:
        rate: arrivals a second. places: requests served at once at most.
        seconds: ``(n, seconds that one of n takes)``, ascending in n; straight lines between and beyond.
        prompts: share of the time that prompts take.
    """
    import numpy as np

    chances = np.array(bunches(prompts))
    later, bunch_rate = chances[::-1], rate / float(chances.sum())
    weights, best, ratio, n = np.zeros(MOST), 1.0, 0.0, 0
    weights[0] = 1.0
    while n + 1 < MOST:
        n += 1
        served, reach = min(n, places), min(n, len(later))
        each = _line(seconds, served)
        if n == places and rate * each >= places:
            return None
        entering = bunch_rate * float(np.dot(weights[n - reach : n], later[len(later) - reach :]))
        weights[n] = entering * each / served
        best, before, ratio = max(best, weights[n]), ratio, weights[n] / weights[n - 1]
        if best > 1e200:
            weights, best = weights / best, 1.0
        if n >= seconds[0][0] and weights[n] < NEGLIGIBLE * best:
            break
        if n > places and abs(ratio - before) < STEADY:
            break
    else:
        if ratio >= 1:
            return None
    held, numbers = weights[: n + 1], np.arange(n + 1)
    tail = held[n] * ratio / (1 - ratio) if n >= places and ratio < 1 else 0.0
    beyond = n + 1 / (1 - ratio) - places if tail else 0.0
    inside_n = np.minimum(numbers, places)
    whole, inside = held.sum() + tail, (inside_n * held).sum() + places * tail
    squares = (inside_n**2 * held).sum() + places**2 * tail
    waiting = ((numbers - inside_n) * held).sum() + beyond * tail
    return Crowd(float(inside / whole), float(waiting / whole), float(squares / inside))


@lru_cache(1024)
def bunches(prompts: float) -> tuple[float, ...]:
    """Chances that a bunch is larger than 0, 1, 2, ...: Borel's distribution, whose mean is 1 / (1 - prompts)."""
    r = min(max(prompts, 0.0), BUSIEST)
    larger = [1.0]
    for k in range(1, LARGEST_BUNCH + 1 if r else 1):
        larger.append(larger[-1] - exp(-r * k + (k - 1) * log(r * k) - lgamma(k + 1)))
        if larger[-1] < NEGLIGIBLE:
            break
    return tuple(x for x in larger if x > NEGLIGIBLE)


def _line(points: Sequence[tuple[int, float]], n: int) -> float:
    """On straight lines through points; with one point its value."""
    if len(points) == 1:
        return points[0][1]
    at = min(max(bisect_right(points, (n, 0.0)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return max(y0 + (n - x0) / (x1 - x0) * (y1 - y0), 1e-12)

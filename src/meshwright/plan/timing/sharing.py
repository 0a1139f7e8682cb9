"""Requests that share a device: how many are inside at a rate of random arrivals.

Requests arrive as a Poisson process and are served together; with n inside each takes ``seconds(n)`` in all. That is
processor sharing with a rate that depends on the state, whose distribution is that of a birth and death process for any
distribution of the work (Cohen, "The multiple phase service network with generalized processor sharing", Acta
Informatica 12, 1979). Beyond the places that there are requests wait.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

#: Weight, over the largest, below which more requests are not looked at.
NEGLIGIBLE = 1e-12


class Crowd(NamedTuple):
    """How many requests there are: ``inside`` (served, mean), ``waiting`` (mean), ``met``: inside as one of them sees
    it, itself included."""

    inside: float
    waiting: float
    met: float


def shared(rate: float, places: int, seconds: Sequence[tuple[int, float]]) -> Crowd | None:
    """Mean numbers at ``rate`` arrivals a second; None where they grow without end.

    Args:
        rate: arrivals a second. places: requests served at once at most.
        seconds: ``(n, seconds that one of n takes)``, ascending in n; straight lines between and beyond.
    """
    weights, best, n = [1.0], 1.0, 0
    while n < places and (weights[-1] > NEGLIGIBLE * best or n < seconds[0][0]):
        n += 1
        weights.append(weights[-1] * rate * _line(seconds, n) / n)
        best = max(best, weights[-1])
        if best > 1e200:
            weights, best = [w / best for w in weights], 1.0
    tail = waiting = 0.0
    if n == places:
        load = rate * _line(seconds, places) / places
        if load >= 1:
            return None
        tail = weights[-1] * load / (1 - load)
        waiting = tail / (1 - load)
    whole = sum(weights) + tail
    inside = sum(k * w for k, w in enumerate(weights)) + places * tail
    squares = sum(k * k * w for k, w in enumerate(weights)) + places * places * tail
    return Crowd(inside / whole, waiting / whole, squares / inside)


def _line(points: Sequence[tuple[int, float]], n: int) -> float:
    """On straight lines through points; with one point its value."""
    if len(points) == 1:
        return points[0][1]
    at = min(max(bisect_right(points, (n, 0.0)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return max(y0 + (n - x0) / (x1 - x0) * (y1 - y0), 1e-12)

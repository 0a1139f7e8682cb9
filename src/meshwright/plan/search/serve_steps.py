"""Steps of one serving layout for every number of requests, from a few that are timed.

A search asks for the times of a layout at many loads. Decode steps are timed at powers of two and lie on straight lines
between them (a step is a fixed part plus a part by request, and a mixture of experts bends slowly); what a prompt adds
is timed at powers of sixteen. ``tests/plan/search/test_serve_steps.py`` holds the lines within 4 % of timed steps.
"""

from __future__ import annotations

from meshwright.plan.serving_time_steps import StepSet, StepTimer
from meshwright.plan.timing.closed_loop import Steps
from meshwright.plan.timing.step_time import StepTime

#: Powers of two between two loads at which a step with a prompt is timed.
PROMPT_STRIDE = 4


class StepCurve:
    """``at(running)`` without timing every load; ``low`` of the steps is that of a quarter of the requests."""

    def __init__(self, timer: StepTimer) -> None:
        self.timer = timer
        self._slowest: int | None = None
        self._decodes: dict[int, StepTime] = {}
        self._added: dict[int, tuple[float, float]] = {}
        self._knots: dict[int, StepSet] = {}

    @property
    def slowest(self) -> int:
        """The stage that the others wait for, found with one request a stage."""
        if self._slowest is None:
            step = self.timer.decoding(self.timer.stages)
            seconds = [self.timer.timed(rank, step).seconds for rank in self.timer.ranks]
            self._slowest = max(range(len(seconds)), key=seconds.__getitem__)
        return self._slowest

    def decode(self, requests: int) -> StepTime:
        """The decode step of the slowest stage, timed once for every number of requests."""
        if requests not in self._decodes:
            rank = self.timer.ranks[self.slowest]
            self._decodes[requests] = self.timer.timed(rank, self.timer.decoding(requests))
        return self._decodes[requests]

    def added(self, power: int) -> tuple[float, float]:
        """Seconds that a prompt adds to a step of ``2 ** power`` requests, and the launches of that step."""
        if power % PROMPT_STRIDE:
            first = power - power % PROMPT_STRIDE
            share = power % PROMPT_STRIDE / PROMPT_STRIDE
            (low, launches), (high, _) = self.added(first), self.added(first + PROMPT_STRIDE)
            return low + (high - low) * share, launches
        if power not in self._added:
            mixed = self.timer.mixed(self.timer.ranks[self.slowest], 1 << power)
            self._added[power] = mixed.seconds - self.decode(1 << power).seconds, mixed.launches
        return self._added[power]

    def knot(self, power: int) -> StepSet:
        """Steps of ``2 ** power`` requests."""
        if power not in self._knots:
            requests = 1 << power
            low = self._decodes.get(max(1, requests // 4)) or self.decode(requests)
            self._knots[power] = self.timer.assembled(self.slowest, self.decode(requests), low, *self.added(power))
        return self._knots[power]

    def at(self, running: int) -> StepSet:
        """Steps of ``running`` requests of a replica."""
        power = max(1, running).bit_length() - 1
        share = running / (1 << power) - 1
        return self.knot(power) if share <= 0 else _between(self.knot(power), self.knot(power + 1), share)


def _between(a: StepSet, b: StepSet, share: float) -> StepSet:
    """The point ``share`` of the way from ``a`` to ``b``."""

    def mixed(left: tuple[float, ...], right: tuple[float, ...]) -> list[float]:
        return [x + (y - x) * share for x, y in zip(left, right, strict=True)]

    decode = StepTime(tuple(mixed(a.decode.parts, b.decode.parts)), a.decode.launches)
    return StepSet(Steps(*mixed(a.steps, b.steps)), decode, a.prompt)

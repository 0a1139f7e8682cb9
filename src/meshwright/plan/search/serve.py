"""The search over serving layouts: for each the load that serves most within the targets, and its curve over loads.

A *probe* is a layout that was placed and whose memory was counted; its steps are timed as far as the search asks
(``serve_steps``). Without a stated load its load is searched too: requests in flight are a batch limit
(``--max-num-seqs`` times replicas) as much as a load.

Goodput is what the whole cluster serves within the targets: tokens a second of the requests that keep them
(``ServingTime.goodput``), with predicted means that keep them too. Copies: a mixture of experts on part of the cluster
is started several times, each copy with its share of the requests (replicas of a dense model are ``dp``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, isqrt
from typing import TYPE_CHECKING, Literal, NamedTuple

from meshwright.plan.memory import ServeMemory
from meshwright.plan.search.serve_steps import StepCurve
from meshwright.plan.serving_time import ServingTime, serving_time
from meshwright.plan.serving_time_steps import Conditions, StepTimer, stage_ranks
from meshwright.specs.layout import Layout
from meshwright.specs.placement import Placement
from meshwright.specs.rules import Rule
from meshwright.specs.workload import Serve

if TYPE_CHECKING:
    from meshwright.plan.search.serve_pools import SplitFound
    from meshwright.plan.serve_context import ServeContext

#: What keeps a layout from serving more: a target, the caches, the engine's limit of sequences, or the load that was
#: asked for.
Limit = Literal["tpot", "ttft", "cache", "sequences", "asked"]
#: Steps of the bisection between a load that keeps the targets and one that does not.
BISECTIONS = 6
#: Rounds in which loads on both sides of the best one are looked at.
REFINED = 3
#: Layouts, best first, whose whole curve over loads may give points of the front; of the others the loads count that
#: the search looked at.
CURVES = 8


class Point(NamedTuple):
    """A layout at one load.

    Attributes:
        requests: in flight on one copy. ttft_s, tpot_s: predicted means.
        tokens_s_device: output tokens a second and device. users_s: tokens a second that one user sees (1 / tpot_s).
    """

    requests: int
    ttft_s: float
    tpot_s: float
    tokens_s_device: float

    @property
    def users_s(self) -> float:
        """Tokens a second that one user sees."""
        return 1.0 / self.tpot_s


@dataclass(frozen=True, slots=True)
class Best:
    """A layout at the load that it is judged at.

    Attributes:
        requests: in flight on one copy. time: predicted for them (or for the rate).
        limit: what keeps it from serving more within the targets. meets: predicted means keep the targets.
        goodput: output tokens a second of all copies that keep the targets, at the layout's best load.
        most: requests of one copy at that load.
    """

    requests: int
    time: ServingTime
    limit: Limit
    meets: bool
    goodput: float
    most: int


class Probe:
    """A layout whose memory is counted, with its predictions as they are asked for."""

    def __init__(
        self,
        ctx: ServeContext,
        layout: Layout,
        placement: Placement,
        memory: ServeMemory,
        rules: tuple[Rule, ...] = (),
        copies: int = 1,
    ) -> None:
        self.ctx, self.layout, self.placement, self.memory = ctx, layout, placement, memory
        self.rules, self.copies = rules, copies
        self._times: dict[int, ServingTime] = {}
        self._settled = False

    @property
    def devices(self) -> int:
        """Devices of all copies."""
        return self.layout.world * self.copies

    @property
    def held(self) -> int:
        """Requests that one copy can decode together: what its caches hold, and what the engine runs."""
        limit, replicas = self.ctx.settings.max_num_seqs, self.layout.dp
        return min(self.memory.max_requests, limit * replicas if limit else self.memory.max_requests)

    @cached_property
    def curve(self) -> StepCurve:
        """Steps by requests of a replica."""
        ctx = self.ctx
        ranks = stage_ranks(self.placement)
        return StepCurve(StepTimer(self.placement, ctx.cluster, ctx.settings, ctx.workload, Conditions(), ranks))

    def time(self, requests: int) -> ServingTime:
        """Prediction with ``requests`` in flight on one copy."""
        if requests not in self._times:
            work = replace(self.ctx.workload, concurrency=requests, rate=None)
            self._times[requests] = self._predict(work)
        return self._times[requests]

    def at_rate(self, rate: float) -> ServingTime:
        """Prediction at ``rate`` requests a second of one copy."""
        return self._predict(replace(self.ctx.workload, rate=rate))

    def _predict(self, work: Serve) -> ServingTime:
        ctx = self.ctx
        return serving_time(
            self.placement, ctx.cluster, work, self.memory.max_requests, ctx.settings, steps=self.curve.at
        )  # fmt: skip

    def keeps(self, time: ServingTime) -> bool:
        """Whether predicted means keep the targets."""
        return time.stable and not self.ctx.late(time)

    def goodput(self, requests: int) -> float:
        """Output tokens a second of all copies within the targets, with ``requests`` in flight on each."""
        work = self.ctx.workload
        return self.time(requests).goodput(work.ttft_s, work.tpot_s) * work.osl * self.copies

    @cached_property
    def best(self) -> Best:
        """The load that the layout is judged at; see ``Best``."""
        ctx, work = self.ctx, self.ctx.workload
        most, limit = self.within() if ctx.judged else (self.full, self._room())
        goodput = self.goodput(most) if not ctx.judged or self.keeps(self.time(most)) else 0.0
        if work.rate is not None:
            time = self.at_rate(work.rate / self.copies)
            inside = max(1, min(self.held, ceil(work.rate / self.copies * (time.tpot.value * work.osl))))
            return Best(inside, time, "asked", self.keeps(time), goodput, most)
        if work.concurrency is not None:
            asked = ceil(work.concurrency / self.copies)
            time = self.time(asked)
            return Best(asked, time, "asked", self.keeps(time), self._asked(asked, goodput), most)
        time = self.time(most)
        return Best(most, time, limit, self.keeps(time), goodput, most)

    def settled(self) -> Probe:
        """The same with ``best`` by steps timed for its load (``ServeContext.exact``)."""
        if not self._settled:
            before, (inside, time) = self.best, self.ctx.exact(self)
            work, goodput = self.ctx.workload, before.goodput
            if work.rate is None and (work.concurrency is None or not self.ctx.judged):
                goodput = time.goodput(work.ttft_s, work.tpot_s) * work.osl * self.copies
            meets = self.keeps(time)
            if self.ctx.judged and not meets:
                goodput = 0.0
            most = inside if work.concurrency is None and work.rate is None else before.most
            self.best = Best(inside, time, before.limit, meets, goodput, most)
            self._settled = True
        return self

    def _asked(self, asked: int, goodput: float) -> float:
        """With a stated load and no targets: tokens a second at that load."""
        return goodput if self.ctx.judged else self.goodput(asked)

    @property
    def full(self) -> int:
        """As many requests as one copy holds, one a replica at least."""
        return max(self.layout.dp, self.held)

    def _room(self) -> Limit:
        return "cache" if self.held >= self.memory.max_requests else "sequences"

    def within(self) -> tuple[int, Limit]:
        """The requests in flight on one copy with the highest goodput, and what keeps them from being more.

        One a replica where even that breaks a target.
        """
        least, top = self.layout.dp, self.full
        good, bad = least, 0
        if not self.keeps(self.time(least)):
            return least, self._broken(least)
        while good < top and not bad:
            following = min(4 * good, top)
            if self.keeps(self.time(following)):
                good = following
            else:
                bad = following
        for _ in range(BISECTIONS if bad else 0):
            between = isqrt(good * bad)
            if between in {good, bad} or bad - good < max(least, good // 32):
                break
            good, bad = (between, bad) if self.keeps(self.time(between)) else (good, between)
        return self._peak(good), self._broken(bad) if bad else self._room()

    def _peak(self, most: int) -> int:
        """The load of at most ``most`` with the highest goodput: it falls before the means break a target, because more
        and more requests do."""
        for _ in range(REFINED):
            known = sorted(n for n in self._times if n <= most)
            at = max(range(len(known)), key=lambda i: self.goodput(known[i]))
            for other in {max(0, at - 1), min(len(known) - 1, at + 1)} - {at}:
                self.time((known[at] + known[other]) // 2)
        return max((n for n in self._times if n <= most), key=self.goodput)

    def _broken(self, requests: int) -> Limit:
        """The target that a load breaks by the larger factor."""
        time, work = self.time(requests), self.ctx.workload
        slow = time.tpot.value / work.tpot_s if work.tpot_s is not None else 0.0
        late = time.ttft.value / work.ttft_s if work.ttft_s is not None else 0.0
        return "tpot" if slow >= late else "ttft"

    def point(self, requests: int) -> Point:
        """The layout at a load."""
        time = self.time(requests)
        return Point(
            requests, time.ttft.value, time.tpot.value, time.tokens_per_s.value / self.layout.world
        )  # fmt: skip

    def points(self) -> list[Point]:
        """The layout with one request a replica, four times as many, and so on up to what it holds."""
        loads = [self.layout.dp]
        while loads[-1] * 4 <= self.full:
            loads.append(loads[-1] * 4)
        return [self.point(n) for n in loads]

    def seen(self) -> list[Point]:
        """The layout at every load that was looked at."""
        return [self.point(n) for n in sorted(self._times)]


class FrontPoint(NamedTuple):
    """A point that no other beats in both time a token and tokens a second and device."""

    probe: Probe
    point: Point


def front(probes: Sequence[Probe]) -> list[FrontPoint]:
    """The Pareto front of time per output token against tokens a second and device, ascending in time.

    ``probes``: layouts that work, best first.
    """
    every = [FrontPoint(probe, point) for probe in probes[:CURVES] for point in probe.points()]
    every += [FrontPoint(probe, point) for probe in probes for point in probe.seen()]
    found: list[FrontPoint] = []
    for one in sorted(every, key=lambda f: (f.point.tpot_s, -f.point.tokens_s_device)):
        if not found or one.point.tokens_s_device > found[-1].point.tokens_s_device:
            found.append(one)
    return found


@dataclass(frozen=True, slots=True)
class ServeFound:
    """What a search found beside the plan.

    Attributes:
        size: layouts of the space. illegal, unfit: of them refused by the engine, or too large. costed: predicted at
            many loads.
        front: see ``front``. ranked: layouts that work, best first.
        split: the best separate prefill and decode pools; None where none was searched or works.
    """

    size: int
    illegal: int
    unfit: int
    costed: int
    front: tuple[FrontPoint, ...]
    ranked: tuple[Probe, ...]
    split: SplitFound | None = None

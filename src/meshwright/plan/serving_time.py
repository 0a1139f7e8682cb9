"""TTFT, TPOT and throughput of a serving layout: steps timed part by part, then queues around them.

``serving_time`` puts the timed steps of the busiest stage (``serving_time_steps``) into the closed formulas of
``timing.closed_loop`` (a number of users) or of a queue with random arrivals (a rate). No model is known by name; an
engine only by the host constants of ``timing.step_time``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil, erf, inf, log, sqrt
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.plan.serving_time_steps import (
    PROMPT_BUDGET,
    Conditions,
    StageRank,
    StepSet,
    StepTimer,
    stage_ranks,
    word_of,
)
from meshwright.plan.timing.closed_loop import Host, Load, Times, closed_loop
from meshwright.plan.timing.compute import constants
from meshwright.plan.timing.estimate import Seconds, Word, spread
from meshwright.plan.timing.sharing import shared
from meshwright.plan.timing.step_time import PARTS, EngineTime, engine_time
from meshwright.specs.cluster import Cluster
from meshwright.specs.placement import Placement
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve

#: Points of the distribution of a request's TTFT.
POINTS = 100
#: Rounds of the fixed point between requests inside and the time they stay.
LITTLE_ROUNDS = 6
#: Loads at which steps are timed to know how many requests decode together at a rate, over the mean load.
SPREAD = (0.0, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class ServingTime:
    """Prediction of one layout under one load.

    Attributes:
        ttft, tpot: mean seconds to the first token and for each further one, with their 80 % intervals.
        tokens_per_s: output tokens a second of the whole deployment, in the same form.
        requests_per_s: of the whole deployment.
        running, asked: requests of a replica that decode together (at a rate: as one of them sees it, itself included),
            and that are in flight.
        capacity: requests of a replica that its caches hold.
        ttft_parts, tpot_parts: named seconds that add up to the means.
        utilization: share of the time in which prompts are worked on.
        stable: the rate can be kept up (always true in a closed loop).
        ttft_points: equally likely values of a request's TTFT, ascending.
        tpot_sigma: standard deviation of a request's TPOT.
    """

    ttft: Seconds
    tpot: Seconds
    tokens_per_s: Seconds
    requests_per_s: float
    running: int
    asked: float
    capacity: int
    ttft_parts: tuple[tuple[str, float], ...]
    tpot_parts: tuple[tuple[str, float], ...]
    utilization: float
    stable: bool = True
    ttft_points: tuple[float, ...] = field(default=(), repr=False)
    tpot_sigma: float = 0.0

    def ttft_percentile(self, percent: float) -> float:
        """TTFT in seconds that ``percent`` % of the requests keep."""
        points = self.ttft_points or (self.ttft.value,)
        return points[min(len(points) - 1, int(percent / 100 * len(points)))]

    def tpot_percentile(self, percent: float) -> float:
        """TPOT in seconds that ``percent`` % of the requests keep: normal about the mean."""
        p = min(max(percent / 100, 1e-4), 1 - 1e-4)
        deviations: float = (
            p**0.135 - (1 - p) ** 0.135
        ) / 0.1975  # Tukey's lambda, within 0.02 of the normal up to 99 %
        return max(0.0, self.tpot.value + self.tpot_sigma * deviations)

    def goodput(self, ttft_s: float | None = None, tpot_s: float | None = None) -> float:
        """Requests a second that keep both targets (None: no target)."""
        points = self.ttft_points or (self.ttft.value,)
        first = 1.0 if ttft_s is None else sum(p <= ttft_s for p in points) / len(points)
        each = 1.0
        if tpot_s is not None:
            each = 0.5 * (1.0 + erf((tpot_s - self.tpot.value) / max(self.tpot_sigma, 1e-9) / sqrt(2)))
        return self.requests_per_s * first * each


@cache
def _widths() -> Mapping[str, Any]:
    text = Path(__file__).with_name("constants").joinpath("serving_time.json").read_bytes()
    data: Mapping[str, Any] = json.loads(text)
    return data


def log_width(metric: str, mode: str, moe: bool, word: Word) -> float:
    """Half-width of the 80 % interval in log seconds: ``metric`` ttft or tpot, ``mode`` aggregated or disaggregated;
    a mixture of experts is less certain than a dense model, and what is modelled than what was measured alike."""
    width: float = _widths()[metric][mode]["experts" if moe else "dense"]
    return width * (1.0 if word == "calibrated" else float(_widths()["modelled"]))


def interval(value: float, metric: str, mode: str, moe: bool, word: Word) -> Seconds:
    """A predicted time with its 80 % interval (see ``log_width``)."""
    return spread(value, log_width(metric, mode, moe, word), word) if value < inf else Seconds(inf, inf, inf, word)


def serving_time(
    placement: Placement,
    cluster: Cluster,
    workload: Serve,
    max_requests: int,
    settings: ServeSettings,
    conditions: Conditions | None = None,
    ranks: Sequence[StageRank] | None = None,
    steps: Callable[[int], StepSet] | None = None,
) -> ServingTime:
    """Predict a layout under a workload.

    Args:
        placement, cluster: model, layout, engine; devices and links.
        workload: mean lengths, and a ``rate`` or the users (``concurrency``); neither: as many users as the caches
            hold. Of both the rate counts.
        max_requests: whole requests that the caches of all replicas hold (``ServeMemory.max_requests``).
        settings: engine settings.
        conditions: how requests come; None: the defaults.
        ranks: see ``stage_ranks``; counted where None.
        steps: timed steps by requests of a replica that decode together; None: timed here.
    """
    conditions = conditions or Conditions()
    if steps is None:
        ranks = ranks if ranks is not None else stage_ranks(placement)
        steps = StepTimer(placement, cluster, settings, workload, conditions, ranks).at
    replicas = placement.layout.dp
    capacity = max(1, max_requests // replicas)
    if settings.max_num_seqs is not None:
        capacity = min(capacity, settings.max_num_seqs)

    engine = engine_time(placement.profile.engine, cluster.device.driver)
    basis = _Basis(engine, placement.spec.moe is not None, word_of(placement, cluster, engine))
    host = Host(engine.request_s, conditions.poll_steps / 2 + conditions.dp_wait_steps, constants()["queue"])
    if workload.rate is not None:
        return _at_rate(workload, workload.rate / replicas, replicas, capacity, host, basis, steps)
    asked = (workload.concurrency or max(replicas, max_requests)) / replicas
    running = max(1, min(ceil(asked), capacity))
    found = steps(running)
    load = _load(workload, settings, conditions, engine, running, asked)
    times: Times = closed_loop(found.steps, load, host)
    inside = times.ttft - times.place_wait + max(workload.osl - 1, 1) * times.tpot
    rounds = times.round if load.cluster == 0 else times.burst
    return _result(
        workload, found, times, basis, running * replicas / inside, running, asked, capacity,
        _points(found, times, load.lockstep), sqrt(max(times.interference * rounds, 0.0) / workload.osl), True,
    )  # fmt: skip


class _Basis(NamedTuple):
    """What constants and intervals rest on: host constants, whether experts are mixed, how sure the times are."""

    engine: EngineTime
    moe: bool
    word: Word


def _load(
    workload: Serve, settings: ServeSettings, conditions: Conditions, engine: EngineTime, running: int, asked: float
) -> Load:
    equal = conditions.equal_lengths
    return Load(
        running=running,
        asked=max(asked, running),
        isl=workload.isl,
        osl=workload.osl,
        budget=settings.max_num_batched_tokens or PROMPT_BUDGET,
        alone=float(engine.alone),
        lockstep=1.0 if equal and engine.alone else 1.0 / max(conditions.prompts_per_user, 1.0),
        cluster=constants()["cluster"] if equal and not engine.alone else 0.0,
    )


def _at_rate(
    workload: Serve,
    rate: float,
    replicas: int,
    capacity: int,
    host: Host,
    basis: _Basis,
    steps: Callable[[int], StepSet],
) -> ServingTime:
    """Random arrivals at ``rate`` a replica: requests inside by Little's law, prompts wait as in an M/D/1 queue.

    Requests that decode share the device, the more of them the longer each step, and those whose prompts were worked
    on together begin together: how many there are is a birth and death process (``timing.sharing``), whose mean is
    above that of mean loads.
    """
    running, found = 1, steps(1)
    for _ in range(LITTLE_ROUNDS):
        times, busy = _open(found, rate, workload, host, basis.engine)
        wanted = rate * workload.osl * times.tpot if busy < 1 else inf
        following = max(1, min(round(1 + wanted), capacity) if wanted < inf else capacity)
        if following == running:
            break
        running, found = following, steps(following)
    times, busy = _open(found, rate, workload, host, basis.engine)
    free, crowd = 1 - times.interference / times.tpot, None
    if busy < 1:
        points = sorted({min(max(1, round(running * share)), capacity) for share in SPREAD})
        known = [(n, workload.osl * (found if n == running else steps(n)).steps.dec / free) for n in points]
        crowd = shared(rate, capacity, known, min(max(1 - free, 0.0), busy))
    if crowd is not None:
        running = min(max(1, round(crowd.met)), capacity)
        found = steps(running)
        tpot = crowd.inside / (rate * workload.osl)
        wait = crowd.waiting / rate
        times = times._replace(tpot=tpot, interference=tpot * (1 - free), place_wait=wait, ttft=times.ttft + wait)
    else:
        times = times._replace(ttft=inf)
    best = min(rate, capacity / max(workload.osl * times.tpot, 1e-12)) if busy < 1 else 1.0 / times.round
    stable = crowd is not None
    inside = rate * (times.ttft + workload.osl * times.tpot) if stable else float(running)
    return _result(
        workload, found, times, basis, (rate if stable else best) * replicas, running, inside, capacity,
        _points(found, times, 0.0) if stable else (inf,),
        sqrt(max(times.interference * times.round, 0.0) / workload.osl), stable,
    )  # fmt: skip


def _open(found: StepSet, rate: float, workload: Serve, host: Host, engine: EngineTime) -> tuple[Times, float]:
    """Mean times at a rate, and the share of time that rounds with prompts take."""
    s = found.steps
    base = s.prompt - s.each if engine.alone else s.dec
    one = max(base + s.each, s.floor)
    lost = 0.0 if engine.alone else s.dec
    busy = rate * one
    taken = min(rate * max(one - lost, 0.0), 0.99)
    tpot = s.dec / (1 - taken)
    wait = one * host.queue * busy / (2 * (1 - busy)) if busy < 1 else inf
    ttft = one + s.fill + wait + host.wait * s.dec + host.request
    return Times(ttft, tpot, one, one, tpot - s.dec, wait, 0.0, min(busy, 1.0)), busy


def _points(found: StepSet, t: Times, lockstep: float) -> tuple[float, ...]:
    """Equally likely TTFTs: steady ones with an exponential wait, those of a burst spread over its rounds, and a wait
    for a free place that grows evenly."""
    fixed = t.ttft - t.prompt_wait - t.place_wait
    burst = round(POINTS * lockstep)
    steady = POINTS - burst
    queue = max(t.prompt_wait if not burst else t.round * t.busy, 0.0)
    points = []
    for i in range(steady):
        q = (i + 0.5) / steady
        late = q > 1 - t.busy and t.busy > 0 and queue > 0
        wait = queue / t.busy * -log((1 - q) / t.busy) if late else 0.0
        points.append(fixed + wait + 2 * q * t.place_wait)
    longest = 2 * max(t.prompt_wait - (1 - lockstep) * queue, 0.0) / lockstep if lockstep else 0.0
    points += [fixed + longest * (i + 0.5) / burst + t.place_wait for i in range(burst)]
    return tuple(sorted(points))


def _result(
    workload: Serve,
    found: StepSet,
    t: Times,
    basis: _Basis,
    rate: float,
    running: int,
    asked: float,
    capacity: int,
    points: tuple[float, ...],
    sigma: float,
    stable: bool,
) -> ServingTime:
    each = (t.tpot - t.interference) / found.decode.seconds
    tpot_parts = [(name, found.decode.of(name) * each) for name in PARTS]
    tpot_parts.append(("prefill interference", t.interference))
    request, s = basis.engine.request_s, found.steps
    moe, word = basis.moe, basis.word
    own = t.ttft - t.prompt_wait - t.place_wait - request if t.ttft < inf else t.round
    ttft_parts = (
        ("prefill", min(own, s.prompt + s.fill)),
        ("beside decoding", max(0.0, own - s.prompt - s.fill)),
        ("request", request),
        ("queue for prefill", t.prompt_wait),
        ("queue for a place", t.place_wait),
    )
    tokens = rate * workload.osl
    width = interval(1.0, "tpot", "aggregated", moe, word)
    return ServingTime(
        ttft=interval(t.ttft, "ttft", "aggregated", moe, word),
        tpot=interval(t.tpot, "tpot", "aggregated", moe, word),
        tokens_per_s=Seconds(tokens, tokens * width.low, tokens * width.high, word),
        requests_per_s=rate,
        running=running,
        asked=asked,
        capacity=capacity,
        ttft_parts=ttft_parts,
        tpot_parts=tuple(tpot_parts),
        utilization=t.busy,
        stable=stable,
        ttft_points=points,
        tpot_sigma=sigma,
    )

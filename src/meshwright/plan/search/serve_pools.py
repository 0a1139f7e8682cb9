"""The search over separate prefill and decode pools: a layout for each side, how many workers, how many requests.

Every pair of a prefill and a decode layout is a few closed formulas (``timing.closed_loop.pools``) over the steps that
the probes hold, so that all splits of the devices into workers are tried. The best are predicted once more by
``serving_time_pools.pool_time``, the function that ``--prefill`` and ``--decode`` take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from meshwright.plan.search.serve import Probe
from meshwright.plan.serving_time import ServingTime
from meshwright.plan.serving_time_pools import (
    FULL_LANES,
    Pool,
    cache_bytes,
    pool_time,
    prompt_seconds,
    transfer_rate,
)
from meshwright.plan.serving_time_steps import PROMPT_BUDGET, Conditions, StepSet
from meshwright.plan.timing.closed_loop import Host, Steps, pools
from meshwright.plan.timing.compute import constants
from meshwright.specs.layout import Layout, product

if TYPE_CHECKING:
    from meshwright.plan.serve_context import ServeContext

#: Layouts of each side that meet in pairs, best first.
PREFILLS, DECODES = 4, 6
#: Layouts whose decode steps are looked at, those that serve most as one pool first.
LOOKED = 20
#: Numbers of prefill workers that are tried for a pair, evenly spread.
SPLITS = 16
#: Splits that are predicted once more, best first.
EXACT = 6


class Split(NamedTuple):
    """One way to share out the devices.

    Attributes:
        prefill, decode: layouts of a worker of each side. prefill_workers, decode_workers: how many.
        users: requests in flight over all. goodput: output tokens a second within the targets.
        devices: of both sides. waiting: share of the first token's time that is waiting for a prefill worker.
    """

    prefill: Probe
    decode: Probe
    prefill_workers: int
    decode_workers: int
    users: int
    goodput: float
    ttft_s: float
    tpot_s: float
    waiting: float

    @property
    def devices(self) -> int:
        """Devices of both sides."""
        return self.prefill.layout.world * self.prefill_workers + self.decode.layout.world * self.decode_workers

    @property
    def name(self) -> str:
        """``"2 x TP 8 prefill + 1 x DP 16, EP 16 decode"``."""
        one, other = product(self.prefill.layout), product(self.decode.layout)
        return f"{self.prefill_workers} x ({one}) prefill + {self.decode_workers} x ({other}) decode"


@dataclass(frozen=True, slots=True)
class SplitFound:
    """The best split, predicted; ``ratios``: the best of its pair of layouts for every number of prefill workers."""

    best: Split
    time: ServingTime
    ratios: tuple[Split, ...]
    tried: int


class _Lane(NamedTuple):
    """A prefill worker's lane: seconds of a prompt with all lanes busy and alone, and least seconds of its launches."""

    full: float
    solo: float
    floor: float


def search_split(ctx: ServeContext, probes: Sequence[Probe]) -> SplitFound | None:
    """The best split of the cluster, or None where no pair of layouts works.

    Args:
        ctx: the search.
        probes: layouts whose memory is counted; one request is enough to prefill.
    """
    fitting = [p for p in probes if p.memory.max_requests > 0 and _placeable(p.layout, ctx)]
    fronts, backs = _prefills(ctx, fitting), _decodes(ctx, fitting)
    every = [split for one in fronts for other in backs for split in _splits(ctx, one, other)]
    ranked = sorted(every, key=lambda s: (late(ctx, s.ttft_s, s.tpot_s), -s.goodput, s.devices))
    for split in ranked[:EXACT]:
        time = predicted(ctx, split)
        if not late(ctx, time.ttft.value, time.tpot.value):
            break
    else:
        return None
    pair = [s for s in ranked if (s.prefill, s.decode) == (split.prefill, split.decode)]
    first: dict[int, Split] = {}
    for s in pair:
        first.setdefault(s.prefill_workers, s)
    return SplitFound(split, time, tuple(first[n] for n in sorted(first)), len(every))


def late(ctx: ServeContext, ttft_s: float, tpot_s: float) -> bool:
    """Whether means break a target."""
    w = ctx.workload
    return (w.ttft_s is not None and ttft_s > w.ttft_s) or (w.tpot_s is not None and tpot_s > w.tpot_s)


def predicted(ctx: ServeContext, split: Split) -> ServingTime:
    """The prediction that the two layouts get when they are stated."""
    sides = (
        Pool(split.prefill.placement, ctx.cluster, split.prefill_workers),
        Pool(split.decode.placement, ctx.cluster, split.decode_workers),
    )
    return pool_time(*sides, replace(ctx.workload, concurrency=split.users, rate=None), ctx.settings)


def _placeable(layout: Layout, ctx: ServeContext) -> bool:
    """Workers that fill nodes evenly, whole ones or an equal part of one, and leave room for the other side."""
    node, world = ctx.cluster.devices_per_node, layout.world
    return layout.dcp * layout.cp == 1 and world < ctx.cluster.devices and (node % world == 0 or world % node == 0)


def _lane(probe: Probe) -> _Lane:
    timer = probe.curve.timer
    prompts = timer.prompts
    slowest = max(range(len(prompts)), key=lambda i: prompts[i].seconds)
    none = prompts[slowest]
    full, solo = prompt_seconds(timer.assembled(slowest, none, none, 0.0, 0.0), probe.layout.dp)
    floor = none.launches * timer.engine.eager_s * ceil(timer.workload.isl / PROMPT_BUDGET)
    return _Lane(full, solo, floor)


def _prefills(ctx: ServeContext, probes: Sequence[Probe]) -> list[tuple[Probe, _Lane]]:
    """Layouts with the most prompts a second and device whose prompt alone keeps the TTFT target."""
    found = [(probe, _lane(probe)) for probe in probes if probe.layout.pp == 1] or [(p, _lane(p)) for p in probes]
    w = ctx.workload
    kept = [(p, lane) for p, lane in found if w.ttft_s is None or max(lane.solo, lane.floor) <= w.ttft_s]
    kept.sort(key=lambda pair: max(pair[1].full, pair[1].floor) * pair[0].layout.world / pair[0].layout.dp)
    return kept[:PREFILLS]


def _decodes(ctx: ServeContext, probes: Sequence[Probe]) -> list[tuple[Probe, list[int]]]:
    """Layouts with the most tokens a second and device at a load that keeps the TPOT target, and the loads of a
    replica that do."""
    limit, found = ctx.workload.tpot_s, []
    for probe in sorted(probes, key=lambda p: -p.best.goodput)[:LOOKED]:
        loads = list(_loads(max(1, probe.held // probe.layout.dp), probe, limit))
        if loads:
            most = loads[-1]
            step = probe.curve.decode(most).seconds * probe.layout.pp
            found.append((probe.layout.dp * most / step / probe.layout.world, probe, loads))
    found.sort(key=lambda item: -item[0])
    return [(probe, loads) for _, probe, loads in found[:DECODES]]


def _loads(most: int, probe: Probe, limit: float | None) -> Iterator[int]:
    """Powers of two up to ``most`` whose decode step keeps the target."""
    requests = 1
    while requests <= most:
        if limit is not None and _steps(probe, requests).dec > limit:
            return
        yield requests
        requests *= 2


def _steps(probe: Probe, requests: int) -> Steps:
    """Decode steps of ``requests`` of a replica and of a quarter of them; prompts are the other side's."""
    decode, low = probe.curve.decode(requests), probe.curve.decode(max(1, requests // 4))
    found: StepSet = probe.curve.timer.assembled(probe.curve.slowest, decode, low, 0.0, 0.0)
    return found.steps


def _splits(ctx: ServeContext, one: tuple[Probe, _Lane], other: tuple[Probe, list[int]]) -> Iterator[Split]:
    """All numbers of workers and loads of one pair."""
    (front, lane), (back, loads) = one, other
    rate = transfer_rate(front.layout.world + back.layout.world, ctx.cluster)
    move = back.curve.timer.engine.transfer_s + cache_bytes(back.placement, ctx.workload.isl) / rate
    devices, per = ctx.cluster.devices, (front.layout.world, back.layout.world)
    most = (devices - per[1]) // per[0]
    for count in range(1, most + 1, max(1, ceil(most / SPLITS))):
        rest = (devices - count * per[0]) // per[1]
        users = [ctx.workload.concurrency] if ctx.workload.concurrency else _totals(loads, rest * back.layout.dp)
        for total in users:
            found = _one(ctx, (front, lane), back, (count, rest), total, move)
            if found is not None:
                yield found


def _totals(loads: Sequence[int], replicas: int) -> list[int]:
    """Requests in flight over all replicas: the loads, and those half way to the next."""
    return sorted({n * replicas for n in loads} | {n * replicas * 3 // 2 for n in loads[:-1]})


def _one(
    ctx: ServeContext, one: tuple[Probe, _Lane], back: Probe, workers: tuple[int, int], users: int, move: float
) -> Split | None:
    """One split by the closed formulas, ``move``: seconds of a cache between the workers; None where the decode side
    does not hold the requests or the rate is missed."""
    (front, lane), work, c = one, ctx.workload, constants()
    replicas, lanes = back.layout.dp * workers[1], front.layout.dp * workers[0]
    running = max(1, ceil(users / replicas))
    if running * back.layout.dp > back.held:
        return None
    engine = back.curve.timer.engine
    power = 1 << (running - 1).bit_length()
    steps = _steps(back, power)
    if power != running:
        below = _steps(back, power // 2)
        share = running / (power // 2) - 1
        steps = Steps(*(x + (y - x) * share for x, y in zip(below, steps, strict=True)))
    prompt = lane.solo + (lane.full - lane.solo) * min(users / lanes / FULL_LANES, 1.0)
    host = Host(engine.request_s, 0.5, c["queue"])
    burst = 1.0 / max(Conditions().prompts_per_user, 1.0)
    t = pools(steps._replace(prompt=prompt, floor=lane.floor), users, lanes, replicas, work.osl, move, host, burst)
    per_s = users / (t.ttft + max(work.osl - 1, 1) * t.tpot)
    if work.rate is not None and per_s < work.rate:
        return None
    good = per_s * work.osl * _kept(t.ttft, t.prompt_wait, work.ttft_s)
    return Split(front, back, *workers, users, good, t.ttft, t.tpot, t.prompt_wait / t.ttft)


def _kept(ttft: float, wait: float, target: float | None) -> float:
    """Share of requests whose first token keeps the target: waits grow evenly to twice their mean."""
    if target is None:
        return 1.0
    fixed = ttft - wait
    if wait <= 0:
        return float(fixed <= target)
    return float(min(max((target - fixed) / (2 * wait), 0.0), 1.0))

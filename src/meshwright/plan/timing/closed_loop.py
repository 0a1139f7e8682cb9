"""TTFT and TPOT of requests that come in a closed loop, from the times of single steps. Formulas only.

C users each send a request, wait for its end and send the next. B of them decode together on a replica (as many as
its caches hold), prompts of I tokens enter between or beside them, outputs have O tokens. With ``dec`` the decode step
of B, ``round`` a step that has prompts in it and ``lost`` what of it decoding would have taken anyway:

    TPOT = dec + (rounds that others' prompts take during my output) x (round - lost) / O
    TTFT = my round (waiting for those before me) + half a step + request handling + waiting for a free place

Prompts arrive one by one where lengths vary (B / O of them a step where that is more). Where all requests have one
length, those admitted together end together: an engine that mixes prompts into decode steps keeps such clusters apart,
one that prefills alone (SGLang) ends up with all users in lockstep. The start of a benchmark is a burst as well: all C
prompts at once. Every formula takes numbers or arrays (``larger`` and ``smaller`` are max and min, or numpy's maximum
and minimum).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

#: A number, or an array of them.
N = Any
Pick = Callable[[N, N], N]


#: Share of time that a lane of a closed loop works at most when its queue is taken from that of random arrivals.
MOST_BUSY = 0.75


class Steps(NamedTuple):
    """Seconds of single steps of one replica.

    Attributes:
        dec: decode step of all running requests, host included.
        low: decode step of a quarter of them.
        prompt: one prompt alone. each: what one more prompt adds to a step.
        floor: least time of a step with prompts (launched without CUDA graphs).
        fill: seconds that a prompt spends in pipeline stages beyond the slowest one.
    """

    dec: N
    low: N
    prompt: N
    each: N
    floor: N
    fill: N = 0.0


class Load(NamedTuple):
    """What is asked of one replica, and how.

    Attributes:
        running: requests that decode together. asked: requests in flight (more wait).
        isl, osl: tokens. budget: prompt tokens of one step.
        alone: 1 where prompts run without decoding requests (SGLang), else 0.
        lockstep: share of requests that meet all others' prompts at once: 1 / prompts of a user in a benchmark.
        cluster: prompts of one length that enter together, as a power of those that fit into a step; 0: one by one.
    """

    running: N
    asked: N
    isl: N
    osl: N
    budget: N
    alone: N
    lockstep: N
    cluster: N


class Host(NamedTuple):
    """Host side of a request: ``request`` seconds a request, ``wait`` steps until the scheduler looks for it,
    ``queue``: weight of waiting for other prompts."""

    request: N
    wait: N
    queue: N


class Times(NamedTuple):
    """Mean times of a request in seconds, and their parts."""

    ttft: N
    tpot: N
    round: N
    burst: N
    interference: N
    prompt_wait: N
    place_wait: N
    busy: N


def closed_loop(s: Steps, load: Load, host: Host, larger: Pick = max, smaller: Pick = min) -> Times:
    """Mean TTFT and TPOT of one replica; see the head of the module."""
    packed = larger(1.0, smaller(load.budget // load.isl, load.running))
    group = larger(packed**load.cluster, smaller(load.running / load.osl, packed))  # at least those of one step
    base = load.alone * (s.prompt - s.each) + (1 - load.alone) * s.dec
    one = larger(base + group * s.each, s.floor)
    full = larger(base + packed * s.each, s.floor)
    lost = (1 - load.alone) * s.dec
    rounds = load.running / packed
    apart = larger(load.running / group - 1, 0.0) * larger(one - lost, 0.0)
    together = larger(rounds - 1, 0.0) / 2 * larger(full - lost, 0.0)
    interference = ((1 - load.lockstep) * apart + load.lockstep * together) / load.osl
    tpot = s.dec + interference
    alone_in_queue = smaller(larger(2 - group, 0.0), 1.0)
    busy = alone_in_queue * smaller(load.running * one / (load.running * one + load.osl * s.dec), 0.9)
    prompt_wait = (1 - load.lockstep) * one * host.queue * busy + load.lockstep * full * larger(rounds - 1, 0.0) / 2
    place_wait = larger(load.asked - load.running, 0.0) / load.running * load.osl * tpot
    mine = (1 - load.lockstep) * one + load.lockstep * full + s.fill
    ttft = mine + prompt_wait + host.wait * s.dec + host.request + place_wait
    return Times(ttft, tpot, one, full, interference, prompt_wait, place_wait, busy)


class PoolTimes(NamedTuple):
    """Mean times of prefill and decode pools; ``running``: requests that decode on one replica; ``busy``: share of
    time that a prefill lane works; ``bound``: 1 where prefill limits the rate."""

    ttft: N
    tpot: N
    running: N
    busy: N
    prompt_wait: N
    bound: N


def pools(
    s: Steps,
    users: N,
    lanes: N,
    replicas: N,
    osl: N,
    transfer: N,
    host: Host,
    lockstep: N,
    larger: Pick = max,
    smaller: Pick = min,
) -> PoolTimes:
    """Mean TTFT and TPOT of separate pools: ``lanes`` prefill one prompt each, first come first served; prompts wait as
    in an M/D/1 queue, and those of the start for all before them.

    ``s.dec`` and ``s.low`` are decode steps of ``users / replicas`` requests and of a quarter of them; where prefill
    cannot feed that many, fewer run: their step lies on the line through both.
    """
    share = users / lanes
    most = users / replicas
    mine = larger(s.prompt, s.floor)
    slope = (s.dec - s.low) / larger(most * 0.75, 0.75)
    fixed = larger(s.low - slope * most / 4, 0.3 * s.low)
    # Fed by prefill: rate r = lanes / prompt requests a second, running = r x O x step / replicas.
    feed = lanes / mine * osl / replicas
    fed = fixed * feed / larger(1 - feed * slope, 1e-3)
    running = smaller(most, larger(fed, smaller(most, 1.0)))
    tpot = larger(smaller(fixed + slope * running, s.dec), smaller(s.low, s.dec) * 0.5)
    first = mine + transfer + host.request + tpot * host.wait
    busy = smaller(share * mine / (first + osl * tpot), 1.0)
    load = smaller(busy, MOST_BUSY)
    wait = lockstep * larger(share - 1, 0.0) / 2 * mine + host.queue * load / (2 * (1 - load)) * mine
    bound = larger(share * mine - osl * tpot - first, 0.0)
    waiting = larger(wait, bound)
    return PoolTimes(first + waiting, tpot, running, busy, waiting, bound)

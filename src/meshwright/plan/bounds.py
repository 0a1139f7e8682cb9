"""What bounds a serving layout: bytes, FLOPs, which collective, launches, prompts between; and what stops more load."""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import TYPE_CHECKING

from meshwright.plan.plan import Candidate, Reason
from meshwright.plan.serving_time_steps import Conditions, StepTimer, stage_ranks
from meshwright.plan.timing.compute import constants, efficiency, peak_flops
from meshwright.plan.timing.step import Message, Work, step_work
from meshwright.plan.timing.step_time import kernel_seconds, message_seconds
from meshwright.specs.workload import Serve

if TYPE_CHECKING:
    from meshwright.plan.search.serve import Limit
    from meshwright.plan.serve_context import ServeContext

#: What the parts of a decode step are called in a sentence.
WORDS = {
    "bytes": "memory traffic",
    "flops": "arithmetic",
    "links": "links",
    "host": "launches and host",
    "prompts": "prompts of other requests",
}
#: What stops more requests in flight.
STOPS = {
    "tpot": "more requests in flight would break the TPOT target",
    "ttft": "more requests in flight would break the TTFT target (prompts queue)",
    "cache": "the caches hold no more requests",
    "sequences": "the engine runs no more requests at once (--max-num-seqs)",
    "asked": "",
}


def shares(ctx: ServeContext, candidate: Candidate) -> tuple[dict[str, float], str]:
    """Parts of a token's predicted time by what bounds them (they add up to 1), and the largest collective.

    A kernel counts as memory traffic where reading takes longer than multiplying, at the efficiencies of both.
    """
    time = candidate.cost.predicted
    assert time is not None
    work = ctx.workload
    timer = StepTimer(
        candidate.placement, ctx.cluster, ctx.settings, work, Conditions(), stage_ranks(candidate.placement)
    )
    step, of = timer.decoding(time.running), dict(time.tpot_parts)
    rank = timer.ranks[-1]
    counted = step_work(candidate.placement, ctx.cluster.devices_per_node, rank.own, rank.stage, rank.at, step)
    reading = memory_share(ctx, counted)
    kernels = sum(of.get(name, 0.0) for name in ("weights", "experts", "attention"))
    found = {
        "bytes": kernels * reading + of.get("other", 0.0),
        "flops": kernels * (1 - reading),
        "links": of.get("communication", 0.0),
        "host": of.get("launch", 0.0) + of.get("host", 0.0),
        "prompts": of.get("prefill interference", 0.0),
    }
    total = sum(found.values()) or 1.0
    return {name: seconds / total for name, seconds in found.items()}, largest_message(ctx, counted)


def memory_share(ctx: ServeContext, work: Work) -> float:
    """Part of the seconds of products and cores in which reading takes longer than multiplying."""
    device, of = ctx.cluster.device, Counter[bool]()
    for k in work.kernels:
        if k.part == "other":
            continue
        e, peak = efficiency(device, k.kind, k.dtype), peak_flops(device, k.dtype)
        compute = k.flops / (peak * e.compute) * (1 + constants()["tile"] / k.rows if k.rows else 1)
        reads = k.moved_bytes / (device.bandwidth_bytes_s * e.memory) >= compute
        of[reads] += kernel_seconds(k, e, device.bandwidth_bytes_s, peak) * k.repeats  # type: ignore[assignment]
    return of[True] / (of[True] + of[False]) if of else 0.0


def largest_message(ctx: ServeContext, work: Work) -> str:
    """The collective with the most seconds: ``"all_to_all over 8 ranks"``; empty where nothing is sent."""
    seconds: dict[str, float] = {}
    for m in work.messages:
        if m.wiring.members > 1:
            name = _name(m)
            seconds[name] = seconds.get(name, 0.0) + message_seconds(m, ctx.cluster) * m.repeats
    return max(seconds, key=lambda name: seconds[name], default="")


def _name(m: Message) -> str:
    across = " across nodes" if m.wiring.across else ""
    return f"{m.op} over {m.wiring.members} ranks{across}"


def bound_reason(ctx: ServeContext, candidate: Candidate, limit: Limit | None = None) -> tuple[Reason, ...]:
    """What a token's predicted time goes into, and what stops more load; nothing without a prediction."""
    time = candidate.cost.predicted
    if time is None or not time.stable or not isinstance(candidate.workload, Serve):
        return ()
    parts, collective = shares(ctx, candidate)
    first = max(parts, key=lambda name: parts[name])
    said = ", ".join(
        f"{parts[name]:.0%} {WORDS[name]}{f' ({collective})' if name == 'links' and collective else ''}"
        for name in sorted(parts, key=lambda name: -parts[name])
        if parts[name] >= 0.01
    )
    stop = f"; {STOPS[limit]}" if limit is not None and STOPS[limit] else ""
    inside = ceil(time.asked)
    count = "one request" if inside == 1 else f"{inside:,} requests"
    text = f"{WORDS[first]} bound{'' if first in {'links', 'host', 'prompts'} else 's'} a token with {count} in flight"
    text += f" a replica: {time.tpot.value * 1e3:,.2f} ms, of it {said}{stop}"
    numbers = {f"{name}_share": value for name, value in parts.items()}
    return (Reason("bound_by", text, numbers | {"tpot_s": time.tpot.value}),)

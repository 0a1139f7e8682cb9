"""Whether a layout reaches what is asked of its speed: the rate, the time to first token, the time per token.

A target is judged by the predicted mean (``Cost.predicted``); that even the lower bound breaks it is said as such.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from meshwright.plan.cost import serve_cost
from meshwright.plan.memory import ServeMemory
from meshwright.plan.plan import Candidate, Rejected
from meshwright.plan.serving_time import ServingTime
from meshwright.plan.timing.estimate import Seconds
from meshwright.specs.layout import product
from meshwright.specs.workload import Serve

if TYPE_CHECKING:
    from meshwright.plan.search.serve import Probe
    from meshwright.plan.serve_context import ServeContext


def violations(ctx: ServeContext, candidate: Candidate) -> int:
    """Targets that the prediction breaks."""
    w, cost = ctx.workload, candidate.cost
    broken = w.tpot_s is not None and max(cost.tpot_s, cost.step_s) > w.tpot_s
    late = w.ttft_s is not None and max(cost.ttft_s, cost.prefill_s) > w.ttft_s
    slow = too_slow(ctx, candidate) is not None or saturates(ctx, candidate)
    return int(broken) + int(late) + int(slow)


def saturates(ctx: ServeContext, candidate: Candidate) -> bool:
    """Whether the predicted queue of a stated rate grows without end."""
    time = candidate.cost.predicted if ctx.workload.rate is not None else None
    return time is not None and not time.stable


def too_slow(ctx: ServeContext, found: Candidate | Probe) -> Rejected | None:
    """Why a layout cannot keep up with the rate, even at the peaks."""
    rate, bound = ctx.workload.rate, rate_bound(ctx, found)
    if rate is None or rate <= bound:
        return None
    text = f"at most {bound:,.2f} requests/s at the peaks, {rate:,.2f} are asked"
    return Rejected(found.layout, "rate_too_high", text)


def rate_bound(ctx: ServeContext, found: Candidate | Probe) -> float:
    """Requests a second that a layout can finish at the peaks with as many in flight as it holds; no rate: infinite."""
    if ctx.workload.rate is None or not isinstance(found.memory, ServeMemory):
        return inf
    if id(found.placement) not in ctx.rate_bounds:
        most = found.memory.max_requests
        full = serve_cost(found.placement, ctx.cluster, replace(ctx.workload, rate=None), most, ctx.settings)
        ctx.rate_bounds[id(found.placement)] = full.tokens_per_s / ctx.workload.osl
    return ctx.rate_bounds[id(found.placement)] * found.copies


def missed(ctx: ServeContext, candidate: Candidate) -> str:
    """Verdict on a layout that breaks a target; empty when it does not."""
    w, cost, name = ctx.workload, candidate.cost, product(candidate.layout)
    if w.tpot_s is not None and cost.step_s > w.tpot_s:
        step, target = cost.step_s * 1e3, w.tpot_s * 1e3
        return f"too slow: {name} fits, but a token takes at least {step:,.2f} ms, {target:,.2f} ms are asked"
    if w.ttft_s is not None and cost.prefill_s > w.ttft_s:
        first, target = cost.prefill_s * 1e3, w.ttft_s * 1e3
        return f"too slow: {name} fits, but a prefill takes at least {first:,.1f} ms, {target:,.1f} ms are asked"
    slow = too_slow(ctx, candidate)
    if slow:
        return f"too slow: {name}, {slow.reason}; add devices, or shorten the requests"
    asked = (w.rate, w.tpot_s, w.ttft_s) != (None, None, None)
    time = cost.predicted if asked else None
    if time is None:
        return ""
    if not time.stable:
        return (
            f"too slow: {name} fits, but {w.rate:,.2f} requests/s are asked and about {time.requests_per_s:,.2f} are "
            "predicted to be its most; add devices, or shorten the requests"
        )
    return missed_by(w, time, name)


def missed_by(w: Serve, time: ServingTime, name: str) -> str:
    """Verdict on a latency target that a prediction breaks; empty when it breaks none."""
    for what, found, target_s in (("a token", time.tpot, w.tpot_s), ("the first token", time.ttft, w.ttft_s)):
        if target_s is not None and found.value > target_s:
            return (
                f"too slow: {name} fits, but {what} is predicted to take {milliseconds(found)}, "
                f"{target_s * 1e3:,.1f} ms are asked"
            )
    return ""


def milliseconds(time: Seconds) -> str:
    """``"19.1 ms (14.6 to 25.1)"``: the predicted mean with its 80 % interval."""
    value, low, high = (t * 1e3 for t in (time.value, time.low, time.high))
    digits = 1 if value < 100 else 0
    return f"{value:,.{digits}f} ms ({low:,.{digits}f} to {high:,.{digits}f})"

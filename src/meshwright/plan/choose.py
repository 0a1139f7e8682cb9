"""Which of the layouts that work is recommended, and what its runners-up lost by; all by predicted times.

With latency targets: the highest goodput of the whole cluster, each layout at its own best load, of those that keep
the targets at the stated load (if one is stated). Without targets the default is the least split: see ``choose``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

from meshwright.plan.explain import joint_ranks
from meshwright.plan.plan import Alternative
from meshwright.plan.search.serve import Probe
from meshwright.specs.layout import product

if TYPE_CHECKING:
    from meshwright.plan.serve_context import ServeContext

#: Unwise rules that a chosen layout must not break while another one works.
AVOIDED = frozenset({"tp_crosses_node"})
#: Throughputs closer than this are a tie, which fewer devices and fewer stages win.
TIE = 0.02
#: Part of the best throughput below which a layout is starved: without a stated load the batch is what its caches
#: hold, and shards that fit barely leave room for a few requests.
STARVED = 0.5
MAX_ALTERNATIVES = 5
#: Layouts at the head whose order is settled by steps timed for their own loads.
SETTLED = 4


def avoided(probe: Probe) -> int:
    """Rules broken that another layout may spare."""
    return sum(rule.code in AVOIDED for rule in probe.rules)


def missing(ctx: ServeContext, probe: Probe) -> float:
    """The largest factor by which a target is missed; at most 1 where all are kept."""
    w, time = ctx.workload, probe.best.time
    slow = time.tpot.value / w.tpot_s if w.tpot_s is not None else 0.0
    late = time.ttft.value / w.ttft_s if w.ttft_s is not None else 0.0
    return max(slow, late)


def settle(ctx: ServeContext, ordered: list[Probe]) -> list[Probe]:
    """The first few by steps timed for their own loads, in order again; the others behind them."""
    first = [p.settled() for p in ordered[:SETTLED]]
    best = max((p.best.goodput for p in first if not avoided(p)), default=0.0)
    key = (lambda p: rank_key(ctx, p, best)) if ctx.judged and first and first[0].best.meets else (lambda p: 0)
    return [*sorted(first, key=key), *ordered[SETTLED:]]


def rank_key(ctx: ServeContext, probe: Probe, best: float) -> tuple[float, ...]:
    """Order of layouts that work: no rule to avoid, targets met, goodput (ties in steps), then simplicity."""
    behind = 1.0 - probe.best.goodput / best if best else 0.0
    layout = probe.layout
    wide = (probe.devices, layout.pp, layout.cp * layout.dcp, layout.tp, layout.ep, behind)
    return (avoided(probe), not probe.best.meets, int(behind / TIE), *wide)


def choose(ctx: ServeContext, works: Sequence[Probe]) -> list[Probe]:
    """Layouts that work, best first.

    With targets that is ``rank_key``; where none keeps them, the one that misses them least. Without targets: inside
    a node the smallest TP whose shards fit wins and replicas do the rest; more TP only where the smallest leaves its
    caches no room (``STARVED``). Where no single stage inside a node works, the least split among layouts of equally
    many devices wins, and these compete by throughput. The other layouts follow in that order.
    """
    best = max((p.best.goodput for p in works if not avoided(p)), default=0.0)
    ordered = sorted(works, key=lambda p: rank_key(ctx, p, best))
    if ordered and not ordered[0].best.meets:
        return sorted(ordered, key=lambda p: (avoided(p), missing(ctx, p), *rank_key(ctx, p, best)))
    if ctx.judged:
        return settle(ctx, ordered)
    node = ctx.cluster.devices_per_node
    flat = [p for p in ordered if p.layout.pp * p.layout.cp == 1 and p.layout.tp <= node and p.best.meets]
    if flat and ctx.spec.moe is None:
        winners = {id(p) for p in smallest_degree(ctx, flat)}
    elif flat:
        winners = {id(p) for p in flat}
    else:
        winners = {id(p) for p in least_splits(ordered)}
    return sorted(ordered, key=lambda p: id(p) not in winners)


def smallest_degree(ctx: ServeContext, flat: list[Probe]) -> list[Probe]:
    """Of layouts of one stage inside a node those of the smallest TP that is not starved."""
    roomy = flat
    if ctx.workload.concurrency is None and ctx.workload.rate is None:
        enough = STARVED * max(p.best.goodput for p in flat)
        roomy = [p for p in flat if p.best.goodput >= enough]
    least = min(p.layout.tp for p in roomy)
    return [p for p in roomy if p.layout.tp == least]


def least_splits(ordered: list[Probe]) -> list[Probe]:
    """For every number of devices the layout that splits the model least; equal ones in the given order."""
    least: dict[int, tuple[tuple[int, bool, int], Probe]] = {}
    for p in ordered:
        key = (avoided(p), not p.best.meets, joint_ranks(p))
        if p.layout.world not in least or key < least[p.layout.world][0]:
            least[p.layout.world] = (key, p)
    return [p for _, p in least.values()]


def alternatives(ctx: ServeContext, ordered: Sequence[Probe], *, given: bool = False) -> tuple[Alternative, ...]:
    """The runners-up, most goodput first, one for every kind of split, with how each compares (``given``: with a layout
    that the user stated, so that it need not have lost)."""
    chosen, out = ordered[0], []
    seen = {_kind(chosen)}
    rest = sorted(ordered[1:], key=lambda p: (avoided(p), not p.best.meets, -p.best.goodput, missing(ctx, p)))
    for probe in rest:
        if _kind(probe) in seen:
            continue
        seen.add(_kind(probe))
        text = lost_to(ctx, chosen.settled(), probe.settled())
        out.append(Alternative(ctx.candidate(probe), text if given else text + why_not(ctx, chosen, probe)))
        if len(out) == MAX_ALTERNATIVES:
            break
    return tuple(out)


def _kind(probe: Probe) -> tuple[int, ...]:
    """Layouts of one kind differ in how often they are repeated; of a mixture of experts in more."""
    layout = probe.layout
    if probe.placement.spec.moe is None:
        return (layout.tp, layout.pp, layout.cp)
    return (layout.tp, layout.pp, layout.cp, layout.dp, layout.ep)


def better(ctx: ServeContext, ordered: Sequence[Probe]) -> tuple[Alternative, ...]:
    """Layouts that work where the given one does not, one for every (tp, pp)."""
    first: dict[tuple[int, int], Probe] = {}
    for p in ordered:
        first.setdefault((p.layout.tp, p.layout.pp), p)
    few = [*first.values()][:MAX_ALTERNATIVES]
    return tuple(Alternative(ctx.candidate(p), "works, where the given layout does not") for p in few)


def lost_to(ctx: ServeContext, chosen: Probe, other: Probe) -> str:
    """One clause: how the other layout compares with the chosen (or given) one, by predicted figures."""
    parts = ["TP crosses nodes"] if avoided(other) > avoided(chosen) else []
    word = "goodput" if ctx.judged else "tokens/s"
    stated = ctx.workload.concurrency is not None or ctx.workload.rate is not None
    best = " at its best load" if ctx.judged and stated else ""
    ratio = other.best.goodput / chosen.best.goodput if chosen.best.goodput else 1.0
    if not other.best.meets:
        parts.append(breaks(ctx, other))
    elif abs(ratio - 1) < 0.005:
        parts.append(f"the same {word}{best}")
    else:
        parts.append(f"{abs(1 - ratio):.0%} {'more' if ratio > 1 else 'less' if ctx.judged else 'fewer'} {word}{best}")
    if ratio < 0.995 or not other.best.meets:
        parts.append(difference(chosen, other))
    if other.devices > chosen.devices:
        parts.append(f"{other.devices} devices instead of {chosen.devices}")
    return ", ".join(part for part in parts if part)


def breaks(ctx: ServeContext, probe: Probe) -> str:
    """The latency targets that a layout breaks at its load, with its predicted times."""
    w, time = ctx.workload, probe.best.time
    text = []
    if not time.stable:
        text.append("the rate is more than it serves")
    if w.tpot_s is not None and time.tpot.value > w.tpot_s:
        text.append(f"a token takes {time.tpot.value * 1e3:,.2f} ms")
    if w.ttft_s is not None and time.stable and time.ttft.value > w.ttft_s:
        text.append(f"the first token {time.ttft.value * 1e3:,.0f} ms")
    few = probe.best.requests <= probe.layout.dp and w.concurrency is None and w.rate is None
    return " and ".join(text) + (" with one request a replica" if few and text else "")


def difference(chosen: Probe, other: Probe) -> str:
    """What the other layout loses by at the load of the chosen one (not at its own): room for requests, or the part of
    a token's time that grows most."""
    load = max(1, chosen.best.requests) * chosen.copies
    own = max(1, ceil(load / other.copies))
    if own > other.held:
        return f"caches for {other.held * other.copies:,} of {load:,} requests"
    a, b = chosen.time(chosen.best.requests), other.time(own)
    growth = {name: s - dict(a.tpot_parts).get(name, 0.0) for name, s in b.tpot_parts}
    name = max(growth, key=lambda n: growth[n])
    if growth[name] <= 0.01 * a.tpot.value:
        return ""
    mine, before = dict(b.tpot_parts)[name] * 1e3, dict(a.tpot_parts).get(name, 0.0) * 1e3
    return f"{name} {mine:,.1f} ms a token against {before:,.1f}"


def why_not(ctx: ServeContext, chosen: Probe, other: Probe) -> str:
    """Why a layout with more tokens/s is not the chosen one; empty when it has no more."""
    ahead = other.best.goodput / chosen.best.goodput - 1 if chosen.best.goodput else 0.0
    if ahead < 0.005 or avoided(other) > avoided(chosen) or not other.best.meets:
        return ""
    if ahead < TIE:
        return "; a tie, which fewer devices or cuts win"
    if other.layout.pp > chosen.layout.pp:
        return f"; but a token passes {other.layout.pp} stages: without a target the least split is taken"
    if joint_ranks(other) > joint_ranks(chosen):
        return "; but split further than capacity asks: for a latency target (--tpot)"
    return "; but without a target the smallest TP that fits is taken"


def named(probe: Probe) -> str:
    """``"TP 8"``, or ``"4 copies of TP 8"``."""
    return product(probe.layout) if probe.copies == 1 else f"{probe.copies} copies of {product(probe.layout)}"

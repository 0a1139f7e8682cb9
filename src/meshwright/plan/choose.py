"""Which of the layouts that work is recommended, and what its runners-up lost by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.plan.explain import joint_ranks, lost_by
from meshwright.plan.plan import Alternative, Candidate
from meshwright.plan.targets import violations

if TYPE_CHECKING:
    from meshwright.plan.serve import ServeContext

#: Unwise rules that a chosen layout must not break while another one works.
AVOIDED = frozenset({"tp_crosses_node"})
#: Throughput bounds closer than this are a tie, which fewer devices and fewer stages win.
TIE = 0.02
#: Part of the best bound below which a layout is starved: without a stated concurrency the batch is what its caches
#: hold, and shards that fit barely leave room for a few requests.
STARVED = 0.5
MAX_ALTERNATIVES = 4


def avoided(candidate: Candidate) -> int:
    """Rules broken that another layout may spare."""
    return sum(rule.code in AVOIDED for rule in candidate.rules)


def rank_key(ctx: ServeContext, candidate: Candidate, best: float) -> tuple[float, ...]:
    """Order of candidates that work: no rule to avoid, targets met, throughput (ties in steps), then simplicity."""
    behind = 1.0 - candidate.cost.tokens_per_s / best if best else 0.0
    layout = candidate.layout
    wide = (layout.world, layout.pp, layout.tp, layout.ep, behind)
    return (avoided(candidate), violations(ctx, candidate), int(behind / TIE), *wide)


def choose(ctx: ServeContext, works: list[Candidate]) -> list[Candidate]:
    """Candidates that work, best first.

    Inside a node the smallest TP whose shards fit wins and replicas do the rest; more TP only where a target asks
    for it, since the bound flatters splits, or where the smallest leaves its caches no room (``STARVED``). Where no
    single stage inside a node works, the least split among layouts of equally many devices wins, and these compete by
    throughput. The other candidates follow in that order.
    """
    best = max((c.cost.tokens_per_s for c in works), default=0.0)
    ordered = sorted(works, key=lambda c: rank_key(ctx, c, best))
    if ordered and violations(ctx, ordered[0]):
        return sorted(ordered, key=lambda c: (*rank_key(ctx, c, best)[:2], c.cost.step_s))
    node = ctx.cluster.devices_per_node
    flat = [c for c in ordered if c.layout.pp == 1 and c.layout.tp <= node and not violations(ctx, c)]
    if flat and ctx.spec.moe is None:
        winners = {id(c) for c in smallest_degree(ctx, flat)}
    elif flat:
        winners = {id(c) for c in flat}
    else:
        winners = {id(c) for c in least_splits(ctx, ordered)}
    return sorted(ordered, key=lambda c: id(c) not in winners)


def smallest_degree(ctx: ServeContext, flat: list[Candidate]) -> list[Candidate]:
    """Of layouts of one stage inside a node those of the smallest TP that is not starved."""
    roomy = flat
    if ctx.workload.concurrency is None and ctx.workload.rate is None:
        enough = STARVED * max(c.cost.tokens_per_s for c in flat)
        roomy = [c for c in flat if c.cost.tokens_per_s >= enough]
    least = min(c.layout.tp for c in roomy)
    return [c for c in roomy if c.layout.tp == least]


def least_splits(ctx: ServeContext, ordered: list[Candidate]) -> list[Candidate]:
    """For every number of devices the candidate that splits the model least; equal ones in the given order."""
    least: dict[int, tuple[tuple[int, int, int], Candidate]] = {}
    for c in ordered:
        key = (avoided(c), violations(ctx, c), joint_ranks(c))
        if c.layout.world not in least or key < least[c.layout.world][0]:
            least[c.layout.world] = (key, c)
    return [c for _, c in least.values()]


def alternatives(ctx: ServeContext, ordered: list[Candidate], *, given: bool = False) -> tuple[Alternative, ...]:
    """The runners-up, fastest first, one for every (tp, pp), with how each compares (``given``: with a layout that
    the user stated, so that it need not have lost)."""
    chosen, out = ordered[0], []
    seen = {(chosen.layout.tp, chosen.layout.pp)}
    rest = sorted(ordered[1:], key=lambda c: (avoided(c), violations(ctx, c), -c.cost.tokens_per_s))
    for candidate in rest:
        key = (candidate.layout.tp, candidate.layout.pp)
        if key in seen:
            continue
        seen.add(key)
        text = lost_by(chosen, candidate) + breaks(ctx, candidate)
        out.append(Alternative(candidate, text if given else text + why_not(ctx, chosen, candidate)))
        if len(out) == MAX_ALTERNATIVES:
            break
    return tuple(out)


def better(ordered: list[Candidate]) -> tuple[Alternative, ...]:
    """Layouts that work where the given one does not, one for every (tp, pp)."""
    first: dict[tuple[int, int], Candidate] = {}
    for c in ordered:
        first.setdefault((c.layout.tp, c.layout.pp), c)
    return tuple(Alternative(c, "works, where the given layout does not") for c in [*first.values()][:MAX_ALTERNATIVES])


def breaks(ctx: ServeContext, candidate: Candidate) -> str:
    """The latency targets that a layout breaks, with its predicted times; empty when it breaks none."""
    w, cost = ctx.workload, candidate.cost
    text = ""
    if w.tpot_s is not None and cost.tpot_s > w.tpot_s:
        text += f", a token takes {cost.tpot_s * 1e3:,.2f} ms"
    if w.ttft_s is not None and cost.ttft_s > w.ttft_s:
        text += f", the first one {cost.ttft_s * 1e3:,.1f} ms"
    return text


def why_not(ctx: ServeContext, chosen: Candidate, other: Candidate) -> str:
    """Why a layout with a higher bound is not the chosen one; empty when its bound is no higher."""
    ahead = other.cost.tokens_per_s / chosen.cost.tokens_per_s - 1 if chosen.cost.tokens_per_s else 0.0
    if ahead < 0.005 or avoided(other) > avoided(chosen) or violations(ctx, other):
        return ""
    if other.layout.pp > chosen.layout.pp:
        return f"; but a token passes {other.layout.pp} stages, and the peaks flatter splits"
    if joint_ranks(other) > joint_ranks(chosen):
        return "; but split further than capacity asks: for a latency target (--tpot), the peaks flatter splits"
    return "; a tie, which fewer devices or cuts win" if ahead < TIE else ""

"""``plan serve``: evaluate, search, choose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf

from meshwright.errors import IllegalLayoutError
from meshwright.plan.candidates import enumerate_serving, thin
from meshwright.plan.cost import serve_cost
from meshwright.plan.explain import ServeFacts, explain_serve, joint_ranks, lost_by, serve_facts
from meshwright.plan.memory import ServeMemory
from meshwright.plan.plan import Alternative, Candidate, Motive, Plan, Rejected
from meshwright.plan.serve_memory import resolve_settings, serve_memory
from meshwright.plan.verdict import given_verdict, nothing_works, serve_verdict
from meshwright.specs.checks import dp_does_not_cure
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout, product
from meshwright.specs.model import ModelSpec
from meshwright.specs.nearest import explain as explain_rules
from meshwright.specs.placement import Placement, place
from meshwright.specs.profile import EngineProfile, ServeSettings
from meshwright.specs.rules import Rule
from meshwright.specs.tensors import Section
from meshwright.specs.units import gib
from meshwright.specs.workload import Serve

#: Unwise rules that a chosen layout must not break while another one works.
AVOIDED = frozenset({"tp_crosses_node"})
#: Throughput bounds closer than this are a tie, which fewer devices and fewer stages win.
TIE = 0.02
#: Rounds of the fixed point between requests in flight and the time each takes.
LITTLE_STEPS = 4
MAX_ALTERNATIVES = 4
MAX_REJECTED = 8


@dataclass(frozen=True, slots=True)
class ServeContext:
    """What every candidate of one search shares; ``settings`` have every field resolved."""

    spec: ModelSpec
    cluster: Cluster
    workload: Serve
    profile: EngineProfile
    settings: ServeSettings

    @property
    def sections(self) -> tuple[Section, ...]:
        """Parts of the checkpoint that are loaded."""
        extra: list[Section] = []
        if not self.settings.text_only:
            extra.append("vision")
        if self.settings.speculative:
            extra.append("mtp")
        return ("decoder", *extra)

    @property
    def budget_bytes(self) -> float:
        """What the engine may take of one device."""
        assert self.settings.utilization is not None
        return self.cluster.device.memory_bytes * self.settings.utilization

    def evaluate(self, layout: Layout, rules: tuple[Rule, ...] = ()) -> Candidate:
        """Place, count the memory, bound the cost.

        Raises:
            IllegalLayoutError: the engine refuses the layout.
        """
        placement = place(self.spec, layout, self.profile, sections=self.sections)
        workload = self.at_rate(placement)
        memory = serve_memory(placement, self.cluster, workload, self.settings)
        cost = serve_cost(placement, self.cluster, workload, memory.max_requests, self.settings)
        return Candidate(layout, placement, memory, cost, rules, workload)

    def at_rate(self, placement: Placement) -> Serve:
        """The workload with the requests in flight that its rate implies, by Little's law: rate x time inside.

        The time is the lower bound of ``serve_cost``, so this is the least concurrency that the rate can mean.
        """
        workload = self.workload
        if workload.rate is None or workload.concurrency is not None:
            return workload
        inside, limit = 1, 1 << 20
        for _ in range(LITTLE_STEPS):
            trial = replace(workload, concurrency=inside)
            cost = serve_cost(placement, self.cluster, trial, inside, self.settings)
            inside = min(limit, max(1, ceil(workload.rate * (cost.prefill_s + workload.osl * cost.step_s))))
        return replace(workload, concurrency=inside)


def plan_serve(
    spec: ModelSpec,
    cluster: Cluster,
    workload: Serve,
    profile: EngineProfile,
    settings: ServeSettings,
    layout: Layout | None = None,
) -> Plan:
    """Judge ``layout``, or choose one.

    Args:
        spec: the model.
        cluster: where it runs.
        workload: lengths, and how many requests at once.
        profile: the engine.
        settings: engine settings; open fields take the engine's defaults on this device.
        layout: judge this one; None: search.
    """
    settings = resolve_settings(settings, profile, cluster, workload, layout, spec)
    ctx = ServeContext(spec, cluster, workload, profile, settings)
    pool = enumerate_serving(spec, cluster, workload, profile, ctx.budget_bytes, workload.concurrency)
    candidates: list[Candidate] = []
    rejected = list(pool.rejected)
    for option in pool.layouts:
        rules = tuple(profile.check(spec, option, cluster, workload))
        try:
            candidates.append(ctx.evaluate(option, rules))
        except IllegalLayoutError as error:
            rejected.append(Rejected(option, "illegal", str(error)))
    works = []
    for candidate in candidates:
        out = too_slow(ctx, candidate) or (None if candidate.fits else too_full(ctx, candidate))
        if out is None:
            works.append(candidate)
        else:
            rejected.append(out)
    if layout is not None:
        return _given(ctx, layout, works, rejected)
    return _searched(ctx, candidates, works, rejected)


def too_full(ctx: ServeContext, candidate: Candidate) -> Rejected:
    """Why a counted layout does not hold the workload."""
    worst = candidate.memory.worst
    asked = requests_of(candidate)
    fixed = worst.total_bytes - worst.kv_cache_bytes
    if fixed > worst.capacity_bytes:
        text = f"{gib(fixed)} of weights, activations and runtime a rank exceed the {gib(worst.capacity_bytes)}"
        return Rejected(candidate.layout, "weights_do_not_fit", text + " the engine may use")
    replica = -(-asked // candidate.layout.dp)
    text = (
        f"{gib(worst.kv_cache_bytes)} of KV cache for {replica:,} requests of {ctx.workload.context:,} tokens beside "
        f"{gib(fixed)} exceed the {gib(worst.capacity_bytes)} a rank"
    )
    return Rejected(candidate.layout, "kv_cache_does_not_fit", text)


def requests_of(candidate: Candidate) -> int:
    """Requests in flight that the candidate was counted for (1 when neither concurrency nor rate is stated)."""
    return candidate.workload.concurrency or 1 if isinstance(candidate.workload, Serve) else 1


def too_slow(ctx: ServeContext, candidate: Candidate) -> Rejected | None:
    """Why a layout cannot keep up with the rate, even at the peaks."""
    rate, bound = ctx.workload.rate, rate_bound(ctx, candidate)
    if rate is None or rate <= bound:
        return None
    text = f"at most {bound:,.2f} requests/s at the peaks, {rate:,.2f} are asked"
    return Rejected(candidate.layout, "rate_too_high", text)


def rate_bound(ctx: ServeContext, candidate: Candidate) -> float:
    """Requests a second that a layout can finish at the peaks with as many in flight as it holds; no rate: infinite."""
    if ctx.workload.rate is None or not isinstance(candidate.memory, ServeMemory):
        return inf
    most = candidate.memory.max_requests
    full = serve_cost(candidate.placement, ctx.cluster, replace(ctx.workload, rate=None), most, ctx.settings)
    return full.tokens_per_s / ctx.workload.osl


def missed(ctx: ServeContext, candidate: Candidate) -> str:
    """Verdict on a layout that breaks a target even at the peaks; empty when it does not."""
    w, cost, name = ctx.workload, candidate.cost, product(candidate.layout)
    if w.tpot_s is not None and cost.step_s > w.tpot_s:
        step, target = cost.step_s * 1e3, w.tpot_s * 1e3
        return f"too slow: {name} fits, but a token takes at least {step:,.2f} ms, {target:,.2f} ms are asked"
    if w.ttft_s is not None and cost.prefill_s > w.ttft_s:
        first, target = cost.prefill_s * 1e3, w.ttft_s * 1e3
        return f"too slow: {name} fits, but a prefill takes at least {first:,.1f} ms, {target:,.1f} ms are asked"
    slow = too_slow(ctx, candidate)
    return f"too slow: {name}, {slow.reason}; add devices, or shorten the requests" if slow else ""


def violations(ctx: ServeContext, candidate: Candidate) -> int:
    """Targets that even the lower bounds break."""
    w = ctx.workload
    broken = w.tpot_s is not None and candidate.cost.step_s > w.tpot_s
    late = w.ttft_s is not None and candidate.cost.prefill_s > w.ttft_s
    return int(broken) + int(late) + int(too_slow(ctx, candidate) is not None)


def rank_key(ctx: ServeContext, candidate: Candidate, best: float) -> tuple[float, ...]:
    """Order of candidates that work: no rule to avoid, targets met, throughput (ties in steps), then simplicity."""
    behind = 1.0 - candidate.cost.tokens_per_s / best if best else 0.0
    layout = candidate.layout
    avoided = sum(rule.code in AVOIDED for rule in candidate.rules)
    wide = (layout.world, layout.pp, layout.tp, layout.ep, behind)
    return (avoided, violations(ctx, candidate), int(behind / TIE), *wide)


def choose(ctx: ServeContext, works: list[Candidate]) -> list[Candidate]:
    """Candidates that work, best first.

    Inside a node the smallest TP whose shards fit wins and replicas do the rest; more TP only where a target asks
    for it, since the bound flatters splits. Where no single stage inside a node works, the least split among layouts
    of equally many devices wins, and these compete by throughput. The other candidates follow in that order.
    """
    best = max((c.cost.tokens_per_s for c in works), default=0.0)
    ordered = sorted(works, key=lambda c: rank_key(ctx, c, best))
    if ordered and violations(ctx, ordered[0]):
        return sorted(ordered, key=lambda c: (*rank_key(ctx, c, best)[:2], c.cost.step_s))
    node = ctx.cluster.devices_per_node
    flat = [c for c in ordered if c.layout.pp == 1 and c.layout.tp <= node and not violations(ctx, c)]
    if flat and ctx.spec.moe is None:
        least_tp = min(c.layout.tp for c in flat)
        winners = {id(c) for c in flat if c.layout.tp == least_tp}
    elif flat:
        winners = {id(c) for c in flat}
    else:
        winners = {id(c) for c in least_splits(ctx, ordered)}
    return sorted(ordered, key=lambda c: id(c) not in winners)


def least_splits(ctx: ServeContext, ordered: list[Candidate]) -> list[Candidate]:
    """For every number of devices the candidate that splits the model least; equal ones in the given order."""
    least: dict[int, tuple[tuple[int, int, int], Candidate]] = {}
    for c in ordered:
        avoided = sum(rule.code in AVOIDED for rule in c.rules)
        key = (avoided, violations(ctx, c), joint_ranks(c))
        if c.layout.world not in least or key < least[c.layout.world][0]:
            least[c.layout.world] = (key, c)
    return [c for _, c in least.values()]


def motive_of(ctx: ServeContext, chosen: Candidate, facts: ServeFacts) -> Motive:
    """Why the model is split: see ``plan.Motive``."""
    if joint_ranks(chosen) == 1:
        return "throughput"
    return "capacity" if facts.smallest_world > 1 else "latency"


def _searched(ctx: ServeContext, candidates: list[Candidate], works: list[Candidate], rejected: list[Rejected]) -> Plan:
    ordered = choose(ctx, works)
    if not ordered:
        return _short(ctx, candidates, rejected)
    chosen = ordered[0]
    facts = serve_facts(ctx, works)
    motive = motive_of(ctx, chosen, facts)
    return Plan(
        kind="serve",
        verdict=missed(ctx, chosen) or serve_verdict(ctx.spec, ctx.cluster, ctx.workload, chosen, motive),
        motive=motive,
        spec=ctx.spec,
        cluster=ctx.cluster,
        engine=ctx.profile.name,
        workload=ctx.workload,
        layout=chosen.layout,
        legal=True,
        fits=True,
        fast_enough=not violations(ctx, chosen),
        chosen=chosen,
        rules=chosen.rules,
        reasons=explain_serve(ctx, chosen, facts),
        alternatives=alternatives(ctx, ordered),
        rejected=tuple(thin(rejected, MAX_REJECTED)),
        settings=ctx.settings,
    )


def alternatives(ctx: ServeContext, ordered: list[Candidate]) -> tuple[Alternative, ...]:
    """The runners-up, one for every (tp, pp), with what each lost by."""
    chosen, seen, out = ordered[0], set(), []
    seen.add((chosen.layout.tp, chosen.layout.pp))
    for candidate in ordered[1:]:
        key = (candidate.layout.tp, candidate.layout.pp)
        if key in seen:
            continue
        seen.add(key)
        out.append(Alternative(candidate, lost_by(chosen, candidate)))
        if len(out) == MAX_ALTERNATIVES:
            break
    return tuple(out)


def _short(ctx: ServeContext, candidates: list[Candidate], rejected: list[Rejected]) -> Plan:
    """Nothing serves the whole workload: the fastest layout when the rate is too high, else the one that holds the most
    requests, or none at all."""
    holding = [c for c in candidates if isinstance(c.memory, ServeMemory) and c.memory.max_requests > 0]
    best = max(holding, key=lambda c: c.memory.max_requests, default=None)  # type: ignore[union-attr]
    slow = [c for c in holding if too_slow(ctx, c)]
    if slow and len(slow) == len(holding):
        best = max(slow, key=lambda c: rate_bound(ctx, c))
    return Plan(
        kind="serve",
        verdict=(missed(ctx, best) if best in slow else "")
        or nothing_works(ctx.spec, ctx.cluster, ctx.workload, best, ctx.budget_bytes),
        motive="none",
        spec=ctx.spec,
        cluster=ctx.cluster,
        engine=ctx.profile.name,
        workload=ctx.workload,
        layout=best.layout if best else None,
        legal=best is not None,
        fits=best is not None and best.fits,
        fast_enough=best not in slow,
        chosen=best,
        rules=best.rules if best else (),
        reasons=explain_serve(ctx, best, serve_facts(ctx, [])) if best else (),
        alternatives=(),
        rejected=tuple(thin(rejected, MAX_REJECTED)),
        settings=ctx.settings,
    )


def _given(ctx: ServeContext, layout: Layout, works: list[Candidate], rejected: list[Rejected]) -> Plan:
    rules = tuple(explain_rules(ctx.spec, layout, ctx.profile, ctx.cluster, ctx.workload))
    broken = [r for r in rules if r.severity == "illegal"]
    chosen = None if broken else ctx.evaluate(layout, rules)
    fits = chosen is not None and chosen.fits
    if chosen is not None and not fits:
        rules += copies_do_not_cure(chosen)
    ordered = [c for c in choose(ctx, works) if c.layout != layout]
    head = [chosen, *ordered] if chosen is not None and fits else ordered
    others = alternatives(ctx, head) if chosen is not None and fits else _better(ordered)
    return Plan(
        kind="serve",
        verdict=(missed(ctx, chosen) if chosen is not None and fits else "")
        or given_verdict(ctx.spec, ctx.cluster, ctx.workload, layout, broken, chosen),
        motive="given",
        spec=ctx.spec,
        cluster=ctx.cluster,
        engine=ctx.profile.name,
        workload=ctx.workload,
        layout=layout,
        legal=not broken,
        fits=fits,
        fast_enough=chosen is None or not violations(ctx, chosen),
        chosen=chosen,
        rules=rules,
        reasons=explain_serve(ctx, chosen, serve_facts(ctx, works)) if chosen else (),
        alternatives=others,
        rejected=tuple(thin((r for r in rejected if r.layout != layout), MAX_REJECTED)),
        settings=ctx.settings,
    )


def copies_do_not_cure(candidate: Candidate) -> tuple[Rule, ...]:
    """A warning where replicas are asked to cure weights that do not fit; see ``specs.checks.dp_does_not_cure``.

    Requests are shared out over replicas, so a cache that does not fit is no such case; nor are experts laid over dp.
    """
    layout, worst = candidate.layout, candidate.memory.worst
    if joint_ranks(candidate) != layout.tp * layout.pp * layout.cp:
        return ()
    found = dp_does_not_cure(layout, worst.total_bytes - worst.kv_cache_bytes, worst.capacity_bytes)
    return tuple(replace(rule, severity="unwise") for rule in found)


def _better(ordered: list[Candidate]) -> tuple[Alternative, ...]:
    """Layouts that work where the given one does not."""
    return tuple(Alternative(c, "works, where the given layout does not") for c in ordered[:MAX_ALTERNATIVES])

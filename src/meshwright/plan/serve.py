"""``plan serve``: evaluate, search, choose."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil

from meshwright.errors import IllegalLayoutError
from meshwright.plan.calibration import Calibration
from meshwright.plan.candidates import enumerate_serving, thin
from meshwright.plan.choose import alternatives, better, choose
from meshwright.plan.comparisons import compare
from meshwright.plan.cost import serve_cost
from meshwright.plan.explain import ServeFacts, explain_serve, joint_ranks, serve_facts
from meshwright.plan.memory import ServeMemory
from meshwright.plan.plan import Candidate, Motive, Plan, Rejected
from meshwright.plan.serve_memory import resolve_settings, serve_memory
from meshwright.plan.serving_time import ServingTime, serving_time
from meshwright.plan.serving_time_steps import stage_ranks
from meshwright.plan.targets import missed, rate_bound, too_slow, violations
from meshwright.plan.verdict import given_verdict, nothing_works, serve_verdict
from meshwright.specs.checks import dp_does_not_cure
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.nearest import explain as explain_rules
from meshwright.specs.placement import Placement, place
from meshwright.specs.profile import EngineProfile, ServeSettings
from meshwright.specs.rules import Rule
from meshwright.specs.tensors import Section
from meshwright.specs.units import gib
from meshwright.specs.workload import Serve

#: Rounds of the fixed point between requests in flight and the time each takes.
LITTLE_STEPS = 4
MAX_REJECTED = 8


@dataclass(frozen=True, slots=True)
class ServeContext:
    """What every candidate of one search shares; ``settings`` have every field resolved.

    ``rate_bounds``: requests a second by placement, counted once (placements live as long as the search).
    """

    spec: ModelSpec
    cluster: Cluster
    workload: Serve
    profile: EngineProfile
    settings: ServeSettings
    calibration: Calibration | None = None
    rate_bounds: dict[int, float] = field(default_factory=dict, compare=False, repr=False)

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
        memory = self.memory(placement, workload)
        cost = serve_cost(placement, self.cluster, workload, memory.max_requests, self.settings)
        judged = workload.tpot_s is not None or workload.ttft_s is not None
        time = cost.predicted if judged and workload.concurrency is None else None
        if time is not None and self.late(time):
            workload = self.at_target(placement, memory.max_requests, time)
            memory = self.memory(placement, workload)
            cost = serve_cost(placement, self.cluster, workload, memory.max_requests, self.settings)
        return Candidate(layout, placement, memory, cost, rules, workload)

    def memory(self, placement: Placement, workload: Serve) -> ServeMemory:
        """Memory of a layout, with the terms that an earlier start of it printed."""
        found = self.calibration
        measured = found.terms_for(placement.layout, self.profile.engine) if found is not None else None
        return serve_memory(placement, self.cluster, workload, self.settings, measured=measured)

    def late(self, time: ServingTime) -> bool:
        """Whether the predicted means break a latency target."""
        w = self.workload
        slow = w.tpot_s is not None and time.tpot.value > w.tpot_s
        return slow or (w.ttft_s is not None and time.ttft.value > w.ttft_s)

    def at_target(self, placement: Placement, most: int, full: ServingTime) -> Serve:
        """The workload with as many requests in flight as keep its latency targets (a power of two a replica), of the
        ``most`` that the caches hold and ``full`` was predicted for; one a replica where even that breaks them.

        A token takes a fixed time and one that grows with the requests, so that no more than the target's share of
        ``full`` can keep it: the search begins there.
        """
        inside = least = min(placement.layout.dp, most)
        share = 1.0 if self.workload.tpot_s is None else min(1.0, self.workload.tpot_s / full.tpot.value)
        while 2 * inside <= most * share:
            inside *= 2
        ranks = stage_ranks(placement)
        while inside > least:
            trial = replace(self.workload, concurrency=inside)
            if not self.late(serving_time(placement, self.cluster, trial, most, self.settings, ranks=ranks)):
                break
            inside //= 2
        return replace(self.workload, concurrency=max(inside, least))

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
    calibration: Calibration | None = None,
) -> Plan:
    """Judge ``layout``, or choose one.

    Args:
        spec: the model.
        cluster: where it runs.
        workload: lengths, and how many requests at once.
        profile: the engine.
        settings: engine settings; open fields take the engine's defaults on this device.
        layout: judge this one; None: search.
        calibration: terms that an earlier start of the engine printed.
    """
    settings = resolve_settings(settings, profile, cluster, workload, layout, spec)
    ctx = ServeContext(spec, cluster, workload, profile, settings, calibration)
    pool = enumerate_serving(spec, cluster, workload, profile, ctx.budget_bytes, workload.concurrency)
    candidates: list[Candidate] = []
    rejected = list(pool.rejected)
    long = beyond_positions(spec, workload, profile.engine)
    for option in pool.layouts:
        rules = (*profile.check(spec, option, cluster, workload), *long)
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


def beyond_positions(spec: ModelSpec, workload: Serve, engine: str) -> tuple[Rule, ...]:
    """A warning where requests are longer than the positions that the model was made for."""
    asked, limit = workload.context, spec.max_positions
    if not limit or asked <= limit:
        return ()
    message = f"requests of {asked:,} tokens exceed the {limit:,} positions of the configuration"
    cure, where = "shorten them, or extend the positions in config.json (rope scaling)", "max_position_embeddings"
    if engine == "vllm":
        cure += "; vLLM refuses a longer --max-model-len unless VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
        where = "vLLM config/model.py"
    numbers = (("context", asked), ("positions", limit))
    return (Rule("context_beyond_positions", "unwise", message, cure, where, numbers),)


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
        reasons=explain_serve(ctx, chosen, facts) + compare(ctx.cluster, chosen, ordered[1:], rejected),
        alternatives=alternatives(ctx, ordered),
        rejected=tuple(thin(rejected, MAX_REJECTED)),
        settings=ctx.settings,
    )


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
        rejected=tuple(thin((r for r in rejected if best is None or r.layout != best.layout), MAX_REJECTED)),
        settings=ctx.settings,
    )


def _given(ctx: ServeContext, layout: Layout, works: list[Candidate], rejected: list[Rejected]) -> Plan:
    rules = tuple(explain_rules(ctx.spec, layout, ctx.profile, ctx.cluster, ctx.workload))
    rules += beyond_positions(ctx.spec, ctx.workload, ctx.profile.engine)
    broken = [r for r in rules if r.severity == "illegal"]
    chosen = None if broken else ctx.evaluate(layout, rules)
    fits = chosen is not None and chosen.fits
    if chosen is not None and not fits:
        rules += copies_do_not_cure(chosen)
    ordered = [c for c in choose(ctx, works) if c.layout != layout]
    head = [chosen, *ordered] if chosen is not None and fits else ordered
    others = alternatives(ctx, head, given=True) if chosen is not None and fits else better(ordered)
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
        reasons=explain_serve(ctx, chosen, serve_facts(ctx, works))
        + (compare(ctx.cluster, chosen, ordered, rejected) if fits else ())
        if chosen
        else (),
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

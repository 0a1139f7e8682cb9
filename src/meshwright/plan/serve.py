"""``plan serve``: evaluate, search, choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from meshwright.errors import IllegalLayoutError
from meshwright.plan.calibration import Calibration
from meshwright.plan.candidates import enumerate_serving, thin
from meshwright.plan.choose import alternatives, better, choose
from meshwright.plan.comparisons import compare, split_reason
from meshwright.plan.cost import serve_cost
from meshwright.plan.explain import ServeFacts, explain_serve, joint_ranks, serve_facts
from meshwright.plan.plan import Candidate, Motive, Plan, Reason, Rejected
from meshwright.plan.search.serve import Probe, ServeFound, front
from meshwright.plan.search.serve_pools import SplitFound, search_split
from meshwright.plan.serve_context import ServeContext as ServeContext
from meshwright.plan.serve_memory import resolve_settings
from meshwright.plan.targets import missed, rate_bound, too_slow, violations
from meshwright.plan.verdict import given_verdict, nothing_works, serve_verdict
from meshwright.specs.checks import dp_does_not_cure
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.nearest import explain as explain_rules
from meshwright.specs.profile import EngineProfile, ServeSettings
from meshwright.specs.rules import Rule
from meshwright.specs.units import gib
from meshwright.specs.workload import Serve

MAX_REJECTED = 8
#: Layouts that are counted beside a stated one.
MAX_BESIDE = 24


def plan_serve(
    spec: ModelSpec,
    cluster: Cluster,
    workload: Serve,
    profile: EngineProfile,
    settings: ServeSettings,
    layout: Layout | None = None,
    calibration: Calibration | None = None,
    *,
    split: bool = False,
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
        split: search separate prefill and decode pools too (with a latency target that is always done).
    """
    open_limit = settings.max_num_seqs is None
    settings = resolve_settings(settings, profile, cluster, workload, layout, spec)
    ctx = ServeContext(spec, cluster, workload, profile, settings, calibration)
    probes, rejected, counts = _probed(ctx, MAX_BESIDE if layout is not None else None)
    works = []
    for probe in probes:
        out = too_full(ctx, probe) or too_slow(ctx, probe)
        if out is None:
            works.append(probe)
        else:
            rejected.append(out)
    if layout is not None:
        return _given(ctx, layout, works, rejected)
    pools = search_split(ctx, probes) if split or ctx.judged else None
    space = Space(*counts, open_limit)
    return _searched(ctx, works, rejected, space, pools) or _short(ctx, probes, rejected)


class Space(NamedTuple):
    """Layouts that were enumerated, of them illegal, and whether the engine's limit of sequences was left open."""

    size: int
    illegal: int
    open_limit: bool


def _probed(ctx: ServeContext, most: int | None) -> tuple[list[Probe], list[Rejected], tuple[int, int]]:
    """Layouts of the space (the ``most`` promising ones) with their memory, those that are out, and how many there were
    and were illegal."""
    spec, cluster, workload, profile = ctx.spec, ctx.cluster, ctx.workload, ctx.profile
    pool = enumerate_serving(spec, cluster, workload, profile, ctx.budget_bytes, workload.concurrency)
    probes: list[Probe] = []
    rejected = list(pool.rejected)
    long = beyond_positions(spec, workload, profile.engine)
    for option in pool.layouts[:most]:
        rules = (*profile.check(spec, option, cluster, workload), *long)
        try:
            copies = ctx.copies_of(option)
            if copies * option.world == cluster.devices:
                rules = tuple(rule for rule in rules if rule.code != "devices_idle")
            probes.append(ctx.probe(option, rules, copies))
        except IllegalLayoutError as error:
            rejected.append(Rejected(option, "illegal", str(error)))
    return probes, rejected, (pool.size, pool.illegal)


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


def too_full(ctx: ServeContext, probe: Probe) -> Rejected | None:
    """Why a layout does not hold the workload; None where it does."""
    if probe.memory.fits:
        return None
    worst = probe.memory.worst
    asked = ctx.share(probe.copies).concurrency or 1
    fixed = worst.total_bytes - worst.kv_cache_bytes
    if fixed > worst.capacity_bytes:
        text = f"{gib(fixed)} of weights, activations and runtime a rank exceed the {gib(worst.capacity_bytes)}"
        return Rejected(probe.layout, "weights_do_not_fit", text + " the engine may use")
    replica = -(-asked // probe.layout.dp)
    text = (
        f"{gib(worst.kv_cache_bytes)} of KV cache for {replica:,} requests of {ctx.workload.context:,} tokens beside "
        f"{gib(fixed)} exceed the {gib(worst.capacity_bytes)} a rank"
    )
    return Rejected(probe.layout, "kv_cache_does_not_fit", text)


def motive_of(chosen: Candidate, facts: ServeFacts) -> Motive:
    """Why the model is split: see ``plan.Motive``."""
    if joint_ranks(chosen) == 1:
        return "throughput"
    return "capacity" if facts.smallest_world > 1 else "latency"


def _searched(
    ctx: ServeContext,
    works: Sequence[Probe],
    rejected: list[Rejected],
    space: Space,
    pools: SplitFound | None,
) -> Plan | None:
    """The best of the layouts that work, None where none does; the engine's limit of sequences is set where it is
    open and the load was searched."""
    ordered = choose(ctx, works)
    if not ordered:
        return None
    chosen = ctx.candidate(ordered[0])
    settings = ctx.settings
    if space.open_limit and ctx.judged and ctx.workload.rate is None:
        settings, chosen = limited(ctx, chosen)
    facts = serve_facts(ctx, works, chosen)
    motive = motive_of(chosen, facts)
    reasons = explain_serve(ctx, chosen, facts, ordered[0].best.limit) + compare(ctx, ordered[0], ordered[1:], rejected)
    others = alternatives(ctx, ordered)
    unfit = space.size - space.illegal - len(works)
    found = ServeFound(space.size, space.illegal, unfit, len(works), tuple(front(ordered)), tuple(ordered), pools)
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
        reasons=reasons + split_reason(ordered[0], pools),
        alternatives=others,
        rejected=tuple(thin(rejected, MAX_REJECTED)),
        settings=settings,
        served=found,
    )


def limited(ctx: ServeContext, chosen: Candidate) -> tuple[ServeSettings, Candidate]:
    """The engine's limit of sequences set to the load that keeps the targets, and the layout under it: more requests
    wait for a place and do not slow down those that run."""
    work = chosen.workload
    if not isinstance(work, Serve) or work.concurrency is None:
        return ctx.settings, chosen
    most = -(-work.concurrency // chosen.layout.dp)
    found = replace(ctx, settings=replace(ctx.settings, max_num_seqs=min(most, ctx.settings.max_num_seqs or most)))
    memory = found.memory(chosen.placement, work)
    cost = serve_cost(chosen.placement, ctx.cluster, work, memory.max_requests, found.settings)
    return found.settings, replace(chosen, memory=memory, cost=cost)


def _short(ctx: ServeContext, probes: Sequence[Probe], rejected: list[Rejected]) -> Plan:
    """Nothing serves the whole workload: the fastest layout when the rate is too high, else the one that holds the most
    requests, or none at all."""
    holding = [p for p in probes if p.memory.max_requests > 0]
    most = max(holding, key=lambda p: p.memory.max_requests * p.copies, default=None)
    slow = {id(p) for p in holding if too_slow(ctx, p)}
    if slow and len(slow) == len(holding):
        most = max(holding, key=lambda p: rate_bound(ctx, p))
    best = ctx.candidate(most) if most is not None else None
    late = id(most) in slow
    return Plan(
        kind="serve",
        verdict=(missed(ctx, best) if best is not None and late else "")
        or nothing_works(ctx.spec, ctx.cluster, ctx.workload, best, ctx.budget_bytes),
        motive="none",
        spec=ctx.spec,
        cluster=ctx.cluster,
        engine=ctx.profile.name,
        workload=ctx.workload,
        layout=best.layout if best else None,
        legal=best is not None,
        fits=best is not None and best.fits,
        fast_enough=not late,
        chosen=best,
        rules=best.rules if best else (),
        reasons=explain_serve(ctx, best, serve_facts(ctx, [], best)) if best else (),
        alternatives=(),
        rejected=tuple(thin((r for r in rejected if best is None or r.layout != best.layout), MAX_REJECTED)),
        settings=ctx.settings,
    )


def _given(ctx: ServeContext, layout: Layout, works: Sequence[Probe], rejected: list[Rejected]) -> Plan:
    rules = tuple(explain_rules(ctx.spec, layout, ctx.profile, ctx.cluster, ctx.workload))
    rules += beyond_positions(ctx.spec, ctx.workload, ctx.profile.engine)
    broken = [r for r in rules if r.severity == "illegal"]
    probe = None if broken else ctx.probe(layout, rules)
    chosen = None if probe is None else ctx.candidate(probe)
    fits = chosen is not None and chosen.fits
    if chosen is not None and not fits:
        rules += copies_do_not_cure(chosen)
    ordered = [p for p in choose(ctx, works) if p.layout != layout]
    head = [probe, *ordered] if probe is not None and fits else []
    reasons: tuple[Reason, ...] = ()
    if chosen is not None:
        reasons = explain_serve(ctx, chosen, serve_facts(ctx, works, chosen))
        reasons += compare(ctx, head[0], ordered, rejected) if head else ()
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
        reasons=reasons,
        alternatives=alternatives(ctx, head, given=True) if head else better(ctx, ordered),
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

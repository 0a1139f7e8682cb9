"""``plan train``: evaluate, search, choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshwright.errors import IllegalLayoutError
from meshwright.moves.pipeline import refusal
from meshwright.plan.candidates import thin
from meshwright.plan.explain_train import Rival, explain_train, lost_to, rivals_of, searched_reasons
from meshwright.plan.memory import ServeMemory, TrainMemory
from meshwright.plan.plan import Alternative, Candidate, Motive, Plan, Rejected
from meshwright.plan.train_candidates import (
    SPARE,
    TIE,
    parameter_counts,
    promise,
    simplicity,
    state_bound,
    training_layouts,
)
from meshwright.plan.train_cost import train_cost
from meshwright.plan.train_engine import TrainEngine
from meshwright.plan.train_memory import train_memory
from meshwright.plan.training_step import microbatches
from meshwright.plan.verdict import given_training, no_training, train_verdict
from meshwright.specs.checks import dp_does_not_cure
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.nearest import explain as explain_rules
from meshwright.specs.placement import place
from meshwright.specs.profile import EngineProfile
from meshwright.specs.rules import Rule
from meshwright.specs.units import gib
from meshwright.specs.workload import Recompute, Train

if TYPE_CHECKING:
    from meshwright.plan.search.train import Found

#: Modes from the cheapest to the one that keeps least.
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
#: Devices from which every layout of the space is timed over arrays. On one node a few dozen promising ones are timed
#: row by row: planning there stays light (no numpy, see tests/test_imports.py).
SEARCHED = 16
#: Without a search over arrays: layouts counted in full, most promising first, and those whose memory alone is.
MAX_COSTED = 12
MAX_COUNTED = 48
MAX_ALTERNATIVES = 4
MAX_REJECTED = 8
#: Bytes a parameter of plain mixed-precision AdamW: bf16 weight, fp32 gradient, fp32 master copy and two moments
#: (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1, with the gradient in fp32).
STATE_BYTES = 18


@dataclass(frozen=True, slots=True)
class TrainContext:
    """What every candidate of one search shares."""

    spec: ModelSpec
    cluster: Cluster
    work: Train
    profile: EngineProfile
    engine: TrainEngine
    recompute_fixed: bool

    def evaluate(self, layout: Layout, work: Train, rules: tuple[Rule, ...] = ()) -> Candidate:
        """Place, count the memory of every stage, bound the cost.

        Raises:
            IllegalLayoutError: the engine refuses the layout.
        """
        placement = place(self.spec, layout, self.profile, sections=("decoder", "vision"))
        memory = train_memory(placement, layout, self.cluster, work, self.engine)
        return Candidate(layout, placement, memory, train_cost(placement, self.cluster, work, self.engine), rules, work)


def plan_train(
    spec: ModelSpec,
    cluster: Cluster,
    work: Train,
    profile: EngineProfile,
    engine: TrainEngine,
    layout: Layout | None = None,
    *,
    recompute_fixed: bool = False,
) -> Plan:
    """Judge ``layout``, or choose one that uses the whole cluster.

    Args:
        spec, cluster, work, profile: as stated.
        engine: what memory depends on (kernels, buffers, loss).
        layout: judge this one; None: search.
        recompute_fixed: keep ``work.recompute``; else the least recompute that fits is taken.
    """
    ctx = TrainContext(spec, cluster, work, profile, engine, recompute_fixed)
    works, rejected, searched = _search(ctx)
    if layout is not None:
        return replace(_given(ctx, layout, works, rejected), searched=searched)
    counted = (ctx.evaluate(c.layout, _train_of(c), c.rules) for c in works)
    chosen = next((c for c in counted if c.fits), None)
    if chosen is None:
        return _nothing(ctx, rejected)
    return Plan(
        kind="train",
        verdict=train_verdict(spec, cluster, _train_of(chosen), chosen),
        motive=motive_of(ctx, chosen.layout),
        spec=spec,
        cluster=cluster,
        engine=profile.name,
        workload=_train_of(chosen),
        layout=chosen.layout,
        legal=True,
        fits=True,
        chosen=chosen,
        rules=chosen.rules,
        reasons=explain_train(
            spec, cluster, _train_of(chosen), chosen, recompute_fixed, _rivals(chosen, works, searched)
        )
        + searched_reasons(searched),
        alternatives=alternatives(chosen, works),
        rejected=tuple(thin(rejected, MAX_REJECTED)),
        searched=searched,
    )


def _rivals(chosen: Candidate, works: list[Candidate], searched: Found | None) -> Mapping[str, Rival | None]:
    """The fastest layouts on the other side of every axis, of the search over arrays or of what was looked at."""
    if searched is None:
        return rivals_of(chosen, works)
    points = searched.rivals.items()
    return {a: None if p is None else Rival(p.layout, p.tokens_per_s_device, p.parts) for a, p in points}


def _train_of(candidate: Candidate) -> Train:
    assert isinstance(candidate.workload, Train)
    return candidate.workload


def motive_of(ctx: TrainContext, layout: Layout) -> Motive:
    """Capacity when parameters, gradients and optimizer state exceed one device, else throughput."""
    if ctx.spec.parameters("decoder") * STATE_BYTES > ctx.cluster.device.memory_bytes:
        return "capacity"
    return "throughput"


def _search(ctx: TrainContext) -> tuple[list[Candidate], list[Rejected], Found | None]:
    """Candidates that fit, best first; what was refused; the search over arrays where there was one."""
    if ctx.cluster.devices >= SEARCHED and (all_of := _full_search(ctx)) is not None:
        return _searched(ctx, all_of), _refused(ctx, flat=True)[0], all_of
    rejected, legal = _refused(ctx)
    legal.sort(key=lambda item: promise(item[0]))
    works: list[Candidate] = []
    tight: list[Candidate] = []
    for layout, rules in legal[:MAX_COUNTED]:
        if len(works) >= MAX_COSTED:
            break
        found = _least_recompute(ctx, layout, rules)
        if isinstance(found, Candidate):
            (works if _roomy(found.memory) else tight).append(found)
        else:
            rejected.append(found)
    return _ordered(works or tight), rejected, None


def _roomy(memory: ServeMemory | TrainMemory) -> bool:
    """Whether every rank leaves as much free as a chosen layout should."""
    return all(r.total_bytes <= (1 - SPARE) * r.capacity_bytes for r in memory.ranks)


def speed(candidate: Candidate) -> float:
    """Predicted tokens a second."""
    step = candidate.cost.predicted_step
    return step.tokens_per_s if step is not None else candidate.cost.tokens_per_s


def _ordered(works: list[Candidate]) -> list[Candidate]:
    best = max(map(speed, works), default=0.0)
    return sorted(works, key=lambda c: rank_key(c, best))


def _refused(ctx: TrainContext, *, flat: bool = False) -> tuple[list[Rejected], list[tuple[Layout, tuple[Rule, ...]]]]:
    """What the engine or the bound refuses, and what is left; ``flat``: of layouts with at most two stages, from which
    those that are shown come first."""
    rejected: list[Rejected] = []
    legal: list[tuple[Layout, tuple[Rule, ...]]] = []
    counts = parameter_counts(ctx.spec)
    for layout in training_layouts(ctx.spec, ctx.cluster, ctx.work):
        if flat and layout.pp > 2:
            continue
        rules = tuple(ctx.profile.check(ctx.spec, layout, ctx.cluster, ctx.work))
        broken = next((r for r in rules if r.severity == "illegal"), None)
        if broken is not None:
            rejected.append(Rejected(layout, broken.code, broken.message))
        elif (least := state_bound(ctx.work, ctx.engine, layout, counts)) > ctx.cluster.device.memory_bytes:
            text = (
                f"parameters, gradients and optimizer state take at least {gib(least)} a rank of "
                f"{gib(ctx.cluster.device.memory_bytes)}"
            )
            rejected.append(Rejected(layout, "states_do_not_fit", text))
        else:
            legal.append((layout, rules))
    return rejected, legal


def _full_search(ctx: TrainContext) -> Found | None:
    """Every layout of the space costed over arrays; None where that cannot be (see ``search.train.available``)."""
    from meshwright.plan.search.train import available, search_training

    if not available(ctx.profile, ctx.work):
        return None
    found = search_training(
        ctx.spec, ctx.cluster, ctx.work, ctx.profile, ctx.engine, recompute_fixed=ctx.recompute_fixed
    )
    return found if found.best else None


def _searched(ctx: TrainContext, found: Found) -> list[Candidate]:
    """The best layouts of a full search in its order, counted row by row: one for every (tp, pp, zero)."""
    shown = {(p.layout.tp, p.layout.pp, p.layout.zero): p for p in reversed(found.best)}
    works = []
    for point in [p for p in found.best if shown[p.layout.tp, p.layout.pp, p.layout.zero] is p][: MAX_ALTERNATIVES + 1]:
        rules = tuple(ctx.profile.check(ctx.spec, point.layout, ctx.cluster, ctx.work))
        works.append(_counted(ctx, point.layout, rules, replace(ctx.work, recompute=point.recompute)))
    return [candidate for candidate in works if candidate.fits]


def mode_that_fits(ctx: TrainContext, layout: Layout, *, spare: bool = False) -> tuple[Train, TrainMemory]:
    """The workload with the least recompute under which the layout fits (``spare``: and leaves room, if any does), and
    what the stages that can be the fullest then hold; full recompute when nothing fits."""

    def counted(mode: Recompute) -> tuple[Train, TrainMemory]:
        work = replace(ctx.work, recompute=mode)
        return work, train_memory(ctx.spec, layout, ctx.cluster, work, ctx.engine, few=True)

    fits = _roomy if spare else (lambda memory: memory.fits)
    least = counted(ctx.work.recompute if ctx.recompute_fixed else RECOMPUTE[0])
    if ctx.recompute_fixed or fits(least[1]):
        return least
    most = counted(RECOMPUTE[-1])
    if not fits(most[1]):
        return mode_that_fits(ctx, layout) if spare else most
    between = (counted(mode) for mode in RECOMPUTE[1:-1])
    return next((found for found in between if fits(found[1])), most)


def _least_recompute(ctx: TrainContext, layout: Layout, rules: tuple[Rule, ...]) -> Candidate | Rejected:
    """The layout with the least recompute that fits and leaves room."""
    work, memory = mode_that_fits(ctx, layout, spare=True)
    if memory.fits:
        try:
            return _counted(ctx, layout, rules, work, memory)
        except IllegalLayoutError as error:
            return Rejected(layout, "illegal", str(error))
    worst = memory.worst
    text = (
        f"rank {worst.rank} needs {gib(worst.total_bytes)} of {gib(worst.capacity_bytes)} with {work.recompute} "
        f"recompute ({gib(worst.activations_bytes)} of it activations)"
    )
    return Rejected(layout, "does_not_fit", text)


def _counted(
    ctx: TrainContext, layout: Layout, rules: tuple[Rule, ...], work: Train, memory: TrainMemory | None = None
) -> Candidate:
    """A layout with the memory of the stages that can be the fullest, and the bound of its first, middle and last
    stage; all stages are predicted.

    Raises:
        IllegalLayoutError: the engine refuses the layout.
    """
    placement = place(ctx.spec, layout, ctx.profile, sections=("decoder", "vision"))
    memory = memory or train_memory(ctx.spec, layout, ctx.cluster, work, ctx.engine, few=True)
    stages = {0, len(placement.stages) // 2, len(placement.stages) - 1}
    few = replace(placement, classes=tuple(c for c in placement.classes if c.coordinate.pp in stages))
    cost = train_cost(few, ctx.cluster, work, ctx.engine, whole=placement)
    return Candidate(layout, placement, memory, cost, rules, work)


def rank_key(candidate: Candidate, best: float) -> tuple[float, ...]:
    """Order of layouts that fit: predicted throughput in steps, then simplicity."""
    behind = 1.0 - speed(candidate) / best if best else 0.0
    return (int(behind / TIE), *simplicity(candidate.layout), behind)


def alternatives(chosen: Candidate, ordered: list[Candidate]) -> tuple[Alternative, ...]:
    """Runners-up, one for every (tp, pp, zero)."""
    seen = {(chosen.layout.tp, chosen.layout.pp, chosen.layout.zero)}
    out = []
    for candidate in ordered:
        key = (candidate.layout.tp, candidate.layout.pp, candidate.layout.zero)
        if key in seen or candidate.layout == chosen.layout:
            continue
        seen.add(key)
        out.append(Alternative(candidate, lost_to(chosen, candidate)))
        if len(out) == MAX_ALTERNATIVES:
            break
    return tuple(out)


def _given(ctx: TrainContext, layout: Layout, works: list[Candidate], rejected: list[Rejected]) -> Plan:
    rules = tuple(explain_rules(ctx.spec, layout, ctx.profile, ctx.cluster, ctx.work))
    if not any(r.severity == "illegal" for r in rules):
        rules += schedule_refuses(layout, ctx.work)
    broken = [r for r in rules if r.severity == "illegal"]
    chosen = None if broken else ctx.evaluate(layout, mode_that_fits(ctx, layout)[0], rules)
    work = _train_of(chosen) if chosen is not None else ctx.work
    fits = chosen is not None and chosen.fits
    if chosen is not None and not fits and ctx.spec.moe is None:
        worst = chosen.memory.worst
        states = worst.weights_bytes + worst.gradients_bytes + (0 if layout.zero else worst.optimizer_bytes)
        found = dp_does_not_cure(layout, states, worst.capacity_bytes)
        cure = "spread the states with zero=3, or give the devices to tp or pp"
        text = f"parameters and states take {gib(states)} a rank of {gib(worst.capacity_bytes)}; dp {layout.dp} makes"
        rules += tuple(
            replace(rule, severity="unwise", message=f"{text} copies and cuts no weights", way_out=cure)
            for rule in found
        )
    others = alternatives(chosen, works) if chosen is not None and fits else _better(works)
    return Plan(
        kind="train",
        verdict=given_training(ctx.spec, work, layout, broken, chosen),
        motive="given",
        spec=ctx.spec,
        cluster=ctx.cluster,
        engine=ctx.profile.name,
        workload=work,
        layout=layout,
        legal=not broken,
        fits=fits,
        chosen=chosen,
        rules=rules,
        reasons=explain_train(ctx.spec, ctx.cluster, work, chosen, ctx.recompute_fixed, {}) if chosen else (),
        alternatives=others,
        rejected=tuple(thin((r for r in rejected if r.layout != layout), MAX_REJECTED)),
    )


def schedule_refuses(layout: Layout, work: Train) -> tuple[Rule, ...]:
    """The rule that a pipeline schedule breaks with this number of micro-batches."""
    m = microbatches(layout, work)
    name = "interleaved" if layout.virtual > 1 and layout.schedule == "1f1b" else layout.schedule
    said = refusal(name, layout.pp, m, layout.virtual) if layout.pp > 1 else ""
    if not said:
        return ()
    message, _, cure = said.partition("; ")
    replica = layout.dp * layout.micro_batch
    more = 2 * layout.pp * replica
    numbers = (("micro_batches", m), ("pp", layout.pp), ("virtual", layout.virtual))
    way_out = f"{cure or f'raise --global-batch to {more} or lower dp'}, or schedule=1f1b"
    return (Rule("schedule_micro_batches", "illegal", message, way_out, "torch.distributed.pipelining", numbers),)


def _better(works: list[Candidate]) -> tuple[Alternative, ...]:
    """Layouts that work where the given one does not."""
    return tuple(Alternative(c, "works, where the given layout does not") for c in works[:MAX_ALTERNATIVES])


def _nothing(ctx: TrainContext, rejected: list[Rejected]) -> Plan:
    return Plan(
        kind="train",
        verdict=no_training(ctx.spec, ctx.cluster, STATE_BYTES),
        motive="none",
        spec=ctx.spec,
        cluster=ctx.cluster,
        engine=ctx.profile.name,
        workload=ctx.work,
        layout=None,
        legal=False,
        fits=False,
        chosen=None,
        rules=(),
        reasons=(),
        alternatives=(),
        rejected=tuple(thin(rejected, MAX_REJECTED)),
    )

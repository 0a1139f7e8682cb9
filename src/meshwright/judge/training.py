"""Verdict on a training command: does it fit, layouts that would, and the command of the first one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.engines.base import Emission, Engine, Invocation, Request
from meshwright.errors import IllegalLayoutError, InputError
from meshwright.judge.verdict import (
    MAX_SUGGESTIONS,
    Suggestion,
    Verdict,
    findings,
    nothing_fits,
    on_condition,
    sentence,
)
from meshwright.plan.plan import Candidate, Plan
from meshwright.plan.train import TrainContext, plan_train
from meshwright.plan.train_engine import TrainEngine, engine_preset
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout, product
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import EngineProfile
from meshwright.specs.rules import Rule
from meshwright.specs.units import gib
from meshwright.specs.workload import Train

#: Legal layouts near an illegal one that are counted in full.
MAX_NEAR = 6


def train_engine(invocation: Invocation) -> TrainEngine:
    """The memory options of a training command: its preset with what the command changes.

    Raises:
        InputError: an option that ``TrainEngine`` does not have (a mistake of an engine folder).
    """
    options = dict(invocation.train_options)
    preset = str(options.pop("preset", "torch"))
    return engine_preset(preset, **options)


def judge_training(
    engine: Engine, invocation: Invocation, spec: ModelSpec, cluster: Cluster, work: Train, profile: EngineProfile
) -> Verdict:
    """Judge a training command.

    Raises:
        InputError: an option that ``TrainEngine`` does not have.
    """
    options = train_engine(invocation)
    plan = plan_train(spec, cluster, work, profile, options, invocation.layout, recompute_fixed=True)
    illegal, unwise = findings(invocation, plan)
    if illegal:
        first = illegal[0]
        line = f"will not start: {first.message}" + (f" ({first.where})" if first.where else "")
    else:
        assert plan.chosen is not None
        worst = plan.chosen.memory.worst
        word = "will start" if plan.fits else "will run out of memory"
        line = (
            f"{word}: {product(invocation.layout)}, rank {worst.rank} takes {gib(worst.total_bytes)} of "
            f"{gib(worst.capacity_bytes)}"
        )
    starts = not illegal and plan.fits
    suggestions: tuple[Suggestion, ...] = ()
    mended = Emission(())
    if not starts:
        context = TrainContext(spec, cluster, work, profile, options, recompute_fixed=True)
        found = training_candidates(context, plan, illegal)
        mended, found = mend_training(engine, invocation, spec, cluster, found)
        suggestions = tuple(training_suggestion(c, work, invocation.layout) for c in found)
    return Verdict(
        verdict=on_condition(line, invocation),
        starts=starts,
        invocation=invocation,
        plan=plan,
        suggestions=suggestions,
        way_out="" if starts or suggestions or illegal else nothing_fits(cluster, "keep optimizer states on the host"),
        mended=mended.commands,
        mended_files=mended.files,
        unwise=tuple(sentence(r) for r in unwise),
    )


def training_candidates(context: TrainContext, plan: Plan, illegal: Sequence[Rule]) -> tuple[Candidate, ...]:
    """Layouts that fit, at most three: the given one where only its command is wrong, or with full recompute where
    that is what it lacks; then its legal neighbours that use every device; then what a search finds."""
    found: dict[tuple[Layout, object], Candidate] = {}
    for candidate in _in_order(context, plan, illegal):
        found.setdefault((candidate.layout, candidate.workload), candidate)
        if len(found) == MAX_SUGGESTIONS:
            break
    return tuple(found.values())


def _in_order(context: TrainContext, plan: Plan, illegal: Sequence[Rule]) -> Iterator[Candidate]:
    if plan.chosen is not None and plan.fits:
        yield plan.chosen
    if not illegal and context.work.recompute != "full":
        yield from _recomputed(context, plan)
    yield from _near(context, illegal)
    yield from (a.candidate for a in plan.alternatives)


def _recomputed(context: TrainContext, plan: Plan) -> Iterator[Candidate]:
    """The same layout with full recomputation, or the nearest others with it."""
    saving = replace(context.work, recompute="full")
    again = plan_train(
        context.spec, context.cluster, saving, context.profile, context.engine, plan.layout, recompute_fixed=True
    )
    if again.chosen is not None and again.fits:
        yield again.chosen
    yield from (a.candidate for a in again.alternatives)


def _near(context: TrainContext, illegal: Sequence[Rule]) -> Iterator[Candidate]:
    """Neighbours that the broken rules name, those that leave no device idle."""
    spec, cluster, work = context.spec, context.cluster, context.work
    layouts = dict.fromkeys(n for rule in illegal for n in rule.nearest if n.world == cluster.devices)
    for layout in [*layouts][:MAX_NEAR]:
        if any(r.severity == "illegal" for r in context.profile.check(spec, layout, cluster, work)):
            continue
        try:
            candidate = context.evaluate(layout, work)
        except IllegalLayoutError:
            continue
        if candidate.fits:
            yield candidate


def training_suggestion(candidate: Candidate, work: Train, given: Layout) -> Suggestion:
    """A candidate in words: its degrees, what else differs from the command, the fullest rank."""
    worst, layout = candidate.memory.worst, candidate.layout
    name = product(layout)
    if name == product(given) and layout != given:
        name += f" ({layout} in place of {given})"
    if isinstance(candidate.workload, Train) and candidate.workload.recompute != work.recompute:
        name += f" with {candidate.workload.recompute} recompute (gradient checkpointing)"
    text = f"{name}: rank {worst.rank} takes {gib(worst.total_bytes)} of {gib(worst.capacity_bytes)}"
    return Suggestion(layout, text, True)


def mend_training(
    engine: Engine, invocation: Invocation, spec: ModelSpec, cluster: Cluster, found: Sequence[Candidate]
) -> tuple[Emission, tuple[Candidate, ...]]:
    """Commands and files of the first candidate that the engine can be started with, and the candidates, that one in
    front; nothing to type when it can be started with none."""
    given = dict(invocation.given)
    options = {name: given[flag] for name, flag in (("module", "--module"), ("config", "--config")) if flag in given}
    for candidate in found:
        request = Request(
            model=invocation.model or spec.name,
            layout=candidate.layout,
            cluster=cluster,
            workload=candidate.workload or invocation.workload,
            options=options,
            train_options=dict(invocation.train_options),
            spec=spec,
        )
        try:
            emission = engine.emit(request, invocation.version)
        except InputError:
            continue
        return emission, (candidate, *(c for c in found if c is not candidate))
    return Emission(()), tuple(found)

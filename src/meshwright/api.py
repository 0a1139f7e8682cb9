"""The Python API: the functions behind the command line, with the same names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.errors import InputError
from meshwright.specs.cluster import Cluster, parse_cluster
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import Layout, parse_layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve, Train

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwright.engines.base import Deployment, Emission
    from meshwright.ledger.schema import Ledger
    from meshwright.plan.plan import Command, Plan
    from meshwright.plan.strategies import StrategyRow
    from meshwright.plan.timeline import Timeline
    from meshwright.plan.train_engine import TrainEngine
    from meshwright.plan.training_time import TrainingTime

#: Engines that train -> preset of what their memory depends on (``plan/constants/training.json``).
TRAINERS = {
    "meshwright": "torch",
    "torchtitan": "torchtitan 0.3",
    "megatron": "megatron-core",
    "deepspeed": "torch",
    "accelerate": "torch",
    "transformers": "torch",
}


def _model(model: str | ModelSpec) -> ModelSpec:
    return read_model(model) if isinstance(model, str) else model


def _served_name(model: str, spec: ModelSpec) -> str:
    """What an engine is told: a hub id, or the folder of a local configuration."""
    if not model:
        return spec.name
    return model.rpartition("/")[0] or "." if model.endswith(".json") else model


def _cluster(on: str | Cluster) -> Cluster:
    return parse_cluster(on) if isinstance(on, str) else on


def _layout(layout: str | Layout | None) -> Layout | None:
    return parse_layout(layout) if isinstance(layout, str) else layout


def _starts(plan: Plan) -> bool:
    """Whether the engine comes up with the layout: its caches hold one request at least."""
    memory = plan.chosen.memory if plan.chosen is not None else None
    return getattr(memory, "max_requests", 0) > 0


def plan_serve(
    model: str | ModelSpec,
    on: str | Cluster,
    workload: Serve | None = None,
    *,
    layout: str | Layout | None = None,
    engine: str = "vllm",
    settings: ServeSettings | None = None,
    calibration: str | Path | None = None,
    split: bool = False,
) -> Plan:
    """Judge ``layout`` for serving, or choose one; the commands of the engine are attached.

    ``calibration``: file written by ``check --save``, whose terms replace the modelled ones of the same degrees.
    ``split``: separate prefill and decode pools are searched too (with a latency target they always are); see
    ``plan_split``.

    Raises:
        InputError: an unknown model, device, link, engine or layout key.
    """
    from meshwright import engines
    from meshwright.plan.calibration import read_calibration
    from meshwright.plan.serve import plan_serve as decide

    spec, cluster, profile = _model(model), _cluster(on), engines.profile(engine)
    if not profile.serves:
        raise InputError(f"{profile.name} trains and does not serve; take vllm, sglang, trtllm or meshwright")
    workload = workload or Serve()
    found = read_calibration(Path(calibration)) if calibration is not None else None
    plan = decide(spec, cluster, workload, profile, settings or ServeSettings(), _layout(layout), found, split=split)
    notes = (*spec.assumptions, *cluster.notes, *(plan.chosen.memory.notes if plan.chosen else ()))
    if plan.chosen is not None and plan.chosen.copies > 1:
        each = f"the commands start one copy on {plan.chosen.layout.world} devices"
        notes = (*notes, f"{each}: start {plan.chosen.copies} of them and deal out the requests between them")
    named = replace(plan, notes=notes, asked=model if isinstance(model, str) else spec.name)
    return _with_commands(named) if named.legal and _starts(named) else named


def _with_commands(plan: Plan) -> Plan:
    """The plan with its commands. What our own runtime cannot be told is a note: plain PyTorch may hold the plan too.

    Raises:
        InputError: another engine cannot be started that way.
    """
    try:
        return replace(plan, commands=usual_commands(plan))
    except InputError as error:
        if not plan.engine.startswith("meshwright"):
            raise
        return replace(plan, notes=(*plan.notes, f"no command: {error}"))


def usual_commands(plan: Plan) -> tuple[Command, ...]:
    """The engine's usual way of starting, and beside it Ray where vLLM's replica spans nodes.

    Raises:
        InputError: the layout needs more devices than the cluster has.
    """
    commands = emit(plan).commands
    layout, node = plan.layout, plan.cluster.devices_per_node
    if layout is not None and plan.engine.startswith("vllm") and layout.tp * layout.pp * layout.cp > node:
        commands += emit(plan, deployment="ray").commands
    return commands


def plan_pools(
    model: str | ModelSpec,
    on: str | Cluster,
    workload: Serve | None = None,
    *,
    prefill: str | Layout,
    decode: str | Layout,
    engine: str = "vllm",
    settings: ServeSettings | None = None,
    workers: tuple[int, int] = (1, 1),
) -> tuple[Plan, Plan]:
    """Judge a prefill pool and a decode pool beside it; each worker gets the whole nodes that its ranks need.

    The prefill side holds one request at a time, the decode side all requests in flight, shared out over its workers.
    ``workers``: equal ones of each side.

    Raises:
        InputError: the two need more devices than there are, or an unknown name.
    """
    spec, cluster = _model(model), _cluster(on)
    workload = workload or Serve()
    layouts = [_layout(prefill), _layout(decode)]
    assert layouts[0] is not None
    assert layouts[1] is not None
    node = cluster.devices_per_node
    nodes = [-(-layout.world // node) for layout in layouts if layout is not None]
    if sum(nodes) > cluster.nodes and sum(x.world for x in layouts if x is not None) > cluster.devices:
        raise InputError(
            f"prefill on {layouts[0].world} and decode on {layouts[1].world} devices need {sum(nodes)} nodes of "
            f"{node}, the cluster has {cluster.nodes}"
        )
    inside = workload.concurrency and -(-workload.concurrency // workers[1])
    untimed = replace(workload, ttft_s=None, tpot_s=None, concurrency=inside)
    works = (replace(untimed, concurrency=None, rate=None), untimed)
    name = model if isinstance(model, str) else spec.name
    plans = []
    for layout, count, work in zip(layouts, nodes, works, strict=True):
        part = replace(cluster, nodes=min(count, cluster.nodes))
        plan = plan_serve(spec, part, work, layout=layout, engine=engine, settings=settings)
        plans.append(replace(plan, asked=name))
    return _timed_pools(plans[0], replace(plans[1], workload=workload), workers)


def plan_split(
    model: str | ModelSpec,
    on: str | Cluster,
    workload: Serve | None = None,
    *,
    engine: str = "vllm",
    settings: ServeSettings | None = None,
) -> tuple[Plan, Plan | None]:
    """The best separate prefill and decode pools of a cluster: the plan of the decode side, which says all of the
    pair, and that of the prefill side; where no split works, the best plan of one pool and None.

    Raises:
        InputError: an unknown model, device, link or engine.
    """
    whole = plan_serve(model, on, workload, engine=engine, settings=settings, split=True)
    found = whole.served.split if whole.served is not None else None
    if found is None or not isinstance(whole.workload, Serve):
        verdict = "no split works: no pair of prefill and decode pools keeps the targets here; of one pool: "
        return replace(whole, verdict=verdict + whole.verdict, fast_enough=False), None
    best, work = found.best, replace(whole.workload, concurrency=found.best.users, rate=None)
    first, second = plan_pools(
        model, whole.cluster, work, prefill=best.prefill.layout, decode=best.decode.layout, engine=engine,
        settings=settings, workers=(best.prefill_workers, best.decode_workers),
    )  # fmt: skip
    from meshwright.plan.comparisons import split_reason
    from meshwright.plan.verdict import split_verdict

    reasons = split_reason(whole.served.ranked[0], found, taken=True) if whole.served is not None else ()
    verdict = split_verdict(whole.spec, whole.cluster, whole.workload, found)
    joint = replace(second, served=whole.served, reasons=reasons, alternatives=whole.alternatives)
    counts = f"{best.prefill_workers} prefill and {best.decode_workers} decode workers"
    notes = (*joint.notes, f"the commands start one worker of each side; {counts} make up the plan")
    return replace(joint, verdict=verdict if joint.ok else joint.verdict, notes=notes), first


def _timed_pools(first: Plan, second: Plan, workers: tuple[int, int]) -> tuple[Plan, Plan]:
    """The pair with one prediction, that of both pools together, at the decode side; its targets are judged by it."""
    from meshwright.plan.plan import Prediction
    from meshwright.plan.serving_time_pools import Pool, pool_time
    from meshwright.plan.targets import missed_by

    if (
        first.chosen is None
        or second.chosen is None
        or second.settings is None
        or not isinstance(second.workload, Serve)
    ):
        return first, second
    pairs = zip((first, second), workers, strict=True)
    sides = [Pool(p.chosen.placement, p.cluster, count) for p, count in pairs if p.chosen is not None]
    work, settings = second.workload, second.settings
    later = Prediction(lambda: pool_time(sides[0], sides[1], work, settings))
    alone = replace(first, chosen=replace(first.chosen, cost=replace(first.chosen.cost, later=None)))
    joint = replace(second, chosen=replace(second.chosen, cost=replace(second.chosen.cost, later=later)))
    judged = second.ok and (work.ttft_s is not None or work.tpot_s is not None)
    late = missed_by(work, later.time, "the pair") if judged else ""
    return alone, replace(joint, verdict=late, fast_enough=False) if late else joint


def plan_train(
    model: str | ModelSpec,
    on: str | Cluster,
    workload: Train | None = None,
    *,
    layout: str | Layout | None = None,
    engine: str = "meshwright",
    recompute_fixed: bool = False,
) -> Plan:
    """Judge ``layout`` for training, or choose one that uses the whole cluster; the engine's commands are attached.

    Raises:
        InputError: an unknown model, device, link, engine or layout key, or an engine that does not train.
    """
    from meshwright import engines
    from meshwright.plan.train import plan_train as decide
    from meshwright.plan.train_engine import engine_preset

    spec, cluster, profile = _model(model), _cluster(on), engines.profile(engine)
    if not profile.trains:
        raise InputError(f"{profile.name} does not train; take one of {', '.join(TRAINERS)}")
    preset = engine_preset(TRAINERS.get(profile.engine, "torch"))
    plan = decide(spec, cluster, workload or Train(), profile, preset, _layout(layout), recompute_fixed=recompute_fixed)
    notes = (*spec.assumptions, *cluster.notes, *(plan.chosen.memory.notes if plan.chosen else ()))
    named = replace(plan, notes=notes, asked=model if isinstance(model, str) else spec.name)
    return _with_commands(named) if named.ok else named


def emit(
    plan: Plan,
    *,
    prefill: Plan | None = None,
    deployment: Deployment | None = None,
    options: Mapping[str, str] | None = None,
) -> Emission:
    """What to type on every node, and the files that go with it; empty where no layout works.

    Args:
        plan: a plan with a legal layout; for pools that of the decode side.
        prefill: plan of the prefill side.
        deployment: how it is started; None: the engine's usual way.
        options: engine-specific extras (``connector=nixl``).

    Raises:
        InputError: the engine cannot be started that way.
    """
    from meshwright import engines
    from meshwright.engines.base import Emission, Request

    name, version = engines.split_name(plan.engine)
    if plan.layout is None:
        return Emission(())
    both = prefill.cluster.nodes + plan.cluster.nodes if prefill is not None else plan.cluster.nodes
    request = Request(
        model=_served_name(plan.asked, plan.spec),
        layout=plan.layout,
        cluster=replace(plan.cluster, nodes=both),
        workload=plan.workload,
        settings=plan.settings,
        prefill=prefill.layout if prefill is not None else None,
        deployment=deployment,
        options=dict(options or {}),
        spec=plan.spec,
        cache_tokens=_cache_tokens(plan, prefill),
        kv_cache_bytes=getattr(plan.chosen.memory, "kv_pool_bytes", None) if plan.chosen is not None else None,
    )
    if name == "meshwright":
        _check_own(plan.kind, plan.spec, plan.layout, request.prefill)
    return engines.load(name).emit(request, version)


def _cache_tokens(*plans: Plan | None) -> int | None:
    """Tokens that the caches of all plans hold; None in training."""
    memories = (p.chosen.memory for p in plans if p is not None and p.chosen is not None)
    return min((n for m in memories if (n := getattr(m, "kv_cache_tokens", None)) is not None), default=None)


def _check_own(kind: str, spec: ModelSpec, *layouts: Layout | None) -> None:
    """Refuse what our own runtime does not run.

    Raises:
        InputError: it does not, and why.
    """
    from meshwright.runtime.refusal import refusal

    why = refusal(spec, *filter(None, layouts), trains=kind == "train")
    if why:
        raise InputError(f"meshwright run {kind} refuses: {why}")


def train_workload(**fields: str | int) -> Train:
    """A ``Train`` from text fields, each checked against what is allowed.

    Raises:
        InputError: a value that is not allowed, with the allowed ones.
    """
    allowed = {
        "optimizer": ("adamw", "sgd", "muon"),
        "recompute": ("none", "selective", "full"),
        "param_dtype": ("bf16", "f16", "f32"),
        "grad_dtype": ("bf16", "f16", "f32"),
        "attention": ("flash", "unfused"),
        "offload": ("none", "optimizer", "activations"),
    }
    for name, values in allowed.items():
        if name in fields and fields[name] not in values:
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag} {str(fields[name])[:20]!r} is not one of {', '.join(values)}")
    return Train(**fields)  # type: ignore[arg-type]


def fill_ledger(plan: Plan) -> Ledger:
    """The counted ledger of a plan's layout: entries, holdings, ranks.

    Raises:
        InputError: the plan has no legal layout.
    """
    from meshwright.plan import entries

    if plan.chosen is None:
        raise InputError("the layout is illegal, so there is no ledger to count")
    chosen = plan.chosen
    workload = chosen.workload or plan.workload
    return entries.fill_ledger(chosen.placement, workload, chosen.memory, settings=plan.settings, cluster=plan.cluster)


def step_time(plan: Plan) -> TrainingTime:
    """The predicted optimizer step of a training plan's layout.

    Raises:
        InputError: the plan has no legal layout.
    """
    from meshwright.plan.training_time import training_time

    if plan.chosen is None or not isinstance(plan.workload, Train):
        raise InputError("the layout is illegal, so there is no step to time")
    work = plan.chosen.workload or plan.workload
    assert isinstance(work, Train)
    return plan.chosen.cost.predicted_step or training_time(
        plan.chosen.placement, plan.cluster, work, train_engine(plan)
    )


def train_engine(plan: Plan) -> TrainEngine:
    """What memory and time of a training plan's engine depend on."""
    from meshwright import engines
    from meshwright.plan.train_engine import engine_preset

    return engine_preset(TRAINERS.get(engines.split_name(plan.engine)[0], "torch"))


def timelines(plan: Plan, prefill: Plan | None = None) -> list[Timeline]:
    """When everything that a plan's layout does starts and ends: a prefill and a round of decoding, or a step.

    ``prefill``: plan of a prefill pool, whose prefill is shown instead.

    Raises:
        InputError: a plan has no legal layout.
    """
    from meshwright.plan.timeline import serving_timeline

    if plan.chosen is None or (prefill is not None and prefill.chosen is None):
        raise InputError("the layout is illegal, so there is no timeline")
    work = plan.chosen.workload or plan.workload
    if isinstance(work, Train):
        from meshwright.plan.timeline_train import training_timeline

        step_s = step_time(plan).step.value
        return [training_timeline(plan.chosen.placement, plan.cluster, work, step_s).timeline]
    found = serving_timeline(plan.chosen, plan.cluster, work, plan.settings or ServeSettings())
    return found if prefill is None else [timelines(prefill)[0], *found[1:]]


def strategies(plan: Plan) -> list[StrategyRow]:
    """What each strategy cuts and moves for the plan's model, cluster and workload."""
    from meshwright import engines
    from meshwright.plan.strategies import strategies as rows

    return rows(plan.spec, plan.cluster, plan.workload, engines.profile(plan.engine))

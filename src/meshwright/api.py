"""The Python API: the functions behind the command line, with the same names."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.errors import InputError
from meshwright.specs.cluster import Cluster, parse_cluster
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import Layout, parse_layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve, Train

if TYPE_CHECKING:
    from meshwright.ledger.schema import Ledger
    from meshwright.plan.plan import Command, Plan
    from meshwright.plan.strategies import StrategyRow


def _model(model: str | ModelSpec) -> ModelSpec:
    return read_model(model) if isinstance(model, str) else model


def _served_name(model: str | ModelSpec, spec: ModelSpec) -> str:
    """What an engine is told: a hub id, or the folder of a local configuration."""
    if not isinstance(model, str):
        return spec.name
    return model.rpartition("/")[0] or "." if model.endswith(".json") else model


def _cluster(on: str | Cluster) -> Cluster:
    return parse_cluster(on) if isinstance(on, str) else on


def _layout(layout: str | Layout | None) -> Layout | None:
    return parse_layout(layout) if isinstance(layout, str) else layout


def plan_serve(
    model: str | ModelSpec,
    on: str | Cluster,
    workload: Serve | None = None,
    *,
    layout: str | Layout | None = None,
    engine: str = "vllm",
    settings: ServeSettings | None = None,
) -> Plan:
    """Judge ``layout`` for serving, or choose one; the commands of the engine are attached.

    Raises:
        InputError: an unknown model, device, link, engine or layout key.
    """
    from meshwright import engines
    from meshwright.engines.vllm.command import commands
    from meshwright.plan.serve import plan_serve as decide

    spec, cluster, profile = _model(model), _cluster(on), engines.profile(engine)
    workload = workload or Serve()
    plan = decide(spec, cluster, workload, profile, settings or ServeSettings(), _layout(layout))
    notes = (*spec.assumptions, *cluster.notes, *(plan.chosen.memory.notes if plan.chosen else ()))
    typed: tuple[Command, ...] = ()
    if plan.layout is not None and plan.legal and profile.engine == "vllm" and plan.settings is not None:
        typed = commands(
            model if isinstance(model, str) else spec.name, plan.layout, cluster, workload, plan.settings, profile
        )
    return replace(plan, notes=notes, commands=typed)


def plan_train(
    model: str | ModelSpec,
    on: str | Cluster,
    workload: Train | None = None,
    *,
    layout: str | Layout | None = None,
    engine: str = "meshwright",
    recompute_fixed: bool = False,
) -> Plan:
    """Judge ``layout`` for training, or choose one that uses the whole cluster.

    Raises:
        InputError: an unknown model, device, link, engine or layout key.
    """
    from meshwright import engines
    from meshwright.plan.train import plan_train as decide
    from meshwright.plan.train_memory import DEFAULT_ENGINE

    spec, cluster = _model(model), _cluster(on)
    plan = decide(
        spec,
        cluster,
        workload or Train(),
        engines.profile(engine),
        DEFAULT_ENGINE,
        _layout(layout),
        recompute_fixed=recompute_fixed,
    )
    notes = (*spec.assumptions, *cluster.notes, *(plan.chosen.memory.notes if plan.chosen else ()))
    return replace(plan, notes=notes)


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


def strategies(plan: Plan) -> list[StrategyRow]:
    """What each strategy cuts and moves for the plan's model, cluster and workload."""
    from meshwright import engines
    from meshwright.plan.strategies import strategies as rows

    return rows(plan.spec, plan.cluster, plan.workload, engines.profile(plan.engine))

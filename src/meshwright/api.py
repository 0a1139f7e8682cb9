"""The Python API: the functions behind the command line, with the same names."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.specs.cluster import Cluster, parse_cluster
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import Layout, parse_layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve

if TYPE_CHECKING:
    from meshwright.plan.plan import Plan


def _model(model: str | ModelSpec) -> ModelSpec:
    return read_model(model) if isinstance(model, str) else model


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
    typed = ()
    if plan.layout is not None and plan.legal and profile.engine == "vllm" and plan.settings is not None:
        typed = commands(spec.name, plan.layout, cluster, workload, plan.settings, profile)
    return replace(plan, notes=notes, commands=typed)

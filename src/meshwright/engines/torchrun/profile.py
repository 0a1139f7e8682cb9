"""Profile of a plain script under torchrun: its parallelism is not known, its world is."""

from __future__ import annotations

from meshwright.engines.own.profile import split_layers
from meshwright.specs import checks
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import EngineProfile
from meshwright.specs.rules import Rule
from meshwright.specs.workload import Train, Workload


def check(spec: ModelSpec, layout: Layout, cluster: Cluster | None, workload: Workload | None) -> list[Rule]:
    """What holds for every script: devices, stages, batches, experts."""
    found = [
        *checks.world_fits(layout, cluster),
        *checks.stages(spec, layout, split_layers),
        *checks.experts(spec, layout),
        *checks.zero_needs_ranks(layout),
        *checks.tp_inside_node(layout, cluster),
    ]
    if isinstance(workload, Train):
        found += checks.batches(layout, workload)
    return sorted(found, key=lambda rule: rule.severity != "illegal")


TORCHRUN = EngineProfile(
    engine="torchrun",
    version="2.13",
    serves=False,
    trains=True,
    rank_order=("pp", "dp", "cp", "tp"),
    split_layers=split_layers,
    check=check,
    uneven_tp=True,
)

#: Profiles by the short version, newest first.
PROFILES: dict[str, EngineProfile] = {"2.13": TORCHRUN}

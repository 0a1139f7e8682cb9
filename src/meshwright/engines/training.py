"""What the engines that train from a script have in common: world, data parallel degree, batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.engines.base import FlagTable, Invocation, Request
from meshwright.engines.launcher import Launch
from meshwright.errors import InputError
from meshwright.specs.checks import broken
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.profile import EngineProfile
from meshwright.specs.rules import Rule


class TrainingEngine:
    """Versions, profiles and an empty boot log; an engine of this kind adds parsing and writing."""

    name: str
    profiles: Mapping[str, EngineProfile]

    def versions(self) -> tuple[str, ...]:
        """Versions with a profile, newest first."""
        return tuple(self.profiles)

    def profile(self, version: str | None = None) -> EngineProfile:
        """Profile of a version (None: the newest), by its short or its full name.

        Raises:
            InputError: no such version.
        """
        for short, profile in self.profiles.items():
            if version in {None, short, profile.version}:
                return profile
        raise InputError(f"no profile of {self.name} {version!r:.20}; known: {', '.join(self.profiles)}")

    def table(self) -> FlagTable:
        """Flag table of the newest version."""
        raise NotImplementedError

    def flags(self, version: str | None = None) -> FlagTable:
        """Flag table of a version (None: the newest).

        Raises:
            InputError: no such version.
        """
        self.profile(version)
        return self.table()


def completed(invocation: Invocation, found: Invocation) -> Invocation:
    """The invocation with what was understood once model and devices were known; nothing is said twice."""
    return replace(
        invocation,
        layout=found.layout,
        workload=found.workload,
        train_options=found.train_options,
        findings=tuple(dict.fromkeys(invocation.findings + found.findings)),
        notes=tuple(dict.fromkeys(invocation.notes + found.notes)),
    )


def from_launch(invocation: Invocation, launch: Launch) -> Invocation:
    """An invocation with world, findings and flags of the launcher in front."""
    return replace(
        invocation,
        nodes=launch.nodes,
        node_rank=launch.node_rank,
        devices=launch.devices,
        given=launch.given + invocation.given,
        unknown=launch.unknown + invocation.unknown,
        findings=launch.findings + invocation.findings,
        notes=launch.notes + invocation.notes,
    )


def fill_dp(layout: Layout, world: int) -> tuple[Layout, tuple[Rule, ...]]:
    """The layout with the data parallel degree that a world leaves, and a rule when it leaves none."""
    other = layout.tp * layout.pp * layout.cp
    if world % other:
        rule = broken(
            "world_over_degrees",
            "illegal",
            f"{world} processes are not a multiple of tp {layout.tp} x pp {layout.pp} x cp {layout.cp} = {other}",
            f"start a multiple of {other} processes, or lower a degree",
            world=world,
            degrees=other,
        )
        return layout.with_(dp=1), (rule,)
    return layout.with_(dp=world // other), ()


def world_of(invocation: Invocation, cluster: Cluster) -> int:
    """Processes in all: as stated, else every device of the stated nodes, else of the whole cluster (a file alone)."""
    if invocation.devices is not None:
        return invocation.devices
    return cluster.devices if invocation.nodes is None else invocation.nodes * cluster.devices_per_node


def on_host(request: Request) -> tuple[str, ...]:
    """States that a request keeps in host memory: parameters, gradients, optimizer."""
    stated = request.train_options.get("on_host", ())
    return tuple(map(str, stated)) if isinstance(stated, tuple) else ()


def shards_in_trainer(launch: Launch) -> bool:
    """Whether only the Trainer's own ``--fsdp`` shards: the launcher configures neither FSDP nor DeepSpeed."""
    words = {w.partition("=")[0] for w in launch.arguments}
    if "--fsdp" not in words or words & {"--deepspeed", "--deepspeed_config"} or launch.config_file is not None:
        return False
    return not {name for name, _ in launch.given} & {"--use-fsdp", "--use_fsdp", "--use-deepspeed", "--use_deepspeed"}

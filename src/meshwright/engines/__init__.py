"""One folder an engine: profile, rules, command. ``profile(name)`` finds one by the name a user types."""

from __future__ import annotations

from meshwright.engines.own.profile import OWN
from meshwright.engines.vllm import command
from meshwright.engines.vllm.profile import VLLM
from meshwright.errors import InputError
from meshwright.specs.cluster import Cluster
from meshwright.specs.command import Command
from meshwright.specs.layout import Layout
from meshwright.specs.profile import EngineProfile, ServeSettings
from meshwright.specs.workload import Serve, Workload

#: Names a user may type, to profiles; the newest vLLM is the default engine.
PROFILES: dict[str, EngineProfile] = {
    "vllm": VLLM["0.33"],
    **{f"vllm-{version}": profile for version, profile in VLLM.items()},
    "meshwright": OWN,
}


def profile(name: str) -> EngineProfile:
    """The profile behind a name: ``vllm``, ``vllm-0.33``, ``vllm-0.32``, ``vllm-0.26`` or ``meshwright``.

    Raises:
        InputError: the name is not known.
    """
    key = name.strip().lower().replace("==", "-").replace(" ", "-")
    if key not in PROFILES:
        key = key.removesuffix(".0")
    if key not in PROFILES:
        raise InputError(f"unknown engine {name[:40]!r}; known: {', '.join(PROFILES)}")
    return PROFILES[key]


def commands(
    spec_name: str,
    layout: Layout,
    cluster: Cluster,
    workload: Workload,
    settings: ServeSettings,
    profile: EngineProfile,
) -> tuple[Command, ...]:
    """What to type for a layout, node by node; empty where there is nothing to type yet (our own runtime, training).

    Raises:
        InputError: the layout needs more devices than the cluster has.
    """
    if profile.engine != "vllm" or not isinstance(workload, Serve):
        return ()
    return command.commands(spec_name, layout, cluster, workload, settings, profile)

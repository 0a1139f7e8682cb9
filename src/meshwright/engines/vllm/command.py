"""The ``vllm serve`` commands of a layout as a plan prints them: the usual way first, then the one with Ray.

A command is the scored point: lengths, batch limits, utilization and dtypes are written out, so that a later default
cannot move it.
"""

from __future__ import annotations

import os
from dataclasses import replace

from meshwright.engines.vllm.deploy import WAYS, Instance, ray, usual
from meshwright.errors import InputError
from meshwright.specs.atlas import models
from meshwright.specs.cluster import Cluster
from meshwright.specs.command import Command
from meshwright.specs.layout import Layout
from meshwright.specs.profile import EngineProfile, ServeSettings
from meshwright.specs.workload import Serve, Workload


def commands(
    spec_name: str,
    layout: Layout,
    cluster: Cluster,
    workload: Workload,
    settings: ServeSettings,
    profile: EngineProfile,
) -> tuple[Command, ...]:
    """What to type, node by node; first without Ray, then (on several nodes) with it.

    Args:
        spec_name: the model as the user wrote it: a hub id, a path, or an atlas name (see ``model_argument``).
        layout: a layout that the profile allows.
        cluster: where it runs; ranks fill the nodes in order.
        workload: gives ``--max-model-len``; training gives no command, vLLM does not train.
        settings: what is set on the engine; None leaves a flag out.
        profile: vLLM's profile (its version decides the flags).

    Raises:
        InputError: the profile is not vLLM's, or the layout needs more devices than the cluster has.
    """
    if profile.engine != "vllm":
        raise InputError(f"no vLLM command for engine {profile.engine}")
    if not isinstance(workload, Serve):
        return ()
    needs(layout.world, layout, cluster)
    name, wanted = model_argument(spec_name)
    instance = Instance(name, layout, cluster, workload, settings)
    way = usual(instance)
    written = [] if way == "ray" else WAYS[way](instance)
    if way != "single":
        written += ray(instance)
    return tuple(noted(written, wanted))


def needs(devices: int, layout: Layout, cluster: Cluster) -> None:
    """Refuse a layout that is larger than the cluster.

    Raises:
        InputError: it is.
    """
    if devices > cluster.devices:
        raise InputError(f"{layout} needs {devices} devices, {cluster} has {cluster.devices}")


def noted(written: list[Command], wanted: str) -> list[Command]:
    """The commands with what the user must replace in each that names the model."""
    if not wanted:
        return written
    return [
        replace(c, note="; ".join(filter(None, (c.note, wanted)))) if c.text.startswith("vllm") else c for c in written
    ]


def model_argument(name: str) -> tuple[str, str]:
    """What ``vllm serve`` is given for a model, and what the user must replace in it (empty: nothing).

    vLLM loads weights, so a ``config.json`` becomes its folder and an atlas name the hub id it was read from.
    """
    if name.endswith(".json") and os.path.isfile(name):
        folder, file = os.path.split(name)
        if file == "config.json":
            return folder or ".", ""
        return name, "replace the file by the folder or hub id that holds the weights"
    entry = None if os.path.exists(name) else models.find(name)
    if entry is None or "/" in name:
        return name, ""
    known = models.aliases(entry)
    hub = next((alias for alias in known if "/" in alias), "")
    return (hub, "") if hub else (name, "no hub id is known: replace the name by the folder that holds the weights")

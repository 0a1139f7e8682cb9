"""What links can carry, as the cluster of a plan tells it (``doctor --against plan.json``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes a second that one device sends at most, one way, and the name of the link."""

    bytes_s: float
    name: str


@dataclass(frozen=True, slots=True)
class Peaks:
    """Of the links of a cluster.

    Attributes:
        intra, inter: between devices of a node, and between nodes. devices: of a node.
        pools: between a prefill and a decode worker; None where the plan has no such pools.
    """

    intra: Peak
    inter: Peak
    devices: int
    pools: Peak | None = None


def peaks_of(plan: Mapping[str, Any]) -> Peaks | None:
    """The peaks of a plan's cluster (``plan --json``); None where it does not tell them.

    Pools that fit into a node together are taken to share one, as the planner takes them.
    """
    told = plan.get("cluster")
    if not isinstance(told, Mapping):
        return None
    intra, inter = _peak(told, "intra"), _peak(told, "inter")
    devices = told.get("devices_per_node")
    if intra is None or inter is None or type(devices) is not int or devices < 1:
        return None
    worlds = [_world(plan.get("prefill")), _world(plan)]
    pools = (intra if worlds[0] + worlds[1] <= devices else inter) if all(worlds) else None
    return Peaks(intra, inter, devices, pools)


def _peak(cluster: Mapping[str, Any], side: str) -> Peak | None:
    rate, name = cluster.get(f"{side}_bytes_s"), cluster.get(side)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < 1e18:
        return None
    return Peak(float(rate), str(name)[:60])


def _world(plan: Any) -> int:
    layout = plan.get("layout") if isinstance(plan, Mapping) else None
    world = layout.get("world") if isinstance(layout, Mapping) else None
    return world if type(world) is int and world > 0 else 0

"""The mesh of one rank: its coordinate and the process group of every axis. One object, passed by hand.

::

    mesh = build_mesh(placement, rank)      # after torch.distributed.init_process_group
    mesh.group("tp").size                   # 1 for an axis of degree 1: no process group, no cost
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from meshwright.errors import IllegalLayoutError
from meshwright.runtime.transport import Channel, open_channel
from meshwright.specs.placement import AXES, Coordinate, Placement

#: Axes whose small tensors go through shared memory: two sums a layer, one hand-off a stage.
SHARED = ("tp", "pp")
#: Longest wait of a rank for another in shared memory; that of gloo by default.
WAIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks along one axis through one coordinate.

    Attributes:
        axis: ``tp``, ``pp``, ``dp``, ``cp`` or ``ep``.
        ranks: global ranks, in the order of their places on the axis.
        index: this rank's place.
        pg: process group; None with one rank.
        channel: shared memory of the ranks, where they have one host; None: everything goes through ``pg``.
    """

    axis: str
    ranks: tuple[int, ...]
    index: int
    pg: dist.ProcessGroup | None
    channel: Channel | None = None

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Mesh:
    """One rank's view of the layout.

    Attributes:
        placement: where everything lives.
        rank: global rank. coordinate: its place on every axis.
        device: where its tensors are.
        groups: by axis, all of ``specs.placement.AXES``, and ``ep``.
        store: key-value store that all ranks reach, for what is said beside the tensors (sampled token ids); None in
            a world of one.
    """

    placement: Placement
    rank: int
    coordinate: Coordinate
    device: torch.device
    groups: Mapping[str, Group]
    store: distributed_c10d.Store | None = None

    def group(self, axis: str) -> Group:
        """The group of an axis.

        Raises:
            KeyError: no such axis.
        """
        return self.groups[axis]


def build_mesh(
    placement: Placement, rank: int, device: str | torch.device = "cpu", *, own_groups: bool = False
) -> Mesh:
    """Make the process groups of every axis with more than one rank.

    Collective: every rank of the world calls it once, and all ranks make all groups in the same order (axis by axis,
    by ascending first rank), because torch.distributed numbers groups by the order in which they are made. A world
    of one needs no torch.distributed at all.

    Args:
        placement, rank, device: see ``Mesh``.
        own_groups: make only the groups that hold ``rank``: for a dry-run, in which there are no other ranks to agree
            with.

    Raises:
        IllegalLayoutError: the layout needs another number of ranks than were started.
    """
    world = placement.layout.world
    started = dist.get_world_size() if dist.is_initialized() else 1
    if started != world:
        raise IllegalLayoutError(
            f"layout {placement.layout} needs {world} ranks, {started} were started; start {world}"
        )
    coordinate = placement.coordinate(rank)
    made = {axis: _axis_group(placement, axis, rank, own_groups) for axis in (*AXES, "ep")}
    groups = {axis: group for axis, group in made.items() if group is not None}
    store = distributed_c10d._get_default_store() if world > 1 else None
    if store is not None and torch.device(device).type == "cpu" and not own_groups:
        groups |= {axis: _with_channel(groups[axis], store) for axis in SHARED if groups[axis].pg is not None}
    return Mesh(placement, rank, coordinate, torch.device(device), groups, store)


def build_pools(placements: Sequence[Placement], rank: int, device: str | torch.device = "cpu") -> tuple[int, Mesh]:
    """Meshes of several layouts whose ranks follow each other in one world; the rank's own, and the number of its pool.

    Collective over the world, as ``build_mesh``. ``Mesh.rank`` counts within the pool, ``Group.ranks`` in the world.

    Raises:
        IllegalLayoutError: the layouts need another number of ranks than were started.
    """
    needed = sum(placement.layout.world for placement in placements)
    started = dist.get_world_size() if dist.is_initialized() else 1
    if started != needed:
        layouts = " and ".join(str(placement.layout) for placement in placements)
        raise IllegalLayoutError(f"layouts {layouts} need {needed} ranks, {started} were started; start {needed}")
    store = distributed_c10d._get_default_store() if needed > 1 else None
    first, found = 0, None
    for number, placement in enumerate(placements):
        world = placement.layout.world
        own = rank - first if first <= rank < first + world else None
        groups = {axis: _axis_group(placement, axis, own, False, first) for axis in (*AXES, "ep")}
        if own is not None:
            mine = {axis: group for axis, group in groups.items() if group is not None}
            if store is not None and torch.device(device).type == "cpu":
                mine |= {axis: _with_channel(mine[axis], store) for axis in SHARED if mine[axis].pg is not None}
            found = number, Mesh(placement, own, placement.coordinate(own), torch.device(device), mine, store)
        first += world
    assert found is not None
    return found


def _with_channel(group: Group, store: distributed_c10d.Store) -> Group:
    """The group with shared memory, where its ranks have one host. Collective over them."""
    assert group.pg is not None
    key = f"meshwright/channel/{group.pg.group_name}"
    return replace(group, channel=open_channel(store, key, group.index, group.size, group.axis, WAIT_S))


def _axis_group(placement: Placement, axis: str, rank: int | None, own: bool, base: int = 0) -> Group | None:
    """Make all groups of an axis (``own``: one) and return the one that holds ``rank``; None where none does.

    ``base``: number in the world of the placement's first rank.
    """
    if not _travels(placement, axis):
        return None if rank is None else Group(axis, (base + rank,), 0, None)
    mine: Group | None = None
    for first in (rank,) if own and rank is not None else range(placement.layout.world):
        members = placement.group(axis, placement.coordinate(first))
        if members[0] != first and not own:
            continue
        ranks = tuple(base + member for member in members)
        pg = dist.new_group(list(ranks), group_desc=axis)
        if rank in members:
            mine = Group(axis, ranks, members.index(rank), pg)
    return mine


def _travels(placement: Placement, axis: str) -> bool:
    """Whether anything is sent along an axis; to experts only where they lie around several tp groups."""
    if axis != "ep":
        return int(getattr(placement.layout, axis)) > 1
    grid = placement.cuts.grid
    return placement.spec.moe is not None and grid.ep > 1 and grid.ep * grid.etp > placement.layout.tp

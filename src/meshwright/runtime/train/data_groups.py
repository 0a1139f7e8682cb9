"""Groups of data parallelism beside those of ``groups.training_mesh``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist

from meshwright.errors import IllegalLayoutError
from meshwright.runtime.mesh import Group, Mesh
from meshwright.specs.placement import Coordinate, Placement

Members = Callable[[Coordinate], tuple[int, ...]]


def data_mesh(mesh: Mesh) -> Mesh:
    """The mesh with these groups more. Collective, as ``build_mesh``.

    * ``pp_tied``: first and last stage, where both hold the tied embedding.
    * ``shard``, ``replicate``: ranks of ``dp+cp`` among which ZeRO-3 deals one copy of the dense parameters out, and
      those that hold the same piece. ``Layout.fsdp.replicas`` copies lie on runs of neighbours; 1: ``shard`` is all of
      ``dp+cp``. With as many copies as data ranks ``shard`` is a process group of one rank, which ``fully_shard``
      needs. Experts with their own group are dealt out over all of ``edp``.

    Raises:
        IllegalLayoutError: the replicas do not divide the data ranks.
    """
    placement, layout = mesh.placement, mesh.placement.layout
    data = mesh.group("dp+cp")
    groups = {"pp_tied": make(mesh, "pp_tied", lambda at: _ends(placement, at))}
    copies = layout.fsdp.replicas if layout.zero == 3 and layout.fsdp is not None else 1
    if data.size % copies:
        raise IllegalLayoutError(
            f"{copies} replicas do not divide the {data.size} data ranks (dp {layout.dp} x cp {layout.cp}); "
            f"choose a divisor of {data.size}"
        )
    if copies == 1:
        groups |= {"shard": data, "replicate": Group("replicate", (mesh.rank,), 0, None)}
        return replace(mesh, groups={**mesh.groups, **groups})
    name = "dp+cp" if layout.cp > 1 else "dp"

    def run(at: Coordinate) -> tuple[int, ...]:
        ranks = placement.group("dp+cp", at)
        first = ranks.index(placement.rank(at)) * copies // len(ranks) * (len(ranks) // copies)
        return ranks[first : first + len(ranks) // copies]

    def across(at: Coordinate) -> tuple[int, ...]:
        ranks = placement.group("dp+cp", at)
        each = len(ranks) // copies
        return ranks[ranks.index(placement.rank(at)) % each :: each]

    groups |= {
        "shard": make(mesh, f"{name}_shard", run, single=True),
        "replicate": make(mesh, f"{name}_replicate", across),
    }
    return replace(mesh, groups={**mesh.groups, **groups})


def make(mesh: Mesh, name: str, members: Members, *, single: bool = False) -> Group:
    """Make all groups of more than one rank (``single``: of one, too) that ``members`` names; returns this rank's.

    Collective.
    """
    placement = mesh.placement
    mine = Group(name, (mesh.rank,), 0, None)
    for first in range(placement.layout.world):
        ranks = members(placement.coordinate(first))
        if ranks[0] != first or (len(ranks) == 1 and not single):
            continue
        pg = dist.new_group(list(ranks), group_desc=name)
        if mesh.rank in ranks:
            mine = Group(name, ranks, ranks.index(mesh.rank), pg)
    return mine


def _ends(placement: Placement, at: Coordinate) -> tuple[int, ...]:
    """First and last stage around a rank, where they are two and hold one embedding; else the rank alone."""
    ends = [stage.index for stage in placement.stages if stage.embedding]
    if not placement.spec.tied or len(ends) < 2 or at.pp not in ends:
        return (placement.rank(at),)
    return tuple(placement.rank(replace(at, pp=stage)) for stage in ends)

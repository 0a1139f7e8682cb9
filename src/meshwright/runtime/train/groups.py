"""Groups of ranks that training needs beside those of serving, by name in the mesh.

* ``dp+cp``: ranks that hold the same dense parameters; ``dp`` itself where cp is 1.
* ``edp``: ranks that hold the same experts; those of ``dp+cp`` where these are the same ranks and ep is 1
  (``plan.data_parallel.groups``).
* ``kv``: ranks of tp that hold the same key and value heads.
* ``etp``: ranks that share one expert; ``tp`` itself where it is the same ranks.
* ``world``: all ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch.distributed as dist

from meshwright.runtime.mesh import Group, Mesh
from meshwright.runtime.train.data_groups import Members, make
from meshwright.specs.placement import Coordinate, Placement


def training_mesh(mesh: Mesh) -> Mesh:
    """The mesh with these groups more. Collective, as ``build_mesh``."""
    placement = mesh.placement
    layout, grid = placement.layout, placement.cuts.grid
    tp, dp, world = mesh.group("tp"), mesh.group("dp"), layout.world
    dense = dp if layout.cp == 1 else make(mesh, "dp+cp", _along(placement, "dp+cp"))
    same = layout.ep == 1 and grid.replicas == layout.dp * layout.cp
    groups = {
        "dp+cp": dense,
        "edp": dense if same else make(mesh, "edp", _along(placement, "edp")),
        "kv": make(mesh, "kv", partial(_key_copies, placement)),
        "etp": tp if grid.etp == layout.tp else make(mesh, "etp", _along(placement, "etp")),
        "world": Group("world", tuple(range(world)), mesh.rank, dist.group.WORLD if world > 1 else None),
    }
    return replace(mesh, groups={**mesh.groups, **groups})


def _along(placement: Placement, axis: str) -> Members:
    return partial(placement.group, axis)


def _key_copies(placement: Placement, at: Coordinate) -> tuple[int, ...]:
    """Ranks of a tp group that hold the same key heads as one of them; it alone where all or none hold the same."""
    ranks = placement.group("tp", at)
    cuts = [_key_rows(placement, placement.coordinate(rank)) for rank in ranks]
    own = cuts[ranks.index(placement.rank(at))]
    if own is None or len(set(cuts)) == 1:
        return (placement.rank(at),)
    return tuple(rank for rank, cut in zip(ranks, cuts, strict=True) if cut == own)


def _key_rows(placement: Placement, at: Coordinate) -> tuple[tuple[int, int], ...] | None:
    """Rows of the key projection that a rank holds."""
    shards = (s for s in placement.shards(at) if s.family.role == "attention" and s.family.op == "k")
    shard = next(shards, None)
    return None if shard is None else shard.intervals[0]

"""Collectives of data parallelism, ZeRO and FSDP, and the end of a training step, on one rank.

ZeRO-0 sums the gradients (all_reduce). ZeRO-1 reduce_scatters them once a step and all_gathers the updated parameters.
ZeRO-2 keeps only its piece of the gradients and therefore reduce_scatters after every micro-batch. ZeRO-3 (FSDP) also
gathers the parameters of each unit before its forward, and again before its backward when they were resharded
(Rajbhandari et al. 2020, arXiv 1910.02054; Zhao et al. 2023, arXiv 2304.11277). Under a pipeline FSDP gathers a unit
once a step and reduces it once at the end (torch.distributed.pipelining: UNSHARD, REDUCE_GRAD). The root unit
(embedding, final norm, head) is not resharded between forward and backward (torch ``fully_shard``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.plan.wire import Op, collective, compute
from meshwright.specs.dtypes import DTYPE_BYTES
from meshwright.specs.layout import Fsdp, Layout
from meshwright.specs.workload import Train


class Unit(NamedTuple):
    """Parameters that one rank computes with, before ZeRO: ``dense`` and ``expert`` elements."""

    name: str
    dense: int
    expert: int


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that hold the same parameters: name of the axis, members, replicas of the sharded group (HSDP)."""

    axis: str
    ranks: int
    replicas: int = 1

    @property
    def sharded(self) -> int:
        """Ranks over which ZeRO spreads states."""
        return max(1, self.ranks // self.replicas)

    @property
    def shard_axis(self) -> str:
        """Name of the sharded part of the axis."""
        return f"{self.axis}_shard" if self.replicas > 1 else self.axis


def groups(layout: Layout, expert_replicas: int) -> tuple[Group, Group]:
    """Groups of dense parameters and of experts; experts are replicated ``expert_replicas`` times (axis ``edp``)."""
    replicas = layout.fsdp.replicas if layout.fsdp is not None and layout.zero == 3 else 1
    axis = "dp+cp" if layout.cp > 1 else "dp"
    plain = layout.ep == 1 and expert_replicas == layout.dp * layout.cp
    dense = Group(axis, layout.dp * layout.cp, replicas)
    return dense, dense if plain else Group("edp", expert_replicas)


def _pairs(unit: Unit, both: tuple[Group, Group]) -> list[tuple[str, int, Group]]:
    dense, expert = both
    if dense == expert:
        return [(unit.name, unit.dense + unit.expert, dense)]
    return [(unit.name, unit.dense, dense), (f"{unit.name} experts", unit.expert, expert)]


def gather(unit: Unit, both: tuple[Group, Group], dtype: str) -> list[Op]:
    """all_gather of a unit's parameters (ZeRO-3): every rank brings its piece."""
    ops: list[Op] = []
    for name, numel, g in _pairs(unit, both):
        piece = (-(-numel // g.sharded),)
        ops += collective("all_gather", f"{name} parameters", g.shard_axis, g.sharded, piece, dtype)
    return ops


def scatter(unit: Unit, both: tuple[Group, Group], dtype: str) -> list[Op]:
    """reduce_scatter of a unit's gradients, and the sum of the pieces over replicas (HSDP)."""
    ops: list[Op] = []
    for name, numel, g in _pairs(unit, both):
        ops += collective("reduce_scatter", f"{name} gradients", g.shard_axis, g.sharded, (numel,), dtype)
        piece = (-(-numel // g.sharded),)
        ops += collective("all_reduce", f"{name} gradient pieces", f"{g.axis}_replicate", g.replicas, piece, dtype)
    return ops


def reduce(unit: Unit, both: tuple[Group, Group], dtype: str) -> list[Op]:
    """all_reduce of gradients (ZeRO-0)."""
    ops: list[Op] = []
    for name, numel, g in _pairs(unit, both):
        ops += collective("all_reduce", f"{name} gradients", g.axis, g.ranks, (numel,), dtype)
    return ops


def merged(name: str, units: Sequence[Unit]) -> Unit:
    """All units as one."""
    return Unit(name, sum(u.dense for u in units), sum(u.expert for u in units))


def optimizer_op(whole: Unit, both: tuple[Group, Group], layout: Layout, train: Train) -> Op:
    """The update: gradient read; moments and master weights read and written; working parameter written.

    ``flops`` is not counted (0): the step is bound by memory.
    """
    dense, expert = both
    numel = whole.dense + whole.expert
    if layout.zero:
        numel = -(-whole.dense // dense.sharded) + -(-whole.expert // expert.sharded)
    moments = {"adamw": 2, "sgd": 1, "muon": 1}[train.optimizer] * DTYPE_BYTES[train.state_dtype]
    master = 4 if train.master_weights and train.param_dtype != "f32" else 0
    width = DTYPE_BYTES[train.param_dtype]
    each = DTYPE_BYTES[train.grad_dtype] + 2 * moments + (2 * master + width if master else 2 * width)
    return compute("optimizer", train.optimizer, ((numel,),), train.state_dtype, numel * each, 0)


def knobs(layout: Layout) -> Fsdp:
    """FSDP knobs of a layout."""
    return layout.fsdp or Fsdp()

"""What one call of a ``c10d`` op of torch.distributed says: operation, payload, splits, peer, group.

The ops are those of torch 2.13 (``torch._C._dispatch_get_all_op_names``), which everything ends in: Python calls,
the reducer of DDP, functional collectives, FSDP2, pipelining. Names of arguments are those of their schemas. *Payload*
is what ``moves.ring`` calls so: the tensor that enters on this rank, its own piece for a gather, the whole for a
scatter. Places (``peer``) are ranks within the group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import InputError
from meshwright.specs.dtypes import canonical

#: Ops that move nothing between ranks.
IGNORED = frozenset({"check_for_nan"})


@dataclass(frozen=True, slots=True)
class Call:
    """One collective or hand-off as the dispatcher sees it.

    Attributes:
        op: one of ``moves.ring.COLLECTIVES``.
        tensors: the payload.
        times: how often the payload counts (a scatter away from its root: the pieces of all ranks).
        peer: place of the other side (send, recv) or of the root; None where there is none or it is unknown.
        splits: elements to every place, of an all_to_all with splits.
    """

    op: str
    tensors: tuple[Tensor, ...]
    times: int = 1
    peer: int | None = None
    splits: tuple[int, ...] | None = None

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the payload."""
        return tuple(tuple(t.shape) for t in self.tensors)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payload."""
        return self.times * sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def dtype(self) -> str | None:
        """Element type of the payload, by the project's name where it has one."""
        return dtype_name(self.tensors[0].dtype) if self.tensors else None


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``bf16``; types without a name here keep torch's."""
    text = str(dtype).removeprefix("torch.")
    try:
        return canonical(text)
    except InputError:
        return text


Arguments = Mapping[str, Any]


def _plain(op: str, payload: str, peer: str | None = None) -> Callable[[Arguments], Call]:
    """Payload in argument ``payload``: a tensor, or a list of tensors."""

    def describe(a: Arguments) -> Call:
        found = a[payload]
        tensors = (found,) if isinstance(found, Tensor) else tuple(found)
        return Call(op, tensors, peer=a[peer] if peer else None)

    return describe


def _nested(op: str) -> Callable[[Arguments], Call]:
    """Payload of several pieces a call: the list of lists ``input_tensors``."""
    return lambda a: Call(op, tuple(t for pieces in a["input_tensors"] for t in pieces))


def _scatter(a: Arguments) -> Call:
    """The root hands in a piece a rank, the others none: all count as many pieces as the group has ranks."""
    size: int = dist.ProcessGroup.unbox(a["process_group"]).size()
    return Call("scatter", tuple(a["output_tensors"]), times=size, peer=a["root_rank"])


def _all_to_all_single(a: Arguments) -> Call:
    x: Tensor = a["input"]
    row = x.numel() // x.shape[0] if x.dim() and x.shape[0] else 0
    splits = tuple(int(n) * row for n in a["input_split_sizes"])
    return Call("all_to_all", (x,), splits=splits or None)


def _all_to_all(a: Arguments) -> Call:
    tensors: Sequence[Tensor] = a["input_tensors"]
    return Call("all_to_all", tuple(tensors), splits=tuple(t.numel() for t in tensors))


def _barrier(_: Arguments) -> Call:
    return Call("barrier", ())


#: By the name of the op behind ``c10d::``.
DESCRIBE: dict[str, Callable[[Arguments], Call]] = {
    "allreduce_": _plain("all_reduce", "tensors"),
    "allreduce_coalesced_": _plain("all_reduce", "tensors"),
    "broadcast_": _plain("broadcast", "tensors", "root_rank"),
    "reduce_": _plain("reduce", "tensors", "root_rank"),
    "allgather_": _plain("all_gather", "input_tensors"),
    "_allgather_base_": _plain("all_gather", "input_tensor"),
    "allgather_coalesced_": _plain("all_gather", "input_list"),
    "allgather_into_tensor_coalesced_": _plain("all_gather", "inputs"),
    "reduce_scatter_": _nested("reduce_scatter"),
    "_reduce_scatter_base_": _plain("reduce_scatter", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": _plain("reduce_scatter", "inputs"),
    "gather_": _plain("gather", "input_tensors", "root_rank"),
    "scatter_": _scatter,
    "alltoall_base_": _all_to_all_single,
    "alltoall_": _all_to_all,
    "send": _plain("send", "tensors", "dst"),
    "recv_": _plain("recv", "tensors", "src"),
    "recv_any_source_": _plain("recv", "tensors"),
    "barrier": _barrier,
    "monitored_barrier_": _barrier,
}


def describe(name: str, arguments: Arguments) -> Call:
    """What a call of ``c10d::name`` does; an op that is not known here keeps its name and says no payload."""
    known = DESCRIBE.get(name)
    return known(arguments) if known is not None else Call(name, ())


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks of a group that has no name: ``0-7``, ``0-56:8`` (every eighth), else ``0,1,5``."""
    found = sorted(ranks)
    steps = {b - a for a, b in pairwise(found)}
    if len(found) > 2 and len(steps) == 1:
        step = steps.pop()
        return f"{found[0]}-{found[-1]}" + (f":{step}" if step > 1 else "")
    return ",".join(map(str, found))[:2000]


def group_name(pg: dist.ProcessGroup) -> str:
    """Name of a group: its description (an axis of a mesh, ours or a DeviceMesh's), else its ranks."""
    description = pg.group_desc or ""
    name = description.removeprefix("mesh_")
    if name and name not in {"default_pg", "undefined"}:
        return name[:60]
    try:
        return ranks_text(dist.get_process_group_ranks(pg))
    except (RuntimeError, KeyError, ValueError):
        return f"group {pg.group_name}"[:60]


def twin(pg: dist.ProcessGroup) -> str:
    """`` (2)`` for the second group of the same name and ranks in the order of making, nothing for the first.

    Groups are made in the same order on all their ranks, so all ranks count alike.
    """
    try:
        ranks, name, count = dist.get_process_group_ranks(pg), group_name(pg), 1
        for other in dist.distributed_c10d._world.pg_map:
            if other.group_name == pg.group_name:
                return f" ({count})" if count > 1 else ""
            count += dist.get_process_group_ranks(other) == ranks and group_name(other) == name
    except (RuntimeError, KeyError, ValueError):
        pass
    return ""


def op_names() -> list[str]:
    """Every op of the namespace that moves something, by the dispatcher of the torch that runs."""
    names = (n.partition("::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("c10d::"))
    return sorted(name for _, _, name in names if name not in IGNORED and "." not in name)

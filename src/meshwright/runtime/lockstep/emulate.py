"""What NCCL can and gloo cannot: averages, lists of all_to_all, gathers of unequal pieces, types gloo does not know.

Each function returns the boxed work of an operation that is complete, or None where gloo can do the call itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Arguments = Mapping[str, Any]

#: c10d::ReduceOp::RedOpType by number (torch 2.13 torch/csrc/distributed/c10d/Types.hpp).
REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
#: Moved and reduced as bytes: gloo has no kernels for them (ProcessGroupGloo.cpp, GENERATE_ALL_TYPES).
_AS_BYTES = frozenset(
    {torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
)


def reduction(boxed: Any) -> str | None:
    """Name of a boxed reduction, None for anything else."""
    if not isinstance(boxed, torch.ScriptObject):
        return None
    number = int(boxed.op())  # type: ignore[attr-defined]
    return REDUCTIONS[number] if number < len(REDUCTIONS) else str(number)


def as_bytes(value: Any) -> Any:
    """Arguments with every tensor of a type that gloo does not know seen as bytes of the same memory."""
    if isinstance(value, Tensor):
        return value.view(torch.uint8) if value.dtype in _AS_BYTES else value
    return [as_bytes(v) for v in value] if isinstance(value, list | tuple) else value


#: gloo compares shapes where NCCL counts elements.
FLATTENED = frozenset(
    {"_allgather_base_", "_reduce_scatter_base_", "allgather_", "reduce_scatter_", "gather_", "scatter_"}
)


def flattened(value: Any) -> Any:
    """Arguments with every tensor as one row of the same memory."""
    if isinstance(value, Tensor):
        return value.view(-1) if value.is_contiguous() else value
    return [flattened(v) for v in value] if isinstance(value, list | tuple) else value


def _average(name: str) -> Callable[[Arguments], Any]:
    """Sum, then divide: gloo has no average."""

    def run(a: Arguments) -> Any:
        if reduction(a["reduce_op"]) != "avg":
            return None
        pg = dist.ProcessGroup.unbox(a["process_group"])
        filled, work = _SUMS[name](pg, a)
        work.wait()
        for tensor in filled:
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.div_(pg.size())
            else:
                tensor.floor_divide_(pg.size())
        return work.boxed()

    return run


def _sum_of(pg: Any, a: Arguments) -> tuple[list[Tensor], Any]:
    return list(a["tensors"]), pg.allreduce(a["tensors"], dist.AllreduceOptions())


def _sum_at_root(pg: Any, a: Arguments) -> tuple[list[Tensor], Any]:
    options = dist.ReduceOptions()
    options.rootRank = a["root_rank"]
    return list(a["tensors"]), pg.reduce(a["tensors"], options)


def _sum_of_many(pg: Any, a: Arguments) -> tuple[list[Tensor], Any]:
    return list(a["tensors"]), pg.allreduce_coalesced(a["tensors"], dist.AllreduceCoalescedOptions())


def _sum_of_pieces(pg: Any, a: Arguments) -> tuple[list[Tensor], Any]:
    options = dist.ReduceScatterOptions()
    return list(a["output_tensors"]), pg.reduce_scatter(a["output_tensors"], a["input_tensors"], options)


def _sum_of_piece(pg: Any, a: Arguments) -> tuple[list[Tensor], Any]:
    options = dist.ReduceScatterOptions()
    return [a["output_tensor"]], pg._reduce_scatter_base(a["output_tensor"], a["input_tensor"], options)


def _sum_of_many_pieces(pg: Any, a: Arguments) -> tuple[list[Tensor], Any]:
    options = dist.ReduceScatterOptions()
    return list(a["outputs"]), pg.reduce_scatter_tensor_coalesced(a["outputs"], a["inputs"], options)


_SUMS: dict[str, Callable[[Any, Arguments], tuple[list[Tensor], Any]]] = {
    "allreduce_": _sum_of,
    "reduce_": _sum_at_root,
    "allreduce_coalesced_": _sum_of_many,
    "reduce_scatter_": _sum_of_pieces,
    "_reduce_scatter_base_": _sum_of_piece,
    "reduce_scatter_tensor_coalesced_": _sum_of_many_pieces,
}


def _exchange(pg: Any, filled: list[Tensor], entering: list[Tensor]) -> Any:
    """All to all of lists, through one tensor each."""
    sizes_out, sizes_in = [t.numel() for t in filled], [t.numel() for t in entering]
    out = torch.empty(sum(sizes_out), dtype=filled[0].dtype)
    flat = torch.cat([t.reshape(-1) for t in entering])
    work = pg.alltoall_base(out, flat, sizes_out, sizes_in, dist.AllToAllOptions())
    work.wait()
    for tensor, piece in zip(filled, out.split(sizes_out), strict=True):
        tensor.copy_(piece.view(tensor.shape))
    return work.boxed()


def _all_to_all(a: Arguments) -> Any:
    pg = dist.ProcessGroup.unbox(a["process_group"])
    with torch.no_grad():
        return _exchange(pg, list(a["output_tensors"]), list(a["input_tensors"]))


def _all_gather(a: Arguments) -> Any:
    """Unequal pieces: everyone sends its own to all."""
    filled, entering = list(a["output_tensors"][0]), a["input_tensors"][0]
    if len({t.numel() for t in filled}) == 1:
        return None
    pg = dist.ProcessGroup.unbox(a["process_group"])
    with torch.no_grad():
        return _exchange(pg, filled, [entering] * pg.size())


EMULATED: dict[str, Callable[[Arguments], Any]] = {
    **{name: _average(name) for name in _SUMS},
    "alltoall_": _all_to_all,
    "allgather_": _all_gather,
}

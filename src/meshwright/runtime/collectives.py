"""Collectives over one group of the mesh. With one rank they return their input and touch nothing.

They call torch.distributed, or the shared memory of the group's ranks (``runtime.transport``), as torch ops both, so
that a recorder at the dispatcher sees each of them. Shapes: T tokens, D model
width, S sampled positions, V vocabulary rows of a rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.runtime.mesh import Group
from meshwright.runtime.transport import LETTER_BYTES, fits

# Names of torch 2.13, and those before it, which 2.13 calls deprecated.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum of ``x`` over the group, in place; the same bits on every rank."""
    if group.channel is not None and fits(x):
        torch.ops.meshwright.all_reduce_(x, group.channel.number)
    elif group.size > 1:
        dist.all_reduce(x, group=group.pg)
    return x


def all_max(x: Tensor, group: Group) -> Tensor:
    """Elementwise maximum of ``x`` over the group, in place."""
    if group.size > 1:
        dist.all_reduce(x, dist.ReduceOp.MAX, group=group.pg)
    return x


def all_gather_rows(x: Tensor, group: Group) -> Tensor:
    """Equal pieces of all ranks one behind the other: ``(n, ...)`` in, ``(size n, ...)`` out."""
    if group.size == 1:
        return x
    out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    gather_into(out, x.contiguous(), group=group.pg)
    return out


def reduce_scatter_rows(x: Tensor, group: Group) -> Tensor:
    """This rank's piece of the sum over the group: ``(size n, ...)`` in, ``(n, ...)`` out."""
    if group.size == 1:
        return x
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    scatter_into(out, x.contiguous(), group=group.pg)
    return out


def gather_logits(x_SV: Tensor, group: Group, widths: tuple[int, ...]) -> Tensor | None:
    """Columns of all ranks side by side on place 0 of the group, None elsewhere.

    Args:
        x_SV: this rank's columns, ``(S, widths[index])``.
        widths: columns of every place. The backends gather equal shapes only, so where the vocabulary is dealt
            unevenly the shorter pieces travel padded to the longest and are cut again on place 0.
    """
    if group.size == 1:
        return x_SV
    longest = max(widths)
    piece = F.pad(x_SV, (0, longest - x_SV.shape[1])) if x_SV.shape[1] < longest else x_SV.contiguous()
    pieces = [] if group.index else [torch.empty_like(piece) for _ in widths]
    if group.channel is not None and fits(piece):
        torch.ops.meshwright.gather_(piece, pieces, group.channel.number, 0)
    else:
        dist.gather(piece, pieces or None, group=group.pg, group_dst=0)
    if group.index:
        return None
    return torch.cat([p[:, :width] for p, width in zip(pieces, widths, strict=True)], dim=1)


def send(x: Tensor, group: Group, to: int) -> dist.Work | None:
    """Hand ``x`` to place ``to`` of the group without waiting; wait for the returned work before ``x`` changes."""
    assert to != group.index
    x = x.contiguous()
    if group.channel is not None and fits(x, LETTER_BYTES):
        torch.ops.meshwright.send(x, group.channel.number, to)
        return None
    return dist.isend(x, group=group.pg, group_dst=to)


def exchange(x: Tensor, group: Group, to: int, frm: int) -> tuple[Tensor, tuple[dist.Work | None, ...]]:
    """Hand ``x`` to place ``to`` and take as much from place ``frm``; both are there when the works are waited for.

    NCCL runs both at once only when they are issued together; each alone would wait for the other.
    """
    out = torch.empty_like(x)
    if x.is_cuda:
        ops = (
            dist.P2POp(op, t, group=group.pg, group_peer=at)
            for op, t, at in ((dist.isend, x, to), (dist.irecv, out, frm))
        )
        return out, tuple(dist.batch_isend_irecv(list(ops)))
    sending = dist.isend(x, group=group.pg, group_dst=to)
    return out, (sending, dist.irecv(out, group=group.pg, group_src=frm))


def all_to_all(x: Tensor, group: Group) -> Tensor:
    """Piece i of ``x`` (its first dimension is the size of the group) to place i; pieces in order of their senders."""
    if group.size == 1:
        return x
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=group.pg)
    return out


def recv(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: Group, frm: int) -> Tensor:
    """Wait for a tensor from place ``frm`` of the group."""
    assert frm != group.index
    x = torch.empty(shape, dtype=dtype, device=device)
    if group.channel is not None and fits(x, LETTER_BYTES):
        torch.ops.meshwright.recv_(x, group.channel.number, frm)
    else:
        dist.recv(x, group=group.pg, group_src=frm)
    return x

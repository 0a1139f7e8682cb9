"""Norm of the whole gradient: every element of the model counted once, summed in fp64, the same on all ranks.

A rank hands in what it counts: of what ZeRO shards its own piece, of what is held alike by several ranks a share (data
parallel replicas) or all on the first of them (tp, the stages of a tied embedding). Then one sum of one number over all
ranks gives the norm; ranks without gradients take part with zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, sqrt

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import InputError
from meshwright.runtime.mesh import Group

#: Elements squared at once: on a CPU so few that the fp64 copy stays in a core's cache (512 KiB); elsewhere 128 MiB.
BLOCK, WIDE_BLOCK = 1 << 16, 1 << 24
#: Added to the norm before dividing, as ``torch.nn.utils.clip_grad_norm_`` does.
EPSILON = 1e-6


def squared(pieces: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of all elements: ``(1,)`` in fp64."""
    total = torch.zeros(1, dtype=torch.float64, device=device)
    size = BLOCK if device.type == "cpu" else WIDE_BLOCK
    for piece in pieces:
        for block in piece.reshape(-1).split(size):
            wide = block.double()
            total += torch.dot(wide, wide)
    return total


def largest(pieces: Iterable[Tensor], device: torch.device) -> Tensor:
    """Largest magnitude of any element: ``(1,)`` in fp64; zero of none."""
    found = [piece.abs().max().double() for piece in pieces if piece.numel()]
    # The maximum over ranks would lose what is not a number.
    return (
        torch.stack(found).max().nan_to_num(nan=inf, posinf=inf).reshape(1)
        if found
        else torch.zeros(1, dtype=torch.float64, device=device)
    )


def total_norm(pieces: Iterable[Tensor], world: Group, device: torch.device, kind: float = 2.0) -> float:
    """Norm over all ranks. Collective: one all_reduce of one fp64 number, whether or not this rank has pieces.

    Args:
        pieces: what this rank counts. world: all ranks. device: of the pieces.
        kind: 2, or ``inf`` for the largest magnitude.

    Raises:
        InputError: another kind of norm.
    """
    if kind not in {2.0, inf}:
        raise InputError(f"norm {kind:g} for clipping; choose 2 or inf")
    value = squared(pieces, device) if kind == 2.0 else largest(pieces, device)
    if world.size > 1:
        dist.all_reduce(value, dist.ReduceOp.SUM if kind == 2.0 else dist.ReduceOp.MAX, group=world.pg)
    return sqrt(value.item()) if kind == 2.0 else float(value.item())


def factor(norm: float, most: float | None) -> float:
    """What all gradients are multiplied with, so that their norm is at most ``most`` (None: no bound)."""
    return 1.0 if most is None else min(1.0, most / (norm + EPSILON))

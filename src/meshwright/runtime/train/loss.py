"""Cross entropy over a vocabulary that the ranks of tp share out: logits never travel, three numbers a token do.

::

    z = x W[V_tp, D]                         m = max over tp(max z)      t = sum over tp(z of the label)
    s = sum over tp(sum exp(z - m))          loss = log s + m - t        dz = exp(z - m) / s - 1[label]

as ``vocab_parallel_cross_entropy`` of Megatron-LM counts it (Shoeybi et al., arXiv:1909.08053, section 3). Tokens go
through head and loss in pieces (``moves.loss``), and the gradients of a piece are made while its logits are there;
the backward only scales them.

Legend: T tokens, R tokens of a piece, D model width, V vocabulary rows of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.moves.loss import loss_pieces
from meshwright.runtime import later
from meshwright.runtime.collectives import all_max, all_reduce
from meshwright.runtime.differentiable import backward_of
from meshwright.runtime.mesh import Group
from meshwright.runtime.scope import scope, where
from meshwright.runtime.train.batch import IGNORED


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How the vocabulary lies.

    Attributes:
        tp: ranks that share it out. low: number of this rank's first row. widest: most rows of a rank.
        cap: logits become ``cap tanh(logits / cap)``; None: they stay.
    """

    tp: Group
    low: int
    widest: int
    cap: float | None


class VocabularyLoss(torch.autograd.Function):
    """Sum of the losses of all tokens whose label counts."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, head_VD: Tensor, labels_T: Tensor, v: Vocabulary) -> Tensor:
        """A number in fp32 or wider, the same on every rank of tp."""
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=x_TD.device)
        wanted = ctx.needs_input_grad[:2]
        dx: list[Tensor] = []
        dw: Tensor | None = None
        start, pieces = 0, loss_pieces(x_TD.shape[0], v.widest)
        for rows in pieces:
            piece = slice(start, start + rows)
            loss, dz = _piece(x_TD[piece], head_VD, labels_T[piece], v)
            total += loss
            with backward_of(where()):
                if wanted[0]:
                    dx.append(torch.ops.meshwright.linear(dz, head_VD.t(), None))
                if wanted[1]:
                    more = torch.ops.meshwright.linear(dz.t(), x_TD[piece].t(), None)
                    more = more if len(pieces) == 1 else more.to(wide)
                    dw = more if dw is None else dw.add_(more)
            start += rows
        ctx.made = (torch.cat(dx) if len(dx) > 1 else dx[0] if dx else None), None if dw is None else dw.to(x_TD.dtype)
        ctx.weight, ctx.later, ctx.at = head_VD, later.current(), where()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that the forward made, times that of the sum."""
        dx, dw = (x if x is None else x.mul_(scale.to(x.dtype)) for x in ctx.made)
        ctx.made = ()
        if dw is not None and ctx.later is not None and ctx.later.open:
            done = dw
            with backward_of(ctx.at):
                ctx.later.add(ctx.weight, lambda: done)
            dw = None
        return dx, dw, None, None


def _piece(x_RD: Tensor, head_VD: Tensor, labels_R: Tensor, v: Vocabulary) -> tuple[Tensor, Tensor]:
    """Loss of some tokens, and the gradient of their logits ``(R, V)`` in the type of x."""
    wide = torch.promote_types(x_RD.dtype, torch.float32)
    z = torch.ops.meshwright.linear(x_RD, head_VD, None).to(wide)
    slope = None
    if v.cap is not None:
        bent = torch.tanh(z / v.cap)
        z, slope = v.cap * bent, 1 - bent.square()
    counts = labels_R != IGNORED
    at = labels_R - v.low
    mine = counts & (at >= 0) & (at < z.shape[1])
    at = torch.where(mine, at, 0)[:, None]
    with scope(name="loss maximum"):
        most = all_max(z.amax(1), v.tp)
    with scope(name="loss target logit"):
        target = all_reduce(z.gather(1, at)[:, 0] * mine, v.tp)
    p = z.sub_(most[:, None]).exp_()
    with scope(name="loss sum of exponentials"):
        total = all_reduce(p.sum(1), v.tp)
    loss = ((total.log() + most - target) * counts).sum()
    p.mul_((counts / total)[:, None])
    p.scatter_add_(1, at, -mine.to(wide)[:, None])
    return loss, (p if slope is None else p.mul_(slope)).to(x_RD.dtype)


def vocabulary_loss(x_TD: Tensor, head_VD: Tensor, labels_T: Tensor, v: Vocabulary) -> Tensor:
    """Sum of the cross entropies of all tokens whose label is not ``IGNORED``.

    Args:
        x_TD: all tokens of the micro-batch, the same on every rank of tp. head_VD: this rank's rows.
    """
    out: Tensor = VocabularyLoss.apply(x_TD, head_VD, labels_T, v)  # type: ignore[no-untyped-call]
    return out

"""The edges of a block under tensor and sequence parallelism, with their backward.

::

                  forward                     backward
    enter         x                           sum of the gradients over tp
    leave         sum of the partial results  the gradient as it is
    enter (sp)    all_gather of the shares    reduce_scatter
    leave (sp)    reduce_scatter              all_gather

The two of the first pair are f and g of Megatron-LM (Shoeybi et al., arXiv:1909.08053, section 3), those of the second
come from Korthikanti et al. (arXiv:2205.05198, section 4.2.2). What lies between enter and leave sees a part of the
gradient of everything that all ranks of tp hold alike: such gradients are summed once a step
(``train.shared.sums_of``).

Legend: T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.runtime.collectives import all_gather_rows, all_reduce, reduce_scatter_rows
from meshwright.runtime.differentiable import backward_of
from meshwright.runtime.mesh import Group
from meshwright.runtime.parallel.sequence import SequenceEdges
from meshwright.runtime.parallel.tensor import Edges
from meshwright.runtime.scope import scope, where
from meshwright.specs.layout import Layout

Move = Callable[[Tensor], Tensor]


class _Moved(torch.autograd.Function):
    """A tensor moved between ranks one way in the forward and another way in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move, name: str) -> Tensor:
        ctx.back, ctx.at, ctx.name = back, where(), name
        with scope(name=name):
            out = there(x)
        return x.view_as(x) if out is x else out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        with backward_of(ctx.at, f"{ctx.name} gradient"):
            return ctx.back(dy), None, None, None


def moved(x: Tensor, there: Move, back: Move, name: str) -> Tensor:
    """``there(x)``, whose gradient goes ``back``; ``name`` is what the ledger calls what is sent, and its gradient."""
    out: Tensor = _Moved.apply(x, there, back, name)  # type: ignore[no-untyped-call]
    return out


def _same(x: Tensor) -> Tensor:
    return x


def summed(x: Tensor, group: Group) -> Tensor:
    """Sum over the group in a tensor of its own: others may still read the gradient that came in."""
    return all_reduce(x.clone(memory_format=torch.contiguous_format), group)


class TrainEdges(Edges):
    """``Edges`` with a backward."""

    def enter(self, x_TD: Tensor, name: str) -> Tensor:
        """The same tokens on every rank of tp; their gradients are summed."""
        if self.tp.size == 1:
            return x_TD
        return moved(x_TD, _same, lambda dy: summed(dy, self.tp), name)

    def leave(self, partial_TD: Tensor, name: str, bias: Tensor | None = None) -> Tensor:
        """Sum of the partial results over tp, then the bias once."""
        if self.tp.size > 1:
            # In place: what made the partial result keeps its inputs only.
            partial_TD = moved(partial_TD, lambda x: all_reduce(x, self.tp), _same, name)
        return partial_TD if bias is None else partial_TD + bias

    def cut(self, x_TD: Tensor, low: int, high: int, name: str) -> Tensor:
        """Tokens ``low`` to ``high`` for this rank; the gradients of all slices are gathered."""
        whole = x_TD.shape[0]
        return moved(x_TD, lambda x: x[low:high], lambda dy: _joined(dy, self.tp, whole), name)

    def join(self, y_tD: Tensor, whole: int, name: str) -> Tensor:
        """The slices of all ranks, filled up to one length, as ``whole`` tokens."""
        rows, place = y_tD.shape[0], self.tp.index

        def own(dy: Tensor) -> Tensor:
            piece = dy[place * rows : (place + 1) * rows]
            return F.pad(piece, (0, 0, 0, rows - piece.shape[0]))

        return moved(y_tD, lambda y: all_gather_rows(y, self.tp)[:whole], own, name)


class TrainSequenceEdges(TrainEdges, SequenceEdges):
    """``SequenceEdges`` with a backward."""

    def enter(self, x_TD: Tensor, name: str) -> Tensor:
        """All tokens of the pass from the shares of all ranks; their gradients are summed into shares."""
        tokens = self.tokens
        return moved(x_TD, lambda x: all_gather_rows(x, self.tp)[:tokens], self._shared_out, name)

    def leave(self, partial_TD: Tensor, name: str, bias: Tensor | None = None) -> Tensor:
        """This rank's share of the sum over tp, then the bias once."""
        tokens = partial_TD.shape[0]
        out = moved(partial_TD, self._shared_out, lambda dy: all_gather_rows(dy, self.tp)[:tokens], name)
        return out if bias is None else out + bias

    def _shared_out(self, x_TD: Tensor) -> Tensor:
        """This rank's share of the sum over tp, rows filled up to equal shares."""
        missing = -x_TD.shape[0] % self.tp.size
        return reduce_scatter_rows(F.pad(x_TD, (0, 0, 0, missing)) if missing else x_TD, self.tp)


def _joined(dy_tD: Tensor, tp: Group, whole: int) -> Tensor:
    """Slices of unlike length of all ranks as ``whole`` tokens."""
    each = -(-whole // tp.size)
    return all_gather_rows(F.pad(dy_tD, (0, 0, 0, each - dy_tD.shape[0])), tp)[:whole]


def train_edges(layout: Layout, tp: Group) -> Edges:
    """Edges of the blocks under a layout, for training."""
    return TrainSequenceEdges(tp) if layout.sp and tp.size > 1 else TrainEdges(tp)

"""Sequence parallelism: between the blocks every rank of tp keeps its share of the tokens.

::

    x[T_tp, D] ──enter: all_gather──> x_TD ──block──> {U_tp}[T, D] ──leave: reduce_scatter──> x[T_tp, D]

Norms and residuals see the share only (Korthikanti et al., arXiv:2205.05198, section 4.2.1). The backends deal equal
shares: where tp does not divide T, rows of zeros follow the last token, travel along and are cut off on entering.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from meshwright.runtime.collectives import all_gather_rows, reduce_scatter_rows
from meshwright.runtime.mesh import Group
from meshwright.runtime.parallel.tensor import Edges
from meshwright.runtime.scope import scope
from meshwright.specs.layout import Layout


class SequenceEdges(Edges):
    """Edges of a block between which the sequence is dealt over tp."""

    def held(self, tokens: int) -> int:
        """Rows between the blocks: the share, the same on every rank."""
        return -(-tokens // self.tp.size)

    def enter(self, x_TD: Tensor, name: str) -> Tensor:
        """All tokens of the pass from the shares of all ranks."""
        with scope(name=name):
            return all_gather_rows(x_TD, self.tp)[: self.tokens]

    def leave(self, partial_TD: Tensor, name: str, bias: Tensor | None = None) -> Tensor:
        """This rank's share of the sum over tp, then the bias once."""
        missing = self.held(self.tokens) * self.tp.size - self.tokens
        with scope(name=name):
            out = reduce_scatter_rows(F.pad(partial_TD, (0, 0, 0, missing)) if missing else partial_TD, self.tp)
        return out if bias is None else out + bias


def edges_of(layout: Layout, tp: Group) -> Edges:
    """Edges of the blocks under a layout; with one rank on tp there is nothing to deal."""
    return SequenceEdges(tp) if layout.sp and tp.size > 1 else Edges(tp)

"""Tensor parallelism around a block: what comes in whole, what leaves as partial sums over tp.

::

    x_TD ──enter──> x_TD ──block, heads or columns of this rank──> {U_tp}[T, D] ──leave──> x_TD (one all_reduce)

A block calls ``enter`` on its input and ``leave`` on its partial result; with one rank both do nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from meshwright.runtime.collectives import all_gather_rows, all_reduce
from meshwright.runtime.mesh import Group
from meshwright.runtime.scope import scope


@dataclass(slots=True)
class Edges:
    """Both ends of a block on the ranks of ``tp``.

    Attributes:
        tp: the group. tokens: T of the pass that runs (``begin``).
    """

    tp: Group
    tokens: int = 0

    def begin(self, tokens: int) -> None:
        """A pass of T tokens begins."""
        self.tokens = tokens

    def held(self, tokens: int) -> int:
        """Rows between the blocks of a pass of T tokens: all of them."""
        return tokens

    def enter(self, x_TD: Tensor, name: str) -> Tensor:
        """All tokens of the pass, on every rank of tp; ``name`` is what the ledger calls a collective here."""
        return x_TD

    def leave(self, partial_TD: Tensor, name: str, bias: Tensor | None = None) -> Tensor:
        """Sum of the partial results over tp, then the bias once."""
        with scope(name=name):
            out = all_reduce(partial_TD, self.tp)
        return out if bias is None else out + bias

    def cut(self, x_TD: Tensor, low: int, high: int, name: str) -> Tensor:
        """Tokens ``low`` to ``high``, which this rank of tp alone works on; ``name``: see ``enter``."""
        return x_TD[low:high]

    def join(self, y_tD: Tensor, whole: int, name: str) -> Tensor:
        """The ``whole`` tokens of which every rank of tp has a slice, filled up to one length."""
        with scope(name=name):
            return all_gather_rows(y_tD, self.tp)[:whole]

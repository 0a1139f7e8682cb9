"""Rows to the ranks of their experts and back, with a backward: gradients of rows travel the way the rows came.

Legend: R rows that arrive, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from meshwright.runtime.parallel.expert import AllToAll
from meshwright.runtime.scope import where
from meshwright.runtime.train.edges import moved


@dataclass(slots=True)
class TrainAllToAll(AllToAll):
    """``AllToAll`` with a backward."""

    def _send(self, x_RD: Tensor, to: Sequence[int], frm: Sequence[int]) -> Tensor:
        def there(x: Tensor) -> Tensor:
            return AllToAll._send(self, x, to, frm)

        def back(dy: Tensor) -> Tensor:
            return AllToAll._send(self, dy, frm, to)

        return moved(x_RD, there, back, where().name or "tokens")

"""Operations of a pipelined training job, every step and copy of the pipeline at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.ledger.replay import Op


@dataclass(frozen=True, slots=True)
class Job:
    """What a profiler of operations recorded.

    Attributes:
        source: file. ops: with arrays of copies x steps. copies, steps: their numbers.
        ranks: (copy, stage) -> global rank, where told.
    """

    source: str
    ops: tuple[Op, ...]
    copies: tuple[int, ...]
    steps: tuple[int, ...]
    ranks: Mapping[tuple[int, int], int]

    def rank(self, copy: int, stage: int) -> int:
        """The global rank; without one the place copy by copy."""
        stages = 1 + max(op.stage for op in self.ops)
        return self.ranks.get((copy, stage), copy * stages + stage)

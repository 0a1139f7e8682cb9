"""From classes of equal ranks to one row a rank, for tables and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.plan.memory import RankMemory
from meshwright.specs.placement import Placement


def rank_rows(placement: Placement, classes: Sequence[RankMemory], limit: int) -> list[RankMemory]:
    """One row a rank in rank order, or the class rows unchanged when the world is larger than ``limit``."""
    if placement.layout.world > limit:
        return list(classes)
    by_class = {row.rank_class: row for row in classes}
    rows = []
    for rank in range(placement.layout.world):
        row = by_class[placement.class_of(rank).name]
        rows.append(replace(row, rank=rank, ranks=1, coordinate=placement.coordinate(rank)))
    return rows

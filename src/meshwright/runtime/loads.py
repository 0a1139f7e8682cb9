"""Which experts a generation kept busy: rows by expert, layer and pass, and how unevenly they fell. No torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from meshwright.specs.placement import Placement


class Load(NamedTuple):
    """Rows that one rank's experts of a layer worked on in one pass.

    Attributes:
        layer, phase, step, microbatch: of the pass.
        first: number of the first expert held. rows: of every expert held, in order.
    """

    layer: int
    phase: str | None
    step: int | None
    microbatch: int | None
    first: int
    rows: tuple[int, ...]


@dataclass(slots=True)
class ExpertLog:
    """What the mixture of experts of one layer did on this rank.

    Attributes:
        loads: a row a pass.
        keep: also keep the choices. chosen: by (sequence, position): the experts of that token.
    """

    loads: list[Load] = field(default_factory=list)
    keep: bool = False
    chosen: dict[tuple[int, int], list[int]] = field(default_factory=dict)


#: Phase, step and micro-batch of a pass.
Pass = tuple[str | None, int | None, int | None]


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """One layer over a whole generation.

    Attributes:
        layer: its number.
        passes: rows of every expert in each pass, each row counted once. ranks: rows that a rank worked on, by rank.
    """

    layer: int
    passes: Mapping[Pass, tuple[int, ...]]
    ranks: Mapping[int, int]

    @property
    def experts(self) -> tuple[int, ...]:
        """Rows of every expert in all passes."""
        return tuple(map(sum, zip(*self.passes.values(), strict=True)))

    @property
    def expert_skew(self) -> float:
        """Busiest expert over the mean."""
        return skew(self.experts)

    @property
    def rank_skew(self) -> float:
        """Busiest rank over the mean: by how much the others wait."""
        return skew(tuple(self.ranks.values()))


def skew(counts: Sequence[int]) -> float:
    """Largest count over the mean; 1 where nothing was counted."""
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0


def load_table(loads: Iterable[tuple[int, bool, Sequence[Load]]]) -> list[LayerLoad]:
    """Loads of all ranks as one row a layer.

    Args:
        loads: of every rank its number, whether its experts count (False where another rank holds the rest of the same
            experts and counts already), and its loads.
    """
    passes: dict[int, dict[Pass, Counter[int]]] = {}
    ranks: dict[int, Counter[int]] = {}
    for rank, counts, rows in loads:
        for load in rows:
            ranks.setdefault(load.layer, Counter())[rank] += sum(load.rows)
            if counts:
                of = passes.setdefault(load.layer, {}).setdefault((load.phase, load.step, load.microbatch), Counter())
                of.update(dict(enumerate(load.rows, load.first)))
    table = []
    for layer, of_pass in sorted(passes.items()):
        experts = range(1 + max(e for of in of_pass.values() for e in of))
        each = {at: tuple(of[e] for e in experts) for at, of in of_pass.items()}
        table.append(LayerLoad(layer, each, dict(ranks[layer])))
    return table


def table_of(placement: Placement, loads: Sequence[Sequence[Load]]) -> list[LayerLoad]:
    """``load_table`` of the loads of every rank of a placement, in rank order."""
    return load_table(
        (rank, placement.place(placement.coordinate(rank)).etp == 0, rows) for rank, rows in enumerate(loads)
    )


def summary(table: Sequence[LayerLoad]) -> str:
    """The most uneven layers, in a line."""
    expert, rank = max(table, key=lambda row: row.expert_skew), max(table, key=lambda row: row.rank_skew)
    return (
        f"experts: the busiest took {expert.expert_skew:.2f} x the mean (layer {expert.layer}), the busiest rank "
        f"{rank.rank_skew:.2f} x (layer {rank.layer})"
    )


def write_choices(chosen: Mapping[int, Mapping[tuple[int, int], Sequence[int]]], path: str | Path) -> None:
    """Write the experts of every token as JSON: by layer a row ``[prompt, position, experts]`` for every token."""
    rows = {str(layer): [[*at, list(ids)] for at, ids in sorted(of.items())] for layer, of in chosen.items()}
    Path(path).write_text(json.dumps(rows), encoding="utf-8")


def as_plain(table: Sequence[LayerLoad]) -> list[dict[str, object]]:
    """The table as plain values."""
    return [
        {
            "layer": row.layer,
            "experts": list(row.experts),
            "passes": [
                {"phase": phase, "step": step, "microbatch": microbatch, "experts": list(rows)}
                for (phase, step, microbatch), rows in row.passes.items()
            ],
            "ranks": {str(rank): n for rank, n in row.ranks.items()},
            "busiest_expert_over_mean": round(row.expert_skew, 3),
            "busiest_rank_over_mean": round(row.rank_skew, 3),
        }
        for row in table
    ]

"""Costs a set of layouts: cuts tabulated once, then block by block of one depth, schedule and ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshwright.moves.pipeline import refusal
from meshwright.plan.search.columns import SCHEDULES, Columns
from meshwright.plan.search.stages import Part, parts_of
from meshwright.plan.search.step import Step
from meshwright.plan.search.tables import Counter, Cut, Tables, cuts_of
from meshwright.plan.train_cost import bubble
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import EngineProfile
from meshwright.specs.workload import Train

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from meshwright.plan.search.columns import Floats, Ints, Mask


def shape_of(x: Columns, row: int, micro_batches: int | None = None) -> Layout:
    """Pipeline depth, schedule and chunks of a row as a layout without other degrees."""
    del micro_batches
    return Layout(pp=int(x.pp[row]), schedule=SCHEDULES[int(x.schedule[row])], virtual=int(x.virtual[row]))


def blocks(*axes: Ints) -> Iterator[NDArray[np.int64]]:
    """Rows that agree on some axes, block by block."""
    import numpy as np

    code = np.zeros_like(axes[0])
    for axis in axes:
        code = code * (int(axis.max(initial=0)) + 1) + axis
    order = np.argsort(code, kind="stable")
    edges = np.flatnonzero(np.diff(code[order])) + 1
    yield from (rows for rows in np.split(order, edges) if len(rows))


@dataclass(slots=True)
class Coster:
    """What all layouts of one question share, with everything that was tabulated."""

    spec: ModelSpec
    profile: EngineProfile
    cluster: Cluster
    work: Train
    _parts: dict[Layout, list[tuple[Part, ...]]] = field(default_factory=dict)
    _bubbles: dict[tuple[Layout, int], float] = field(default_factory=dict)
    _counter: Counter | None = None

    def tables(self, x: Columns) -> tuple[Tables, list[Cut], Ints, Ints]:
        """Tables of all cuts of some layouts, the cut of every row, the ranks that share an expert."""
        if self._counter is None:
            self._counter = Counter(self.spec, self.profile, self.cluster, self.work)
        cuts, number, experts = cuts_of(x, self.profile)
        return self._counter.count(cuts), cuts, number, experts

    def micro_batches(self, x: Columns) -> Ints:
        """Micro-batches of a step."""
        return self.work.global_batch // (x.dp * x.micro_batch)

    def scheduled(self, x: Columns) -> Mask:
        """Rows whose schedule has a table for their micro-batches."""
        import numpy as np

        ok, m = np.ones(len(x), dtype=bool), self.micro_batches(x)
        for rows in blocks(x.pp, x.schedule, x.virtual, m):
            at = shape_of(x, int(rows[0]))
            if at.pp > 1:
                ok[rows] = not refusal(at.schedule, at.pp, int(m[rows[0]]), at.virtual)
        return ok

    def idle(self, x: Columns) -> Floats:
        """Bubble of every row."""
        import numpy as np

        out, m = np.zeros(len(x)), self.micro_batches(x)
        for rows in blocks(x.pp, x.schedule, x.virtual, m):
            key = shape_of(x, int(rows[0])), int(m[rows[0]])
            if key not in self._bubbles:
                self._bubbles[key] = bubble(*key)
            out[rows] = self._bubbles[key]
        return out

    def cost(self, x: Columns, mode: Ints) -> dict[str, Floats]:
        """Lower bound of a step of every row, and its sums, as ``train_cost`` gives them.

        Args:
            x: layouts that the engine takes. mode: recompute of every row, a place in ``columns.MODES``.
        """
        import numpy as np

        tables, _, cuts, experts = self.tables(x)
        micro, idle = self.micro_batches(x), self.idle(x)
        out: dict[str, Floats] = {}
        for rows in blocks(x.pp, x.schedule, x.virtual, x.zero):
            at = shape_of(x, int(rows[0]))
            if at not in self._parts:
                self._parts[at] = parts_of(self.spec, at, self.profile)
            step = Step(
                x.take(rows), tables, self.cluster, self.work, tied=self.spec.tied,
                cuts=cuts[rows], experts=experts[rows], mode=mode[rows], micro=micro[rows], idle=idle[rows],
            )  # fmt: skip
            for name, column in step.cost(self._parts[at]).items():
                out.setdefault(name, np.zeros(len(x)))[rows] = column
        out["tokens_per_s"] = self.work.global_batch * self.work.seq / out["step_s"]
        out["bubble"] = idle
        return out

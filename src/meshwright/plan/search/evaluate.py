"""Costs a set of layouts: cuts tabulated once, then block by block of one depth, schedule and ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshwright.moves.pipeline import refusal
from meshwright.plan.search.columns import MODES, SCHEDULES, Columns, blocks
from meshwright.plan.search.memory import Known, Memory, Peak
from meshwright.plan.search.stages import Part, memory_stages, parts_of
from meshwright.plan.search.step import Step
from meshwright.plan.search.tables import Counter, cuts_of
from meshwright.plan.train_cost import bubble
from meshwright.plan.train_engine import TrainEngine
from meshwright.plan.train_memory import DEFAULT_ENGINE
from meshwright.plan.train_shards import TrainStage
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import EngineProfile
from meshwright.specs.workload import Train

if TYPE_CHECKING:
    from meshwright.plan.search.columns import Floats, Ints, Mask


def shape_of(x: Columns, row: int) -> Layout:
    """Pipeline depth, schedule and chunks of a row as a layout without other degrees."""
    return Layout(pp=int(x.pp[row]), schedule=SCHEDULES[int(x.schedule[row])], virtual=int(x.virtual[row]))


@dataclass(slots=True)
class Coster:
    """What all layouts of one question share, with everything that was tabulated."""

    spec: ModelSpec
    profile: EngineProfile
    cluster: Cluster
    work: Train
    engine: TrainEngine = DEFAULT_ENGINE
    _parts: dict[Layout, list[tuple[Part, ...]]] = field(default_factory=dict)
    _bubbles: dict[tuple[Layout, int], float] = field(default_factory=dict)
    _stages: dict[Layout, list[TrainStage]] = field(default_factory=dict)
    _counter: Counter | None = None
    _memory: Memory | None = None

    @property
    def counter(self) -> Counter:
        """Tables of layers, kept from question to question."""
        if self._counter is None:
            self._counter = Counter(self.spec, self.profile, self.cluster, self.work)
        return self._counter

    def even(self, x: Columns) -> Mask:
        """Rows whose stages have one class of ranks: the others are not in the tables."""
        import numpy as np

        cuts, number, _ = cuts_of(x, self.profile)
        alike = np.array([self.counter.holder(cut).alike for cut in cuts], dtype=bool)
        return np.asarray(alike[number])

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

        distinct, cuts, experts = cuts_of(x, self.profile)
        tables = self.counter.count(distinct)
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
        out["idle_s"] = (out["compute_s"] + out["link_s"]) * idle / (1.0 - idle)
        return out

    def memory(self, x: Columns) -> Floats:
        """[3, N]: bytes of the fullest rank of every row by mode of recompute, as ``train_memory`` counts them for a
        ``ModelSpec`` (largest even shares)."""
        import numpy as np

        if self._memory is None:
            self._memory = Memory(self.spec, self.engine, self.work)
        cuts, number, _ = cuts_of(x, self.profile)
        tables, known, micro = (self._memory.units(cuts), self._memory.saved(cuts)), Known(), self.micro_batches(x)
        out = np.zeros((len(MODES), len(x)))
        for rows in blocks(x.pp, x.schedule, x.virtual, x.zero):
            at = shape_of(x, int(rows[0]))
            if at not in self._stages:
                self._stages[at] = memory_stages(self.spec, at)
            peak = Peak(x.take(rows), tables, self._memory, known, cuts=number[rows], micro=np.maximum(1, micro[rows]))
            out[:, rows] = peak.total(self._stages[at], at)
        return out

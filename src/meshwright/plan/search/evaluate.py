"""Costs a set of layouts: cuts tabulated once, then block by block of one depth, schedule and split of the stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshwright.moves.pipeline import refusal
from meshwright.plan.search.columns import MODES, SCHEDULES, Columns, blocks
from meshwright.plan.search.data import DataSeconds
from meshwright.plan.search.links import Links
from meshwright.plan.search.memory import Known, Memory, Peak
from meshwright.plan.search.stages import Pipeline, memory_stages, pipeline_of
from meshwright.plan.search.step import Block, Step, Timing
from meshwright.plan.search.tables import Counter, cuts_of
from meshwright.plan.train_engine import TrainEngine
from meshwright.plan.train_memory import DEFAULT_ENGINE
from meshwright.plan.train_shards import TrainStage
from meshwright.plan.training_time import constants, rates, software_of
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import EngineProfile
from meshwright.specs.workload import Train

if TYPE_CHECKING:
    from meshwright.plan.search.columns import Floats, Ints, Mask


def shape_of(x: Columns, row: int) -> Layout:
    """Pipeline depth, schedule, chunks and stages of a row as a layout without other degrees."""
    return Layout(
        pp=int(x.pp[row]),
        schedule=SCHEDULES[int(x.schedule[row])],
        virtual=int(x.virtual[row]),
        stage_layers=x.splits[int(x.split[row])],
    )


@dataclass(slots=True)
class Coster:
    """What all layouts of one question share, with everything that was tabulated."""

    spec: ModelSpec
    profile: EngineProfile
    cluster: Cluster
    work: Train
    engine: TrainEngine = DEFAULT_ENGINE
    _pipelines: dict[Layout, Pipeline] = field(default_factory=dict)
    _stages: dict[Layout, list[TrainStage]] = field(default_factory=dict)
    _counter: Counter | None = None
    _memory: Memory | None = None

    @property
    def counter(self) -> Counter:
        """Tables of layers, kept from question to question."""
        if self._counter is None:
            compute = software_of(self.engine).compute
            self._counter = Counter(self.spec, self.profile, self.cluster, self.work, compute)
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

    @property
    def timing(self) -> Timing:
        """Device, software and links of the question."""
        software = software_of(self.engine)
        of = rates(constants(), self.cluster.device, software)
        return Timing(of, software.recomputed, Links(self.cluster), self.work, self.spec.tied)

    def pipeline(self, at: Layout) -> Pipeline:
        """Stages of a depth, schedule and split, remembered."""
        if at not in self._pipelines:
            self._pipelines[at] = pipeline_of(self.spec, at, self.profile)
        return self._pipelines[at]

    def cost(self, x: Columns, mode: Ints, *, parts: bool = False) -> dict[str, Floats]:
        """Predicted seconds of a step of every row, as ``training_time`` gives them: ``step_s``, of it ``bubble_s``,
        ``data_s`` and ``optimizer_s``, and ``tokens_per_s``; with ``parts`` every one of ``training_time.PARTS``.

        Args:
            x: layouts that the engine takes. mode: recompute of every row, a place in ``columns.MODES``.
        """
        import numpy as np

        distinct, cuts, experts = cuts_of(x, self.profile)
        tables, timing, micro = self.counter.count(distinct), self.timing, self.micro_batches(x)
        rated = tables.work.rated(timing.weights())
        out: dict[str, Floats] = {}
        for deep in blocks(x.pp):
            y = x.take(deep)
            data = DataSeconds(y, tables, cuts[deep], experts[deep], timing)
            for some in blocks(y.schedule, y.virtual, y.split):
                rows, own = deep[some], data.number[some]
                at = shape_of(x, int(rows[0]))
                block = Block(y.take(some), at, tables, rated, cuts[rows], mode[rows], micro[rows], data, own)
                step = Step(block, timing, self.pipeline(at))
                for name, column in (step.seconds() | (step.parts() if parts else {})).items():
                    out.setdefault(name, np.zeros(len(x)))[rows] = column
        out["tokens_per_s"] = self.work.global_batch * self.work.seq / out["step_s"]
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
        for rows in blocks(x.pp, x.schedule, x.virtual, x.split):
            at = shape_of(x, int(rows[0]))
            if at not in self._stages:
                self._stages[at] = memory_stages(self.spec, at)
            peak = Peak(x.take(rows), tables, self._memory, known, cuts=number[rows], micro=np.maximum(1, micro[rows]))
            out[:, rows] = peak.total(self._stages[at], at)
        return out

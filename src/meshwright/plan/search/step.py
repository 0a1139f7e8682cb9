"""Seconds of an optimizer step over columns: the terms of ``training_time`` on arrays.

A block of layouts shares pipeline depth, schedule, model chunks and stages. What a stage does in one
micro-batch depends on the cut alone and is combined once a cut; rows then take their micro-batches, data-parallel
groups and pipelines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.plan.pipeline_time import idle_lines, split_backward
from meshwright.plan.search.columns import Columns
from meshwright.plan.search.data import DataSeconds, exposed
from meshwright.plan.search.links import NEAR, Group, Links
from meshwright.plan.search.stages import Pipeline, StageKind
from meshwright.plan.search.tables import Tables, Works
from meshwright.plan.training_time import CORNER, HOST, PARTS, SHOWN, STREAM, Rates
from meshwright.plan.training_time_work import Work
from meshwright.specs.dtypes import DTYPE_BYTES
from meshwright.specs.layout import Layout
from meshwright.specs.workload import Train

if TYPE_CHECKING:
    from meshwright.plan.search.columns import Floats, Ints

    Numbers = Floats | Ints | float


@dataclass(frozen=True, slots=True)
class Timing:
    """What all blocks of a question share: rates of device and software, links, workload, tied embeddings.

    ``recomputed``: see ``training_time.Software``.
    """

    rates: Rates
    recomputed: float
    links: Links
    work: Train
    tied: bool

    def weights(self) -> Floats:
        """[W, 2]: seconds of the device and of the host for each field of ``Work``; all are the device's where the host
        is the device."""
        import numpy as np

        host = np.array([name in HOST and not self.rates.serial for name in Work._fields])
        of = np.array(self.rates.weights)
        return np.stack([np.where(host, 0.0, of), np.where(host, of, 0.0)], axis=1)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that share pipeline depth, schedule, chunks and stages.

    Attributes:
        x: layouts. at: depth, schedule and chunks as a layout. tables: of all cuts. rated: work of these in seconds of
            device and host (``Timing.weights``). cuts: [N]: cut of every row.
        mode: [N]: place in ``columns.MODES``. micro: [N]: micro-batches.
        data: of all rows of this depth. own: [N]: the distinct row of each in it.
    """

    x: Columns
    at: Layout
    tables: Tables
    rated: Works
    cuts: Ints
    mode: Ints
    micro: Ints
    data: DataSeconds
    own: Ints


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """One kind of stage by row: forward and backward of a micro-batch, what data parallelism leaves exposed, the
    optimizer."""

    forward: Floats
    backward: Floats
    data: Floats
    optimizer: Floats

    @property
    def both(self) -> Floats:
        """Forward and backward of one micro-batch."""
        return self.forward + self.backward


class Step:
    """Times a block."""

    def __init__(self, block: Block, timing: Timing, pipeline: Pipeline) -> None:
        import numpy as np

        self.block, self.timing, self.pipeline = block, timing, pipeline
        x, node = block.x, timing.links.cluster.devices_per_node
        near = np.minimum(x.pp, np.maximum(1, node // x.stage))
        # A case is a cut beside the place of a stage in its node: all that one micro-batch of a stage depends on.
        code, first, self.case = np.unique(block.cuts * NEAR + near, return_index=True, return_inverse=True)
        self.cut, self.of_case = code // NEAR, x.take(first)
        self.pipe = Group(timing.links, self.of_case.pp, near[first])
        self.tensor = Group(timing.links, self.of_case.tp, np.minimum(self.of_case.tp, node))
        self.hand_off = self.pipe.seconds("send", block.tables.hidden_bytes[self.cut])
        self.blocking = "pp_beside" if block.at.virtual > 1 else "pp"
        self.stages = [self._stage(kind) for kind in pipeline.kinds]

    def seconds(self) -> dict[str, Floats]:
        """Seconds of the step by row, and of it bubble, exposed data parallelism and optimizer."""
        import numpy as np

        slowest = np.asarray(np.max([s.both for s in self.stages], axis=0))
        idle = self._idle()
        data = np.asarray(np.max([s.data for s in self.stages], axis=0))
        optimizer = np.asarray(np.max([s.optimizer for s in self.stages], axis=0)) / STREAM + self.timing.rates.step_s
        return {
            "step_s": self.block.micro * slowest + idle + data + optimizer,
            "bubble_s": idle,
            "data_s": data,
            "optimizer_s": optimizer,
        }

    def parts(self) -> dict[str, Floats]:
        """``TrainingTime.parts`` by row."""
        import numpy as np

        slowest = np.argmax([s.both for s in self.stages], axis=0)
        of_kind = [self._parts(kind, s) for kind, s in zip(self.pipeline.kinds, self.stages, strict=True)]
        found = {n: chosen(slowest, [parts[n] for parts in of_kind]) for n in of_kind[0]}
        whole = self.seconds()
        found |= {"bubble": whole["bubble_s"], "data parallel": whole["data_s"], "optimizer": whole["optimizer_s"]}
        return {name: found[name] for name in PARTS}

    def _works(self, kind: StageKind, of: Works, column: int, weight: float) -> tuple[Floats, Floats, Floats, Floats]:
        """[C, W] each: forward, backward and attention core of one micro-batch of a stage, and forward of its layers;
        hand-offs go to ``column`` with ``weight``."""
        import numpy as np

        k = self.cut
        layers = np.einsum("p,kpsw->skw", np.array(kind.layers, dtype=float), of.layer[k])
        ahead, back = layers[0].copy(), layers[1]
        for there, ends in ((kind.first, of.first), (kind.last, of.last)):
            if there:
                ahead, back = ahead + ends[k, 0], back + ends[k, 1]
        ahead[:, column] += self.hand_off * (weight * sum(part.on for part in kind.parts))
        back[:, column] += self.hand_off * (weight * sum(part.back for part in kind.parts))
        return ahead, back, layers[2], layers[0]

    def _rated(self, kind: StageKind) -> tuple[Floats, Floats, Floats, Floats]:
        """``_works`` in seconds of device and host."""
        return self._works(kind, self.block.rated, 0, getattr(self.timing.rates.weights, self.blocking))

    def _once(self, kind: StageKind) -> tuple[Floats, Floats]:
        """[C] each: seconds of collectives that the backward of a step has once: sums of the gradients of norms under
        sequence parallelism, and of tied embeddings."""
        import numpy as np

        t, k, x, rates = self.block.tables, self.cut, self.of_case, self.timing.rates.weights
        grad = DTYPE_BYTES[self.timing.work.grad_dtype]
        numel = t.norms[k] @ np.array(kind.layers) + (t.end_norms[k] if kind.last else 0)
        norms, tied = self.tensor.seconds("all_reduce", numel * x.sp * grad) * rates.tp, np.zeros(len(k))
        if self.timing.tied and kind.first != kind.last:
            tied = self.pipe.seconds("all_reduce", t.tied[k] * grad) * getattr(rates, self.blocking)
        return norms, tied

    def _stage(self, kind: StageKind) -> StageSeconds:
        micro, case = self.block.micro, self.case
        ahead, back, core, layers = self._rated(kind)
        norms, tied = self._once(kind)
        once = (norms + tied)[case] / micro
        forward = joined(ahead)[case]
        backward = joined(back)[case] if not once.any() else joined(back[case], once)
        backward = backward + self._again(core, layers)
        d = self.block.data.of(kind).take(self.block.own)
        left = exposed(d, max(1, kind.placed), forward, backward, micro, self.timing.rates.contention)
        return StageSeconds(forward, backward, left, d.optimizer)

    def _again(self, core: Floats, layers: Floats) -> Floats:
        """Recompute of one micro-batch by row."""
        import numpy as np

        some, whole = joined(core), joined(layers)
        return np.asarray(self.timing.recomputed * np.array([some * 0.0, some, whole])[self.block.mode, self.case])

    def _parts(self, kind: StageKind, stage: StageSeconds) -> dict[str, Floats]:
        """Parts of the micro-batches of one kind of stage."""
        import numpy as np

        micro, case = self.block.micro, self.case
        ahead, back, *_ = self._works(kind, self.block.tables.work, Work._fields.index(self.blocking), 1.0)
        weighted = ((ahead + back) * np.array(self.timing.rates.weights))[case]
        of = dict(zip(Work._fields, (micro[:, None] * weighted).T, strict=True))
        norms, tied = self._once(kind)
        none = np.zeros(len(micro))
        found: dict[str, Floats] = {part: sum((of[name] for name in names), none) for part, names in SHOWN.items()}
        found["tensor parallel"] += norms[case]
        found["hand-offs"] += tied[case]
        found["recompute"] = micro * self._again(*self._rated(kind)[2:])
        found["launch"] = micro * stage.both - sum(found.values(), none)
        return found

    def _idle(self) -> Floats:
        """Seconds of the pipeline beyond the micro-batches of the slowest stage: ``pipeline_time`` on arrays."""
        import numpy as np

        at, micro = self.block.at, self.block.micro
        both = np.array([s.both for s in self.stages])
        if at.pp == 1:
            return np.zeros(len(micro))
        if split_backward(at):
            place = np.argmax(both, axis=0)
            forward = chosen(place, [s.forward for s in self.stages])
            backward = chosen(place, [s.backward for s in self.stages])
            found, number = np.unique(micro, return_inverse=True)
            lines = np.array([idle_lines(at.schedule, at.pp, int(m)) for m in found])[number]
            return np.asarray((lines[:, :, 0] * forward[:, None] + lines[:, :, 1] * backward[:, None]).max(axis=1))
        total = np.sum([both[kind] * many for kind, many in self.pipeline.runs], axis=0)
        if at.schedule == "gpipe":
            more = np.max([s.forward for s in self.stages], axis=0) + np.max([s.backward for s in self.stages], axis=0)
            return np.asarray(total + (micro - 1) * more - micro * both.max(axis=0))
        return np.asarray(self._one_f_one_b(both, total) - micro * both.max(axis=0))

    def _one_f_one_b(self, both: Floats, total: Floats) -> Floats:
        """The longest path: of equal stages in a row the last one has it."""
        import numpy as np

        at, micro = self.block.at, self.block.micro
        front, worst, after = total * 0.0, total * 0.0, at.pp
        for kind, many in self.pipeline.runs:
            s = self.stages[kind]
            front, after = front + (many - 1) * both[kind], after - many
            wait = waits(s.forward, s.backward, total - front - both[kind], after, micro)
            worst = np.maximum(worst, micro * both[kind] + (front + wait) / at.virtual)
            front = front + both[kind]
        return worst


def chosen(place: Ints, of: list[Floats]) -> Floats:
    """Of every row the value of its place."""
    import numpy as np

    return np.asarray(np.array(of)[place, np.arange(len(place))])


def waits(forward: Floats, backward: Floats, behind: Floats, after: int, micro: Ints) -> Floats:
    """``pipeline_time.waits`` on arrays."""
    import numpy as np

    many = np.maximum(0.0, behind - after * forward) + np.maximum(0.0, behind - after * backward)
    few = np.maximum(0.0, behind - (micro - 1) * np.minimum(forward, backward))
    return np.asarray(np.where(micro > after, many, few))


def joined(work: Floats, more: Floats | float = 0.0) -> Floats:
    """Device (with ``more``) and host side by side, as in ``training_time.work_seconds``; ``CORNER`` is 4: two squares
    and two roots.

    Args:
        work: [N, 2]: seconds of device and host.
    """
    import numpy as np

    assert CORNER == 4.0
    device = np.square(np.square(work[:, 0] + more))
    return np.asarray(np.sqrt(np.sqrt(device + np.square(np.square(work[:, 1])))))

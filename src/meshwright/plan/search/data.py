"""Gradients, parameters and the optimizer over columns: ``data_parallel`` and ``training_time.data_exposed`` on arrays.

What these take depends on few axes (tp, ep, etp, the data-parallel ranks, the FSDP knobs), so it is counted once for
every distinct set of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from meshwright.plan.search.columns import Columns
from meshwright.plan.search.links import Group
from meshwright.plan.search.stages import StageKind
from meshwright.plan.search.tables import Tables
from meshwright.specs.dtypes import DTYPE_BYTES
from meshwright.specs.layout import Fsdp

if TYPE_CHECKING:
    from meshwright.plan.search.columns import Floats, Ints
    from meshwright.plan.search.step import Timing


@dataclass(slots=True)
class Numel:
    """Elements of dense parameters and of experts that are gathered or reduced at once."""

    dense: Ints
    expert: Ints

    def plus(self, other: Numel, times: int = 1) -> Numel:
        """Sum of this and ``times`` the other."""
        return Numel(self.dense + times * other.dense, self.expert + times * other.expert)


@dataclass(frozen=True, slots=True)
class Collectives:
    """Seconds of a kind of stage (see ``training_time_work.DataWork``): gathers before the forward and before the
    backward and scatters of one micro-batch; parameters and gradients once a step; optimizer at the memory bandwidth.
    """

    gather: Floats
    again: Floats
    scatter: Floats
    parameters: Floats
    gradients: Floats
    optimizer: Floats
    norm: Floats

    def take(self, index: Ints) -> Collectives:
        """The rows of an index."""
        return Collectives(*(getattr(self, f.name)[index] for f in fields(self)))


class DataSeconds:
    """The data-parallel side of rows that share pipeline depth; ``number``: [N]: the distinct row of each."""

    def __init__(self, x: Columns, tables: Tables, cuts: Ints, experts: Ints, timing: Timing) -> None:
        import numpy as np

        code = tables.held[cuts]
        for axis in (x.dp * x.cp, x.zero, x.replicas, x.reshard):
            code = code * (int(axis.max(initial=0)) + 1) + axis
        _, first, self.number = np.unique(code, return_index=True, return_inverse=True)
        self.x, self.cut, experts = x.take(first), cuts[first], experts[first]
        self.t, self.timing = tables, timing
        links, y = timing.links, self.x
        node, ranks, span = links.cluster.devices_per_node, y.dp * y.cp, y.ep * experts
        copies = y.stage // span
        self.plain = (y.ep == 1) & (copies == ranks)
        whole = Group(links, ranks, np.minimum(ranks, -(-node // y.tp)))
        self.dense, self.replicated = whole.part(np.where(y.zero == 3, y.replicas, 1))
        self.expert = Group(links, copies, np.minimum(copies, -(-node // span)))
        world = y.stage * y.pp
        four = np.full(len(world), DTYPE_BYTES["f32"])
        self.norm = Group(links, world, np.minimum(world, node)).seconds("all_reduce", four)
        self.layers = [Numel(*self.t.parameters[self.cut, p].T) for p in range(tables.parameters.shape[1])]
        self._known: dict[StageKind, Collectives] = {}
        self._units: dict[int, tuple[Floats, Floats]] = {}

    def of(self, kind: StageKind) -> Collectives:
        """Seconds of one kind of stage, by distinct row."""
        if kind not in self._known:
            roots = [self._root(kind, i) for i in range(len(kind.parts))]
            self._known[kind] = self._collectives(kind, roots, self._whole(kind, roots))
        return self._known[kind]

    def _root(self, kind: StageKind, number: int) -> Numel:
        """Embedding, final norm and head of one chunk."""
        t, k, part = self.t, self.cut, kind.parts[number]
        nothing = k * 0
        dense = nothing
        if part.first:
            dense = dense + t.embedding[k]
        elif part.last and self.timing.tied and not kind.first:
            dense = dense + t.vocabulary[k]
        if part.last:
            dense = dense + t.tail[k] + (t.other[k] if kind.first else 0)
        return Numel(dense, nothing)

    def _whole(self, kind: StageKind, roots: list[Numel]) -> Numel:
        found = roots[0]
        for root in roots[1:]:
            found = found.plus(root)
        for many, layer in zip(kind.layers, self.layers, strict=True):
            found = found.plus(layer, many)
        return found

    def _collectives(self, kind: StageKind, roots: list[Numel], whole: Numel) -> Collectives:
        """All ZeRO stages side by side, and of every row its own (see ``data_parallel`` for what each does)."""
        import numpy as np

        w, zero, none = self.timing.work, self.x.zero, self.norm * 0.0
        grad, width = DTYPE_BYTES[w.grad_dtype], DTYPE_BYTES[w.param_dtype]
        gather, scatter = self._gather(whole, width), self._scatter(whole, grad)
        again, every = none, self._of_chunks(kind, roots, grad)
        parameters = np.where((zero == 1) | (zero == 2), gather, 0.0)
        gradients = np.where(zero == 0, self._sum("all_reduce", whole, grad), np.where(zero == 1, scatter, 0.0))
        before, every = none, np.where(zero == 2, every, 0.0)
        sharded = zero == 3
        if sharded.any():
            gather, resharded, scatter, last = self._sharded(kind, roots, whole)
            if int(self.x.pp[0]) > 1:  # once a step
                parameters, gradients = np.where(sharded, gather, parameters), np.where(sharded, last, gradients)
            else:
                before, again = np.where(sharded, gather, 0.0), np.where(sharded, resharded, 0.0)
                every = np.where(sharded, scatter, every)
        optimizer = self._update_bytes(whole) / self.timing.links.cluster.device.bandwidth_bytes_s
        return Collectives(before, again, every, parameters, gradients, optimizer, self.norm)

    def _of_chunks(self, kind: StageKind, roots: list[Numel], width: int) -> Floats:
        """ZeRO-2: the gradients of every chunk; equal ones are counted once."""
        found = self.norm * 0.0
        alike: dict[tuple[object, ...], list[int]] = {}
        for number, part in enumerate(kind.parts):
            alike.setdefault((part.layers, part.first, part.last), []).append(number)
        for numbers in alike.values():
            chunk = roots[numbers[0]]
            for many, layer in zip(kind.parts[numbers[0]].layers, self.layers, strict=True):
                chunk = chunk.plus(layer, many)
            found = found + len(numbers) * self._scatter(chunk, width)
        return found

    def _sharded(self, kind: StageKind, roots: list[Numel], whole: Numel) -> tuple[Floats, Floats, Floats, Floats]:
        """ZeRO-3: gathers unit by unit, and again those that were resharded, scatters unit by unit, and at once."""
        knobs, none = Fsdp(), self.norm * 0.0
        width, reduce = DTYPE_BYTES[knobs.param_dtype], DTYPE_BYTES[knobs.reduce_dtype]
        counted = [(n, self._unit(p)) for p, n in enumerate(kind.layers) if n]
        layers = sum((n * each[0] for n, each in counted), none)
        ends = [root for root, part in zip(roots, kind.parts, strict=True) if part.first or part.last]
        gather = sum((self._gather(root, width) for root in ends), layers)
        scatter = sum((n * each[1] for n, each in counted), none)
        scatter = sum((self._scatter(root, reduce) for root in ends), scatter)
        return gather, layers * self.x.reshard, scatter, self._scatter(whole, reduce)

    def _unit(self, pattern: int) -> tuple[Floats, Floats]:
        """ZeRO-3: gather and scatter of one layer, remembered."""
        if pattern not in self._units:
            knobs, layer = Fsdp(), self.layers[pattern]
            gather = self._gather(layer, DTYPE_BYTES[knobs.param_dtype])
            self._units[pattern] = gather, self._scatter(layer, DTYPE_BYTES[knobs.reduce_dtype])
        return self._units[pattern]

    def _pairs(self, unit: Numel) -> list[tuple[Ints, Group]]:
        """Elements and the group that shards them: experts apart where their replicas are other ranks."""
        import numpy as np

        pairs = [(np.where(self.plain, unit.dense + unit.expert, unit.dense), self.dense)]
        apart = np.where(self.plain, 0, unit.expert)
        return [*pairs, (apart, self.expert)] if apart.any() else pairs

    def _sum(self, op: str, unit: Numel, width: int) -> Floats:
        return sum((group.seconds(op, n * width) for n, group in self._pairs(unit)), self.norm * 0.0)

    def _gather(self, unit: Numel, width: int) -> Floats:
        found = self.norm * 0.0
        for n, group in self._pairs(unit):
            found = found + group.seconds("all_gather", -(-n // group.members) * width)
        return found

    def _scatter(self, unit: Numel, width: int) -> Floats:
        """Pieces of the gradients, and their sums over replicas."""
        found = self._sum("reduce_scatter", unit, width)
        if self.replicated.alone:
            return found
        n, group = self._pairs(unit)[0]
        return found + self.replicated.seconds("all_reduce", -(-n // group.members) * width)

    def _update_bytes(self, whole: Numel) -> Floats:
        """What the optimizer reads and writes; see ``data_parallel.optimizer_op``."""
        import numpy as np

        w = self.timing.work
        numel = whole.dense + whole.expert
        shared = np.where(self.plain, self.dense.members, np.maximum(1, self.expert.members))
        spread = -(-whole.dense // self.dense.members) + -(-whole.expert // shared)
        numel = np.where(self.x.zero > 0, spread, numel)
        moments = {"adamw": 2, "sgd": 1, "muon": 1}[w.optimizer] * DTYPE_BYTES[w.state_dtype]
        master = 4 if w.master_weights and w.param_dtype != "f32" else 0
        width = DTYPE_BYTES[w.param_dtype]
        each = DTYPE_BYTES[w.grad_dtype] + 2 * moments + (2 * master + width if master else 2 * width)
        return np.asarray(numel.astype(float) * each)


def exposed(d: Collectives, units: int, forward: Floats, backward: Floats, micro: Ints, contention: float) -> Floats:
    """Seconds that the compute does not hide: ``training_time.data_exposed`` on arrays."""
    import numpy as np

    out = micro * (np.maximum(0.0, d.gather - forward) + np.maximum(0.0, d.again + d.scatter - backward))
    out += micro * (d.gather + d.scatter) / units
    out += np.maximum(d.gradients - backward, d.gradients / units) + np.maximum(d.parameters - forward, 0.0)
    hidden = micro * (d.gather + d.again + d.scatter) + d.gradients + d.parameters - out
    return np.asarray(np.maximum(0.0, out) + contention * np.maximum(0.0, hidden) + d.norm)

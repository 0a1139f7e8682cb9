"""Peak memory of a training rank over columns: the terms of ``train_memory``, tabulated by cut and combined on arrays.

What a layer saves, what the ends of a stage keep and how many elements a unit has are asked once for every distinct cut
(``train_activations``, ``train_shards``); states, micro-batches in flight and the fullest stage are arrays. Not for
``recompute_layers``, which no column holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from meshwright.plan.search.columns import MODES, Columns, blocks
from meshwright.plan.search.stages import pattern_counts
from meshwright.plan.search.tables import Cut
from meshwright.plan.train_activations import (
    head_bytes,
    layer_bytes,
    local_logits,
    model_shape,
    prediction_bytes,
    score_buffer,
    weight_gradient,
)
from meshwright.plan.train_engine import TrainEngine
from meshwright.plan.train_inflight import held_chunks
from meshwright.plan.train_shards import TrainStage, stage_units
from meshwright.plan.train_states import moment_bytes
from meshwright.specs.dtypes import size_bytes
from meshwright.specs.layout import Fsdp, Layout, Schedule
from meshwright.specs.model import ModelSpec
from meshwright.specs.workload import Train

if TYPE_CHECKING:
    from meshwright.plan.search.columns import Floats, Ints


@dataclass(frozen=True, slots=True)
class Saved:
    """Activations by cut.

    Attributes:
        kept, whole: [K, P, 3]: bytes of a layer from forward to backward, and alive in its backward, by mode.
        head: [K, 3]: of the end of the model. edge: [K]: of a tensor handed over. rows: [K]: bytes of a dropout mask.
        fixed, tail: [K]: buffers of every stage, and of the last one. joined, logits: [K]: see ``deferred_head``.
        gradient: [2, K, P]: temporary weight gradient behind a last layer of a pattern, without and with the head.
    """

    kept: Floats
    whole: Floats
    head: Floats
    edge: Floats
    rows: Floats
    fixed: Floats
    tail: Floats
    joined: Floats
    logits: Floats
    gradient: Floats


@dataclass(frozen=True, slots=True)
class Units:
    """Elements by cut: dense, expert, and dense ones that are no matrix.

    Attributes:
        layers: [K, P, 3]. roots: [K, 2, 2, 3]: of a stage without or with the embedding, without or with the head.
        extra: [K, M, 3]: prediction layers behind the head.
    """

    layers: Ints
    roots: Ints
    extra: Ints


@dataclass(slots=True)
class Memory:
    """Tables of one model, engine and workload."""

    spec: ModelSpec
    engine: TrainEngine
    work: Train
    _units: dict[tuple[int, ...], tuple[object, ...]] = field(default_factory=dict)
    _saved: dict[tuple[int, ...], tuple[object, ...]] = field(default_factory=dict)

    def units(self, cuts: list[Cut]) -> Units:
        """Elements of every unit that a rank computes with."""
        import numpy as np

        rows = []
        for cut in cuts:
            key = (cut.tp, cut.ep, cut.etp)
            if key not in self._units:
                self._units[key] = self._count(cut.layout(etp=cut.etp or None))
            rows.append(self._units[key])
        layers, roots, extra = (np.array(part, dtype=np.int64) for part in zip(*rows, strict=True))
        return Units(layers, roots, extra.reshape(len(cuts), -1, 3))

    def _first_layers(self) -> tuple[int, ...]:
        return tuple(self.spec.patterns.index(p) for p in range(len(self.spec.pattern_families)))

    def _count(self, layout: Layout) -> tuple[object, ...]:
        def found(layers: tuple[int, ...], embedding: bool, head: bool) -> dict[str, tuple[int, int, int]]:
            stage = TrainStage(0, (layers,), embedding, head)
            units = stage_units(self.spec, layout, stage, self.engine)
            return {u.name: (u.dense, u.expert, u.plain) for u in units}

        first = self._first_layers()
        inner = found(first, False, False)
        layers = [inner.get(f"layer {i}", (0, 0, 0)) for i in first]
        ends = [[found((), bool(e), bool(h)) for h in range(2)] for e in range(2)]
        roots = [[end["root"] for end in row] for row in ends]
        return layers, roots, [size for name, size in ends[0][1].items() if name != "root"]

    def saved(self, cuts: list[Cut]) -> Saved:
        """Activations of a layer and of the ends."""
        import numpy as np

        rows = []
        for cut in cuts:
            wide = cut.ep if self.engine.dispatcher == "allgather" else 0
            key = (cut.tp, cut.cp, cut.sp, cut.micro_batch, cut.etp or cut.tp, wide)
            if key not in self._saved:
                self._saved[key] = self._measure(cut)
            rows.append(self._saved[key])
        kept, whole, head, one, gradient = (np.array(part, dtype=float) for part in zip(*rows, strict=True))
        edge, mask, fixed, tail, joined, logits = one.T
        return Saved(kept, whole, head, edge, mask, fixed, tail, joined, logits, gradient.transpose(1, 0, 2))

    def _measure(self, cut: Cut) -> tuple[object, ...]:
        spec, engine, layout = self.spec, self.engine, cut.layout(etp=cut.etp or None)
        s = model_shape(spec, layout, self.work, engine)
        works = [replace(self.work, recompute=mode, recompute_layers=None) for mode in MODES]
        layers = [spec.layers[i] for i in self._first_layers()]
        pairs = [[layer_bytes(layer, s, layout, work) for work in works] for layer in layers]
        head = [
            sum(head_bytes(spec, s, layout, work, engine).values())
            + sum(prediction_bytes(spec, s, layout, work, engine).values())
            for work in works
        ]
        edge = s.width * s.rows * s.hidden
        fixed = s.batch * s.seq * s.seq if engine.attention_mask else 0
        fixed += score_buffer(spec, s) if engine.score_buffer else 0
        tail = s.width * s.tokens * s.hidden if engine.gather_buffer and s.rows < s.tokens else 0
        joined = s.width * s.tokens * s.hidden if engine.deferred_head else 0
        logits = s.width * local_logits(spec, s, layout, engine)
        mask = s.rows * s.hidden if s.dropout else 0
        gradient = [
            [weight_gradient(layer, s, engine, head=end) if engine.weight_gradient_bytes else 0 for layer in layers]
            for end in (False, True)
        ]
        kept, whole = ([[pair[i] for pair in row] for row in pairs] for i in range(2))
        return kept, whole, head, (edge, mask, fixed, tail, joined, logits), gradient


def options(schedule: Schedule, stage: TrainStage, stages: int, micro: int, group: int | None) -> list[tuple[int, ...]]:
    """Micro-batches of every chunk at the local maxima of a schedule, in order, those left out that hold no more of any
    chunk than another."""
    import numpy as np

    chunks = len(stage.chunks)
    name: Schedule = "interleaved" if schedule == "1f1b" and chunks > 1 else schedule
    found = list(dict.fromkeys(held_chunks(name, stage.index, stages, micro, chunks, group or stages)))
    if name != "interleaved":
        return found
    held = np.array(found)
    no_more = np.all(held[:, None] <= held[None], axis=2) & ~np.eye(len(found), dtype=bool)
    return [option for option, covers in zip(found, no_more, strict=True) if not covers.any()]


@dataclass(slots=True)
class Known:
    """What blocks share: sums of units and of chunks over all cuts, micro-batches in flight."""

    sums: dict[object, Ints] = field(default_factory=dict)
    chunks: dict[object, tuple[Floats, Floats]] = field(default_factory=dict)
    options: dict[object, Floats] = field(default_factory=dict)


class States:
    """Parameters, gradients and optimizer of layouts that share the ZeRO stage; ``cuts``: [N]: cut of every row."""

    def __init__(self, x: Columns, units: Units, memory: Memory, known: Known, cuts: Ints) -> None:
        import numpy as np

        self.x, self.units, self.memory, self.known, self.cuts = x, units, memory, known, cuts
        self.zero = int(x.zero[0])
        stated = (self.zero == 3) & ((x.replicas > 1) | (x.reshard == 0))
        replicas = np.where(stated, x.replicas, memory.engine.optimizer_instances)
        ranks = x.dp * x.cp
        copies = np.maximum(1, ranks * x.tp // (x.ep * x.expert_cut))
        self.degrees = np.maximum(1, ranks // replicas), np.maximum(1, copies // replicas)

    def held(self, stage: TrainStage, pp: int) -> tuple[Floats, Ints]:
        """Bytes of a stage, and of its fp32 gradients in the optimizer step."""
        import numpy as np

        held = self._states(stage, pp)
        step = held.pop("step")
        return np.sum(list(held.values()), axis=0).astype(float), step

    def _sums(self, stage: TrainStage) -> Ints:
        """[7, N]: dense, expert and plain elements of the rank; root, largest layer, the two largest, largest unit."""
        import numpy as np

        t, counts = self.units, pattern_counts(self.memory.spec, stage.layers)
        key = (counts, stage.embedding, stage.head)
        if key not in self.known.sums:
            root = t.roots[:, int(stage.embedding), int(stage.head)]
            inner = [(t.layers[:, p], n) for p, n in enumerate(counts) if n]
            inner += [(t.extra[:, m], 1) for m in range(t.extra.shape[1])] if stage.head else []
            sums = root + sum(unit * n for unit, n in inner)
            sizes = [unit[:, 0] + unit[:, 1] for unit, n in inner for _ in range(min(2, n))]
            ordered = np.sort(np.array([*sizes, root[:, 0] * 0, root[:, 0] * 0]), axis=0)
            whole, largest = root[:, 0] + root[:, 1], ordered[-1]
            two, unit = largest + ordered[-2], np.maximum(whole, largest)
            self.known.sums[key] = np.array([*sums.T, whole, largest, two, unit])
        return np.asarray(self.known.sums[key][:, self.cuts])

    def _spread(self, dense: Ints, expert: Ints, each: int, *, over: bool = True) -> Ints:
        if not over:
            return (dense + expert) * each
        size: Ints = -(-dense * each // self.degrees[0]) + -(-expert * each // self.degrees[1])
        return size

    def _states(self, stage: TrainStage, pp: int) -> dict[str, Ints]:
        """``train_states.states`` by term; ``step``: fp32 gradients of the optimizer step."""
        sums = self._sums(stage)
        held = self._sharded(sums, pp) if self.zero == 3 else self._whole(sums)
        on_host, none = self.memory.engine.on_host, self.x.tp * 0
        if "parameters" in on_host and self.zero == 3:
            held["weights"] = none
        if "gradients" in on_host:
            held["gradients"] = held["step"] = none
        if "optimizer" in on_host:
            held["optimizer"] = none
        return held

    def _optimizer(self, dense: Ints, expert: Ints, plain: Ints, *, master: bool, over: bool) -> Ints:
        w, e = self.memory.work, self.memory.engine
        size = self._spread(dense, expert, moment_bytes(w) + (4 if master else 0), over=over)
        size = size + self._spread(plain, plain * 0, moment_bytes(w, matrix=False) - moment_bytes(w), over=over)
        if w.offload == "optimizer":
            size = size - (size * e.offload_fraction).astype(size.dtype)
        return size

    def _whole(self, sums: Ints) -> dict[str, Ints]:
        """``zero_states``."""
        import numpy as np

        dense, expert, plain, _, _, _, largest = sums
        w, e = self.memory.work, self.memory.engine
        width, grad = size_bytes(w.param_dtype), size_bytes(w.grad_dtype)
        over, halved = self.zero > 0, self.zero >= 2
        spread = halved & ((self.degrees[0] > 1) | (self.degrees[1] > 1))
        copies = 2 * (dense + expert - plain) if e.fp8_weight_copies else 0
        late = e.separate_main_grads and grad < 4
        return {
            "weights": width * (dense + expert) + copies,
            "gradients": self._spread(dense, expert, grad, over=halved),
            "optimizer": self._optimizer(
                dense, expert, plain, master=w.master_weights and w.param_dtype != "f32", over=over
            ),
            "whole": np.where(spread, grad * largest, 0),
            "step": self._spread(dense, expert, 4, over=over) if late else dense * 0,
        }

    def _sharded(self, sums: Ints, pp: int) -> dict[str, Ints]:
        """``fsdp_states`` with one unit of prefetch, wrapped by layer."""
        import numpy as np

        dense, expert, plain, root, largest, two, _ = sums
        w, e, knobs = self.memory.work, self.memory.engine, Fsdp()
        stored = 4 if w.master_weights else size_bytes(w.param_dtype)
        width, reduce = size_bytes(knobs.param_dtype), size_bytes(knobs.reduce_dtype)
        halves = e.half_shards and stored > width
        everything = dense + expert
        if pp > 1 and e.fsdp_unsharded:
            gathered, waiting = width * everything, reduce * everything
        else:
            gathered = width * np.where(self.x.reshard == 0, everything, root + two)
            waiting = (width + reduce) * largest + (width + (reduce if e.grad_buffer else 0)) * root
        alone = (self.degrees[0] == 1) & (self.degrees[1] == 1)
        only = 0 if halves or stored == width else width * everything
        return {
            "weights": self._spread(dense, expert, width if halves else stored),
            "gradients": self._spread(dense, expert, reduce),
            "optimizer": self._optimizer(dense, expert, plain, master=halves, over=True),
            "gathered": np.where(alone, only, gathered) + np.where(alone, 0, waiting),
            "step": self._spread(dense, expert, 4) if halves and reduce < 4 else dense * 0,
        }


class Peak:
    """Peak of a block of layouts that share depth, schedule, chunks and stages; [N]: cut and micro-batches of a row."""

    def __init__(
        self, x: Columns, tables: tuple[Units, Saved], memory: Memory, known: Known, *, cuts: Ints, micro: Ints
    ) -> None:
        self.x, self.memory, self.known, self.cuts, self.micro = x, memory, known, cuts, micro
        self.units, self.saved = tables
        self.alike = [(rows, int(micro[rows[0]])) for rows in blocks(micro)]

    def total(self, stages: list[TrainStage], layout: Layout) -> Floats:
        """[3, N]: bytes of the fullest of some stages, by mode of recompute.

        ``layout`` gives depth, schedule and chunks.
        """
        import numpy as np

        e, x = self.memory.engine, self.x
        best = np.zeros((len(MODES), len(x)))
        by_zero = [
            (rows, States(x.take(rows), self.units, self.memory, self.known, self.cuts[rows]))
            for rows in blocks(x.zero)
        ]
        states, step = np.empty(len(x)), np.empty(len(x))
        for stage in stages:
            for rows, of in by_zero:
                states[rows], step[rows] = of.held(stage, layout.pp)
            np.maximum(best, states + np.maximum(self._activations(stage, layout), step), out=best)
        best += e.workspace_bytes + e.context_bytes
        best += np.where(x.stage * x.pp > 1, e.communicator_bytes, 0)
        return best

    def _chunk(self, layers: tuple[int, ...]) -> tuple[Floats, Floats]:
        """Bytes kept a micro-batch, and extra in a layer's backward, of one chunk: [3, K] each."""
        import numpy as np

        counts = pattern_counts(self.memory.spec, layers)
        if counts not in self.known.chunks:
            t, full = self.saved, MODES.index("full")
            kept = np.einsum("p,kpm->mk", np.array(counts, dtype=float), t.kept)
            extra = t.whole - t.kept
            extra[:, :, full] = t.whole[:, :, full]
            there = [p for p, n in enumerate(counts) if n]
            self.known.chunks[counts] = kept, extra[:, there].max(axis=1).T if there else kept * 0
        return self.known.chunks[counts]

    def _flight(self, stage: TrainStage, layout: Layout, kept: Floats) -> tuple[Floats, Floats, Floats]:
        """Bytes of layers when most is held, and how many micro-batches then are: over all chunks, and of one.

        Args:
            kept: [chunks, 3, N]: bytes of a micro-batch by mode of recompute.
        """
        import numpy as np

        by_m = [(rows, self._options(stage, layout, m)) for rows, m in self.alike]
        if all(len(held) == 1 for _, held in by_m):
            only = np.empty((kept.shape[0], kept.shape[2]))
            for rows, held in by_m:
                only[:, rows] = held[0][:, None]
            layers = only[0] * kept[0]
            for chunk in range(1, len(kept)):
                layers += only[chunk] * kept[chunk]
            return layers, only.sum(axis=0), only.max(axis=0)
        layers, flying, most = (np.empty(kept.shape[1:]) for _ in range(3))
        for rows, held in by_m:
            sums = np.tensordot(held, kept[:, :, rows], axes=1)
            best = sums.argmax(axis=0)
            layers[:, rows] = sums.max(axis=0)
            flying[:, rows], most[:, rows] = held.sum(axis=1)[best], held.max(axis=1)[best]
        return layers, flying, most

    def _options(self, stage: TrainStage, layout: Layout, m: int) -> Floats:
        import numpy as np

        key = (stage.index, layout, len(stage.chunks), m)
        if key not in self.known.options:
            group = self.memory.engine.microbatch_group
            self.known.options[key] = np.array(options(layout.schedule, stage, layout.pp, m, group), dtype=float)
        return self.known.options[key]

    def _activations(self, stage: TrainStage, layout: Layout) -> Floats:
        """[3, N]: ``train_activations.activations`` by mode of recompute."""
        import numpy as np

        e, t, k, micro = self.memory.engine, self.saved, self.cuts, self.micro
        chunks = [self._chunk(c) for c in stage.chunks]
        layers, flying, most = self._flight(stage, layout, np.array([kept[:, k] for kept, _ in chunks]))
        if self.memory.work.offload == "activations":
            layers = layers - np.rint(layers * e.offload_fraction)
        extra = np.max([more for _, more in chunks], axis=0)
        head = t.head.T if stage.head else np.zeros((1, 1))
        together = e.reserved or bool(e.offload_modules)
        ends = (extra + head if together else np.maximum(extra, head)) + t.fixed
        if stage.layers:
            ends = ends + t.gradient[int(stage.head), :, self.memory.spec.patterns[stage.layers[-1]]]
        if stage.head:
            ends = ends + t.tail
        out = layers + ends[:, k]
        if layout.pp > 1:
            out += (flying + 2 * micro if e.receive_buffers else e.boundary_tensors) * t.edge[k]
        if stage.embedding and t.rows.any():
            out += most * t.rows[k]
        if stage.head and e.deferred_head:
            out += micro * t.joined[k] + np.minimum(e.deferred_head, micro) * t.logits[k]
        return np.asarray(out)

"""Entries of one optimizer step: forward and backward of every micro-batch, gradients, optimizer.

Micro-batches do the same, so by default an entry stands for all of them (``count``) and the order within the step is
forward before backward; ``each=True`` writes every micro-batch in the order of the pipeline schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from meshwright.errors import InputError
from meshwright.ledger.schema import Entry
from meshwright.moves.chunks import Chunk, model_chunks
from meshwright.moves.pipeline import Action, schedule
from meshwright.plan import data_parallel as data
from meshwright.plan.backward import backward_ops
from meshwright.plan.cores import Batch
from meshwright.plan.data_parallel import Unit
from meshwright.plan.forward import Emitter, embedding_ops, has_label, head_product
from meshwright.plan.layer_ops import Context, layer_ops
from meshwright.plan.products import Held, Kind, held
from meshwright.plan.wire import Op, collective, compute, hand_off, ways
from meshwright.specs.dtypes import DTYPE_BYTES
from meshwright.specs.layout import Layout
from meshwright.specs.placement import Coordinate, Placement, RankClass, Shard, chunk_places
from meshwright.specs.workload import Train

__all__ = ["chunk_places", "microbatches", "steps", "training_entries", "training_ops"]

#: Entries that ``each=True`` may write.
MAX_ENTRIES = 2_000_000


def microbatches(layout: Layout, train: Train) -> int:
    """Micro-batches m that one rank runs in a step: global batch / (dp x micro-batch).

    Raises:
        InputError: the division leaves a rest.
    """
    step = layout.dp * layout.micro_batch
    if train.global_batch % step:
        raise InputError(
            f"global batch {train.global_batch} is not divisible by dp {layout.dp} x micro-batch {layout.micro_batch}; "
            f"take a multiple of {step}"
        )
    return train.global_batch // step


def training_entries(placement: Placement, train: Train, *, each: bool = False) -> list[Entry]:
    """Every product, collective and hand-off of one step, for every rank class.

    Args:
        placement: model, layout and engine.
        train: sequence, batch, dtypes, recompute.
        each: one entry a micro-batch, in the order of the schedule; where it splits the backward, the weight
            gradients stand with the input gradients.

    Raises:
        InputError: the batch does not divide, or ``each`` asks for what the schedule cannot do or too many entries.
    """
    entries: list[Entry] = []
    for step in steps(placement, train, each):
        step.run(Emitter(step.rank_class.name, "forward", entries))
        if len(entries) > MAX_ENTRIES:
            m = microbatches(placement.layout, train)
            raise InputError(f"{m} micro-batches one by one make over {MAX_ENTRIES} entries; fold them (each=False)")
    return entries


def training_ops(placement: Placement, train: Train) -> Iterator[tuple[RankClass, list[tuple[Sequence[Op], int]]]]:
    """The same work as ``training_entries`` without the entries: for every rank class lists of ops and how often.

    Raises:
        InputError: the batch does not divide.
    """
    for step in steps(placement, train, each=False):
        counted = Counted(step.rank_class.name, "forward", [])
        step.run(counted)
        yield step.rank_class, [(ops, times) for ops, times in counted.lists.values()]


def steps(placement: Placement, train: Train, each: bool) -> Iterator[_Step]:
    """The step of every rank class, to be run on an emitter."""
    layout = placement.layout
    m = microbatches(layout, train)
    context = Context(
        layout,
        placement.cuts.grid,
        ways(placement.profile),
        placement.spec.hidden,
        train.param_dtype,
        train.param_dtype,
        Batch("forward", layout.micro_batch, train.seq),
        weight_dtype=train.param_dtype,
        marks=True,
    )
    chunks = model_chunks(placement)
    everywhere = _Everywhere(placement)
    backward: dict[int, list[Op]] = {}
    for rank_class in placement.classes:
        own = everywhere.of(rank_class.coordinate)
        yield _Step(placement, train, context, m, rank_class, chunks, own, backward, each)


@dataclass(slots=True)
class Counted(Emitter):
    """Counts lists of ops instead of writing entries; equal layers hand in one list again and again."""

    lists: dict[int, tuple[Sequence[Op], int]] = field(default_factory=dict)

    def emit(
        self,
        ops: Sequence[Op],
        layer: int | None = None,
        *,
        phase: str | None = None,
        microbatch: int | None = None,
        times: int = 1,
    ) -> None:
        """Remember the list (so that its id stays its own) and count it."""
        before = self.lists.get(id(ops), (ops, 0))[1]
        self.lists[id(ops)] = (ops, before + times)


class _Everywhere:
    """What a rank multiplies when its chunks lie on layers that the placement puts on other stages."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.folded = placement.layout.schedule in {"zbv", "dualpipev"} and placement.layout.pp > 1
        self.kinds: dict[object, Kind] = {}
        self.known: dict[Coordinate, Held] = {}

    def _held(self, at: Coordinate) -> Held:
        if at not in self.known:
            self.known[at] = held(self.placement, at, self.kinds)
        return self.known[at]

    def of(self, at: Coordinate) -> Held:
        """Kinds of all layers that the rank may run, and the ends of the model that it holds."""
        if self.placement.layout.virtual == 1 and not self.folded:
            return self._held(at)
        stages = [
            self._held(Coordinate(at.dp, stage, at.cp, at.tp, at.ep)) for stage in range(self.placement.layout.pp)
        ]
        kinds = {layer: kind for there in stages for layer, kind in there.kinds.items()}
        if not self.folded:
            return Held(kinds, stages[at.pp].ends)
        if at.pp:
            return Held(kinds, ())
        first = stages[0].ends
        return Held(kinds, (*first, *(s for s in stages[-1].ends if s.family not in {f.family for f in first})))


def loss_ops(placement: Placement, c: Context, ends: Sequence[Shard]) -> list[Op]:
    """Final norm, head on every token, and the loss over a cut vocabulary.

    Three sums of one number a token over tp (maximum, target logit, sum of exponentials), as Megatron-LM's
    ``vocab_parallel_cross_entropy`` does.
    """
    norms = [s for s in ends if s.family.role == "norm" and s.family.part == "weight"]
    ops = [c.norm("final norm", s.shape[0]) for s in norms]
    p = head_product(placement, ends)
    if p is None:
        return ops
    cut = p.n < placement.spec.vocab
    ops += c.enter("head input", cut)
    ops.append(c.product(p, c.tokens))
    moved = c.tokens * p.n * (DTYPE_BYTES[c.dtype] + 4)
    ops.append(compute("loss", "cross entropy", ((c.tokens, p.n),), "f32", moved, 0))
    if cut:
        for name in ("maximum", "target logit", "sum of exponentials"):
            ops += collective("all_reduce", f"loss {name}", "tp", c.layout.tp, (c.tokens,), "f32")
    return ops


@dataclass(slots=True)
class _Step:
    """Writes the step of one rank class."""

    placement: Placement
    train: Train
    c: Context
    m: int
    rank_class: RankClass
    chunks: list[list[Chunk]]
    held: Held
    backward: dict[int, list[Op]]
    each: bool

    def run(self, out: Emitter) -> None:
        """Micro-batches, then what comes once a step."""
        own = self.chunks[self.rank_class.coordinate.pp]
        if self.each:
            by_place = {chunk.place: chunk for chunk in own}
            for action in self._actions():
                if action.kind != "W":
                    self._chunk(out, by_place[action.chunk], action.kind == "F", action.microbatch, 1)
        else:
            for chunk in own:
                self._chunk(out, chunk, True, None, self.m)
            for chunk in reversed(own):
                self._chunk(out, chunk, False, None, self.m)
        self._once(out, own)

    def _actions(self) -> tuple[Action, ...]:
        layout = self.placement.layout
        name = layout.schedule
        if layout.pp == 1 and layout.virtual == 1:
            name = "1f1b"
        elif layout.virtual > 1 and name == "1f1b":
            name = "interleaved"
        return schedule(name, layout.pp, self.m, layout.virtual).actions[self.rank_class.coordinate.pp]

    @property
    def both(self) -> tuple[data.Group, data.Group]:
        return data.groups(self.placement.layout, self.placement.cuts.grid.replicas)

    def _unit(self, layer: int) -> Unit:
        return Unit("layer", *self.held.kinds[layer].parameters)

    def _root(self, chunk: Chunk) -> Unit:
        """Embedding, final norm, head of the chunk's ends."""
        own = self.chunks[self.rank_class.coordinate.pp]
        copy = self.placement.spec.tied and not any(other.first for other in own)
        embeds = chunk.first or (chunk.last and copy)
        ends = [s for s in self.held.ends if (embeds if s.family.role == "embedding" else chunk.last)]
        numel = 0
        for shard in ends:
            size = shard.family.elements
            for extent in shard.shape:
                size *= extent
            numel += size
        return Unit("root", numel, 0)

    def _chunk(self, out: Emitter, chunk: Chunk, forward: bool, microbatch: int | None, times: int) -> None:
        phase = "forward" if forward else "backward"
        for ops, layer, repeats in self._forward(chunk, microbatch) if forward else self._backward(chunk, microbatch):
            out.emit(ops, layer, phase=phase, microbatch=microbatch, times=times if repeats else 1)

    def _pipeline(self, op: str, peer: int | None, name: str) -> list[Op]:
        return [] if peer is None else [hand_off(op, name, "pp", peer, self.c.hidden_shape, self.c.dtype)]

    def _gathers(self, microbatch: int | None) -> tuple[bool, bool]:
        """Whether FSDP gathers now, and whether it does so for every micro-batch."""
        layout = self.placement.layout
        if layout.zero != 3:
            return False, False
        once = layout.pp > 1
        return not once or microbatch in {None, 0}, not once

    def _forward(self, chunk: Chunk, microbatch: int | None) -> Iterator[tuple[list[Op], int | None, bool]]:
        c, layout = self.c, self.placement.layout
        now, always = self._gathers(microbatch)
        dtype = data.knobs(layout).param_dtype
        yield self._pipeline("recv", chunk.before, "activations"), None, True
        units = [self._unit(layer) for layer in chunk.layers]
        if now:
            root = self._root(chunk)
            whole = data.knobs(layout).wrap == "model"
            yield data.gather(data.merged("model", [root, *units]) if whole else root, self.both, dtype), None, always
        if chunk.first:
            yield embedding_ops(c, self.held.ends), None, True
        for unit, layer in zip(units, chunk.layers, strict=True):
            if now and data.knobs(layout).wrap == "layer":
                yield data.gather(unit, self.both, dtype), layer, always
            yield layer_ops(c, self.held.kinds[layer]), layer, True
        if chunk.last:
            yield self._loss(), None, True
        yield self._pipeline("send", chunk.behind, "activations"), None, True

    def _backward(self, chunk: Chunk, microbatch: int | None) -> Iterator[tuple[list[Op], int | None, bool]]:
        c, layout, train = self.c, self.placement.layout, self.train
        knobs = data.knobs(layout)
        fsdp = layout.zero == 3 and layout.pp == 1
        per_layer = fsdp and knobs.wrap == "layer"
        yield self._pipeline("recv", chunk.behind, "gradients"), None, True
        if chunk.last:
            yield backward_ops(c, self._loss(), train.attention, train.grad_dtype), None, True
        for number, layer in reversed(list(enumerate(chunk.layers))):
            if per_layer and knobs.reshard_after_forward:
                yield data.gather(self._unit(layer), self.both, knobs.param_dtype), layer, True
            kind = self.held.kinds[layer]
            yield self._recompute(kind, number), layer, True
            if id(kind) not in self.backward:
                forward = layer_ops(c, kind)
                self.backward[id(kind)] = backward_ops(c, forward, train.attention, train.grad_dtype)
            yield self.backward[id(kind)], layer, True
            if per_layer:
                yield data.scatter(self._unit(layer), self.both, knobs.reduce_dtype), layer, True
        if chunk.first:
            yield backward_ops(c, embedding_ops(c, self.held.ends), train.attention, train.grad_dtype), None, True
        root = self._root(chunk)
        if fsdp:
            whole = data.merged("model", [root, *(self._unit(layer) for layer in chunk.layers)])
            yield data.scatter(root if per_layer else whole, self.both, knobs.reduce_dtype), None, True
        if layout.zero == 2:
            whole = data.merged("all", [root, *(self._unit(layer) for layer in chunk.layers)])
            yield data.scatter(whole, self.both, train.grad_dtype), None, True
        yield self._pipeline("send", chunk.before, "gradients"), None, True

    def _recompute(self, kind: Kind, number: int) -> list[Op]:
        """Forward ops that run again: the attention core (selective) or the layer (full)."""
        train = self.train
        if train.recompute == "none":
            return []
        ops = [op for op in layer_ops(self.c, kind) if op.op != "mark"]
        if train.recompute == "selective":
            ops = [op for op in ops if op.op == "attention"]
        elif train.recompute_layers is not None and number >= train.recompute_layers:
            return []
        return [op._replace(name=f"recompute {op.name}") for op in ops]

    def _loss(self) -> list[Op]:
        return loss_ops(self.placement, self.c, self.held.ends)

    def _once(self, out: Emitter, own: list[Chunk]) -> None:
        """Gradients, clip norm, optimizer, and the gather of what the optimizer updated."""
        layout, train, both = self.placement.layout, self.train, self.both
        units = [self._root(chunk) for chunk in own]
        units += [self._unit(layer) for chunk in own for layer in chunk.layers]
        whole = data.merged("all", units)
        ops = self._tied(own) + self._norm_gradients(own)
        if layout.zero == 0:
            ops += data.reduce(whole, both, train.grad_dtype)
        elif layout.zero == 1:
            ops += data.scatter(whole, both, train.grad_dtype)
        elif layout.zero == 3 and layout.pp > 1:
            ops += data.scatter(whole, both, data.knobs(layout).reduce_dtype)
        out.emit(ops, phase="backward")
        last = collective("all_reduce", "gradient norm", "world", layout.world, (1,), "f32")
        last.append(data.optimizer_op(whole, both, layout, train))
        if layout.zero in {1, 2}:
            last += data.gather(whole, both, train.param_dtype)
        out.emit(last, phase="optimizer")

    def _tied(self, own: list[Chunk]) -> list[Op]:
        """Sum of the two copies' gradients where first and last stage share the embedding."""
        alone = any(c.first for c in own) != any(c.last for c in own)
        if not self.placement.spec.tied or not alone:
            return []
        table = next((s for s in self.held.ends if s.family.role == "embedding" and has_label(s, "vocab")), None)
        if table is None:
            return []
        return collective("all_reduce", "tied embedding", "pp", 2, table.shape, self.train.grad_dtype)

    def _norm_gradients(self, own: list[Chunk]) -> list[Op]:
        """With sequence parallelism each tp rank sees part of the tokens, so norm gradients are summed over tp."""
        if not self.c.sp:
            return []
        numel = sum(sum(self.held.kinds[layer].norms) for chunk in own for layer in chunk.layers)
        numel += sum(s.shape[0] for s in self.held.ends if s.family.role == "norm") if any(c.last for c in own) else 0
        return collective("all_reduce", "norm gradients", "tp", self.c.layout.tp, (numel,), self.train.grad_dtype)

"""Every product, collective and hand-off of one optimizer step of our own trainer, for one rank, in program order.

The micro-batches run in the order of the schedule's table (``moves.pipeline``); what comes once a step is in
``plan.executed.reduction``. ``plan.training_step`` folds the same work for the costs of a search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshwright.ledger.schema import Entry
from meshwright.moves.chunks import Chunk, model_chunks
from meshwright.moves.expert import Exchange
from meshwright.moves.pipeline import Action, HandOff, Table, schedule
from meshwright.moves.program import program
from meshwright.plan.cores import Batch
from meshwright.plan.executed.backward import backward
from meshwright.plan.executed.loss import loss_ops
from meshwright.plan.executed.reduction import Reduction, named
from meshwright.plan.executed.sharded import Placed, Sharded
from meshwright.plan.forward import Emitter, embedding_ops
from meshwright.plan.layer_ops import Context, layer_ops
from meshwright.plan.moe_ops import routing
from meshwright.plan.products import Held, Kind, held
from meshwright.plan.training_step import microbatches
from meshwright.plan.wire import Op, collective, hand_off, ways
from meshwright.specs.layout import Layout
from meshwright.specs.placement import Coordinate, Placement
from meshwright.specs.workload import Train

#: For a micro-batch and a layer with experts: the rows that a rank sends to them and gets for its own.
Moved = Callable[[int, int], Exchange]


def table(layout: Layout, microbatches: int) -> Table:
    """The schedule of a layout."""
    name = layout.schedule
    if layout.pp == 1 and layout.virtual == 1:
        name = "1f1b"
    elif layout.virtual > 1 and name == "1f1b":
        name = "interleaved"
    return schedule(name, layout.pp, microbatches, layout.virtual)


def training_context(placement: Placement, train: Train) -> Context:
    """What the layers of one micro-batch share: whole sequences, dealt over cp as prompts are."""
    return Context(
        placement.layout,
        placement.cuts.grid,
        ways(placement.profile),
        placement.spec.hidden,
        train.param_dtype,
        train.param_dtype,
        Batch("prefill", placement.layout.micro_batch, train.seq),
        weight_dtype=train.param_dtype,
        marks=True,
    )


@dataclass(slots=True)
class Pass:
    """What every micro-batch of a rank does.

    Args:
        placement, train: of the step. at: the rank's coordinate. moved: rows to experts, where there are any.
    """

    placement: Placement
    train: Train
    at: Coordinate
    moved: Moved | None = None
    c: Context = field(init=False)
    held: Held = field(init=False)
    chunks: dict[int, Chunk] = field(init=False)
    reduction: Reduction = field(init=False)
    sharded: dict[int, Sharded] = field(init=False)

    def __post_init__(self) -> None:
        kinds: dict[object, Kind] = {}
        self.c = training_context(self.placement, self.train)
        self.held = held(self.placement, self.at, kinds)
        self.chunks = {chunk.place: chunk for chunk in model_chunks(self.placement)[self.at.pp]}
        self.reduction = Reduction(self.placement, self.train, self.at)
        dealt = self.chunks.values() if self.placement.layout.zero == 3 else ()
        self.sharded = {chunk.place: Sharded(self.reduction, chunk) for chunk in dealt}

    def run(self, out: Emitter) -> None:
        """The whole step."""
        axis, ranks = named(self.placement, self.at, "dp+cp")
        out.emit(collective("all_reduce", "token count", axis, ranks, (1,), "i64"), phase="forward")
        schedule = table(self.placement.layout, microbatches(self.placement.layout, self.train))
        actions = schedule.actions[self.at.pp]
        last = {a.chunk: a for a in actions if a.kind in "BW"}
        for instruction in program(schedule, self.at.pp):
            if isinstance(instruction, HandOff):
                self._hand_off(out, instruction)
            elif instruction.kind == "F":
                self._forward(out, self.chunks[instruction.chunk], instruction.microbatch)
            else:
                self._backward(out, instruction, last[instruction.chunk] == instruction)
        for sharded in self.sharded.values():
            self._placed(out, sharded.at_the_end(), "backward", None)
        out.emit(self.reduction.finish(), phase="backward")
        out.emit(self.reduction.update(), phase="optimizer")

    def _hand_off(self, out: Emitter, off: HandOff) -> None:
        name, phase = ("activations", "forward") if off.kind == "F" else ("gradients", "backward")
        op = hand_off(off.op, name, "pp", off.peer, self.c.hidden_shape, self.c.dtype)
        out.emit([op], phase=phase, microbatch=off.microbatch)

    def _forward(self, out: Emitter, chunk: Chunk, n: int) -> None:
        sharded = self.sharded.get(chunk.place)
        if sharded is not None:
            self._placed(out, sharded.forward(None, n), "forward", n)
        for layer, ops in self._parts(chunk, n):
            if sharded is not None and layer is not None:
                self._placed(out, sharded.forward(layer, n), "forward", n)
            out.emit(ops, layer, phase="forward", microbatch=n)

    def _placed(self, out: Emitter, placed: Sequence[Placed], phase: str, n: int | None) -> None:
        for layer, ops in placed:
            out.emit(ops, layer, phase=phase, microbatch=n)

    def _parts(self, chunk: Chunk, n: int) -> list[tuple[int | None, list[Op]]]:
        """Forward ops of a chunk: embedding, layers, loss."""
        parts: list[tuple[int | None, list[Op]]] = []
        if chunk.first:
            parts.append((None, embedding_ops(self.c, self.held.ends)))
        parts += [(layer, self._layer(n, layer)) for layer in chunk.layers]
        if chunk.last:
            parts.append((None, loss_ops(self.placement, self.c, self.held.ends)))
        return parts

    def _backward(self, out: Emitter, action: Action, final: bool) -> None:
        """A whole backward or a half of it; ``final``: nothing adds to the chunk's gradients any more in this step."""
        kind, place, n = action
        chunk = self.chunks[place]
        reduces = kind != "I" and (final or self.reduction.zero == 2)
        unit = 0 if chunk.last else 1
        sharded = self.sharded.get(place) if kind == "B" else None
        if sharded is not None:
            self._placed(out, sharded.backward(None), "backward", n)
        for layer, forward in reversed(self._parts(chunk, n)):
            if sharded is not None and layer is not None:
                self._placed(out, sharded.backward(layer), "backward", n)
            ends = backward(self.c, forward, self._exchange(n, layer))
            if kind != "W":
                inputs = self._with_again(ends.inputs, forward, chunk, layer)
                out.emit(inputs, layer, phase="backward", microbatch=n)
            if kind != "I":
                out.emit(ends.weights, layer, phase="backward", microbatch=n)
            if sharded is not None and layer is not None:
                self._placed(out, sharded.reduced(layer), "backward", n)
            if reduces and kind == "B":
                out.emit(self.reduction.reduced(place, unit), phase="backward")
                unit += 1
        if sharded is not None:
            self._placed(out, sharded.reduced(None), "backward", n)
        for rest in range(unit if kind == "B" else 0, len(chunk.layers) + 2) if reduces else ():
            out.emit(self.reduction.reduced(place, rest), phase="backward")

    def _layer(self, n: int, layer: int) -> list[Op]:
        ops = layer_ops(self.c, self.held.kinds[layer], self._exchange(n, layer))
        if self.moved is None or self.held.kinds[layer].layer.moe is None:
            return ops
        return [each for op in ops for each in (op, *(self._shares(layer) if op.name == "router" else ()))]

    def _shares(self, layer: int) -> list[Op]:
        """Sums of the balancing loss behind a router: choices of every expert, over all that route this micro-batch."""
        m = self.held.kinds[layer].layer.moe
        assert m is not None
        ops: list[Op] = []
        for axis in ("dp+cp", "tp") if routing(self.c).sliced else ("dp+cp",):
            name, n = named(self.placement, self.at, axis)
            ops += collective("all_reduce", "expert shares", name, n, (m.experts,), "f32")
        return ops

    def _exchange(self, n: int, layer: int | None) -> Exchange | None:
        sparse = layer is not None and self.held.kinds[layer].layer.moe is not None
        return self.moved(n, layer) if layer is not None and sparse and self.moved is not None else None

    def _with_again(self, inputs: Sequence[Op], forward: Sequence[Op], chunk: Chunk, layer: int | None) -> Sequence[Op]:
        """Input gradients with the forward ops that run again: all of a layer where it keeps only its input.

        They run when a kept tensor is asked for first: the gradient of a last sum over tp asks for none.
        """
        train = self.train
        if layer is None or train.recompute != "full":
            return inputs
        if train.recompute_layers is not None and chunk.layers.index(layer) >= train.recompute_layers:
            return inputs
        ahead = int(forward[-1].group == "tp" and self.c.sp)
        again = [op._replace(name=f"recompute {op.name}") for op in forward if op.op != "mark"]
        return [*inputs[:ahead], *again, *inputs[ahead:]]


def step_of(placement: Placement, train: Train, rank: int, moved: Moved | None = None) -> Pass:
    """The step of a rank."""
    return Pass(placement, train, placement.coordinate(rank), moved)


def step_entries(placement: Placement, train: Train, rank: int, moved: Moved | None = None) -> list[Entry]:
    """Entries of one optimizer step on one rank, as rank class ``rank{n}``.

    Raises:
        InputError: the batch does not divide, or the schedule cannot do as many micro-batches.
    """
    entries: list[Entry] = []
    step_of(placement, train, rank, moved).run(Emitter(f"rank{rank}", "forward", entries))
    return entries

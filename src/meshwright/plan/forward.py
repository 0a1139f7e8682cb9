"""Entries of one forward (prefill or decode) of a serving layout, counted for every class of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshwright.errors import InputError
from meshwright.ledger.schema import Entry
from meshwright.moves.expert import Exchange
from meshwright.plan.cores import Batch
from meshwright.plan.layer_ops import Context, layer_ops
from meshwright.plan.moe_ops import routing, visit_ops
from meshwright.plan.products import Held, Kind, Product, held, products_of
from meshwright.plan.wire import Op, collective, compute, hand_off, parts, ways
from meshwright.specs.dtypes import DTYPE_BYTES, canonical
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import Placement, RankClass, Shard
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve


@dataclass(slots=True)
class Emitter:
    """Turns ops into entries of one rank class, numbering every stream."""

    rank_class: str
    phase: str
    entries: list[Entry]
    seq: dict[str, int] = field(default_factory=dict)

    def emit(
        self,
        ops: Sequence[Op],
        layer: int | None = None,
        *,
        phase: str | None = None,
        microbatch: int | None = None,
        times: int = 1,
    ) -> None:
        """Append the ops; ``times``: repetitions in a row (micro-batches folded into ``count``)."""
        seq, add, name, phase = self.seq, self.entries.append, self.rank_class, phase or self.phase
        for op in ops:
            if op.op == "mark":
                continue
            number = seq.get(op.stream, 0)
            seq[op.stream] = number + 1
            entry = Entry(name, op.op, 0, microbatch, layer, phase, op.stream, op.group, number, op.name, op.peer)
            entry.shapes, entry.dtype, entry.flops = op.shapes, op.dtype, op.flops
            entry.splits = op.splits
            entry.payload_bytes, entry.wire_bytes, entry.count = op.payload, op.wire, op.repeats * times
            entry.state, entry.source = "predicted", "predict"
            add(entry)


def compute_dtype(spec: ModelSpec, settings: ServeSettings) -> str:
    """Element type of activations."""
    return canonical(settings.dtype) if settings.dtype not in {None, "auto"} else spec.dtype


def kv_dtype(spec: ModelSpec, settings: ServeSettings) -> str:
    """Element type of the cache: as set, else as the checkpoint asks for, else that of the activations."""
    if settings.kv_dtype != "auto":
        return canonical(settings.kv_dtype)
    asked = spec.quantization.kv_dtype if spec.quantization is not None else None
    return canonical(asked) if asked else compute_dtype(spec, settings)


def serve_batch(workload: Serve, phase: str, layout: Layout, settings: ServeSettings | None = None) -> Batch:
    """The batch that one data-parallel replica runs.

    ``prefill``: one whole prompt. ``decode``: the replica's share of the requests in flight (1 when the workload
    names none), at most ``max_num_seqs``, each in the middle of its output.

    Raises:
        InputError: another phase.
    """
    if phase == "prefill":
        return Batch("prefill", 1, workload.isl)
    if phase != "decode":
        raise InputError(f"phase {phase[:20]!r} is neither prefill nor decode")
    sequences = parts(workload.concurrency or 1, layout.dp)
    if settings is not None and settings.max_num_seqs is not None:
        sequences = min(sequences, settings.max_num_seqs)
    return Batch("decode", sequences, 1, workload.isl + workload.osl // 2)


def serving_context(placement: Placement, batch: Batch, settings: ServeSettings) -> Context:
    """What the layers of one serving forward share."""
    spec = placement.spec
    return Context(
        placement.layout,
        placement.cuts.grid,
        ways(placement.profile),
        spec.hidden,
        compute_dtype(spec, settings),
        kv_dtype(spec, settings),
        batch,
    )


def forward_entries(placement: Placement, batch: Batch, settings: ServeSettings | None = None) -> list[Entry]:
    """Every product, collective and hand-off of one forward, for every rank class of the placement.

    Args:
        placement: model, layout and engine.
        batch: tokens of one data-parallel replica (see ``serve_batch``); all replicas run the same.
        settings: dtypes; None for the model's own.

    The order of entries is program order; ``seq`` counts within (rank class, stream). A stream is ``compute`` or
    the axis of the group.
    """
    settings = settings or ServeSettings()
    context = serving_context(placement, batch, settings)
    entries: list[Entry] = []
    kinds: dict[object, Kind] = {}
    for rank_class in placement.classes:
        _rank_forward(placement, context, rank_class, held(placement, rank_class.coordinate, kinds), entries)
    return entries


def rank_entries(
    placement: Placement,
    rank: int,
    batch: Batch,
    settings: ServeSettings,
    moved: Callable[[int], Exchange],
    kinds: dict[object, Kind],
) -> list[Entry]:
    """``forward_entries`` of one rank alone (its rank class is ``rank{n}``), where a routing is known.

    Args:
        rank: global rank. batch: of its replica; one without tokens only serves experts.
        moved: for every layer with experts the rows that this rank sends to them and gets for its own.
        kinds: kept from call to call (``held``).
    """
    at = placement.coordinate(rank)
    context = serving_context(placement, batch, settings)
    own = held(placement, at, kinds)
    alone = RankClass(f"rank{rank}", at, rank, 1)
    entries: list[Entry] = []
    if batch.tokens:
        _rank_forward(placement, context, alone, own, entries, moved)
        return entries
    out = Emitter(alone.name, batch.phase, entries)
    for layer, kind in own.kinds.items():
        if kind.layer.moe is not None and routing(context).feeders > 1:
            out.emit(visit_ops(context, kind, moved(layer)), layer)
    return entries


def _rank_forward(
    placement: Placement,
    c: Context,
    rank_class: RankClass,
    own: Held,
    entries: list[Entry],
    moved: Callable[[int], Exchange] | None = None,
) -> None:
    stage = placement.stages[rank_class.coordinate.pp]
    last = len(placement.stages) - 1
    out = Emitter(rank_class.name, c.batch.phase, entries)
    out.emit(embedding_ops(c, own.ends) if stage.index == 0 else stage_hand_off(c, "recv", stage.index - 1))
    for layer, kind in own.kinds.items():
        rows = moved(layer) if moved is not None and kind.layer.moe is not None else None
        out.emit(layer_ops(c, kind, rows), layer)
    sampled = c.batch.sequences if c.batch.sampled is None else c.batch.sampled
    if stage.index == last:
        out.emit(head_ops(placement, c, own.ends, sampled) if sampled else ())
    else:
        out.emit(stage_hand_off(c, "send", stage.index + 1))


def embedding_ops(c: Context, ends: Sequence[Shard]) -> list[Op]:
    """Look-up of T rows; cut over the vocabulary each rank finds some and the sum over tp completes them."""
    table = next((s for s in ends if s.family.role == "embedding" and has_label(s, "vocab")), None)
    shape = (c.tokens, c.hidden)
    moved = 2 * c.tokens * c.hidden * DTYPE_BYTES[c.dtype]
    ops = [compute("embedding", "embedding", (shape,), c.dtype, moved, 0)]
    return ops + c.leave("embedding", table is not None and table.shape[0] < table.family.shape[0])


def has_label(shard: Shard, label: str) -> bool:
    """Whether some dimension of the shard is counted in units of ``label``."""
    return any(s.label == label for dim in shard.family.dims for s in dim)


def stage_hand_off(c: Context, op: str, peer: int) -> list[Op]:
    """Hidden states to the next pipeline stage, or from the one before."""
    shape, tp = c.hidden_shape, c.layout.tp
    sliced = c.ways.pp_slices and tp > 1 and not c.sp and shape[0] * shape[1] % tp == 0
    ops: list[Op] = []
    names = ("hidden states", "residual")
    for number in range(c.ways.pp_tensors):
        name = names[number] if number < len(names) else f"tensor {number}"
        piece = (shape[0] * shape[1] // tp,) if sliced else shape
        ops.append(hand_off(op, name, "pp", peer, piece, c.dtype))
        if sliced and op == "recv":
            ops += collective("all_gather", f"{name} pieces", "tp", tp, piece, c.dtype)
    return ops


def head_product(placement: Placement, ends: Sequence[Shard]) -> Product | None:
    """The product with the head, which a tied model takes from the embedding."""
    spec = placement.spec
    heads = [s for s in ends if s.family.role == "head"]
    if any(s.family.part == "weight" for s in heads):
        return next((p for p in products_of(heads, placement)), None)
    table = next((s for s in ends if s.family.role == "embedding" and has_label(s, "vocab")), None)
    if table is None:
        return None
    rows, cut = table.shape[0], table.shape[0] < table.family.shape[0]
    size = rows * spec.hidden * DTYPE_BYTES[table.family.dtype]
    return Product("head", "head", spec.hidden, rows, 0, size, table.family.dtype, cut)


def head_ops(placement: Placement, c: Context, ends: Sequence[Shard], sampled: int) -> list[Op]:
    """Final norm, head for the sampled positions only, and the logits from all tp ranks."""
    ops = [c.norm("final norm", s.shape[0]) for s in ends if s.family.role == "norm" and s.family.part == "weight"]
    p = head_product(placement, ends)
    if p is None:
        return ops
    if c.sp:
        ops += c.enter("head input")
    if c.dealt and c.batch.phase == "prefill":
        ops += collective("all_reduce", "sampled rows", "cp", c.layout.cp, (sampled, c.hidden), c.dtype)
    ops.append(c.product(p, sampled))
    if c.layout.tp > 1 and p.n < placement.spec.vocab:
        # Backends gather equal shapes: of a vocabulary dealt unevenly every piece travels as long as the longest.
        width = max(p.n, parts(placement.spec.vocab, c.layout.tp))
        ops += collective(c.ways.logits, "logits", "tp", c.layout.tp, (sampled, width), c.dtype)
    return ops

"""Gradients over the data ranks and over copies, and the end of a step, as our own trainer sends them.

The gradients of a chunk lie in flat buffers: its *units* (final norm and head, layers last to first, embedding) fill
buckets of about ``BUCKET_ELEMENTS``, each a dense flat and, where experts have other replicas, an expert flat.
Parameters whose copies saw other data, or of which another stage or chunk has a copy, lie in late flats of the rank,
one for each list of axes over which they are summed. ZeRO-0 sums every flat over the data ranks while the last backward
runs, ZeRO-1 scatters the sum, ZeRO-2 does so after every micro-batch. When all backwards are over, late flats follow,
and are then summed over their axes, each rank its part. Sharded parameters are gathered behind the update. Every flat
that is dealt out is padded to equal pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from meshwright.moves.buckets import fill, piece
from meshwright.moves.chunks import Chunk, model_chunks
from meshwright.plan.executed.parameters import Parameter, chunk_parameters
from meshwright.plan.wire import Op, collective
from meshwright.specs.placement import AXES, Coordinate, Placement
from meshwright.specs.workload import Train

#: Axes over which copies are summed, in this order.
LATE = ("kv", "tp", "etp", "pp_tied")


@dataclass(frozen=True, slots=True)
class Flat:
    """One flat buffer of gradients.

    Attributes:
        numel: elements without padding. ranks: data ranks that hold the same. axis: their name in a ledger.
        expert: of experts alone.
        sums: axes over which it is summed besides. late: it is reduced when all backwards are over.
        unit: its bucket closes with this unit of the chunk.
    """

    numel: int
    ranks: int
    axis: str
    expert: bool
    sums: tuple[str, ...] = ()
    late: bool = False
    unit: int = 0

    @property
    def piece(self) -> int:
        """Elements of the part that one rank keeps where it is dealt out."""
        return piece(self.numel, self.ranks)


def named(placement: Placement, at: Coordinate, axis: str) -> tuple[str, int]:
    """Name of a group in a ledger, and its size: that of the one axis whose ranks it has, ``world``, else its own."""
    ranks = group_ranks(placement, at, axis)
    if len(ranks) == 1:
        return axis, 1
    for name in AXES:
        if getattr(placement.layout, name) > 1 and placement.group(name, at) == ranks:
            return name, len(ranks)
    return axis if len(ranks) < placement.layout.world else "world", len(ranks)


def group_ranks(placement: Placement, at: Coordinate, axis: str) -> tuple[int, ...]:
    """Ranks of a group that training adds.

    ``world``; ``kv``: copies of a KV head; ``pp_tied``: both ends of the model; ``dp_shard``, ``dp_replicate`` (with cp
    ``dp+cp_``...): data ranks among which FSDP deals one copy out, and those that hold the same piece.
    """
    if axis == "world":
        return tuple(range(placement.layout.world))
    if axis.endswith(("_shard", "_replicate")):
        ranks, fsdp = placement.group("dp+cp", at), placement.layout.fsdp
        each = len(ranks) // (fsdp.replicas if fsdp is not None else 1)
        place = ranks.index(placement.rank(at))
        return ranks[place // each * each :][:each] if axis.endswith("_shard") else ranks[place % each :: each]
    if axis == "pp_tied":
        ends = [s.index for s in placement.stages if s.embedding]
        if not placement.spec.tied or len(ends) < 2 or at.pp not in ends:
            return (placement.rank(at),)
        flat = placement.flat(at)
        return tuple(placement.rank(placement.at(stage, flat)) for stage in ends)
    if axis != "kv":
        return placement.group(axis, at)
    ranks, tp = placement.group("tp", at), placement.layout.tp
    heads = min(a.kv_heads for layer in placement.spec.layers if (a := layer.attention))
    copies = max(1, tp // heads)
    first = at.tp // copies * copies
    return ranks[first : first + copies]


@dataclass(slots=True)
class Reduction:
    """Sums and updates of one rank.

    Attributes:
        flats: of every chunk by its place, in the order in which they are reduced. late: of the rank.
        dealt: parameters of every chunk that ZeRO-3 deals out (``plan.executed.sharded``).
    """

    placement: Placement
    train: Train
    at: Coordinate
    flats: dict[int, list[Flat]] = field(init=False)
    late: list[Flat] = field(init=False)
    dealt: dict[int, list[Parameter]] = field(init=False)

    def __post_init__(self) -> None:
        chunks = model_chunks(self.placement)[self.at.pp]
        every = chunk_parameters(self.placement, self.at, chunks)
        held = [[p for p in own if self._flat(p)] for own in every]
        self.dealt = {c.place: [p for p in own if not self._flat(p)] for c, own in zip(chunks, every, strict=True)}
        self.flats = {c.place: list(self._buckets(c, own)) for c, own in zip(chunks, held, strict=True)}
        apart = [p for own in held for p in own if self._late(p)]
        classes = sorted({self._sums(p) for p in apart}, key=lambda axes: [LATE.index(a) for a in axes])
        self.late = [
            flat for axes in classes for flat in self._by_group([p for p in apart if self._sums(p) == axes], axes, True)
        ]

    @property
    def zero(self) -> int:
        """ZeRO stage."""
        return self.placement.layout.zero

    @property
    def all_flats(self) -> list[Flat]:
        """Of all chunks, late ones last."""
        return [*(flat for flats in self.flats.values() for flat in flats), *self.late]

    def _sums(self, p: Parameter) -> tuple[str, ...]:
        """Axes over which the gradient of a parameter is summed."""
        table = p.layer is None and p.family.role == "embedding" and self.placement.spec.tied
        wanted = {p.axis, "pp_tied" if table else None}
        return tuple(a for a in LATE if a in wanted and len(group_ranks(self.placement, self.at, a)) > 1)

    def _late(self, p: Parameter) -> bool:
        return p.shared or bool(self._sums(p))

    def _flat(self, p: Parameter) -> bool:
        """Whether a parameter lies in a flat buffer: all but those that ZeRO-3 deals out one by one."""
        return self.zero < 3 or p.shared or self._alone(p)

    def _alone(self, p: Parameter) -> bool:
        """No other data rank holds it."""
        return len(group_ranks(self.placement, self.at, "edp" if p.expert else "dp+cp")) == 1

    def _buckets(self, chunk: Chunk, own: Sequence[Parameter]) -> Iterator[Flat]:
        units = [(n, held) for n, held in enumerate(_units(chunk, [p for p in own if not self._late(p)])) if held]
        for first, stop in fill([sum(p.numel for p in held) for _, held in units]):
            inside = [p for _, held in units[first:stop] for p in held]
            yield from self._by_group(inside, (), False, units[stop - 1][0])

    def _by_group(self, held: Sequence[Parameter], sums: tuple[str, ...], late: bool, unit: int = 0) -> Iterator[Flat]:
        """One flat for each group of data ranks: dense parameters, then experts whose replicas are others."""
        dense, experts = (group_ranks(self.placement, self.at, axis) for axis in ("dp+cp", "edp"))
        for expert in (False, True) if dense != experts else (False,):
            inside = [p for p in held if p.expert == expert or dense == experts]
            if inside:
                axis, ranks = named(self.placement, self.at, "edp" if expert else "dp+cp")
                only = all(p.expert for p in inside)
                yield Flat(sum(p.numel for p in inside), ranks, axis, only, sums, late, unit)

    def reduced(self, place: int, unit: int) -> list[Op]:
        """Over the data ranks: the flats of a chunk whose bucket closes with a unit."""
        return [op for flat in self.flats[place] if flat.unit == unit for op in self._reduce(flat)]

    def scattered(self, flat: Flat) -> bool:
        """Whether a flat is dealt out; of those that ZeRO-3 leaves only late ones are."""
        return self.zero in {1, 2} or (self.zero == 3 and flat.late)

    def _reduce(self, flat: Flat) -> list[Op]:
        name = ("replicated " if flat.sums else "") + ("expert gradients" if flat.expert else "gradients")
        op, numel = ("reduce_scatter", flat.ranks * flat.piece) if self.scattered(flat) else ("all_reduce", flat.numel)
        return collective(op, name, flat.axis, flat.ranks, (numel,), self.train.grad_dtype)

    def finish(self) -> list[Op]:
        """Late flats over the data ranks, then what the rank keeps of each over its axes."""
        ops = [op for flat in self.late for op in self._reduce(flat)]
        for flat in self.late:
            kept = flat.piece if self.scattered(flat) else flat.numel
            for axis in flat.sums:
                name, n = named(self.placement, self.at, axis)
                ops += collective("all_reduce", f"{axis} sums", name, n, (kept,), self.train.grad_dtype)
        return ops + self._dealt_sums()

    def _dealt_sums(self) -> list[Op]:
        """Sums over copies of what ZeRO-3 dealt out: the rank's rows of all such parameters, one flat for each axes."""
        every = [p for own in self.dealt.values() for p in own]
        ops: list[Op] = []
        classes = {self._sums(p) for p in every if self._sums(p)}
        for axes in sorted(classes, key=lambda axes: [LATE.index(a) for a in axes]):
            numel = sum(self.local(p) for p in every if self._sums(p) == axes)
            for axis in axes:
                name, n = named(self.placement, self.at, axis)
                ops += collective("all_reduce", f"{axis} sums", name, n, (numel,), self.train.grad_dtype)
        return ops

    def shard_axis(self, p: Parameter) -> str:
        """Group among which a parameter is dealt out by ZeRO-3."""
        layout = self.placement.layout
        dense, experts = (group_ranks(self.placement, self.at, axis) for axis in ("dp+cp", "edp"))
        if p.expert and dense != experts:
            return "edp"
        copies = layout.fsdp.replicas if layout.fsdp is not None else 1
        return "dp+cp" if copies == 1 else "dp+cp_shard" if layout.cp > 1 else "dp_shard"

    def rows(self, p: Parameter) -> tuple[int, int]:
        """Elements of a parameter that this rank keeps, and with the padding to equal rows."""
        ranks = group_ranks(self.placement, self.at, self.shard_axis(p))
        count, rest = p.shape[0], p.numel // p.shape[0]
        each = piece(count, len(ranks))
        first = min(count, ranks.index(self.placement.rank(self.at)) * each)
        return (min(count, first + each) - first) * rest, each * rest

    def local(self, p: Parameter) -> int:
        """Elements that this rank keeps."""
        return self.rows(p)[0]

    def update(self) -> list[Op]:
        """Norm for clipping, updated parameters from where they are kept, the loss that is told."""
        world, n = named(self.placement, self.at, "world")
        ops = collective("all_reduce", "gradient norm", world, n, (1,), "f64")
        for flat in reversed(self.all_flats):
            if self.scattered(flat):
                dtype = self.train.param_dtype
                ops += collective("all_gather", "parameters", flat.axis, flat.ranks, (flat.piece,), dtype)
        return ops + collective("all_reduce", "loss", world, n, (1,), "f64")


def _units(chunk: Chunk, parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """Parameters in the order in which their gradients are ready: end of the model, layers backward, embedding."""
    end = [p for p in parameters if p.layer is None and p.family.role != "embedding"]
    table = [p for p in parameters if p.layer is None and p.family.role == "embedding"]
    layers = [[p for p in parameters if p.layer == layer] for layer in reversed(chunk.layers)]
    return [end, *layers, table]

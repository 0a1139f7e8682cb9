"""Which keys and values go from which prefill rank to which decode rank. Pure planning: no tensors, no processes.

Both sides are described by what their ranks hold in absolute numbers: layers, KV heads of the whole model, positions
of the sequence. So any two layouts meet: other tp and pp, uneven stages and heads, fewer KV heads than ranks of tp on
either side (a head that several ranks hold is sent by one of them to each rank that needs it), tokens dealt over cp::

    prefill tp=2          decode tp=4                 messages of one layer, 4 KV heads
    rank 0: heads 0 1     rank 0: head 0   rank 2     0 -> 0 (head 0)   1 -> 2 (head 2)
    rank 1: heads 2 3     rank 1: head 1   rank 3     0 -> 1 (head 1)   1 -> 3 (head 3)

A message is what one rank sends to one other of one layer, in the order of layers, so that a layer can leave while the
next is computed. On the wire it is ``(tokens, heads, key width + value width)`` whatever the pages of both sides look
like; ``copies`` says where its tokens lie in the blocks of a side. Latent attention counts as one head that all ranks
of tp hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.errors import InputError
from meshwright.moves.context import NOWHERE, Piece, keys
from meshwright.specs.placement import Placement

#: Axes of a page pool in any order: block, key or value, token of the block, head.
PAGE_AXES = ("block", "half", "token", "head")


class Heads(NamedTuple):
    """KV heads ``low`` to ``high`` (absolute, half-open)."""

    low: int
    high: int


class HeadRun(NamedTuple):
    """``length`` neighbouring heads: their first place among the heads held by the source, and by the target."""

    source: int
    target: int
    length: int


class TokenRun(NamedTuple):
    """``length`` neighbouring tokens: their first slot in the sequence's cache at the source, and at the target."""

    source: int
    target: int
    length: int


class Slots(NamedTuple):
    """Positions ``start`` to ``start + length`` lie in slots ``slot`` and following of the sequence's cache."""

    start: int
    length: int
    slot: int


class Copy(NamedTuple):
    """Tokens of one block: ``length`` of them from ``offset`` of ``block`` on."""

    block: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Holder:
    """What one rank caches.

    Attributes:
        rank: in its pool. heads: of every layer it caches. slots: where the positions of the sequence lie.
    """

    rank: int
    heads: Mapping[int, Heads]
    slots: tuple[Slots, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sends to one other of one layer."""

    source: int
    target: int
    layer: int
    heads: tuple[HeadRun, ...]
    tokens: tuple[TokenRun, ...]

    @property
    def vectors(self) -> int:
        """Tokens times heads."""
        return sum(run.length for run in self.heads) * sum(run.length for run in self.tokens)

    def nbytes(self, width: int, element_bytes: int) -> int:
        """Bytes on the wire; ``width``: elements of a key and a value of one head."""
        return self.vectors * width * element_bytes


@dataclass(frozen=True, slots=True)
class Pages:
    """How a pool of pages lies in memory.

    Attributes:
        size: tokens of a block. axes: of the pool, slowest first, a permutation of ``PAGE_AXES``.

    Raises:
        InputError: other axes.
    """

    size: int
    axes: tuple[str, ...] = PAGE_AXES

    def __post_init__(self) -> None:
        if self.size < 1 or sorted(self.axes) != sorted(PAGE_AXES):
            raise InputError(
                f"pages of {self.size} tokens with axes {', '.join(map(str, self.axes))[:60]}; at least 1 token and "
                f"each of {', '.join(PAGE_AXES)} once are needed"
            )

    def vector(self, blocks: int, heads: int, block: int, half: int, token: int, head: int) -> int:
        """Number of a head vector in a pool of so many blocks and heads, as it lies in memory."""
        sizes = {"block": blocks, "half": 2, "token": self.size, "head": heads}
        at = {"block": block, "half": half, "token": token, "head": head}
        out = 0
        for axis in self.axes:
            out = out * sizes[axis] + at[axis]
        return out


def held_by(placement: Placement, pieces: Sequence[Piece], replica: int = 0) -> list[Holder]:
    """What the ranks of one replica cache of a sequence that entered in ``pieces``.

    Args:
        placement: of the pool. pieces: prompt or chunks of it, in order. replica: place on dp.

    Raises:
        InputError: the replica does not exist.
    """
    layout = placement.layout
    if not 0 <= replica < layout.dp:
        raise InputError(f"replica {replica} of {layout.dp}; choose 0 to {layout.dp - 1}")
    runs = [tuple(_runs(keys(pieces, layout.cp, place))) for place in range(layout.cp)]
    holders = []
    for rank in range(layout.world):
        at = placement.coordinate(rank)
        if at.dp == replica:
            holders.append(Holder(rank, kv_heads(placement, rank), runs[at.cp]))
    return holders


def _runs(positions: Sequence[int]) -> Iterator[Slots]:
    """Positions slot by slot, as runs; slots behind the last token are left out."""
    first = 0
    for slot in range(1, len(positions) + 1):
        start = positions[first]
        if slot < len(positions) and positions[slot] == start + slot - first and start != NOWHERE:
            continue
        if start != NOWHERE:
            yield Slots(start, slot - first, first)
        first = slot


def kv_heads(placement: Placement, rank: int) -> dict[int, Heads]:
    """Absolute KV heads of every layer that a rank caches."""
    found: dict[int, Heads] = {}
    for shard in placement.shards(placement.coordinate(rank)):
        family = shard.family
        if family.section != "decoder" or family.part != "weight" or family.op not in {"k", "kv_a"}:
            continue
        for layer in shard.layers:
            a = placement.spec.layers[layer].attention
            assert a is not None
            if a.kind == "mla":
                found[layer] = Heads(0, 1)
            else:
                low, high = shard.intervals[0][0]
                found[layer] = Heads(low // a.head_dim, high // a.head_dim)
    return dict(sorted(found.items()))


def head_widths(placement: Placement, layer: int) -> tuple[int, int]:
    """Elements of a key and of a value of one head of a layer; of the latent and the turned key where it has these."""
    a = placement.spec.layers[layer].attention
    assert a is not None
    return (a.kv_lora_rank, a.rope_head_dim) if a.kind == "mla" else (a.head_dim, a.v_head_dim)


def token_elements(placement: Placement, rank: int) -> int:
    """Elements that one token takes in the cache of a rank, all its layers together."""
    held = kv_heads(placement, rank)
    return sum((high - low) * sum(head_widths(placement, layer)) for layer, (low, high) in held.items())


def messages(sources: Sequence[Holder], targets: Sequence[Holder], first: int = 0) -> list[Message]:
    """Every message by which the targets get what they hold, in the order of layers.

    A vector that several sources hold comes from one of them; where several targets need it, from another each.

    Args:
        sources, targets: of one sequence.
        first: position from which it is needed (a prefix that the targets have already is not sent).

    Raises:
        InputError: a target holds what no source has.
    """
    layers = sorted({layer for target in targets for layer in target.heads})
    asked: dict[tuple[int, int, int], int] = {}
    return [
        message
        for layer in layers
        for target in targets
        if layer in target.heads
        for message in _of_layer(layer, sources, target, first, asked)
    ]


def _of_layer(
    layer: int, sources: Sequence[Holder], target: Holder, first: int, asked: dict[tuple[int, int, int], int]
) -> list[Message]:
    """Messages of one layer to one target, by source."""
    mine = target.heads[layer]
    chosen: dict[tuple[int, tuple[TokenRun, ...]], list[int]] = {}
    for head in range(mine.low, mine.high):
        there = [s for s in sources if layer in s.heads and s.heads[layer].low <= head < s.heads[layer].high]
        met = 0
        for slots in sorted({s.slots for s in there}):
            tokens = _shared(slots, target.slots, first)
            copies = [s for s in there if s.slots == slots]
            if not tokens:
                continue
            turn = asked[layer, head, slots[0].start] = asked.get((layer, head, slots[0].start), -1) + 1
            chosen.setdefault((copies[turn % len(copies)].rank, tokens), []).append(head)
            met += sum(run.length for run in tokens)
        wanted = sum(max(0, run.start + run.length - max(run.start, first)) for run in target.slots)
        if met != wanted:
            raise InputError(
                f"layer {layer}, KV head {head}: rank {target.rank} needs {wanted} tokens, the other pool holds {met}; "
                "both pools must serve one model and one sequence"
            )
    by_rank = {s.rank: s for s in sources}
    return [
        Message(rank, target.rank, layer, tuple(_head_runs(heads, by_rank[rank].heads[layer].low, mine.low)), tokens)
        for (rank, tokens), heads in chosen.items()
    ]


def _shared(source: Sequence[Slots], target: Sequence[Slots], first: int) -> tuple[TokenRun, ...]:
    """Positions from ``first`` on that both hold, in the order of the target's slots."""
    out = []
    for b in target:
        for a in source:
            low, high = max(a.start, b.start, first), min(a.start + a.length, b.start + b.length)
            if low < high:
                out.append(TokenRun(a.slot + low - a.start, b.slot + low - b.start, high - low))
    return tuple(sorted(out, key=lambda run: run.target))


def _head_runs(heads: Sequence[int], source_low: int, target_low: int) -> Iterator[HeadRun]:
    """Neighbouring heads together."""
    start = 0
    for i in range(1, len(heads) + 1):
        if i == len(heads) or heads[i] != heads[i - 1] + 1:
            yield HeadRun(heads[start] - source_low, heads[start] - target_low, i - start)
            start = i


def copies(slot: int, count: int, table: Sequence[int], block_size: int) -> Iterator[Copy]:
    """Where slots ``slot`` to ``slot + count`` of a sequence lie, block by block; ``table``: its blocks."""
    while count > 0:
        number, offset = divmod(slot, block_size)
        here = min(count, block_size - offset)
        yield Copy(table[number], offset, here)
        slot, count = slot + here, count - here

"""Most bytes of passing tensors of a rank of our own trainer: activations kept, and what lives beside them for a while.

Counted for dense layers with grouped-query attention, in one element type, on CPU: what ``runtime.differentiable``,
``runtime.train.core`` and ``runtime.train.loss`` keep for the backward, walked through the rank's schedule. At every
action the moments count at which most is alive: the loss (logits, and gradients of head and its input), the first
products and the gate of a layer's backward, the gradient of the embedding.

Legend: T tokens of a micro-batch on a rank, R rows between the blocks, D model width, F MLP columns, H and K heads, V
rows of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from meshwright.moves.chunks import Chunk
from meshwright.moves.loss import loss_pieces
from meshwright.moves.pipeline import HandOff
from meshwright.moves.program import program
from meshwright.plan.executed.reduction import Flat
from meshwright.plan.executed.step import Pass, table
from meshwright.plan.products import Kind
from meshwright.plan.training_step import microbatches
from meshwright.plan.wire import parts
from meshwright.specs.dtypes import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class Layer:
    """Bytes of one layer and micro-batch.

    Attributes:
        kept: from forward to backward. inside: what its own backward works with, more where the layer runs again.
        beside: most that its backward adds to that. put_off: kept from a split backward to its weight gradients.
        gate: of T x F.
    """

    kept: int
    inside: int
    beside: int
    put_off: int
    gate: int


def activation_peak(own: Pass) -> int | None:
    """Most bytes of passing tensors of a rank over a step; None for models and layouts that are not counted."""
    layers = {n: _layer(own, kind) for n, kind in own.held.kinds.items()}
    counted = {n: layer for n, layer in layers.items() if layer is not None}
    if len(counted) < len(layers) or own.placement.layout.zero == 3:
        return None
    return max(_Walk(own, counted).moments())


def _layer(own: Pass, kind: Kind) -> Layer | None:
    a, c, train = kind.layer.attention, own.c, own.train
    columns = next((p.n for p in kind.products if p.role == "mlp" and p.op == "up"), 0)
    if a is None or a.kind != "gqa" or kind.layer.moe is not None or not columns or a.head_dim != a.v_head_dim:
        return None
    w, t, r, d = DTYPE_BYTES[c.dtype], c.tokens, c.held_tokens, c.hidden
    n, m = kind.units.get("heads", a.heads), kind.units.get("kv_heads", a.kv_heads)
    q, kv = w * t * n * a.head_dim, w * t * m * a.head_dim
    inside = 2 * q + 2 * kv
    inside += q if c.layout.cp > 1 and c.layout.cp_kind == "ulysses" else 0
    inside += 4 * t * n if train.recompute != "selective" else 0
    if any(f.role == "attention" and not f.op and len(f.shape) == 1 for f in own.placement.spec.families):
        inside += q + kv + 4 * t * (n + m)
    wide, gate = w * d * (t if c.sp else r), w * t * columns
    inside += len(kind.norms) * (w * r * d + 4 * r) + 2 * wide + 4 * gate
    first = gate + w * d * columns
    put_off = 2 * wide + 2 * w * t * d + 2 * q + 2 * kv + 3 * gate
    kept = w * r * d if train.recompute == "full" else inside
    return Layer(kept, inside, w * d * (r + (t if c.sp else 0)) + max(first, 4 * gate), put_off, gate)


@dataclass(slots=True)
class _Walk:
    """What is alive at the heaviest moments of a rank's schedule."""

    own: Pass
    layers: dict[int, Layer]
    held: dict[tuple[int, int], int] = field(default_factory=dict)

    def moments(self) -> Iterator[int]:
        """Bytes at every moment that counts."""
        placement, train, pp = self.own.placement, self.own.train, self.own.at.pp
        count = microbatches(placement.layout, train)
        standing = count * 3 * 8 * self.own.c.tokens
        if placement.layout.cp > 1:  # ids and labels before they are dealt; each one's tables of who has which position
            standing += count * 2 * 8 * (self.own.c.tokens * placement.layout.cp + train.seq)
        sent, coming = 0, set[tuple[str, int, int]]()  # gloo says of no send that it is over before the end
        for instruction in program(table(placement.layout, count), pp):
            if isinstance(instruction, HandOff):
                sent += instruction.op == "send"
                if instruction.op == "recv":
                    coming.add((instruction.kind, instruction.chunk, instruction.microbatch))
                continue
            kind, place, n = instruction
            coming.discard(("F" if kind == "F" else "B", place, n))
            chunk, key = self.own.chunks[place], (place, n)
            others = standing + sum(size for k, size in self.held.items() if k != key)
            others += self._row * (sent + len(coming))
            if kind == "F":
                self.held[key] = self._kept(chunk)
                yield others + self.held[key] + (self._loss() if chunk.last else self._row)
                self.held[key] += self._head if chunk.last else 0
                coming |= self._here("F", place + 1, n)
            elif kind == "W":
                yield others + self.held.pop(key) + self._largest(chunk)
            else:
                yield from (others + size for size in self._backward(chunk, split=kind == "I"))
                self.held[key] = sum(self.layers[i].put_off for i in chunk.layers) + self._table * chunk.last
                coming |= self._here("B", place - 1, n)
                if kind == "B":
                    del self.held[key]

    def _here(self, kind: str, place: int, n: int) -> set[tuple[str, int, int]]:
        """What a chunk hands to another of the same rank."""
        return {(kind, place, n)} if place in self.own.chunks else set()

    @property
    def _row(self) -> int:
        """Hidden states between the blocks."""
        c = self.own.c
        return DTYPE_BYTES[c.dtype] * c.held_tokens * c.hidden

    def _kept(self, chunk: Chunk) -> int:
        """Of a micro-batch from forward to backward: layers, final norm, cosines and sines, rows of the embedding."""
        a = next(layer.attention for layer in self.own.placement.spec.layers if layer.attention is not None)
        c, spec = self.own.c, self.own.placement.spec
        kinds = len({layer.attention.window for layer in spec.layers if layer.attention is not None})
        kept = sum(self.layers[i].kept for i in chunk.layers) + 2 * kinds * 4 * c.tokens * a.head_dim
        kept += self._final if chunk.last else 0
        return kept + (9 * c.tokens if chunk.first and c.layout.tp > 1 else 0)

    @property
    def _final(self) -> int:
        """What the final norm keeps."""
        return self._row + 4 * self.own.c.held_tokens

    @property
    def _vocabulary(self) -> int:
        """Rows of the head or the embedding held here."""
        return max((s.shape[0] for s in self.own.held.ends if s.family.role in {"head", "embedding"}), default=0)

    @property
    def _table(self) -> int:
        """A gradient of the head or the embedding."""
        return DTYPE_BYTES[self.own.c.dtype] * self._vocabulary * self.own.c.hidden

    @property
    def _head(self) -> int:
        """Gradients of the head and of its input, made in the forward."""
        c = self.own.c
        return self._table + DTYPE_BYTES[c.dtype] * c.tokens * c.hidden

    def _loss(self) -> int:
        """Beside what is kept while the loss runs: its input, logits, both gradients."""
        c, w = self.own.c, DTYPE_BYTES[self.own.c.dtype]
        pieces = loss_pieces(c.tokens, parts(self.own.placement.spec.vocab, c.layout.tp))
        again = self._vocabulary * c.hidden if len(pieces) > 1 else 0
        return self._head + w * (c.tokens * c.hidden + again) + 4 * pieces[0] * self._vocabulary

    def _backward(self, chunk: Chunk, *, split: bool) -> Iterator[int]:
        """At the beginning of every layer's backward, and at the embedding's."""
        flats = self.own.reduction.flats[chunk.place]
        scattered = self.own.reduction.zero == 2
        width = DTYPE_BYTES[self.own.train.grad_dtype]
        tied = self.own.placement.spec.tied and chunk.first and chunk.last
        left = self._kept(chunk) - (self._final if chunk.last else 0)
        done = self._table if tied or (split and chunk.last) else 0
        for unit, i in enumerate(reversed(chunk.layers), 1):
            opened = sum(f.ranks * f.piece for f in flats if scattered and _opens(flats, f) <= unit) * width
            layer = self.layers[i]
            still = layer.gate if split else 0  # the input of the last product, which is put off
            yield left - layer.kept + layer.inside + layer.beside + done + opened + still
            left -= layer.kept
            done += layer.put_off if split else 0
        opened = sum(f.ranks * f.piece for f in flats if scattered) * width
        yield left + self._row + done + opened + (self._table if chunk.first else 0)
        if self.own.reduction.zero:  # pieces that arrive, and the copy whose sum gloo scatters
            arrived = sum((scattered + f.ranks) * f.piece for f in flats if f.ranks > 1) * width
            yield left + self._row + opened + arrived

    def _largest(self, chunk: Chunk) -> int:
        """The largest weight gradient."""
        c = self.own.c
        widest = max((p.n for i in chunk.layers for p in self.own.held.kinds[i].products if p.role == "mlp"), default=0)
        return DTYPE_BYTES[c.dtype] * c.hidden * widest


def _opens(flats: Sequence[Flat], flat: Flat) -> int:
    """The unit at whose gradients a flat is made: the one behind the flat before it."""
    before = [f.unit for f in flats if f.unit < flat.unit]
    return max(before, default=-1) + 1

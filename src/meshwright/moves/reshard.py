"""Which boxes of a tensor a rank's piece of it is, so that a checkpoint of one layout is read under any other.

A rank holds of a tensor the intervals that the placement says, joined into one local tensor; ZeRO and FSDP leave it a
run of that tensor's elements in row-major order. Both become boxes of the whole tensor here, and boxes of two layouts
meet by their overlap. Pure arithmetic: no tensors, no ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

Intervals = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor: elements ``start[d]`` to ``stop[d]`` of every dimension ``d``."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Extent of every dimension."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """Elements inside; 1 of a tensor without dimensions."""
        return prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """What both have; None where they do not meet."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def moved(self, by: Sequence[int], sign: int = 1) -> Box:
        """The same box with another origin."""
        start = tuple(a + sign * n for a, n in zip(self.start, by, strict=True))
        return Box(start, tuple(a + n for a, n in zip(start, self.sizes, strict=True)))


def run_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Elements ``start`` to ``stop`` of a tensor in row-major order, as boxes.

    Yields:
        ``(first, box)``: the box holds elements ``first`` to ``first + box.numel`` of the tensor, in order. At most
        ``2 x dimensions - 1`` boxes.

    Raises:
        ValueError: the run leaves the tensor.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"elements {start} to {stop} of {prod(shape)}")
    if start < stop:
        yield from _run(tuple(shape), start, stop, 0)


def _run(shape: tuple[int, ...], start: int, stop: int, first: int) -> Iterator[tuple[int, Box]]:
    if not shape:
        yield first, Box((), ())
        return
    row = prod(shape[1:])
    low, high = -(-start // row), stop // row
    if low > high:  # inside one row
        yield from _inner(shape, high, start - high * row, stop - high * row, first, row)
        return
    if start < low * row:
        yield from _inner(shape, low - 1, start - (low - 1) * row, row, first, row)
    if low < high:
        yield first + low * row, Box((low, *(0 for _ in shape[1:])), (high, *shape[1:]))
    if high * row < stop:
        yield from _inner(shape, high, 0, stop - high * row, first, row)


def _inner(shape: tuple[int, ...], at: int, start: int, stop: int, first: int, row: int) -> Iterator[tuple[int, Box]]:
    """The run within row ``at``."""
    for where, box in _run(shape[1:], start, stop, first + at * row):
        yield where, Box((at, *box.start), (at + 1, *box.stop))


def whole_boxes(box: Box, intervals: Sequence[Intervals]) -> Iterator[tuple[Box, Box]]:
    """A box of a local tensor as boxes of the whole one.

    Args:
        box: of the local tensor, whose dimensions are the ``intervals`` of the whole tensor, joined.
        intervals: for every dimension the ranges held, in order.

    Yields:
        ``(local, whole)``: equal extents, one pair for every combination of ranges that the box touches.
    """
    dims = [list(_ranges(a, b, held)) for a, b, held in zip(box.start, box.stop, intervals, strict=True)]
    for cut in product(*dims):
        local = Box(tuple(c[0] for c in cut), tuple(c[1] for c in cut))
        shift = tuple(c[2] for c in cut)
        yield local, local.moved(shift)


def _ranges(start: int, stop: int, held: Intervals) -> Iterator[tuple[int, int, int]]:
    """``(local start, local stop, shift to the whole)`` of ``start`` to ``stop`` of joined ranges."""
    base = 0
    for low, high in held:
        a, b = max(start, base), min(stop, base + high - low)
        if a < b:
            yield a, b, low - base
        base += high - low


def disjoint(boxes: Sequence[Box]) -> bool:
    """Whether no two boxes meet, by a sweep along the first dimension."""
    if not boxes or not boxes[0].start:
        return len(boxes) <= 1
    ordered = sorted(boxes, key=lambda box: box.start)
    live: list[Box] = []
    for box in ordered:
        live = [other for other in live if other.stop[0] > box.start[0]]
        if any(box.overlap(other) for other in live):
            return False
        live.append(box)
    return True

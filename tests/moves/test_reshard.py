"""Boxes of pieces: every element of a run once, at its place in the whole tensor, whatever intervals it came from."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.moves.reshard import Box, disjoint, run_boxes, whole_boxes


def _elements(box: Box) -> list[tuple[int, ...]]:
    return list(product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


def _flat(at: tuple[int, ...], shape: tuple[int, ...]) -> int:
    out = 0
    for place, extent in zip(at, shape, strict=True):
        out = out * extent + place
    return out


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple), st.data())
def test_a_run_becomes_few_boxes_that_hold_it_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    boxes = list(run_boxes(shape, start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    found = []
    for first, box in boxes:
        held = [_flat(at, shape) for at in _elements(box)]
        assert held == list(range(first, first + box.numel))
        found += held
    assert found == list(range(start, stop))
    assert disjoint([box for _, box in boxes])


def test_a_run_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="elements 3 to 7 of 6"):
        list(run_boxes((2, 3), 3, 7))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_joined_ranges_are_found_in_the_whole_tensor(data: st.DataObject) -> None:
    """Dimension 0 of 20 rows is held in up to three ranges, dimension 1 in one: every local element at its place."""
    marks = sorted(data.draw(st.sets(st.integers(0, 20), min_size=2, max_size=6)))
    ranges = tuple(zip(marks[::2], marks[1::2], strict=False))
    rows = [n for a, b in ranges for n in range(a, b)]
    low = data.draw(st.integers(0, len(rows) - 1))
    high = data.draw(st.integers(low + 1, len(rows)))
    pairs = list(whole_boxes(Box((low, 1), (high, 3)), (ranges, ((4, 8),))))
    seen = {}
    for local, whole in pairs:
        assert local.sizes == whole.sizes
        seen |= dict(zip(_elements(local), _elements(whole), strict=True))
    assert seen == {(r, c): (rows[r], c + 4) for r in range(low, high) for c in (1, 2)}


def test_disjoint() -> None:
    left, right, over = Box((0, 0), (4, 2)), Box((0, 2), (4, 5)), Box((3, 1), (4, 3))
    assert disjoint([left, right])
    assert not disjoint([left, right, over])

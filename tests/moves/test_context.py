"""Tables of context parallelism: every query meets every key it may see exactly once, and work is balanced."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.moves.context import (
    NOWHERE,
    Piece,
    chunk,
    dealt,
    decoded_at,
    holder,
    keys,
    neighbours,
    owner,
    pieces_of,
    reach,
    rows,
    slots,
)


def in_a_row(lengths: list[int]) -> list[Piece]:
    return [Piece(sum(lengths[:i]), n) for i, n in enumerate(lengths)]


LENGTHS = st.lists(st.integers(1, 19), min_size=1, max_size=3)


@given(LENGTHS, st.integers(2, 6))
@settings(max_examples=150, deadline=None)
def test_on_the_ring_every_query_meets_every_key_before_it_once(lengths: list[int], cp: int) -> None:
    pieces = in_a_row(lengths)
    last, total = pieces[-1], sum(lengths)
    met: Counter[tuple[int, int]] = Counter()
    for place in range(cp):
        queries = dealt(last, cp, place)
        assert len(queries) == rows(last.length, cp)
        for step in range(cp):
            other = owner(step, cp, place)
            block, seen = keys(pieces, cp, other), reach(pieces, cp, place, other)
            met.update(
                (q, k)
                for q in queries[seen.first_query :]
                for k in block[: seen.keys]
                if q < total and k != NOWHERE and k <= q
            )
    assert met == {(q, k): 1 for q in range(last.start, total) for k in range(q + 1)}


@given(LENGTHS, st.integers(2, 6))
@settings(max_examples=80, deadline=None)
def test_every_position_has_one_holder(lengths: list[int], cp: int) -> None:
    pieces = in_a_row(lengths)
    where = Counter(k for place in range(cp) for k in keys(pieces, cp, place) if k != NOWHERE)
    assert where == dict.fromkeys(range(sum(lengths)), 1)
    for piece in pieces:
        for position in range(piece.start, piece.start + piece.length):
            place, row = holder(piece, cp, position)
            assert dealt(piece, cp, place)[row] == position


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_causal_work_is_equal_on_all_places(cp: int) -> None:
    """Pairs of a prompt of 2 cp chunks of 5: equal to the pair; contiguous halves would differ by a factor."""
    piece = Piece(0, 10 * cp)
    pairs = {sum(position + 1 for position in dealt(piece, cp, place)) for place in range(cp)}
    assert pairs == {(10 * cp) * (10 * cp + 1) // 2 // cp}


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_what_is_skipped_is_half_of_the_ring(cp: int) -> None:
    """Beside its own block a place scores half of every other: 2c x c or c x 2c of 2c x 2c."""
    pieces = [Piece(0, 20 * cp)]
    c = chunk(20 * cp, cp)
    for place in range(cp):
        for step in range(1, cp):
            seen = reach(pieces, cp, place, owner(step, cp, place))
            assert (2 * c - seen.first_query) * seen.keys == 2 * c * c


@pytest.mark.parametrize("cp", [2, 3, 5])
def test_blocks_go_round_and_reach_everyone(cp: int) -> None:
    held = list(range(cp))
    for step in range(cp):
        assert held == [owner(step, cp, place) for place in range(cp)]
        to = [neighbours(cp, place)[0] for place in range(cp)]
        assert [neighbours(cp, to[place])[1] for place in range(cp)] == list(range(cp))
        held = [held[neighbours(cp, place)[1]] for place in range(cp)]


@given(LENGTHS, st.integers(0, 9), st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_slots_hold_what_a_place_caches(lengths: list[int], decoded: int, cp: int) -> None:
    start = sum(lengths)
    for place in range(cp):
        mine = sum(decoded_at(p, cp) == place for p in range(start, start + decoded))
        held = len(keys(in_a_row(lengths), cp, place)) + mine
        assert held <= slots(lengths, decoded, cp) <= held + 1


def test_by_hand() -> None:
    """7 tokens over 2 places: chunks 0 1 | 2 3 | 4 5 | 6 and one row to spare."""
    piece = Piece(0, 7)
    assert (dealt(piece, 2, 0), dealt(piece, 2, 1)) == ([0, 1, 6, 7], [2, 3, 4, 5])
    assert keys([piece], 2, 0) == [0, 1, 6, NOWHERE]
    assert holder(piece, 2, 6) == (0, 2)
    assert (pieces_of(7, 3), pieces_of(6, 3), pieces_of(6, None), pieces_of(6, 9)) == ([3, 3, 1], [3, 3], [6], [6])
    assert dealt(Piece(4, 3), 1, 0) == [4, 5, 6]
    assert slots([7], 3, 2) == 4 + 2

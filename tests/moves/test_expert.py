"""Rows to experts and back: nothing is lost, every expert gets its own, and the way back is the inverse."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.moves.expert import counted, dealt, exchange, kept, round_robin, slice_of

Choices = list[list[int]]


@st.composite
def groups(draw: st.DrawFn) -> tuple[int, list[Choices]]:
    """Experts, and for every member of an expert group the experts that each of its tokens chose."""
    experts, members = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    ids = st.lists(st.integers(0, experts - 1), min_size=2, max_size=2)
    return experts, draw(st.lists(st.lists(ids, max_size=7), min_size=members, max_size=members))


def sent_by(chosen: Choices, member: int) -> list[tuple[int, int, int]]:
    """Rows (expert, member, row) of a member as it sends them: sorted by expert, stable."""
    flat = [expert for ids in chosen for expert in ids]
    return sorted(((e, member, row) for row, e in enumerate(flat)), key=lambda r: r[0])


@settings(max_examples=200, deadline=None)
@given(groups())
def test_every_row_arrives_at_its_expert_and_finds_back(case: tuple[int, list[Choices]]) -> None:
    """Rows are really moved, by the splits alone, as all_to_all moves them."""
    experts, chosen = case
    members = len(chosen)
    counts = [counted(ids, experts) for ids in chosen]
    moves = [exchange(counts, index) for index in range(members)]
    sends = [sent_by(ids, member) for member, ids in enumerate(chosen)]
    returned: list[list[list[tuple[int, int, int]]]] = [[[] for _ in range(members)] for _ in range(members)]
    for here, move in enumerate(moves):
        arrived = []
        for other in range(members):
            start = sum(moves[other].sent_rows[:here])
            arrived += sends[other][start : start + moves[other].sent_rows[here]]
        assert sum(move.received_rows) == len(arrived) == sum(move.rows)
        order = move.by_expert()
        low, high = dealt(experts, members)[here]
        want = [e for e in range(low, high) for _ in range(move.rows[e - low])]
        assert [arrived[i][0] for i in order] == want
        back: list[tuple[int, int, int]] = [(-1, -1, -1)] * len(arrived)
        for position, row in zip(order, [arrived[i] for i in order], strict=True):
            back[position] = row
        for other in range(members):
            start = sum(move.received_rows[:other])
            returned[other][here] = back[start : start + move.received_rows[other]]
    for member in range(members):
        assert [row for piece in returned[member] for row in piece] == sends[member]


def test_by_hand() -> None:
    """Two members hold {0, 1, 2} and {3, 4}; the second member has no token at all."""
    move = exchange([(2, 1, 0, 3, 1), (0, 0, 0, 0, 0)], 0)
    assert (move.sent_rows, move.received_rows, move.rows) == ((3, 4), (3, 0), (2, 1, 0))
    other = exchange([(2, 1, 0, 3, 1), (0, 0, 0, 0, 0)], 1)
    assert (other.sent_rows, other.received_rows, other.rows) == ((0, 0), (4, 0), (3, 1))
    both = exchange([(1, 2), (2, 1)], 0)
    assert both.by_expert() == [0, 1, 2]
    crossed = exchange([(1, 1, 0), (2, 1, 0)], 0)
    assert crossed.by_expert() == [0, 2, 3, 1, 4]


def test_all_tokens_on_one_expert() -> None:
    counts = [(0, 0, 6), (0, 0, 4)]
    assert exchange(counts, 0).rows == (0, 0)
    assert exchange(counts, 1).rows == (10,)
    assert exchange(counts, 0).by_expert() == []


def test_without_a_dispatch_members_take_their_own_rows() -> None:
    parts = [kept((3, 0, 2, 5, 1), 2, index) for index in range(2)]
    assert [part.rows for part in parts] == [(3, 0, 2), (5, 1)]
    assert all(part.sent == (3, 0, 2, 5, 1) for part in parts)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 9))
def test_the_even_choice_is_counted_in_closed_form(low: int, more: int, experts: int) -> None:
    high = low + more
    assert round_robin(low, high, experts) == counted([[i % experts] for i in range(low, high)], experts)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 40), st.integers(1, 9))
def test_slices_tile_the_tokens(tokens: int, slices: int) -> None:
    cuts = [slice_of(tokens, slices, place) for place in range(slices)]
    assert [t for low, high in cuts for t in range(low, high)] == list(range(tokens))
    assert max(high - low for low, high in cuts) == -(-tokens // slices)


def test_an_expert_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InputError, match="expert 5 of 5"):
        counted([[0, 5]], 5)

"""Rings move what they promise: the hops are executed on small integer tensors and their bytes are counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.moves.ring import Hop, ring_hops, wire_bytes


def run_ring(hops: tuple[Hop, ...], state: list[list[int | None]]) -> list[list[int | None]]:
    """Execute hops step by step; ``state[rank][piece]``; every send of a step sees the state before the step."""
    for step in sorted({h.step for h in hops}):
        before = [list(row) for row in state]
        for h in (h for h in hops if h.step == step):
            sent = before[h.src][h.piece]
            assert sent is not None, "a rank sends a piece that it does not hold"
            held = state[h.dst][h.piece]
            state[h.dst][h.piece] = sent + (held or 0) if h.reduces else sent
    return state


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8])
def test_all_gather_fills_every_rank(n: int) -> None:
    state: list[list[int | None]] = [[r if p == r else None for p in range(n)] for r in range(n)]
    assert run_ring(ring_hops("all_gather", n), state) == [list(range(n))] * n


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8])
def test_all_reduce_sums_on_every_rank_and_reduce_scatter_on_its_own(n: int) -> None:
    start = [[10**r + p for p in range(n)] for r in range(n)]
    total = [sum(start[r][p] for r in range(n)) for p in range(n)]
    reduced = run_ring(ring_hops("all_reduce", n), [list(row) for row in start])
    assert reduced == [total] * n
    scattered = run_ring(ring_hops("reduce_scatter", n), [list(row) for row in start])
    assert [scattered[r][r] for r in range(n)] == total


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_formula_is_the_sum_of_the_hops(op: str, n: int) -> None:
    piece = 24
    payload = piece if op == "all_gather" else piece * n
    for rank in range(n):
        sent = sum(piece for h in ring_hops(op, n) if h.src == rank)
        assert wire_bytes(op, n, payload) == sent
    assert all(h.src != h.dst for h in ring_hops(op, n))


def test_a_planted_mistake_is_seen() -> None:
    hops = ring_hops("all_reduce", 4)
    wrong = (Hop(hops[0].step, hops[0].src, hops[0].dst, hops[0].piece, False), *hops[1:])
    start: list[list[int | None]] = [[10**r for _ in range(4)] for r in range(4)]
    assert run_ring(wrong, [list(row) for row in start]) != [[1111] * 4] * 4


@given(st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]), st.integers(1, 64), st.integers(0, 10**9))
def test_all_reduce_is_reduce_scatter_then_all_gather(op: str, n: int, piece: int) -> None:
    whole = wire_bytes("all_reduce", n, piece * n)
    assert whole == wire_bytes("reduce_scatter", n, piece * n) + wire_bytes("all_gather", n, piece)
    assert wire_bytes(op, 1, piece) == 0


def test_roots_and_hand_offs() -> None:
    assert wire_bytes("gather", 4, 100) == 100
    assert wire_bytes("gather", 4, 100, root=True) == 0
    assert wire_bytes("scatter", 4, 100, root=True) == 75
    assert wire_bytes("send", 2, 100) == 100
    assert wire_bytes("recv", 2, 100) == 0
    assert wire_bytes("all_reduce", 3, 100) == 134


@pytest.mark.parametrize(("op", "n", "size"), [("all_sum", 2, 1), ("all_reduce", 0, 1), ("send", 2, -1)])
def test_nonsense_is_refused(op: str, n: int, size: int) -> None:
    with pytest.raises(InputError):
        wire_bytes(op, n, size)


def test_large_hop_tables_are_refused() -> None:
    with pytest.raises(InputError):
        ring_hops("all_reduce", 1 << 20)
    with pytest.raises(InputError):
        ring_hops("broadcast", 4)

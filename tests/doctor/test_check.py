"""Divergences of lanes, and who waits for whom."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import pytest

from meshwright.doctor.incident import COMPLETED, SCHEDULED, Signature, Status
from meshwright.ledger.check import Divergence, divergences, fit_of
from meshwright.ledger.lanes import Lanes, comparable, first_difference
from meshwright.ledger.stall import components, passed_by_all, stall


@dataclass
class _Rows:
    rank: int
    signature: array[int]
    stack: array[int]
    seq: array[int]
    state: array[int]
    group: array[int]
    p2p: array[int]
    record: array[int]
    status: dict[int, Status] = field(default_factory=dict)
    settled: bool = True
    active_only: bool = False
    backend: str = "nccl"


def _rows(rank: int, text: str, first: int = 1, done: int = 0, lines: str = "") -> _Rows:
    """One letter a call (``a`` is signature 0); ``lines`` likewise where it came from."""
    count = len(text)
    return _Rows(
        rank,
        array("i", [ord(c) - 97 for c in text]),
        array("i", [ord(c) - 97 for c in lines] if lines else [-1] * count),
        array("q", range(first, first + count)),
        array("b", [COMPLETED if first + i <= done else SCHEDULED for i in range(count)]),
        array("i", [0] * count),
        array("b", [0] * count),
        array("q", range(count)),
    )


_KINDS = [Signature("all_reduce", ((n,),), ((n,),), "Float") for n in range(26)]


def _found(*rows: _Rows, members: int | None = None) -> list[Divergence]:
    lanes = Lanes({r.rank: r for r in rows}, [tuple(range(members or len(rows)))], _KINDS)
    state = stall(lanes)
    return divergences(lanes, lambda g, s: passed_by_all(state, lanes, g, s))


@pytest.mark.parametrize(
    ("odd", "kind", "seq", "count"),
    [
        ("abcdefghij", None, 0, 0),
        ("abcefghij", "skipped", 4, 1),
        ("abcfghij", "skipped", 4, 2),
        ("abcxdefghij", "extra", 4, 1),
        ("abcxefghij", "other", 4, 1),
        ("abc", None, 0, 0),
    ],
)
def test_edits_are_told_apart(odd: str, kind: str | None, seq: int, count: int) -> None:
    right = "abcdefghij"
    found = _found(_rows(0, right), _rows(1, right), _rows(2, odd), _rows(3, right))
    if kind is None:
        assert found == []
        return
    assert [(d.kind, d.seq, d.count, d.guilty, d.clear) for d in found] == [(kind, seq, count, (2,), True)]


def test_equal_shapes_are_told_by_lines() -> None:
    right = _rows(0, "aaaaaaaaaa", lines="abcdefghij")
    same = _rows(1, "aaaaaaaaaa", lines="abcdefghij")
    odd = _rows(2, "aaaaaaaaa", lines="abcdeghij")
    found = _found(right, same, odd)
    assert [(d.kind, d.seq, d.guilty, d.by_stack) for d in found] == [("skipped", 6, (2,), True)]
    legal = _rows(2, "aaaaaaaaaa", lines="abcxefghij")
    assert _found(right, same, legal) == [], "one call from another line, no shift"


def test_calls_before_the_ring_are_not_skipped() -> None:
    assert _found(_rows(0, "abcdefghij"), _rows(1, "efghij", first=5), _rows(2, "hij", first=8)) == []


def test_what_all_completed_did_no_harm() -> None:
    rows = [_rows(r, "abXcd".lower() if r else "abycd", done=5) for r in range(3)]
    assert _found(*rows) == []
    assert len(_found(*[_rows(r, "abxcd" if r else "abycd", done=2) for r in range(3)])) == 1


def test_pieces_of_an_exchange_may_differ() -> None:
    a, b = (Signature("all_to_all", ((n,),), ((n,),), "Float") for n in (3, 9))
    assert comparable(a) == comparable(b)
    assert comparable(Signature("all_reduce", ((3, 4),))) == comparable(Signature("all_reduce", ((12,),)))
    root = Signature("gather", ((4,),), ((4,), (4,)), "Float", 0)
    assert comparable(root) == comparable(Signature("gather", ((4,),), (), "Float", 0))


def test_the_one_behind_is_the_root() -> None:
    rows = {r: _rows(r, "abcd", done=3) for r in range(3)} | {3: _rows(3, "abc", done=3)}
    state = stall(Lanes(rows, [(0, 1, 2, 3)], _KINDS))
    assert (state.roots, sorted(state.pending), state.cycles) == ((3,), [0, 1, 2], ())


def test_a_dump_written_earlier_is_stale_not_guilty() -> None:
    rows = {r: _rows(r, "abcdef", done=6) for r in range(3)} | {3: _rows(3, "abc", done=3)}
    state = stall(Lanes(rows, [(0, 1, 2, 3)], _KINDS))
    assert (state.stale, state.roots) == ((3,), ())


def test_counters_tell_of_a_rank_without_rows() -> None:
    silent = _rows(1, "")
    silent.active_only, silent.status = True, {0: Status(3, -1, 3)}
    rows = {0: _rows(0, "d", first=4), 1: silent}
    state = stall(Lanes(rows, [(0, 1)], _KINDS))
    assert state.roots == (1,)
    silent.status = {}
    state = stall(Lanes({**rows, 1: silent}, [(0, 1)], _KINDS))
    assert state.roots == (), "nothing says how far it came"


def test_alignment_prefers_the_smallest_change() -> None:
    assert fit_of("abcd", "bcd") is not None
    fit = fit_of(list("abcdef"), list("xbcdef"))
    assert fit is not None
    assert (fit.kind, fit.matched) == ("other", 5)
    assert fit_of(list("abc"), list("xyz")) is None


def test_first_difference_and_components() -> None:
    lanes = Lanes({0: _rows(0, "a" * 999 + "b"), 1: _rows(1, "a" * 1000)}, [(0, 1)], _KINDS)
    one, two = lanes.of[0][0], lanes.of[0][1]
    assert first_difference(one, two, "calls", 0) == 1000
    assert first_difference(one, two, "calls", 1001) is None
    parts = components({0: (1,), 1: (2,), 2: (0, 3), 4: (3,)})
    assert sorted(map(sorted, parts)) == [[0, 1, 2], [3], [4]]

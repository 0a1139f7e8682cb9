"""Programs of ranks: every action once in the table's order, hand-offs that match by order, no one waits for ever."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

import pytest

from meshwright.moves.pipeline import FOLDED, SCHEDULES, Action, HandOff, Table, hand_offs, refusal, schedule
from meshwright.moves.program import Instruction, program

CASES = [
    (name, stages, microbatches, virtual)
    for name in SCHEDULES
    for stages in (1, 2, 3, 4)
    for microbatches in (1, 2, 3, 4, 6, 8, 12)
    for virtual in ((1,) if name in {"gpipe", "1f1b"} else (2,) if name in FOLDED else (1, 2, 3))
    if not refusal(name, stages, microbatches, virtual)
]


@pytest.mark.parametrize(("name", "stages", "microbatches", "virtual"), CASES)
def test_programs_run_to_their_end_when_hand_offs_match_by_order(
    name: str, stages: int, microbatches: int, virtual: int
) -> None:
    table = schedule(name, stages, microbatches, virtual)
    programs = [program(table, rank) for rank in range(stages)]
    for rank, issued in enumerate(programs):
        assert tuple(i for i in issued if isinstance(i, Action)) == table.actions[rank]
        assert Counter(i for i in issued if isinstance(i, HandOff)) == Counter(hand_offs(table, rank))
    assert _run(table, programs)


def test_a_swapped_pair_of_sends_is_found() -> None:
    """The check above fails when one rank hands on in another order than the other takes."""
    table = schedule("gpipe", 2, 3)
    programs = [list(program(table, rank)) for rank in range(2)]
    first, second = [n for n, i in enumerate(programs[0]) if isinstance(i, HandOff) and i.op == "send"][:2]
    programs[0][first], programs[0][second] = programs[0][second], programs[0][first]
    with pytest.raises(AssertionError, match="taken for"):
        _run(table, [tuple(p) for p in programs])


def _run(table: Table, programs: list[tuple[Instruction, ...]]) -> bool:
    """Walk all programs; every pair of ranks is a queue. False: ranks wait for ever."""
    wires: dict[tuple[int, int], deque[tuple[str, int, int]]] = defaultdict(deque)
    posted: list[deque[HandOff]] = [deque() for _ in programs]
    there: list[set[tuple[str, int, int]]] = [set() for _ in programs]
    at = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for rank, issued in enumerate(programs):
            for off in list(posted[rank]):
                if (wire := wires[off.peer, rank]) and next(o for o in posted[rank] if o.peer == off.peer) is off:
                    came = wire.popleft()
                    assert came == (off.kind, off.chunk, off.microbatch), f"{came} taken for {off}"
                    there[rank].add(came)
                    posted[rank].remove(off)
            while at[rank] < len(issued):
                now = issued[at[rank]]
                if isinstance(now, Action) and not _ready(table, rank, now, there[rank]):
                    break
                if isinstance(now, HandOff) and now.op == "recv":
                    posted[rank].append(now)
                elif isinstance(now, HandOff):
                    wires[rank, now.peer].append((now.kind, now.chunk + (1 if now.kind == "F" else -1), now.microbatch))
                at[rank] += 1
                moved = True
    return all(place == len(issued) for place, issued in zip(at, programs, strict=True))


def _ready(table: Table, rank: int, action: Action, there: set[tuple[str, int, int]]) -> bool:
    kind = {"F": "F", "W": "W"}.get(action.kind, "B")
    before = action.chunk - 1 if kind == "F" else action.chunk + 1
    if kind == "W" or not 0 <= before < table.chunks or table.rank_of(before) == rank:
        return True
    return (kind, action.chunk, action.microbatch) in there

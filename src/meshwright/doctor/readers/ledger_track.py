"""From the ledger of one rank (``meshwright.record``) to a ``Track``: what its times tell of slowness.

A call lasts from when the rank entered it to when it returned or its work was done; products, where they were recorded,
are computation. What lies between is the program itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.ledger.schema import Entry
from meshwright.ledger.tracks import COMM_OPS, PLACE, Step, Track

#: Steps that a ledger must tell apart before its times mean anything: start-up is not slowness.
MIN_STEPS = 2


def track_of(rank: int, source: str, entries: Sequence[Entry], offset_ns: int, world: int | None) -> Track | None:
    """The track; None where steps are not told apart."""
    timed = [e for e in entries if e.ended_ns is not None and (e.enqueued_ns is not None or e.started_ns is not None)]
    calls = [e for e in timed if e.group is not None]
    if not calls or len({e.step for e in timed} - {None}) < MIN_STEPS:
        return None
    import numpy as np

    from meshwright.ledger.intervals import Stretches, layers, union

    def stretch(rows: Sequence[Entry]) -> Stretches:
        pairs = np.array([_times(e) for e in rows], np.int64).reshape(-1, 2) + offset_ns
        return union(pairs[:, 0], pairs[:, 1])

    order: dict[str, Stretches] = {}
    for phase in ("forward", "backward", "optimizer"):
        order[phase] = stretch([e for e in timed if e.group is None and e.phase == phase])
    order["compute"] = stretch([e for e in timed if e.group is None])
    for op in COMM_OPS:
        order[op] = stretch([e for e in calls if (e.op if e.op in COMM_OPS else "collective") == op])
    steps = _steps(timed, offset_ns)
    order["idle"] = (np.array([steps[0].start_ns], np.int64), np.array([steps[-1].end_ns], np.int64))
    names = list(order)
    segments = layers([order[name] for name in names])
    lookup = np.array([PLACE[name] for name in names], np.int8)
    track = Track(rank, source, "ledger", steps, world=world)
    track.segments = type(segments)(segments.start, segments.end, lookup[segments.label])
    track.calls = calls
    for call in calls:
        begun, ended = _times(call)
        call.started_ns, call.ended_ns = begun + offset_ns, ended + offset_ns
    track.counts = {"events": len(entries)}
    track.lacks.append("a ledger of calls: what the program does between them is not told apart")
    return track


def _times(entry: Entry) -> tuple[int, int]:
    begun = entry.enqueued_ns if entry.enqueued_ns is not None else entry.started_ns
    return begun or 0, max(begun or 0, entry.ended_ns or 0)


def _steps(entries: Sequence[Entry], offset_ns: int) -> list[Step]:
    """By the numbers of the entries; each reaches to the begin of the next."""
    begins: dict[int, int] = {}
    for entry in entries:
        if entry.step is not None:
            begun = _times(entry)[0] + offset_ns
            begins[entry.step] = min(begun, begins.get(entry.step, begun))
    last = max(_times(e)[1] for e in entries) + offset_ns
    numbers = sorted(begins, key=lambda n: begins[n])
    ends = [*(begins[n] for n in numbers[1:]), last]
    return [Step(n, begins[n], end) for n, end in zip(numbers, ends, strict=True)]

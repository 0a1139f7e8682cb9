"""What-if on tracks: the run played again through its collectives, with some of what the ranks did left out.

A rank goes from collective to collective. What it does between leaving the last one that it stood still in and coming
to the next is its own (``gap``); a collective ends for it when the last has come, plus what the transfer took. Played
without any change this gives the recorded times again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshwright.doctor.slow_view import SlowView, Visit

#: Nanoseconds to take off the gap before a rank's arrival at a meeting, or below zero to add to it: (place of the
#: meeting, rank, visit) -> ns.
Less = Callable[[int, int, Visit], float]


def step_seconds(view: SlowView, less: Less | None = None, transfer: float = 1.0) -> float:
    """A step when ``less`` is left out and transfers take ``transfer`` of what they took; seconds."""
    shift: dict[int, float] = dict.fromkeys(view.ranks, 0.0)
    left: dict[tuple[int, int], float] = {}
    for place in sorted(range(len(view.meetings)), key=lambda n: view.meetings[n].arrived_ns):
        meeting, row = view.meetings[place], view.visits[place]
        arrive: dict[int, float] = {}
        for rank, visit in row.items():
            held = left.get((rank, visit.since), 0.0) if visit.since >= 0 else 0.0
            cut = less(place, rank, visit) if less is not None else 0.0
            arrive[rank] = visit.start - held - min(cut, float(visit.gap.sum()))
        begun = max(arrive.values())
        for rank, visit in row.items():
            after = max(0, visit.end - meeting.arrived_ns)
            end = max(begun + after * (transfer if visit.blocking else 1.0), arrive[rank])
            saved = visit.end - end if visit.blocking else visit.start - arrive[rank]
            left[rank, place] = saved
            shift[rank] = saved if visit.blocking else max(shift[rank], saved)
    return _longest(view, shift) / (_longest(view, {}) or 1.0) * view.step_s


def _longest(view: SlowView, saved: Mapping[int, float]) -> float:
    """From the first rank's begin to the last one's end after what each saved up to its last collective; ns."""
    ends = [t.span_ns[1] + t.offset_ns - saved.get(t.rank, 0.0) for t in view.tracks]
    starts = [t.span_ns[0] + t.offset_ns for t in view.tracks]
    return max(0.0, max(ends) - min(starts)) if ends else 0.0

"""Recorded steps of all ranks as a Chrome trace for Perfetto: labels, collectives, who came last, the plan above."""

from __future__ import annotations

from typing import Any

from meshwright.doctor.against import Against
from meshwright.doctor.slow_view import SlowView
from meshwright.ledger.perfetto import Event, named
from meshwright.ledger.tracks import LABELS

#: Stretches of all ranks together that are written; of more, the longest of each rank.
MAX_EVENTS = 300_000
LABEL_LANE, COMM_LANE, STEP_LANE = 1, 2, 0


def events(view: SlowView, against: Against | None = None) -> list[Event]:
    """Process 0 is the plan, where there is one; then a process a rank, times on one clock from the first step on."""
    out: list[Event] = []
    first = min(t.span_ns[0] + t.offset_ns for t in view.tracks)
    if against is not None:
        out += _planned(view, against, first)
    each = max(1, MAX_EVENTS // len(view.tracks))
    for track in view.tracks:
        pid = track.rank + 1
        out += named(pid, f"rank {track.rank}", place=pid)
        lanes = ((STEP_LANE, "steps"), (LABEL_LANE, "what takes the time"), (COMM_LANE, "collectives"))
        for tid, name in lanes:
            out += named(pid, name, tid=tid, place=tid)
        shift = track.offset_ns - first
        for step in track.steps:
            out.append(
                _slice(pid, STEP_LANE, step.name or f"step {step.number}", step.start_ns + shift, step.end_ns + shift)
            )
        lengths = track.segments.end - track.segments.start
        least = sorted(lengths)[-each] if len(lengths) > each else 0
        for start, end, label in zip(*_columns(view, track.rank), strict=True):
            if end - start >= least:
                out.append(_slice(pid, LABEL_LANE, LABELS[label], start + shift, end + shift))
    for meeting, row in zip(view.meetings, view.visits, strict=True):
        for rank, visit in row.items():
            facts = {
                "group": meeting.group,
                "step": meeting.step,
                "last to arrive": f"rank {meeting.last}",
                "waiting us": meeting.wait_ns(rank) / 1e3,
                "transfer us": meeting.transfer_ns / 1e3,
                "bytes": meeting.payload_bytes,
            }
            event = _slice(rank + 1, COMM_LANE, meeting.op, visit.start - first, visit.end - first)
            out.append(event | {"args": {k: v for k, v in facts.items() if v is not None}})
    return out


def _columns(view: SlowView, rank: int) -> tuple[list[int], list[int], list[int]]:
    segments = next(t for t in view.tracks if t.rank == rank).segments
    return segments.start.tolist(), segments.end.tolist(), segments.label.tolist()


def _planned(view: SlowView, against: Against, first: int) -> list[Event]:
    """Every step as the plan has it, from where it was recorded to begin."""
    out = [*named(0, f"planned: {against.layout}", place=0), *named(0, "parts", tid=0)]
    track = view.tracks[0]
    for step in track.steps:
        at = step.start_ns + track.offset_ns - first
        for row in sorted(against.rows, key=lambda r: r.part):
            took = round(row.predicted_s * 1e9)
            if took:
                out.append(_slice(0, 0, row.part, at, at + took))
                at += took
    return out


def _slice(pid: int, tid: int, name: str, start_ns: int, end_ns: int) -> dict[str, Any]:
    span = {"ts": start_ns / 1e3, "dur": max(0, end_ns - start_ns) / 1e3}
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, **span}

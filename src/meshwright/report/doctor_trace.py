"""``doctor --perfetto``: the recorded calls of all ranks as a Chrome trace, which Perfetto opens.

A process is a rank, a thread one of its groups. A call lasts until the rank's next call in the group was issued; one
that has not completed lasts until the last time that any rank recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright.doctor.findings import Finding
from meshwright.doctor.incident import COMPLETED, STATES, Incident, Trace

if TYPE_CHECKING:
    from meshwright.doctor.against import Against

#: Calls of all ranks together that are written; the last ones of every rank come first.
MAX_EVENTS = 400_000


def trace(incident: Incident, findings: Sequence[Finding], against: Against | None = None) -> dict[str, Any]:
    """The trace as plain data; times are microseconds since the first call, or the first recorded step."""
    meta = {"source": "meshwright doctor", "verdict": findings[0].headline if findings else ""}
    if incident.times is not None and incident.times.tracks:
        from meshwright.report.slow_trace import events as recorded

        return {"traceEvents": recorded(incident.times, against), "displayTimeUnit": "ms", "otherData": meta}
    times = [t for rank in incident.traces.values() for t in rank.created_ns if t]
    first, last = (min(times), max(times)) if times else (0, 0)
    each = max(1, MAX_EVENTS // max(1, len(incident.traces)))
    events: list[dict[str, Any]] = []
    for number in sorted(incident.traces):
        events += _rank(incident, incident.traces[number], first, last, each)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": meta}


def _rank(incident: Incident, held: Trace, first: int, last: int, limit: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": held.rank, "args": {"name": f"rank {held.rank}"}}
    ]
    events += [
        {"ph": "M", "name": "thread_name", "pid": held.rank, "tid": group, "args": {"name": _label(incident, group)}}
        for group in sorted(set(held.group))
    ]
    following: dict[int, int] = {}
    for row in range(len(held) - 1, max(-1, len(held) - 1 - limit), -1):
        began = held.created_ns[row]
        if not began:
            continue
        group = held.group[row]
        done = held.state[row] == COMPLETED
        ended = min(following.get(group, last), last) if done else last
        following[group] = began
        kind = incident.signatures[held.signature[row]]
        events.append(
            {
                "ph": "X",
                "name": kind.op,
                "pid": held.rank,
                "tid": group,
                "ts": (began - first) / 1e3,
                "dur": max(1, ended - began) / 1e3,
                "args": {
                    "seq": held.seq[row],
                    "shapes": [list(s) for s in kind.shapes_in],
                    "dtype": kind.dtype,
                    "state": STATES[held.state[row]],
                },
            }
        )
    return events


def _label(incident: Incident, group: int) -> str:
    return incident.groups[group].label if group >= 0 else "group unknown"

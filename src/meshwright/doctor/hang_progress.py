"""Slow rather than stuck: two dumps of the same ranks, between which the job went on.

One dump shows a moment, in which somebody always waits. With two of them a call that was pending in the first and is
over in the second says that the job moves. It is called slow only when nothing timed out and nobody died, and when no
call that is pending now was already issued when the first dumps were written.
"""

from __future__ import annotations

from meshwright.doctor.advice import ADVICE
from meshwright.doctor.findings import Finding, ranks_text
from meshwright.doctor.view import View

#: Facts after which a job no longer moves.
ENDED = frozenset({"watchdog_timeout", "exception", "oom", "killed", "exited", "heartbeat", "xid", "dump_signal"})
#: Findings that only say who is waited for at the moment of a dump.
MOMENTS = frozenset({"host_stuck", "device_stuck", "all_arrived", "unknown"})


def moving(view: View, found: list[Finding]) -> Finding | None:
    """The finding that the job is slow, where two dumps show it; None otherwise."""
    incident = view.incident
    went_on = [r for r, before in incident.earlier.items() if max(incident.traces[r].created_ns, default=0) > before]
    if len(went_on) < 2 or 2 * len(went_on) < len(incident.traces):
        return None
    if any(f.kind not in MOMENTS for f in found) or any(f.kind in ENDED for f in incident.facts):
        return None
    first = max(incident.earlier.values())
    issued = [
        t for rank, calls in view.stall.pending.items() for p in calls if (t := incident.traces[rank].created_ns[p.row])
    ]
    if not issued or min(issued) <= first:
        return None
    late = found[0].guilty_ranks if found else ()
    whom = f"; at the second dumps {ranks_text(late)} came last" if late else ""
    return Finding(
        "slow_not_stuck",
        late,
        view.waiting(late),
        found[0].call_site if found else None,
        min(issued) / 1e9,
        "medium",
        f"the job is slow, not stuck: between two dumps {ranks_text(went_on)} went on{whom}",
        (
            f"every call that is pending now was issued after the first dumps of {len(went_on)} ranks were written",
            *(found[0].evidence if found else ()),
        ),
        ("traces of a step, which tell waiting from work",),
        ADVICE["slow_not_stuck"],
    )

"""What the doctor measured of a slow job: the parts of each rank's step, and its collectives, as tables and as JSON."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from meshwright.doctor.against import Against
from meshwright.doctor.slow_comm import peak_bytes_s, traffic, wire
from meshwright.doctor.slow_view import SlowView
from meshwright.doctor.slow_words import bytes_text, rate_text, time_text
from meshwright.ledger.tracks import COMM_OPS, COMPUTE
from meshwright.report.terminal import table

#: Ranks and collectives that the tables show; all are in ``--json``, collectives up to ``MAX_JSON``.
MAX_RANKS, MAX_ROWS, MAX_JSON = 16, 8, 5_000
#: Columns of the breakdown and the labels that they hold.
COLUMNS: dict[str, tuple[str, ...]] = {
    "compute": COMPUTE,
    "data": ("data",),
    "launch": ("launch",),
    "sync": ("sync",),
    "copy": ("copy",),
    "gc": ("gc",),
    "compile": ("compile",),
    "checkpoint": ("checkpoint",),
    "idle": ("idle",),
}


def breakdown_table(view: SlowView) -> Table:
    """A row a rank: where its step goes; only columns in which some rank spends time."""
    used = [name for name, labels in COLUMNS.items() if any(view.label_s(r, *labels) > 0 for r in view.ranks)]
    known = bool(view.meetings)
    comm = ("waiting", "transfer") if known else ("collectives",)
    made = table("rank", "step", *used, *comm, "hidden", title=f"A step of each rank, the mean of {view.steps}")
    for rank in sorted(view.ranks, key=lambda r: -view.wait_s(r))[:MAX_RANKS] if known else view.ranks[:MAX_RANKS]:
        rows = view.parts[rank]
        step = sum(p.step_s for p in rows) / len(rows)
        exposed = sum(p.exposed_s for p in rows) / len(rows)
        waiting = min(view.wait_s(rank), exposed)
        split = (waiting, exposed - waiting) if known else (exposed,)
        hidden = sum(p.overlapped_s for p in rows) / len(rows)
        cells = [view.label_s(rank, *COLUMNS[name]) for name in used]
        made.add_row(str(rank), *(time_text(s) if s else "-" for s in (step, *cells, *split, hidden)))
    return made


def collectives_table(view: SlowView) -> Table:
    """Operations with what they move and reach, and who comes last."""
    peak = peak_bytes_s(view)
    made = table("collective", "a step", "bytes", "transfer", "waiting", "bus", "of peak", "last to arrive")
    for row in traffic(view)[:MAX_ROWS]:
        own = [m for m in view.meetings if m.op == row.op]
        last = [m.last for m in own]
        worst = max(sorted(set(last)), key=last.count)
        waits = sum(m.wait_ns(r) for m in own for r in m.ranks) / 1e9 / sum(len(m.ranks) for m in own)
        rate = row.bus_bytes_s
        made.add_row(
            escape(row.op),
            f"{row.per_step:.3g}",
            bytes_text(row.payload_bytes) if row.payload_bytes is not None else "?",
            time_text(row.transfer_s),
            time_text(waits),
            rate_text(rate) if rate else "?",
            f"{100 * rate / peak[0]:.0f} %" if rate and peak else "?",
            f"rank {worst} ({last.count(worst)} of {len(last)})",
        )
    return made


def against_table(against: Against) -> Table:
    """Parts of the planned step beside the recorded one."""
    word = "within" if against.within else "outside"
    title = (
        f"{against.what} of {against.layout or 'the plan'}: planned {time_text(against.predicted_s)} "
        f"({time_text(against.low_s)} to {time_text(against.high_s)}), recorded {time_text(against.recorded_s)}: {word}"
    )
    made = table("part", "planned", "recorded", "difference", title=escape(title))
    for row in against.rows:
        more = row.recorded_s - row.predicted_s
        cells = (time_text(row.predicted_s), time_text(row.recorded_s), f"{'+' if more > 0 else ''}{time_text(more)}")
        made.add_row(row.part, *cells)
    return made


def as_json(view: SlowView) -> dict[str, Any]:
    """Ranks with the parts of their steps, every collective with its last rank, what operations reach."""
    peak = peak_bytes_s(view)
    return {
        "step_s": view.step_s,
        "link_peak_bytes_s": peak[0] if peak else None,
        "ranks": [_rank(view, rank) for rank in view.ranks],
        "collectives": [_meeting(view, n) for n in range(min(len(view.meetings), MAX_JSON))],
        "collectives_matched": len(view.meetings),
        "collectives_alone": view.matched.alone,
        "collectives_doubtful": view.matched.doubtful,
        "operations": [
            {
                "op": t.op,
                "per_step": t.per_step,
                "payload_bytes": t.payload_bytes,
                "transfer_s": t.transfer_s,
                "exposed_transfer_s": t.exposed_s,
                "bus_bytes_s": t.bus_bytes_s,
                "latency_s": t.latency_s,
                "seconds_per_byte": t.slope_s,
            }
            for t in traffic(view)
        ],
    }


def _rank(view: SlowView, rank: int) -> dict[str, Any]:
    track = next(t for t in view.tracks if t.rank == rank)
    return {
        "rank": rank,
        "source": track.source,
        "host": track.host,
        "device": track.device or "cpu",
        "clock_offset_ns": track.offset_ns,
        "wait_s": view.wait_s(rank),
        "counts": track.counts,
        "lacks": track.lacks,
        "steps": [
            {
                "step": p.number,
                "seconds": p.step_s,
                "parts_s": p.parts_s,
                "collectives_s": p.comm_s,
                "overlapped_s": p.overlapped_s,
                "exposed_s": sum(p.parts_s.get(op, 0.0) for op in COMM_OPS),
            }
            for p in view.parts[rank]
        ],
    }


def _meeting(view: SlowView, number: int) -> dict[str, Any]:
    meeting, row = view.meetings[number], view.visits[number]
    return {
        "op": meeting.op,
        "group": meeting.group,
        "step": meeting.step,
        "seq": meeting.seq,
        "ranks": list(meeting.ranks),
        "last": meeting.last,
        "late_s": meeting.late_ns / 1e9,
        "transfer_s": meeting.transfer_ns / 1e9,
        "payload_bytes": meeting.payload_bytes,
        "wire_bytes": wire(view, meeting),
        "wait_s": {str(r): meeting.wait_ns(r) / 1e9 for r in meeting.ranks},
        "exposed_wait_s": {str(r): v.exposed_wait / 1e9 for r, v in sorted(row.items())},
    }

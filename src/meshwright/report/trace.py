"""``plan --perfetto``: the predicted timeline of a plan as a trace file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.ledger.perfetto import Process, trace
from meshwright.ledger.schema import Entry
from meshwright.plan.plan import Plan
from meshwright.plan.timeline import Timeline, Track


def plan_trace(plan: Plan, timelines: Sequence[Timeline], *, pools: bool = False) -> dict[str, Any]:
    """The trace: a process for the first rank class of every stage, a thread for every stream.

    A round of decoding begins where the prefill ends; the stages of two ``pools`` are processes of their own.
    """
    processes: dict[tuple[str, int, str], list[Entry]] = {}
    start_ns = 0
    for timeline in timelines:
        pool = f"{timeline.phase} pool, " if pools else ""
        for track in timeline.tracks:
            rows = processes.setdefault((pool, track.stage, _name(track)), [])
            rows += _later(track.entries, start_ns)
        start_ns += round(timeline.seconds * 1e9)
    meta = {
        "source": "meshwright plan",
        "verdict": plan.verdict,
        "model": plan.spec.name,
        "cluster": str(plan.cluster),
        "layout": str(plan.layout),
        "engine": plan.engine,
        "seconds": {t.phase: t.seconds for t in timelines},
        "notes": [t.note for t in timelines if t.note],
    }
    return trace([Process(pool + name, rows) for (pool, _, name), rows in processes.items()], meta)


def _name(track: Track) -> str:
    alike = f" and {track.ranks - 1:,} like it" if track.ranks > 1 else ""
    return f"stage {track.stage}: rank {track.rank}{alike}"


def _later(entries: Iterable[Entry], ns: int) -> Iterable[Entry]:
    for e in entries:
        yield replace(e, started_ns=(e.started_ns or 0) + ns, ended_ns=(e.ended_ns or 0) + ns)


def write_trace(plan: Plan, timelines: Sequence[Timeline], path: Path, *, pools: bool = False) -> None:
    """Write the trace (see ``plan_trace``); folders on the way are made.

    Raises:
        InputError: the path cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plan_trace(plan, timelines, pools=pools)), encoding="utf-8")
    except OSError as error:
        raise InputError(f"--perfetto {path}: {error.strerror or error}") from None

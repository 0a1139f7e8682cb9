"""``plan --perfetto``: the predicted timeline of a plan as a trace file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.ledger.perfetto import Process, trace
from meshwright.ledger.schema import Entry
from meshwright.plan.plan import Plan
from meshwright.plan.timeline import Track


def plan_trace(plan: Plan, prefill: Plan | None = None) -> dict[str, Any]:
    """The trace: a process for the first rank class of every stage, a thread for every stream.

    A round of decoding begins where the prefill ends; the stages of two pools are processes of their own.

    Raises:
        InputError: the layout is illegal.
    """
    from meshwright.api import timelines

    found = timelines(plan, prefill)
    processes: dict[tuple[str, int, str], list[Entry]] = {}
    start_ns = 0
    for timeline in found:
        pool = f"{timeline.phase} pool, " if prefill is not None else ""
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
        "seconds": {t.phase: t.seconds for t in found},
        "notes": [t.note for t in found if t.note],
    }
    return trace([Process(pool + name, rows) for (pool, _, name), rows in processes.items()], meta)


def _name(track: Track) -> str:
    alike = f" and {track.ranks - 1:,} like it" if track.ranks > 1 else ""
    return f"stage {track.stage}: rank {track.rank}{alike}"


def _later(entries: Iterable[Entry], ns: int) -> Iterable[Entry]:
    for e in entries:
        yield replace(e, started_ns=(e.started_ns or 0) + ns, ended_ns=(e.ended_ns or 0) + ns)


def write_trace(plan: Plan, prefill: Plan | None, path: Path) -> None:
    """Write the trace; folders on the way are made.

    Raises:
        InputError: the layout is illegal, or the path cannot be written.
    """
    if plan.chosen is None or (prefill is not None and prefill.chosen is None):
        raise InputError("--perfetto: the layout is illegal, so there is no timeline to write")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plan_trace(plan, prefill)), encoding="utf-8")
    except OSError as error:
        raise InputError(f"--perfetto {path}: {error.strerror or error}") from None

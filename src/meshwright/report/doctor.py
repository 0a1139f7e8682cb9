"""What the doctor found, in the terminal and as JSON: the verdict, one table, then what it rests on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.markup import escape

from meshwright.doctor.findings import Finding, ranks_text
from meshwright.doctor.incident import Incident
from meshwright.report.as_json import plain
from meshwright.report.terminal import table

if TYPE_CHECKING:
    from meshwright.doctor.against import Against

#: What may steer a terminal or turn text around: control characters, and the marks of writing direction.
_STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
#: Lines of evidence, of lacks and of advice that are shown without ``--json``.
MAX_LINES = 8


def shown(text: str) -> str:
    """Text of a dump or log as a terminal may get it: nothing in it steers."""
    return escape(_STEERING.sub("?", text))


def clock(at: float | None) -> str:
    """Time of day of Unix seconds, UTC."""
    return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")


def verdict(findings: Sequence[Finding]) -> list[str]:
    """The first lines: who and where, who waits since when, how sure."""
    first = findings[0]
    lines = [first.headline if first.headline.endswith(".") else f"{first.headline}."]
    waiting = len(first.waiting_ranks)
    if waiting:
        since = f", the first since {clock(first.since)}" if first.since is not None else ""
        verb = "waits" if waiting == 1 else "wait"
        whom = "it" if len(first.guilty_ranks) == 1 else "them" if first.guilty_ranks else "this"
        lines.append(f"{waiting} rank{'s' * (waiting > 1)} {verb} for {whom}{since}. Confidence {first.confidence}.")
    else:
        lines.append(f"Confidence {first.confidence}.")
    if first.alternative:
        lines.append(f"Or: {first.alternative}")
    lines += [f"Not the cause: {line}" for line in first.consequences[:MAX_LINES]]
    return lines


def as_text(findings: Sequence[Finding], incident: Incident | None = None, against: Against | None = None) -> Group:
    """Everything for a terminal; ``against`` a plan where one was given."""
    made = table("kind", "guilty", "waiting", "where", "since (UTC)", "confidence", title="Findings, the cause first")
    for column in made.columns[1:]:
        column.justify = "left"
    for f in findings:
        waiting = ranks_text(f.waiting_ranks) if len(f.waiting_ranks) < 9 else f"{len(f.waiting_ranks)} ranks"
        cells = (f.kind, ranks_text(f.guilty_ranks, 4), waiting, f.call_site or "-", clock(f.since) or "-")
        made.add_row(*map(shown, cells), f.confidence)
    parts: list[Any] = [shown(line) for line in verdict(findings)]
    parts += ["", made]
    at = len(parts)
    for number, f in enumerate(findings, 1):
        mark = f" of {number}, {f.kind}" if len(findings) > 1 else ""
        sections = (
            (f"Evidence{mark}", f.evidence),
            (f"Not known{mark}", f.unknown),
            (f"What to do{mark}", f.advice),
        )
        for title, lines in sections:
            if lines and (number == 1 or title.startswith("Evidence")):
                parts += ["", f"[bold]{escape(title)}[/bold]", *(f"  {shown(line)}" for line in lines[:MAX_LINES])]
                if len(lines) > MAX_LINES:
                    parts.append(f"  ... {len(lines) - MAX_LINES} more in --json")
    if incident is not None and incident.times is not None and incident.times.tracks:
        from meshwright.report.slow import breakdown_table, collectives_table

        tables = [breakdown_table(incident.times)]
        if incident.times.meetings:
            tables.append(collectives_table(incident.times))
        parts[at:at] = [part for made in tables for part in ("", made)]
        at += 2 * len(tables)
    if against is not None:
        from meshwright.report.slow import against_table

        parts[at:at] = ["", against_table(against)]
    if incident is not None:
        parts += ["", escape(read_line(incident))]
    return Group(*parts)


def read_line(incident: Incident) -> str:
    """What was read, in a line."""
    calls = sum(map(len, incident.traces.values()))
    world = f" of {incident.world}" if incident.world else ""
    if incident.tracks and any(t.steps for t in incident.tracks):
        events = sum(t.counts.get("events", 0) for t in incident.tracks)
        steps = sum(len(t.steps) for t in incident.tracks)
        return f"Read: traces of {len(incident.tracks)} ranks ({events:,} events, {steps} steps)"
    if incident.jobs:
        rows = sum(op.start_s.size for job in incident.jobs for op in job.ops)
        return f"Read: {rows:,} operations of {sum(len(job.steps) for job in incident.jobs)} steps"
    return f"Read: calls of {len(incident.traces)}{world} ranks ({calls:,}), {len(incident.facts):,} lines of logs"


def as_json(findings: Sequence[Finding], incident: Incident, against: Against | None = None) -> dict[str, Any]:
    """Everything, for programs: ``findings`` with the earliest cause first."""
    return {
        "verdict": findings[0].headline,
        "healthy": findings[0].kind == "healthy",
        "findings": [f.to_json() for f in findings],
        "lacks": list(incident.lacks),
        "world": incident.world,
        "ranks_read": sorted(incident.traces),
        "calls_read": sum(map(len, incident.traces.values())),
        "facts_read": len(incident.facts) + incident.dropped_facts,
        "times": _times(incident),
        "against": plain(against) if against is not None else None,
    }


def _times(incident: Incident) -> dict[str, Any] | None:
    """What traces tell of time; None without any."""
    if incident.times is None or not incident.times.tracks:
        return None
    from meshwright.report.slow import as_json as times

    return times(incident.times)

"""The ladder of the doctor in the terminal and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.markup import escape

from meshwright.doctor.climb import Ladder
from meshwright.report.terminal import table

MAX_RANKS = 32


def as_text(ladder: Ladder) -> Group:
    """Verdict, the rungs, and where every rank stood at the first that failed."""
    parts: list[Any] = [escape(ladder.verdict), ""]
    rungs = table("rung", "result", "seconds", "MB/s a rank", title=f"{ladder.world} ranks over {ladder.backend}")
    for number, rung in enumerate(ladder.rungs):
        failed = ladder.failed
        result = "passes" if failed is None or number < failed else "FAILS" if number == failed else "not reached"
        took = f"{ladder.seconds[number]:.3f}" if number < len(ladder.seconds) else "-"
        rate = f"{ladder.bytes_per_s[number] / 1e6:,.0f}" if number in ladder.bytes_per_s else "-"
        rungs.add_row(escape(rung.name), result, took, rate)
    parts.append(rungs)
    if not ladder.passed:
        stops = table("rank", "where it stood", "since the last other rank, s", title="Last line of every rank's log")
        stops.columns[1].justify = "left"
        times = [s.at for s in ladder.stops if s.at is not None]
        for stop in ladder.stops[:MAX_RANKS]:
            late = f"{max(times) - stop.at:.3f}" if stop.at is not None and times else "-"
            stops.add_row(str(stop.rank), escape(stop.says), late)
        parts += ["", stops, "", escape(f"The launcher says: {ladder.error}")]
    parts += ["", "[bold]This machine[/bold]", *(f"  {escape(line)}" for line in ladder.topology)]
    return Group(*parts)


def as_json(ladder: Ladder) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "verdict": ladder.verdict,
        "passed": ladder.passed,
        "world": ladder.world,
        "backend": ladder.backend,
        "rungs": [
            {
                "name": rung.name,
                "means": rung.means,
                "calls": [str(step) for step in rung.steps],
                "seconds": ladder.seconds[number] if number < len(ladder.seconds) else None,
                "bytes_per_s": ladder.bytes_per_s.get(number),
            }
            for number, rung in enumerate(ladder.rungs)
        ],
        "failed": ladder.failed,
        "error": ladder.error,
        "stops": [asdict(stop) for stop in ladder.stops],
        "topology": ladder.topology,
    }

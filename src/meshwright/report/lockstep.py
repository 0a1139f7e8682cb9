"""What a dry-run in lockstep found, in the terminal: verdict, one table of ranks, clues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from meshwright.report.terminal import console, table

if TYPE_CHECKING:
    from meshwright.runtime.lockstep.outcome import Outcome

#: Rows of the table; alike ranks share one.
MAX_ROWS = 16


def show_outcome(outcome: Outcome) -> None:
    """Print an outcome. Ranks in the same state at the same line share a row."""
    from meshwright.runtime.lockstep.outcome import ranks_text

    out = console()
    out.print(escape(outcome.verdict), style="bold green" if outcome.code == 0 else "bold red", soft_wrap=True)
    alike: dict[tuple[str, str, str, str], list[int]] = {}
    for row in outcome.rows:
        alike.setdefault((row.state, row.op, row.group, row.call_site), []).append(row.rank)
    if alike:
        made = table("rank", "state", "operation", "group", "line")
        for column in made.columns:
            column.justify, column.no_wrap = "left", False
        for (state, op, group, site), ranks in list(alike.items())[:MAX_ROWS]:
            made.add_row(ranks_text(ranks).split(" ", 1)[1], *(escape(text) for text in (state, op, group, site)))
        out.print(made)
        if len(alike) > MAX_ROWS:
            out.print(f"... {len(alike) - MAX_ROWS} more")
    for note in outcome.notes:
        out.print(escape(f"- {note}"), soft_wrap=True)
    if outcome.tail:
        out.print("\n[bold]Its last output[/bold]")
        for line in outcome.tail:
            out.print(escape(line), soft_wrap=True)

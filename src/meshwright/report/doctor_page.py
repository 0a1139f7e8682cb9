"""``doctor --html``: one offline page with the calls of all ranks as a picture, the divergence marked.

A row is a rank, a column the number of a call in the guilty group. Equal calls have equal colours, a call that was
never entered is white, one that has not completed is hatched. Everything that came from a dump is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from meshwright.doctor.findings import Finding, ranks_text
from meshwright.doctor.incident import COMPLETED, Incident, Trace
from meshwright.report.doctor import clock, read_line, verdict
from meshwright.report.page import STYLE

if TYPE_CHECKING:
    from meshwright.doctor.against import Against

#: Ranks and calls that the picture shows.
MAX_ROWS, MAX_COLUMNS = 64, 48
CELL, LEFT, TOP = 18, 70, 40
OWN_STYLE = """td{text-align:left}span.key{padding:.1rem .5rem;margin-right:.4rem;display:inline-block}
svg text{font:11px system-ui,sans-serif;fill:#1d2330}"""
COLOURS = ("#9ec3e6", "#a8d5b5", "#f2cf8b", "#cdb4e0", "#f0b3ac", "#b9d7d9", "#d9d2a6", "#c9cfda")


def page(findings: Sequence[Finding], incident: Incident, against: Against | None = None) -> str:
    """The whole page; ``against`` a plan where one was given."""
    first = findings[0]
    tone = "yes" if first.kind == "healthy" else "no"
    lines = "<br>".join(map(escape, verdict(findings)))
    head = ("kind", "guilty", "waiting", "where", "since (UTC)", "confidence", "what")
    rows = [
        (
            f.kind,
            ranks_text(f.guilty_ranks, 6),
            ranks_text(f.waiting_ranks, 6),
            f.call_site or "-",
            clock(f.since) or "-",
            f.confidence,
            f.headline,
        )
        for f in findings
    ]
    body = [
        "<!doctype html><meta charset=utf-8><title>meshwright doctor</title>",
        f"<style>{STYLE}{OWN_STYLE}</style>",
        f'<h1>meshwright doctor</h1><p class="verdict {tone}">{lines}</p>',
        f"<p class=sub>{escape(read_line(incident))}</p>",
        _table(head, rows),
    ]
    picture = _picture(first, incident)
    if picture:
        body += ["<h2>Calls of the guilty group</h2>", picture]
    if incident.times is not None and incident.times.tracks:
        from meshwright.report.slow_page import picture as timeline

        body += ["<h2>Timeline of the longest step</h2>", timeline(incident.times, against)]
    for f in findings:
        for title, texts in (("Evidence", f.evidence), ("Not known", f.unknown), ("What to do", f.advice)):
            if texts:
                items = "".join(f"<li>{escape(text)}</li>" for text in texts)
                body.append(f"<h2>{title} ({escape(f.kind)})</h2><ul>{items}</ul>")
    if incident.lacks:
        items = "".join(f"<li>{escape(text)}</li>" for text in incident.lacks[:50])
        body.append(f"<h2>What this folder lacks</h2><ul>{items}</ul>")
    return "\n".join(body)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th class=text>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


Cells = dict[int, tuple[int, bool]]


def _cells(trace: Trace, groups: frozenset[int]) -> Cells:
    """By number of the call: what was called, and whether it completed; collectives of some groups."""
    return {
        trace.seq[row]: (trace.signature[row], trace.state[row] == COMPLETED)
        for row in range(len(trace))
        if trace.group[row] in groups and not trace.p2p[row]
    }


def _rows(finding: Finding, incident: Incident, members: Sequence[int]) -> list[int]:
    """Ranks to draw: all of a small group; else the guilty ones and some of the others."""
    if len(members) <= MAX_ROWS:
        return list(members)
    guilty = [r for r in members if r in finding.guilty_ranks][: MAX_ROWS // 2]
    others = [r for r in members if r not in finding.guilty_ranks][: MAX_ROWS - len(guilty)]
    return sorted({*guilty, *others})


def _picture(finding: Finding, incident: Incident) -> str:
    """The picture as SVG; empty where the finding names no group or nothing of it was recorded."""
    groups = frozenset(i for i, g in enumerate(incident.groups.rows) if finding.group in {g.label, g.name, g.key})
    touched = set(finding.guilty_ranks) | set(finding.waiting_ranks)
    groups = frozenset(i for i in groups if not incident.groups[i].members or touched & {*incident.groups[i].members})
    if finding.group is None or not groups:
        return ""
    members = sorted({r for i in groups for r in incident.groups[i].members} or touched)
    members = members if len(groups) == 1 else sorted(touched & set(members))
    ranks = _rows(finding, incident, members)
    cells = {r: _cells(incident.traces[r], groups) if r in incident.traces else {} for r in ranks}
    numbers = sorted({n for row in cells.values() for n in row})
    if not numbers:
        return ""
    marked = finding.seq if finding.seq is not None else numbers[-1]
    shown = [n for n in numbers if n >= marked - MAX_COLUMNS * 2 // 3][:MAX_COLUMNS]
    names: dict[int, str] = {}
    drawn: list[str] = []
    for y, rank in enumerate(ranks):
        top = TOP + y * CELL
        guilty = rank in finding.guilty_ranks
        weight = ' font-weight="700" style="fill:#b3261e"' if guilty else ""
        drawn.append(f'<text x="{LEFT - 8}" y="{top + 13}" text-anchor="end"{weight}>rank {rank}</text>')
        for x, number in enumerate(shown):
            drawn.append(_cell(incident, cells[rank].get(number), number, rank, LEFT + x * CELL, top, names))
    for x, number in enumerate(shown):
        if number == marked:
            height = len(ranks) * CELL
            drawn.append(
                f'<rect x="{LEFT + x * CELL - 1}" y="{TOP - 2}" width="{CELL + 1}" height="{height + 3}" fill="none" '
                f'stroke="#b3261e" stroke-width="2.5"/>'
            )
            drawn.append(f'<text x="{LEFT + x * CELL + 8}" y="{TOP - 8}" text-anchor="middle">#{number}</text>')
    drawn.append(f'<text x="{LEFT}" y="14">#{shown[0]} to #{shown[-1]} of {escape(str(finding.group))}</text>')
    legend = "".join(
        f'<span class=key style="background:{_colour(i)}">{escape(name)}</span>'
        for i, name in enumerate(names.values())
    )
    width, height = LEFT + len(shown) * CELL + 20, TOP + len(ranks) * CELL + 10
    pattern = (
        '<defs><pattern id="h" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<line x1="0" y1="0" x2="0" y2="5" stroke="#1d2330" stroke-width="1"/></pattern></defs>'
    )
    return (
        f'<div class="scroll"><svg width="{width}" height="{height}" role="img">{pattern}{"".join(drawn)}</svg></div>'
        f"<p class=sub>{legend} hatched: not completed; white: never entered, or not recorded</p>"
    )


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _cell(
    incident: Incident, found: tuple[int, bool] | None, number: int, rank: int, x: int, y: int, names: dict[int, str]
) -> str:
    """One call of one rank; what is called gets the next colour at its first time."""
    size = f'x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}"'
    if found is None:
        return f'<rect {size} fill="#fff" stroke="#c9cfda" stroke-dasharray="2 2"/>'
    signature, completed = found
    if signature not in names:
        kind = incident.signatures[signature]
        shapes = " ".join(str(list(s)) for s in kind.shapes_in[:2])
        names[signature] = f"{kind.op} {shapes} {kind.dtype or ''}".strip()
    colour = _colour(list(names).index(signature))
    tip = f"<title>rank {rank} #{number}: {escape(names[signature])}{'' if completed else ', not completed'}</title>"
    over = "" if completed else f'<rect {size} fill="url(#h)"/>'
    return f'<g>{tip}<rect {size} fill="{colour}"/>{over}</g>'

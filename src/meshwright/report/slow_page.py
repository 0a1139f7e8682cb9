"""Rank-by-rank timeline of a recorded step as a picture for the page, the planned step above it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from meshwright.doctor.against import Against
from meshwright.doctor.slow_view import SlowView
from meshwright.doctor.slow_words import time_text
from meshwright.ledger.tracks import COMM_OPS, LABELS, Track

#: Ranks drawn, pixels of a step, height of a row.
MAX_RANKS, WIDTH, ROW, LEFT = 64, 900, 20, 76
COLOURS: Mapping[str, str] = {
    **dict.fromkeys(("forward", "compute", "computation"), "#9ec3e6"),
    "backward": "#6d9fce",
    "optimizer": "#cdb4e0",
    "copy": "#b9d7d9",
    **dict.fromkeys((*COMM_OPS, "transfer"), "#f2cf8b"),
    "waiting": "#f0b3ac",
    "data": "#d8574d",
    **dict.fromkeys(("gc", "compile", "checkpoint", "pauses"), "#8f6bb3"),
    "sync": "#d9d2a6",
    **dict.fromkeys(("launch", "launch and idle"), "#dfe3ea"),
    "idle": "#f4f5f8",
}
LEGEND = ("forward", "backward", "optimizer", "transfer", "waiting", "data", "gc", "sync", "launch", "idle")

Block = tuple[float, float, str]


def picture(view: SlowView, against: Against | None = None) -> str:
    """The longest recorded step of all ranks on one clock."""
    tracks = view.tracks[:MAX_RANKS]
    place = max(range(view.steps), key=lambda n: max(view.parts[t.rank][n].step_s for t in tracks))
    low = min(t.steps[place].start_ns + t.offset_ns for t in tracks)
    high = max(t.steps[place].end_ns + t.offset_ns for t in tracks)
    span_s = (high - low) / 1e9 or 1.0
    scale = WIDTH / max(span_s, against.predicted_s if against else 0.0)
    rows: list[str] = []
    top = 24
    if against is not None:
        rows += _row("planned", _planned(against), top, scale, bold=True)
        top += ROW + 8
    for track in tracks:
        rows += _row(f"rank {track.rank}", _blocks(view, track, place, low, high), top, scale)
        top += ROW
    keys = "".join(f'<span class=key style="background:{COLOURS[name]}">{name}</span>' for name in LEGEND)
    title = f"step {view.parts[tracks[0].rank][place].number}, {time_text(span_s)}"
    svg = f'<svg width="{LEFT + WIDTH + 10}" height="{top + 8}" role="img"><text x="{LEFT}" y="14">{title}</text>'
    return f'<div class="scroll">{svg}{"".join(rows)}</svg></div><p class=sub>{keys}</p>'


def _planned(against: Against) -> list[Block]:
    at = 0.0
    blocks = []
    for row in sorted(against.rows, key=lambda r: r.part):
        if row.predicted_s > 0:
            blocks.append((at, row.predicted_s, row.part))
            at += row.predicted_s
    return blocks


def _row(name: str, blocks: Sequence[Block], top: int, scale: float, *, bold: bool = False) -> list[str]:
    weight = ' font-weight="700"' if bold else ""
    out = [f'<text x="{LEFT - 6}" y="{top + 14}" text-anchor="end"{weight}>{escape(name)}</text>']
    for at, took, label in blocks:
        width = max(took * scale, 0.5)
        tip = f"<title>{escape(name)}: {escape(label)} {time_text(took)}</title>"
        colour = COLOURS.get(label, "#c9cfda")
        out.append(
            f'<g>{tip}<rect x="{LEFT + at * scale:.1f}" y="{top}" width="{width:.1f}" height="{ROW - 3}" '
            f'fill="{colour}"/></g>'
        )
    return out


def _blocks(view: SlowView, track: Track, place: int, low: int, high: int) -> list[Block]:
    """The label that fills most of each pixel, alike neighbours as one; of collectives, waiting apart."""
    edges = np.linspace(low, high, WIDTH + 1).astype(np.int64)
    spent = np.diff(track.segments.sums(edges - track.offset_ns, len(LABELS)), axis=0)
    names = [LABELS[n] for n in spent.argmax(axis=1)]
    empty = spent.sum(axis=1) == 0
    for meeting in view.meetings:
        if track.rank in meeting.calls and meeting.start_ns[track.rank] < high and meeting.arrived_ns > low:
            first, last = np.searchsorted(edges, [meeting.start_ns[track.rank], meeting.arrived_ns])
            for n in range(max(0, int(first)), min(WIDTH, int(last))):
                names[n] = "waiting" if names[n] in COMM_OPS else names[n]
    blocks: list[Block] = []
    pixel = (high - low) / 1e9 / WIDTH
    for n, name in enumerate(names):
        if empty[n]:
            continue
        if blocks and blocks[-1][2] == name and abs(blocks[-1][0] + blocks[-1][1] - n * pixel) < pixel / 2:
            blocks[-1] = (blocks[-1][0], blocks[-1][1] + pixel, name)
        else:
            blocks.append((n * pixel, pixel, name))
    return blocks

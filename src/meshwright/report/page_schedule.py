"""The page: the pipeline as a Gantt chart, a row a stage; what is hatched stands idle.

Training: the simulated schedule. Serving: one round of decoding, in which as many batches as there are stages take
turns. Long steps are cut in the middle, many stages thinned, so that the chart stays below a few thousand marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from meshwright.plan.plan import Plan
from meshwright.plan.timeline import Timeline, Track
from meshwright.plan.timeline_train import ACTION, WORDS
from meshwright.report.page_parts import chart, duration

#: Bars that the chart draws at most (idle ones not counted), and rows.
MAX_BARS = 1600
MAX_ROWS = 32

#: Kind of bar -> colour.
KIND_COLOURS = {
    WORDS["F"]: "#3b6fb6",
    WORDS["B"]: "#4aa37a",
    WORDS["I"]: "#4aa37a",
    WORDS["W"]: "#c98a2b",
    "pass": "#3b6fb6",
    "gradients": "#c2554d",
    "optimizer": "#8a63b0",
}


class Bar(NamedTuple):
    """A stretch of work of a stage: what kind, what it is called, from when to when (seconds)."""

    stage: int
    kind: str
    name: str
    start: float
    end: float


def training_bars(timeline: Timeline) -> list[Bar]:
    """The actions of every stage, then what comes once a step: the rest of the gradient sums, the optimizer."""
    bars = []
    for track in timeline.tracks:
        actions = [e for e in track.entries if e.op == ACTION]
        for e in actions:
            name = e.name or ""
            kind = next(word for word in (*WORDS.values(), "") if name.startswith(word))
            bars.append(Bar(track.stage, kind, name, (e.started_ns or 0) / 1e9, (e.ended_ns or 0) / 1e9))
        at = max((e.ended_ns or 0 for e in actions), default=0) / 1e9
        for kind, phase in (("gradients", "backward"), ("optimizer", "optimizer")):
            behind = [e for e in track.entries if e.phase == phase and e.microbatch is None]
            start = max(at, min((e.started_ns or 0 for e in behind), default=0) / 1e9)
            end = max((e.ended_ns or 0 for e in behind), default=0) / 1e9
            if end > start:
                bars.append(Bar(track.stage, kind, f"{kind}, once a step", start, end))
    return bars


def serving_bars(decode: Timeline) -> list[Bar]:
    """The passes of one round, once the pipeline is full: batch b reaches stage s in slot s + b."""
    stages = len(decode.tracks)
    slot = decode.seconds / stages
    lasts = [_seconds(track) for track in decode.tracks]
    return [
        Bar(stage, "pass", f"batch {(turn - stage) % stages}", turn * slot, turn * slot + lasts[stage])
        for stage in range(stages)
        for turn in range(2 * stages)
    ]


def _seconds(track: Track) -> float:
    return ((track.entries[-1].ended_ns or 0) - (track.entries[0].started_ns or 0)) / 1e9


def pipeline(plan: Plan, timelines: Sequence[Timeline]) -> str:
    """The section; nothing where there is one stage and one pass."""
    last = timelines[-1]
    if len(last.tracks) < 2:
        return ""
    if plan.kind == "train":
        bars = training_bars(last)
        schedule = plan.layout.schedule if plan.layout is not None else ""
        title = f"Pipeline: {schedule}, one step" + (f" ({last.note})" if last.note else "")
    else:
        bars = serving_bars(last)
        title = "Pipeline: two rounds of decoding"
    idle = idle_shares(bars)
    text = (
        f"{duration(max(b.end for b in bars))}, of which the stages stand idle {sum(idle) / len(idle):.1%} on average "
        f"and the busiest one {min(idle):.1%} (hatched)."
    )
    return f'<h2>{escape(title)}</h2><p class="sub">{escape(text)}</p>{gantt(bars)}'


def idle_shares(bars: Sequence[Bar]) -> list[float]:
    """Idle share of every stage between 0 and the end of the last bar."""
    end = max(b.end for b in bars)
    busy: dict[int, float] = {}
    for b in bars:
        busy[b.stage] = busy.get(b.stage, 0.0) + b.end - b.start
    return [1 - busy[stage] / end for stage in sorted(busy)]


def thinned(bars: Sequence[Bar]) -> tuple[list[Bar], tuple[float, float] | None]:
    """At most ``MAX_ROWS`` stages and ``MAX_BARS`` bars; the stretch of time that is left out, if any."""
    stages = sorted({b.stage for b in bars})
    if len(stages) > MAX_ROWS:
        kept = {stages[round(i * (len(stages) - 1) / (MAX_ROWS - 1))] for i in range(MAX_ROWS)}
        bars = [b for b in bars if b.stage in kept]
    if len(bars) <= MAX_BARS:
        return list(bars), None
    by_start = sorted(bars, key=lambda b: b.start)
    head, tail = by_start[: MAX_BARS // 2], by_start[-MAX_BARS // 2 :]
    first, second = head[-1].start, tail[0].start
    return [b for b in bars if b.start <= first or b.start >= second], (first, second)


def idle_bars(bars: Sequence[Bar], cut: tuple[float, float] | None) -> list[Bar]:
    """The gaps of every stage between 0 and the end, without what is cut out."""
    end = max(b.end for b in bars)
    gaps = []
    for stage in sorted({b.stage for b in bars}):
        at = 0.0
        own = sorted((b for b in bars if b.stage == stage), key=lambda b: b.start)
        for start, stop in (*((b.start, b.end) for b in own), (end, end)):
            across = cut is not None and at < cut[1] and start > cut[0]
            if start - at > end / 2000 and not across:
                gaps.append(Bar(stage, "idle", "idle", at, start))
            at = max(at, stop)
    return gaps


def gantt(bars: Sequence[Bar]) -> str:
    """The chart: one trace a kind."""
    import plotly.graph_objects as go

    shown, cut = thinned(bars)
    gaps = idle_bars(shown, cut)
    end = max(b.end for b in shown)
    unit, scale = ("ms", 1e3) if end < 1 else ("s", 1.0)
    shift = 0.0 if cut is None else cut[1] - cut[0] - (end - cut[1] + cut[0]) * 0.04

    def at(seconds: float) -> float:
        return (seconds - shift if cut is not None and seconds >= cut[1] else seconds) * scale

    figure = go.Figure()
    kinds = [kind for kind in KIND_COLOURS if any(b.kind == kind for b in shown)]
    for kind in (*kinds, "idle"):
        rows = gaps if kind == "idle" else [b for b in shown if b.kind == kind]
        hatched = {"shape": "/", "fgcolor": "#8d96a6", "bgcolor": "#eef0f4", "size": 6, "solidity": 0.15}
        idle = {"color": "#eef0f4", "line": {"width": 0}, "pattern": hatched}
        figure.add_bar(
            y=[f"stage {b.stage}" for b in rows],
            x=[(b.end - b.start) * scale for b in rows],
            base=[at(b.start) for b in rows],
            name=kind,
            orientation="h",
            marker=idle if kind == "idle" else {"color": KIND_COLOURS[kind], "line": {"width": 0.5, "color": "#fff"}},
            customdata=[f"{escape(b.name)}<br>{duration(b.start)} to {duration(b.end)}" for b in rows],
            hovertemplate="%{y}, %{customdata}<extra></extra>",
        )
    figure.update_layout(barmode="overlay", bargap=0.12)
    stages = sorted({b.stage for b in shown})
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=[f"stage {s}" for s in stages])
    figure.update_xaxes(title=unit, showticklabels=cut is None, range=[0, at(end)])
    if cut is not None:
        figure.update_xaxes(title=f"the same goes on for {duration(cut[1] - cut[0])} in the middle, which is cut out")
        figure.add_vrect(x0=at(cut[0]), x1=at(cut[1]), fillcolor="#eef0f4", line_width=0, layer="below")
    return chart(figure, "pipeline", 110 + 26 * len(stages))

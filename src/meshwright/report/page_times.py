"""The page: what TTFT, TPOT or the step consist of, and the ops of one layer with their seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from meshwright.ledger.schema import Entry
from meshwright.ledger.views import layer_label, shape_text
from meshwright.plan.plan import Plan
from meshwright.plan.serving_time import ServingTime
from meshwright.plan.timeline import HOST, OVERHEAD, Timeline, Track
from meshwright.plan.timeline_train import ACTION
from meshwright.plan.timing.estimate import Seconds
from meshwright.plan.train_cost import is_data_parallel
from meshwright.plan.train_engine import TrainEngine
from meshwright.plan.training_time import TrainingTime
from meshwright.report.page_parts import COLOURS, chart, duration, stacked
from meshwright.specs.units import binary, si

#: Different layers that are drawn; the most frequent ones.
MAX_KINDS = 2
#: Part of a predicted time -> colour.
PART_COLOURS = {
    "weights": "products", "products": "products", "head": "elementwise", "experts": "experts",
    "attention": "attention", "recurrent": "attention", "other": "elementwise", "elementwise": "elementwise",
    "communication": "communication", "launch": "launch", "host": "host", "prefill": "products",
    "beside decoding": "attention", "request": "host", "queue for prefill": "communication",
    "queue for a place": "experts", "prefill interference": "other", "bubble": "idle", "recompute": "other",
    "optimizer": "host", "transfer": "communication",
}  # fmt: skip
#: Communication of a training step, in shades of one colour.
WIRES = {
    "tensor parallel": "#c2554d", "context parallel": "#d98880", "expert parallel": "#a93226",
    "hand-offs": "#e6a8a2", "data parallel": "#7b241c",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Times:
    """What of a plan was timed, for the pictures.

    Attributes:
        timelines: prefill and a round of decoding, or a step. step: its prediction (training).
        engine: what memory and time of other layouts depend on (training).
    """

    timelines: Sequence[Timeline]
    step: TrainingTime | None = None
    engine: TrainEngine | None = None


def _colour(part: str) -> str:
    return WIRES.get(part) or COLOURS[PART_COLOURS.get(part, "other")]


def _range(time: Seconds) -> str:
    return f"{duration(time.value)} ({duration(time.low)} to {duration(time.high)}, {time.word})"


def _rows(parts: Iterable[tuple[str, float]]) -> list[tuple[str, float, str]]:
    return [(name, seconds, _colour(name)) for name, seconds in parts]


def serving_parts(predicted: ServingTime) -> str:
    """TTFT and TPOT as stacked bars, with their 80 % intervals."""
    if not predicted.stable:
        return "<h2>Where the time goes</h2><p>The rate cannot be kept up: the queue grows without end.</p>"
    first = stacked(f"First token: {_range(predicted.ttft)}", _rows(predicted.ttft_parts))
    each = stacked(f"Every further token: {_range(predicted.tpot)}", _rows(predicted.tpot_parts))
    return f"<h2>Where the time goes</h2>{first}{each}"


def training_parts(predicted: TrainingTime) -> str:
    """The step as a stacked bar."""
    text = (
        f"Step: {_range(predicted.step)}; {predicted.tokens_per_s_device:,.0f} tokens/s/device, "
        f"{predicted.flops_s_device / 1e12:,.0f} TFLOP/s/device, MFU {predicted.mfu:.0%}, "
        f"bubble {predicted.bubble:.1%}, exposed communication {duration(predicted.exposed_s)}"
    )
    return f"<h2>Where the time goes</h2>{stacked(text, _rows(predicted.parts))}"


def layers(plan: Plan, timelines: Sequence[Timeline]) -> str:
    """Every op of one layer of each frequent kind: a bar is its seconds."""
    charts: list[str] = []
    for timeline in timelines:
        track = max(timeline.tracks, key=lambda t: len({e.layer for e in t.entries}))
        phases = ("forward", "backward") if plan.kind == "train" else (timeline.phase,)
        for phase in phases:
            charts += [
                _layer(f"{phase}-{number}", phase, held, entries)
                for number, (held, entries) in enumerate(kinds(track, phase)[:MAX_KINDS])
            ]
    if not charts:
        return ""
    more = " of one micro-batch" if plan.kind == "train" else ""
    return f'<h2>One layer{more}, op by op</h2><div class="pair">{"".join(charts)}</div>'


def kinds(track: Track, phase: str) -> list[tuple[list[int], list[Entry]]]:
    """Layers that do the same, the most frequent first: their numbers, and the entries of one of them (of the first
    micro-batch)."""
    by_layer: dict[int, list[Entry]] = {}
    for e in track.entries:
        if e.layer is not None and e.phase == phase and e.op != ACTION and not e.microbatch:
            by_layer.setdefault(e.layer, []).append(e)
    found: dict[tuple[object, ...], list[int]] = {}
    for layer in sorted(by_layer):
        signature = tuple((e.op, e.name, e.shapes, e.count) for e in by_layer[layer])
        found.setdefault(signature, []).append(layer)
    groups = sorted(found.values(), key=lambda held: -len(held))
    return [(held, by_layer[held[0]]) for held in groups]


def seconds_of(entry: Entry) -> float:
    """Seconds of an entry with times."""
    return ((entry.ended_ns or 0) - (entry.started_ns or 0)) / 1e9


def _layer(name: str, phase: str, held: list[int], entries: list[Entry]) -> str:
    import plotly.graph_objects as go

    beside = sum(seconds_of(e) for e in entries if is_data_parallel(e.group))
    total = sum(map(seconds_of, entries)) - beside
    unit, scale = ("us", 1e6) if max(map(seconds_of, entries)) < 1e-3 else ("ms", 1e3)
    labels = [_label(number, e) for number, e in enumerate(entries, 1)]
    figure = go.Figure(
        go.Bar(
            y=labels,
            x=[seconds_of(e) * scale for e in entries],
            orientation="h",
            marker_color=[COLOURS[category(e)] for e in entries],
            customdata=[_hover(e) for e in entries],
            hovertemplate="%{customdata}<extra></extra>",
        )
    )
    figure.update_yaxes(autorange="reversed", automargin=True, tickfont={"size": 11}, fixedrange=True)
    figure.update_xaxes(ticksuffix=f" {unit}", nticks=6)
    title = f"{phase}, {layer_label(held)}: {duration(total)} each"
    if beside:
        title += f", {duration(beside)} of parameters and gradients beside it"
    height = 70 + 19 * len(entries)
    return f"<div><b>{escape(title)}</b>{chart(figure, f'layer-{name}', height, legend=False)}</div>"


def _label(number: int, e: Entry) -> str:
    words = (e.name or e.op) if e.group is None else f"{e.op} {e.name or ''} ({e.group})"
    if e.op == OVERHEAD:
        words = "launches, passes"
    return f"{number}. {escape(words if len(words) <= 34 else words[:33] + '...')}"


def category(e: Entry) -> str:
    """What an entry is coloured as."""
    if e.group is not None:
        return "communication"
    if e.op == "matmul":
        return "experts" if (e.name or "").removeprefix("recompute ").startswith("expert.") else "products"
    return {"attention": "attention", "recurrent": "attention", OVERHEAD: "launch", HOST: "host"}.get(
        e.op, "elementwise"
    )


def _hover(e: Entry) -> str:
    lines = [f"<b>{escape(e.name or e.op)}</b> ({escape(e.op)})", duration(seconds_of(e))]
    if e.shapes:
        lines.append(f"{escape(shape_text(e.shapes))} {escape(e.dtype or '')}")
    if e.payload_bytes:
        lines.append(f"{binary(e.payload_bytes)} {'enter' if e.group else 'read and written'}")
    if e.wire_bytes:
        lines.append(f"{binary(e.wire_bytes)} on the wire")
    if e.flops:
        lines.append(si(e.flops, "FLOP"))
    if e.count > 1:
        lines.append(f"{e.count:,} times")
    return "<br>".join(lines)

"""The page: layouts as points. Serving: a curve a layout over the requests in flight, time per output token against
tokens a second and device. Training: memory of the fullest rank against tokens a second and device.

Layouts that do not fit are grey: placed where they would be if they did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from math import inf, log10
from typing import Any, NamedTuple

from meshwright.errors import IllegalLayoutError, InputError
from meshwright.plan.memory import ServeMemory
from meshwright.plan.plan import Candidate, Plan
from meshwright.plan.serving_time import serving_time
from meshwright.plan.serving_time_steps import stage_ranks
from meshwright.plan.train_engine import TrainEngine
from meshwright.plan.train_memory import train_memory
from meshwright.plan.training_time import training_time
from meshwright.report.page_parts import chart
from meshwright.specs.layout import Layout, product
from meshwright.specs.placement import Placement, place
from meshwright.specs.profile import ServeSettings
from meshwright.specs.units import GIB
from meshwright.specs.workload import Serve, Train

#: Runners-up and layouts that do not fit that are drawn, and points of a curve.
MAX_LAYOUTS = 8
MAX_POINTS = 14
COLOURS = ("#c2554d", "#3b6fb6", "#4aa37a", "#c98a2b", "#8a63b0", "#3aa6a6", "#7b5b45", "#5a6376", "#b06a94")

#: Roles that share a colour and an entry of the legend.
OTHER_COLOURS = {"searched": "#5a6376", "pools": "#1d2330", "does not fit": "#a9afba"}
LEGEND = {
    "searched": "others that nothing beats in both",
    "pools": "prefill and decode pools, by ratio",
    "does not fit": "does not fit",
}
SYMBOLS = {"chosen": "star", "runner-up": "diamond", "searched": "circle", "pools": "square"}


class Point(NamedTuple):
    """One layout at one load: ``x`` ms a token or GiB, ``y`` tokens a second and device, ``load`` requests in
    flight."""

    x: float
    y: float
    load: int = 0


class Curve(NamedTuple):
    """A layout: its name, its role (``chosen``, ``runner-up``, ``searched``: on the front of the whole search,
    ``pools``: two layouts, ``does not fit``), why it lost, its own point, its curve."""

    name: str
    role: str
    why: str
    own: Point
    points: tuple[Point, ...] = ()


def loads(most: int, least: int) -> list[int]:
    """Requests in flight of a curve: powers of two of ``least`` up to ``most``, and that."""
    found = [least]
    while found[-1] * 2 < most and len(found) < MAX_POINTS - 1:
        found.append(found[-1] * 2)
    return [*found, most] if most > found[-1] else found


def serving_curves(plan: Plan) -> list[Curve]:
    """The chosen layout and the others, each over the requests that its caches hold; points of the whole search that
    nothing beats, and separate pools."""
    settings, found = plan.settings or ServeSettings(), []
    if plan.served is not None and plan.served.ranked:
        settings = plan.served.ranked[0].ctx.settings  # those of the plan limit the requests to the chosen load
    for candidate, role, why in _candidates(plan):
        work, memory = candidate.workload or plan.workload, candidate.memory
        predicted = candidate.cost.predicted
        if not isinstance(work, Serve) or not isinstance(memory, ServeMemory) or predicted is None:
            continue
        ranks, world = stage_ranks(candidate.placement), candidate.layout.world
        points = []
        for load in loads(memory.max_requests, candidate.layout.dp):
            trial = replace(work, concurrency=load, rate=None)
            time = serving_time(candidate.placement, plan.cluster, trial, memory.max_requests, settings, ranks=ranks)
            points.append(Point(time.tpot.value * 1e3, time.tokens_per_s.value / world, load))
        inside = round(predicted.running * candidate.layout.dp)
        own = Point(predicted.tpot.value * 1e3, predicted.tokens_per_s.value / world, inside)
        found.append(Curve(product(candidate.layout), role, why, own, tuple(points)))
    if isinstance(plan.workload, Serve):
        found += _searched_serving(plan, plan.workload, {curve.name for curve in found})
        found += _unfit_serving(plan, plan.workload, settings)
    return found


def _searched_serving(plan: Plan, work: Serve, known: set[str]) -> Iterable[Curve]:
    """Points of the front of other layouts, and the best pools in every ratio."""
    if plan.served is None:
        return
    for probe, at in plan.served.front:
        name = product(probe.layout)
        if name not in known:
            own = Point(at.tpot_s * 1e3, at.tokens_s_device, at.requests)
            yield Curve(name, "searched", f"first token {at.ttft_s * 1e3:,.0f} ms", own)
    for split in plan.served.split.ratios if plan.served.split is not None else ():
        rate = split.users * work.osl / (split.ttft_s + max(work.osl - 1, 1) * split.tpot_s) / split.devices
        why = f"first token {split.ttft_s * 1e3:,.0f} ms, {split.waiting:.0%} of it waiting"
        yield Curve(split.name, "pools", why, Point(split.tpot_s * 1e3, rate, split.users))


def _unfit_serving(plan: Plan, work: Serve, settings: ServeSettings) -> Iterable[Curve]:
    for layout, placement, why in _unfit(plan):
        load = max(layout.dp, work.concurrency or 0)
        time = serving_time(placement, plan.cluster, replace(work, concurrency=load, rate=None), load, settings)
        own = Point(time.tpot.value * 1e3, time.tokens_per_s.value / layout.world, load)
        yield Curve(product(layout), "does not fit", why, own)


def training_points(plan: Plan, engine: TrainEngine) -> list[Curve]:
    """The chosen layout and the others: memory of the fullest rank, tokens a second and device."""
    found = []
    for candidate, role, why in _candidates(plan):
        work = candidate.workload or plan.workload
        assert isinstance(work, Train)
        time = candidate.cost.predicted_step or training_time(candidate.placement, plan.cluster, work, engine)
        role = role if candidate.fits else "does not fit"
        own = Point(candidate.memory.worst.total_bytes / GIB, time.tokens_per_s_device)
        found.append(Curve(product(candidate.layout), role, why, own))
    found += _front(plan, engine, {c.name for c in found})
    for layout, placement, why in _unfit(plan):
        work = plan.workload
        assert isinstance(work, Train)
        try:
            memory = train_memory(placement, layout, plan.cluster, work, engine)
            time = training_time(placement, plan.cluster, work, engine)
        except (IllegalLayoutError, InputError):
            continue
        own = Point(memory.worst.total_bytes / GIB, time.tokens_per_s_device)
        found.append(Curve(product(layout), "does not fit", why, own))
    return found


def _front(plan: Plan, engine: TrainEngine, known: set[str]) -> Iterable[Curve]:
    """Layouts on the front of the whole search, evenly taken, with their predicted steps."""
    if plan.searched is None or plan.chosen is None or not isinstance(plan.workload, Train):
        return
    rows = [p for p in plan.searched.pareto if product(p.layout) not in known]
    few = {round(i * (len(rows) - 1) / max(1, MAX_LAYOUTS - 1)) for i in range(MAX_LAYOUTS)} if rows else set()
    for row in (rows[i] for i in sorted(few)):
        work = replace(plan.workload, recompute=row.recompute)
        try:
            placed = place(
                plan.spec, row.layout, plan.chosen.placement.profile, sections=plan.chosen.placement.sections
            )
            time = training_time(placed, plan.cluster, work, engine)
        except (IllegalLayoutError, InputError):
            continue
        own = Point((plan.cluster.device.memory_bytes - row.free_bytes) / GIB, time.tokens_per_s_device)
        why = f"loses {row.lost_s:,.3g} s of {row.lost_by}" if row.lost_by else ""
        yield Curve(product(row.layout), "searched", why, own)


def _candidates(plan: Plan) -> Iterable[tuple[Candidate, str, str]]:
    if plan.chosen is not None:
        yield plan.chosen, "chosen", plan.verdict
    for other in plan.alternatives[:MAX_LAYOUTS]:
        yield other.candidate, "runner-up", other.lost_by


def _unfit(plan: Plan) -> Iterable[tuple[Layout, Placement, str]]:
    """Layouts that only memory forbids, placed as the chosen one is."""
    known = plan.chosen or next((a.candidate for a in plan.alternatives), None)
    if known is None:
        return
    for rejected in [r for r in plan.rejected if "fit" in r.code][:MAX_LAYOUTS]:
        try:
            found = place(plan.spec, rejected.layout, known.placement.profile, sections=known.placement.sections)
        except IllegalLayoutError:
            continue
        yield rejected.layout, found, rejected.reason


def front(points: Iterable[Point]) -> list[Point]:
    """Points that no other beats in both directions: less x, more y; ascending in x."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.x, -p.y)):
        if not best or point.y > best[-1].y:
            best.append(point)
    return best


def pareto(plan: Plan, curves: Sequence[Curve]) -> str:
    """The section; nothing without points."""
    import plotly.graph_objects as go

    curves = [c for c in curves if c.own.x < inf]
    if not curves:
        return ""
    serve = plan.kind == "serve"
    figure = go.Figure()
    fitting = [p for c in curves if c.role != "does not fit" for p in (*c.points, c.own)]
    best = front(fitting)
    if len(best) > 1:
        figure.add_scatter(
            x=[p.x for p in best], y=[p.y for p in best], mode="lines", name="Pareto front", hoverinfo="skip",
            line={"color": "#c9cfda", "width": 9, "shape": "linear" if serve else "hv"},
        )  # fmt: skip
    for number, curve in reversed(list(enumerate(curves))):
        _draw(figure, plan, curve, COLOURS[number % len(COLOURS)], curves)
    word = "time per output token, ms" if serve else "memory of the fullest rank, GiB"
    xs = [c.own.x for c in curves] + [p.x for p in fitting]
    log = max(xs) > 8 * min(xs)
    figure.update_xaxes(title=word)
    if log:
        ticks = [digit * 10.0**power for power in range(-3, 7) for digit in (1, 2, 5)]
        ticks = [tick for tick in ticks if min(xs) / 2 < tick < max(xs) * 2]
        figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{tick:,g}" for tick in ticks])
    _limit(figure, plan, log)
    figure.update_yaxes(title="tokens/s a device", rangemode="tozero")
    how = (
        "Every curve is a layout with more and more requests in flight; the large mark is the load of this plan."
        if serve
        else "Every mark is a layout; left of the line it fits."
    )
    return f'<h2>Layouts compared</h2><p class="sub">{how}</p>{chart(figure, "pareto", 460)}'


def _draw(figure: Any, plan: Plan, curve: Curve, colour: str, curves: Sequence[Curve]) -> None:
    """The curve of a layout and its mark; layouts without a curve of their own share an entry of the legend."""
    named = curve.role in {"chosen", "runner-up"}
    colour = colour if named else OTHER_COLOURS[curve.role]
    if curve.points:
        figure.add_scatter(
            x=[p.x for p in curve.points], y=[p.y for p in curve.points], mode="lines+markers",
            legendgroup=curve.name, showlegend=False, line={"color": colour, "width": 1.5}, marker={"size": 5},
            customdata=[_hover(plan, curve, p) for p in curve.points], hovertemplate="%{customdata}<extra></extra>",
        )  # fmt: skip
    chosen = curve.role == "chosen"
    symbol = SYMBOLS.get(curve.role, "x")
    last = [c for c in curves if c.role == curve.role][-1]
    figure.add_scatter(
        x=[curve.own.x], y=[curve.own.y], mode="markers", legendgroup=curve.name if named else curve.role,
        name=escape(f"{curve.name}, {curve.role}" if named else LEGEND[curve.role]),
        showlegend=named or curve is last, legendrank=1 if chosen else 1000 if named else 2000,
        marker={"color": colour, "size": 17 if chosen else 10, "symbol": symbol,
                "line": {"color": "#1d2330", "width": 1 if chosen else 0}},
        customdata=[_hover(plan, curve, curve.own)], hovertemplate="%{customdata}<extra></extra>",
    )  # fmt: skip


def _limit(figure: Any, plan: Plan, log: bool) -> None:
    """The target of the time per token, or the memory of a device, as a line; annotations of logarithmic axes stand
    at logarithms."""
    work = plan.workload
    if isinstance(work, Serve):
        limit, text = (work.tpot_s or 0) * 1e3, "target"
    else:
        limit, text = plan.cluster.device.memory_bytes / GIB, "device memory"
    if limit:
        figure.add_vline(x=limit, line={"color": "#1d2330", "dash": "dot", "width": 1})
        at = log10(limit) if log else limit
        figure.add_annotation(x=at, y=1, yref="paper", text=text, showarrow=False, xanchor="left", xshift=3)


def _hover(plan: Plan, curve: Curve, point: Point) -> str:
    what = f"{point.x:,.2f} ms a token" if plan.kind == "serve" else f"{point.x:,.1f} GiB"
    load = f"{point.load:,} requests in flight" if point.load else ""
    why = curve.why if curve.role != "chosen" else ""
    lines = [curve.name, curve.role, load, what, f"{point.y:,.1f} tokens/s a device", *_wrapped(why)]
    return "<br>".join(escape(line) for line in lines if line)


def _wrapped(text: str, width: int = 60) -> list[str]:
    from textwrap import wrap

    return wrap(text, width)[:5]

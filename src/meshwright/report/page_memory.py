"""The page: memory of every rank, and which slice of the model it holds."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from meshwright.plan.memory import RankMemory
from meshwright.plan.plan import Candidate, Plan
from meshwright.plan.spread import rank_rows
from meshwright.report.page_parts import chart, table
from meshwright.report.slices import slices
from meshwright.specs.units import GIB, gib

#: Above this many ranks the page draws one bar and one card a class of equal ranks.
MAX_RANKS = 128

TERMS = (
    ("weights", "weights", "#3b6fb6"),
    ("kv_cache", "KV cache needed", "#4aa37a"),
    ("gradients", "gradients", "#c98a2b"),
    ("optimizer", "optimizer", "#8a63b0"),
    ("activations", "activations", "#c2554d"),
    ("runtime", "runtime", "#8c8c8c"),
)

STAGE_COLOURS = ("#e3edf9", "#e6f4ec", "#fbf1df", "#f1eaf7", "#fae6e4", "#eeeeee", "#e0f3f5", "#f6f3d9")


def memory(plan: Plan, candidate: Candidate, name: str = "") -> str:
    """Bars, table and map; ``name``: of the pool, where there are two."""
    rows = rank_rows(candidate.placement, candidate.memory.ranks, MAX_RANKS)
    word = f"{name} pool: " if name else ""
    return "".join(
        (
            f"<h2>{escape(word)}Memory of every rank</h2>" if word else "<h2>Memory of every rank</h2>",
            _bars(plan, rows, name),
            _rank_table(plan, candidate.memory.ranks),
            f"<h2>{escape(word)}Which rank holds which slice</h2>" if word else "<h2>Which rank holds which slice</h2>",
            _map(plan, candidate, rows),
        )
    )


def _bars(plan: Plan, rows: Sequence[RankMemory], pool: str) -> str:
    """Stacked memory bar of every rank, with the limit as a line, drawn by plotly (inlined)."""
    import plotly.graph_objects as go

    names = [f"rank {r.rank}" if r.ranks == 1 else f"rank {r.rank} (+{r.ranks - 1:,})" for r in rows]
    figure = go.Figure()
    for term, label, colour in TERMS:
        values = [r.term(term) / GIB for r in rows]
        if any(values):
            figure.add_bar(x=names, y=values, name=label, marker_color=colour)
    limits = [r.capacity_bytes / GIB for r in rows]
    name = "engine's share of the device" if plan.kind == "serve" else "device memory"
    figure.add_scatter(x=names, y=limits, name=name, mode="lines+markers", line={"color": "#1d2330", "dash": "dot"})
    figure.update_layout(barmode="stack", yaxis_title="GiB")
    return chart(figure, f"memory-{pool}", 380)


def _card(candidate: Candidate, row: RankMemory) -> str:
    c = row.coordinate
    axes = [f"{axis} {getattr(c, axis)}" for axis in ("pp", "dp", "cp", "tp") if getattr(candidate.layout, axis) > 1]
    if candidate.layout.ep > 1:
        axes.append(f"ep {c.ep}")
    lines = [f"{word} {text}" for word, text in slices(candidate.placement, c).items()]
    title = f"rank {row.rank}" + (f" and {row.ranks - 1:,} like it" if row.ranks > 1 else "")
    colour = STAGE_COLOURS[c.pp % len(STAGE_COLOURS)]
    parts = "<br>".join(escape(line) for line in [", ".join(axes) or "the only rank", *lines, gib(row.total_bytes)])
    return f'<div class="rank" style="background:{colour}"><b>{escape(title)}</b>{parts}</div>'


def _map(plan: Plan, candidate: Candidate, rows: Sequence[RankMemory]) -> str:
    """Which rank holds which slice, node by node; the colour is the pipeline stage."""
    if any(r.ranks > 1 for r in rows):
        return f'<div class="ranks">{"".join(_card(candidate, r) for r in rows)}</div>'
    nodes: dict[int, list[str]] = {}
    for row in rows:
        nodes.setdefault(plan.cluster.node_of(row.rank), []).append(_card(candidate, row))
    return "".join(
        f'<div class="node"><b>node {node}</b><div class="ranks">{"".join(cards)}</div></div>'
        for node, cards in nodes.items()
    )


def _rank_table(plan: Plan, rows: Sequence[RankMemory]) -> str:
    terms = [(term, label) for term, label, _ in TERMS if any(r.term(term) for r in rows)]
    head = ["GiB", *(label for _, label in terms), "total", "limit", "left"]
    body = []
    for r in rows:
        name = f"rank {r.rank}" if r.ranks == 1 else f"rank {r.rank} and {r.ranks - 1:,} like it"
        values = [r.term(term) for term, _ in terms]
        values += [r.total_bytes, r.capacity_bytes, r.capacity_bytes - r.total_bytes]
        body.append([name, *(f"{v / GIB:,.2f}" for v in values)])
    return table(head, body)

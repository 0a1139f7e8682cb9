"""``--html``: one self-contained page that opens offline. Everything that came from a user is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from meshwright.errors import InputError
from meshwright.ledger.schema import Ledger
from meshwright.plan.memory import RankMemory
from meshwright.plan.plan import Candidate, Plan
from meshwright.plan.spread import rank_rows
from meshwright.report.slices import slices
from meshwright.report.tables import ledger_rows
from meshwright.specs.layout import product
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

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1d2330;margin:2rem auto;max-width:1180px;padding:0 1rem}
h1{font-size:1.35rem;margin:0 0 .3rem}h2{font-size:1.05rem;margin:2rem 0 .5rem}
.verdict{padding:.7rem 1rem;border-radius:6px;font-weight:600}.yes{background:#e2f3e8}.no{background:#fbe3e1}
.sub{color:#5a6376}table{border-collapse:collapse;font-size:.86rem}th,td{padding:.25rem .7rem;text-align:right}
th:first-child,td:first-child,td.text,th.text{text-align:left}thead th{border-bottom:1px solid #c9cfda;color:#5a6376}
tbody tr:nth-child(even){background:#f6f7f9}.over{color:#b3261e;font-weight:600}.scroll{overflow-x:auto}
.node{border:1px solid #c9cfda;border-radius:8px;padding:.6rem;margin:.6rem 0}
.ranks{display:grid;grid-template-columns:repeat(auto-fill,minmax(205px,1fr));gap:.5rem}
.rank{border-radius:6px;padding:.45rem .6rem;font-size:.78rem;line-height:1.35}.rank b{display:block}
pre{background:#f3f4f7;padding:.7rem;border-radius:6px;white-space:pre-wrap;overflow-wrap:anywhere;font-size:.82rem}
"""


def _cells(values: Iterable[str], left: frozenset[int], tag: str = "td") -> str:
    return "".join(
        f"<{tag}{' class=text' if index in left else ''}>{escape(v)}</{tag}>" for index, v in enumerate(values)
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Iterable[int] = ()) -> str:
    """A table; the first column and those of ``left`` hold words."""
    words = frozenset(left)
    body = "".join(f"<tr>{_cells(row, words)}</tr>" for row in rows)
    top = f"<thead><tr>{_cells(head, words, 'th')}</tr></thead>"
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def _bars(plan: Plan, rows: Sequence[RankMemory]) -> str:
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
    figure.update_layout(
        barmode="stack",
        yaxis_title="GiB",
        height=380,
        margin={"l": 55, "r": 15, "t": 10, "b": 40},
        legend={"orientation": "h", "y": 1.12},
        template="plotly_white",
    )
    return str(figure.to_html(full_html=False, include_plotlyjs=True, config={"displaylogo": False}))


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
    return _table(head, body)


def _choices(plan: Plan) -> str:
    parts = []
    if plan.alternatives:
        rows = [
            (product(a.candidate.layout), gib(a.candidate.memory.worst.total_bytes), a.lost_by)
            for a in plan.alternatives
        ]
        parts.append("<h2>Other layouts that work</h2>" + _table(("layout", "worst rank", "compared"), rows, (2,)))
    if plan.rejected:
        rejected = [(product(r.layout), r.reason) for r in plan.rejected]
        parts.append("<h2>Rejected</h2>" + _table(("layout", "because"), rejected, (1,)))
    return "".join(parts)


def _commands(plan: Plan) -> str:
    blocks = []
    for command in plan.commands:
        where = "every node" if command.node is None else f"node {command.node}"
        env = "".join(f"{key}={value} " for key, value in command.env)
        note = f": {command.note}" if command.note else ""
        blocks.append(f"<pre># {escape(where)}, {escape(command.purpose + note)}\n{escape(env + command.text)}</pre>")
    return f"<h2>What to type ({escape(plan.engine)})</h2>{''.join(blocks)}" if blocks else ""


def _listing(title: str, items: Iterable[str]) -> str:
    lines = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<h2>{title}</h2><ul>{lines}</ul>" if lines else ""


def render(plan: Plan, ledger: Ledger | None) -> str:
    """The page as text."""
    parts = [
        f"<h1>{escape(plan.spec.name)} on {escape(str(plan.cluster))}</h1>",
        f'<p class="sub">{escape(plan.engine)}; {plan.spec.parameters("decoder") / 1e9:,.2f} B parameters, '
        f"{gib(plan.spec.weight_bytes())} of weights</p>",
        f'<p class="verdict {"yes" if plan.ok else "no"}">{escape(plan.verdict)}</p>',
        _listing("Rules", (f"{r.severity}: {r.message}; {r.way_out}" for r in plan.rules)),
    ]
    if plan.chosen is not None:
        rows = rank_rows(plan.chosen.placement, plan.chosen.memory.ranks, MAX_RANKS)
        parts += [
            "<h2>Memory of every rank</h2>",
            _bars(plan, rows),
            _rank_table(plan, plan.chosen.memory.ranks),
            "<h2>Which rank holds which slice</h2>",
            _map(plan, plan.chosen, rows),
        ]
    parts += [_listing("Why", (r.text for r in plan.reasons)), _choices(plan), _commands(plan)]
    if ledger is not None:
        head, body = ledger_rows(ledger)
        parts.append("<h2>Ledger: what one pass computes and sends</h2>" + _table(head, body, (1, 2, 3, 4, 6, 7)))
    parts.append(_listing("Assumed", plan.notes))
    title = escape(f"{plan.spec.name} on {plan.cluster}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def write_page(plan: Plan, ledger: Ledger | None, path: Path, *, prefill: Plan | None = None) -> None:
    """Write the page; folders on the way are made.

    Raises:
        InputError: the path cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(plan, ledger), encoding="utf-8")
    except OSError as error:
        raise InputError(f"--html {path}: {error.strerror or error}") from None

"""What the parts of the page share: style, tables, lists, charts. Everything that came from a user is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

#: Colours of what an op is, the same in every picture.
COLOURS = {
    "products": "#3b6fb6",
    "experts": "#8a63b0",
    "attention": "#c98a2b",
    "elementwise": "#7fa8d6",
    "communication": "#c2554d",
    "launch": "#b4bac6",
    "host": "#8c8c8c",
    "idle": "#e4e7ec",
    "other": "#4aa37a",
}

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1d2330;margin:2rem auto;max-width:1180px;padding:0 1rem}
h1{font-size:1.35rem;margin:0 0 .3rem}h2{font-size:1.05rem;margin:2rem 0 .5rem}
.verdict{padding:.7rem 1rem;border-radius:6px;font-weight:600}.yes{background:#e2f3e8}.no{background:#fbe3e1}
.sub{color:#5a6376}table{border-collapse:collapse;font-size:.86rem}th,td{padding:.25rem .7rem;text-align:right}
th:first-child,td:first-child,td.text,th.text{text-align:left}
td:first-child{white-space:nowrap}thead th{border-bottom:1px solid #c9cfda;color:#5a6376}
tbody tr:nth-child(even){background:#f6f7f9}.over{color:#b3261e;font-weight:600}.scroll{overflow-x:auto}
.node{border:1px solid #c9cfda;border-radius:8px;padding:.6rem;margin:.6rem 0}
.ranks{display:grid;grid-template-columns:repeat(auto-fill,minmax(205px,1fr));gap:.5rem}
.rank{border-radius:6px;padding:.45rem .6rem;font-size:.78rem;line-height:1.35}.rank b{display:block}
.chart{margin:.2rem 0;overflow-x:auto}
.pair{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(430px,100%),1fr));gap:.6rem 1rem}
.pair>div{min-width:0}
.stack{display:flex;height:26px;border-radius:5px;overflow:hidden;margin:.3rem 0}
.stack span{display:block;min-width:1px}
.key{list-style:none;padding:0;margin:.2rem 0 1rem;display:flex;flex-wrap:wrap;gap:.15rem 1.1rem;font-size:.84rem}
.key i{display:inline-block;width:.75em;height:.75em;border-radius:2px;margin-right:.35em}
pre{background:#f3f4f7;padding:.7rem;border-radius:6px;white-space:pre-wrap;overflow-wrap:anywhere;font-size:.82rem}
"""


def _cells(values: Iterable[str], left: frozenset[int], tag: str = "td") -> str:
    return "".join(
        f"<{tag}{' class=text' if index in left else ''}>{escape(v)}</{tag}>" for index, v in enumerate(values)
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Iterable[int] = ()) -> str:
    """A table; the first column and those of ``left`` hold words."""
    words = frozenset(left)
    body = "".join(f"<tr>{_cells(row, words)}</tr>" for row in rows)
    top = f"<thead><tr>{_cells(head, words, 'th')}</tr></thead>"
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def listing(title: str, items: Iterable[str]) -> str:
    """A heading and a list; nothing without items."""
    lines = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<h2>{title}</h2><ul>{lines}</ul>" if lines else ""


def chart(figure: Any, name: str, height: int, *, legend: bool = True) -> str:
    """A plotly figure as a block of the page, which holds plotly itself once (``script``)."""
    figure.update_layout(
        height=height,
        margin={"l": 55, "r": 15, "t": 34 if legend else 10, "b": 44},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "font": {"size": 12}},
        showlegend=legend,
        template="plotly_white",
        font={"family": "system-ui, sans-serif", "color": "#1d2330"},
        hoverlabel={"align": "left"},
    )
    config = {"displaylogo": False, "responsive": True, "plotlyServerURL": "", "displayModeBar": False}
    text = figure.to_html(full_html=False, include_plotlyjs=False, include_mathjax=False, config=config, div_id=name)
    return f'<div class="chart">{text}</div>'


def script() -> str:
    """plotly.js, for the head of a page with charts."""
    from plotly.offline import get_plotlyjs

    return f"<script>{get_plotlyjs()}</script>"


def duration(seconds: float) -> str:
    """A time as people read it: ``"3.42 ms"``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:,.3g} {unit}" if seconds / size < 1000 else f"{seconds / size:,.0f} {unit}"
    return f"{seconds * 1e9:,.0f} ns" if seconds else "0 s"


def stacked(title: str, rows: Sequence[tuple[str, float, str]]) -> str:
    """A bar of parts with a legend: (name, seconds, colour); parts below a thousandth are not drawn."""
    total = sum(seconds for _, seconds, _ in rows)
    if total <= 0:
        return ""
    shown = [row for row in rows if row[1] >= total / 1000]
    bars = "".join(
        f'<span style="width:{seconds / total:.4%};background:{colour}" '
        f'title="{escape(name)}: {duration(seconds)}"></span>'
        for name, seconds, colour in shown
    )
    words = "".join(
        f'<li><i style="background:{colour}"></i>{escape(name)} <b>{duration(seconds)}</b> {seconds / total:.0%}</li>'
        for name, seconds, colour in shown
    )
    return f'<div class="parts"><b>{escape(title)}</b><div class="stack">{bars}</div><ul class="key">{words}</ul></div>'

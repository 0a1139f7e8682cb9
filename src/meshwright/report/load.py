"""A run of load for a reader: a verdict line, one table; JSON; a page with the distributions."""

from __future__ import annotations

from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from meshwright.report.terminal import table
from meshwright.runtime.load.outcome import LATE_S, PERCENTILES, Outcome, Spread

MILLI = 1e3
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "total": "end to end", "gap": "between pieces"}


def verdict(o: Outcome) -> str:
    """One line."""
    failed = f", {o.failed} failed" if o.failed else ""
    good = "" if o.goodput_s is None else f", {o.goodput_s:.2f} of them a second within the targets"
    return (
        f"{o.requests - o.failed} of {o.requests} requests answered in {o.seconds:.1f} s{failed}: "
        f"{o.requests_s:.2f} requests/s{good}, {o.tokens_s:,.1f} tokens/s"
    )


def _row(name: str, s: Spread | None, predicted: dict[str, float] | None) -> list[str]:
    if s is None:
        return [NAMES[name], "-", *["-"] * len(PERCENTILES), ""]
    said = ""
    if predicted and "value" in predicted and predicted["value"] > 0:
        off = s.mean / predicted["value"] - 1
        bounds = [predicted[k] * MILLI for k in ("low", "high") if k in predicted]
        inside = len(bounds) == 2 and bounds[0] <= s.mean * MILLI <= bounds[1]
        between = f", {'inside' if inside else 'outside'} {bounds[0]:,.0f} to {bounds[1]:,.0f}" if bounds else ""
        said = f"{predicted['value'] * MILLI:,.1f} (measured {off:+.0%}{between})"
    return [NAMES[name], f"{s.mean * MILLI:,.1f}", *(f"{s.percentiles[p] * MILLI:,.1f}" for p in PERCENTILES), said]


def show(o: Outcome, console: Console) -> None:
    """Print it."""
    console.print(verdict(o), highlight=False)
    shown = table("ms", "mean", *(f"p{p}" for p in PERCENTILES), "predicted mean")
    plan = o.predicted
    for name in NAMES:
        told = None if plan is None else {"ttft": plan.ttft_s, "tpot": plan.tpot_s}.get(name)
        shown.add_row(*_row(name, getattr(o, name), told))
    console.print()
    console.print(shown)
    if plan is not None:
        console.print(f"\nagainst: {plan.verdict}", highlight=False)
    for error, times in o.errors.items():
        console.print(f"{times} x {error}", highlight=False, markup=False)
    if o.late_s > LATE_S:
        console.print(
            f"note: this client sent 1 % of the requests {o.late_s:.2f} s late or more; the load was lower than asked"
        )


def as_plain(o: Outcome) -> dict[str, Any]:
    """Everything as JSON takes it."""
    out = asdict(o)
    out["verdict"] = verdict(o)
    for name in NAMES:
        if out[name] is not None:
            out[name]["percentiles"] = {f"p{p}": s for p, s in out[name]["percentiles"].items()}
    return out


def write_page(o: Outcome, path: Path) -> None:
    """A self-contained page: how TTFT and TPOT are distributed, and how they went over time."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    good = [t for t in o.samples if t.error is None]
    titles = ("TTFT", "TPOT", "TTFT over the run", "TPOT over the run")
    figure = make_subplots(rows=2, cols=2, subplot_titles=titles)
    for column, name in enumerate(("ttft", "tpot"), 1):
        values = [(t.sent_s, v * MILLI) for t in good if (v := getattr(t, f"{name}_s")) is not None]
        figure.add_trace(go.Histogram(x=[v for _, v in values], name=NAMES[name]), 1, column)
        figure.add_trace(go.Scatter(x=[s for s, _ in values], y=[v for _, v in values], mode="markers"), 2, column)
        told = o.predicted and (o.predicted.ttft_s if name == "ttft" else o.predicted.tpot_s)
        if told and "value" in told:
            figure.add_vline(x=told["value"] * MILLI, line_dash="dash", annotation_text="predicted", row=1, col=column)
        figure.update_xaxes(title_text="ms", row=1, col=column)
        figure.update_xaxes(title_text="sent after s", row=2, col=column)
        figure.update_yaxes(title_text="ms", row=2, col=column)
    figure.update_layout(showlegend=False, height=720, title_text=verdict(o))
    body = figure.to_html(full_html=False, include_plotlyjs=True)
    errors = "".join(f"<li>{times} x {escape(error)}</li>" for error, times in o.errors.items())
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>load</title>'
    path.write_text(f"{head}<body>{body}<ul>{errors}</ul></body></html>", encoding="utf-8")

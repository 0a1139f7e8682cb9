"""Ledger and strategies as rows of text; the terminal and the page print the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.ledger.schema import Ledger
from meshwright.ledger.views import by_layer, rank_classes, totals
from meshwright.specs.units import binary, si

if TYPE_CHECKING:
    from meshwright.plan.strategies import StrategyRow

Rows = tuple[Sequence[str], list[Sequence[str]]]

LEDGER_HEAD = ("where", "phase", "op", "what", "group", "count", "shape", "dtype", "payload", "on the wire", "FLOPs")
TOTAL_HEAD = ("phase", "group", "count", "payload", "on the wire", "FLOPs")
STRATEGY_HEAD = ("strategy", "cuts", "sends", "payload", "on the wire", "belongs")


def _size(nbytes: int | None) -> str:
    return "" if not nbytes else binary(nbytes)


def ledger_rows(ledger: Ledger, phase: str | None = None, rank_class: str | None = None) -> Rows:
    """The entries of one rank class by layer; payload, wire and FLOPs are of one occurrence."""
    rows: list[Sequence[str]] = [
        (
            r.layers,
            r.phase or "",
            r.op,
            r.name or "",
            r.group or "",
            f"{r.count:,}",
            r.shape,
            r.dtype or "",
            _size(r.payload_bytes),
            _size(r.wire_bytes),
            si(r.flops) if r.flops else "",
        )
        for r in by_layer(ledger, rank_class, phase)
    ]
    return LEDGER_HEAD, rows


def total_rows(ledger: Ledger, phase: str | None = None, rank_class: str | None = None) -> Rows:
    """Sums of one rank by phase and group."""
    rows: list[Sequence[str]] = [
        (
            t.phase or "",
            t.group,
            f"{t.count:,}",
            _size(t.payload_bytes),
            _size(t.wire_bytes),
            si(t.flops) if t.flops else "",
        )
        for t in totals(ledger, rank_class, phase)
    ]
    return TOTAL_HEAD, rows


def first_class(ledger: Ledger) -> str:
    """Which ranks the rows are of: ``rank 0 (class pp0)``."""
    names = rank_classes(ledger)
    return f"ranks of class {names[0]}" + (f", one of {len(names)} classes" if len(names) > 1 else "") if names else ""


def strategy_rows(rows: Sequence[StrategyRow]) -> Rows:
    """What each strategy cuts, sends, and where it belongs."""
    body: list[Sequence[str]] = []
    for r in rows:
        degree = f" ({r.layout})" if r.layout is not None else ""
        belongs = f"{r.belongs}; {r.note}" if r.note else r.belongs
        payload = "" if r.payload_bytes is None else f"{binary(r.payload_bytes)} a {r.per}"
        wire = "" if r.wire_bytes is None else f"{binary(r.wire_bytes)} a {r.per}"
        body.append((r.strategy + degree, r.cuts, r.pattern, payload, wire, belongs))
    return STRATEGY_HEAD, body

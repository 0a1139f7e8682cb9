"""A ledger as people read it: by layer, equal layers folded into one row; totals by phase and group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.ledger.schema import Entry, Ledger

#: Order in which phases are shown.
PHASES = ("prefill", "decode", "forward", "backward", "optimizer")

#: Runs of layers that a label spells out.
MAX_RUNS = 3


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One line of the summary: the same entry of one or many equal layers.

    Attributes:
        phase, op, name, group: of the entry (group None: compute).
        layers: ``layers 3-60 (58x)``, ``layer 0``, ``begin`` or ``end`` (outside layers).
        count: how often a rank does it, over all folded layers and repetitions.
        shape: ``4096x8192 . 8192x1024``.
        dtype: element type.
        payload_bytes, wire_bytes, flops: of one occurrence; None when unknown.
    """

    phase: str | None
    layers: str
    op: str
    name: str | None
    group: str | None
    count: int
    shape: str
    dtype: str | None
    payload_bytes: int | None
    wire_bytes: int | None
    flops: int | None


@dataclass(frozen=True, slots=True)
class Total:
    """Sum over one rank's entries of one phase and group (``compute`` for work on the device)."""

    phase: str | None
    group: str
    count: int
    payload_bytes: int
    wire_bytes: int
    flops: int


def shape_text(shapes: Sequence[Sequence[int]] | None) -> str:
    """``((4096, 8192), (8192, 1024))`` as ``4096x8192 . 8192x1024``; a scalar is ``1``."""
    return " . ".join("x".join(map(str, s)) or "1" for s in shapes or ())


def layer_label(layers: Sequence[int]) -> str:
    """``layer 0``, ``layers 3-60 (58x)``, ``layers 0-4, 6-10, 12-16, ... (40x)``."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    texts = [f"{a}-{b}" if b > a else str(a) for a, b in runs[:MAX_RUNS]]
    return f"layers {', '.join(texts)}{', ...' if len(runs) > MAX_RUNS else ''} ({len(layers)}x)"


def rank_classes(ledger: Ledger) -> list[str]:
    """Names of the classes in the order of their first ranks, then those that only entries know."""
    known = [r.rank_class for r in sorted(ledger.ranks, key=lambda r: r.rank)]
    return list(dict.fromkeys([*known, *(e.rank_class for e in ledger.entries)]))


def by_layer(ledger: Ledger, rank_class: str | None = None, phase: str | None = None) -> list[LayerRow]:
    """The entries of one rank class by phase and layer, equal layers folded.

    Args:
        ledger: any ledger.
        rank_class: which class; None: the first.
        phase: only this phase; None: all.
    """
    name = rank_class if rank_class is not None else next(iter(rank_classes(ledger)), "")
    phases: dict[str | None, list[Entry]] = {}
    for entry in ledger.entries:
        if entry.rank_class == name and phase in {None, entry.phase}:
            phases.setdefault(entry.phase, []).append(entry)
    rows: list[LayerRow] = []
    for key in sorted(phases, key=lambda p: PHASES.index(p) if p in PHASES else len(PHASES)):
        rows += _phase_rows(phases[key])
    return rows


def _signature(entry: Entry) -> tuple[object, ...]:
    e = entry
    return (e.op, e.name, e.group, e.peer, e.shapes, e.dtype, e.payload_bytes, e.wire_bytes, e.flops, e.count)


def _phase_rows(entries: Sequence[Entry]) -> list[LayerRow]:
    """Blocks of one layer each, equal blocks together where the first of them stands."""
    blocks: dict[tuple[tuple[object, ...], ...], list[int]] = {}
    members: dict[tuple[tuple[object, ...], ...], list[Entry]] = {}
    layers: dict[int, list[Entry]] = {}
    ends: tuple[list[Entry], list[Entry]] = ([], [])
    for entry in entries:
        if entry.layer is None:
            ends[bool(layers)].append(entry)
        else:
            layers.setdefault(entry.layer, []).append(entry)
    for layer in sorted(layers):
        block = tuple(_signature(e) for e in layers[layer])
        blocks.setdefault(block, []).append(layer)
        members.setdefault(block, layers[layer])
    rows = _rows("begin", ends[0], 1)
    for block, found in blocks.items():
        rows += _rows(layer_label(found), members[block], len(found))
    return rows + _rows("end", ends[1], 1)


def _rows(label: str, entries: Iterable[Entry], times: int) -> list[LayerRow]:
    """One row an entry; entries that repeat in the block (micro-batches one by one) are counted together."""
    counts: dict[tuple[object, ...], int] = {}
    first: dict[tuple[object, ...], Entry] = {}
    for entry in entries:
        key = _signature(entry)
        counts[key] = counts.get(key, 0) + entry.count
        first.setdefault(key, entry)
    return [
        LayerRow(
            e.phase,
            label,
            e.op,
            e.name,
            e.group,
            counts[key] * times,
            shape_text(e.shapes),
            e.dtype,
            e.payload_bytes,
            e.wire_bytes,
            e.flops,
        )
        for key, e in first.items()
    ]


def totals(ledger: Ledger, rank_class: str | None = None, phase: str | None = None) -> list[Total]:
    """Sums of one rank class by phase and group; unknown numbers count as 0."""
    name = rank_class if rank_class is not None else next(iter(rank_classes(ledger)), "")
    sums: dict[tuple[str | None, str], list[int]] = {}
    for e in ledger.entries:
        if e.rank_class != name or phase not in {None, e.phase}:
            continue
        row = sums.setdefault((e.phase, e.group or "compute"), [0, 0, 0, 0])
        row[0] += e.count
        row[1] += e.count * (e.payload_bytes or 0)
        row[2] += e.count * (e.wire_bytes or 0)
        row[3] += e.count * (e.flops or 0)
    order = {key: PHASES.index(key[0]) if key[0] in PHASES else len(PHASES) for key in sums}
    return [Total(key[0], key[1], *sums[key]) for key in sorted(sums, key=lambda k: (order[k], k[1] != "compute"))]

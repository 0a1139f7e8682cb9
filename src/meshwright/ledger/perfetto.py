"""Entries with times as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Format: "Trace Event Format" (Google, 2016): a JSON object whose ``traceEvents`` are complete events (``ph`` ``X``,
times in microseconds) and metadata (``ph`` ``M``). A process is one group of ranks, a thread one stream; slices of a
thread nest or do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from meshwright.ledger.schema import Entry

#: Streams in the order in which threads are shown; others follow by name.
FIRST = ("layers", "compute", "host")

Event = dict[str, Any]


class Process(NamedTuple):
    """What one line group shows: its name and its entries, all with ``started_ns`` and ``ended_ns``."""

    name: str
    entries: Sequence[Entry]


def trace(processes: Sequence[Process], meta: Mapping[str, Any]) -> dict[str, Any]:
    """The trace as plain data; ``meta`` becomes ``otherData``."""
    events: list[Event] = []
    for pid, process in enumerate(processes):
        events += _process(pid, process)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(meta)}


def named(pid: int, name: str, *, tid: int | None = None, place: int = 0) -> list[Event]:
    """Metadata that names a process, or its thread ``tid``, and says at which place it is shown."""
    kind = "process" if tid is None else "thread"
    at = {"pid": pid} if tid is None else {"pid": pid, "tid": tid}
    return [
        {"ph": "M", "name": f"{kind}_name", **at, "args": {"name": name}},
        {"ph": "M", "name": f"{kind}_sort_index", **at, "args": {"sort_index": place}},
    ]


def _process(pid: int, process: Process) -> list[Event]:
    streams = {entry.stream or "compute" for entry in process.entries}
    outer = [] if any(e.op == "action" for e in process.entries) else layer_spans(process.entries)
    if outer:
        streams.add("layers")
    order = sorted(streams, key=lambda s: (FIRST.index(s) if s in FIRST else len(FIRST), s))
    tids = {stream: tid for tid, stream in enumerate(order)}
    events = named(pid, process.name, place=pid)
    for stream, tid in tids.items():
        events += named(pid, stream, tid=tid, place=tid)
    slices = [_slice(pid, tids[e.stream or "compute"], e) for e in (*outer, *process.entries)]
    return events + sorted(slices, key=lambda e: (e["tid"], e["ts"], -e["dur"]))


def layer_spans(entries: Iterable[Entry]) -> list[Entry]:
    """Passes and their layers as entries that enclose what belongs to them, on the stream ``layers``."""
    passes: list[Entry] = []
    layers: list[Entry] = []
    for entry in entries:
        fresh = not passes or passes[-1].phase != entry.phase
        if fresh:
            passes.append(_span(entry, "pass", entry.phase or "pass"))
        if fresh or layers[-1].layer != entry.layer:
            layers.append(_span(entry, "layer", f"layer {entry.layer}"))
        for span in (passes[-1], layers[-1]):
            span.ended_ns = max(span.ended_ns or 0, entry.ended_ns or 0)
    return passes + [span for span in layers if span.layer is not None]


def _span(entry: Entry, op: str, name: str) -> Entry:
    layer = entry.layer if op == "layer" else None
    span = Entry(entry.rank_class, op, layer=layer, phase=entry.phase, stream="layers", name=name)
    span.started_ns, span.ended_ns = entry.started_ns, entry.ended_ns
    return span


def _slice(pid: int, tid: int, e: Entry) -> Event:
    start, end = e.started_ns or 0, e.ended_ns or 0
    facts: dict[str, Any] = {
        "op": e.op,
        "layer": e.layer,
        "micro-batch": e.microbatch,
        "phase": e.phase,
        "group": e.group,
        "peer": e.peer,
        "shapes": " . ".join("x".join(map(str, s)) for s in e.shapes) if e.shapes else None,
        "dtype": e.dtype or None,
        "bytes": e.payload_bytes,
        "bytes on the wire": e.wire_bytes or None,
        "FLOPs": e.flops or None,
        "count": e.count if e.count > 1 else None,
        "seconds": (end - start) / 1e9,
    }
    name = e.name if e.group is None else f"{e.op} {e.name or ''}".strip()
    return {
        "ph": "X",
        "name": name or e.op,
        "cat": e.phase or "none",
        "pid": pid,
        "tid": tid,
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "args": {key: value for key, value in facts.items() if value is not None},
    }

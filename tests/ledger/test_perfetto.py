"""The trace that Perfetto opens: the fields of the format, slices that nest, entries with all they know."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshwright.ledger.perfetto import Process, layer_spans, named, trace
from meshwright.ledger.schema import Entry

#: Fields of a complete event in the Trace Event Format, with their types.
SLICE = {"ph": str, "name": str, "cat": str, "pid": int, "tid": int, "ts": float, "dur": float, "args": dict}


def entry(name: str, start: int, end: int, **known: Any) -> Entry:
    made = Entry("a", known.pop("op", "matmul"), name=name, phase=known.pop("phase", "prefill"), **known)
    made.stream = made.stream or "compute"
    made.started_ns, made.ended_ns = start, end
    return made


def problems(found: dict[str, Any]) -> list[str]:
    """What keeps a trace from opening as meant: wrong fields, negative times, slices that overlap, no names."""
    out = []
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    known = {(e["pid"], e.get("tid")) for e in found["traceEvents"] if e["ph"] == "M" and e["name"].endswith("_name")}
    for event in found["traceEvents"]:
        if event["ph"] != "X":
            out += [] if event["ph"] == "M" else [f"unknown event {event['ph']}"]
            continue
        out += [f"{name} of {event}" for name, kind in SLICE.items() if not isinstance(event.get(name), kind)]
        if event["ts"] < 0 or event["dur"] < 0:
            out.append(f"negative time in {event}")
        if (event["pid"], None) not in known or (event["pid"], event["tid"]) not in known:
            out.append(f"no name for {event}")
        span = (round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000))
        threads.setdefault((event["pid"], event["tid"]), []).append(span)
    for thread, spans in threads.items():
        open_: list[tuple[int, int]] = []
        for start, end in spans:
            while open_ and open_[-1][1] <= start:
                open_.pop()
            if open_ and end > open_[-1][1]:
                out.append(f"thread {thread}: {(start, end)} overlaps {open_[-1]}")
            open_.append((start, end))
    return out


ROWS = [
    entry("embedding", 0, 1000, op="embedding"),
    entry("q", 1000, 3000, layer=0, shapes=((4, 8), (8, 2)), dtype="bf16", payload_bytes=96, flops=128),
    entry("out", 3000, 4500, op="all_reduce", layer=0, stream="tp", group="tp", payload_bytes=64, wire_bytes=96),
    entry("q", 4500, 6500, layer=1, count=3),
    entry("q", 6500, 7000, layer=0, phase="decode"),
]


def test_a_trace_has_the_fields_of_the_format() -> None:
    found = json.loads(json.dumps(trace([Process("rank 0", ROWS), Process("rank 1", ROWS)], {"model": "m"})))
    assert problems(found) == []
    assert found["otherData"] == {"model": "m"}
    slices = [e for e in found["traceEvents"] if e["ph"] == "X" and e["pid"] == 0]
    threads = {e["tid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
    assert threads == {0: "layers", 1: "compute", 2: "tp"}
    product = next(e for e in slices if e["name"] == "q")
    assert product["args"] == {
        "op": "matmul", "layer": 0, "phase": "prefill", "shapes": "4x8 . 8x2", "dtype": "bf16", "bytes": 96,
        "FLOPs": 128, "seconds": 2e-6,
    }  # fmt: skip
    assert (product["ts"], product["dur"]) == (1.0, 2.0)
    sent = next(e for e in slices if e["tid"] == 2)
    assert sent["name"] == "all_reduce out"
    assert sent["args"]["bytes on the wire"] == 96
    own = [e for e in slices if e["tid"] != 0]
    assert sum(e["dur"] for e in own) == 7.0


def test_passes_hold_their_layers() -> None:
    spans = [(s.name, s.started_ns, s.ended_ns) for s in layer_spans(ROWS)]
    assert spans == [
        ("prefill", 0, 6500), ("decode", 6500, 7000), ("layer 0", 1000, 4500), ("layer 1", 4500, 6500),
        ("layer 0", 6500, 7000),
    ]  # fmt: skip


def test_actions_hold_their_ops_without_further_spans() -> None:
    rows = [entry("forward 0", 0, 4000, op="action"), entry("q", 0, 3000, layer=0), entry("k", 3000, 4000, layer=1)]
    found = trace([Process("stage 0", rows)], {})
    assert problems(found) == []
    assert [e["name"] for e in found["traceEvents"] if e["ph"] == "X"] == ["forward 0", "q", "k"]


@pytest.mark.parametrize(
    "bad", [entry("late", 2000, 5000), entry("back", 5000, 4000), entry("before", -10, 5)], ids=lambda e: str(e.name)
)
def test_the_check_finds_what_is_wrong(bad: Entry) -> None:
    assert problems(trace([Process("a", [*ROWS[:2], bad])], {})) != []


def test_names_say_where_they_stand() -> None:
    assert [e["args"] for e in named(3, "tp", tid=2, place=5)] == [{"name": "tp"}, {"sort_index": 5}]
    assert all("tid" not in e for e in named(3, "rank 0"))

"""From the columns of one profiler trace to a ``Track``: steps, collectives, a label for every moment."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import numpy as np

from meshwright.doctor.readers.kineto_calls import calls_of
from meshwright.doctor.readers.kineto_names import DATA, SYNC, WORK, step_number
from meshwright.doctor.readers.kineto_rows import ABSOLUTE_US, Device, Rows, Spans
from meshwright.ledger.intervals import Stretches, Times, clip, empty, layers, length, union
from meshwright.ledger.tracks import COMM_OPS, PLACE, Step, Track

#: Names of kernels kept, the longest ones, and length of a name.
MAX_WORK = 200
_GRAPH_SHARE = 0.5

Meta = dict[str, Any]


def base_ns(meta: Meta, first_ns: int) -> int:
    """What is added to all times: newer traces count from ``baseTimeNanoseconds``, older ones from 1970."""
    base = meta.get("baseTimeNanoseconds")
    if type(base) is not int or not 0 < base < 1 << 62:
        return 0
    return base if first_ns < ABSOLUTE_US * 1000 else 0


def track_of(rows: Rows, meta: Meta, source: str) -> Track:
    """The recording; its rank is -1 where the trace does not tell."""
    told = meta.get("distributedInfo")
    info: Meta = told if isinstance(told, dict) else {}
    track = Track(_int(info.get("rank"), -1), source)
    track.world = _int(info.get("world_size"), 0) or None
    track.backend = str(info.get("backend") or "")[:20]
    host = meta.get("host_name")
    track.host = host[:100] if isinstance(host, str) else None
    track.device = _device_name(meta, rows)
    shift = base_ns(meta, _first(rows))
    track.steps = _steps(rows, shift)
    track.marked = bool(rows.steps)
    kernels, copies = _stretch(rows.kernels), _stretch(rows.copies)
    if track.marked and not _covers(track.steps, kernels, shift):
        track.steps, track.marked = _device_steps(track.steps, rows, kernels, shift)
    track.calls = calls_of(rows, info, on_device=bool(len(rows.kernels.start) or rows.calls))
    for call in track.calls:
        call.started_ns, call.ended_ns = (call.started_ns or 0) + shift, (call.ended_ns or 0) + shift
        call.enqueued_ns = call.enqueued_ns + shift if call.enqueued_ns is not None else None
    _label(track, rows, kernels, copies, shift)
    _number_steps(track)
    _count(track, rows)
    _lacks(track, rows, info)
    return track


def _column(values: array[int]) -> Times:
    """A column as an array of numpy over the same memory."""
    if not len(values):
        return np.zeros(0, np.int64)
    if values.typecode == "q":
        return np.frombuffer(values, np.int64)
    return np.frombuffer(values, np.int32).astype(np.int64)


def _int(value: Any, default: int) -> int:
    return value if type(value) is int and 0 <= value < 1 << 20 else default


def _first(rows: Rows) -> int:
    firsts = [min(c) for c in (rows.kernels.start, *(s.start for s in rows.spans.values())) if c]
    firsts += [c.start for c in rows.calls[:1]] + [s[1] for s in rows.steps[:1]]
    return min(firsts, default=0)


def _device_name(meta: Meta, rows: Rows) -> str:
    found = meta.get("deviceProperties")
    if not isinstance(found, list) or not (rows.kernels.start or rows.calls):
        return ""
    return next((str(d["name"])[:80] for d in found if isinstance(d, dict) and d.get("name")), "accelerator")


def _stretch(device: Device) -> Stretches:
    return _column(device.start), _column(device.end)


def _steps(rows: Rows, shift: int) -> list[Step]:
    """Marked steps, those of the profiler before those of an engine; else the whole recording as one."""
    own = [s for s in rows.steps if step_number(s[0]) is not None]
    chosen = own or _outermost(rows.steps)
    found = []
    for place, (name, start, end, _) in enumerate(sorted(chosen, key=lambda s: s[1])):
        number = step_number(name)
        found.append(Step(place if number is None else number, start + shift, end + shift, name))
    if found:
        return found
    columns: list[Device | Spans] = [rows.kernels, rows.copies, *rows.spans.values()]
    starts = [min(c.start) for c in columns if c.start] + [c.start for c in (*rows.calls, *rows.host_calls)]
    ends = [max(c.end) for c in columns if c.end] + [c.end for c in (*rows.calls, *rows.host_calls)]
    return [Step(0, min(starts) + shift, max(ends) + shift, "whole recording")] if starts else []


def _covers(steps: list[Step], kernels: Stretches, shift: int) -> bool:
    """Whether at least half of the kernels' time lies in marked steps: engines launch ahead of what they mark."""
    work = union(kernels[0] + shift, kernels[1] + shift)
    inside = sum(length(clip(work, s.start_ns, s.end_ns)) for s in steps)
    return 2 * inside >= length(work)


def _device_steps(steps: list[Step], rows: Rows, kernels: Stretches, shift: int) -> tuple[list[Step], bool]:
    """Steps as the device lived them, from the first kernel that each launched; else from first to last kernel."""
    at = _launched_at(rows, kernels) + shift
    starts = np.array([s.start_ns for s in steps], np.int64)
    of = np.searchsorted(starts, at, side="right") - 1
    begins = [int(kernels[0][of == n].min()) + shift if (of == n).any() else -1 for n in range(len(steps))]
    last = int(kernels[1].max()) + shift
    if len(steps) < 2 or min(begins) < 0 or sorted(begins) != begins:
        return [Step(0, int(kernels[0].min()) + shift, last, "from the first kernel to the last")], False
    ends = [*begins[1:], last]
    return [Step(s.number, b, e, s.name) for s, b, e in zip(steps, begins, ends, strict=True)], True


def _outermost(steps: list[tuple[str, int, int, int]]) -> list[tuple[str, int, int, int]]:
    kept: list[tuple[str, int, int, int]] = []
    for step in sorted(steps, key=lambda s: (s[1], -s[2])):
        if not kept or step[1] >= kept[-1][2]:
            kept.append(step)
    return kept


def _spans(rows: Rows, kind: str, shift: int) -> Stretches:
    spans = rows.spans.get(kind)
    if spans is None:
        return empty()
    return union(_column(spans.start) + shift, _column(spans.end) + shift)


def _within(times: Times, stretches: Stretches) -> Any:
    """Which times lie in one of the stretches."""
    at = np.searchsorted(stretches[0], times, side="right") - 1
    if not len(stretches[0]):
        return np.zeros(len(times), bool)
    return (at >= 0) & (times < stretches[1][np.maximum(at, 0)])


def _label(track: Track, rows: Rows, kernels: Stretches, copies: Stretches, shift: int) -> None:
    """Give every moment its label. On a device, what hides behind computation costs nothing; on a CPU, data loading and
    the like run on the thread that computes and come first."""
    order: dict[str, Stretches] = {}
    host = {kind: _spans(rows, kind, shift) for kind in ("checkpoint", "compile", "gc", DATA)}
    if len(kernels[0]) or rows.calls:
        order |= _device_work(rows, kernels, shift)
        order["copy"] = union(copies[0] + shift, copies[1] + shift)
        order |= _comm(track)
        order |= host
        order["sync"] = _until_next(_spans(rows, SYNC, shift), kernels, shift)
        order["launch"] = _spans(rows, WORK, shift)
    else:
        order |= host
        order |= _cpu_work(rows, shift)
        order |= _comm(track)
        order["sync"] = _spans(rows, SYNC, shift)
    if track.steps:
        low, high = (np.array([t], np.int64) for t in track.span_ns)
        order["idle"] = (low, high)
    names = list(order)
    segments = layers([order[name] for name in names])
    lookup = np.array([PLACE[name] for name in names], np.int8)
    label = lookup[segments.label] if len(segments) else segments.label
    track.segments = type(segments)(segments.start, segments.end, label)


def _device_work(rows: Rows, kernels: Stretches, shift: int) -> dict[str, Stretches]:
    """Kernels by the part of the step in which they were launched."""
    at = _launched_at(rows, kernels) + shift
    starts, ends = kernels[0] + shift, kernels[1] + shift
    backward, optimizer = _spans(rows, "backward", shift), _spans(rows, "optimizer", shift)
    of_backward, of_optimizer = _within(at, backward), _within(at, optimizer)
    rest = ~(of_backward | of_optimizer)
    name = "forward" if len(backward[0]) else "compute"
    return {
        "backward": union(starts[of_backward], ends[of_backward]),
        "optimizer": union(starts[of_optimizer], ends[of_optimizer]),
        name: union(starts[rest], ends[rest]),
    }


def _launched_at(rows: Rows, kernels: Stretches) -> Times:
    """When the host launched each kernel; where that is not recorded, when it began."""
    if not rows.launch_id:
        return kernels[0]
    ids, times = _column(rows.launch_id), _column(rows.launch_at)
    order = np.argsort(ids, kind="stable")
    ids, times = ids[order], times[order]
    wanted = _column(rows.kernels.correlation)
    place = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    return np.where(ids[place] == wanted, times[place], kernels[0])


def _cpu_work(rows: Rows, shift: int) -> dict[str, Stretches]:
    """Operators on the CPU; inside a marked part of the step the Python between them counts as well."""
    backward, optimizer = _spans(rows, "backward", shift), _spans(rows, "optimizer", shift)
    work = _spans(rows, WORK, shift)
    return {"optimizer": optimizer, "backward": backward, "forward" if len(backward[0]) else "compute": work}


def _comm(track: Track) -> dict[str, Stretches]:
    by: dict[str, list[tuple[int, int]]] = {}
    for call in track.calls:
        op = call.op if call.op in COMM_OPS else "collective"
        by.setdefault(op, []).append((call.started_ns or 0, call.ended_ns or 0))
    pairs = {op: np.array(times, np.int64) for op, times in by.items()}
    return {op: union(pairs[op][:, 0], pairs[op][:, 1]) for op in COMM_OPS if op in pairs}


def _until_next(sync: Stretches, kernels: Stretches, shift: int) -> Stretches:
    """Synchronizations up to the next kernel: the device idles until the host has launched again."""
    starts = np.unique(kernels[0]) + shift
    if not len(sync[0]) or not len(starts):
        return sync
    place = np.searchsorted(starts, sync[1])
    ends = np.where(place < len(starts), starts[np.minimum(place, len(starts) - 1)], sync[1])
    return union(sync[0], np.maximum(ends, sync[1]))


def _number_steps(track: Track) -> None:
    starts = np.array([s.start_ns for s in track.steps], np.int64)
    for call in track.calls:
        at = call.enqueued_ns if call.enqueued_ns is not None else call.started_ns or 0
        place = int(np.searchsorted(starts, at, side="right")) - 1
        if place >= 0 and at < track.steps[place].end_ns:
            call.step = track.steps[place].number


def _count(track: Track, rows: Rows) -> None:
    kernels, ids = len(rows.kernels.start), _column(rows.kernels.correlation)
    shared = len(ids) - len(np.unique(ids)) if len(ids) else 0
    track.counts = {
        "events": rows.events,
        "kernels": kernels + len(rows.calls),
        "launches": len(rows.launch_id),
        "graph_launches": rows.graph_launches,
        "graph_kernels": shared if rows.graph_launches else 0,
        "synchronizations": len(rows.spans[SYNC].start) if SYNC in rows.spans else 0,
        "copies": len(rows.copies.start),
    }
    number = np.array(rows.kernels.name if kernels else rows.work_name, np.int64)
    spent = _column(rows.kernels.end) - _column(rows.kernels.start) if kernels else _column(rows.work_ns)
    if len(number):
        times, often = np.bincount(number, weights=spent), np.bincount(number)
        longest = np.argsort(-times)[:MAX_WORK]
        track.work = {rows.names[i]: (int(often[i]), int(times[i])) for i in longest if often[i]}


def _lacks(track: Track, rows: Rows, info: Meta) -> None:
    """Say what the trace does not hold, for the reader of the verdict."""
    say = track.lacks.append
    if not track.steps:
        say("no operator, kernel or step of torch in it")
        return
    if not track.marked:
        say("no step is marked around the kernels (profiler.step() was not called): all of it counts as one step")
    if track.rank < 0:
        say("the trace names no rank (no distributedInfo)")
    unnamed = sum(1 for c in track.calls if c.payload_bytes is None)
    if track.counts["graph_kernels"] > _GRAPH_SHARE * max(1, track.counts["kernels"]):
        say(
            f"{track.counts['graph_kernels']} of {track.counts['kernels']} kernels come from graph replays: "
            "collectives in them carry no arguments, and kernels cannot be told by the code that launched them"
        )
    if unnamed:
        ops = ", ".join(f"{n} {op}" for op, n in Counter(c.op for c in track.calls if c.payload_bytes is None).items())
        say(f"{unnamed} of {len(track.calls)} collectives carry no arguments (size, group): {ops}"[:200])
    if not track.calls:
        issued = sum(1 for c in rows.host_calls if c.name.startswith(("nccl:", "gloo:")))
        what = f", though {issued} were issued" if issued else ""
        say(f"no collective was recorded{what}")
    if not rows.kernels.start and not rows.calls and not rows.host_calls and not rows.spans:
        say("neither operators nor kernels were recorded")
    if not rows.kernels.start and not rows.calls:
        say("no device activity: a CPU run, or the profiler was not told to record the device")
    if rows.bad:
        say(f"{rows.bad} events with values of a wrong type are left out")
    if not info:
        say("no distributedInfo: backend, world size and groups are unknown")

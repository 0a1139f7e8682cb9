"""Collectives of a profiler trace as rows of the ledger: operation, group, order, bytes, times.

On a device they are kernels; what they are called with stands in the kernel's own arguments, or in those of the call
on the host that launched it. On CPU they are spans of the back end's worker threads (``gloo:all_reduce``).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from math import prod
from typing import Any

from meshwright.doctor.readers.kineto_names import dtype_bytes, kernel_op, op_of
from meshwright.doctor.readers.kineto_rows import Call, Rows
from meshwright.ledger.schema import Entry

#: Ranks of a group that are read of a list; torch cuts lists after 30 and writes ``...``.
MAX_MEMBERS = 1 << 16
_PEER = re.compile(r"(?:send|recv) (\d{1,7})(?:->|<-)(\d{1,7})")
_BACKEND = re.compile(r"^(?:nccl|gloo|ucc|mpi|xccl|hccl):")

Groups = dict[str, tuple[str, tuple[int, ...]]]


def calls_of(rows: Rows, info: dict[str, Any], *, on_device: bool) -> list[Entry]:
    """All collectives in the order in which they were issued (else begun), times as in the trace."""
    groups = groups_of(info)
    if on_device:
        hosts = _by_lane(rows.host_calls)
        launched = _launches(rows)
        found = [_kernel(call, hosts, launched, groups) for call in rows.calls]
    else:
        spans = [c for c in rows.host_calls if _BACKEND.match(c.name)]
        found = [_entry(c, c.args, c.name, groups, None) for c in spans]
    found.sort(key=lambda e: (e.enqueued_ns if e.enqueued_ns is not None else e.started_ns or 0, e.started_ns or 0))
    return found


def _launches(rows: Rows) -> dict[int, tuple[int, int]]:
    """Correlation of every collective -> when and on which thread it was launched."""
    wanted = {call.correlation for call in rows.calls}
    found = {}
    for place, identity in enumerate(rows.launch_id):
        if identity in wanted:
            found[identity] = (rows.launch_at[place], rows.launch_lane[place])
    return found


def groups_of(info: dict[str, Any]) -> Groups:
    """Name -> (description, ranks) of the process groups that a trace lists."""
    listed = info.get("pg_config")
    found: Groups = {}
    for row in listed[:MAX_MEMBERS] if isinstance(listed, list) else ():
        if isinstance(row, dict) and isinstance(row.get("pg_name"), str):
            desc = row.get("pg_desc")
            ranks = row.get("ranks")
            members = _ints(ranks) if isinstance(ranks, list) else _listed(ranks)
            found[row["pg_name"][:100]] = (desc[:100] if isinstance(desc, str) else "", members)
    return found


def _ints(values: Iterable[Any]) -> tuple[int, ...]:
    found = tuple(values)
    whole = len(found) <= MAX_MEMBERS and all(type(v) is int and 0 <= v < 1 << 20 for v in found)
    return found if whole else ()


def _listed(text: Any) -> tuple[int, ...]:
    """``[0, 1, 2]``; empty where the list is cut."""
    if not isinstance(text, str) or "..." in text or len(text) > 1 << 16:
        return ()
    parts = text.strip("[] ").split(",")
    return tuple(int(p) for p in parts) if all(p.strip().isdecimal() and len(p) < 9 for p in parts) else ()


def _by_lane(calls: list[Call]) -> dict[int, tuple[list[int], list[Call]]]:
    """Host calls of every thread by begin, the inner ones after the outer ones."""
    by: dict[int, list[Call]] = {}
    for call in calls:
        by.setdefault(call.lane, []).append(call)
    for held in by.values():
        held.sort(key=lambda c: (c.start, -c.end))
    return {lane: ([c.start for c in held], held) for lane, held in by.items()}


def _kernel(
    call: Call,
    hosts: dict[int, tuple[list[int], list[Call]]],
    launched: dict[int, tuple[int, int]],
    groups: Groups,
) -> Entry:
    at = launched.get(call.correlation)
    around: list[Call] = []
    if at is not None and at[1] in hosts:
        starts, held = hosts[at[1]]
        place = bisect_right(starts, at[0])
        around = [c for c in held[max(0, place - 6) : place] if c.start <= at[0] < c.end]
    args: dict[str, Any] = {}
    for host in around:
        args |= {k: v for k, v in host.args.items() if k not in ("Input Dims", "Input type") or _dims(v)}
    args |= call.args
    named = next((c.name for c in reversed(around) if _BACKEND.match(c.name)), None)
    name = args.get("Collective name") or named or call.name
    return _entry(call, args, str(name), groups, at[0] if at is not None else None)


def _peer(named: re.Match[str] | None, members: tuple[int, ...]) -> int | None:
    """The other side of ``nccl:send 0->1``, which are places in the group; arguments tell global ranks."""
    if named is None:
        return None
    place = int(named[2])
    return members[place] if place < len(members) else place


def _dims(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and value[0] not in ([], "", "TensorList")


def _entry(call: Call, args: dict[str, Any], name: str, groups: Groups, enqueued: int | None) -> Entry:
    op = op_of(name)
    if op == "collective":
        op = kernel_op(call.name) or "collective"
    dtype = args.get("dtype") or _first_type(args.get("Input type"))
    size = dtype_bytes(dtype) if isinstance(dtype, str) else None
    group, members = _group(args, groups)
    ranks = len(members) or _count(args.get("Group size")) or 0
    elements = _count(args.get("In msg nelems"))
    outer = _count(args.get("Out msg nelems"))
    dims = args.get("Input Dims")
    shapes = _shapes(dims)
    if elements is None and shapes:
        elements = prod(shapes[0])
    payload = elements * size if elements is not None and size is not None else None
    told = _count(args.get("Dst Rank" if op == "send" else "Src Rank"))
    named = _PEER.search(call.name) or _PEER.search(name)
    return Entry(
        rank_class="",
        op=op,
        stream=f"{call.lane}",
        group=group,
        seq=_count(args.get("Seq")),
        name=_BACKEND.sub("", name)[:80],
        peer=told if told is not None else _peer(named, members),
        splits=_splits(args.get("In split size")),
        shapes=shapes,
        dtype=dtype[:40] if isinstance(dtype, str) else None,
        payload_bytes=payload,
        wire_bytes=wire_bytes(op, payload, outer * size if outer is not None and size else None, ranks),
        enqueued_ns=enqueued,
        started_ns=call.start,
        ended_ns=call.end,
        state="completed",
        source="import",
    )


def _group(args: dict[str, Any], groups: Groups) -> tuple[str | None, tuple[int, ...]]:
    """Name of the group as ``Group.key`` spells it, and its ranks; None without any word of it."""
    name = args.get("Process Group Name")
    if not isinstance(name, str):
        ranks = _listed(args.get("Process Group Ranks"))
        return (f"|{','.join(map(str, ranks))}", ranks) if ranks else (None, ())
    desc, members = groups.get(name, ("", ()))
    members = members or _listed(args.get("Process Group Ranks"))
    told = args.get("Process Group Description")
    label = desc or (told if isinstance(told, str) and told != "undefined" else "") or name
    return f"{label[:60]}|{','.join(map(str, members))}", members


def wire_bytes(op: str, payload: int | None, out: int | None, ranks: int) -> int | None:
    """Bytes that a rank sends: the ring's share (NCCL tests, PERFORMANCE.md: busbw = algbw x this over payload)."""
    if payload is None or ranks < 2:
        return None if payload is None or op not in ("send", "recv") else payload
    if op == "all_reduce":
        return round(2 * payload * (ranks - 1) / ranks)
    if op == "all_gather":
        return round((out if out is not None else payload * ranks) * (ranks - 1) / ranks)
    if op in ("reduce_scatter", "all_to_all"):
        return round(payload * (ranks - 1) / ranks)
    return payload


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 50 else None


def _first_type(value: Any) -> str | None:
    return value[0] if isinstance(value, list) and value and isinstance(value[0], str) and value[0] else None


def _shapes(value: Any) -> tuple[tuple[int, ...], ...] | None:
    if not isinstance(value, list):
        return None
    found = []
    for dims in value[:4]:
        inner = dims[0] if isinstance(dims, list) and dims and isinstance(dims[0], list) else dims
        if isinstance(inner, list) and inner and all(type(n) is int and 0 <= n < 1 << 40 for n in inner[:16]):
            found.append(tuple(inner[:16]))
    return tuple(found) or None


def _splits(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, str):
        return _listed(value) or None
    return _ints(value) or None if isinstance(value, list) else None

"""Ledgers that our own recorder writes (``meshwright.record``, ``ledger.store``): JSON lines, one file a rank.

A file may end in the middle of a row, because its process was killed; what is whole counts. Rows without a group are
computation and are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from meshwright.doctor.incident import COMPLETED, MAX_RANK, SCHEDULED, Frame, Group, Incident, Signature, Trace
from meshwright.doctor.readers import Source
from meshwright.errors import InputError
from meshwright.ledger.schema import Entry

NAME = "ledger"

MAX_LINE_BYTES = 1 << 22
MAX_ROWS = 4_000_000
_HEAD = re.compile(rb'\s*\{"version"\s*:\s*\d{1,4}\s*,\s*"meta"\s*:\s*\{')
_RANKS = re.compile(r"\d{1,8}(?:-\d{1,8}(?::\d{1,8})?)?(?:,\d{1,8})*")
#: The second group of the same ranks and so on, as ``runtime.c10d.twin`` tells them apart.
_TWIN = re.compile(r" \(\d{1,6}\)$")
_HAND_OFFS = ("send", "recv")
#: What ``runtime.serve.handoff`` calls keys and values on their way from prefill to decode.
CACHE_NAME = "KV blocks"


def sniff(head: bytes, name: str) -> bool:
    """The head line of a ledger of JSON lines."""
    return _HEAD.match(head) is not None


def ranks_of(text: str) -> tuple[int, ...]:
    """Ranks behind a group's name such as ``0-7``, ``0-56:8``, ``0,1,5``, ``0-7 (2)``; empty for any other name."""
    text = _TWIN.sub("", text)
    if _RANKS.fullmatch(text) is None:
        return ()
    if "-" in text:
        span, _, step = text.partition(":")
        first, _, last = span.partition("-")
        if "," in last or int(last) >= MAX_RANK or int(last) - int(first) > 1 << 20:
            return ()
        return tuple(range(int(first), int(last) + 1, max(1, int(step or 1))))
    return tuple(map(int, text.split(",")))


def _int(row: dict[str, Any], key: str) -> int | None:
    value = row.get(key)
    return value if type(value) is int and abs(value) < 1 << 62 else None


def _ints(value: Any) -> tuple[int, ...] | None:
    return tuple(value) if isinstance(value, list) and all(type(n) is int for n in value) else None


def _str(row: dict[str, Any], key: str, limit: int = 200) -> str | None:
    value = row.get(key)
    return value[:limit] if isinstance(value, str) else None


def _stack(row: dict[str, Any]) -> tuple[Frame, ...]:
    """The line of the call; in place of its function, where in the model it is, if the ledger of a model says so."""
    site = _str(row, "call_site", 4096)
    if site is None:
        return ()
    file, _, line = site.rpartition(":")
    layer = _int(row, "layer")
    place = [f"layer {layer}"] if layer is not None else []
    place += [name] if (name := _str(row, "name", 80)) is not None else []
    return (Frame(", ".join(place), file, int(line)),) if line.isdecimal() and len(line) < 10 else ()


class _Rows:
    """Fills a trace row by row."""

    def __init__(self, trace: Trace, incident: Incident) -> None:
        self.trace, self.incident = trace, incident
        self.offset_ns = 0
        self.seen: dict[tuple[str, int], int] = {}
        self.groups: dict[str, int] = {}
        self.timed: list[Entry] = []
        self.cache: list[Entry] = []

    def add(self, row: dict[str, Any]) -> None:
        """One entry of the ledger."""
        op, group = _str(row, "op"), _str(row, "group", 4096)
        self._time(row, op, group)
        if op is None or group is None:
            return
        if group not in self.groups:
            self.groups[group] = self.incident.groups.number(Group(group, "", ranks_of(group)))
        p2p = int(op in _HAND_OFFS)
        count = self.seen[group, p2p] = self.seen.get((group, p2p), 0) + 1
        shapes = row.get("shapes")
        parts = [_ints(s) for s in shapes] if isinstance(shapes, list) else []
        ins = tuple(p for p in parts if p is not None)
        signature = Signature(op, ins, (), _str(row, "dtype", 40), _int(row, "peer"), _ints(row.get("splits")), op)
        stack, trace, at = _stack(row), self.trace, _int(row, "enqueued_ns")
        trace.group.append(self.groups[group])
        trace.signature.append(self.incident.signatures.number(signature))
        trace.stack.append(self.incident.stacks.number(stack) if stack else -1)
        trace.seq.append(count)
        trace.record.append(len(trace.seq) - 1)
        trace.state.append(COMPLETED if row.get("state") == "completed" else SCHEDULED)
        trace.p2p.append(p2p)
        trace.created_ns.append(at + self.offset_ns if at is not None else 0)

    def _time(self, row: dict[str, Any], op: str | None, group: str | None) -> None:
        """Keep what tells of time."""
        ended = _int(row, "ended_ns")
        if op is None or ended is None:
            return
        entry = Entry("", op, group=group, phase=_str(row, "phase", 40), step=_int(row, "step"))
        entry.name, entry.peer, entry.payload_bytes = (
            _str(row, "name", 80),
            _int(row, "peer"),
            _int(row, "payload_bytes"),
        )
        entry.enqueued_ns, entry.started_ns, entry.ended_ns = _int(row, "enqueued_ns"), _int(row, "started_ns"), ended
        entry.wire_bytes, entry.dtype = _int(row, "wire_bytes"), _str(row, "dtype", 40)
        entry.layer = _int(row, "layer")
        members = ranks_of(group) if group is not None else ()
        if entry.peer is not None and op in _HAND_OFFS and members:
            entry.peer = members[entry.peer] if 0 <= entry.peer < len(members) else None
        if op in _HAND_OFFS and entry.name == CACHE_NAME:
            self._shift(entry)
            self.cache.append(entry)
        else:
            self.timed.append(entry)

    def _shift(self, entry: Entry) -> None:
        """To Unix time."""
        entry.ended_ns = (entry.ended_ns or 0) + self.offset_ns
        if entry.enqueued_ns is not None:
            entry.enqueued_ns += self.offset_ns


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _fill(source: Source, rows: _Rows) -> tuple[int | None, int]:
    """Read all lines; the rank and how many lines were unreadable."""
    rank, broken = None, 0
    with source.open() as file:
        for _ in range(MAX_ROWS):
            line = file.readline(MAX_LINE_BYTES)
            if not line:
                break
            row = _parse(line)
            if row is None:
                broken += 1
            elif row.get("table") == "ranks":
                rank = _int(row, "rank")
                rows.offset_ns = _int(row, "clock_offset_ns") or 0
            elif row.get("table") == "entries":
                rows.add(row)
                own = re.fullmatch(r"rank(\d{1,8})", _str(row, "rank_class") or "")
                rank = int(own[1]) if rank is None and own else rank
            elif isinstance(row.get("meta"), dict):
                world = row["meta"].get("world")
                if isinstance(world, str) and world.isdecimal() and len(world) < 9:
                    rows.incident.world = max(rows.incident.world or 0, int(world))
                rows.trace.meta = {str(k)[:40]: str(v)[:200] for k, v in list(row["meta"].items())[:50]}
    return rank, broken


def read(source: Source, incident: Incident) -> None:
    """Read the ledger of one rank.

    Raises:
        InputError: unreadable, or it names no rank (a prediction, which no rank wrote).
    """
    rows = _Rows(Trace(0, source.name, "ledger"), incident)
    try:
        rank, broken = _fill(source, rows)
    except (OSError, EOFError) as error:
        raise InputError(f"{source.name}: cannot be read ({str(error)[:80]})") from None
    if rank is None or not 0 <= rank < MAX_RANK:
        raise InputError(f"{source.name}: a ledger that names no rank; a prediction is no evidence of a hang")
    rows.trace.rank = rank
    rows.trace.backend = "gloo" if rows.trace.seq else ""
    if "dropped" in rows.trace.meta:
        incident.lack(f"rank {rank}: the recorder dropped {rows.trace.meta['dropped']}")
    if broken:
        incident.lack(f"{source.name}: {broken} broken lines (the process was killed while it wrote)")
    rows.trace.member_of = tuple(rows.groups.values())
    _complete(rows.trace, incident)
    incident.add_trace(rows.trace)
    if rows.cache:
        incident.cache_calls[rank] = rows.cache
    if rows.timed and all(t.rank != rank for t in incident.tracks):
        _add_track(rank, source, rows)


def _add_track(rank: int, source: Source, rows: _Rows) -> None:
    """What the times tell, where steps are told apart."""
    from meshwright.doctor.readers.ledger_track import track_of

    track = track_of(rank, source.name, rows.timed, rows.offset_ns, rows.incident.world)
    if track is not None:
        rows.incident.tracks.append(track)


def _complete(trace: Trace, incident: Incident) -> None:
    """Own rank in groups of hand-offs: nothing to add while members are known; says where they are not."""
    unknown = [incident.groups[g].name for g in trace.member_of if not incident.groups[g].members]
    if unknown:
        incident.lack(f"members of group {unknown[0][:60]} are not recorded; those that used it are taken for all")


def read_many(sources: Sequence[Source], incident: Incident) -> None:
    """Read ledgers one after the other, then give groups without members those that used them."""
    for source in sources:
        try:
            read(source, incident)
        except InputError as error:
            incident.lack(str(error))
    users: dict[int, set[int]] = {}
    for rank, trace in incident.traces.items():
        if trace.recorder == "ledger":
            for number in trace.member_of:
                if not incident.groups[number].members:
                    users.setdefault(number, set()).add(rank)
    for number, ranks in users.items():
        group = incident.groups[number]
        renamed = incident.groups.number(Group(group.name, group.desc, tuple(sorted(ranks))))
        for rank in ranks:
            trace = incident.traces[rank]
            trace.group = type(trace.group)("i", [renamed if g == number else g for g in trace.group])
            trace.member_of = tuple(renamed if g == number else g for g in trace.member_of)

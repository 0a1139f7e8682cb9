"""NCCL's RAS subsystem: ``ncclras`` as text (2.24 on), as JSON (2.28.7 on) and in monitor mode (2.29 on).

Facts: ``ras_missing`` (a rank whose process does not answer; ``dead`` when given up), ``ras_counts`` (a communicator
whose ranks have launched different numbers of operations, with ``behind``), ``ras_status`` (different states or an
error), ``ras_process`` (a process that is lost, by pid). Counts in flight differ in healthy jobs too: only what does
not change between two queries is stuck, so ``behind`` is weak evidence. Ranks are places in the communicator; they are
global ranks in the widest one (``whole_job``).
"""

from __future__ import annotations

import re
from typing import BinaryIO

from meshwright.doctor.incident import Incident
from meshwright.doctor.readers import Source
from meshwright.doctor.readers.clock import Clock, dated
from meshwright.doctor.readers.jsonio import load_json, stream_json
from meshwright.errors import InputError

NAME = "ras"

_EVENT = re.compile(
    r"\[(?P<at>[^\]]{19,40})\] (?P<event>[A-Z_]{4,40}): Process (?P<pid>\d{1,10}) on node (?P<host>\S{1,80})"
    r"(?: managing GPUs? (?P<gpu>[\d,]{1,80}))?"
)
_GROUP = re.compile(
    r"\s*(?P<group>\d{1,6})\s+(?P<comms>\d{1,7})\s+(?P<nodes>[\d-]{1,15})\s+(?P<pernode>[\d-]{1,15})\s+"
    r"(?P<size>\d{1,7})\s+(?P<all>\d{1,8})\s+(?P<status>[A-Z]{2,20})\s+(?P<errors>[A-Z]{2,20})\s*$"
)
_COMM = re.compile(r"\s*#(?P<group>\d{1,6})-(?P<n>\d{1,6}) \((?P<hash>[0-9a-fx]{1,18})\)(?: (?P<error>[A-Z]{2,20}))?")
_LAUNCHED = re.compile(
    r"\s*(?P<n>\d{1,7}) ranks? (?:have|has) launched up to (?:(?P<op>[A-Za-z]\w{0,30}) )?operation (?P<count>\d{1,18})"
)
_STATUS = re.compile(r"\s*(?P<n>\d{1,7}) ranks? (?:have|has) status (?P<status>[A-Z]{2,20})")
_RANK = re.compile(
    r"\s*Rank (?P<rank>\d{1,7}) -- GPU (?P<gpu>\d{1,4}) managed by process (?P<pid>\d{1,10}) on node (?P<host>\S{1,80})"
)
_MISSING = re.compile(r"\s*The missing ranks?: (?P<ranks>[\d, -]{1,4000})")
_PROCESS = re.compile(r"\s*Process (?P<pid>\d{1,10}) on node (?P<host>\S{1,80}) managing GPUs? (?P<gpu>[\d, ]{1,80})")
_DEAD = re.compile(r"considered dead|^\s*DEAD\s*$")
MAX_LINES = 2_000_000
MAX_JSON_BYTES = 256 << 20
MAX_RANKS = 100_000


def sniff(head: bytes, name: str) -> bool:
    """Whether it is an answer of RAS."""
    if head.lstrip()[:1] == b"{":
        return (
            b'"communicators_count"' in head
            or (b'"communicators"' in head and b'"nccl_version"' in head)
            or (b'"PEER_' in head and b'"event"' in head)
        )
    return (
        b"Communicators... (" in head
        or b"RAS Monitor Mode" in head
        or b"] PEER_DEAD: Process " in head
        or (b"Job summary\n===" in head.replace(b"\r", b"") and b"Processes" in head)
    )


def read(source: Source, incident: Incident) -> None:
    """Read one answer, text or JSON.

    Raises:
        InputError: unreadable.
    """
    if source.head.lstrip()[:1] == b"{":
        _json(source, incident)
        return
    try:
        with source.open() as stream:
            _Text(source.name, incident).read(stream)
    except (OSError, EOFError) as error:
        raise InputError(f"{source.name}: cannot be read to its end ({error})") from None


class _Text:
    """State while a text answer is read."""

    def __init__(self, name: str, incident: Incident) -> None:
        self._name = name
        self._incident = incident
        self._sizes: dict[int, tuple[int, int]] = {}
        self._comm: tuple[int, str] | None = None
        self._part: dict[str, object] | None = None
        self._parts: list[dict[str, object]] = []
        self._dead = False
        self._clock = Clock.of(None)

    def read(self, stream: BinaryIO) -> None:
        for number in range(1, MAX_LINES):
            raw = stream.readline(4096)
            if not raw:
                break
            self._line(raw.decode("utf-8", "replace").rstrip(), number)
        self._close(0)
        widest = max((size for size, _ in self._sizes.values()), default=0)
        if self._incident.world is None and widest > 1:
            self._incident.world = widest

    def _line(self, text: str, number: int) -> None:
        if match := _EVENT.search(text):
            self._event(match, text, number)
        elif match := _GROUP.match(text):
            self._sizes[int(match["group"])] = (int(match["size"]), int(match["comms"]))
        elif match := _COMM.match(text):
            self._close(number)
            self._comm, self._dead = (int(match["group"]), match["hash"]), False
        elif (match := _LAUNCHED.match(text) or _STATUS.match(text)) and self._comm:
            self._part = {**match.groupdict(), "ranks": []}
            self._parts.append(self._part)
        elif (match := _RANK.match(text)) and self._part is not None:
            ranks = self._part["ranks"]
            if isinstance(ranks, list) and len(ranks) < MAX_RANKS:
                ranks.append(int(match["rank"]))
        elif (match := _MISSING.match(text)) and self._comm:
            for rank in _ranks(match["ranks"]):
                self._fact("ras_missing", text, number, rank, {"dead": self._dead})
        elif match := _PROCESS.match(text):
            data: dict[str, object] = {"pid": int(match["pid"]), "host": match["host"], "dead": self._dead}
            self._incident.add_fact("ras_process", text.strip(), f"{self._name}:{number}", None, None, data)
        elif _DEAD.search(text):
            self._dead = True
        elif text.strip() == "INCOMPLETE":
            self._dead = False

    def _close(self, number: int) -> None:
        """Hand over what the lines under one communicator said."""
        counts = [p for p in self._parts if p.get("count") is not None]
        by_op: dict[object, list[dict[str, object]]] = {}
        for part in counts:
            by_op.setdefault(part.get("op"), []).append(part)
        for op, parts in by_op.items():
            most = max(int(str(p["count"])) for p in parts)
            behind = sorted(r for p in parts if int(str(p["count"])) < most for r in _list(p["ranks"]))
            counted = {str(p["count"]): int(str(p["n"])) for p in parts}
            data: dict[str, object] = {"behind": behind, "counts": counted, "op": op, "most": most}
            if len(counted) > 1:
                self._fact("ras_counts", f"ranks launched up to {', '.join(counted)}", max(1, number - 1), None, data)
        states = {str(p["status"]): _list(p["ranks"]) for p in self._parts if p.get("status")}
        if states:
            text = ", ".join(f"{p['n']} {p['status']}" for p in self._parts if p.get("status"))
            self._fact("ras_status", text, max(1, number - 1), None, {"states": states})
        self._parts, self._part, self._comm = [], None, None

    def _fact(self, kind: str, text: str, number: int, rank: int | None, data: dict[str, object]) -> None:
        group, identity = self._comm or (-1, "")
        size, comms = self._sizes.get(group, (0, 0))
        whole = size == max((s for s, _ in self._sizes.values()), default=0) and comms == 1
        data |= {"comm_id": identity, "nranks": size or None, "comm_rank": rank, "whole_job": whole}
        self._incident.add_fact(kind, text.strip(), f"{self._name}:{number}", rank if whole else None, None, data)

    def _event(self, match: re.Match[str], text: str, number: int) -> None:
        stamp = dated(match["at"], self._clock)
        data: dict[str, object] = {"pid": int(match["pid"]), "host": match["host"], "event": match["event"]}
        data["dead"] = match["event"] == "PEER_DEAD"
        at = stamp[0] if stamp else None
        self._incident.add_fact("ras_process", text, f"{self._name}:{number}", None, at, data)


def _list(value: object) -> list[int]:
    return list(value) if isinstance(value, list) else []


def _ranks(text: str) -> list[int]:
    """``21`` or ``3, 5-7``."""
    ranks: list[int] = []
    for first, last in re.findall(r"(\d{1,7})(?: ?- ?(\d{1,7}))?", text):
        end = min(int(last or first), int(first) + MAX_RANKS)
        ranks += range(int(first), end + 1)
        if len(ranks) > MAX_RANKS:
            break
    return ranks[:MAX_RANKS]


def _json(source: Source, incident: Incident) -> None:
    if b'"communicators"' not in source.head and b'"communicators_count"' not in source.head:
        for event in stream_json(source, 1 << 20):
            if isinstance(event, dict):
                _json_event(event, source.name, incident)
        return
    answer = load_json(source, MAX_JSON_BYTES)
    rows = answer.get("communicators") if isinstance(answer, dict) else None
    if not isinstance(rows, list) or not isinstance(answer, dict):
        raise InputError(f"{source.name}: no list of communicators")
    stamp = dated(str(answer.get("timestamp")), Clock.of(None))
    at = stamp[0] if stamp else None
    comms = [c for c in rows if isinstance(c, dict)]
    widest = max((_int(c.get("size")) for c in comms), default=0)
    if incident.world is None and widest > 1:
        incident.world = widest
    if isinstance(version := answer.get("nccl_version"), str):
        data: dict[str, object] = {"name": "nccl_version", "value": version[:40]}
        incident.add_fact("env", f"NCCL {version[:40]}", f"{source.name}:1", None, at, data)
    for comm in comms:
        _json_comm(comm, widest, source.name, at, incident)


def _json_comm(comm: dict[str, object], widest: int, name: str, at: float | None, incident: Incident) -> None:
    size, identity = _int(comm.get("size")), str(comm.get("hash"))[:40]
    whole = size == widest
    base: dict[str, object] = {"comm_id": identity, "nranks": size, "whole_job": whole}
    for row in _dicts(comm.get("missing_ranks")):
        place, state = _int(row.get("rank"), -1), row.get("status")
        dead = isinstance(state, dict) and state.get("considered_dead") is True
        data = base | {"comm_rank": place, "pid": row.get("pid"), "host": str(row.get("host"))[:80], "dead": dead}
        text = f"rank {place} of communicator {identity} is missing" + (", considered dead" if dead else "")
        incident.add_fact("ras_missing", text, f"{name}:1", place if whole else None, at, data)
    totals: dict[int, dict[str, int]] = {}
    for row in _dicts(comm.get("ranks")):
        counts = row.get("collective_counts")
        place, state = _int(row.get("rank"), -1), row.get("status")
        totals[place] = {str(k)[:40]: _int(v) for k, v in counts.items()} if isinstance(counts, dict) else {}
        error = _int(state.get("async_error")) if isinstance(state, dict) else 0
        starting = _int(state.get("init_state")) if isinstance(state, dict) else 0
        if error or starting or (isinstance(state, dict) and state.get("abort_flag") is True):
            data = base | {"comm_rank": place, "async_error": error, "init_state": starting}
            text = f"rank {place} of communicator {identity}: async error {error}, init state {starting}"
            incident.add_fact("ras_status", text, f"{name}:1", place if whole else None, at, data)
    for op in sorted({op for counts in totals.values() for op in counts}):
        most = max(counts.get(op, 0) for counts in totals.values())
        behind = sorted(place for place, counts in totals.items() if counts.get(op, 0) < most)
        if behind:
            counted: dict[str, int] = {}
            for counts in totals.values():
                counted[str(counts.get(op, 0))] = counted.get(str(counts.get(op, 0)), 0) + 1
            data = base | {"behind": behind, "counts": counted, "op": op, "most": most}
            incident.add_fact(
                "ras_counts", f"{op}: ranks launched up to {', '.join(counted)}", f"{name}:1", None, at, data
            )


def _json_event(event: dict[str, object], name: str, incident: Incident) -> None:
    peer = event.get("peer")
    if not isinstance(peer, dict):
        return
    stamp = dated(str(event.get("timestamp")), Clock.of(None))
    data: dict[str, object] = {
        "pid": peer.get("pid"),
        "host": str(peer.get("host"))[:80],
        "event": str(event.get("event"))[:40],
    }
    data["dead"] = data["event"] == "PEER_DEAD"
    text = f"{data['event']}: process {data['pid']} on {data['host']}"
    incident.add_fact("ras_process", text, f"{name}:1", None, stamp[0] if stamp else None, data)


def _dicts(value: object) -> list[dict[str, object]]:
    return [v for v in value[:MAX_RANKS] if isinstance(v, dict)] if isinstance(value, list) else []


def _int(value: object, otherwise: int = 0) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62 else otherwise

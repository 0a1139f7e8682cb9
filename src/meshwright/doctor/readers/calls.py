"""The order of calls in NCCL's own log (``NCCL_DEBUG_SUBSYS=COLL``), as traces: a recorder without PyTorch.

A line names its communicator by an address inside its process; the line that made the communicator gives the address
its id, which is the same on all ranks, and the rank. Ranks of the widest communicator are taken as global ranks, and
members of the others follow from the processes in them. Nothing tells whether a call completed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from meshwright.doctor.incident import UNKNOWN, Group, Incident, Signature, Trace
from meshwright.doctor.readers.prefix import Prefix

#: Rows kept per process, the last ones: as many as the Flight Recorder keeps by default, twice.
MAX_ROWS = 4000
#: Rows of all processes together (about 200 bytes each): with many processes each keeps fewer, at least 100.
MAX_ALL_ROWS = 2_000_000
MAX_PROCESSES = 65_536

#: ``ncclDataType_t`` (nccl.h 2.30), by the names of torch.
_TYPES = ("Char", "Byte", "Int", "UInt", "Long", "ULong", "Half", "Float", "Double", "BFloat16", "F8E4M3", "F8E5M2")
_NAMES = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "Send": "send",
    "Recv": "recv",
    "AlltoAll": "all_to_all",
    "AllToAll": "all_to_all",
    "Gather": "gather",
    "Scatter": "scatter",
}
_ROOTED = ("broadcast", "reduce", "gather", "scatter", "send", "recv")


@dataclass(slots=True)
class _Row:
    comm: str
    op: str
    raw: str
    number: int
    count: int
    dtype: str | None
    peer: int | None
    at_ns: int


@dataclass(slots=True)
class _Process:
    source: str
    rank: int | None = None
    addresses: dict[str, str] = field(default_factory=dict)
    comms: dict[str, tuple[int, int]] = field(default_factory=dict)
    rows: list[_Row] = field(default_factory=list)
    dropped: int = 0


class CallLog:
    """Calls and communicators of all processes of all files."""

    def __init__(self) -> None:
        self._processes: dict[str, _Process] = {}
        self.source = ""

    def communicator(self, process: str, data: dict[str, object]) -> None:
        """Note that a process holds a communicator, from its init line; without a commId it cannot be joined."""
        held = self._process(process)
        identity = data.get("comm_id")
        if held is not None and identity is not None and len(held.comms) < 4096:
            held.addresses[str(data["comm"])] = str(identity)
            held.comms[str(identity)] = (int(str(data["comm_rank"])), int(str(data["nranks"])))

    def call(self, process: str, match: re.Match[str], prefix: Prefix, line: int) -> None:
        """Note one call."""
        held = self._process(process)
        if held is None:
            return
        if prefix.rank is not None:
            held.rank = prefix.rank
        op = _NAMES.get(match["op"], match["op"].lower())
        kind = int(match["type"])
        row = _Row(
            held.addresses.get(match["comm"], ""),
            op,
            match["op"],
            int(match["n"], 16),
            int(match["count"]),
            _TYPES[kind] if kind < len(_TYPES) else None,
            int(match["root"]) if op in _ROOTED else None,
            int(prefix.at * 1e9) if prefix.at is not None else 0,
        )
        held.rows.append(row)
        most = min(MAX_ROWS, max(100, MAX_ALL_ROWS // (2 * len(self._processes))))
        if len(held.rows) >= 2 * most:
            held.dropped += len(held.rows) - most
            del held.rows[:-most]

    def fill(self, incident: Incident) -> None:
        """Add a trace for each process whose rank is known, unless the incident has dumps of a recorder."""
        ranks = self._ranks()
        if incident.traces or not any(p.rows for p in self._processes.values()):
            return
        members: dict[str, dict[int, int]] = {}
        for name, process in self._processes.items():
            for identity, (place, _) in process.comms.items():
                if name in ranks:
                    members.setdefault(identity, {})[place] = ranks[name]
        unknown = 0
        for name, process in self._processes.items():
            if process.rows and name not in ranks:
                unknown += 1
            elif process.rows:
                incident.add_trace(_trace(process, ranks[name], members, incident))
        if unknown:
            incident.lack(
                f"{unknown} processes log NCCL calls but no line tells their rank: set NCCL_DEBUG_SUBSYS=INIT,COLL"
            )

    def _process(self, name: str) -> _Process | None:
        held = self._processes.get(name)
        if held is None and len(self._processes) < MAX_PROCESSES:
            held = self._processes[name] = _Process(self.source)
        return held

    def _ranks(self) -> dict[str, int]:
        """Global rank by process: from torch's tag, else the place in the widest communicator, if no two claim one."""
        widest = max((n for p in self._processes.values() for _, n in p.comms.values()), default=0)
        ranks: dict[str, int] = {}
        claims: dict[int, int] = {}
        for name, process in self._processes.items():
            places = {place for place, size in process.comms.values() if size == widest}
            rank = process.rank if process.rank is not None else next(iter(places)) if len(places) == 1 else None
            if rank is not None:
                ranks[name] = rank
                claims[rank] = claims.get(rank, 0) + 1
        return {name: rank for name, rank in ranks.items() if claims[rank] == 1}


def _trace(process: _Process, rank: int, members: dict[str, dict[int, int]], incident: Incident) -> Trace:
    trace = Trace(rank, process.source, recorder="nccl_log", backend="nccl", settled=False)
    rows = process.rows[-MAX_ROWS:]
    trace.wrapped = process.dropped > 0 or len(rows) < len(process.rows)
    groups: dict[str, int] = {}
    for identity, (_, size) in process.comms.items():
        known = members.get(identity, {})
        whole = tuple(known[i] for i in range(size)) if all(i in known for i in range(size)) else ()
        groups[identity] = incident.groups.number(Group(identity, "", whole))
    trace.member_of = tuple(sorted(set(groups.values())))
    for order, row in enumerate(rows):
        trace.group.append(groups.get(row.comm, -1))
        shape = ((row.count,),)
        signature = Signature(row.op, shape, shape, row.dtype, row.peer, None, row.raw)
        trace.signature.append(incident.signatures.number(signature))
        trace.stack.append(-1)
        trace.seq.append(row.number)
        trace.record.append(process.dropped + len(process.rows) - len(rows) + order)
        trace.state.append(UNKNOWN)
        trace.p2p.append(row.op in ("send", "recv"))
        trace.created_ns.append(row.at_ns)
    return trace

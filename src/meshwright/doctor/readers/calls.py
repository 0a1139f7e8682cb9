"""The order of calls in NCCL's own log (``NCCL_DEBUG_SUBSYS=COLL``), as traces: a recorder without PyTorch.

A line names its communicator by an address inside its process; the line that made the communicator gives the address
its id, which is the same on all ranks, and the rank. Ranks of the widest communicator are taken as global ranks, and
members of the others follow from the processes in them. Nothing tells whether a call completed. Such logs are long, so
lines are kept as they are, the last ones of each process, and parsed when everything has been read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from meshwright.doctor.incident import UNKNOWN, Group, Incident, Signature, Trace
from meshwright.doctor.readers.clock import Clock
from meshwright.doctor.readers.prefix import peel

#: Rows kept per process, the last ones: as many as the Flight Recorder keeps by default, twice.
MAX_ROWS = 4000
#: Rows of all processes together (about 300 bytes each): with many processes each keeps fewer, at least 100.
MAX_ALL_ROWS = 1_000_000
MAX_PROCESSES = 16_384
#: Longest line of a call that is kept, bytes.
MAX_CALL_LINE = 1024

_COLL = re.compile(
    r"(?P<op>\w{1,30}): opCount (?P<n>[0-9a-f]{1,16}) sendbuff (?:\(nil\)|[0-9a-fx]{1,18}) "
    r"recvbuff (?:\(nil\)|[0-9a-fx]{1,18}) count (?P<count>\d{1,18}) datatype (?P<type>\d{1,3}) "
    r"op \d{1,18} root (?P<root>-?\d{1,7}) comm (?P<comm>0x[0-9a-f]{1,16}) \[nranks=\d{1,7}\]"
)
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
    signature: Signature
    number: int
    at_ns: int


@dataclass(slots=True)
class _Process:
    source: str
    addresses: dict[str, str] = field(default_factory=dict)
    comms: dict[str, tuple[int, int]] = field(default_factory=dict)
    lines: list[bytes] = field(default_factory=list)
    rows: list[_Row] = field(default_factory=list)
    dropped: int = 0

    def parse(self, clock: Clock) -> None:
        """Turn the lines so far into rows: the addresses in them mean what they mean now."""
        for line in self.lines[-MAX_ROWS:]:
            prefix = peel(line.decode("utf-8", "replace"), clock)
            match = _COLL.search(prefix.rest)
            if match is None:
                continue
            op, kind, shape = (
                _NAMES.get(match["op"], match["op"].lower()),
                int(match["type"]),
                ((int(match["count"]),),),
            )
            dtype = _TYPES[kind] if kind < len(_TYPES) else None
            peer = int(match["root"]) if op in _ROOTED else None
            signature = Signature(op, shape, shape, dtype, peer, None, match["op"])
            at_ns = int(prefix.at * 1e9) if prefix.at is not None else 0
            self.rows.append(_Row(self.addresses.get(match["comm"], ""), signature, int(match["n"], 16), at_ns))
        self.dropped += max(0, len(self.lines) - MAX_ROWS) + max(0, len(self.rows) - MAX_ROWS)
        del self.rows[:-MAX_ROWS]
        self.lines.clear()


class CallLog:
    """Calls and communicators of all processes of all files."""

    def __init__(self) -> None:
        self._processes: dict[str, _Process] = {}
        self._clock = Clock.of(None)
        self.source = ""

    def communicator(self, process: str, data: dict[str, object]) -> None:
        """Note that a process holds a communicator, from its init line; without a commId it cannot be joined."""
        held = self._process(process)
        identity, address = data.get("comm_id"), str(data["comm"])
        if held is None or identity is None or len(held.comms) >= 4096:
            return
        if held.lines and held.addresses.get(address, identity) != identity:
            held.parse(self._clock)
        held.addresses[address] = str(identity)
        held.comms[str(identity)] = (int(str(data["comm_rank"])), int(str(data["nranks"])))

    def call(self, line: bytes) -> bool:
        """Keep a line if it is of a call; True when it was."""
        head, found, message = line.partition(b" NCCL INFO ")
        if not found or b": opCount " not in message[:60]:
            return False
        words = head.rpartition(b" [")[0].rpartition(b" ")[2].rsplit(b":", 2)
        if len(words) != 3:
            return False
        host = words[0].rpartition(b":")[2].rpartition(b"]")[2]
        held = self._process(f"{host[:200].decode('utf-8', 'replace')}:{words[1][:10].decode('utf-8', 'replace')}")
        if held is not None:
            held.lines.append(line[:MAX_CALL_LINE])
            most = min(MAX_ROWS, max(100, MAX_ALL_ROWS // (2 * len(self._processes))))
            if len(held.lines) >= 2 * most:
                held.dropped += len(held.lines) - most
                del held.lines[:-most]
        return True

    def fill(self, incident: Incident) -> None:
        """Add a trace for each process whose rank is known, unless the incident has dumps of a recorder."""
        if incident.traces or not any(p.lines or p.rows for p in self._processes.values()):
            return
        ranks = self._ranks()
        members: dict[str, dict[int, int]] = {}
        for name, process in self._processes.items():
            process.parse(self._clock)
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
        """Global rank by process: its place in the widest communicator, if no two processes claim one."""
        widest = max((n for p in self._processes.values() for _, n in p.comms.values()), default=0)
        ranks: dict[str, int] = {}
        claims: dict[int, int] = {}
        for name, process in self._processes.items():
            places = {place for place, size in process.comms.values() if size == widest}
            if len(places) == 1:
                rank = ranks[name] = next(iter(places))
                claims[rank] = claims.get(rank, 0) + 1
        return {name: rank for name, rank in ranks.items() if claims[rank] == 1}


def _trace(process: _Process, rank: int, members: dict[str, dict[int, int]], incident: Incident) -> Trace:
    trace = Trace(rank, process.source, recorder="nccl_log", backend="nccl", settled=False)
    trace.wrapped = process.dropped > 0
    groups: dict[str, int] = {}
    for identity, (_, size) in process.comms.items():
        known = members.get(identity, {})
        whole = tuple(known[i] for i in range(size)) if all(i in known for i in range(size)) else ()
        groups[identity] = incident.groups.number(Group(identity, "", whole))
    trace.member_of = tuple(sorted(set(groups.values())))
    for order, row in enumerate(process.rows):
        trace.group.append(groups.get(row.comm, -1))
        trace.signature.append(incident.signatures.number(row.signature))
        trace.stack.append(-1)
        trace.seq.append(row.number if row.number < 1 << 62 else 0)
        trace.record.append(process.dropped + order)
        trace.state.append(UNKNOWN)
        trace.p2p.append(row.signature.op in ("send", "recv"))
        trace.created_ns.append(row.at_ns)
    return trace

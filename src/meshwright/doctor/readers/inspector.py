"""JSON of NCCL's Inspector plugin, one object a finished operation: the last operation of each rank and communicator.

By default it leaves out messages below 8 KiB and operations without device timing (NCCL 2.30, ``plugins/profiler/
inspector``), and writes only what finished: a rank that is behind here is weak evidence.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.doctor.incident import Incident
from meshwright.doctor.readers import Source
from meshwright.doctor.readers.jsonio import stream_json

NAME = "inspector"

MAX_OBJECT = 4 << 20
MAX_PAIRS = 100_000
#: Operations whose times on all ranks are kept.
MAX_TIMINGS = 300_000


@dataclass(slots=True)
class _Last:
    seq: int
    op: str
    size_bytes: int
    at_us: int
    host: str
    pid: int | None
    nranks: int
    count: int
    slowest_us: int


def sniff(head: bytes, name: str) -> bool:
    """Whether it is a file of the Inspector."""
    return head.lstrip()[:1] in (b"{", b"[") and (
        b'"coll_perf"' in head or b'"p2p_perf"' in head or b'"n_ranks"' in head
    )


def read(source: Source, incident: Incident) -> None:
    """Note one ``inspector`` fact for each rank of each communicator.

    Raises:
        InputError: broken; the objects before the break count.
    """
    held: dict[tuple[str, int], _Last] = {}
    try:
        for value in stream_json(source, MAX_OBJECT):
            for row in value if isinstance(value, list) else [value]:
                if isinstance(row, dict):
                    _take(row, held, incident)
    finally:
        widest = max((v.nranks for v in held.values()), default=0)
        for (identity, place), last in held.items():
            data: dict[str, object] = {
                "comm_id": identity,
                "comm_rank": place,
                "nranks": last.nranks,
                "seq": last.seq,
                "op": last.op,
                "size_bytes": last.size_bytes,
                "operations": last.count,
                "slowest_us": last.slowest_us,
                "host": last.host,
                "pid": last.pid,
            }
            text = f"last {last.op} #{last.seq} of {last.size_bytes} bytes in {identity}"
            rank = place if last.nranks == widest else None
            at = last.at_us / 1e6 if last.at_us else None
            incident.add_fact("inspector", text, f"{source.name}:1", rank, at, data)


def _take(row: dict[str, object], held: dict[tuple[str, int], _Last], incident: Incident) -> None:
    header, meta = row.get("header"), row.get("metadata")
    perf = row.get("coll_perf") or row.get("p2p_perf")
    if not isinstance(header, dict) or not isinstance(perf, dict):
        return
    kind = "coll" if "coll_sn" in perf else "p2p"
    seq, took = _int(perf.get(f"{kind}_sn")), _int(perf.get(f"{kind}_exec_time_us"))
    key = (str(header.get("id"))[:40], _int(header.get("rank")))
    last = held.get(key)
    if last is None:
        if len(held) >= MAX_PAIRS:
            return
        last = held[key] = _Last(-1, "", 0, 0, "", None, _int(header.get("n_ranks")), 0, 0)
    last.count += 1
    host = str(meta.get("hostname"))[:80] if isinstance(meta, dict) else ""
    if kind == "coll" and took > 0 and (len(incident.timings) < MAX_TIMINGS):
        call = (key[0], str(perf.get("coll"))[:40], seq)
        incident.timings.setdefault(call, {})[key[1]] = (took, _int(perf.get("coll_msg_size_bytes")), host)
    last.slowest_us = max(last.slowest_us, took)
    if seq >= last.seq:
        last.seq, last.op = seq, str(perf.get("coll") or perf.get("p2p"))[:40]
        last.size_bytes = _int(perf.get(f"{kind}_msg_size_bytes"))
        if isinstance(meta, dict):
            last.at_us, last.host = _int(meta.get("dump_timestamp_us")), str(meta.get("hostname"))[:80]
            last.pid = _int(meta.get("pid")) or None


def _int(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62 else 0

"""Lines of the watchdog and heartbeat threads of torch's process groups, all generations, NCCL and its clones.

Forms as printed by ``ProcessGroupNCCL.cpp`` (and ``ProcessGroupHCCL`` and so on):

* 1.x ``WorkNCCL(OpType=, TensorShape=[], Timeout(ms)=)``, 1.13 adds ``SeqNum=``, 2.1 ``NumelIn=, NumelOut=``;
* status: 2.3 and 2.4 ``[PG 1 Rank 1] Timeout at NCCL work: a, last enqueued NCCL work: b, last completed NCCL work:
  c``, 2.5 ``Exception (either an error or timeout) detected by watchdog at work: a, ...``, 2.6 on ``failure detected
  by watchdog at work sequence id: a PG status: last enqueued work: b, last completed work: c``;
* ``[PG ID 5 PG GUID 37(TENSOR_MODEL_PARALLEL_GROUP) Rank 1]``: the GUID is the name that the Flight Recorder gives the
  group, ``Rank`` is the place inside it, as in ``[Rank 1] Watchdog caught``.
"""

from __future__ import annotations

import re

from meshwright.doctor.readers.prefix import Prefix
from meshwright.doctor.readers.store import PLACE, FileFacts

_WORK = re.compile(
    r"Watchdog caught collective operation timeout: Work(?P<lib>\w{1,12})\((?:SeqNum=(?P<seq>\d{1,18}), )?"
    r"OpType=(?P<op>\w{1,60})(?:, NumelIn=(?P<nin>\d{1,18}))?(?:, NumelOut=(?P<nout>\d{1,18}))?"
    r"(?:, TensorShape=\[(?P<shape>[\d, ]{0,200})\])?(?:, Timeout\(ms\)=(?P<timeout>\d{1,18}))?\)"
    r"(?: ran for (?P<ran>\d{1,18}) milliseconds)?"
)
_GROUP = re.compile(
    r"\[PG (?:ID )?(?P<id>[^\s\]]{1,80})(?: PG GUID (?P<guid>[^\s(\]]{1,80}))? ?(?:\((?P<desc>[^\]]{0,120}?)\))? "
    r"Rank (?P<place>\d{1,7})\]"
)
_PLACE = re.compile(r"\[Rank (\d{1,7})\]")
_STATUS = re.compile(
    r"(?:Timeout at \w{2,8} work: |detected by watchdog at work(?: sequence id)?: )(?P<seq>-?\d{1,18})"
    r"[,.]?(?: PG status:)?(?: last enqueued(?: \w{2,8})? work: (?P<enq>-?\d{1,18}))?"
    r"(?:, last started(?: \w{2,8})? work: (?P<start>-?\d{1,18}))?"
    r"(?:, last completed(?: \w{2,8})? work: (?P<done>-?\d{1,18}))?"
)
_SIGNAL = re.compile(
    r"Received a (?:global )?(?:dump|timeout) signal(?: due to a collective timeout)? from\s+"
    r"(?:(?P<local>this local rank)|(?:this )?rank\s+(?P<rank>\d{1,7}))?"
)
_COUNTS = re.compile(
    r"[Ll]ast enqueued(?: \w{2,8})? work: (?P<enq>-?\d{1,18}), last completed(?: \w{2,8})? work: (?P<done>-?\d{1,18})"
)
_STUCK = re.compile(r"watchdog (?:thread )?got stuck for (\d{1,9}) ?s")
_PENDING = re.compile(r"workMetaList_\.size\(\) ?= ?(\d{1,9})")
_LACK_RECORDER = "Stack trace of the failed collective not found"
_BARRIER = re.compile(r"Ranks? (?P<ranks>\d[\d, ]{0,2000}) failed to pass monitoredBarrier(?: in (?P<ms>\d{1,12}) ms)?")
_DESYNC = re.compile(
    r"\[(?P<ranks>\d[\d, ]{0,4000})\] (?P<what>joined but didn't finish|finished) collective #(?P<seq>\d{1,18})"
    r"(?:, but didn't join collective #(?P<next>\d{1,18}))?"
)
_FINGERPRINT = re.compile(
    r"Rank (?P<rank>\d{1,7}) is running (?:inconsistent )?collective: CollectiveFingerPrint\("
    r"(?:SequenceNumber=(?P<seq>\d{1,18}), ?)?OpType=(?P<op>\w{1,60})(?:, ?TensorShape=\[(?P<shape>[\d, ]{0,200})\])?"
    r"(?:, ?TensorDtypes=(?P<dtype>\w{1,40}))?"
)

#: Names of operations in WorkNCCL and CollectiveFingerPrint (c10d ``opTypeToString``), to the doctor's.
OPERATIONS = {
    "BROADCAST": "broadcast",
    "_BROADCAST_OOP": "broadcast",
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "all_reduce",
    "REDUCE": "reduce",
    "_REDUCE_OOP": "reduce",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "all_gather",
    "ALLGATHER_COALESCED": "all_gather",
    "GATHER": "gather",
    "SCATTER": "scatter",
    "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "reduce_scatter",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all",
    "SEND": "send",
    "RECV": "recv",
    "RECVANYSOURCE": "recv",
    "BARRIER": "barrier",
    "COALESCED": "coalesced",
}


def numbers(text: str) -> list[int]:
    """The integers of a list as printed, of at most 18 digits each."""
    return [int(word) for word in re.findall(r"\d{1,18}", text)]


def watchdog(prefix: Prefix, line: int, facts: FileFacts) -> bool:
    """Read one line of a process group; True when it was one."""
    text = prefix.rest
    found = False
    if "Watchdog caught" in text and (match := _WORK.search(text)):
        _timeout(match, prefix, line, facts)
        found = True
    if "work" in text and (match := _STATUS.search(text)):
        data = group_of(text)
        _put(data, seq=match["seq"], last_enqueued=match["enq"], last_started=match["start"])
        _put(data, last_completed=match["done"])
        _weak_rank(prefix, data)
        facts.add("pg_status", prefix, line, data, same=tuple(sorted(data.items(), key=str)))
        return True
    if "ump signal" in text or "imeout signal" in text:
        _dump_signal(prefix, line, facts)
        return True
    if "eartbeat monitor timed out" in text or "got stuck for" in text or "acquire GIL" in text:
        data = group_of(text)
        if match := _STUCK.search(text):
            data["stuck_s"] = int(match[1])
        if match := _PENDING.search(text):
            data["pending"] = int(match[1])
        data["gil"] = "acquire GIL" in text
        _weak_rank(prefix, data)
        facts.add("heartbeat", prefix, line, data, same=tuple(sorted(data.items(), key=str)))
        return True
    if _LACK_RECORDER in text:
        facts.add("recorder_off", prefix, line, same=1)
        return True
    return found


def reports(prefix: Prefix, line: int, facts: FileFacts) -> bool:
    """Read a line in which torch itself names the ranks: monitored barrier, desync report, DETAIL fingerprints."""
    text = prefix.rest
    if "monitoredBarrier" in text and (match := _BARRIER.search(text)):
        data: dict[str, object] = {"ranks": numbers(match["ranks"])}
        _put(data, timeout_ms=match["ms"])
        facts.add("missing_at_barrier", prefix, line, data, same=match[0])
        return True
    if "collective #" in text and (match := _DESYNC.search(text)):
        data = {"ranks": numbers(match["ranks"]), "joined": match["what"].startswith("joined")}
        _put(data, seq=match["next"] or match["seq"])
        facts.add("desync_report", prefix, line, data, same=match[0])
        return True
    if "CollectiveFingerPrint" in text:
        sides = [
            {
                "rank": int(m["rank"]),
                "seq": int(m["seq"]) if m["seq"] else None,
                "op": operation(m["op"]),
                "shape": numbers(m["shape"] or ""),
                "dtype": m["dtype"],
            }
            for m in _FINGERPRINT.finditer(text)
        ]
        if sides:
            facts.add("fingerprint_mismatch", prefix, line, {"sides": sides[:8]}, same=str(sides))
            return True
    return False


def group_of(text: str) -> dict[str, object]:
    """What the line says of its group: ``group`` for people, ``group_name`` as the Flight Recorder has it."""
    match = _GROUP.search(text)
    if match is None:
        place = _PLACE.search(text)
        return {"group_rank": int(place[1])} if place else {}
    name = match["guid"] or match["id"]
    return {"group": match["desc"] or name, "group_name": name, "pg_id": match["id"], "group_rank": int(match["place"])}


def operation(name: str) -> str:
    """The doctor's name of an operation of c10d."""
    return OPERATIONS.get(name, name.strip("_").lower())


def _timeout(match: re.Match[str], prefix: Prefix, line: int, facts: FileFacts) -> None:
    data = group_of(prefix.rest[: match.start()]) or group_of(prefix.rest)
    data |= {"op": operation(match["op"]), "op_name": match["op"], "backend": match["lib"].lower()}
    _put(data, seq=match["seq"], numel_in=match["nin"], numel_out=match["nout"])
    _put(data, timeout_ms=match["timeout"], ran_ms=match["ran"])
    if match["shape"] is not None:
        data["shape"] = numbers(match["shape"])
    _weak_rank(prefix, data)
    same = (data.get("seq"), data["op_name"], data.get("numel_in"), data.get("group_rank"))
    draft = facts.add("watchdog_timeout", prefix, line, data, same=same)
    if draft is not None and draft.times > 1 and ("what():" in prefix.rest or "with exception" in prefix.rest):
        draft.times -= 1


def _dump_signal(prefix: Prefix, line: int, facts: FileFacts) -> None:
    text = prefix.rest
    data = group_of(text)
    match = _SIGNAL.search(text)
    if match and match["rank"]:
        data["from_rank"] = int(match["rank"])
    data["own"] = bool(match and match["local"])
    if counts := _COUNTS.search(text):
        _put(data, last_enqueued=counts["enq"], last_completed=counts["done"])
    _weak_rank(prefix, data)
    facts.add("dump_signal", prefix, line, data, same=tuple(sorted(data.items(), key=str)))


def _weak_rank(prefix: Prefix, data: dict[str, object]) -> None:
    """Before torch 2.3 only the place in the group is printed: it is the global rank in the default group alone."""
    place = data.get("group_rank")
    if prefix.rank is not None or prefix.stream or not isinstance(place, int):
        return
    if data.get("group_name") == "0" or data.get("group") == "default_pg" or "group" not in data:
        prefix.rank = place
        data["rank_from"] = "default group" if "group" in data else PLACE


def _put(data: dict[str, object], **values: str | None) -> None:
    for name, value in values.items():
        if value is not None:
            data[name] = int(value)

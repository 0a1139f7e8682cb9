"""Lines of ``NCCL_DEBUG=INFO`` and ``WARN``, and the order of calls that ``NCCL_DEBUG_SUBSYS=COLL`` leaves.

``host:pid:tid [dev] NCCL INFO message`` and ``[time] host:pid:tid [dev] file.cc:line (func) NCCL WARN message``
(NCCL 2.30, ``src/debug.cc``, ``src/enqueue.cc``). The number after the host tells processes apart; which rank a process
is comes from its own ``comm ... rank R nranks N ... commId C - Init`` line: the rank in the widest communicator.
"""

from __future__ import annotations

import re

from meshwright.doctor.readers.calls import CallLog
from meshwright.doctor.readers.prefix import Prefix
from meshwright.doctor.readers.store import FileFacts

_HEAD = re.compile(r"(?P<host>[\w.-]{1,200}):(?P<pid>\d{1,10}):(?P<tid>\d{1,10}) \[(?P<dev>-?\d{1,4})\] ")
_LEVEL = re.compile(r"NCCL (INFO|WARN|TRACE|CALL) ?")
_INIT = re.compile(
    r"(?:comm|ncclComm\w*) (?P<comm>0x[0-9a-f]{1,16}) rank (?P<rank>\d{1,7}) n[rR]anks (?P<n>\d{1,7})"
    r"(?: cudaDev (?P<dev>\d{1,4}))?(?: nvmlDev (?P<nvml>\d{1,4}))?(?: busId (?P<bus>[0-9a-fx]{1,16}))?"
    r"(?: commId (?P<id>0x[0-9a-f]{1,16}))?(?:.{0,60}? - (?P<stage>Init START|Init COMPLETE|Abort COMPLETE|"
    r"Destroy COMPLETE))?"
)
_CHANNEL = re.compile(
    r"Channel (?P<ch>\d{1,4})(?:/\d{1,4})? : (?P<a>\d{1,7})\[[0-9a-f]{1,9}\] -> (?P<b>\d{1,7})\[[0-9a-f]{1,9}\]"
    r"(?: \[\w{1,9}\])? via (?P<via>[\w/.-]{1,60})"
)
_NETWORK = re.compile(r"Using network (?P<net>[\w.-]{1,40})")
_SOCKET = re.compile(r"NET/Socket ?: ?Using (?P<list>[^\n]{1,200})")
_VERSION = re.compile(r"NCCL version (?P<v>\d[\w.+-]{1,40})")
_SET = re.compile(r"(?P<name>NCCL_[A-Z0-9_]{1,60}) set (?:by environment )?to (?P<value>[^\s.]{1,120})")

#: Words in a warning or remark, and the cause that they point to. The first that occurs counts.
HINTS: tuple[tuple[str, str], ...] = (
    ("/dev/shm", "shm"),
    ("shared memory", "shm"),
    ("No space left on device", "shm"),
    ("vendor err", "ib"),
    ("completion with error", "ib"),
    ("ibv_", "ib"),
    ("GID", "ib"),
    ("NET/IB", "ib"),
    ("No device found", "ib"),
    ("no socket interface found", "interface"),
    ("no interface found", "interface"),
    ("Bootstrap : no", "interface"),
    ("Connect to", "connect"),
    ("Connection refused", "connect"),
    ("connection closed", "peer_gone"),
    ("Connection reset", "peer_gone"),
    ("closed by remote peer", "peer_gone"),
    ("socketProgress", "peer_gone"),
    ("Message truncated", "size_mismatch"),
    ("bytes instead of", "size_mismatch"),
    ("Mismatched", "size_mismatch"),
    ("Duplicate GPU", "duplicate_gpu"),
    ("out of memory", "oom"),
    ("unhandled cuda", "cuda"),
    ("Cuda failure", "cuda"),
    ("illegal memory access", "cuda"),
    ("GPU Direct RDMA Disabled", "gdr_off"),
    ("P2P is disabled", "p2p_off"),
    ("ACS", "acs"),
    ("IOMMU", "acs"),
    ("iommu", "acs"),
    ("NVLS", "nvls"),
    ("version mismatch", "version"),
)
_REMARKS = (
    "No device found",
    "GPU Direct RDMA Disabled",
    "P2P is disabled",
    "ACS",
    "IOMMU",
    "failed",
    "error",
    "Abort",
)


class NcclDebug:
    """Reads the NCCL lines of one file."""

    def __init__(self, facts: FileFacts, calls: CallLog) -> None:
        self._facts = facts
        self._calls = calls
        self._vias: dict[tuple[object, ...], dict[str, object]] = {}

    def line(self, prefix: Prefix, number: int) -> bool:
        """Read one line; True when it was one of NCCL's."""
        text = prefix.rest
        level = _LEVEL.search(text)
        head = _HEAD.search(text, 0, level.start()) if level else None
        if level is None or head is None:
            return text.startswith("NCCL version ") and self._version(prefix, text, number)
        prefix.host, prefix.pid = head["host"], int(head["pid"])
        process = f"{head['host']}:{head['pid']}"
        if prefix.rank is None and len(process) < 250:
            prefix.stream = f"{prefix.stream}{process} [{head['dev']}]"
        message = text[level.end() :].strip()
        if level[1] == "WARN":
            self._warn(prefix, message, number)
        elif level[1] == "INFO":
            self._info(prefix, process, message, number)
        return True

    def _info(self, prefix: Prefix, process: str, text: str, number: int) -> None:
        if " via " in text and (match := _CHANNEL.search(text)):
            self._channel(prefix, match, number)
        elif " rank " in text and (match := _INIT.search(text)):
            self._init(prefix, process, match, text, number)
        elif match := _NETWORK.search(text):
            self._note(prefix, number, text, {"topic": "network", "network": match["net"]}, match["net"])
        elif match := _SOCKET.search(text):
            self._note(prefix, number, text, {"topic": "interface", "interfaces": match["list"]}, match["list"])
        elif "NCCL version " in text:
            self._version(prefix, text, number)
        elif match := _SET.search(text):
            data: dict[str, object] = {"name": match["name"], "value": match["value"].rstrip(",;")}
            self._facts.add("env", prefix, number, data, text, same=(match["name"], match["value"]))
        elif any(word in text for word in _REMARKS):
            hint = hint_of(text)
            if hint:
                self._note(prefix, number, text, {"topic": hint, "hint": hint}, (hint, text[:60]))

    def _note(self, prefix: Prefix, number: int, text: str, data: dict[str, object], same: object) -> None:
        self._facts.add("nccl_info", prefix, number, data, text, same=same)

    def _version(self, prefix: Prefix, text: str, number: int) -> bool:
        match = _VERSION.search(text)
        if match:
            data: dict[str, object] = {"name": "nccl_version", "value": match["v"]}
            self._facts.add("env", prefix, number, data, text, same=match["v"])
        return match is not None

    def _channel(self, prefix: Prefix, match: re.Match[str], number: int) -> None:
        """Count channels by transport; the pair of ranks inside the communicator is kept of the first one."""
        via = match["via"].split("/")
        transport = "/".join(via[:2]) if via[0] in ("NET", "P2P", "SHM") else via[0]
        key = (prefix.rank, prefix.stream, transport)
        held = self._vias.get(key)
        if held is None:
            held = {"topic": "channel", "transport": transport, "via": match["via"], "channels": 0}
            held |= {"from": int(match["a"]), "to": int(match["b"])}
            if len(self._vias) < 100_000:
                self._vias[key] = held
                self._facts.add("nccl_info", prefix, number, held, match[0])
        held["channels"] = int(str(held["channels"])) + 1

    def _init(self, prefix: Prefix, process: str, match: re.Match[str], text: str, number: int) -> None:
        data: dict[str, object] = {"comm": match["comm"], "comm_rank": int(match["rank"]), "nranks": int(match["n"])}
        for name, group in (("cuda_dev", "dev"), ("bus_id", "bus"), ("comm_id", "id")):
            if match[group] is not None:
                data[name] = match[group]
        stage = {"Init START": "start", "Init COMPLETE": "complete"}.get(match["stage"] or "", "")
        data["stage"] = stage or (match["stage"] or "").lower() or "other"
        data |= {"host": prefix.host, "pid": prefix.pid}
        if stage:
            self._calls.communicator(process, data)
        if stage or match["stage"]:
            same = (match["comm"], match["id"], match["stage"])
            self._facts.add("comm_init", prefix, number, data, text, same=same)

    def _warn(self, prefix: Prefix, text: str, number: int) -> None:
        hint = hint_of(text)
        data: dict[str, object] = {"hint": hint} if hint else {}
        kind = "shm" if hint == "shm" else "nccl_warn"
        if hint == "peer_gone":
            data["consequence"] = True
        self._facts.add(kind, prefix, number, data, text, same=text[:120])


def hint_of(text: str) -> str | None:
    """What a warning points to, None where nothing is known of it."""
    return next((hint for word, hint in HINTS if word in text), None)

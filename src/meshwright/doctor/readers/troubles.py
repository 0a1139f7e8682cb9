"""One-line troubles: out of memory, deaths by signal, gloo errors, shared memory, driver errors, failed meetings.

A death or an error that merely follows from another rank's (an abort by the watchdog, SIGTERM of the launcher, a
connection closed by a peer that died) carries ``consequence``.
"""

from __future__ import annotations

import re

from meshwright.doctor.readers.prefix import Prefix
from meshwright.doctor.readers.store import FileFacts

_TRIED = re.compile(r"Tried to allocate (\d{1,9}(?:\.\d{1,6})?) (KiB|MiB|GiB|TiB|bytes)")
_GPU = re.compile(r"GPU (\d{1,4})")
_KERNEL_KILL = re.compile(
    r"Killed process (?P<pid>\d{1,10})(?:,? UID \d+,?)? \((?P<name>[^)]{1,80})\)(?:.*?anon-rss:(?P<kb>\d{1,15})kB)?"
)
_OOM_KILL = re.compile(r"oom-kill:.*?task=(?P<name>[^,]{1,80}),pid=(?P<pid>\d{1,10})")
_FAILED = re.compile(
    r"failed \(exitcode: (?P<code>-?\d{1,4})\) local_rank: (?P<local>\d{1,5}) \(pid: (?P<pid>\d{1,10})\)"
)
_ENTRY = re.compile(r"^\s*exitcode\s*: (?P<code>-?\d{1,4}) \(pid: (?P<pid>\d{1,10})\)")
_SIGNAL_BY = re.compile(r"Signal (?P<n>\d{1,3}) \((?P<name>SIG\w{1,12})\) received by PID (?P<pid>\d{1,10})")
_SPAWN = re.compile(
    r"process (?P<local>\d{1,5}) terminated with (?:signal (?P<sig>SIG\w{1,12})|exit code (?P<code>-?\d{1,4}))"
)
_MPIRUN = re.compile(
    r"process rank (?P<rank>\d{1,7}) with PID (?P<pid>\d{1,10}) on node (?P<host>[\w.-]{1,80}) "
    r"exited on signal (?P<n>\d{1,3})"
)
_SRUN = re.compile(
    r"srun: error: (?P<host>[\w.,\[\]-]{1,80}): tasks? (?P<tasks>[\d,-]{1,200}): "
    r"(?P<how>Killed|Out Of Memory|Segmentation fault|Bus error|Aborted|Terminated|"
    r"Exited with exit code (?P<code>\d{1,3}))"
)
_RAY = re.compile(r"Worker (?:PID|pid)[:=] ?(?P<pid>\d{1,10})")
_RAY_IP = re.compile(r"Worker IP address: (?P<ip>[\d.a-f:]{3,45}?)(?: |$)")
_EXIT = re.compile(
    r"(?:exit(?:ed with)? (?:code|status)|exit_code|exitCode)[:= ]{1,3}(?P<code>-?\d{1,3})\b", re.IGNORECASE
)
_XID = re.compile(r"NVRM: Xid \((?P<bus>[\w:.]{1,40})\): (?P<xid>\d{1,4})(?:, pid='?(?P<pid>\d{1,10}|<unknown>)'?)?")
_GLOO_WAIT = re.compile(r"Timed out waiting (\d{1,12})ms for (\w{1,12}) operation")
_GLOO_PEER = re.compile(r"\[(?P<peer>[\w.:%-]{3,80})\]:(?P<port>\d{1,6})|peer \[(?P<peer2>[^\]]{3,80})\]")
_GLOO_SIZE = re.compile(
    r"op\.(?:preamble\.length|nbytes)\s*(?:<=|==|>=)\s*op\.(?:nbytes|preamble\.length)\.?\s*(\d{1,18}) vs (\d{1,18})"
)
_CLIENTS = re.compile(r"(?P<joined>\d{1,7})/(?P<of>\d{1,7}) clients joined")
_SHM_BROADCAST = "No available shared memory broadcast block"

SIGNALS = {
    "SIGHUP": 1, "SIGINT": 2, "SIGQUIT": 3, "SIGILL": 4, "SIGABRT": 6, "SIGBUS": 7, "SIGFPE": 8, "SIGKILL": 9,
    "SIGSEGV": 11, "SIGPIPE": 13, "SIGTERM": 15,
}  # fmt: skip
_BY_NUMBER = {number: name for name, number in SIGNALS.items()}
#: Ends by these say that somebody else ended the process, or that it ended itself after another's failure.
_FOLLOWING = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGABRT", "SIGPIPE"})
_SRUN_SIGNALS = {
    "Killed": "SIGKILL",
    "Out Of Memory": "SIGKILL",
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Aborted": "SIGABRT",
    "Terminated": "SIGTERM",
}
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DEVICE_OOM = (
    "CUDA out of memory",
    "HIP out of memory",
    "XPU out of memory",
    "NPU out of memory",
    "CUDA error: out of memory",
)
_HOST_OOM = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory",
             "Cannot allocate memory", "running low on memory", "OOMKilled", "oom_kill event")  # fmt: skip
_NCCL_FOLLOWS = (
    "communicator was aborted",
    "remote process exited",
    "watchdog thread terminated",
    "NCCL communicator has been",
)
#: What the driver reports when a GPU is lost or its memory is bad (NVIDIA's Xid catalogue); others are program faults.
LOST_GPU_XIDS = frozenset({48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140})


def troubles(prefix: Prefix, line: int, facts: FileFacts) -> str | None:
    """Note the trouble that a line tells of; returns what sort it was, None when it tells of none."""
    text = prefix.rest
    if "emory" in text or "oom" in text or "OOM" in text:
        sort = _memory(prefix, text, line, facts)
        if sort:
            return sort
    if "gloo" in text.lower() or "closed by peer" in text or "op.preamble" in text or "Timed out waiting" in text:
        sort = _gloo(prefix, text, line, facts)
        if sort:
            return sort
    if (
        "exit" in text
        or "illed" in text
        or "ignal" in text
        or "fault" in text
        or "died" in text
        or "srun: error" in text
    ):
        sort = _death(prefix, text, line, facts)
        if sort:
            return sort
    if "NVRM: Xid" in text and (match := _XID.search(text)):
        number = int(match["xid"])
        data: dict[str, object] = {"xid": number, "bus": match["bus"], "lost_gpu": number in LOST_GPU_XIDS}
        if match["pid"] and match["pid"].isdigit():
            data["pid"] = int(match["pid"])
        facts.add("xid", prefix, line, data, same=match[0])
        return "xid"
    if "clients joined" in text and (match := _CLIENTS.search(text)):
        data = {"joined": int(match["joined"]), "expected": int(match["of"])}
        facts.add("rendezvous", prefix, line, data, same=match[0])
        return "rendezvous"
    if any(word in text for word in _NCCL_FOLLOWS):
        return "nccl_consequence"
    return None


def died(data: dict[str, object], code: int | None, name: str | None) -> dict[str, object]:
    """Add signal, exit code and whether it is a consequence to the ``data`` of a death."""
    if name is None and code is not None:
        number = -code if code < 0 else code - 128 if 128 < code < 160 else 0
        name = _BY_NUMBER.get(number)
    if code is not None:
        data["exitcode"] = code
    if name:
        data["signal"] = name
        if name in SIGNALS:
            data["signal_number"] = SIGNALS[name]
    if name in _FOLLOWING:
        data["consequence"] = True
    return data


def _memory(prefix: Prefix, text: str, line: int, facts: FileFacts) -> str | None:
    if match := _KERNEL_KILL.search(text) or _OOM_KILL.search(text):
        data: dict[str, object] = {"scope": "host", "pid": int(match["pid"]), "process": match["name"]}
        if match.re is _KERNEL_KILL and match["kb"]:
            data["resident_bytes"] = int(match["kb"]) * 1024
        data["cgroup"] = "cgroup" in text or "MEMCG" in text
        facts.add("oom", prefix, line, died(data, None, "SIGKILL"), same=(match["pid"],))
        return "oom"
    if _SHM_BROADCAST in text:
        facts.add("engine_wait", prefix, line, {}, same=1)
        return "engine_wait"
    if "shared memory" in text or "/dev/shm" in text:
        if "insufficient" in text or "No space" in text or "out of shared memory" in text or "failed" in text:
            facts.add("shm", prefix, line, {"hint": "shm"}, same=text[:120])
            return "shm"
        return None
    device = any(word in text for word in _DEVICE_OOM)
    if (
        not device
        and not any(word in text for word in _HOST_OOM)
        and not re.match(r"(?:\w+\.)*OutOfMemoryError|MemoryError", text)
    ):
        return None
    data = {"scope": "device" if device else "host"}
    if match := _TRIED.search(text):
        data["tried_bytes"] = int(float(match[1]) * _UNITS[match[2]])
    if device and (match := _GPU.search(text)):
        data["gpu"] = int(match[1])
    facts.add("oom", prefix, line, data, same=text[:100])
    return "oom"


def _gloo(prefix: Prefix, text: str, line: int, facts: FileFacts) -> str | None:
    data: dict[str, object] = {}
    if match := _GLOO_SIZE.search(text):
        data = {"error": "size_mismatch", "sizes": [int(match[1]), int(match[2])]}
    elif match := _GLOO_WAIT.search(text):
        data = {"error": "timed_out", "wait_ms": int(match[1]), "operation": match[2], "consequence": True}
    elif "closed by peer" in text or "reset by peer" in text or "Broken pipe" in text:
        data = {"error": "closed_by_peer", "consequence": True}
    elif "gloo" not in text.lower():
        return None
    elif "connectFullMesh failed" in text or "onnection refused" in text or "nable to resolve" in text:
        data = {"error": "connect_failed"}
    elif "nable to find" in text or "no interface" in text.lower():
        data = {"error": "interface"}
    elif "imed out" in text or "imeout" in text:
        data = {"error": "timed_out", "consequence": True}
    else:
        return None
    if peer := _GLOO_PEER.search(text):
        data["peer"] = peer["peer"] or peer["peer2"]
    facts.add("gloo_error", prefix, line, data, same=str(data))
    return "gloo_consequence" if data.get("consequence") else "gloo"


def _death(prefix: Prefix, text: str, line: int, facts: FileFacts) -> str | None:
    match = _FAILED.search(text)
    if match:
        data: dict[str, object] = {"pid": int(match["pid"]), "local_rank": int(match["local"])}
        facts.alone = False
        return _note(prefix, line, facts, died(data, int(match["code"]), None), match[0])
    if match := _SIGNAL_BY.search(text):
        return _note(prefix, line, facts, died({"pid": int(match["pid"])}, None, match["name"]), match[0])
    if match := _MPIRUN.search(text):
        data = {"pid": int(match["pid"]), "host": match["host"], "rank_from": "mpirun"}
        prefix.rank = int(match["rank"])
        return _note(prefix, line, facts, died(data, -int(match["n"]), None), match[0])
    if match := _SRUN.search(text):
        code = int(match["code"]) if match["code"] else None
        data = died({"host": match["host"], "tasks": match["tasks"]}, code, _SRUN_SIGNALS.get(match["how"]))
        data["out_of_memory"] = match["how"] == "Out Of Memory"
        return _note(prefix, line, facts, data, match[0])
    if match := _SPAWN.search(text):
        code = int(match["code"]) if match["code"] else None
        data = died({"local_rank": int(match["local"])}, code, match["sig"])
        return _note(prefix, line, facts, data, match[0])
    if "orker" in text and ("died" in text or "killed" in text):
        data = {"launcher": "ray"}
        if match := _RAY.search(text):
            data["pid"] = int(match["pid"])
        if match := _RAY_IP.search(text):
            data["host"] = match["ip"]
        return _note(prefix, line, facts, data, text[:160])
    if "Fatal Python error: " in text or "Segmentation fault" in text or "egfault at" in text:
        name = "SIGBUS" if "Bus error" in text else "SIGABRT" if "Aborted" in text else "SIGSEGV"
        if "Fatal Python error" in text and name == "SIGSEGV" and "Segmentation" not in text:
            return None
        return _note(prefix, line, facts, died({}, None, name), text[:100])
    if match := _EXIT.search(text):
        code = int(match["code"])
        if code == 137 or code == 139 or code == 135 or code < 0:
            return _note(prefix, line, facts, died({}, code, None), text[:100])
    return None


def _note(prefix: Prefix, line: int, facts: FileFacts, data: dict[str, object], same: object) -> str:
    """A death; without a signal and without memory or a launcher to blame it is only an exit."""
    ended = "signal" in data or bool(data.get("out_of_memory")) or data.get("launcher") == "ray"
    facts.add("killed" if ended else "exited", prefix, line, data, same=same)
    return "killed"

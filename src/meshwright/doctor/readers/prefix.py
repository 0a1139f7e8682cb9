"""What stands before the message of a log line: stamps, and the tags of launchers that tell interleaved ranks apart.

Launchers put their own tag before the line of a process: torchrun ``[default3]:`` (role and local rank) or
``[rank3]:``, Ray ``(Worker pid=12, ip=10.0.0.1)``, vLLM ``(Worker_TP1 pid=12)``, srun ``3: ``, mpirun
``[1,3]<stderr>:``, compose and kubectl ``pod-3 | `` and ``[pod/name/container] ``. torch itself prints ``[rank3]:``
before an exception (2.3 on) and
``[rank3]:[E1118 20:32:23.95 ProcessGroupNCCL.cpp:629]`` before its own lines; only these two are the global rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshwright.doctor.readers.clock import Clock, dated, glog, syslog

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_ACTOR = re.compile(r"\((?P<name>[A-Za-z_][\w.:-]{0,79})(?P<more>(?:[ ,]+(?:pid|ip|rank|actor_id)=[\w.:-]{1,64})+)\)")
_WORD = re.compile(r"(pid|ip|rank)=([\w.:-]+)")
_RANK = re.compile(r"\[(?:rank|Rank|RANK)(?:: ?| |=)?(\d{1,7})\](:?)")
_ROLE = re.compile(r"\[(?P<role>[A-Za-z][\w-]{0,30}?)(?P<n>\d{1,5})\]:")
_MPI = re.compile(r"\[\d+,(\d{1,7})\](?:<std(?:out|err)>)?:")
_POD = re.compile(r"\[(?:pod/)?([a-z0-9][\w./-]{0,120}/[\w./-]{1,120})\]")
_SOURCE = re.compile(r"\[[\w./-]{1,120}\.py:\d{1,6}\]")
_KERNEL = re.compile(r"\[ *\d{1,9}\.\d{6}\]")
_C10 = re.compile(r"\[(?P<level>[EWIFC])(?P<stamp>\d{3,4} )?")
_C10_SOURCE = re.compile(r"[ ]?(?:\d+ )?(?P<file>[\w./-]{1,120}\.(?:cpp|cc|cu|h|hpp|py)):(?P<line>\d{1,6})\]")
_SRUN = re.compile(r"(\d{1,6}): ")
_NUMBERED = re.compile(r"\[(\d{1,9})\](?!:)")
_PIPE = re.compile(r"(?P<name>[a-z0-9][\w.-]{0,80}) +\| ")
_CRI = re.compile(r"std(?:out|err) [FP] ")
_LEVEL = re.compile(r"(?:INFO|WARNING|ERROR|CRITICAL|DEBUG)(?: \d\d-\d\d \d\d:\d\d:\d\d)? +")
_SYSLOG_HOST = re.compile(r" (?P<host>[\w.-]{1,80}) (?=kernel: )")

#: How many tags and stamps are taken off one line; none in the wild has more than five.
_MOST_TAGS = 8


@dataclass(slots=True)
class Prefix:
    """What stood before a message.

    Attributes:
        rank: global rank, where torch or the launcher said it.
        local_rank: rank on its node (torchrun's role tag).
        task: number given by srun or mpirun; the global rank only where every process is one task.
        at: Unix seconds.
        zoned: the stamp named its zone.
        pid: process id in the tag.
        host: address or host in the tag.
        stream: text that is the same for all lines of one process as far as tags tell, without torch's own tag.
        own: torch's own tag stood before the message (each line of an exception carries it).
        c10: the message is one of torch's C++ lines.
        rest: the message.
    """

    rank: int | None = None
    local_rank: int | None = None
    task: int | None = None
    at: float | None = None
    zoned: bool = False
    pid: int | None = None
    host: str | None = None
    stream: str = ""
    own: bool = False
    c10: bool = False
    rest: str = ""

    @property
    def key(self) -> str:
        """Tells processes of one file apart: the launcher's tag, and torch's where each line has it."""
        return f"{self.stream}|{self.rank}" if self.own and not self.c10 else self.stream


def peel(line: str, clock: Clock) -> Prefix:
    """Take stamps and tags off a line."""
    if "\x1b" in line:
        line = _ANSI.sub("", line)
    found = Prefix()
    pos = 0
    for _ in range(_MOST_TAGS):
        after = _one(line, pos, found, clock)
        if after == pos:
            break
        pos = after
        if pos < len(line) and line[pos] == " ":
            pos += 1
    found.rest = line[pos:]
    return found


def _one(line: str, pos: int, found: Prefix, clock: Clock) -> int:
    """Take one tag or stamp off at ``pos``; returns where it ends, ``pos`` where there is none."""
    if pos >= len(line) or found.c10:
        return pos
    first = line[pos]
    if first == "[":
        return _bracket(line, pos, found, clock)
    if first == "(":
        return _actor(line, pos, found)
    if first.isdigit():
        return _number(line, pos, found, clock)
    if first in "EWIF" and line[pos + 1 : pos + 4].isdigit():
        stamp = glog(line, clock, pos + 1)
        if stamp is not None:
            found.at = stamp[0] if found.at is None else found.at
            source = _C10_SOURCE.match(line, stamp[1])
            return source.end() if source else stamp[1]
    return _word(line, pos, found, clock)


def _bracket(line: str, pos: int, found: Prefix, clock: Clock) -> int:
    if match := _RANK.match(line, pos):
        if line.startswith((" Watchdog", " Some NCCL", " To avoid"), match.end()):
            return pos
        found.rank = int(match[1])
        found.own = True
        return match.end()
    if match := _C10.match(line, pos):
        after = match.end()
        if match["stamp"]:
            stamp = glog(line, clock, pos + 2)
            if stamp is None:
                return pos
            if not found.zoned:
                found.at = stamp[0]
            after = stamp[1]
        if source := _C10_SOURCE.match(line, after):
            found.c10 = True
            return source.end()
        return pos
    if stamp3 := dated(line, clock, pos + 1):
        close = line.find("]", stamp3[2], stamp3[2] + 8)
        if close >= 0:
            _take(found, stamp3[0], stamp3[1])
            return close + 1
        return pos
    if match := _MPI.match(line, pos):
        found.task = int(match[1])
    elif match := _ROLE.match(line, pos):
        if match["role"] == "rank":
            found.rank = int(match["n"])
        else:
            found.local_rank = int(match["n"])
    elif match := (
        _POD.match(line, pos) or _SOURCE.match(line, pos) or _KERNEL.match(line, pos) or _NUMBERED.match(line, pos)
    ):
        if match.re is not _POD:
            return match.end()
    else:
        return pos
    found.stream += match[0]
    return match.end()


def _actor(line: str, pos: int, found: Prefix) -> int:
    match = _ACTOR.match(line, pos)
    if match is None:
        return pos
    for name, value in _WORD.findall(match["more"]):
        if name == "ip":
            found.host = value
        elif value.isdigit() and len(value) < 10:
            if name == "pid":
                found.pid = int(value)
            else:
                found.rank = int(value)
    found.stream += match[0]
    return match.end()


def _number(line: str, pos: int, found: Prefix, clock: Clock) -> int:
    if stamp := dated(line, clock, pos):
        _take(found, stamp[0], stamp[1])
        return stamp[2]
    match = _SRUN.match(line, pos)
    if match is None or found.task is not None:
        return pos
    found.task = int(match[1])
    found.stream += match[0]
    return match.end() - 1


def _word(line: str, pos: int, found: Prefix, clock: Clock) -> int:
    if line.startswith("std", pos) and (match := _CRI.match(line, pos)):
        return match.end() - 1
    if match := _LEVEL.match(line, pos):
        return match.end() - 1
    if stamp := syslog(line, clock, pos):
        found.at = stamp[0]
        host = _SYSLOG_HOST.match(line, stamp[1])
        if host:
            found.host = host["host"]
            return host.end() - 1
        return stamp[1]
    if match := _PIPE.match(line, pos):
        found.stream += match[0]
        return match.end() - 1
    return pos


def _take(found: Prefix, at: float, zoned: bool) -> None:
    if found.at is None or (zoned and not found.zoned):
        found.at, found.zoned = at, zoned

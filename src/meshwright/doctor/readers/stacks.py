"""Files of ``py-spy dump``, one or many processes, as text or ``--json``; ``text`` finds its output within a log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

from meshwright.doctor.incident import Frame, Incident
from meshwright.doctor.readers import Source
from meshwright.doctor.readers.blocks import PYSPY_THREAD, PySpy
from meshwright.doctor.readers.clock import Clock
from meshwright.doctor.readers.frames import describe
from meshwright.doctor.readers.jsonio import load_json
from meshwright.doctor.readers.prefix import peel
from meshwright.doctor.readers.store import FileFacts, rank_in_name
from meshwright.errors import InputError

NAME = "stacks"

_PROCESS = re.compile(r"Process (?P<pid>\d{1,10}): (?P<command>[^\n]{0,400})")
_RANK = re.compile(r"(?<!\S)--(?P<which>local[_-]rank|rank)[= ](?P<rank>\d{1,7})\b")
_TEXT = re.compile(rb"(?:^|\n)[^\n]{0,200}Process \d{1,10}: [^\n]*\r?\n[^\n]{0,200}Python v\d")
MAX_LINE = 4096
MAX_JSON_BYTES = 64 << 20
MAX_THREADS = 20_000


def sniff(head: bytes, name: str) -> bool:
    """Whether a py-spy dump begins here."""
    if head.lstrip()[:1] == b"[":
        return b'"thread_id"' in head and b'"frames"' in head
    return _TEXT.search(head) is not None


def read(source: Source, incident: Incident) -> None:
    """Note one ``stack`` fact a thread.

    Raises:
        InputError: broken JSON.
    """
    facts = FileFacts(source.name)
    if source.head.lstrip()[:1] == b"[":
        _json(source, incident)
        return
    try:
        with source.open() as stream:
            _text(stream, facts)
    except (OSError, EOFError) as error:
        raise InputError(f"{source.name}: cannot be read to its end ({error})") from None
    finally:
        facts.flush(incident)


def _text(stream: BinaryIO, facts: FileFacts) -> None:
    clock = Clock.of(None)
    pid: int | None = None
    rank: int | None = None
    block: PySpy | None = None
    for number, raw in enumerate(_lines(stream), start=1):
        prefix = peel(raw.decode("utf-8", "replace").rstrip("\r\n"), clock)
        if rank is not None and prefix.rank is None:
            prefix.rank = rank
        if block is not None:
            if block.take(prefix, number):
                continue
            block.close()
            block = None
        if match := _PROCESS.match(prefix.rest):
            facts.alone = pid is None
            pid = int(match["pid"])
            said = _RANK.search(match["command"])
            rank = int(said["rank"]) if said and said["which"] == "rank" else None
        elif prefix.rest.startswith("Thread ") and PYSPY_THREAD.match(prefix.rest):
            prefix.pid = pid
            block = PySpy(prefix, number, facts, pid)
    if block is not None:
        block.close()


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    while line := stream.readline(MAX_LINE):
        yield line


def _json(source: Source, incident: Incident) -> None:
    threads = load_json(source, MAX_JSON_BYTES)
    if not isinstance(threads, list):
        raise InputError(f"{source.name}: not a list of threads")
    for thread in threads[:MAX_THREADS]:
        rows = thread.get("frames") if isinstance(thread, dict) else None
        if not isinstance(rows, list):
            continue
        frames = [_frame(row) for row in rows[:200] if isinstance(row, dict)]
        name, pid = str(thread.get("thread_name") or thread.get("thread_id")), thread.get("pid")
        data = describe(frames) | {"thread": name[:120], "tool": "py-spy", "active": bool(thread.get("active"))}
        data["main"] = name == "MainThread" or thread.get("thread_id") == pid
        data["gil"] = bool(thread.get("owns_gil"))
        rank = rank_in_name(source.name)
        if rank is not None:
            data["rank_from"] = "file name"
        if isinstance(pid, int):
            data["pid"] = pid
        text = " < ".join(f"{f.function} ({f.file.rsplit('/', 1)[-1]}:{f.line})" for f in frames[:6])
        incident.add_fact("stack", text, f"{source.name}:1", rank, None, data)


def _frame(row: dict[object, object]) -> Frame:
    line = row.get("line")
    file = str(row.get("filename") or row.get("short_filename") or "")
    return Frame(str(row.get("name"))[:200], file[:400], line if isinstance(line, int) and 0 <= line < 10**9 else 0)

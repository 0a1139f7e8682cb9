"""Logs of any kind, streamed once: a search for a few words in each piece, and only lines that have one are parsed.

The words are chosen so that every line that matters has one, and long where possible (a longer word is found faster).
Memory is bounded: ``store`` caps facts, ``calls`` caps rows, a line beyond ``MAX_LINE`` bytes is cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import BinaryIO

from meshwright.doctor.incident import Incident
from meshwright.doctor.readers import Source
from meshwright.doctor.readers.blocks import Block, opened
from meshwright.doctor.readers.calls import CallLog
from meshwright.doctor.readers.clock import Clock
from meshwright.doctor.readers.environment import environment, is_environment
from meshwright.doctor.readers.launcher import LINES_BEFORE, TABLE_INDENT, table_entry
from meshwright.doctor.readers.nccl_debug import NcclDebug
from meshwright.doctor.readers.prefix import Prefix, peel
from meshwright.doctor.readers.resolve import resolve
from meshwright.doctor.readers.store import FileFacts
from meshwright.doctor.readers.troubles import troubles
from meshwright.doctor.readers.watchdog import reports, watchdog
from meshwright.errors import InputError

NAME = "log"

#: Bytes read at once.
PIECE = 1 << 20
#: Bytes of a line that are looked at; nothing of interest stands behind them.
MAX_LINE = 8192
#: Blocks open at once (one a process); the oldest is closed for a new one.
MAX_OPEN = 4096
#: Lines at the start whose tags are looked at whatever they say.
SAMPLE_LINES = 200

#: In a file that begins as a dump of the environment, lines that are looked at whatever they say.
WHOLE_LINES = 20_000

NEEDLES = (
    b"NCCL ",
    b"ProcessGroup",
    b"rror:",
    b"Killed",
    b"exitcode",
    b"most recent call",
    b'"MainThread"',
    b"collective #",
    b"shared memory b",
    b"enforce fail at",
)
#: More of them for a file whose first lines come from a kernel.
KERNEL_NEEDLES = (b"NVRM: Xid", b"oom-kill", b"segfault at")

_ERROR = re.compile(
    r"(?P<type>(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception|Interrupt)): (?P<message>.*)"
)
_TAG = re.compile(r"\[rank\d{1,7}\]:\[[EWIFC]")
#: Several messages on one line: processes that write into one file break each other's lines.
_TAGS = re.compile(_TAG.pattern.encode())
_CONTROL = bytes(set(range(32)) - {7, 8, 9, 10, 12, 13, 27})


def sniff(head: bytes, name: str) -> bool:
    """Whether it is text: no NUL and hardly any control characters."""
    if not head or b"\0" in head:
        return False
    controls = len(head) - len(head.translate(None, _CONTROL))
    return controls * 50 <= len(head)


def read(source: Source, incident: Incident) -> None:
    """Read one log."""
    logs = Logs(incident)
    logs.read(source)
    logs.finish()
    resolve(incident, logs.files)


class Logs:
    """Reads many logs of one job; what needs all of them (the order of calls) is handed over by ``finish``.

    ``files`` holds the ranks that each file names.
    """

    def __init__(self, incident: Incident, progress: Callable[[int], None] | None = None) -> None:
        self.files: dict[str, set[int]] = {}
        self._incident = incident
        self._calls = CallLog()
        self._progress = progress

    def read(self, source: Source, modified: float | None = None) -> None:
        """Read one log.

        Raises:
            InputError: it could not be opened or ended in a broken stream; what was read before counts.
        """
        facts = FileFacts(source.name)
        self._calls.source = source.name
        scan = _Scan(facts, self._calls, Clock.of(modified))
        try:
            with source.open() as stream:
                self._stream(stream, scan)
        except (OSError, EOFError) as error:
            raise InputError(f"{source.name}: cannot be read to its end ({error})") from None
        finally:
            scan.finish()
            facts.flush(self._incident)
            self.files[source.name] = facts.ranks

    def finish(self) -> None:
        """Hand over what needs all files."""
        self._calls.fill(self._incident)

    def _stream(self, stream: BinaryIO, scan: _Scan) -> None:
        tail = b""
        for piece in _pieces(stream):
            if self._progress:
                self._progress(len(piece))
            cut = piece.rfind(b"\n") + 1
            if not cut:
                tail += piece
                if len(tail) > PIECE:
                    scan.lines(tail)
                    tail = b""
                continue
            first = piece.find(b"\n") + 1 if tail else 0
            if tail:
                scan.lines(tail + piece[:first])
            scan.lines(piece, first, cut)
            tail = piece[cut:]
        if tail:
            scan.lines(tail)


class _Scan:
    """State while one file is read."""

    def __init__(self, facts: FileFacts, calls: CallLog, clock: Clock) -> None:
        self._facts = facts
        self._calls = calls
        self._clock = clock
        self._nccl = NcclDebug(facts, calls)
        self._open: dict[str, Block] = {}
        self._seen: dict[str, int] = {}
        self._number = 1
        self._before: list[bytes] = []
        self._from = 0
        self._whole_until = 0
        self._needles: tuple[bytes, ...] = NEEDLES
        #: Line, rank and time of the last entry of torchrun's table of failures.
        self._table: tuple[int, int | None, float | None] = (-LINES_BEFORE, None, None)

    def lines(self, buffer: bytes, start: int = 0, end: int | None = None) -> None:
        """Read whole lines, those between ``start`` and ``end`` (no copy is made of them)."""
        if self._number == 1:
            self._sample(buffer)
        end = len(buffer) if end is None else end
        self._from = start
        following = iter(_hits(buffer, self._needles, start, end))
        hit = next(following, -1)
        pos, counted = start, start
        while pos < end:
            if not self._open and self._number >= self._whole_until:
                while 0 <= hit < pos:
                    hit = next(following, -1)
                if hit < 0:
                    break
                pos = buffer.rfind(b"\n", pos, hit) + 1 or pos
            stop = buffer.find(b"\n", pos, end)
            stop = end if stop < 0 else stop
            self._number += buffer.count(b"\n", counted, pos)
            counted = pos
            self._line(buffer, pos, stop)
            pos = stop + 1
        self._number += buffer.count(b"\n", counted, end)
        self._before += buffer[max(start, end - 2048) : end].splitlines()
        del self._before[:-LINES_BEFORE]

    def finish(self) -> None:
        """Close what is still open."""
        for block in self._open.values():
            block.close()
        self._open.clear()

    def _sample(self, buffer: bytes) -> None:
        for raw in buffer[:65_536].split(b"\n", SAMPLE_LINES)[:SAMPLE_LINES]:
            if raw:
                prefix = self._peel(raw)
                self._facts.learn(prefix)
                if "kernel: " in prefix.rest or "NVRM" in prefix.rest:
                    self._needles = NEEDLES + KERNEL_NEEDLES
                if is_environment(prefix.rest):
                    self._whole_until = WHOLE_LINES

    def _peel(self, raw: bytes) -> Prefix:
        text = raw[:MAX_LINE].decode("utf-8", "replace").rstrip("\r")
        if text.startswith("{"):
            text = _unwrapped(text)
        if "\r" in text:
            text = text.rsplit("\r", 1)[1]
        prefix = peel(text, self._clock)
        if not prefix.c10 and (tag := _TAG.search(prefix.rest)):
            inner = peel(prefix.rest[tag.start() :], self._clock)
            inner.stream, inner.local_rank, inner.task = prefix.stream, prefix.local_rank, prefix.task
            inner.pid, inner.host = prefix.pid, prefix.host
            if prefix.zoned:
                inner.at, inner.zoned = prefix.at, True
            return inner
        return prefix

    def _line(self, buffer: bytes, start: int, stop: int) -> None:
        raw = buffer[start : min(stop, start + MAX_LINE)]
        if b": opCount " in raw and self._calls.call(raw):
            return
        starts = [m.start() for m in _TAGS.finditer(raw)] if raw.count(b"[rank") > 1 else []
        if len(starts) < 2:
            self._one(self._peel(raw), buffer, start)
            return
        for place, end in zip([0, *starts[1:]], [*starts[1:], len(raw)], strict=True):
            self._one(self._peel(raw[place:end]), buffer, start)

    def _one(self, prefix: Prefix, buffer: bytes, start: int) -> None:
        if self._open and self._continues(prefix):
            return
        in_table = "traceback : " in prefix.rest and self._number - self._table[0] < LINES_BEFORE
        if in_table and prefix.rank is None:
            _, prefix.rank, prefix.at = self._table
        if (block := opened(prefix, self._number, self._facts)) is not None:
            block.indent = TABLE_INDENT if in_table else ""
            self._begin(block)
            return
        self._message(prefix, buffer, start)

    def _continues(self, prefix: Prefix) -> bool:
        """Offer the line to the block of its process."""
        key = prefix.key
        block = self._open.get(key)
        if self._number % 64 == 0:
            self._expire()
        if block is None or (prefix.c10 and prefix.rank != block.prefix.rank):
            return False
        self._seen[key] = self._number
        if block.take(prefix, self._number):
            return True
        self._open.pop(key).close()
        return False

    def _begin(self, block: Block) -> None:
        held = self._open.pop(block.key, None)
        if held is None and len(self._open) >= MAX_OPEN:
            held = self._open.pop(next(iter(self._open)))
        if held is not None:
            held.close()
        self._open[block.key] = block
        self._seen[block.key] = self._number

    def _expire(self) -> None:
        for key in [k for k, b in self._open.items() if self._number - self._seen[k] > b.patience]:
            self._open.pop(key).close()

    def _message(self, prefix: Prefix, buffer: bytes, start: int) -> None:
        """Ask the parsers of single lines, the most frequent first."""
        text, facts, number = prefix.rest, self._facts, self._number
        if "NCCL " in text and self._nccl.line(prefix, number):
            return
        if (prefix.c10 or "CCL" in text or "CNCL" in text) and watchdog(prefix, number, facts):
            return
        if "exitcode " in text:
            before = self._lines_before(buffer, start)
            if table_entry(before, prefix, number, facts, self._clock):
                self._table = number, prefix.rank, prefix.at
                return
        if reports(prefix, number, facts) or environment(prefix, number, facts):
            return
        sort = troubles(prefix, number, facts)
        if "rror" in text or "Exception" in text:
            self._error(prefix, sort)

    def _error(self, prefix: Prefix, sort: str | None) -> None:
        """An exception without its traceback."""
        match = _ERROR.match(prefix.rest)
        if match is None:
            return
        data: dict[str, object] = {"type": match["type"], "message": match["message"][:300]}
        if sort in ("gloo_consequence", "nccl_consequence") or "Watchdog caught" in prefix.rest:
            data["consequence"] = True
        self._facts.add("exception", prefix, self._number, data, same=(match["type"], match["message"][:120]))

    def _lines_before(self, buffer: bytes, start: int) -> list[str]:
        lines = buffer[max(self._from, start - 2048) : start].splitlines()[-LINES_BEFORE:]
        if len(lines) < LINES_BEFORE:
            lines = [*self._before, *lines][-LINES_BEFORE:]
        return [peel(raw[:MAX_LINE].decode("utf-8", "replace"), self._clock).rest for raw in lines]


def _unwrapped(text: str) -> str:
    """A line in the JSON of a container's log (``{"log": "...", "time": "..."}``), as stamp and line; else as it is."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return text
    line = next((row[k] for k in ("log", "message", "msg") if isinstance(row.get(k), str)), None)
    stamp = next((row[k] for k in ("time", "timestamp", "@timestamp", "ts") if isinstance(row.get(k), str)), None)
    if line is None:
        return text
    line = line.rstrip("\n").rsplit("\n", 1)[-1]
    return f"{stamp} {line}" if stamp else line


def _pieces(stream: BinaryIO) -> Iterator[bytes]:
    """Pieces of ``PIECE`` bytes; where the stream breaks, what came before the break first."""
    some = getattr(stream, "read1", stream.read)
    while True:
        parts: list[bytes] = []
        size = 0
        try:
            while size < PIECE and (data := some(PIECE - size)):
                parts.append(data)
                size += len(data)
        except (OSError, EOFError, InputError):
            if parts:
                yield b"".join(parts)
            raise
        if not parts:
            return
        yield b"".join(parts)


def _hits(buffer: bytes, needles: tuple[bytes, ...], start: int, end: int) -> list[int]:
    """Where needles occur, ascending, at most one place a needle and line."""
    found: list[int] = []
    for needle in needles:
        at = buffer.find(needle, start, end)
        while at >= 0:
            found.append(at)
            line_end = buffer.find(b"\n", at, end)
            if line_end < 0:
                break
            at = buffer.find(needle, line_end, end)
    found.sort()
    return found

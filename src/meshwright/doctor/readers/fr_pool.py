"""Reads many Flight Recorder dumps on all cores: forked workers send columns back as bytes.

A worker that dies or takes too long loses the file that it was reading, no other.
"""

from __future__ import annotations

import faulthandler
import gc
import marshal
import os
import select
import signal
import struct
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from meshwright.doctor.incident import Table
from meshwright.doctor.readers.fr_rows import Dump, Tables
from meshwright.errors import InputError

#: One file may take this long, about a thousand times what a dump of 2,000 entries takes.
FILE_TIMEOUT_S = 60.0
_HEAD = struct.Struct("<iQ")
_MAX_MESSAGE = 1 << 31
COLUMNS = {"group": "i", "signature": "i", "stack": "i", "seq": "q", "record": "q"} | {
    "state": "b",
    "p2p": "b",
    "created_ns": "q",
}


@dataclass(slots=True)
class _Worker:
    pid: int
    pipe: int
    files: list[int]
    buffer: bytearray = field(default_factory=bytearray)
    done: int = 0
    last: float = field(default_factory=time.monotonic)
    numbers: dict[str, list[int]] = field(default_factory=lambda: {"groups": [], "signatures": [], "stacks": []})


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _plain(dump: Dump) -> tuple[Any, ...]:
    columns = {name: column.tobytes() for name, column in dump.columns.items()}
    return dump.backend, columns, dump.config, dump.ids, dump.status, dump.place, dump.dropped, dump.meta


def _work(files: Sequence[int], parse: Callable[[int, Tables], Dump], pipe: int) -> None:
    """The worker: every file becomes one message, with the rows that the tables gained."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    faulthandler.disable()
    gc.disable()
    tables = Tables()
    sent = [0, 0, 0]
    for place, index in enumerate(files):
        try:
            dump: Any = _plain(parse(index, tables))
        except InputError as error:
            dump = str(error)
        except Exception as error:  # whatever a hostile file leads to ends here
            dump = f"a dump could not be read ({type(error).__name__})"
        gained = []
        own: tuple[Table[Any], ...] = (tables.groups, tables.signatures, tables.stacks)
        for place_of, table in enumerate(own):
            rows: list[Any] = table.rows[sent[place_of] :]
            sent[place_of] = len(table)
            gained.append([[tuple(f) for f in row] for row in rows] if place_of == 2 else [tuple(row) for row in rows])
        message = marshal.dumps((gained, dump))
        view = memoryview(_HEAD.pack(index, len(message)) + message)
        while view:
            view = view[os.write(pipe, view) :]
        if place % 16 == 15:
            gc.collect()


def _start(files: list[int], parse: Callable[[int, Tables], Dump], others: Sequence[int]) -> _Worker:
    out, into = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            for pipe in (out, *others):
                os.close(pipe)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            _work(files, parse, into)
        finally:
            os._exit(0)
    os.close(into)
    return _Worker(pid, out, files)


def _messages(worker: _Worker) -> Iterator[tuple[int, Any]]:
    """Complete messages in a worker's buffer."""
    while len(worker.buffer) >= _HEAD.size:
        index, size = _HEAD.unpack_from(worker.buffer)
        if len(worker.buffer) < _HEAD.size + size:
            return
        with memoryview(worker.buffer) as view:
            message = marshal.loads(view[_HEAD.size : _HEAD.size + size])
        del worker.buffer[: _HEAD.size + size]
        worker.done += 1
        worker.last = time.monotonic()
        yield index, message


def _stop(worker: _Worker) -> None:
    os.close(worker.pipe)
    with suppress(ProcessLookupError):
        os.kill(worker.pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(worker.pid, 0)


def read_all(
    count: int,
    parse: Callable[[int, Tables], Dump],
    take: Callable[[int, Any, _Worker], None],
    lost: Callable[[int], None],
) -> None:
    """Have ``parse(index, tables)`` done for 0 ... count - 1 in forked workers.

    ``take(index, message, worker)`` gets what came of each, ``lost(index)`` the files on which a worker died or took
    longer than ``FILE_TIMEOUT_S``.
    """
    workers: list[_Worker] = []
    crew = max(1, min(cores(), count))
    for first in range(crew):
        workers.append(_start(list(range(first, count, crew)), parse, [w.pipe for w in workers]))
    try:
        while workers:
            ready, _, _ = select.select([w.pipe for w in workers], [], [], 1.0)
            for worker in list(workers):
                over = False
                if worker.pipe in ready:
                    data = os.read(worker.pipe, 1 << 20)
                    worker.buffer += data
                    for index, message in _messages(worker):
                        take(index, message, worker)
                    over = not data
                if not over and time.monotonic() - worker.last <= FILE_TIMEOUT_S:
                    continue
                workers.remove(worker)
                _stop(worker)
                if worker.done < len(worker.files):
                    lost(worker.files[worker.done])
                    rest = worker.files[worker.done + 1 :]
                    if rest:
                        workers.append(_start(rest, parse, [w.pipe for w in workers]))
    finally:
        for worker in workers:
            _stop(worker)


def arrays(columns: dict[str, bytes]) -> dict[str, array[int]]:
    """Columns from the bytes of a message."""
    out = {}
    for name, code in COLUMNS.items():
        out[name] = array(code)
        out[name].frombytes(columns[name])
    return out

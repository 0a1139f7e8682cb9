"""Work on many files by forked processes, one a core: each result comes back as bytes over a pipe.

A process that dies or takes too long loses the file that it was at, no other.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import wait

_HEAD = struct.Struct("<iQ")


@dataclass(slots=True)
class _Worker:
    number: int
    pid: int
    pipe: int
    items: list[int]
    buffer: bytearray = field(default_factory=bytearray)
    done: int = 0
    last: float = field(default_factory=time.monotonic)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(
    items: Sequence[int],
    work: Callable[[int], bytes],
    take: Callable[[int, int, bytes], None],
    lost: Callable[[int, str], None],
    limit_s: Callable[[int], float],
    tidy_every: int = 1,
) -> None:
    """Have ``work(item)`` done for all items, ``take`` what came of each; ``lost`` gets those whose process failed,
    and how it did.

    ``items`` are dealt out in their order, so the largest should stand first. ``work`` raises nothing but what ends
    its process; what it remembers from one item to the next is of its process, whose number ``take`` is told before
    item and message. Each process collects its garbage behind every ``tidy_every`` items.
    """
    crew = max(1, min(cores(), len(items)))
    workers: list[_Worker] = []
    numbers = count()

    def start(rest: list[int]) -> None:
        workers.append(_start(next(numbers), rest, work, tidy_every, [w.pipe for w in workers]))

    for first in range(crew):
        start(list(items[first::crew]))
    try:
        while workers:
            ready = wait([w.pipe for w in workers], 1.0)  # select.select ends at descriptor 1,023
            for worker in list(workers):
                over = worker.pipe in ready and _receive(worker, take)
                late = worker.done < len(worker.items) and (
                    time.monotonic() - worker.last > limit_s(worker.items[worker.done])
                )
                if not over and not late:
                    continue
                workers.remove(worker)
                end = _stop(worker)
                if worker.done < len(worker.items):
                    item = worker.items[worker.done]
                    lost(item, f"took longer than {limit_s(item):.0f} s" if late and not over else f"its process {end}")
                    rest = worker.items[worker.done + 1 :]
                    if rest:
                        start(rest)
    finally:
        for worker in workers:
            _stop(worker)


def _receive(worker: _Worker, take: Callable[[int, int, bytes], None]) -> bool:
    """Read what there is; whether the worker has closed its end."""
    data = os.read(worker.pipe, 1 << 20)
    worker.buffer += data
    for index, message in _messages(worker):
        take(worker.number, index, message)
    return not data


def _work(items: Sequence[int], work: Callable[[int], bytes], tidy_every: int, pipe: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    faulthandler.disable()
    gc.disable()
    gc.freeze()  # what is inherited is the parent's to finalize
    for place, item in enumerate(items, 1):
        message = work(item)
        view = memoryview(_HEAD.pack(item, len(message)) + message)
        while view:
            view = view[os.write(pipe, view) :]
        del message, view
        if place % tidy_every == 0:
            gc.collect()


def _start(
    number: int, items: list[int], work: Callable[[int], bytes], tidy_every: int, others: Sequence[int]
) -> _Worker:
    out, into = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            for pipe in (out, *others):
                os.close(pipe)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            _work(items, work, tidy_every, into)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(into)
    return _Worker(number, pid, out, items)


def _messages(worker: _Worker) -> Iterator[tuple[int, bytes]]:
    while len(worker.buffer) >= _HEAD.size:
        index, size = _HEAD.unpack_from(worker.buffer)
        if len(worker.buffer) < _HEAD.size + size:
            return
        message = bytes(worker.buffer[_HEAD.size : _HEAD.size + size])
        del worker.buffer[: _HEAD.size + size]
        worker.done += 1
        worker.last = time.monotonic()
        yield index, message


def _stop(worker: _Worker) -> str:
    """End the process, and how it had ended."""
    os.close(worker.pipe)
    with suppress(ProcessLookupError):
        os.kill(worker.pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"
    return "ended"

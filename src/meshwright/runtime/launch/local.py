"""Ranks as processes of this machine, with a clean death: the first cause is shown, all end, none is orphaned.

Ranks are forked from a clean server process that has imported torch once (``multiprocessing``'s forkserver), so the
caller may hold threads, and need not import torch at all. Rank 0 opens the rendezvous store on a free loopback port
and its number is passed on, so that two launches never race for one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from meshwright.errors import InputError, MeshwrightError

#: How long other ranks may still report after the first error, so that the cause is found among what follows from it.
GRACE_S = 0.5
#: How long a rank may take to end after it was told to.
END_S = 2.0
MAX_LOCAL_RANKS = 64
HOST = "127.0.0.1"


class RankError(MeshwrightError):
    """A rank failed or was too late. ``trace`` is its traceback, for who wants it."""

    exit_code = 1

    def __init__(self, line: str, trace: str = "") -> None:
        super().__init__(line)
        self.trace = trace


@dataclass(slots=True)
class _Rank:
    """One rank as its launcher sees it."""

    number: int
    process: ForkServerProcess
    pipe: Connection
    result: Any = None
    done: bool = False
    error: tuple[type[MeshwrightError] | None, str, str, bool] | None = field(default=None)


def run_local(
    target: Callable[..., Any],
    world: int,
    args: Sequence[Any] = (),
    timeout_s: float = 600.0,
    *,
    port: int = 0,
    backend: str = "gloo",
    started: Callable[[list[int]], None] | None = None,
) -> list[Any]:
    """Run ``target(rank, *args)`` on ``world`` ranks and return their results in rank order.

    Args:
        target: an importable function; each rank has initialised torch.distributed (unless ``world`` is 1) and runs
            on one thread.
        world: number of ranks.
        args: the same for all ranks; pickled.
        timeout_s: bound on the whole call and on every collective in it.
        port: of the rendezvous store on loopback; 0: a free one.
        backend: of torch.distributed.
        started: is told the process ids of the ranks, by rank.

    Raises:
        RankError: a rank failed, was killed, or had no result in time. All ranks are ended by then.
        MeshwrightError: as a rank raised it (bad input, an illegal layout).
    """
    if not 1 <= world <= MAX_LOCAL_RANKS:
        raise InputError(f"{world} local ranks; this machine is asked for 1 to {MAX_LOCAL_RANKS}")
    context = start_server()
    began = time.monotonic()
    ranks: list[_Rank] = []
    try:
        for number in range(world):
            ours, theirs = context.Pipe()
            rest = (world, HOST, port, backend, timeout_s, theirs, target, tuple(args))
            process = context.Process(target=_start, args=(number, *rest), daemon=True, name=f"rank {number}")
            process.start()
            theirs.close()
            ranks.append(_Rank(number, process, ours))
        if started is not None:
            started([rank.process.pid or 0 for rank in ranks])
        _collect(ranks, began + timeout_s)
        _raise_first(ranks, timeout_s)
        return [rank.result for rank in ranks]
    finally:
        _end(ranks)


def start_server(more: Sequence[str] = ()) -> ForkServerContext:
    """Start the process from which ranks are forked, unless it runs already; it imports torch while the caller goes on.

    Args:
        more: modules that it imports beside those that every rank needs.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["meshwright.runtime.launch.preload", *more])
    with _starting, _no_modules_from_here():
        forkserver.ensure_running()
    return context


#: The environment is of the whole process: two threads that start at once would leave it changed.
_starting = threading.Lock()


@contextmanager
def _no_modules_from_here() -> Iterator[None]:
    """The server imports no file of the folder that it is started in, which may be that of a stranger's model.

    It runs ``python -c``, which would look there first; ranks get the paths of their caller (PEP 587, ``safe_path``).
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


@contextmanager
def server_ahead(more: Sequence[str] = ()) -> Iterator[None]:
    """Start the server before what it is for is known to be right; a refusal inside ends it and leaves no process."""
    running = _server_pid()
    start_server(more)
    try:
        yield
    except MeshwrightError:
        pid = _server_pid()
        if running is None and pid is not None:
            os.kill(pid, signal.SIGKILL)
        raise


def _server_pid() -> int | None:
    return forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined, no-any-return]


def _start(*args: Any) -> None:
    """Entry of a rank process; torch is imported here (or was, by the server) and not by the launcher."""
    from meshwright.runtime.launch.rank import rank_main

    rank_main(*args)


def _collect(ranks: list[_Rank], deadline: float) -> None:
    """Read reports until all are done, one fails (plus a grace for its cause), or the deadline passes."""
    while True:
        open_ranks = [r for r in ranks if not r.done and r.error is None]
        left = deadline - time.monotonic()
        if not open_ranks or left <= 0:
            return
        pipes = {r.pipe: r for r in open_ranks}
        for ready in wait(list(pipes), left):
            _read(pipes[ready], ranks)  # type: ignore[index]
        if any(r.error for r in ranks):
            deadline = min(deadline, time.monotonic() + GRACE_S)
            if any(r.error and not r.error[3] for r in ranks):
                return


def _read(rank: _Rank, ranks: list[_Rank]) -> None:
    """One report of a rank: the port (passed on), its result, its error; or the end of its pipe."""
    try:
        kind, *values = rank.pipe.recv()
    except (EOFError, OSError):
        rank.process.join(END_S)
        code = rank.process.exitcode
        rank.error = (None, _ending(code), "", False)
        return
    if kind == "port":
        for other in ranks:
            if other is not rank:
                _tell(other, values[0])
    elif kind == "result":
        rank.result, rank.done = values[0], True
    else:
        rank.error = values[0], values[1], values[2], values[3]


def _ending(code: int | None) -> str:
    """How a process left that had nothing to report."""
    if code is not None and code < 0:
        hint = ", as the kernel does when memory runs out" if -code == signal.SIGKILL else ""
        return f"was ended by signal {-code} ({signal.strsignal(-code)}){hint}"
    return f"left with exit code {code} before it had a result"


def _tell(rank: _Rank, port: int) -> None:
    """Send the port; a rank that is gone already is noticed when its pipe is read."""
    try:
        rank.pipe.send(port)
    except OSError:
        return


def _raise_first(ranks: list[_Rank], timeout_s: float) -> None:
    """Raise the cause: an error of its own before one that only follows, the lowest rank first."""
    failed = sorted((r for r in ranks if r.error), key=lambda r: (r.error[3] if r.error else False, r.number))
    others = len(ranks) - 1
    stopped = f"; the other {others} rank{'s were' if others > 1 else ' was'} stopped" if others else ""
    if failed and failed[0].error is not None:
        kind, line, trace, _ = failed[0].error
        if kind is not None:
            raise kind(line)
        raise RankError(f"rank {failed[0].number} of {len(ranks)} {_verb(line)}{stopped}", trace)
    late = [str(r.number) for r in ranks if not r.done]
    if late:
        who = f"rank{'s' if len(late) > 1 else ''} {', '.join(late)}"
        raise RankError(f"no result of {who} within {timeout_s:g} s; all {len(ranks)} were stopped")


def _verb(line: str) -> str:
    return line if line.startswith(("was ", "left ")) else f"failed: {line}"


def _end(ranks: list[_Rank]) -> None:
    """Stop whatever still runs and reap everything."""
    for rank in ranks:
        rank.pipe.close()
        if rank.done:
            rank.process.join(END_S)
        if rank.process.is_alive():
            rank.process.kill()
    for rank in ranks:
        rank.process.join(END_S)

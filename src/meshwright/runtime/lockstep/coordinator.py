"""Holds every rank's operations until their peers have come, and says what is wrong when they cannot.

One thread, one selector, the pure ``Matcher``. Ranks are forked children that were handed a socket each.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.ledger.matching import HAND_OFFS
from meshwright.ledger.waiting import How, Matcher, Ticket, Verdict
from meshwright.runtime.callsite import is_users
from meshwright.runtime.lockstep.link import as_call

#: After the first finding other ranks may go on this long until they wait or leave as well.
SETTLE_S = 1.0
#: The same where a rank failed: others may be about to fail in the same way.
SETTLE_FAILED_S = 4.0
#: How often waiting is looked at while messages keep coming, and how long a silence calls for a look.
LOOK_S, SILENCE_S = 0.5, 0.03
#: Without any message, ranks that went on in an unsafe order are taken to be stuck.
UNSAFE_S = 5.0
#: How often memory and disk are looked at, and what must be left of the disk.
MEMORY_S, MIN_SPACE_BYTES = 0.5, 512 << 20
#: A line of faulthandler.
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+) in ')
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Rank:
    """One rank as the coordinator sees it."""

    number: int
    pid: int
    sock: socket.socket
    pending: bytearray = field(default_factory=bytearray)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    exit: dict[str, Any] | None = None
    steps: int = 0


@dataclass(slots=True)
class _Held:
    number: int
    tickets: list[Ticket]
    in_call: bool
    is_init: bool


@dataclass(slots=True)
class Ending:
    """How a dry-run ended: ``finished``, ``found``, ``timeout``, ``memory``, ``space`` (the disk is full)."""

    how: str
    verdict: Verdict | None = None
    unsafe: Verdict | None = None
    where: dict[int, str] = field(default_factory=dict)
    memory_bytes: int = 0


class Coordinator:
    """Runs one dry-run to its end.

    Args:
        ranks: forked, their sockets open.
        timeout_s: bound on the run.
        memory_bytes: bound on what all ranks hold together.
        scratch: where ranks write where they are (``rankN.stack``).
    """

    def __init__(self, ranks: list[Rank], timeout_s: float, memory_bytes: int, scratch: Path) -> None:
        self.ranks = ranks
        self.matcher = Matcher(len(ranks))
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s, self._memory_bytes, self._scratch = timeout_s, memory_bytes, scratch
        self._held: dict[tuple[int, int], _Held] = {}
        self._port: int | None = None
        self._unsafe: Verdict | None = None
        self._selector = selectors.DefaultSelector()
        for rank in ranks:
            rank.sock.setblocking(False)
            self._selector.register(rank.sock, selectors.EVENT_READ, rank)

    def run(self) -> Ending:
        """Serve the ranks until all have left, something is wrong, or a bound is reached."""
        settled: float | None = None
        last = looked = weighed = time.monotonic()
        while True:
            ready = self._selector.select(SILENCE_S)
            for key, _ in ready:
                self._read(key.data)
            now = time.monotonic()
            last = now if ready else last
            if all(r.exit is not None for r in self.ranks):
                return self._ended("finished", self.matcher.verdict())
            if now >= self._deadline:
                return self._late(now - last)
            if now - weighed > MEMORY_S:
                weighed, used = now, self._used()
                if used > self._memory_bytes:
                    return Ending("memory", memory_bytes=used)
                space = os.statvfs(self._scratch)
                if space.f_bavail * space.f_frsize < MIN_SPACE_BYTES:
                    return Ending("space")
            if ready and now - looked < LOOK_S and not self.matcher.wrong:
                continue
            looked = now
            verdict = self.matcher.verdict()
            if verdict is None or (verdict.kind == "deadlock" and self._let_go(verdict)):
                settled = None
                if self._unsafe is not None and now - last > UNSAFE_S:
                    return self._ended("found", self._unsafe)
                continue
            if settled is None:
                settled = now + (SETTLE_FAILED_S if verdict.kind == "peer_failed" else SETTLE_S)
            if self.matcher.quiet() or now >= settled:
                return self._ended("found", verdict)

    def _ended(self, how: str, verdict: Verdict | None) -> Ending:
        return Ending("found" if verdict is not None else how, verdict, self._unsafe)

    def _read(self, rank: Rank) -> None:
        """All that a rank has said, or its end."""
        try:
            data = rank.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._selector.unregister(rank.sock)
            if rank.exit is None:
                self._leave(rank, _ending(rank.pid))
            return
        rank.pending += data
        *lines, rest = rank.pending.split(b"\n")
        rank.pending = bytearray(rest)
        for line in lines:
            self._take(rank, json.loads(line))

    def _take(self, rank: Rank, message: dict[str, Any]) -> None:
        say = message["say"]
        if say == "post":
            self._post(rank, message)
        elif say == "wait":
            tickets = [t for n in message["tickets"] if (t := rank.tickets.pop(n, None)) is not None]
            self._hold(rank, message["thread"], _Held(message["number"], tickets, False, False))
        elif say == "step":
            rank.steps = message["steps"]
        elif say == "thread_end":
            self.matcher.thread_ended(rank.number, message["thread"])
        elif say == "exit":
            self._leave(rank, message)

    def _post(self, rank: Rank, message: dict[str, Any]) -> None:
        if message.get("port") is not None:
            self._port = message["port"]
        call, before = as_call(message["call"]), self.matcher.matched
        ticket = self.matcher.post(call)
        if message["hold"]:
            held = _Held(message["number"], [ticket], True, call.op == "init_process_group")
            self._hold(rank, message["thread"], held)
        else:
            rank.tickets[message["number"]] = ticket
        if self.matcher.matched != before:
            for (number, thread), held in list(self._held.items()):
                if all(t.matched for t in held.tickets):
                    self._go(self.ranks[number], thread, held)

    def _hold(self, rank: Rank, thread: int, held: _Held) -> None:
        self._held[rank.number, thread] = held
        if self.matcher.wait(rank.number, held.tickets, thread=thread):
            self._go(rank, thread, held)

    def _go(self, rank: Rank, thread: int, held: _Held, *, unmatched: bool = False) -> None:
        if self._held.pop((rank.number, thread), None) is None:
            return
        answer: dict[str, Any] = {"go": held.number}
        if unmatched:
            answer["unmatched"] = True
        if held.is_init:
            answer["port"] = self._port
        rank.sock.setblocking(True)
        try:
            rank.sock.sendall(json.dumps(answer).encode() + b"\n")
        except OSError:
            return
        finally:
            rank.sock.setblocking(False)

    def _let_go(self, verdict: Verdict) -> bool:
        """Ranks of a cycle that are held in an asynchronous call go on: only their later waits can hang.

        Where the cycle is of collectives alone the order is unsafe with NCCL, whose communicators must be used in one
        order by all ranks (NCCL user guide, "Using multiple NCCL communicators concurrently").
        """
        gone, unsafe = False, all(c.op not in HAND_OFFS for c in verdict.calls if c.rank in verdict.cycle)
        for (number, thread), held in list(self._held.items()):
            if number in verdict.cycle and held.in_call and held.tickets[0].call.is_async:
                self._unsafe = self._unsafe or (verdict if unsafe else None)
                self.ranks[number].tickets[held.number] = held.tickets[0]
                self.matcher.release(number, thread)
                self._go(self.ranks[number], thread, held, unmatched=True)
                gone = True
        return gone

    def _leave(self, rank: Rank, report: dict[str, Any]) -> None:
        rank.exit = report
        how: How = report["how"]
        site = f" ({report['site']})" if report.get("site") else ""
        self.matcher.exited(rank.number, how, f"{report.get('why') or ''}{site}")

    def _late(self, silent_s: float) -> Ending:
        """Out of time: ranks that others wait for and that said nothing for long are named with where they are."""
        waiting = self.matcher.waiting()
        if not waiting or silent_s < max(3.0, self._timeout_s / 3):
            return Ending("timeout", unsafe=self._unsafe)
        running = [r for r in self.ranks if r.exit is None and r.number not in waiting]
        for rank in running:
            os.kill(rank.pid, signal.SIGUSR2)
        time.sleep(0.3)
        where = {r.number: _stack(self._scratch / f"rank{r.number}.stack") for r in running}
        return Ending("timeout", None, self._unsafe, where)

    def _used(self) -> int:
        """Bytes that the ranks hold for themselves. Notices a rank that is gone while a child of it keeps its line."""
        total = 0
        for rank in self.ranks:
            try:
                _, resident, shared = Path(f"/proc/{rank.pid}/statm").read_text().split()[:3]
            except OSError:
                continue
            if int(resident) == 0 and rank.exit is None:
                self._leave(rank, _ending(rank.pid))
            total += (int(resident) - int(shared)) * _PAGE
        return total

    def close(self) -> None:
        """End every rank with whatever it started, and reap it."""
        for rank in self.ranks:
            for end, number in ((os.killpg, rank.pid), (os.kill, rank.pid)):
                try:
                    end(number, signal.SIGKILL)
                except OSError:
                    continue
        for rank in self.ranks:
            rank.sock.close()
            try:
                os.waitpid(rank.pid, 0)
            except ChildProcessError:
                continue
        self._selector.close()


def _ending(pid: int) -> dict[str, Any]:
    """How a process left that said nothing."""
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return {"how": "killed", "why": "is gone"}
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return {"how": "finished"}
    why = f"ended by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"left with exit code {code}"
    return {"how": "killed", "why": why}


def _stack(path: Path) -> str:
    """The user's line on the stack that a rank wrote (innermost first), empty if there is none."""
    try:
        text = path.read_text(errors="replace")[-20_000:]
    except OSError:
        return ""
    mirrored = f"{path.parent / 'cwd'}{os.sep}"
    for name, line in _FRAME.findall(text):
        if is_users(name):
            return f"{name.removeprefix(mirrored)}:{line}"
    return ""

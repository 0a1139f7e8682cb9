"""Start the real engine with a planned command, wait until it is healthy, hold its boot log against the plan.

The engine runs in a process group of its own, which ends with us: by SIGTERM, and by SIGKILL where that does not help.
What it prints goes to a file as it is printed.
"""

from __future__ import annotations

import http.client
import itertools
import os
import re
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import InputError, MeshwrightError
from meshwright.specs.command import Command

#: Between two questions after its health, and the longest it may take to end.
POLL_S, END_S = 0.5, 60.0
#: Lines of the log that are shown when it ended, and bytes that they are taken from.
TAIL_LINES, TAIL_BYTES = 12, 1 << 16
#: An error as Python prints it, and lines of a log that are searched for the first.
ERROR, MAX_LINES = re.compile(r"\b[A-Z]\w*(?:Error|Exception): .+"), 1_000_000
#: Where servers listen unless told otherwise, and addresses that mean every one of this machine.
LOOPBACK, ANYWHERE = "127.0.0.1", ("0.0.0.0", "::")
#: Purposes of commands that start a server on this node; others prepare a cluster or belong to other nodes.
STARTS = ("serve", "router")
#: It is asked directly, whatever proxy the environment names.
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class EngineFailed(MeshwrightError):
    """The engine ended, or was not healthy in time."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Start:
    """What is started here.

    Attributes:
        words: of the command. env: it needs. others: commands for other nodes, or that come before.
        port: on which it will answer. host: address that it listens on.
    """

    words: tuple[str, ...]
    env: Mapping[str, str]
    others: tuple[Command, ...]
    port: int
    host: str = LOOPBACK


def start_of(
    commands: Sequence[Command], program: Sequence[str], more: Sequence[str], port: int, host: str = LOOPBACK
) -> Start:
    """Of a plan's commands the one that serves on this node.

    Args:
        commands: of the plan. program: replaces the name of the engine's program; empty: as planned.
        more: flags behind it. port: of the server. host: address it listens on (vLLM's own default is every one).

    Raises:
        InputError: no command serves here, or it needs a shell.
    """
    here = [c for c in commands if c.purpose in STARTS and c.node in {None, 0}]
    if not here:
        raise InputError("the plan has no command that serves on this node; ask for another --deployment")
    words = shlex.split(here[0].text)
    if any(word in {"|", "&&", "||", ";", ">", "<"} for word in words) or "$(" in here[0].text:
        raise InputError(f"the planned command needs a shell and is not started: {here[0].text[:120]}")
    head = list(program) or words[:1]
    others = tuple(c for c in commands if c is not here[0])
    where = ("--host", host, "--port", str(port))
    return Start((*head, *words[1:], *more, *where), dict(here[0].env), others, port, host)


class Running:
    """An engine that was started.

    Args:
        start: what. log: file that it prints to. folder: it runs in.

    Raises:
        InputError: its program is not there, its port is taken, or the log cannot be written.
    """

    def __init__(self, start: Start, log: Path, folder: Path | None = None) -> None:
        self.start, self.log = start, log
        _free(start.host, start.port)
        try:
            out = log.open("wb")
        except OSError as error:
            raise InputError(f"--log {log}: {error.strerror}") from None
        with out:
            try:
                self.process = subprocess.Popen(
                    start.words,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **start.env},
                    cwd=folder,
                    start_new_session=True,
                )
            except OSError as error:
                raise InputError(
                    f"{start.words[0]}: cannot be started ({error.strerror}); install the engine, or name its program "
                    "with --program"
                ) from None

    @property
    def url(self) -> str:
        """Where it answers."""
        host = LOOPBACK if self.start.host in ANYWHERE else self.start.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.start.port}"

    def wait_healthy(self, timeout_s: float, say: Callable[[str], None]) -> float:
        """Until ``/health`` answers 200; seconds that it took. ``say`` is told every ten seconds what it last printed.

        Raises:
            EngineFailed: it ended first, or took too long.
        """
        began = told = time.monotonic()
        while not self._healthy():
            now = time.monotonic()
            if self.process.poll() is not None:
                raise EngineFailed(
                    f"the engine left with exit code {self.process.returncode} after {now - began:.0f} s: "
                    f"{self.cause()}\nthe end of {self.log}:\n{self.tail()}"
                )
            if now - began > timeout_s:
                raise EngineFailed(
                    f"the engine was not healthy within {timeout_s:g} s; the end of {self.log}:\n{self.tail()}"
                )
            if now - told > 10:
                told = now
                say(f"{now - began:.0f} s: {(self.tail().splitlines() or ['nothing printed yet'])[-1][:110]}")
            time.sleep(POLL_S)
        return time.monotonic() - began

    def _healthy(self) -> bool:
        try:
            with NO_PROXY.open(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, ValueError, http.client.HTTPException):
            return False

    def cause(self) -> str:
        """The first error that its log names: what follows it is usually other processes that noticed."""
        with self.log.open("rb") as file:
            for line in itertools.islice(file, MAX_LINES):
                if found := ERROR.search(line.decode(errors="replace")):
                    return _printable(found[0])
        return "its log names no error"

    def tail(self) -> str:
        """The end of its log, printable."""
        with self.log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return "\n".join([_printable(line) for line in text.splitlines() if line.strip()][-TAIL_LINES:])

    def wait(self) -> int:
        """Until it ends by itself; its exit code."""
        return self.process.wait()

    def stop(self) -> None:
        """End it and all it started; a second Ctrl-C ends the patience."""
        try:
            if self._group(signal.SIGTERM):
                self.process.wait(END_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            pass
        self._group(signal.SIGKILL)
        self.process.wait()

    def _group(self, number: signal.Signals) -> bool:
        """Signal its process group; False where none is left."""
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        return int(free.getsockname()[1])


def _free(host: str, port: int) -> None:
    """Refuse a port that somebody listens on already: their answers would pass for those of the engine.

    Raises:
        InputError: it is taken.
    """
    try:
        socket.create_connection((LOOPBACK if host in ANYWHERE else host, port), timeout=2).close()
    except OSError:
        return
    raise InputError(f"port {port} on {host} is taken; choose another with --port, or --port 0 for a free one")


def _printable(line: str) -> str:
    return "".join(c for c in line if c.isprintable())[:300]

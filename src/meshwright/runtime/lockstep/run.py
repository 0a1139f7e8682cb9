"""Runs a command in lockstep: starts the process that forks the ranks, asks it, and reads what it found. No torch here.

``Lockstep`` may be used for several commands; torch is imported once.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from meshwright.errors import InputError
from meshwright.runtime.lockstep.command import Job, read_command
from meshwright.runtime.lockstep.outcome import Outcome, from_answer

MAX_WORLD = 128
#: Bound on importing torch and what a script needs, on a loaded machine.
START_S = 180.0
#: How long ranks may take to be ended.
END_S = 10.0
#: Share of the memory that is free at the start.
MEMORY_SHARE = 0.8


class Lockstep:
    """The process that forks ranks; ``with Lockstep() as lockstep: lockstep.check(words, world=4)``."""

    def __init__(self) -> None:
        env = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
        began = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "meshwright.runtime.lockstep.zygote"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, start_new_session=True,
        )  # fmt: skip
        self._pending = b""
        self._read(START_S)
        self.start_s = time.monotonic() - began

    def __enter__(self) -> Lockstep:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the process; it ends its ranks and what they started, and removes its scratch folder."""
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def check(
        self,
        words: Sequence[str],
        world: int,
        *,
        timeout_s: float = 60.0,
        steps: int | None = None,
        folder: Path | None = None,
    ) -> Outcome:
        """Run a command on ``world`` ranks and say what was found.

        Args:
            words: the command.
            world: number of ranks.
            timeout_s: bound on the run, imports left out.
            steps: optimizer steps behind which a rank stops; None: to the end.
            folder: that the command runs in; default: this one.

        Raises:
            InputError: the command cannot be taken apart, or the script is not there.
        """
        if not 2 <= world <= MAX_WORLD:
            raise InputError(f"--world {world}: a dry-run takes 2 to {MAX_WORLD} ranks")
        home = (folder or Path.cwd()).resolve()
        job = read_command(words)
        if not job.is_module and not (home / job.script).is_file():
            raise InputError(f"{job.script}: no such script in {home}")
        answer = self._ask(_request(job, world, home, timeout_s, steps), timeout_s)
        answer["seconds"] = {"start": self.start_s, **answer["seconds"]}
        return from_answer(answer, world, timeout_s)

    def _ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return self._read(timeout_s + START_S)

    def _read(self, timeout_s: float) -> dict[str, Any]:
        """One line of the process.

        Raises:
            InputError: it has ended, or is too late.
        """
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.close()
                    raise InputError(f"the dry-run did not answer within {timeout_s:g} s; use fewer ranks or steps")
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    self.close()
                    raise InputError("the dry-run could not start: torch cannot be imported, or it was killed")
                self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found


def _request(job: Job, world: int, home: Path, timeout_s: float, steps: int | None) -> dict[str, Any]:
    local = job.per_node if job.per_node and job.per_node <= world and world % job.per_node == 0 else world
    return {
        "script": job.script, "is_module": job.is_module, "args": job.args, "env": job.env, "world": world,
        "local_world": local, "home": str(home), "timeout_s": timeout_s, "steps": steps,
        "memory_bytes": int(_free_bytes() * MEMORY_SHARE),
    }  # fmt: skip


def _free_bytes() -> int:
    """Memory that can be had, by Linux; elsewhere half of what there is."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def check(
    words: Sequence[str], world: int, *, timeout_s: float = 60.0, steps: int | None = None, folder: Path | None = None
) -> Outcome:
    """Run one command in lockstep; see ``Lockstep.check``."""
    read_command(words)
    with Lockstep() as lockstep:
        return lockstep.check(words, world, timeout_s=timeout_s, steps=steps, folder=folder)

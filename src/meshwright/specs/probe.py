"""The only way in which detection touches the machine: bounded commands and bounded file reads.

What comes back is untrusted text; tests hand in a Probe with recorded answers.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from threading import Timer

#: Longest that one command may run, and most that is read of its output or of a file.
TIMEOUT_S = 5.0
MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Probe:
    """Reads this machine.

    Attributes:
        root: where ``/proc`` and ``/sys`` are looked for.
        environ: environment of the process.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def installed(self, program: str) -> bool:
        """Whether a program is on the path."""
        return which(program, path=self.environ.get("PATH")) is not None

    def run(self, command: Sequence[str]) -> str | None:
        """Standard output of ``command``; None when it is not installed, fails, or takes more than 5 seconds."""
        program = which(command[0], path=self.environ.get("PATH"))
        if program is None:
            return None
        try:
            process = subprocess.Popen(
                [program, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**self.environ, "LC_ALL": "C"},
            )
        except OSError:
            return None
        assert process.stdout is not None
        timer = Timer(TIMEOUT_S, _kill, (process,))
        timer.start()
        try:
            data = process.stdout.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                _kill(process)
            code = process.wait()
        finally:
            timer.cancel()
            process.stdout.close()
        return data[:MAX_BYTES].decode("utf-8", "replace") if code == 0 else None

    def read(self, path: str) -> str | None:
        """Text of a file below ``root``; None when it cannot be read."""
        try:
            with (self.root / path.lstrip("/")).open("rb") as stream:
                return stream.read(MAX_BYTES).decode("utf-8", "replace")
        except OSError:
            return None

    def names(self, path: str) -> tuple[str, ...]:
        """Sorted names in a folder below ``root``; () when it cannot be read."""
        try:
            return tuple(sorted(os.listdir(self.root / path.lstrip("/"))))
        except OSError:
            return ()

    def cores(self) -> int:
        """CPUs that this process may run on."""
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a command and what it started."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)

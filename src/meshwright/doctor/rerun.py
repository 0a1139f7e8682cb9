"""Runs a reproduction once, in a process of its own, and says whether it fails in the same way."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from meshwright.doctor.reproduce import Program

_LINE = re.compile(r"^rank ([01]) (before|after|end)(?: (\d+))?", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the run.

    Attributes:
        same: the shared beginning ended (on one rank, while the other was in its last act at least), and then not both
            ranks came to their end.
        stopped: number of the act at which each rank stopped, None where it came to its end or never began.
        says: for people, one line.
    """

    same: bool
    stopped: tuple[int | None, int | None]
    says: str


def rerun(path: Path, program: Program, timeout_s: float = 120.0) -> Outcome:
    """Run a program that ``reproduce.render`` wrote; all its processes are ended by then."""
    process = subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        out, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, errors = process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return judge(out, program, errors)


def judge(out: str, program: Program, errors: str = "") -> Outcome:
    """Read what the ranks printed."""
    began: dict[int, int] = {}
    ended: dict[int, int] = {}
    finished = set()
    for found in _LINE.finditer(out):
        rank, word = int(found[1]), found[2]
        if word == "end":
            finished.add(rank)
        else:
            (began if word == "before" else ended)[rank] = int(found[3] or 0)
    if set(began) != {0, 1}:
        last = (errors.strip().splitlines() or ["no output"])[-1][:200]
        return Outcome(False, (None, None), f"the reproduction did not start: {last}")
    stopped = tuple(None if rank in finished else began[rank] for rank in (0, 1))
    alike = program.shared - 1  # a rank that dies right behind it may take the other's end of it along
    through = max(ended.get(rank, -1) for rank in (0, 1)) >= alike and min(began.values()) >= alike
    same = through and len(finished) < 2
    where = " and ".join(
        f"rank {rank} at {program.acts[rank][at].op}" for rank, at in enumerate(stopped) if at is not None
    )
    if same:
        return Outcome(True, (stopped[0], stopped[1]), f"the reproduction fails the same way: it stops with {where}")
    said = "both ranks came to their end" if len(finished) == 2 else f"it stops too early, with {where}"
    return Outcome(False, (stopped[0], stopped[1]), f"the reproduction does not fail in the same way: {said}")

"""A step that takes too long: every rank leaves what it knows where the doctor reads it, and ends.

A rank that hangs sits inside a call that no exception reaches, so a thread of its own writes and ends the process. What
it leaves: the Flight Recorder's dump (the calls of torch.distributed that it made) and the stacks of all threads.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

#: Exit code of a rank that ended itself (``EX_TEMPFAIL`` of sysexits.h).
STUCK = 75
#: How long a rank waits for the others to have written too, before its end ends them.
OTHERS_S = 5.0
PERIOD_S = 0.5
#: Calls that the Flight Recorder keeps; read by torch when a process makes its first group.
CALLS = ("TORCH_FR_BUFFER_SIZE", "2000")
_FOLDER = "stuck-step-"


def keep_calls(environment: MutableMapping[str, str] | None = None) -> None:
    """Have ranks started from here on keep their calls, unless the user set how many."""
    (os.environ if environment is None else environment).setdefault(*CALLS)


def stuck_folder(base: Path, step: int) -> Path:
    """Where ranks leave what they know of a step."""
    return base / f"{_FOLDER}{step}"


def newest(base: Path, since: float) -> Path | None:
    """The folder that ranks left since a time (of ``time.time``); None: there is none."""
    found = [p for p in base.glob(f"{_FOLDER}*") if p.is_dir() and p.stat().st_mtime >= since]
    return max(found, key=lambda p: p.stat().st_mtime, default=None)


def says(folder: Path, timeout_s: float) -> str:
    """What a user is told."""
    step = folder.name.removeprefix(_FOLDER)
    count = len(list(folder.glob("stack_rank_*.txt")))
    return (
        f"step {step} took longer than {timeout_s:g} s; {count} rank{'s' if count != 1 else ''} left calls and stacks: "
        f"meshwright doctor {folder}"
    )


class Watch:
    """Watches the steps of one rank.

    Args:
        base: folder in which ``stuck-step-N`` is made.
        rank, world: this rank, of how many.
        timeout_s: longest time of a step; 0: any.
        tell: say so on the standard error, where no launcher does.
    """

    def __init__(self, base: Path, rank: int, world: int, timeout_s: float, tell: bool = False) -> None:
        self.base, self.rank, self.world, self.timeout_s, self.tell = base, rank, world, timeout_s, tell
        self._due: tuple[float, int] | None = None
        if timeout_s > 0:
            threading.Thread(target=self._run, name="meshwright-watch", daemon=True).start()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A step runs inside."""
        self._due = (time.monotonic() + self.timeout_s, number)
        try:
            yield
        finally:
            self._due = None

    def _run(self) -> None:
        while True:
            time.sleep(min(PERIOD_S, self.timeout_s / 4))
            due = self._due
            if due is not None and time.monotonic() > due[0]:
                folder = stuck_folder(self.base, due[1])
                leave_traces(folder, self.rank)
                _wait_for(folder, self.world)
                if self.tell and self.rank == 0:
                    print(says(folder, self.timeout_s), file=sys.stderr, flush=True)
                os._exit(STUCK)


def leave_traces(folder: Path, rank: int) -> None:
    """Write the calls and the stacks of this process; the stacks last, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    from torch._C import _distributed_c10d as c10d

    # Without the stack of every call: torch 2.13 never comes back from looking these up while a call is under way.
    calls = c10d._dump_fr_trace(includeCollectives=True, includeStackTraces=False)  # type: ignore[attr-defined]
    (folder / f"nccl_trace_rank_{rank}").write_bytes(calls)
    stack = folder / f".stack_rank_{rank}.txt"
    with stack.open("w", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    os.replace(stack, folder / f"stack_rank_{rank}.txt")


def _wait_for(folder: Path, world: int) -> None:
    """Until all ranks have left their stacks, or for ``OTHERS_S``."""
    end = time.monotonic() + OTHERS_S
    while time.monotonic() < end and len(list(folder.glob("stack_rank_*.txt"))) < world:
        time.sleep(PERIOD_S)
    time.sleep(PERIOD_S)  # the others see the same before the first end reaches them

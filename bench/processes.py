"""One contender of a bench as a process of its own, bounded in time, ended with all it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
#: Environment of every contender: one thread a rank, no download, this checkout.
ENV = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}


class Ended(NamedTuple):
    """What a process printed, and its exit code; None: it was ended because it took too long."""

    lines: list[str]
    code: int | None
    last_error: str


def run(words: Sequence[str], env: Mapping[str, str], timeout_s: float) -> Ended:
    """Run it in the root of the repository; ``env``: beside ``ENV`` and our own."""
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            words, env={**os.environ, **ENV, **env}, stdout=said, stderr=errors, cwd=ROOT, start_new_session=True
        )
        code: int | None = None
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        errors.seek(0)
        return Ended(said.readlines(), code, (errors.read().strip().splitlines() or ["no message"])[-1][:300])


def complain(name: str, text: str) -> None:
    """Tell whoever watches the bench."""
    print(f"{name}: {text}", file=sys.stderr)

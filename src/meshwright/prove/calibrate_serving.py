"""What a server adds to the decode steps of the own engine: ``run serve`` of a small model beside its bare steps.

A step of a server is its pass, and beside it the scheduler, a message to the ranks and one back, and the tokens on
their way to clients, which other cores do partly at the same time. What is left of the time between two tokens at a
client, beyond the same step of the bare engine, is a line over the requests that decode together.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from meshwright import engines
from meshwright.errors import InputError
from meshwright.judge.handoff import EngineFailed, Running, Start, free_port
from meshwright.ledger.schema import Entry
from meshwright.runtime.checkpoint import write_random
from meshwright.runtime.launch.local import run_local
from meshwright.runtime.load.arrivals import together
from meshwright.runtime.load.client import Target, target_of
from meshwright.runtime.load.outcome import outcome
from meshwright.runtime.load.run import Prompts, drive
from meshwright.runtime.stepbench import PROMPT, SMALL, bare_steps

#: Layers of the small model; requests that decode together; tokens of each; rounds that count.
LAYERS, TOGETHER, TOKENS, ROUNDS = 2, (1, 2, 4, 8), 48, 6
#: Token ids of prompts, below the small model's vocabulary.
VOCABULARY = 32
#: Packages without which there is no server.
PACKAGES = ("fastapi", "uvicorn")
#: Seconds for a server to come up, and to answer.
START_S = 90.0


def can_serve() -> bool:
    """Whether a server can be started here."""
    return all(importlib.util.find_spec(name) is not None for name in PACKAGES)


def serving_entries(device: str, timeout_s: float) -> list[Entry]:
    """Entries ``serve`` and ``sequence`` with their times, as ``ledger.calibrate.fit`` reads them: a line over the
    requests together. The bare engine is timed before and after the server, because a machine's speed drifts.

    Raises:
        InputError: the server did not come up. RankError: the bare engine failed.
    """
    told = engines.profile("meshwright"), device, LAYERS, TOKENS, TOGETHER
    before = run_local(bare_steps, 1, told, timeout_s, backend="gloo")[0]
    with tempfile.TemporaryDirectory(prefix="meshwright-calibrate-") as scratch:
        folder = Path(scratch) / "small"
        write_random({**SMALL, "num_hidden_layers": LAYERS}, folder, seed=0)
        with _server(folder, device) as target:
            served = [_token_s(target, count) for count in TOGETHER]
    after = run_local(bare_steps, 1, told, timeout_s, backend="gloo")[0]
    added = [s - (a + b) / 2 for s, a, b in zip(served, before, after, strict=True)]
    step, each = np.linalg.lstsq(np.array([(1.0, n) for n in TOGETHER]), np.array(added), rcond=None)[0]
    if min(step, each) < 0:
        step, each = max(0.0, float(np.median(added))), 0.0
    found = {"serve": float(step), "sequence": float(each)}
    return [Entry("rank0", op, started_ns=0, ended_ns=max(1, round(s * 1e9))) for op, s in found.items()]


def _token_s(target: Target, count: int) -> float:
    """Median seconds between two tokens of a request, ``count`` of which decode together, once it is warm."""
    for number, rounds in enumerate((1, ROUNDS)):
        timed = drive(target, together(count * rounds, PROMPT, TOKENS), Prompts(VOCABULARY, number), count)
    found = outcome(timed)
    if found.failed or found.tpot is None:
        raise InputError(f"{found.failed} of {found.requests} requests to the server of the calibration failed")
    return found.tpot.percentiles[50]


@contextmanager
def _server(folder: Path, device: str) -> Iterator[Target]:
    """``run serve`` of a folder; it ends with the block.

    Raises:
        InputError: it ended or was not healthy in time, with the last line that it printed.
    """
    port = free_port()
    words = (
        sys.executable, "-m", "meshwright", "run", "serve", str(folder), "--layout", "tp=1", "--dtype", "f32",
        "--device", device, "--port", str(port), "--no-prefix-cache",
    )  # fmt: skip
    source = Path(engines.__file__).parents[2]
    search = os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH"))))
    server = Running(Start(words, {"PYTHONPATH": search}, (), port), folder.parent / "log")
    try:
        try:
            server.wait_healthy(START_S, lambda _: None)
        except EngineFailed:
            last = (server.tail().splitlines() or ["nothing"])[-1]
            raise InputError(f"the server of the calibration did not come up; it said last: {last[:200]}") from None
        yield target_of(server.url, None, None, START_S)
    finally:
        server.stop()

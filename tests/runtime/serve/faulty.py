"""Ranks whose messages of keys and values are late or lost, on purpose."""

from __future__ import annotations

import random
import threading
from typing import Any

from torch import Tensor

from meshwright.runtime.serve import worker
from meshwright.runtime.serve.handoff import Pending, PointToPoint
from meshwright.runtime.serve.job import ServeJob, serve_rank


class _Later:
    """A message that leaves after a while."""

    def __init__(self, x: Tensor, to: int, tag: int, delay_s: float) -> None:
        self._sent = threading.Event()
        self._args = x, to, tag
        threading.Timer(delay_s, self._send).start()

    def _send(self) -> None:
        PointToPoint().send(*self._args).wait()
        self._sent.set()

    def wait(self) -> object:
        return self._sent.wait()


class _Never:
    def wait(self) -> object:
        return None


class Faulty(PointToPoint):
    """Loses one message of ``lost`` and holds up one of ``late`` (0: none)."""

    lost, late, seed = 0, 0, 0

    def __init__(self) -> None:
        self._rng = random.Random(self.seed)

    def send(self, x: Tensor, to: int, tag: int) -> Pending:
        if self.lost and self._rng.randrange(self.lost) == 0:
            return _Never()
        if self.late and self._rng.randrange(self.late) == 0:
            return _Later(x, to, tag, 0.05 + 0.3 * self._rng.random())
        return super().send(x, to, tag)


def serve_faulty(rank: int, lost: int, late: int, seed: int, job: ServeJob) -> Any:
    """Body of a rank with faulty messages."""
    Faulty.lost, Faulty.late, Faulty.seed = lost, late, seed + rank + 7919 * job.control.epoch
    worker.PointToPoint = Faulty  # type: ignore[misc]
    return serve_rank(rank, job)

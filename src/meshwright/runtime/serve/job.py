"""Serving as a job that can be sent to ranks. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.runtime.folder import Model
from meshwright.specs.placement import Placement


@dataclass(frozen=True, slots=True)
class ServeJob:
    """What every rank is told.

    Attributes:
        model, placement, dtype, device: as of a generation.
        blocks, block_size: of the cache. depth: passes under way.
        host, port, secret: of the scheduler's control link. epoch: which start of the ranks this is.
    """

    model: Model
    placement: Placement
    dtype: str
    device: str
    blocks: int
    block_size: int
    depth: int
    host: str
    port: int
    secret: str
    epoch: int = 0


def serve_rank(rank: int, job: ServeJob) -> int:
    """Body of a rank; how many passes it did."""
    from meshwright.runtime.serve.worker import work

    return work(rank, job)

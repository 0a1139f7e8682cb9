"""Serving as a job that can be sent to ranks. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.runtime.folder import Model
from meshwright.runtime.serve.ranks import Control
from meshwright.specs.placement import Placement


@dataclass(frozen=True, slots=True)
class ServeJob:
    """What every rank is told.

    Attributes:
        model, placement, dtype, device: as of a generation.
        cache: blocks of the cache, and tokens of one.
        control: where the engine is found.
        decode: placement of the ranks that decode only; they follow those of ``placement`` in the world.
        decode_cache: theirs.
        record: record what is sent.
        kv_transport: what carries keys and values between pools, ``torch`` or ``nixl``.
    """

    model: Model
    placement: Placement
    dtype: str
    device: str
    cache: tuple[int, int]
    control: Control
    decode: Placement | None = None
    decode_cache: tuple[int, int] = (0, 0)
    record: bool = False
    kv_transport: str = "torch"


def serve_rank(rank: int, job: ServeJob) -> Any:
    """Body of a rank; what it recorded, or None."""
    from meshwright.runtime.serve.worker import work

    return work(rank, job)

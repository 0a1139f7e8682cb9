"""Learning rate by step: linear warm-up, then a cosine to a floor (Loshchilov and Hutter 2017, arXiv 1608.03983)."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi

from meshwright.errors import InputError


@dataclass(frozen=True, slots=True)
class Cosine:
    """A schedule.

    Attributes:
        peak: highest rate.
        warmup: steps of the warm-up: step i (from 0) has (i + 1) / warmup of the peak.
        total: steps in all; later steps keep the floor. None: the peak is kept after the warm-up.
        floor: lowest rate after the warm-up, as a share of the peak.

    Raises:
        InputError: numbers that make no schedule.
    """

    peak: float
    warmup: int = 0
    total: int | None = None
    floor: float = 0.1

    def __post_init__(self) -> None:
        if not (self.peak >= 0 and 0 <= self.floor <= 1):
            raise InputError(f"learning rate {self.peak:g} with floor {self.floor:g}; need rate >= 0, floor 0 to 1")
        if self.warmup < 0 or (self.total is not None and self.total < self.warmup):
            raise InputError(f"warm-up of {self.warmup} steps in a run of {self.total}; it must lie within the run")

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.total is None:
            return self.peak
        gone = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        return self.peak * (self.floor + (1 - self.floor) * 0.5 * (1 + cos(pi * gone)))

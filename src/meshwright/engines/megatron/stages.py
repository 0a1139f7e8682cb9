"""Layers of pipeline stages."""

from __future__ import annotations

from meshwright.specs.shares import part

#: Where the interleaved schedule counts its micro-batches.
SCHEDULES = "megatron/core/pipeline_parallel/schedules.py:1133"


def split_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Equal stages. Megatron refuses a number of layers that does not divide (a rule); the first then get one more."""
    bounds = (part(layers, stages, index) for index in range(stages))
    return tuple(stop - start for start, stop in bounds)


def fits_group(rounds: int, group: int, pp: int) -> bool:
    """Whether the interleaved schedule takes ``rounds`` micro-batches in groups of ``group`` (schedules.py:1133-1153).

    A group has at least as many micro-batches as there are stages, and so has the last one, if it is not full.
    """
    return pp <= group <= rounds and (rounds % group == 0 or rounds % group >= pp)


def group_for(rounds: int, pp: int) -> int | None:
    """The smallest group that the schedule takes; None when there are fewer micro-batches than stages."""
    return next((group for group in range(pp, rounds + 1) if fits_group(rounds, group, pp)), None)

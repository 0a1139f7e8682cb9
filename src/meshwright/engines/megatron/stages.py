"""Layers of pipeline stages."""

from __future__ import annotations

from meshwright.specs.shares import part


def split_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Equal stages. Megatron refuses a number of layers that does not divide (a rule); the first then get one more."""
    bounds = (part(layers, stages, index) for index in range(stages))
    return tuple(stop - start for start, stop in bounds)

"""Sizes of a model that training engines' buffers depend on: what one layer and the rest hold."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from meshwright.specs.model import ModelSpec

#: Scales and zeros of quantized checkpoints are no parameters of training.
_NO_PARAMETERS = {"scale", "zero", "global_scale", "input_scale", "index"}


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Elements of the whole model, of everything outside layers, and of an average layer (at least 1)."""

    total: int
    root: int
    layer: int


def unit_sizes(spec: ModelSpec) -> UnitSizes:
    """Elements before any cut, the decoder and its ends."""
    root = inner = 0
    for family in spec.families:
        if family.section != "decoder" or not family.elements or family.part in _NO_PARAMETERS:
            continue
        numel = prod(family.shape) * family.elements * max(1, family.experts)
        if family.layers:
            inner += numel * len(family.layers)
        else:
            root += numel
    return UnitSizes(root + inner, root, max(1, inner // max(1, len(spec.layers))))

"""Quantized matrices under tensor parallelism in vLLM: shards must end where blocks, groups and tiles end.

The wheels of 0.26 and 0.33 agree.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.specs import quantized
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.rules import Rule
from meshwright.specs.splits import Width

_PLACES = quantized.Places(
    "vLLM model_executor/layers/quantization/utils/fp8_utils.py:1298-1376",
    "vLLM model_executor/layers/quantization/utils/marlin_utils.py:172",
)


def degree_of(width: Width, layout: Layout) -> int:
    """How many ranks share the side."""
    if width.label == "expert_mlp":
        return 1 if layout.ep > 1 else layout.tp * layout.cp * layout.dp
    if width.label == "shared_mlp" and min(layout.ep, layout.tp, layout.dp) > 1:
        return 1
    return layout.tp


def blocks_divide(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """Shards of quantized matrices that end inside a block, a group or a tile."""
    yield from quantized.blocks_divide(spec, layout, degree_of, _PLACES)

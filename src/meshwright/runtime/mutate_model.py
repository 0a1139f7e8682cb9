"""Planted mistakes in what single families compute: rotary positions, sinks, windows, scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from meshwright.runtime.mutation import Mutation
from meshwright.specs.model import Attention
from meshwright.specs.placement import Placement

if TYPE_CHECKING:
    from meshwright.runtime.mesh import Mesh
    from meshwright.runtime.models.decoder import Decoder

#: ``model_type`` of the families whose embedding is scaled.
SCALED = ("gemma3_text",)


def _some(has: Callable[[Attention], Any], wanted: str) -> Callable[[Placement, int], str | None]:
    """Needs a layer whose attention ``has`` something."""

    def needs(p: Placement, _: int) -> str | None:
        return None if any(has(a) for layer in p.spec.layers if (a := layer.attention)) else wanted

    return needs


def _scaled(p: Placement, _: int) -> str | None:
    return None if p.spec.model_type in SCALED else "a model with a scaled embedding (Gemma 3)"


def _unscaled(_: Mesh, decoder: Decoder) -> list[Any]:
    """The embedding is not multiplied by its factor."""
    return [mock.patch.object(decoder, "settings", replace(decoder.settings, embedding_scale=1.0))]


def _together(_: Mesh, __: Decoder) -> list[Any]:
    """Neighbouring dimensions are taken for the halves of a head."""
    return [mock.patch("meshwright.runtime.models.mla.apart", lambda x: x)]


def _sinkless(_: Mesh, decoder: Decoder) -> list[Any]:
    """The softmax of every layer forgets its sinks."""
    blocks: dict[int, Any] = {}
    for i, block in decoder.blocks.items():
        mixer: Any = block.mixer
        blocks[i] = replace(block, mixer=replace(mixer, how=replace(mixer.how, sinks_H=None)))
    return [mock.patch.object(decoder, "blocks", blocks)]


def _one_base(_: Mesh, decoder: Decoder) -> list[Any]:
    """Layers with a window turn as the others do."""
    first = decoder.frequencies[0]
    return [mock.patch.object(decoder, "frequencies", (first,) * len(decoder.frequencies))]


_mla = _some(lambda a: a.kind == "mla", "a model with latent attention (DeepSeek)")
_sinks = _some(lambda a: a.sinks, "a model with attention sinks (GPT-OSS)")

MODEL_MISTAKES = (
    Mutation("unscaled-embedding", "the embedding is not scaled", _scaled, patch=_unscaled),
    Mutation("one-rotary-base", "layers with a window have the positions of the others", _scaled, patch=_one_base),
    Mutation("rope-not-interleaved", "rotary positions turn the wrong pairs", _mla, patch=_together),
    Mutation("missing-sink", "the sinks are left out of the softmax", _sinks, patch=_sinkless),
)

"""Which mixer and which feed-forward block every layer has: the table of contents of the decoder.

``build_layer`` reads the layer's structure from the ModelSpec and hands each block its weights and its edges.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from meshwright.errors import InputError
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.models.gqa import grouped_query
from meshwright.runtime.models.mla import latent
from meshwright.runtime.models.mlp import gated_mlp
from meshwright.runtime.models.moe import MixtureOfExperts, mixture
from meshwright.runtime.models.parts import LayerWeights, Norm, Part, Step
from meshwright.runtime.models.settings import Settings
from meshwright.runtime.parallel.tensor import Edges
from meshwright.runtime.scope import scope


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """``x += mixer(norm(x)); x += ffn(norm(x))``; with four norms each block's output is normed too.

    Attributes:
        norms: before the mixer (and after it), before the feed-forward block (and after it).
    """

    number: int
    norms: tuple[Norm, ...]
    mixer: Part
    ffn: Part

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        """Run the layer on the tokens of a pass."""
        with scope(layer=self.number):
            half = len(self.norms) // 2
            for block, (before, *after) in ((self.mixer, self.norms[:half]), (self.ffn, self.norms[half:])):
                y_TD = block(before(x_TD), step)
                x_TD = x_TD + (after[0](y_TD) if after else y_TD)
            return x_TD

    def idle(self, like: Tensor) -> None:
        """A pass in which this replica has no tokens: only experts work, for others. ``like``: type and device."""
        if isinstance(self.ffn, MixtureOfExperts):
            with scope(layer=self.number):
                self.ffn.idle(like)


def build_layer(w: LayerWeights, mesh: Mesh, settings: Settings, edges: Edges) -> DecoderLayer:
    """One layer of this rank.

    Raises:
        InputError: a structure that the runtime does not compute.
    """
    layer = mesh.placement.spec.layers[w.layer]
    norms = w.norms("norm", settings.eps, settings.norm_offset)
    if layer.attention is None or len(layer.ffns) != 1 or len(norms) not in {2, 4}:
        raise InputError(f"layer {w.layer} is not attention with one MLP; the runtime cannot run this model")
    build = latent if layer.attention.kind == "mla" else grouped_query
    mixer = build(w, layer.attention, settings, edges)
    ffn: Part
    if layer.moe is not None:
        ffn = mixture(w, layer.moe, mesh, settings, edges)
    else:
        ffn = gated_mlp(w, settings.activation, edges)
    return DecoderLayer(w.layer, norms, mixer, ffn)

"""Dense gated feed-forward block: ``{U_tp} = (act(x W[D, F_tp]) * (x W[D, F_tp])) W[F_tp, D]``.

Legend: T tokens, D model width, F its inner width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from meshwright.runtime.differentiable import gated
from meshwright.runtime.models.parts import ACTIVATIONS, LayerWeights, Linear, Step
from meshwright.runtime.parallel.tensor import Edges


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """SwiGLU, or with another activation, with this rank's columns."""

    edges: Edges
    gate: Linear
    up: Linear
    down: Linear
    act: Callable[[Tensor], Tensor]

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        """Run it on the tokens of a pass."""
        x_TD = self.edges.enter(x_TD, "mlp input")
        h_TF = gated(self.act, self.gate(x_TD), self.up(x_TD))
        return self.edges.leave(self.down.partial(h_TF), "mlp output", self.down.bias)


def gated_mlp(w: LayerWeights, activation: str, edges: Edges) -> GatedMlp:
    """Build it from the weights of a layer."""
    gate, up, down = (w.linear("mlp", op) for op in ("gate", "up", "down"))
    return GatedMlp(edges, gate, up, down, ACTIVATIONS[activation])

"""Multi-head, grouped-query and multi-query attention with rotary positions.

::

    q, k, v = x W[D, H_tp d]      heads of this rank
    {U_tp} = attend(q) W[H_tp d, D]

Legend: T tokens, D model width, H heads, K KV heads, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from meshwright.runtime.models.attention import Scores
from meshwright.runtime.models.parts import LayerWeights, Linear, Norm, Step
from meshwright.runtime.models.rope import turn
from meshwright.runtime.models.settings import Settings
from meshwright.runtime.parallel.tensor import Edges
from meshwright.specs.model import Attention


@dataclass(frozen=True, slots=True)
class GroupedQuery:
    """Attention of one layer with this rank's heads.

    Attributes:
        qk_norms: of every query and key head, or None. rope: which of ``Step.turned`` turns them.
    """

    layer: int
    edges: Edges
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    qk_norms: tuple[Norm, Norm] | None
    head_dim: int
    how: Scores
    rope: int

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        """Attend to the keys and values of the step, which keeps those of the pass first."""
        x_TD = self.edges.enter(x_TD, "mixer input")
        q, k, v = (linear(x_TD).view(x_TD.shape[0], -1, self.head_dim) for linear in (self.q, self.k, self.v))
        if self.qk_norms is not None:
            q, k = self.qk_norms[0](q), self.qk_norms[1](k)
        turned = step.turned[self.rope]
        step.keep(self.layer, turn(k, *turned), v)
        a_TH = step.attend(turn(q, *turned), self.layer, self.how)
        return self.edges.leave(self.o.partial(a_TH), "mixer output", self.o.bias)


def grouped_query(w: LayerWeights, a: Attention, settings: Settings, edges: Edges) -> GroupedQuery:
    """Build it from the weights of a layer."""
    q, k, v, o = (w.linear("attention", op) for op in ("q", "k", "v", "o"))
    plain = list(w.plain.get("attention", ()))
    how = Scores(a.window, settings.softmax_scale, plain.pop() if a.sinks else None)
    qk = [Norm(weight, settings.eps, settings.norm_offset) for weight in plain]
    rope = int(a.window is not None and settings.local_rope is not None)
    return GroupedQuery(w.layer, edges, q, k, v, o, (qk[0], qk[1]) if qk else None, a.head_dim, how, rope)

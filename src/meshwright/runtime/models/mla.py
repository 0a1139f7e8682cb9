"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): one latent vector a token is cached.

::

    q = norm(x W[D, A]) W[A, H_tp (n + r)]     or x W[D, H_tp (n + r)] without a query rank
    c, k_r = x W[D, C + r]                     cached: norm(c), turned k_r, whole on every rank of tp
    k_n, v = c W[C, H_tp (n + v)]              prefill: of the whole context, then attention of H heads
    q_n W_k[n, C], attend to c, then W_v[C, v] decode: the same product from both sides, on new tokens only
    {U_tp} = o W[H_tp v, D]

Legend: T tokens, S cached tokens, D model width, H heads, A query rank, C latent width, n, r, v width of a head without
and with rotary positions and of its value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.runtime.models.attention import Scores, decode
from meshwright.runtime.models.parts import LayerWeights, Linear, Norm, Step
from meshwright.runtime.models.rope import apart, turn
from meshwright.runtime.models.settings import Settings
from meshwright.runtime.parallel.tensor import Edges
from meshwright.specs.model import Attention

#: Epsilon of the norms inside; the published code does not take it from the configuration (``modeling_deepseek.py`` of
#: DeepSeek-V3: ``DeepseekV3RMSNorm(config.q_lora_rank)``).
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention of one layer with this rank's heads.

    Attributes:
        q: ``(q,)``, or ``(q_a, q_b)`` with ``q_norm`` between. kv_a, kv_norm, kv_b: to the latent, and from it.
        a: sizes. interleaved: order of the dimensions that turn. how: the scores.
    """

    layer: int
    edges: Edges
    q: tuple[Linear, ...]
    q_norm: Norm | None
    kv_a: Linear
    kv_norm: Norm
    kv_b: Linear
    o: Linear
    a: Attention
    interleaved: bool
    how: Scores

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        """Attend to the latents of the step, which keeps those of the pass first."""
        x_TD = self.edges.enter(x_TD, "mixer input")
        cos, sin = step.turned[0]
        q_n, q_r = self._queries(x_TD).split((self.a.head_dim - self.a.rope_head_dim, self.a.rope_head_dim), dim=2)
        c, k_r = self.kv_a(x_TD)[:, None].split((self.a.kv_lora_rank, self.a.rope_head_dim), dim=2)
        q_r, k_r = (turn(apart(x) if self.interleaved else x, cos, sin) for x in (q_r, k_r))
        step.keep(self.layer, self.kv_norm(c), k_r)
        core = self._absorbed if step.batch.phase == "decode" else self._unfolded
        return self.edges.leave(self.o.partial(core(q_n, q_r, step)), "mixer output", self.o.bias)

    def _queries(self, x_TD: Tensor) -> Tensor:
        """Queries ``(T, H, n + r)``, not turned yet."""
        x = self.q[0](x_TD)
        if self.q_norm is not None:
            x = self.q[1](self.q_norm(x))
        return x.view(x.shape[0], -1, self.a.head_dim)

    def _unfolded(self, q_n: Tensor, q_r: Tensor, step: Step) -> Tensor:
        """Keys and values of all contexts of the pass from their latents, then ordinary attention: ``(T, H v)``."""
        q = torch.cat((q_n, q_r), dim=2)
        return step.unfolded(q, self.layer, self.how, self._keys_values, self.kv_b.weight)

    def _keys_values(self, c_S1C: Tensor, k_S1r: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``(S, H, n + r)`` and values ``(S, H, v)`` from latents and turned keys."""
        width = self.a.head_dim - self.a.rope_head_dim
        kv = self.kv_b(c_S1C[:, 0]).unflatten(1, (-1, width + self.a.v_head_dim))
        k_n, v = kv.split((width, self.a.v_head_dim), dim=2)
        return torch.cat((k_n, k_S1r.expand(-1, k_n.shape[1], -1)), dim=2), v

    def _absorbed(self, q_n: Tensor, q_r: Tensor, step: Step) -> Tensor:
        """Queries into the latent space, attention with one head of keys, its result out of it: ``(T, H v)``."""
        b, n = step.batch, self.a.head_dim - self.a.rope_head_dim
        w_k, w_v = self.kv_b.weight.unflatten(0, (-1, n + self.a.v_head_dim)).split((n, self.a.v_head_dim), dim=1)
        q_c = torch.bmm(q_n.transpose(0, 1), w_k).transpose(0, 1)
        c, k_r = step.cache.read(self.layer, b.table_BM, max(b.contexts))
        core = step.context.decode if step.context is not None else decode
        out = core(torch.cat((q_c, q_r), dim=2), torch.cat((c, k_r), dim=3), c, b, self.how)
        o_c = out.unflatten(1, (-1, self.a.kv_lora_rank)).transpose(0, 1)
        return torch.bmm(o_c, w_v.transpose(1, 2)).transpose(0, 1).flatten(1)


def latent(w: LayerWeights, a: Attention, settings: Settings, edges: Edges) -> Latent:
    """Build it from the weights of a layer."""
    kv_a, kv_b, o = (w.linear("attention", op) for op in ("kv_a", "kv_b", "o"))
    norms = w.norms("attention", EPS)
    q = tuple(w.linear("attention", op) for op in (("q_a", "q_b") if a.q_lora_rank else ("q",)))
    how = Scores(a.window, settings.softmax_scale or a.head_dim**-0.5)
    q_norm = norms[0] if a.q_lora_rank else None
    return Latent(w.layer, edges, q, q_norm, kv_a, norms[-1], kv_b, o, a, settings.rope.interleaved, how)

"""The attention core with a backward: some queries against some keys, parts of a softmax, and what their gradients are.

A part gives its output and the logarithm of its denominator (``lse``). The backward of a part takes output and ``lse``
of the *whole* softmax and gives this part's share of the gradients, so that a block of keys on a ring, a whole
sequence and a softmax with a sink are one and the same (Dao, arXiv:2307.08691, section 3.1.2; Liu et al.,
arXiv:2310.01889). On CPU, where keys are as wide as values, the kernels of torch's flash attention do both.

Legend: B sequences, H query heads, K KV heads, t queries, s keys, d width of a key and v of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.runtime.differentiable import backward_of
from meshwright.runtime.models.attention import CORE
from meshwright.runtime.scope import scope, where

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Part(NamedTuple):
    """Weighted values ``(B, t, H, v)`` and log-sums ``(B, H, t)``, -inf where a query sees no key."""

    out: Tensor
    lse: Tensor


class Sides(NamedTuple):
    """Gradients of queries, keys and values, shaped like them."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class View:
    """Which query sees which key.

    Attributes:
        causal: query i sees the keys up to i. seen: ``(B or 1, 1, t, s)``, whether; None: all, or as ``causal`` says.
        scale: of the scores.
    """

    causal: bool
    scale: float
    seen: Tensor | None = None


def part(q_BtHd: Tensor, k_BsKd: Tensor, v_BsKv: Tensor, view: View) -> Part:
    """Softmax over some keys."""
    q, k, v = _by_heads(q_BtHd, k_BsKd, v_BsKv)
    with scope(name=CORE):
        if _fused(q, v):
            out, lse = _flash(q, k, v, 0.0, view.causal, attn_mask=_bias(view, q.dtype), scale=view.scale)
            if view.seen is not None:
                lse = lse.masked_fill(~view.seen.any(-1), float("-inf"))
        else:
            scores = _scores(q, k, view)
            lse = scores.logsumexp(-1)
            out = _weights(scores, lse) @ v.to(scores.dtype)
    return Part(out.transpose(1, 2), lse)


def part_gradient(do_BtHv: Tensor, q_BtHd: Tensor, k_BsKd: Tensor, v_BsKv: Tensor, whole: Part, view: View) -> Sides:
    """This part's share of the gradients; ``whole``: output and log-sums over all keys."""
    q, k, v = _by_heads(q_BtHd, k_BsKd, v_BsKv)
    do, out, groups = do_BtHv.transpose(1, 2), whole.out.transpose(1, 2), q.shape[1] // k_BsKd.shape[2]
    with scope(name=CORE):
        if _fused(q, v):
            bias = _bias(view, q.dtype)
            out, do = out.to(q.dtype), do.to(q.dtype)
            sides = _flash_back(do, q, k, v, out, whole.lse, 0.0, view.causal, attn_mask=bias, scale=view.scale)
            dq, dk, dv = sides
        else:
            dq, dk, dv = _gradients(do, q, k, v, out, whole.lse, view)
    return Sides(dq.transpose(1, 2), _grouped(dk, groups), _grouped(dv, groups))


def _by_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads before rows, KV heads repeated for the query heads that share them."""
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _grouped(dx_BHsd: Tensor, groups: int) -> Tensor:
    """Gradients of repeated heads summed: ``(B, s, K, d)``."""
    if groups > 1:
        dx_BHsd = dx_BHsd.unflatten(1, (-1, groups)).sum(2)
    return dx_BHsd.transpose(1, 2)


def _fused(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _bias(view: View, dtype: torch.dtype) -> Tensor | None:
    """The mask as what is added to scores."""
    if view.seen is None:
        return None
    return torch.zeros(view.seen.shape, dtype=dtype, device=view.seen.device).masked_fill_(~view.seen, float("-inf"))


def _scores(q: Tensor, k: Tensor, view: View) -> Tensor:
    """``(B, H, t, s)`` in fp32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).transpose(-1, -2) * view.scale
    seen = view.seen
    if view.causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores if seen is None else scores.masked_fill(~seen, float("-inf"))


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    return (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()


def _gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, view: View
) -> tuple[Tensor, Tensor, Tensor]:
    """The five products of the backward, in fp32 or wider, heads before rows."""
    scores = _scores(q, k, view)
    p, wide = _weights(scores, lse), scores.dtype
    do, k_wide, v_wide = do.to(wide), k.to(wide), v.to(wide)
    dv = p.transpose(-1, -2) @ do
    ds = p * (do @ v_wide.transpose(-1, -2) - (do * out.to(wide)).sum(-1, keepdim=True)) * view.scale
    return (ds @ k_wide).to(q.dtype), (ds.transpose(-1, -2) @ q.to(wide)).to(k.dtype), dv.to(v.dtype)


def with_sinks(p: Part, sinks_H: Tensor | None) -> Part:
    """The softmax with one logit a head more, whose weight goes to no value."""
    if sinks_H is None:
        return p
    lse = torch.logaddexp(p.lse, sinks_H.to(p.lse.dtype)[:, None])
    return Part(p.out * (p.lse - lse).exp().transpose(1, 2)[..., None], lse)


def sinks_gradient(do_BtHv: Tensor, whole: Part, sinks_H: Tensor) -> Tensor:
    """Gradient of the sinks: each takes its weight away from all values."""
    share = (sinks_H.to(whole.lse.dtype)[:, None] - whole.lse).exp().transpose(1, 2)
    gained = (do_BtHv.to(share.dtype) * whole.out.to(share.dtype)).sum(-1)
    return -(share * gained).sum((0, 1)).to(sinks_H.dtype)


class Core(torch.autograd.Function):
    """Attention of whole sequences; ``again``: output and log-sums are computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, view: View, again: bool) -> Tensor:
        """``(B, t, H, d)``, ``(B, s, K, d)`` and ``(B, s, K, v)`` in, ``(B, t, H, v)`` out."""
        whole = with_sinks(part(q, k, v, view), sinks_H)
        ctx.save_for_backward(q, k, v, sinks_H, *(() if again else whole))
        ctx.view, ctx.at = view, where()
        return whole.out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of queries, keys, values and sinks."""
        q, k, v, sinks_H, *kept = ctx.saved_tensors
        with backward_of(ctx.at):
            whole = Part(*kept) if kept else with_sinks(part(q, k, v, ctx.view), sinks_H)
            sides = part_gradient(do, q, k, v, whole, ctx.view)
            sinks = None if sinks_H is None else sinks_gradient(do, whole, sinks_H)
        return *sides, sinks, None, None


def core(q_BtHd: Tensor, k_BsKd: Tensor, v_BsKv: Tensor, sinks_H: Tensor | None, view: View, again: bool) -> Tensor:
    """Attention of whole sequences: ``(B, t, H, v)``."""
    out: Tensor = Core.apply(q_BtHd, k_BsKd, v_BsKv, sinks_H, view, again)  # type: ignore[no-untyped-call]
    return out

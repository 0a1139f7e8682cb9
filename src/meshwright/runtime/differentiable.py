"""Products, norms and gates with a backward, for training: what autograd cannot derive from the ops of
``runtime.linear``, or would keep too much for.

In the backward a function works in the place of the model that its forward had (``scope``), and leaves weight gradients
to the queue of a split backward where one is open (``later``).

Legend: T tokens, K and N widths of a product, D width of a norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.runtime import later
from meshwright.runtime.scope import Where, scope, where


def backward_of(at: Where, name: str | None = None) -> scope:
    """The place of a forward in the backward that runs now; ``name``: of what is done there."""
    return scope(layer=at.layer, phase="backward", name=name, step=at.step, microbatch=at.microbatch, fresh=True)


class Product(torch.autograd.Function):
    """``x W^T + b``; the gradients are the products ``dY W`` and ``dY^T x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``(..., K)`` and ``(N, K)`` in, ``(..., N)`` out."""
        ctx.save_for_backward(x)
        # The tensor itself and not what a saved one becomes: a put off gradient must reach the parameter.
        ctx.weight, ctx.at, ctx.later = weight, where(), later.current()
        out: Tensor = torch.ops.meshwright.linear(x, weight, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of input, weight and bias."""
        (x,), weight = ctx.saved_tensors, ctx.weight
        dy_TN, x_TK = dy.reshape(-1, weight.shape[0]), x.reshape(-1, weight.shape[1])
        dx = dw = db = None
        with backward_of(ctx.at):
            if ctx.needs_input_grad[0]:
                dx = torch.ops.meshwright.linear(dy_TN, weight.t(), None).view(x.shape)
            if ctx.needs_input_grad[1]:
                if ctx.later is not None and ctx.later.open:
                    ctx.later.add(weight, lambda: _weight_gradient(dy_TN, x_TK))
                else:
                    dw = _weight_gradient(dy_TN, x_TK)
        if ctx.needs_input_grad[2]:
            db = dy_TN.sum(0)
        return dx, dw, db


def _weight_gradient(dy_TN: Tensor, x_TK: Tensor) -> Tensor:
    out: Tensor = torch.ops.meshwright.linear(dy_TN.t(), x_TK.t(), None)
    return out


class RmsNorm(torch.autograd.Function):
    """``x / sqrt(mean(x^2) + eps) (w + offset)``, computed in fp32 or wider; of the input only x itself is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        """``(..., D)`` in and out."""
        wide = torch.promote_types(x.dtype, torch.float32)
        x_wide = x.to(wide)
        shrink = (x_wide.square().mean(-1, keepdim=True) + eps).rsqrt_()
        ctx.save_for_backward(x, weight, shrink)
        ctx.offset = offset
        return (x_wide * shrink).mul_(_lifted(weight, offset, wide)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Gradients of input and weight."""
        x, weight, shrink = ctx.saved_tensors
        normed, dy_wide = x.to(shrink.dtype) * shrink, dy.to(shrink.dtype)
        dw = (dy_wide * normed).flatten(0, -2).sum(0).to(weight.dtype)
        g = dy_wide * _lifted(weight, ctx.offset, shrink.dtype)
        mean = (g * normed).mean(-1, keepdim=True)
        return g.sub_(normed.mul_(mean)).mul_(shrink).to(x.dtype), dw, None, None


def _lifted(weight: Tensor, offset: float, wide: torch.dtype) -> Tensor:
    return weight.to(wide) + offset if offset else weight.to(wide)


class SwiGlu(torch.autograd.Function):
    """``silu(g) u``; keeps the sigmoid, so that the backward needs no exponentials."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, u: Tensor) -> Tensor:
        """Both and the result of one shape."""
        gate = g.sigmoid()
        ctx.save_for_backward(g, u, gate)
        return (g * gate).mul_(u)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        """``silu'(g) = s + g s (1 - s)`` with s the sigmoid of g."""
        g, u, gate = ctx.saved_tensors
        act = g * gate
        du = dy * act
        slope = torch.addcmul(gate, act, 1 - gate).mul_(u)
        return slope.mul_(dy), du


def gated(act: Callable[[Tensor], Tensor], g: Tensor, u: Tensor) -> Tensor:
    """``act(g) u``."""
    if act is F.silu and torch.is_grad_enabled():
        out: Tensor = SwiGlu.apply(g, u)  # type: ignore[no-untyped-call]
        return out
    return act(g) * u

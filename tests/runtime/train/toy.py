"""A small chunk of a model for tests of the pipeline alone: matrices whose gradient can be put off, and vectors."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.runtime import later

WIDTH, VOCAB = 12, 17


class _Product(torch.autograd.Function):
    """``x W^T`` whose weight gradient can be put off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later = later.current()
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        if ctx.later is not None and ctx.later.open:
            ctx.later.add(weight, lambda: gradient.t() @ x)
            return gradient @ weight, None
        return gradient @ weight, gradient.t() @ x


class Toy(nn.Module):
    """Layers ``layers`` of a model of some; a micro-batch is ``(ids_T, labels_T)``."""

    dtype = torch.float64

    def __init__(self, layers: tuple[int, ...], first: bool, last: bool) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.names: dict[str, nn.Parameter] = {}
        for layer in layers:
            self._add(f"up.{layer}", (2 * WIDTH, WIDTH))
            self._add(f"down.{layer}", (WIDTH, 2 * WIDTH))
            self._add(f"scale.{layer}", (WIDTH,))
        if first:
            self._add("table", (VOCAB, WIDTH))
        if last:
            self._add("head", (VOCAB, WIDTH))
        self.layers = layers

    def _add(self, name: str, shape: tuple[int, ...]) -> None:
        seed = sum(map(ord, name)) * 7 + len(name)
        value = torch.randn(shape, dtype=self.dtype, generator=torch.Generator().manual_seed(seed)) / 4
        self.names[name] = nn.Parameter(value)
        self.register_parameter(name.replace(".", "/"), self.names[name])

    def input_shape(self, batch: tuple[Tensor, Tensor]) -> tuple[int, ...]:
        return len(batch[0]), WIDTH

    def forward(self, x: Tensor | None, batch: tuple[Tensor, Tensor]) -> Tensor:
        p = self.names
        if x is None:
            x = p["table"][batch[0]]
        for n in self.layers:
            # The two matrices are read through one that is made of both, as a fused product reads them.
            whole = torch.cat([p[f"up.{n}"], p[f"down.{n}"].t()])
            up = _Product.apply(x * p[f"scale.{n}"], whole)[:, : 2 * WIDTH]
            x = x + _Product.apply(torch.tanh(up), p[f"down.{n}"])
        if not self.last:
            return x
        return F.cross_entropy(_Product.apply(x, p["head"]), batch[1], reduction="sum")


def micro_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of unequal length."""
    random = torch.Generator().manual_seed(5)
    return [
        (
            torch.randint(VOCAB, (3 + n % 3,), generator=random),
            torch.randint(VOCAB, (3 + n % 3,), generator=random),
        )
        for n in range(count)
    ]


class _Wait(torch.autograd.Function):
    """Hands a tensor on after some seconds; its input and its weight gradient take as long each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.weight, ctx.seconds, ctx.later = weight, seconds, later.current()
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        def make() -> Tensor:
            time.sleep(ctx.seconds)
            return torch.zeros_like(ctx.weight)

        time.sleep(ctx.seconds)
        if ctx.later.open:
            ctx.later.add(ctx.weight, make)
            return gradient, None, None
        return gradient, make(), None


class Sleeper(nn.Module):
    """A chunk that takes no core but time: forward, input gradient and weight gradient ``SECONDS`` each."""

    dtype = torch.float32
    SECONDS = 0.08

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.weight = nn.Parameter(torch.zeros(1))

    def input_shape(self, batch: Tensor) -> tuple[int, ...]:
        return tuple(batch.shape)

    def forward(self, x: Tensor | None, batch: Tensor) -> Tensor:
        out = _Wait.apply(batch.clone().requires_grad_() if x is None else x, self.weight, self.SECONDS)
        return out.sum() if self.last else out

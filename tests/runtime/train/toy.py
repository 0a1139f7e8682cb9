"""A small chunk of a model for tests of the pipeline alone: matrices whose gradient can be put off, and vectors."""

from __future__ import annotations

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

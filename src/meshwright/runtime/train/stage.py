"""One model chunk as a pipeline runs it: forward, backward or its halves, one micro-batch at a time.

Shapes: R rows of this rank, D model width.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meshwright.runtime.later import Later
from meshwright.runtime.scope import scope


class ChunkModule(Protocol):
    """What a pipeline asks of a model chunk (``train.model.TrainChunk``); a batch is one micro-batch."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the hidden states that it takes and gives."""

    def input_shape(self, batch: Any) -> tuple[int, ...]:
        """Shape ``(R, D)`` of a micro-batch's hidden states before the chunk, and behind it."""

    def __call__(self, x_RD: Tensor | None, batch: Any) -> Tensor:
        """Hidden states ``(R, D)``, or on the last chunk the sum of the losses; ``x_RD`` None on the first chunk."""


class _Pass(NamedTuple):
    """What a backward needs of its forward."""

    x: Tensor | None
    out: Any
    later: Later


class Stage:
    """A chunk, and what its micro-batches under way keep."""

    def __init__(self, chunk: ChunkModule) -> None:
        self.chunk = chunk
        self._passes: dict[int, _Pass] = {}

    def forward(self, number: int, x: Tensor | None, batch: Any) -> Tensor:
        """Run micro-batch ``number``; the output without its history.

        Args:
            x: hidden states ``(R, D)``; None on the first chunk.
        """
        if x is not None:
            x = x.detach().requires_grad_()
        later = Later()
        with scope(phase="forward", microbatch=number, fresh=True), later.watching():
            out = self.chunk(x, batch)
        # The history is kept, the values are not: who needs them (the next chunk, the wire) holds them.
        self._passes[number] = _Pass(x, torch.autograd.graph.get_gradient_edge(out), later)
        return out.detach()

    def backward(self, number: int, gradient: Tensor, *, split: bool) -> Tensor | None:
        """Gradient of micro-batch ``number``'s input, None on the first chunk; parameters accumulate theirs.

        Args:
            gradient: of the output. split: leave the gradients of matrices to ``weights``.
        """
        x, out, later = self._passes[number]
        with scope(phase="backward", microbatch=number, fresh=True), later.watching(putting_off=split):
            torch.autograd.backward((out,), (gradient,))
        if split:
            self._passes[number] = _Pass(None, None, later)
        else:
            del self._passes[number]
        return None if x is None else x.grad

    def weights(self, number: int) -> None:
        """The gradients that ``backward`` left."""
        self._passes.pop(number).later.run()

    @property
    def under_way(self) -> int:
        """Micro-batches whose activations are kept."""
        return len(self._passes)

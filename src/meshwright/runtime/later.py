"""Weight gradients put off: what splits a backward into input gradients (now) and weight gradients (later).

An autograd function with a matrix weight asks ``current()`` in its forward and keeps what it gets. In its backward,
when the queue is open, it adds the product that makes the weight gradient and gives none back; the input gradient is
computed at once. ``run`` makes the products and hands them to autograd at the weight, so that gradients accumulate and
hooks fire as in a whole backward, only later. Zero-bubble schedules use it (Qi et al., arXiv 2401.10241, section 2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from meshwright.runtime.scope import Where, scope, where

_CURRENT: ContextVar[Later | None] = ContextVar("meshwright_later", default=None)


def current() -> Later | None:
    """The queue of the chunk that runs now in this thread; None outside a split backward."""
    return _CURRENT.get()


class Later:
    """Weight gradients of one micro-batch through one chunk.

    ``open``: whether a backward puts weight gradients off now.
    """

    __slots__ = ("_queue", "open")

    def __init__(self) -> None:
        self.open = False
        self._queue: dict[int, list[tuple[Tensor, Callable[[], Tensor], Where]]] = {}

    @contextmanager
    def watching(self, *, putting_off: bool = False) -> Iterator[None]:
        """Functions inside find this queue; ``putting_off``: a backward inside leaves weight gradients to it."""
        token = _CURRENT.set(self)
        self.open = putting_off
        try:
            yield
        finally:
            self.open = False
            _CURRENT.reset(token)

    def add(self, weight: Tensor, make: Callable[[], Tensor]) -> None:
        """Put off the gradient of ``weight`` (a parameter, or what was made of some by views and concatenation)."""
        self._queue.setdefault(id(weight), []).append((weight, make, where()))

    def run(self) -> None:
        """Make everything that was put off and accumulate it, in the order in which the weights were first named.

        A weight's gradients go in together: what stands before a weight that is no leaf can be walked once.
        """
        while self._queue:
            parts = self._queue.pop(next(iter(self._queue)))
            weight, make, at = parts[0]
            with _at(at):
                total = make()
                for _, another, _ in parts[1:]:
                    total = total + another()
                torch.autograd.backward((weight,), (total,))


def _at(at: Where) -> scope:
    return scope(layer=at.layer, phase=at.phase, name=at.name, step=at.step, microbatch=at.microbatch, fresh=True)

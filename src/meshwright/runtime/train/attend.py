"""Attention over the pass itself: what blocks ask of a ``Step``, for training.

Legend: B sequences, T rows of this rank, H query heads, K KV heads, d width of a key and v of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.runtime.collectives import all_to_all
from meshwright.runtime.mesh import Group
from meshwright.runtime.models.attention import Scores
from meshwright.runtime.models.parts import Turned
from meshwright.runtime.parallel.context import Unfold
from meshwright.runtime.train.batch import TrainBatch
from meshwright.runtime.train.core import View, core
from meshwright.runtime.train.edges import moved
from meshwright.runtime.train.ring import ring


@dataclass(slots=True)
class TrainStep:
    """One pass: answers what blocks ask of ``models.parts.Step``.

    Attributes:
        batch: its rows. turned: cosine and sine of their positions.
        cp: ranks that share the sequences; ulysses: by all_to_all of heads, else on the ring.
        again: the attention core is computed again in the backward.
        ran: layers that ran; one that runs once more does so for its backward.
    """

    batch: TrainBatch
    turned: tuple[Turned, ...]
    cp: Group
    ulysses: bool
    again: bool = False
    kept: tuple[Tensor, Tensor] | None = field(default=None, init=False)
    ran: set[int] = field(default_factory=set, init=False)

    def keep(self, layer: int, k_THd: Tensor, v_THd: Tensor) -> None:
        """Keys and values of the layer that attends next."""
        self.kept = k_THd, v_THd

    def attend(self, q_THd: Tensor, layer: int, how: Scores) -> Tensor:
        """Attention to the keys and values kept: ``(T, H v)``."""
        k, v = self._taken()
        if self.cp.size == 1:
            return self._alone(q_THd, k, v, how, how.sinks_H)
        if self.ulysses:
            return self._dealt(q_THd, k, v, how)
        return ring(self.cp, self.batch, q_THd, k, v, how, None, None)

    def unfolded(self, q_THd: Tensor, layer: int, how: Scores, unfold: Unfold, weight: Tensor) -> Tensor:
        """The same where ``unfold`` makes keys and values, with ``weight``, of what was kept: ``(T, H v)``."""
        left, right = self._taken()
        if self.cp.size > 1 and not self.ulysses:
            return ring(self.cp, self.batch, q_THd, left, right, how, unfold, weight)
        self.kept = unfold(left, right)
        return self.attend(q_THd, layer, how)

    def _taken(self) -> tuple[Tensor, Tensor]:
        assert self.kept is not None
        kept, self.kept = self.kept, None
        return kept

    def _alone(self, q: Tensor, k: Tensor, v: Tensor, how: Scores, sinks_H: Tensor | None) -> Tensor:
        """Documents one behind the other, whole on this rank; equally long ones together."""
        lengths = self.batch.lengths
        if len(set(lengths)) == 1:
            return self._documents(q, k, v, len(lengths), how, sinks_H)
        rows = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        return torch.cat([self._documents(*row, 1, how, sinks_H) for row in rows])

    def _documents(self, q: Tensor, k: Tensor, v: Tensor, count: int, how: Scores, sinks_H: Tensor | None) -> Tensor:
        scale = how.scale or q.shape[-1] ** -0.5
        length = q.shape[0] // count
        view = View(True, scale)
        if how.window is not None and how.window < length:
            at = torch.arange(length, device=q.device)
            ahead = at[:, None] - at[None, :]
            view = View(False, scale, ((ahead >= 0) & (ahead < how.window))[None, None])
        q, k, v = (x.unflatten(0, (count, length)) for x in (q, k, v))
        return core(q, k, v, sinks_H, view, self.again).flatten(0, 1).flatten(1)

    def _dealt(self, q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, how: Scores) -> Tensor:
        """All rows of some heads instead of some rows of all heads, and back."""
        dealt, size = self.batch.dealt, self.cp.size
        assert dealt is not None
        q, k, v = (self._heads(x, name) for x, name in ((q_THd, "Q"), (k_THd, "K"), (v_THd, "V")))
        sinks = how.sinks_H
        if sinks is not None:
            each = sinks.shape[0] // size
            sinks = sinks[each * self.cp.index : each * (self.cp.index + 1)]
        out = self._alone(q, k, v, how, sinks).unflatten(1, (q.shape[1], -1))
        placed = out.unflatten(0, (self.batch.sequences, -1))[:, dealt.whole_S.argsort()]
        by_place = placed.unflatten(1, (size, -1)).transpose(0, 1).flatten(1, 2)
        back = exchanged(by_place, self.cp, "output heads")
        return back.transpose(0, 1).flatten(1)

    def _heads(self, x_THd: Tensor, name: str) -> Tensor:
        """This place's heads of all rows, in order of positions: ``(B S, H / cp, d)``."""
        size, b, dealt = self.cp.size, self.batch.sequences, self.batch.dealt
        assert dealt is not None
        copies = max(1, size // x_THd.shape[1])
        wide = x_THd.repeat_interleave(copies, dim=1) if copies > 1 else x_THd
        there = exchanged(wide.unflatten(1, (size, -1)).transpose(0, 1), self.cp, f"{name} heads")
        rows = there.unflatten(1, (b, -1)).transpose(0, 1).flatten(1, 2)
        out: Tensor = rows[:, dealt.whole_S].flatten(0, 1)
        return out


def exchanged(x: Tensor, group: Group, name: str) -> Tensor:
    """``collectives.all_to_all`` with its backward: the same exchange of the gradients."""
    return moved(x, lambda y: all_to_all(y, group), lambda dy: all_to_all(dy, group), name)

"""Attention on the ring of cp, forward and backward.

::

    forward    for every step: part(q, block) merged in; block to the next place meanwhile
    backward   the blocks go round again; gradients of a block's keys and values travel with it, one step behind, and
               are home after as many steps as there are places

Chunks are balanced (``moves.context``): the own block is causal in the order of its rows, half of every other block is
seen by all or by half of the queries.

Legend: B sequences, R rows of a place, T = B R, H query heads, K KV heads, d width of a key and v of a value head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.moves.context import neighbours, owner
from meshwright.runtime.collectives import exchange
from meshwright.runtime.differentiable import backward_of
from meshwright.runtime.mesh import Group
from meshwright.runtime.models.attention import Scores
from meshwright.runtime.parallel.context import Unfold, visible
from meshwright.runtime.scope import scope, where
from meshwright.runtime.train.batch import TrainBatch
from meshwright.runtime.train.core import Part, View, part, part_gradient, sinks_gradient, with_sinks

Works = tuple[dist.Work | None, ...]
_NO_WORK: Works = ()


@dataclass(frozen=True, slots=True)
class _Block:
    """What the queries of this place see of the block of another: rows from ``first`` on, its first ``keys`` rows."""

    first: int
    keys: int
    view: View


@dataclass(frozen=True, slots=True)
class _Ring:
    """The tables of one pass."""

    cp: Group
    batch: TrainBatch
    how: Scores
    scale: float
    unfold: Unfold | None

    def block(self, other: int) -> _Block:
        """What is seen of the block of place ``other``."""
        dealt, place = self.batch.dealt, self.cp.index
        assert dealt is not None
        mine, theirs = dealt.at_PR[place], dealt.at_PR[other]
        half = mine.shape[0] // 2
        first, keys = (half if other > place else 0), (half if other < place else 2 * half)
        window, numbers = self.how.window, dealt.documents_BS
        if window is None and numbers is None:
            return _Block(first, keys, View(other == place, self.scale))
        at, of = mine[first:], theirs[:keys]
        seen = visible(at, of, window)[None]
        if numbers is not None:
            seen = seen & (numbers[:, at, None] == numbers[:, None, of])
        return _Block(first, keys, View(False, self.scale, seen[:, None]))

    def by_sequence(self, x: Tensor) -> Tensor:
        """Rows by sequence: ``(B, R, ...)``."""
        return x.reshape(self.batch.sequences, -1, *x.shape[1:])

    def blocks(self, left: Tensor, right: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The blocks of all places, the own one first, as ``(place, left, right)``; the next is under way meanwhile."""
        size, place = self.cp.size, self.cp.index
        widths = left.shape[-1], right.shape[-1]
        now = torch.cat((left, right), dim=-1)
        for step in range(size):
            coming, works = now, _NO_WORK
            if step < size - 1:
                with scope(name="K and V block"):
                    coming, works = exchange(now, self.cp, *neighbours(size, place))
            yield owner(step, size, place), *now.split(widths, dim=-1)
            _wait(works)
            now = coming

    def made(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``(T, K, d)`` and values ``(T, K, v)`` of a block."""
        return (left, right) if self.unfold is None else self.unfold(left, right)


class Ring(torch.autograd.Function):
    """Softmax attention whose keys go round."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THd: Tensor,
        left: Tensor,
        right: Tensor,
        sinks_H: Tensor | None,
        weight: Tensor | None,
        ring: _Ring,
    ) -> Tensor:
        """``(T, H, d)`` in, ``(T, H, v)`` out; ``left`` and ``right``: what the ring hands on."""
        q, whole = ring.by_sequence(q_THd), None
        for other, k, v in ring.blocks(left, right):
            b = ring.block(other)
            k, v = (ring.by_sequence(x)[:, : b.keys] for x in ring.made(k, v))
            whole = _merged(whole, part(q[:, b.first :], k, v, b.view), b.first)
        assert whole is not None
        whole = with_sinks(whole, sinks_H)
        ctx.save_for_backward(q_THd, left, right, sinks_H, *whole)
        ctx.weight, ctx.ring, ctx.at = weight, ring, where()
        return whole.out.to(q_THd.dtype).flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_THv: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of queries, what went round, sinks and the weight of ``unfold``."""
        q_THd, left, right, sinks_H, *kept = ctx.saved_tensors
        ring, whole, do = ctx.ring, Part(*kept), ctx.ring.by_sequence(do_THv)
        q, dq = ring.by_sequence(q_THd), torch.zeros_like(ring.by_sequence(q_THd), dtype=kept[1].dtype)
        home = _Home(ring.cp)
        dw: Tensor | None = None
        with backward_of(ctx.at):
            for other, near, far in ring.blocks(left, right):
                b = ring.block(other)
                of = slice(b.first, None)
                seen = Part(whole.out[:, of], whole.lse[:, :, of])
                k, v, back = _opened(ring, near, far, ctx.weight)
                k, v = (ring.by_sequence(x) for x in (k, v))
                got = part_gradient(do[:, of], q[:, of], k[:, : b.keys], v[:, : b.keys], seen, b.view)
                dq[:, of] += got.q
                dl, dr, more = back(*(_filled(g, k.shape[1]).flatten(0, 1) for g in got[1:]))
                dw = more if dw is None or more is None else dw + more
                home.add(torch.cat((dl, dr), dim=-1).to(kept[1].dtype))
            dl, dr = home.arrived().to(left.dtype).split((left.shape[-1], right.shape[-1]), dim=-1)
            sinks = None if sinks_H is None else sinks_gradient(do, whole, sinks_H)
        return dq.to(q_THd.dtype).flatten(0, 1), dl, dr, sinks, dw, None


class _Home:
    """Gradients of keys and values on their way to the place whose block they belong to."""

    def __init__(self, cp: Group) -> None:
        self.cp = cp
        self._coming: tuple[Tensor, Works] | None = None

    def add(self, own: Tensor) -> None:
        """What this place adds for the block of the step, to what the places before it found; both go on."""
        total = own if self._coming is None else own + self._taken()
        with scope(name="K and V block gradient"):
            self._coming = exchange(total, self.cp, *neighbours(self.cp.size, self.cp.index))

    def arrived(self) -> Tensor:
        """The gradient of the own block, after the last step."""
        return self._taken()

    def _taken(self) -> Tensor:
        assert self._coming is not None
        x, works = self._coming
        _wait(works)
        return x


def _opened(ring: _Ring, left: Tensor, right: Tensor, weight: Tensor | None) -> Any:
    """Keys and values of a block, and what turns their gradients into those of ``(left, right, weight)``."""
    if ring.unfold is None or weight is None:
        return left, right, lambda dk, dv: (dk, dv, None)
    inputs = left.detach().requires_grad_(), right.detach().requires_grad_(), weight
    with torch.enable_grad():
        k, v = ring.unfold(*inputs[:2])

    def back(dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        # No gradient of the weight where a split backward puts it off.
        return torch.autograd.grad((k, v), inputs, (dk, dv), allow_unused=True)

    return k.detach(), v.detach(), back


def _filled(dx: Tensor, rows: int) -> Tensor:
    """Zero for the rows of a block that nobody here sees."""
    missing = rows - dx.shape[1]
    return dx if not missing else torch.cat((dx, dx.new_zeros((dx.shape[0], missing, *dx.shape[2:]))), dim=1)


def _merged(whole: Part | None, new: Part, first: int) -> Part:
    """A part of the queries from ``first`` on merged in; the own block comes first and every query sees itself."""
    if whole is None:
        return Part(new.out.to(new.lse.dtype), new.lse)
    old_out, old_lse = whole.out[:, first:], whole.lse[:, :, first:]
    lse = torch.logaddexp(old_lse, new.lse)

    def share(part_lse: Tensor) -> Tensor:
        return (part_lse - lse).exp().transpose(1, 2)[..., None]

    out = old_out * share(old_lse) + new.out * share(new.lse)
    if not first:
        return Part(out, lse)
    return Part(torch.cat((whole.out[:, :first], out), dim=1), torch.cat((whole.lse[:, :, :first], lse), dim=2))


def _wait(works: Works) -> None:
    for work in works:
        if work is not None:
            work.wait()


def ring(
    cp: Group,
    batch: TrainBatch,
    q_THd: Tensor,
    left: Tensor,
    right: Tensor,
    how: Scores,
    unfold: Unfold | None,
    weight: Tensor | None,
) -> Tensor:
    """Attention over all ranks of cp: ``(T, H v)``; ``unfold`` and ``weight``: see ``TrainStep.unfolded``."""
    tables = _Ring(cp, batch, how, how.scale or q_THd.shape[-1] ** -0.5, unfold)
    out: Tensor = Ring.apply(q_THd, left, right, how.sinks_H, weight, tables)  # type: ignore[no-untyped-call]
    return out.flatten(1)

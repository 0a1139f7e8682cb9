"""Context parallelism: attention of queries whose keys lie on several ranks, from the tables of
``moves.context``.

::

    prefill, ring       for every place of cp: part(q, block) merged in; block to the next place meanwhile
    prefill, ulysses    q, k, v: all_to_all of heads; attention over all tokens; all_to_all back
    decode              part(q, own cache); outputs and log-sums all_gathered; merged

A part is the softmax over some of the keys, with the logarithm of its denominator; parts are merged by these sums
(Milakov and Gimelshein, arXiv:1805.02867; Liu et al., arXiv:2310.01889), in fp32.

Legend: T rows of this rank, Z sequences, B tokens of a decode step, S cached rows of this rank, H query heads, K KV
heads, d width of a key and v of a value head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.moves.context import neighbours, owner, reach
from meshwright.runtime.collectives import all_gather_rows, all_to_all, exchange
from meshwright.runtime.mesh import Group
from meshwright.runtime.models.attention import CORE, Scores
from meshwright.runtime.scope import scope
from meshwright.runtime.serve.cache import Batch, PagedCache
from meshwright.runtime.serve.dealt import DealtBatch

#: What is cached of all sequences in, keys and values out.
Unfold = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Part(NamedTuple):
    """Softmax over some keys: weighted values ``(..., H, v)`` and log-sums ``(..., H)``, -inf where no key is seen."""

    out: Tensor
    lse: Tensor


def visible(at: Tensor, of: Tensor, window: int | None) -> Tensor:
    """Whether positions ``at`` (t) see positions ``of`` (s): ``(..., t, s)``."""
    ahead = at[..., :, None] - of[..., None, :]
    return ahead >= 0 if window is None else (ahead >= 0) & (ahead < window)


def part(q_ZtHd: Tensor, k_ZsKd: Tensor, v_ZsKv: Tensor, seen_Zts: Tensor, scale: float | None) -> Part:
    """Attention of some queries to some keys, in fp32."""
    z, t, h, d = q_ZtHd.shape
    heads = k_ZsKd.shape[2]
    q = q_ZtHd.float().view(z, t, heads, h // heads, d).permute(0, 2, 3, 1, 4)
    k, v = (x.float().permute(0, 2, 1, 3)[:, :, None] for x in (k_ZsKd, v_ZsKv))
    with scope(name=CORE):
        scores = q @ k.transpose(-1, -2) * (scale or d**-0.5)
        scores = scores.masked_fill(~seen_Zts[:, None, None], float("-inf"))
        lse = scores.logsumexp(-1)
        out = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp() @ v
    return Part(out.permute(0, 3, 1, 2, 4).flatten(2, 3), lse.permute(0, 3, 1, 2).flatten(2, 3))


def merge(parts: Part, more: Part) -> Part:
    """Two parts over different keys as one."""
    lse = torch.logaddexp(parts.lse, more.lse)
    return Part(sum_of((parts, more), lse), lse)


def sum_of(parts: Sequence[Part], lse: Tensor) -> Tensor:
    """Outputs of parts, each by its share of the denominator ``exp(lse)``."""
    safe = lse.nan_to_num(neginf=0.0)
    shares = (p.out * (p.lse - safe).exp()[..., None] for p in parts)
    return torch.stack(list(shares)).sum(0)


def finish(p: Part, sinks_H: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``(T, H v)`` of parts merged over all keys; a sink takes its share of the denominator and adds no value."""
    out = p.out if sinks_H is None else sum_of((p,), torch.logaddexp(p.lse, sinks_H.float()))
    return out.to(dtype).flatten(1)


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """Attention over the ranks of ``cp``; ``ulysses``: by all_to_all of heads, else on the ring."""

    cp: Group
    ulysses: bool

    def attend(self, q_THd: Tensor, layer: int, batch: Batch, cache: PagedCache, how: Scores) -> Tensor:
        """As ``models.attention.attend``: ``(T, H v)``."""
        assert isinstance(batch, DealtBatch)
        if batch.phase == "decode":
            return self.decode(q_THd, *cache.read(layer, batch.table_BM, max(batch.contexts)), batch, how)
        pairs = [cache.read(layer, batch.table_BM[row], n) for row, n in enumerate(batch.contexts)]
        k, v = (torch.cat(side) for side in zip(*pairs, strict=True))
        return self.prefill(q_THd, k, v, batch, how)

    def prefill(
        self, q_THd: Tensor, k: Tensor, v: Tensor, batch: Batch, how: Scores, unfold: Unfold = lambda k, v: (k, v)
    ) -> Tensor:
        """Attention to what is cached of all sequences: ``(T, H v)``.

        ``unfold`` makes keys ``(S, K, d)`` and values ``(S, K, v)`` of what is cached, which is what the ring hands on.
        """
        assert isinstance(batch, DealtBatch)
        if self.ulysses:
            return self.alltoall(q_THd, *unfold(k, v), batch, how)
        return self.ring(q_THd, k, v, batch, how, unfold)

    def decode(self, q_BHd: Tensor, k_BSKd: Tensor, v_BSKv: Tensor, batch: Batch, how: Scores) -> Tensor:
        """Every rank answers all queries from its part of the cache: ``(B, H v)``."""
        assert isinstance(batch, DealtBatch)
        assert batch.keys_BS is not None
        seen = visible(batch.positions_T[:, None], batch.keys_BS, how.window)
        own = part(q_BHd[:, None], k_BSKd, v_BSKv, seen, how.scale)
        with scope(name="outputs and log-sums"):
            both = all_gather_rows(torch.cat((own.out, own.lse[..., None]), dim=-1)[:, 0], self.cp)
        parts = [Part(x[..., :-1], x[..., -1]) for x in both.chunk(self.cp.size)]
        lse = torch.stack([p.lse for p in parts]).logsumexp(0)
        return finish(Part(sum_of(parts, lse), lse), how.sinks_H, q_BHd.dtype)

    def ring(self, q_THd: Tensor, k: Tensor, v: Tensor, batch: DealtBatch, how: Scores, unfold: Unfold) -> Tensor:
        """Blocks of what is cached go round; while one is worked on the next is under way: ``(T, H v)``."""
        size, place = self.cp.size, self.cp.index
        found: list[Part | None] = [None] * len(batch.lengths)
        block = torch.cat((k, v), dim=-1)
        no_work: tuple[dist.Work | None, ...] = ()
        for step in range(size):
            coming, works = block, no_work
            if step < size - 1:
                with scope(name="K and V block"):
                    coming, works = exchange(block, self.cp, *neighbours(size, place))
            k_SKd, v_SKv = unfold(*block.split((k.shape[-1], v.shape[-1]), dim=-1))
            self._block(found, q_THd, k_SKd, v_SKv, owner(step, size, place), batch, how)
            for work in works:
                if work is not None:
                    work.wait()
            block = coming
        parts = [p for p in found if p is not None]
        whole = Part(torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts]))
        return finish(whole, how.sinks_H, q_THd.dtype)

    def _block(
        self,
        found: list[Part | None],
        q_THd: Tensor,
        k_SKd: Tensor,
        v_SKv: Tensor,
        other: int,
        batch: DealtBatch,
        how: Scores,
    ) -> None:
        """Merge what the queries of all sequences see of the keys of place ``other``."""
        mine = batch.queries[self.cp.index]
        sides = q_THd.split(batch.lengths), k_SKd.split(batch.contexts), v_SKv.split(batch.contexts)
        for row, (q, k, v) in enumerate(zip(*sides, strict=True)):
            first, count = reach(batch.pieces[row], self.cp.size, self.cp.index, other)
            seen = visible(mine[row][first:], batch.keys[other][row][:count], how.window)
            new = part(q[None, first:], k[None, :count], v[None, :count], seen[None], how.scale)
            out, lse = new.out[0], new.lse[0]
            known = found[row]
            if known is None:
                found[row] = Part(out, lse)
                continue
            rest = merge(Part(known.out[first:], known.lse[first:]), Part(out, lse))
            found[row] = (
                Part(torch.cat((known.out[:first], rest.out)), torch.cat((known.lse[:first], rest.lse)))
                if first
                else rest
            )

    def alltoall(self, q_THd: Tensor, k_SKd: Tensor, v_SKv: Tensor, batch: DealtBatch, how: Scores) -> Tensor:
        """All tokens of some heads instead of some tokens of all heads, and back: ``(T, H v)``."""
        size, h = self.cp.size, q_THd.shape[1] // self.cp.size
        dealt = []
        for name, x in (("Q", q_THd), ("K", k_SKd), ("V", v_SKv)):
            heads = max(1, x.shape[1] // size)
            wide = x if x.shape[1] >= size else x.repeat_interleave(size // x.shape[1], dim=1)
            with scope(name=f"{name} heads"):
                dealt.append(all_to_all(wide.unflatten(1, (size, heads)).transpose(0, 1), self.cp))
        outs = []
        for row, (q, k, v) in enumerate(
            zip(
                dealt[0].split(batch.lengths, dim=1),
                dealt[1].split(batch.contexts, dim=1),
                dealt[2].split(batch.contexts, dim=1),
                strict=True,
            )
        ):
            at, of = (torch.cat([place[row] for place in side]) for side in (batch.queries, batch.keys))
            q_1, k_1, v_1 = (x.flatten(0, 1)[None] for x in (q, k, v))
            p = part(q_1, k_1, v_1, visible(at, of, how.window)[None], how.scale)
            sinks = None if how.sinks_H is None else how.sinks_H[h * self.cp.index : h * (self.cp.index + 1)]
            outs.append(finish(Part(p.out[0], p.lse[0]), sinks, q_THd.dtype).view(size, q.shape[1], h, -1))
        with scope(name="output heads"):
            back = all_to_all(torch.cat(outs, dim=1), self.cp)
        return back.transpose(0, 1).flatten(1)

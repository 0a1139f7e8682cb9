"""Softmax attention over the paged cache. No collective: a rank attends with its own heads.

A layer may scale scores by another factor than 1 / sqrt(d), see back through a window only, and add a learned logit a
head to every softmax, whose weight goes to no value (a sink, as GPT-OSS has).

Legend: T tokens, B sequences, H query heads, K KV heads, G = H / K query heads a KV head, d head width, S cached
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.runtime.scope import scope
from meshwright.runtime.serve.cache import Batch, PagedCache

#: Name of the scope in which products are part of the attention itself, and no products with weights.
CORE = "attention core"


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer turns scores into weights.

    Attributes:
        window: a token sees itself and the ``window - 1`` before it; None: all before it.
        scale: of the scores; None: 1 / sqrt(d).
        sinks_H: one logit a query head, or None.
    """

    window: int | None = None
    scale: float | None = None
    sinks_H: Tensor | None = None


def attend(q_THd: Tensor, layer: int, batch: Batch, cache: PagedCache, how: Scores) -> Tensor:
    """Causal attention of every token to its own sequence's cache (the pass is written already): ``(T, H d)``.

    Sequences of one token that stand before all others are decoded together.
    """
    ones = next((row for row, length in enumerate(batch.lengths) if length > 1), len(batch.lengths))
    if ones == len(batch.lengths):
        return _decoded(q_THd, layer, batch, cache, how)
    out = [_decoded(q_THd[:ones], layer, batch.first(ones), cache, how)] if ones else []
    start = ones
    for row in range(ones, len(batch.lengths)):
        k, v = cache.read(layer, batch.table_BM[row], batch.contexts[row])
        out.append(one(q_THd[start : start + batch.lengths[row]], k, v, how).flatten(1))
        start += batch.lengths[row]
    return torch.cat(out)


def _decoded(q_BHd: Tensor, layer: int, batch: Batch, cache: PagedCache, how: Scores) -> Tensor:
    """A batch of one token a sequence."""
    k_BSKd, v_BSKd = cache.read(layer, batch.table_BM, max(batch.contexts))
    return decode(q_BHd, k_BSKd, v_BSKd, batch, how)


def one(q_THd: Tensor, k_SKd: Tensor, v_SKd: Tensor, how: Scores) -> Tensor:
    """The last T of S tokens of one sequence: ``(T, H, d)``."""
    t, h, d = q_THd.shape
    s, heads = k_SKd.shape[:2]
    q = q_THd.transpose(0, 1).view(heads, h // heads, t, d)
    k, v = (x.transpose(0, 1)[:, None].expand(heads, h // heads, s, x.shape[2]) for x in (k_SKd, v_SKd))
    if t == s and how.window is None and how.sinks_H is None:
        with scope(name=CORE):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=how.scale)
        return out.flatten(0, 1).transpose(0, 1)
    at = torch.arange(s - t, s, device=q.device)[:, None]
    seen = _visible(at, torch.arange(s, device=q.device)[None, :], how.window)
    sinks = None if how.sinks_H is None else how.sinks_H.view(heads, h // heads, 1, 1)
    return _weighted(q, k, v, seen, how.scale, sinks).flatten(0, 1).transpose(0, 1)


def decode(q_BHd: Tensor, k_BSKd: Tensor, v_BSKd: Tensor, batch: Batch, how: Scores) -> Tensor:
    """One token of every sequence: ``(B, H d)``; the G query heads of a KV head are rows of one product."""
    b, h, d = q_BHd.shape
    longest, heads = k_BSKd.shape[1:3]
    q = q_BHd.view(b, heads, h // heads, d)
    seen = None
    if how.window is not None or min(batch.contexts) < longest:
        seen = _decode_mask(batch, longest, how, q.dtype)
    sinks = None if how.sinks_H is None else how.sinks_H.view(heads, h // heads, 1)
    out = _weighted(q, k_BSKd.transpose(1, 2), v_BSKd.transpose(1, 2), seen, how.scale, sinks)
    return out.reshape(b, -1)


def _decode_mask(batch: Batch, longest: int, how: Scores, dtype: torch.dtype) -> Tensor:
    """What each sequence sees, ``(B, 1, 1, S)``: of layers with sinks as truth values, else as what is added to scores,
    to which the attention would turn it in every layer anew."""
    added = how.sinks_H is None
    key = "mask", len(batch.contexts), longest, how.window, dtype if added else None
    found = batch.kept.get(key)
    if found is None:
        at = batch.positions_T[: len(batch.contexts), None]
        found = _visible(at, torch.arange(longest, device=at.device)[None, :], how.window)[:, None, None, :]
        if added:
            found = torch.zeros_like(found, dtype=dtype).masked_fill_(~found, float("-inf"))
        batch.kept[key] = found
    return found


def _weighted(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float | None, sinks: Tensor | None
) -> Tensor:
    """Softmax of the scores times values; ``sinks`` broadcast to ``(..., rows of q, 1)``."""
    with scope(name=CORE):
        if sinks is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
        scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
        if seen is not None:
            scores = scores.masked_fill(~seen, float("-inf"))
        wide = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), dim=-1)
        return wide.softmax(dim=-1)[..., :-1] @ v


def _visible(at: Tensor, of: Tensor, window: int | None) -> Tensor:
    """Whether position ``at`` sees position ``of``."""
    seen = of <= at
    return seen if window is None else seen & (of > at - window)

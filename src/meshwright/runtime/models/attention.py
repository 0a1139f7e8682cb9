"""Softmax attention over the paged cache. No collective: a rank attends with its own heads.

Legend: T tokens, B sequences, H query heads, K KV heads, G = H / K query heads a KV head, d head width, S cached
tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.runtime.serve.cache import Batch, PagedCache


def attend(q_THd: Tensor, layer: int, batch: Batch, cache: PagedCache, window: int | None) -> Tensor:
    """Causal attention of every token to its own sequence's cache (the pass itself is written already): ``(T, H d)``.

    ``window``: a token sees itself and the ``window - 1`` before it; None: all before it.
    """
    if max(batch.lengths) == 1:
        return _decode(q_THd, layer, batch, cache, window)
    out = []
    start = 0
    for row, (length, context) in enumerate(zip(batch.lengths, batch.contexts, strict=True)):
        k, v = cache.read(layer, batch.table_BM[row], context)
        out.append(_one(q_THd[start : start + length], k, v, window))
        start += length
    return torch.cat(out).flatten(1)


def _one(q_THd: Tensor, k_SKd: Tensor, v_SKd: Tensor, window: int | None) -> Tensor:
    """The last T of S tokens of one sequence."""
    t, h, d = q_THd.shape
    s, heads = k_SKd.shape[:2]
    q = q_THd.transpose(0, 1).view(heads, h // heads, t, d)
    k, v = (x.transpose(0, 1)[:, None].expand(heads, h // heads, s, d) for x in (k_SKd, v_SKd))
    if t == s and window is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).flatten(0, 1).transpose(0, 1)
    at = torch.arange(s - t, s, device=q.device)[:, None]
    seen = _visible(at, torch.arange(s, device=q.device)[None, :], window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).flatten(0, 1).transpose(0, 1)


def _decode(q_BHd: Tensor, layer: int, batch: Batch, cache: PagedCache, window: int | None) -> Tensor:
    """One token of every sequence; the G query heads of a KV head are rows of one product."""
    b, h, d = q_BHd.shape
    longest = max(batch.contexts)
    k, v = cache.read(layer, batch.table_BM, longest)
    q = q_BHd.view(b, k.shape[2], h // k.shape[2], d)
    seen = None
    if window is not None or min(batch.contexts) < longest:
        at = batch.positions_T[:, None]
        seen = _visible(at, torch.arange(longest, device=q.device)[None, :], window)[:, None, None, :]
    out = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=seen)
    return out.reshape(b, h * d)


def _visible(at: Tensor, of: Tensor, window: int | None) -> Tensor:
    """Whether position ``at`` sees position ``of``."""
    seen = of <= at
    return seen if window is None else seen & (of > at - window)

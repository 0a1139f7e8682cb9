"""Attention cores and recurrent mixers: FLOPs and bytes between the projections, on one rank.

Counts: a score is 2 x head width operations for a pair of a query and a key, a weighted value 2 x value width.
Only the pairs that the mask admits count (a kernel that skips masked blocks). Cached keys and values are read once
a sequence, which is what a decode kernel does and the least that a prefill kernel does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.plan.wire import Op, Shape, compute
from meshwright.specs.dtypes import DTYPE_BYTES
from meshwright.specs.model import Attention, Recurrent

#: Operations for each element of the state and token: decay, outer product and readout, as in the recurrence of
#: the paper (Mamba 2: arXiv 2405.21060, eq. 1; gated delta rule: arXiv 2412.06464, eq. 10; KDA: arXiv 2510.26692;
#: Lightning attention: arXiv 2401.04658; RWKV-7: arXiv 2503.14456). Chunked kernels do more: modelled.
STATE_FLOPS = {"mamba2": 5, "mamba1": 6, "gated_delta_net": 8, "kda": 9, "lightning": 5, "rwkv": 9, "short_conv": 0}


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences in one forward of one data-parallel replica, equal ones unless ``each`` is given.

    Attributes:
        phase: ``prefill``, ``decode``, ``forward`` (training).
        sequences: how many.
        new_tokens: tokens of each that enter.
        past: tokens of each that the cache holds already.
        each: new tokens and past of every sequence, instead of the three numbers before.
        sampled: rows whose logits are wanted; None: one a sequence.
        chunk: most tokens of one sequence that enter in one forward; None: all.
    """

    phase: Literal["prefill", "decode", "forward"]
    sequences: int
    new_tokens: int
    past: int = 0
    each: tuple[tuple[int, int], ...] = ()
    sampled: int | None = None
    chunk: int | None = None

    @property
    def rows(self) -> tuple[tuple[int, int, int], ...]:
        """How many sequences there are with how many new tokens and which past."""
        return tuple((1, *row) for row in self.each) or ((self.sequences, self.new_tokens, self.past),)

    @property
    def tokens(self) -> int:
        """Tokens that enter."""
        return sum(count * new for count, new, _ in self.rows)

    @property
    def cached(self) -> int:
        """Tokens that the cache holds already, of all sequences."""
        return sum(count * past for count, _, past in self.rows)


def reach_sum(new: int, past: int, reach: int | None) -> int:
    """Sum over the new tokens of a sequence of how many tokens each sees (itself included), at most ``reach``."""
    if reach is None or past + new <= reach:
        return new * past + new * (new + 1) // 2
    growing = max(0, reach - past)
    return growing * past + growing * (growing + 1) // 2 + (new - growing) * reach


def chunk_sum(new: int, past: int, chunk: int) -> int:
    """The same when a token sees back to the start of its chunk only."""

    def upto(n: int) -> int:
        full, rest = divmod(n, chunk)
        return full * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2

    return upto(past + new) - upto(past)


def pairs(a: Attention, new: int, past: int) -> int:
    """Pairs of query and key of one sequence that the attention scores with values behind them.

    With a compressed cache (DeepSeek-V4) a query sees its window as it is and, of what lies compressed, all entries
    or the selected ones.
    """
    if not a.causal:
        return new * (past + new)
    topk = a.indexer.topk if a.indexer is not None else None
    if a.compress_ratio > 1:
        near = reach_sum(new, past, a.window) if a.window is not None else 0
        far = reach_sum(new, past, None if topk is None else topk * a.compress_ratio) // a.compress_ratio
        return max(1, near + far)
    if a.chunk is not None and a.window is None:
        return chunk_sum(new, past, a.chunk)
    reaches = [r for r in (a.window, topk) if r is not None]
    return reach_sum(new, past, min(reaches) if reaches else None)


def cache_read(a: Attention, new: int, past: int) -> int:
    """Cached tokens (or compressed entries) of one sequence that are read."""
    seen = past + new
    topk = a.indexer.topk * new if a.indexer is not None else seen
    near = min(seen, a.window - 1 + new) if a.window is not None else seen
    if a.compress_ratio > 1:
        return (near if a.window is not None else 0) + max(1, min(seen // a.compress_ratio, topk))
    if a.chunk is not None and a.window is None:
        return min(seen, new + past % a.chunk) if new < a.chunk else seen
    return max(1, min(near, topk))


def attention_core(a: Attention, heads: int, kv_heads: int, batch: Batch, kv_dtype: str, dtype: str, parts: int) -> Op:
    """Scores, softmax and weighted values of one layer.

    Args:
        a: the attention. heads, kv_heads: held by the rank (``heads`` those it computes).
        batch: tokens. kv_dtype: of the cache. dtype: of the computation.
        parts: ranks that share out the context (context or decode context parallel); pairs are dealt evenly.
    """
    act, kv = DTYPE_BYTES[dtype], DTYPE_BYTES[kv_dtype]
    seen = -(-sum(n * cache_read(a, new, past) for n, new, past in batch.rows) // parts)
    scored = -(-sum(n * pairs(a, new, past) for n, new, past in batch.rows) // parts)
    tokens = batch.tokens
    values = a.v_head_dim or a.head_dim
    if a.kind == "mla" and batch.phase == "decode":
        latent = a.kv_lora_rank + a.rope_head_dim
        flops = 2 * scored * heads * (latent + a.kv_lora_rank)
        moved = seen * latent * kv + tokens * heads * (latent + a.kv_lora_rank) * act + tokens * latent * kv
        shapes: tuple[Shape, ...] = ((tokens, heads, latent), (seen, latent))
    else:
        kv_heads = heads if a.kind == "mla" else kv_heads
        flops = 2 * scored * heads * (a.head_dim + values)
        held = kv_heads * (a.head_dim + (values if a.kind == "mla" else a.v_head_dim))
        size = act if a.kind == "mla" or batch.phase == "forward" else kv
        new = 0 if a.shares_kv_with is not None else tokens * held * size
        moved = seen * held * size + new + tokens * heads * (a.head_dim + values) * act
        shapes = ((tokens, heads, a.head_dim), (seen, kv_heads, a.head_dim), (seen, kv_heads, values))
    return compute("attention", "attention core", shapes, dtype, moved, flops)


def indexer_core(a: Attention, heads: int, batch: Batch, dtype: str) -> list[Op]:
    """Scores of the token selector over every cached token (DeepSeek-V3.2, one key head)."""
    if a.indexer is None or not a.indexer.heads:
        return []
    i = a.indexer
    seen = batch.sequences * max(1, (batch.past + batch.new_tokens) // a.compress_ratio)
    scored = batch.sequences * reach_sum(batch.new_tokens, batch.past, None) // a.compress_ratio
    shapes = ((batch.tokens, heads, i.head_dim), (seen, i.head_dim))
    moved = (batch.tokens * heads + seen) * i.head_dim * DTYPE_BYTES[dtype]
    return [compute("attention", "indexer core", shapes, dtype, moved, 2 * scored * heads * i.head_dim)]


def recurrent_core(r: Recurrent, heads: int, batch: Batch, dtype: str) -> Op:
    """State update and readout of one layer; the state of every sequence is read and written once."""
    state = heads * r.head_dim * r.state_dim
    conv = r.conv_values * heads // max(1, r.heads)
    channels = r.conv_channels * heads // max(1, r.heads)
    flops = batch.tokens * (STATE_FLOPS.get(r.kind, 6) * state + 2 * r.conv_kernel * channels)
    size = DTYPE_BYTES[dtype]
    moved = 2 * batch.sequences * (state * DTYPE_BYTES.get(r.state_dtype, 4) + conv * size)
    moved += batch.tokens * (channels + heads * r.head_dim) * size
    shapes = ((batch.tokens, heads, r.head_dim), (batch.sequences, heads, r.head_dim, r.state_dim))
    return compute("recurrent", f"{r.kind} core", shapes, dtype, moved, flops)

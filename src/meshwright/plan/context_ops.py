"""The attention core of a layer with the collectives of context parallelism around it.

Legend: T tokens of the rank's batch (a prompt is dealt over cp), S tokens that its cache holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.moves.context import pieces_of, rows
from meshwright.plan.cores import attention_core, indexer_core
from meshwright.plan.products import Kind
from meshwright.plan.wire import Op, collective, hand_off
from meshwright.specs.model import Attention

if TYPE_CHECKING:
    from meshwright.plan.layer_ops import Context


def cached_rows(c: Context) -> int:
    """S: rows of all sequences that a rank of cp caches behind a prefill, where prompts are dealt in pieces."""
    cp, b = c.layout.cp, c.batch
    return sum(n * sum(rows(piece, cp) for piece in pieces_of(past + new, b.chunk)) for n, new, past in b.rows)


def attention_ops(c: Context, kind: Kind, a: Attention) -> list[Op]:
    """The core with the collectives of context parallelism around it."""
    heads, kv_heads = kind.units.get("heads", a.heads), kind.units.get("kv_heads", a.kv_heads)
    index_heads = kind.units.get("index_heads", a.indexer.heads if a.indexer else 0)
    ops = indexer_core(a, index_heads, c.batch, c.dtype)
    values = a.v_head_dim or a.head_dim
    if c.layout.dcp > 1 and c.batch.phase != "forward":
        return ops + _decode_context(c, a, heads, kv_heads, values)
    if c.dealt:
        return ops + _dealt(c, a, heads, kv_heads, values)
    cp = c.layout.cp if c.batch.phase != "decode" else 1
    if cp == 1:
        return [*ops, attention_core(a, heads, kv_heads, c.batch, c.kv_dtype, c.dtype, 1)]
    core = attention_core(a, heads, kv_heads, c.batch, c.kv_dtype, c.dtype, cp)
    latent = a.kind == "mla"
    kv_shape = (c.tokens, a.kv_lora_rank + a.rope_head_dim) if latent else (c.tokens, kv_heads, a.head_dim + values)
    way = context_way(c)
    if way == "all_gather":
        return [*ops, *collective("all_gather", "K and V", "cp", cp, kv_shape, c.dtype), core]
    if way == "ring":
        moves = [hand_off(op, "K and V block", "cp", -1, kv_shape, c.dtype, cp - 1) for op in ("send", "recv")]
        return [*ops, *(m._replace(peer=None) for m in moves), core]
    shapes = {"Q": (heads, a.head_dim), "K": (kv_heads, a.head_dim), "V": (kv_heads, values)}
    for name, (n, width) in shapes.items():
        ops += collective("all_to_all", f"{name} heads", "cp", cp, (c.tokens, n, width), c.dtype)
    return [*ops, core, *collective("all_to_all", "output heads", "cp", cp, (c.tokens, heads, values), c.dtype)]


def context_way(c: Context) -> str:
    """How attention works over cp: as the layout says, else as the engine does."""
    return c.ways.context if c.layout.cp_kind == "auto" else c.layout.cp_kind


def _dealt(c: Context, a: Attention, heads: int, kv_heads: int, values: int) -> list[Op]:
    """Prompts and cache dealt over cp as in ``moves.context``: what our own runtime sends.

    The ring hands keys and values side by side to the next place, cp - 1 times; of latent attention it hands the
    latents, which every place unfolds. With all_to_all KV heads that are fewer than cp travel in copies. In a decode
    step outputs and log-sums travel together in fp32.
    """
    cp, latent = c.layout.cp, a.kind == "mla"
    core = attention_core(a, heads, kv_heads, c.batch, c.kv_dtype, c.dtype, cp)
    if c.batch.phase == "decode":
        shape = (c.tokens, heads, (a.kv_lora_rank if latent else values) + 1)
        return [core, *collective("all_gather", "outputs and log-sums", "cp", cp, shape, "f32")]
    held = cached_rows(c)
    if context_way(c) == "ring":
        block = (held, 1, a.kv_lora_rank + a.rope_head_dim) if latent else (held, kv_heads, a.head_dim + values)
        hop = [hand_off(op, "K and V block", "cp", -1, block, c.dtype)._replace(peer=None) for op in ("send", "recv")]
        return [*hop * (cp - 1), core]
    kv_each = heads // cp if latent else max(1, kv_heads // cp)
    sides = [("Q", c.tokens, heads // cp, a.head_dim), ("K", held, kv_each, a.head_dim), ("V", held, kv_each, values)]
    ops: list[Op] = []
    for name, t, n, width in sides:
        ops += collective("all_to_all", f"{name} heads", "cp", cp, (cp, t, n, width), c.dtype)
    return [
        *ops,
        core,
        *collective("all_to_all", "output heads", "cp", cp, (cp, c.tokens, heads // cp, values), c.dtype),
    ]


def _decode_context(c: Context, a: Attention, heads: int, kv_heads: int, values: int) -> list[Op]:
    """Decode context parallel (vLLM ``--dcp-comm-backend ag_rs``): the cache is dealt over dcp ranks inside tp.

    Queries of all dcp ranks are gathered, every rank attends to its part of the cache with all of them, the log
    sums (fp32) are gathered and the corrected outputs reduce_scattered over heads. While MLA prefills without a
    past nothing moves, with one the cached latents are gathered.
    """
    dcp, t = c.layout.dcp, c.tokens
    if a.kind == "mla" and c.batch.phase == "prefill":
        core = attention_core(a, heads, 1, c.batch, c.kv_dtype, c.dtype, 1)
        part = (-(-c.batch.cached // dcp), a.kv_lora_rank + a.rope_head_dim)
        return [*collective("all_gather", "cached latents", "dcp", dcp, part, c.dtype), core]
    mla = a.kind == "mla"
    width = a.kv_lora_rank + a.rope_head_dim if mla else a.head_dim
    out = a.kv_lora_rank if mla else values
    return [
        *collective("all_gather", "queries", "dcp", dcp, (t, heads, width), c.dtype),
        attention_core(a, heads * dcp, kv_heads, c.batch, c.kv_dtype, c.dtype, dcp),
        *collective("all_gather", "log sums", "dcp", dcp, (t, heads * dcp), "f32"),
        *collective("reduce_scatter", "outputs", "dcp", dcp, (t, heads * dcp, out), c.dtype),
    ]

"""MiniMax-M2 and the text part of MiniMax-M3: experts named w1, w3, w2 and a routing bias."""

from __future__ import annotations

from dataclasses import replace

from meshwright.errors import InputError
from meshwright.specs.hf.dense import attention_tensors, ends, gqa, mlp_tensors
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.moe import (
    MIXTRAL,
    after_dense,
    moe_decoder,
    moe_tensors,
    outside,
    qk_norms,
    routed,
    shared_width,
    stack,
)
from meshwright.specs.hf.mtp import MtpNames, nextn
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Attention, Indexer, Layer

NAMES = replace(
    MIXTRAL,
    routing_bias="block_sparse_moe.e_score_correction_bias",
    shared="block_sparse_moe.shared_experts",
)
PREDICTION = MtpNames(
    "model.mtp.layers.{layer}.", False, "transformer_layer.", last="final_layernorm", embed="", head=""
)


@architecture("MiniMaxM2ForCausalLM", "minimax_m2")
def minimax_m2(f: Fields, dtype: str) -> Parts:
    """MiniMax-M2 to M2.7: norms over all query (key) heads at once, every layer routes.

    Routers are stored in fp32. ``num_mtp_modules`` is 3, but the published 229 B parameters are those of the
    62 decoder layers alone.
    """
    n = f.layers()
    moe = routed(f, width=("intermediate_size",), experts=256, topk=8)
    norm = "whole" if f.flag("use_qk_norm", default=True) else ""
    mixers = (gqa(f),) * n
    return moe_decoder(f, dtype, mixers, range(n), moe, NAMES, qk_norm=norm, router_dtype="f32")[1]


@architecture("MiniMaxM3ForCausalLM", "MiniMaxM3SparseForCausalLM", "minimax_m3", "minimax_m3_vl_text")
def minimax_m3(f: Fields, dtype: str) -> Parts:
    """MiniMax-M3's text part: three dense layers, then one shared and 128 routed experts.

    Its sparse layers choose blocks of cached tokens with an index of a few heads (one key head); the blocks
    that a query may see are given as tokens in ``Indexer.topk``.
    """
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    sparse = after_dense(f, n)
    rest, every = outside(sparse, n), tuple(range(n))
    shared = f.integer("shared_intermediate_size", default=3072, low=0)
    moe = routed(f, width=("intermediate_size",), shared=shared_width(f, shared, "n_shared_experts", default=1))
    dense = f.integer("dense_intermediate_size") if rest else 0
    x, indexed = _indexer(f, n)
    a, tied = gqa(f), f.flag("tie_word_embeddings")
    t = Table(dtype)
    ends(t, hidden, vocab, tied)
    _attention(t, hidden, a, every)
    if x is not None:
        _selector(t, hidden, x, indexed)
    if rest:
        mlp_tensors(t, hidden, dense, rest)
    moe_tensors(t, hidden, moe, sparse, NAMES, router_dtype="f32")
    for name in ("input_layernorm", "post_attention_layernorm"):
        t.norm(name, hidden, layers=every)
    mixers = tuple(replace(a, indexer=x if i in indexed else None) for i in every)
    longest = f.integer("max_position_embeddings", default=524288, high=1 << 30)
    parts = Parts(hidden, vocab, stack(mixers, sparse, moe, dense), tuple(t.families), tied, longest)

    def block(to: Table, at: tuple[int, ...]) -> None:
        _attention(to, hidden, a, at)
        if x is not None:
            _selector(to, hidden, x, at)
        moe_tensors(to, hidden, moe, at, NAMES, router_dtype="f32")

    return nextn(f, t, parts, block, Layer((replace(a, indexer=x),), (moe,)), PREDICTION)


def _attention(t: Table, hidden: int, a: Attention, at: tuple[int, ...]) -> None:
    attention_tensors(t, hidden, a, at)
    qk_norms(t, a, at)


def _selector(t: Table, hidden: int, x: Indexer, at: tuple[int, ...]) -> None:
    q, key = seg("index_heads", x.heads, x.head_dim), seg("fixed", x.head_dim)
    t.linear("self_attn.index_q_proj", q, hidden, role="indexer", op="index_q", layers=at)
    t.linear("self_attn.index_k_proj", key, hidden, role="indexer", op="index_k", layers=at)
    for name in ("index_q_norm", "index_k_norm"):
        t.norm(f"self_attn.{name}", key, layers=at, role="indexer")


def _indexer(f: Fields, n: int) -> tuple[Indexer | None, tuple[int, ...]]:
    """The block selector and the layers that have it; keys of the published file and of transformers 5."""
    old = f.sub("sparse_attention_config")
    new = Fields({**f.raw, **old.raw}, f.where, f.assumed)
    if f.has("layer_types"):
        types = f.texts("layer_types", length=n)
        indexed = tuple(i for i, word in enumerate(types) if word == "minimax_m3_sparse")
    else:
        marks = old.integers("sparse_attention_freq", high=1)
        if marks and len(marks) != n:
            raise InputError(f"{f.where}: sparse_attention_freq has {len(marks)} items for {n} layers")
        indexed = tuple(i for i, mark in enumerate(marks) if mark)
    if not indexed:
        return None, ()
    heads = new.integer("sparse_num_index_heads", "index_n_heads", default=4, high=1 << 14)
    width = new.integer("sparse_index_dim", "index_head_dim", default=128)
    block = new.integer("sparse_block_size", "index_block_size", default=128)
    blocks = new.integer("sparse_topk_blocks", "index_topk_blocks", default=16)
    return Indexer(heads, width, block * blocks), indexed

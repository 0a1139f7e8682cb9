"""Llama 4's text part: fused experts, one shared expert, chunked local attention in three of four layers."""

from __future__ import annotations

from dataclasses import replace

from meshwright.errors import InputError
from meshwright.specs.hf.dense import attention_tensors, ends, gqa, mlp_tensors
from meshwright.specs.hf.fields import MAX_LAYERS, Fields
from meshwright.specs.hf.moe import MoeNames, outside, routed, shared_tensors, stack
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Attention


@architecture("Llama4ForCausalLM", "llama4_text")
def llama4_text(f: Fields, dtype: str) -> Parts:
    """Scout (every layer routes) and Maverick (every other layer); experts are stored input first.

    Dense layers have the width ``intermediate_size_mlp``, routed and shared experts ``intermediate_size``.
    Layers without rotary positions see all tokens, the others chunks of ``attention_chunk_size``.
    """
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    mixers = _chunks(f, n, gqa(f))
    every, bias = tuple(range(n)), f.flag("attention_bias")
    sparse = _moe_layers(f, n)
    rest = outside(sparse, n)
    width = f.integer("intermediate_size")
    moe = replace(routed(f, width=("intermediate_size",), experts=16, topk=1), shared_intermediate=width)
    dense = f.integer("intermediate_size_mlp") if rest else 0
    tied = f.flag("tie_word_embeddings")
    t = Table(dtype)
    ends(t, hidden, vocab, tied)
    attention_tensors(t, hidden, mixers[0], every, bias=bias, out_bias=bias)
    if rest:
        mlp_tensors(t, hidden, dense, rest, name="feed_forward")
    if sparse:
        router = seg("fixed", moe.experts)
        t.linear("feed_forward.router", router, hidden, role="router", op="router", layers=sparse)
        rows, inner, name = seg("experts", moe.experts), seg("expert_mlp", width), t.prefix + "feed_forward.experts."
        t.add(name + "gate_up_proj", rows, hidden, (inner, inner), role="expert", op="gate_up", layers=sparse)
        t.add(name + "down_proj", rows, inner, hidden, role="expert", op="down", layers=sparse)
        shared_tensors(t, hidden, moe, sparse, MoeNames(shared="feed_forward.shared_expert"))
    for norm in ("input_layernorm", "post_attention_layernorm"):
        t.norm(norm, hidden, layers=every)
    longest = f.integer("max_position_embeddings", default=131072, high=1 << 30)
    return Parts(hidden, vocab, stack(mixers, sparse, moe, dense), tuple(t.families), tied, longest)


def _moe_layers(f: Fields, n: int) -> tuple[int, ...]:
    if f.has("moe_layers"):
        return tuple(i for i in sorted(set(f.integers("moe_layers", high=MAX_LAYERS))) if i < n)
    step = f.integer("interleave_moe_layer_step", default=1, low=0, high=MAX_LAYERS)
    return tuple(range(step - 1, n, step)) if step else ()


def _chunks(f: Fields, n: int, a: Attention) -> tuple[Attention, ...]:
    size = f.maybe("attention_chunk_size", high=1 << 30)
    local = replace(a, chunk=size)
    if f.has("layer_types"):
        types = f.texts("layer_types", length=n)
        return tuple(local if word == "chunked_attention" else a for word in types)
    rope = f.integers("no_rope_layers", high=1)
    if rope and len(rope) != n:
        raise InputError(f"{f.where}: no_rope_layers has {len(rope)} items for {n} layers")
    every = f.integer("no_rope_layer_interval", default=4, high=MAX_LAYERS)
    marks = rope or tuple(int((i + 1) % every != 0) for i in range(n))
    return tuple(local if mark else a for mark in marks)

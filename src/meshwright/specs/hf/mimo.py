"""MiMo-V2-Flash: keys and values of different width, more KV heads and sinks in sliding-window layers."""

from __future__ import annotations

from dataclasses import replace

from meshwright.errors import InputError
from meshwright.specs.hf.dense import ends, mlp_tensors
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.moe import DEEPSEEK, after_dense, moe_tensors, outside, routed, stack
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Attention

MAX_HEADS = 1 << 14


@architecture("MiMoV2FlashForCausalLM", "mimo_v2_flash")
def mimo_v2_flash(f: Fields, dtype: str) -> Parts:
    """Xiaomi MiMo-V2-Flash (309 B); its prediction layers are not told by the configuration and not counted.

    Layers are told apart by ``layer_types`` (transformers) or ``hybrid_layer_pattern`` (the published file).
    Sliding layers have ``swa_num_key_value_heads`` KV heads, or twice those of the others where it is missing.
    """
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    whole, local = _attentions(f)
    sliding = _sliding(f, n)
    sparse = after_dense(f, n, default=1)
    rest = outside(sparse, n)
    moe = routed(f, grouped=True)
    dense = f.integer("intermediate_size") if rest else 0
    tied, bias = f.flag("tie_word_embeddings"), f.flag("attention_bias")
    t = Table(dtype)
    ends(t, hidden, vocab, tied)
    for a, at in ((whole, outside(sliding, n)), (local, sliding)):
        if at:
            _attention(t, hidden, a, at, bias)
    if rest:
        mlp_tensors(t, hidden, dense, rest)
    moe_tensors(t, hidden, moe, sparse, DEEPSEEK)
    for name in ("input_layernorm", "post_attention_layernorm"):
        t.norm(name, hidden, layers=range(n))
    mixers = tuple(local if i in set(sliding) else whole for i in range(n))
    longest = f.integer("max_position_embeddings", default=131072, high=1 << 30)
    return Parts(hidden, vocab, stack(mixers, sparse, moe, dense), tuple(t.families), tied, longest)


def _attentions(f: Fields) -> tuple[Attention, Attention]:
    heads, kv = f.integer("num_attention_heads", high=MAX_HEADS), f.integer("num_key_value_heads", high=MAX_HEADS)
    width, values = f.integer("head_dim", default=192), f.integer("v_head_dim", default=128)
    whole = Attention("gqa", heads, kv, width, values, sinks=f.flag("add_full_attention_sink_bias"))
    local = Attention(
        "gqa",
        f.integer("swa_num_attention_heads", default=heads, high=MAX_HEADS),
        f.integer("swa_num_key_value_heads", default=2 * kv, high=MAX_HEADS),
        f.integer("swa_head_dim", default=width),
        f.integer("swa_v_head_dim", default=values),
        window=f.integer("sliding_window_size", "sliding_window", default=128, high=1 << 30),
        sinks=f.flag("add_swa_attention_sink_bias", default=True),
    )
    return whole, local


def _sliding(f: Fields, n: int) -> tuple[int, ...]:
    if f.has("layer_types"):
        types = f.texts("layer_types", length=n)
        return tuple(i for i, word in enumerate(types) if word == "sliding_attention")
    marks = f.integers("hybrid_layer_pattern", high=1)
    if not marks:
        return tuple(i for i in range(n) if i and (i + 1) % 6)
    if len(marks) != n:
        raise InputError(f"{f.where}: hybrid_layer_pattern has {len(marks)} items for {n} layers")
    return tuple(i for i, mark in enumerate(marks) if mark)


def _attention(t: Table, hidden: int, a: Attention, at: tuple[int, ...], bias: bool) -> None:
    q, k = seg("heads", a.heads, a.head_dim), seg("kv_heads", a.kv_heads, a.head_dim)
    v, out = replace(k, width=a.v_head_dim), seg("heads", a.heads, a.v_head_dim)
    for op, rows in (("q", q), ("k", k), ("v", v)):
        t.linear(f"self_attn.{op}_proj", rows, hidden, role="attention", op=op, layers=at, bias=bias)
    t.linear("self_attn.o_proj", hidden, out, role="attention", op="o", layers=at)
    if a.sinks:
        t.add(t.prefix + "self_attn.attention_sink_bias", seg("heads", a.heads), role="attention", layers=at)

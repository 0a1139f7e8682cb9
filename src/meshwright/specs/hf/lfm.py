"""LFM2 (Liquid): gated short convolutions and attention, dense or with experts."""

from __future__ import annotations

from dataclasses import replace

from meshwright.specs.hf.blocks import expert_tensors, layer_types, mlp3_tensors, of, qkvo_tensors, text_ends
from meshwright.specs.hf.dense import gqa
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.mamba import taps
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Layer, Mixer, Mlp, Moe, Recurrent

KINDS = {"conv": "conv", "full_attention": "attention"}
KINDS3 = {**KINDS, "sliding_attention": "sliding"}
LEAVES = ("w1", "w3", "w2")


def _types(f: Fields, n: int) -> tuple[str, ...]:
    listed = layer_types(f, n, "layer_types", known=KINDS)
    where = set(f.integers("full_attn_idxs")) if f.has("full_attn_idxs") else set(range(n))
    return listed or tuple("attention" if i in where else "conv" for i in range(n))


def _conv_tensors(t: Table, hidden: int, kernel: int, bias: bool, layers: tuple[int, ...]) -> None:
    """Gated short convolution: two gates and the input from one projection."""
    if not layers:
        return
    x = seg("ssm_heads", hidden)
    t.add(f"{t.prefix}conv.conv.weight", x, *taps(kernel), role="recurrent", layers=layers)
    if bias:
        t.add(f"{t.prefix}conv.conv.bias", x, role="recurrent", part="bias", layers=layers)
    t.linear("conv.in_proj", (x, x, x), hidden, role="recurrent", op="in", layers=layers, bias=bias)
    t.linear("conv.out_proj", hidden, x, role="recurrent", op="out", layers=layers, bias=bias)


def _common(f: Fields, dtype: str) -> tuple[Table, tuple[str, ...], tuple[Recurrent, int, int, bool]]:
    """Everything but the feed-forward blocks."""
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    a, types = gqa(f), _types(f, n)
    tied = f.flag("tie_embedding", "tie_word_embeddings", default=True)
    kernel, bias = f.integer("conv_L_cache", default=3), f.flag("conv_bias")
    attn, every = of(types, "attention"), tuple(range(n))
    t = Table(dtype)
    text_ends(t, hidden, vocab, tied, norm="model.embedding_norm")
    _conv_tensors(t, hidden, kernel, bias, of(types, "conv"))
    qkvo_tensors(t, hidden, a, attn, out="out_proj")
    if attn:
        for leaf in ("q_layernorm", "k_layernorm"):
            t.norm(f"self_attn.{leaf}", seg("fixed", a.head_dim), layers=attn)
    t.norm("operator_norm", hidden, layers=every)
    t.norm("ffn_norm", hidden, layers=every)
    return t, types, (Recurrent("short_conv", hidden, 0, 0, 1, kernel, hidden, dtype), hidden, vocab, tied)


@architecture("Lfm2ForCausalLM", "lfm2")
def lfm2(f: Fields, dtype: str) -> Parts:
    """LFM2: the MLP is two thirds of the stated width, rounded up, unless ``block_auto_adjust_ff_dim`` is off."""
    t, types, (r, hidden, vocab, tied) = _common(f, dtype)
    inter = f.integer("block_ff_dim", "intermediate_size", default=12288)
    if f.flag("block_auto_adjust_ff_dim", default=True):
        _, factor = f.get("block_ffn_dim_multiplier")
        inter = int(2 * inter / 3)
        if isinstance(factor, int | float) and 0 < factor < 64:
            inter = int(factor * inter)
        multiple = f.integer("block_multiple_of", default=256)
        inter = multiple * -(-inter // multiple)
    mlp3_tensors(t, hidden, inter, tuple(range(len(types))), name="feed_forward", leaves=LEAVES)
    a, mlp = gqa(f), (Mlp(inter),)
    layers = tuple(Layer((a if kind == "attention" else r,), mlp) for kind in types)
    return Parts(hidden, vocab, layers, tuple(t.families), tied, f.integer("max_position_embeddings", default=128000))


@architecture("Lfm2MoeForCausalLM", "lfm2_moe")
def lfm2_moe(f: Fields, dtype: str) -> Parts:
    """LFM2-MoE: the first ``num_dense_layers`` have an MLP, the others experts."""
    t, types, (r, hidden, vocab, tied) = _common(f, dtype)
    n, dense = len(types), f.integer("num_dense_layers", default=2, low=0)
    inter = f.integer("intermediate_size", default=7168)
    experts, width = (
        f.integer("num_experts", default=32, high=1 << 14),
        f.integer("moe_intermediate_size", default=1792),
    )
    head, sparse = tuple(range(min(dense, n))), tuple(range(min(dense, n), n))
    mlp3_tensors(t, hidden, inter, head, name="feed_forward", leaves=LEAVES)
    if sparse:
        rows = seg("fixed", experts)
        t.linear("feed_forward.gate", rows, hidden, role="router", op="router", layers=sparse)
        if f.flag("use_expert_bias", default=True):
            t.add(f"{t.prefix}feed_forward.expert_bias", rows, role="router", part="bias", layers=sparse, dtype="f32")
    expert_tensors(t, hidden, width, experts, sparse, name="feed_forward.experts", leaves=LEAVES)
    a, moe = gqa(f), Moe(experts, f.integer("num_experts_per_tok", default=4), width)
    layers = tuple(
        Layer((a if kind == "attention" else r,), (Mlp(inter) if i < dense else moe,)) for i, kind in enumerate(types)
    )
    return Parts(hidden, vocab, layers, tuple(t.families), tied, f.integer("max_position_embeddings", default=128000))


@architecture("Lfm3ForCausalLM", "lfm3")
def lfm3(f: Fields, dtype: str) -> Parts:
    """LFM3: wider convolutions, sliding and full attention with one gate a head, norms on both sides."""
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    types = layer_types(f, n, "layer_types", known=KINDS3) or ("conv",) * n
    a = gqa(f)
    gate = f.flag("use_attention_gate", default=True)
    kernel, bias, inter = f.integer("conv_L_cache", default=7), f.flag("conv_bias"), f.integer("intermediate_size")
    tied, every, attn = f.flag("tie_word_embeddings", default=True), tuple(range(n)), of(types, "attention", "sliding")
    t = Table(dtype)
    text_ends(t, hidden, vocab, tied, norm="model.embedding_norm")
    _conv_tensors(t, hidden, kernel, bias, of(types, "conv"))
    if attn:
        attention_bias = f.flag("attention_bias")
        qkvo_tensors(t, hidden, a, attn, bias=attention_bias, out_bias=attention_bias)
        if gate:
            t.linear("self_attn.gate_proj", seg("heads", a.heads), hidden, role="attention", op="g", layers=attn)
        for leaf in ("q_norm", "k_norm"):
            t.norm(f"self_attn.{leaf}", seg("fixed", a.head_dim), layers=attn)
    mlp3_tensors(t, hidden, inter, every, name="feed_forward", leaves=LEAVES)
    norms: tuple[str, ...] = ("operator_norm", "ffn_norm")
    if f.flag("use_sandwich_norm", default=True):
        norms += ("post_operator_norm", "post_ffn_norm")
    for leaf in norms:
        t.norm(leaf, hidden, layers=every)
    a = replace(a, gated=gate)
    r = Recurrent("short_conv", hidden, 0, 0, 1, kernel, hidden, dtype)
    near = replace(a, window=f.integer("sliding_window", default=256))
    mixers: dict[str, Mixer] = {"conv": r, "attention": a, "sliding": near}
    layers = tuple(Layer((mixers[kind],), (Mlp(inter),)) for kind in types)
    return Parts(hidden, vocab, layers, tuple(t.families), tied, f.integer("max_position_embeddings", default=128000))

"""Dense decoders whose checkpoints fuse projections: Phi-3, GLM-4, Persimmon, Baichuan, InternLM2, ChatGLM, Qwen.

Classes outside transformers are read as their published modeling files name the tensors.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.specs.hf.dense import Style, decoder, finish, gqa, mlp_tensors, plain_mlp_tensors, same_window, skeleton
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Attention, Layer, Mlp
from meshwright.specs.tensors import Dim


def qkv_dim(a: Attention) -> Dim:
    """Queries, then keys, then values."""
    return (
        seg("heads", a.heads, a.head_dim),
        seg("kv_heads", a.kv_heads, a.head_dim),
        seg("kv_heads", a.kv_heads, a.head_dim),
    )


def by_head(a: Attention) -> Dim:
    """Query, key and value of one head side by side (needs as many KV heads as heads)."""
    return (seg("heads", a.heads, 3 * a.head_dim),)


def by_group(a: Attention) -> Dim:
    """Queries of one KV group, its key and its value side by side."""
    return (seg("kv_heads", a.kv_heads, (a.heads // a.kv_heads + 2) * a.head_dim),)


def gate_up_dim(intermediate: int) -> Dim:
    """Gate, then up."""
    return (seg("mlp", intermediate), seg("mlp", intermediate))


def _gate_up(t: Table, hidden: int, inter: int, layers: tuple[int, ...], names: tuple[str, str]) -> None:
    t.linear(names[0], gate_up_dim(inter), hidden, role="mlp", op="gate_up", layers=layers)
    t.linear(names[1], hidden, seg("mlp", inter), role="mlp", op="down", layers=layers)


@architecture("Phi3ForCausalLM", "phi3", "Phi3SmallForCausalLM")
def phi3(f: Fields, dtype: str) -> Parts:
    """Phi-3, Phi-3.5 mini and Phi-4: fused qkv and fused gate and up."""
    style = Style(windows=same_window(), max_positions=4096)
    t = Table(dtype)
    parts = skeleton(f, t, style)
    a, inter, every = gqa(f), f.integer("intermediate_size"), tuple(range(f.layers()))
    out = seg("heads", a.heads, a.head_dim)
    t.linear("self_attn.qkv_proj", qkv_dim(a), parts.hidden, role="attention", op="qkv", layers=every)
    t.linear("self_attn.o_proj", parts.hidden, out, role="attention", op="o", layers=every)
    _gate_up(t, parts.hidden, inter, every, ("mlp.gate_up_proj", "mlp.down_proj"))
    return finish(f, t, parts, style, a, Mlp(inter))


def _fused_gate_up(f: Fields, dtype: str, style: Style) -> Parts:
    """A decoder of separate projections whose gate and up are one matrix."""
    parts = decoder(f, dtype, style)
    t = Table(dtype)
    _gate_up(
        t, parts.hidden, f.integer("intermediate_size"), tuple(range(f.layers())), ("mlp.gate_up_proj", "mlp.down_proj")
    )
    kept = (x for x in parts.families if x.role != "mlp")
    return replace(parts, families=(*kept, *t.families))


_GLM = Style(qkv_bias=("attention_bias", True), out_bias=False, mlp_bias=False, head_dim=128, max_positions=131072)


@architecture("GlmForCausalLM", "glm")
def glm(f: Fields, dtype: str) -> Parts:
    """GLM-4-9B as transformers stores it."""
    return _fused_gate_up(f, dtype, _GLM)


@architecture("Glm4ForCausalLM", "glm4")
def glm4(f: Fields, dtype: str) -> Parts:
    """GLM-4-0414: two more norms behind the blocks."""
    norms = (*_GLM.norms, "post_self_attn_layernorm", "post_mlp_layernorm")
    return _fused_gate_up(f, dtype, replace(_GLM, norms=norms))


@architecture("PersimmonForCausalLM", "persimmon")
def persimmon(f: Fields, dtype: str) -> Parts:
    """Persimmon: fused qkv by head, biases everywhere, norms of queries and keys."""
    style = Style(norm_bias=True, final_norm="model.final_layernorm", gated=False, max_positions=16384)
    t = Table(dtype)
    parts = skeleton(f, t, style)
    a, inter, every = gqa(f), f.integer("intermediate_size"), tuple(range(f.layers()))
    a = replace(a, kv_heads=a.heads)
    out = seg("heads", a.heads, a.head_dim)
    t.linear("self_attn.query_key_value", by_head(a), parts.hidden, role="attention", op="qkv", layers=every, bias=True)
    t.linear("self_attn.dense", parts.hidden, out, role="attention", op="o", layers=every, bias=True)
    if f.flag("qk_layernorm", default=True):
        for name in ("q_layernorm", "k_layernorm"):
            t.norm(f"self_attn.{name}", a.head_dim, layers=every, bias=True, role="attention")
    up, down = "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"
    plain_mlp_tensors(t, parts.hidden, inter, every, up=up, down=down, bias=True)
    return finish(f, t, parts, style, a, Mlp(inter, gated=False))


@architecture("BaichuanForCausalLM", "BaiChuanForCausalLM", "baichuan")
def baichuan(f: Fields, dtype: str) -> Parts:
    """Baichuan 1 and 2: fused ``W_pack``; one head a KV head."""
    style = Style(max_positions=4096)
    t = Table(dtype)
    parts = skeleton(f, t, style)
    a, inter, every = gqa(f), f.integer("intermediate_size"), tuple(range(f.layers()))
    a = replace(a, kv_heads=a.heads)
    out = seg("heads", a.heads, a.head_dim)
    t.linear("self_attn.W_pack", qkv_dim(a), parts.hidden, role="attention", op="qkv", layers=every)
    t.linear("self_attn.o_proj", parts.hidden, out, role="attention", op="o", layers=every)
    mlp_tensors(t, parts.hidden, inter, every)
    positions = f.integer("max_position_embeddings", "model_max_length", default=4096)
    return replace(finish(f, t, parts, style, a, Mlp(inter)), max_positions=positions)


@architecture("InternLM2ForCausalLM", "internlm2")
def internlm2(f: Fields, dtype: str) -> Parts:
    """InternLM2: ``wqkv`` by KV group, ``w1`` gate, ``w3`` up, ``w2`` down."""
    hidden, vocab, inter = f.integer("hidden_size"), f.integer("vocab_size"), f.integer("intermediate_size")
    a, n, bias = gqa(f), f.layers(), f.flag("bias")
    every, rows, inner = tuple(range(n)), seg("vocab", vocab), seg("mlp", inter)
    tied = f.flag("tie_word_embeddings")
    t = Table(dtype)
    t.add("model.tok_embeddings.weight", rows, hidden, role="embedding")
    t.norm("model.norm", hidden)
    t.linear("attention.wqkv", by_group(a), hidden, role="attention", op="qkv", layers=every, bias=bias)
    out = seg("heads", a.heads, a.head_dim)
    t.linear("attention.wo", hidden, out, role="attention", op="o", layers=every, bias=bias)
    for name, op in (("w1", "gate"), ("w3", "up")):
        t.linear(f"feed_forward.{name}", inner, hidden, role="mlp", op=op, layers=every)
    t.linear("feed_forward.w2", hidden, inner, role="mlp", op="down", layers=every)
    t.norm("attention_norm", hidden, layers=every)
    t.norm("ffn_norm", hidden, layers=every)
    if not tied:
        t.add("output.weight", rows, hidden, role="head", op="head")
    layers = (Layer((a,), (Mlp(inter),)),) * n
    return Parts(hidden, vocab, layers, tuple(t.families), tied, f.integer("max_position_embeddings", default=2048))


@architecture("ChatGLMModel", "ChatGLMForConditionalGeneration", "ChatGLMForCausalLM", "chatglm")
def chatglm(f: Fields, dtype: str) -> Parts:
    """ChatGLM2, ChatGLM3 and GLM-4-9B in their original form; the table of rotary frequencies is stored too."""
    hidden, vocab = f.integer("hidden_size"), f.integer("padded_vocab_size", "vocab_size")
    heads, n, inter = f.integer("num_attention_heads", high=1 << 14), f.layers(), f.integer("ffn_hidden_size")
    kv_heads = f.integer("multi_query_group_num", default=2) if f.flag("multi_query_attention") else heads
    width = f.integer("kv_channels", default=max(1, hidden // heads))
    a = Attention("gqa", heads, kv_heads, width, width)
    every, rows = tuple(range(n)), seg("vocab", vocab)
    bias = f.flag("add_bias_linear")
    qkv_bias = bias or f.flag("add_qkv_bias")
    t = Table(dtype, prefix="transformer.encoder.layers.{layer}.")
    t.add("transformer.embedding.word_embeddings.weight", rows, hidden, role="embedding")
    t.add(
        "transformer.rotary_pos_emb.inv_freq", seg("fixed", max(1, width // 4)), role="other", part="state", elements=0
    )
    t.linear(
        "self_attention.query_key_value", qkv_dim(a), hidden, role="attention", op="qkv", layers=every, bias=qkv_bias
    )
    t.linear(
        "self_attention.dense", hidden, seg("heads", heads, width), role="attention", op="o", layers=every, bias=bias
    )
    _gate_up(t, hidden, inter, every, ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"))
    t.norm("input_layernorm", hidden, layers=every)
    t.norm("post_attention_layernorm", hidden, layers=every)
    t.norm("transformer.encoder.final_layernorm", hidden)
    tied = f.flag("tie_word_embeddings")
    if not tied:
        t.add("transformer.output_layer.weight", rows, hidden, role="head", op="head")
    layers = (Layer((a,), (Mlp(inter),)),) * n
    return Parts(hidden, vocab, layers, tuple(t.families), tied, f.integer("seq_length", default=2048))


@architecture("QWenLMHeadModel", "qwen")
def qwen(f: Fields, dtype: str) -> Parts:
    """Qwen 1: fused ``c_attn``; ``intermediate_size`` counts gate and up together."""
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    heads, inter = f.integer("num_attention_heads", high=1 << 14), f.integer("intermediate_size", low=2) // 2
    width = f.integer("kv_channels", default=max(1, hidden // heads))
    a = Attention("gqa", heads, heads, width, width)
    every, rows, inner, out = tuple(range(n)), seg("vocab", vocab), seg("mlp", inter), seg("heads", heads, width)
    t = Table(dtype, prefix="transformer.h.{layer}.")
    t.add("transformer.wte.weight", rows, hidden, role="embedding")
    t.linear("attn.c_attn", qkv_dim(a), hidden, role="attention", op="qkv", layers=every, bias=True)
    t.linear(
        "attn.c_proj", hidden, out, role="attention", op="o", layers=every, bias=not f.flag("no_bias", default=True)
    )
    for name, op in (("w1", "up"), ("w2", "gate")):
        t.linear(f"mlp.{name}", inner, hidden, role="mlp", op=op, layers=every)
    t.linear("mlp.c_proj", hidden, inner, role="mlp", op="down", layers=every)
    t.norm("ln_1", hidden, layers=every)
    t.norm("ln_2", hidden, layers=every)
    t.norm("transformer.ln_f", hidden)
    tied = f.flag("tie_word_embeddings")
    if not tied:
        t.add("lm_head.weight", rows, hidden, role="head", op="head")
    layers = (Layer((a,), (Mlp(inter),)),) * n
    positions = f.integer("seq_length", "max_position_embeddings", default=2048)
    return Parts(hidden, vocab, layers, tuple(t.families), tied, positions)

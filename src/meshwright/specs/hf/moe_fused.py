"""Mixtures stored with all experts of a layer in one tensor: Granite, DBRX, JetMoE."""

from __future__ import annotations

from dataclasses import replace

from meshwright.specs.hf.dense import attention_tensors, ends, gqa
from meshwright.specs.hf.fields import MAX_EXPERTS, Fields
from meshwright.specs.hf.moe import routed, stack, windows
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Attention, Layer, Moe

MAX_HEADS = 1 << 14


@architecture("GraniteMoeForCausalLM", "granitemoe", "GraniteMoeSharedForCausalLM", "granitemoeshared")
def granitemoe(f: Fields, dtype: str) -> Parts:
    """IBM Granite 3 MoE, with or without a shared block (gate and up in one matrix, as in the experts)."""
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    a, every = gqa(f), tuple(range(n))
    shared = f.integer("shared_intermediate_size", default=0, low=0)
    moe = routed(f, width=("intermediate_size",), shared=shared, experts=8, topk=2)
    bias, tied = f.flag("attention_bias"), f.flag("tie_word_embeddings")
    t = Table(dtype)
    ends(t, hidden, vocab, tied)
    attention_tensors(t, hidden, a, every, bias=bias, out_bias=bias)
    block = "block_sparse_moe."
    t.linear(block + "router.layer", seg("fixed", moe.experts), hidden, role="router", op="router", layers=every)
    rows, inner = seg("experts", moe.experts), seg("expert_mlp", moe.intermediate)
    name = t.prefix + block
    t.add(name + "input_linear.weight", rows, (inner, inner), hidden, role="expert", op="gate_up", layers=every)
    t.add(name + "output_linear.weight", rows, hidden, inner, role="expert", op="down", layers=every)
    if shared:
        wide = seg("shared_mlp", shared)
        t.linear("shared_mlp.input_linear", (wide, wide), hidden, role="shared_expert", op="gate_up", layers=every)
        t.linear("shared_mlp.output_linear", hidden, wide, role="shared_expert", op="down", layers=every)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        t.norm(norm, hidden, layers=every)
    longest = f.integer("max_position_embeddings", default=2048, high=1 << 30)
    return Parts(hidden, vocab, stack((a,) * n, every, moe, 0), tuple(t.families), tied, longest)


@architecture("GraniteMoeSWAForCausalLM", "granitemoe_swa")
def granitemoe_swa(f: Fields, dtype: str) -> Parts:
    """Granite with sliding windows and sinks; experts are stored as transformers holds them."""
    n = f.layers()
    parts = granitemoe(f, dtype)
    a = replace(gqa(f), sinks=True)
    mixers = windows(f, n, a)
    old, new = "block_sparse_moe.", "block_sparse_moe.experts."
    names = {
        old + "router.layer.weight": old + "router.weight",
        old + "input_linear.weight": new + "gate_up_proj",
        old + "output_linear.weight": new + "down_proj",
    }
    renamed = [
        replace(
            x, template=next((x.template.replace(k, v) for k, v in names.items() if x.template.endswith(k)), x.template)
        )
        for x in parts.families
    ]
    t = Table(dtype)
    t.add(t.prefix + "self_attn.sinks", seg("heads", a.heads), role="attention", layers=range(n))
    layers = tuple(replace(layer, mixers=(m,)) for layer, m in zip(parts.layers, mixers, strict=True))
    return replace(parts, layers=layers, families=(*renamed, *t.families))


@architecture("DbrxForCausalLM", "dbrx")
def dbrx(f: Fields, dtype: str) -> Parts:
    """Databricks DBRX: fused q, k, v; the experts' matrices lie one under the other, input side last."""
    hidden, vocab = f.integer("d_model", "hidden_size"), f.integer("vocab_size")
    n = f.layers("n_layers", "num_hidden_layers")
    attn, ffn = f.sub("attn_config"), f.sub("ffn_config")
    heads = f.integer("n_heads", "num_attention_heads", high=MAX_HEADS)
    kv, dim = attn.integer("kv_n_heads", default=1, high=MAX_HEADS), max(1, hidden // heads)
    a = Attention("gqa", heads, kv, dim, dim)
    experts = ffn.integer("moe_num_experts", default=4, high=MAX_EXPERTS)
    topk = ffn.integer("moe_top_k", default=1, high=MAX_EXPERTS)
    moe = Moe(experts, topk, ffn.integer("ffn_hidden_size"))
    every, tied = tuple(range(n)), f.flag("tie_word_embeddings")
    t = Table(dtype, "transformer.blocks.{layer}.")
    rows = seg("vocab", vocab)
    t.add("transformer.wte.weight", rows, hidden, role="embedding")
    t.norm("transformer.norm_f", hidden)
    if not tied:
        t.add("lm_head.weight", rows, hidden, role="head", op="head")
    q, k = seg("heads", heads, dim), seg("kv_heads", kv, dim)
    t.linear("norm_attn_norm.attn.Wqkv", (q, k, k), hidden, role="attention", op="qkv", layers=every)
    t.linear("norm_attn_norm.attn.out_proj", hidden, q, role="attention", op="o", layers=every)
    for norm in ("norm_attn_norm.norm_1", "norm_attn_norm.norm_2"):
        t.norm(norm, hidden, layers=every)
    t.linear("ffn.router.layer", seg("fixed", experts), hidden, role="router", op="router", layers=every)
    stacked = seg("experts", experts, moe.intermediate)
    for mat, op in (("w1", "gate"), ("v1", "up"), ("w2", "down")):
        t.add(f"{t.prefix}ffn.experts.mlp.{mat}", stacked, hidden, role="expert", op=op, layers=every)
    longest = f.integer("max_seq_len", "max_position_embeddings", default=2048, high=1 << 30)
    return Parts(hidden, vocab, stack((a,) * n, every, moe, 0), tuple(t.families), tied, longest)


@architecture("JetMoeForCausalLM", "jetmoe")
def jetmoe(f: Fields, dtype: str) -> Parts:
    """JetMoE: query and output projections are experts too (mixture of attention heads); keys are shared."""
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    dim = f.integer("kv_channels", default=128)
    kv = f.integer("num_key_value_heads", default=16, high=MAX_HEADS)
    moe = routed(f, width=("intermediate_size",), experts=8, topk=2)
    a = Attention("gqa", kv * moe.topk, kv, dim, dim)
    every, tied = tuple(range(n)), f.flag("tie_word_embeddings", default=True)
    t = Table(dtype)
    ends(t, hidden, vocab, tied)
    rows, inner, q = seg("experts", moe.experts), seg("expert_mlp", moe.intermediate), seg("kv_heads", kv, dim)
    router, attn = seg("fixed", moe.experts), "self_attention.experts."
    t.linear("self_attention.kv_proj", (q, q), hidden, role="attention", op="kv", layers=every)
    t.linear(attn + "router.layer", router, hidden, role="router", op="router", layers=every)
    t.add(t.prefix + attn + "input_linear.weight", rows, q, hidden, role="attention", op="q", layers=every)
    t.add(t.prefix + attn + "output_linear.weight", rows, hidden, q, role="attention", op="o", layers=every)
    t.add(t.prefix + attn + "bias", hidden, role="attention", part="bias", layers=every)
    t.linear("mlp.router.layer", router, hidden, role="router", op="router", layers=every)
    name = t.prefix + "mlp."
    t.add(name + "input_linear.weight", rows, (inner, inner), hidden, role="expert", op="gate_up", layers=every)
    t.add(name + "output_linear.weight", rows, hidden, inner, role="expert", op="down", layers=every)
    t.add(name + "bias", hidden, role="other", part="bias", layers=every)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        t.norm(norm, hidden, layers=every)
    longest = f.integer("max_position_embeddings", default=4096, high=1 << 30)
    return Parts(hidden, vocab, (Layer((a,), (moe,)),) * n, tuple(t.families), tied, longest)

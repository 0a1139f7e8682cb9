"""More mixtures of experts: Ling, Sarvam, Laguna, the first DeepSeek, Arctic, Grok-1.

Sarvam and Laguna follow transformers 5.24. Ling (Bailing) shares Sarvam's names. Arctic and Grok-1 have no class
there: their names follow vLLM's loaders (``arctic.py``, ``grok1.py``) and the specification says so.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.errors import InputError
from meshwright.specs.hf.dense import attention_tensors, ends, gqa, mlp_tensors
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.moe import (
    MIXTRAL,
    MoeNames,
    after_dense,
    moe_decoder,
    moe_tensors,
    outside,
    parts_of,
    qk_norms,
    routed,
    shared_width,
    stack,
    windows,
)
from meshwright.specs.hf.mtp import MtpNames, nextn
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Attention, Layer, Mlp

MAX_HEADS = 1 << 14
TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
LING_PREDICTION = MtpNames(last="final_layernorm", embed="", head="")


@architecture("DeepseekForCausalLM", "deepseek")
def deepseek(f: Fields, dtype: str) -> Parts:
    """DeepSeek-MoE 16B: ordinary attention, two shared experts, softmax routing."""
    n = f.layers()
    bias = f.flag("attention_bias")
    moe = routed(f, shared=shared_width(f, f.integer("moe_intermediate_size")))
    mixers, sparse = (gqa(f),) * n, after_dense(f, n)
    return moe_decoder(f, dtype, mixers, sparse, moe, MoeNames(), qkv_bias=bias, out_bias=bias)[1]


@architecture("BailingMoeForCausalLM", "bailing_moe", "BailingMoeV2ForCausalLM", "bailing_moe_v2")
def bailing_moe(f: Fields, dtype: str) -> Parts:
    """Ling-lite, Ling-plus, Ling-mini-2.0, Ling-flash-2.0 and Ling-1T: fused q, k, v."""
    bias = f.flag("moe_router_enable_expert_bias")
    return _ling(f, dtype, qk_norm=f.flag("use_qk_norm"), routing_bias=bias)


@architecture("SarvamMoEForCausalLM", "sarvam_moe")
def sarvam_moe(f: Fields, dtype: str) -> Parts:
    """Sarvam 30B: as Ling 2.0."""
    return _ling(f, dtype, qk_norm=f.flag("use_qk_norm", default=True), routing_bias=True)


def _ling(f: Fields, dtype: str, *, qk_norm: bool, routing_bias: bool) -> Parts:
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    a, every = gqa(f), tuple(range(n))
    sparse = after_dense(f, n)
    rest = outside(sparse, n)
    moe = routed(f, shared=shared_width(f, f.integer("moe_intermediate_size")), grouped=True)
    names = MoeNames(routing_bias="mlp.gate.expert_bias" if routing_bias else "")
    dense, tied = f.integer("intermediate_size") if rest else 0, f.flag("tie_word_embeddings")
    t = Table(dtype)
    rows = seg("vocab", vocab)
    t.add("model.word_embeddings.weight", rows, hidden, role="embedding")
    t.norm("model.norm", hidden)
    if not tied:
        t.add("lm_head.weight", rows, hidden, role="head", op="head")

    def block(to: Table, at: tuple[int, ...]) -> None:
        q, k = seg("heads", a.heads, a.head_dim), seg("kv_heads", a.kv_heads, a.head_dim)
        bias, out_bias = f.flag("use_qkv_bias", "attention_bias"), f.flag("use_bias")
        to.linear("attention.query_key_value", (q, k, k), hidden, role="attention", op="qkv", layers=at, bias=bias)
        to.linear("attention.dense", hidden, q, role="attention", op="o", layers=at, bias=out_bias)
        if qk_norm:
            qk_norms(to, a, at, names=("attention.query_layernorm", "attention.key_layernorm"))
        moe_tensors(to, hidden, moe, tuple(i for i in at if i >= n or i not in rest), names)

    block(t, every)
    if rest:
        mlp_tensors(t, hidden, dense, rest)
    for name in TWO_NORMS:
        t.norm(name, hidden, layers=every)
    longest = f.integer("max_position_embeddings", default=32768, high=1 << 30)
    parts = Parts(hidden, vocab, stack((a,) * n, sparse, moe, dense), tuple(t.families), tied, longest)
    return nextn(f, t, parts, block, Layer((a,), (moe,)), LING_PREDICTION)


@architecture("LagunaForCausalLM", "laguna")
def laguna(f: Fields, dtype: str) -> Parts:
    """Poolside Laguna: query heads by layer, gated attention, windows, one shared expert."""
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    heads = f.integers("num_attention_heads_per_layer", low=1, high=MAX_HEADS)
    if heads and len(heads) != n:
        raise InputError(f"{f.where}: num_attention_heads_per_layer has {len(heads)} items for {n} layers")
    by_head = f.get("gating")[1] in (None, True, "per-head")
    base = replace(gqa(f), gated=not by_head)
    mixers = windows(f, n, base) if f.has("layer_types") else (base,) * n
    mixers = tuple(replace(a, heads=h) for a, h in zip(mixers, heads or (base.heads,) * n, strict=True))
    sparse = after_dense(f, n, default=1)
    rest = outside(sparse, n)
    shared = f.integer("shared_expert_intermediate_size", default=512, low=0)
    moe = routed(f, shared=shared, experts=256, topk=8)
    dense, bias = f.integer("intermediate_size") if rest else 0, f.flag("attention_bias")
    tied = f.flag("tie_word_embeddings")
    t = Table(dtype)
    ends(t, hidden, vocab, tied)
    for a in dict.fromkeys(replace(a, window=None) for a in mixers):
        at = tuple(i for i in range(n) if mixers[i].heads == a.heads)
        attention_tensors(t, hidden, a, at, bias=bias, out_bias=bias)
        qk_norms(t, a, at)
        gate = seg("heads", a.heads, 1 if by_head else a.head_dim)
        t.linear("self_attn.g_proj", gate, hidden, role="attention", op="gate", layers=at)
    if rest:
        mlp_tensors(t, hidden, dense, rest)
    names = MoeNames(routing_bias="mlp.experts.e_score_correction_bias", shared="mlp.shared_expert")
    moe_tensors(t, hidden, moe, sparse, names, bias_dtype=None)
    for name in TWO_NORMS:
        t.norm(name, hidden, layers=range(n))
    longest = f.integer("max_position_embeddings", default=131072, high=1 << 30)
    return Parts(hidden, vocab, stack(mixers, sparse, moe, dense), tuple(t.families), tied, longest)


@architecture("ArcticForCausalLM", "arctic")
def arctic(f: Fields, dtype: str) -> Parts:
    """Snowflake Arctic: a dense block of model width beside the mixture of every layer."""
    f.assume("Arctic has no class in transformers: its tensors are named as vLLM's loader expects them")
    n = f.layers()
    moe = routed(f, width=("intermediate_size",), experts=8, topk=1)
    every, bias = tuple(range(n)), f.flag("attention_bias")
    step = f.integer("moe_layer_frequency", default=2, high=2048)
    sparse = tuple(i for i in every if (i + 1) % step == 0)
    if len(sparse) != n:
        raise InputError(f"{f.where}: moe_layer_frequency is {step}; only Arctic with experts in every layer is known")
    a = gqa(f)
    t, parts = moe_decoder(f, dtype, (a,) * n, every, moe, MIXTRAL, qkv_bias=bias, out_bias=bias)
    if not f.flag("use_residual", default=True):
        return parts
    h, inner = parts.hidden, seg("mlp", parts.hidden)
    for mat, op in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
        dims = (h, inner) if op == "down" else (inner, h)
        t.linear(f"residual_mlp.{mat}", *dims, role="mlp", op=op, layers=every)
    t.norm("residual_layernorm", h, layers=every)
    return replace(parts_of(t, parts), layers=(Layer((a,), (Mlp(h), moe)),) * n)


@architecture("Grok1ModelForCausalLM", "Grok1ForCausalLM", "grok-1")
def grok1(f: Fields, dtype: str) -> Parts:
    """Grok-1 (314 B) in the layout of its Hugging Face conversion."""
    f.assume("Grok-1 has no class in transformers: its tensors are named as in the hub's conversion that vLLM loads")
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    moe = routed(f, width=("moe_intermediate_size", "intermediate_size"), experts=8, topk=2)
    a, every = gqa(f), tuple(range(n))
    tied = f.flag("tie_word_embeddings")
    t = Table(dtype)
    ends(t, hidden, vocab, tied)
    _grok_layers(t, hidden, a, every)
    names = MoeNames("moe_block.experts.{expert}", ("linear", "linear_v", "linear_1"), "moe_block.gate")
    moe_tensors(t, hidden, moe, every, names)
    longest = f.integer("max_position_embeddings", default=8192, high=1 << 30)
    return Parts(hidden, vocab, stack((a,) * n, every, moe, 0), tuple(t.families), tied, longest)


def _grok_layers(t: Table, hidden: int, a: Attention, every: tuple[int, ...]) -> None:
    q, k = seg("heads", a.heads, a.head_dim), seg("kv_heads", a.kv_heads, a.head_dim)
    for op, rows in (("q", q), ("k", k), ("v", k)):
        t.linear(f"attn.{op}_proj", rows, hidden, role="attention", op=op, layers=every)
    t.linear("attn.o_proj", hidden, q, role="attention", op="o", layers=every)
    for name in ("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm"):
        t.add(f"{t.prefix}{name}.scale", hidden, role="norm", layers=every)

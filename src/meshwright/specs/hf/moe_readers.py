"""Mixture-of-experts decoders with grouped-query attention and an expert a tensor: Mixtral, Qwen, GLM-4.5 and kin.

Names and shapes are those that ``save_pretrained`` of transformers 5.24 writes (``tests/specs/hf``); the
multi-token-prediction layers that the classes ignore follow the published checkpoints.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.specs.hf.dense import attention_tensors, gqa, mlp_tensors
from meshwright.specs.hf.fields import MAX_EXPERTS, MAX_LAYERS, Fields
from meshwright.specs.hf.moe import (
    DEEPSEEK,
    MIXTRAL,
    MoeNames,
    after_dense,
    moe_decoder,
    moe_tensors,
    parts_of,
    qk_norms,
    qwen_layers,
    routed,
    shared_width,
    windows,
)
from meshwright.specs.hf.moe_more import sarvam_moe
from meshwright.specs.hf.mtp import MtpNames, count_of, nextn
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Layer, Mlp, Moe

#: Prediction layers of ERNIE 4.5: a dense block, with norms and projection beside it.
ERNIE_PREDICTION = MtpNames(
    "model.mtp_",
    False,
    "block.{layer}.",
    "emb_norm.{layer}",
    "hidden_norm.{layer}",
    "linear_proj.{layer}",
    last="",
    embed="",
    head="",
)


@architecture("MixtralForCausalLM", "mixtral")
def mixtral(f: Fields, dtype: str) -> Parts:
    """Mixtral 8x7B and 8x22B; ``intermediate_size`` is the width of one expert."""
    n = f.layers()
    moe = routed(f, width=("intermediate_size",), experts=8, topk=2)
    mixers = windows(f, n, gqa(f))
    return moe_decoder(f, dtype, mixers, range(n), moe, MIXTRAL, positions=4096 * 32)[1]


@architecture("Qwen2MoeForCausalLM", "qwen2_moe")
def qwen2_moe(f: Fields, dtype: str) -> Parts:
    """Qwen1.5-MoE and Qwen2-57B-A14B: biases on q, k, v, and a shared expert behind a gate of one logit."""
    n = f.layers()
    shared = f.integer("shared_expert_intermediate_size", default=5632, low=0)
    moe = routed(f, shared=shared, experts=60, topk=4)
    names = MoeNames(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")
    sliding = f.flag("use_sliding_window")
    mixers = windows(f, n, gqa(f)) if sliding or f.has("layer_types") else (gqa(f),) * n
    bias = f.flag("qkv_bias", default=True)
    return moe_decoder(f, dtype, mixers, qwen_layers(f, n), moe, names, qkv_bias=bias, positions=32768)[1]


@architecture("Qwen3MoeForCausalLM", "qwen3_moe")
def qwen3_moe(f: Fields, dtype: str) -> Parts:
    """Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder: norms of queries and keys a head, no shared expert."""
    n = f.layers()
    moe = routed(f, experts=128, topk=8)
    bias = f.flag("attention_bias")
    mixers = windows(f, n, gqa(f)) if f.flag("use_sliding_window") else (gqa(f),) * n
    sparse = qwen_layers(f, n)
    return moe_decoder(f, dtype, mixers, sparse, moe, MoeNames(), qkv_bias=bias, out_bias=bias, qk_norm="head")[1]


@architecture("OlmoeForCausalLM", "olmoe")
def olmoe(f: Fields, dtype: str) -> Parts:
    """OLMoE 1B-7B: every layer routes; norms over all query (key) heads at once."""
    n = f.layers()
    moe = routed(f, width=("intermediate_size",), experts=64, topk=8)
    bias = f.flag("attention_bias")
    mixers = (gqa(f),) * n
    return moe_decoder(f, dtype, mixers, range(n), moe, MoeNames(), qkv_bias=bias, out_bias=bias, qk_norm="whole")[1]


@architecture("FlexOlmoForCausalLM", "flex_olmo")
def flex_olmo(f: Fields, dtype: str) -> Parts:
    """FlexOlmo: as OLMoE with the norms behind attention and experts."""
    n = f.layers()
    moe = routed(f, width=("intermediate_size",), experts=7, topk=5)
    bias = f.flag("attention_bias")
    norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    mixers = (gqa(f),) * n
    names = MoeNames()
    return moe_decoder(
        f, dtype, mixers, range(n), moe, names, qkv_bias=bias, out_bias=bias, qk_norm="whole", norms=norms
    )[1]


@architecture("PhimoeForCausalLM", "PhiMoEForCausalLM", "phimoe")
def phimoe(f: Fields, dtype: str) -> Parts:
    """Phi-3.5-MoE: biases in attention, norms and head."""
    n = f.layers()
    moe = routed(f, width=("intermediate_size",), experts=16, topk=2)
    bias = f.flag("attention_bias")
    mixers = windows(f, n, gqa(f))
    t, parts = moe_decoder(
        f, dtype, mixers, range(n), moe, MIXTRAL, qkv_bias=bias, out_bias=bias, norm_bias=True, positions=131072
    )
    if f.flag("lm_head_bias"):
        t.add("lm_head.bias", seg("vocab", parts.vocab), role="head", part="bias")
    return parts_of(t, parts)


@architecture("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoEForCausalLM", "ernie4_5_moe")
def ernie4_5_moe(f: Fields, dtype: str) -> Parts:
    """ERNIE 4.5 21B-A3B and 300B-A47B: routing between ``moe_layer_start_index`` and ``moe_layer_end_index``."""
    n = f.layers()
    first = f.integer("moe_layer_start_index", default=1, low=0, high=MAX_LAYERS)
    last = f.integer("moe_layer_end_index", default=-1, low=-1, high=MAX_LAYERS)
    step = f.integer("moe_layer_interval", default=1, high=MAX_LAYERS)
    last = n - 1 if last == -1 else last
    sparse = tuple(i for i in range(n) if (i + 1) % step == 0 and first <= i <= last)
    width = f.integer("moe_intermediate_size")
    moe = routed(f, shared=shared_width(f, width, "moe_num_shared_experts", default=2), experts=64, topk=6)
    bias = f.flag("use_bias")
    names = MoeNames()
    mixers = (gqa(f),) * n
    t, parts = moe_decoder(
        f,
        dtype,
        mixers,
        sparse,
        moe,
        names,
        tied=True,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        router_dtype="f32",
    )
    if bias:
        t.add("lm_head.bias", seg("vocab", parts.vocab), role="head", part="bias")
    name = t.prefix + "mlp.moe_statics.e_score_correction_bias"
    t.add(name, seg("fixed", 1), seg("fixed", moe.experts), role="router", part="bias", layers=sparse, dtype="f32")
    width = f.integer("intermediate_size") if count_of(f) else 0

    def block(extra: Table, at: tuple[int, ...]) -> None:
        attention_tensors(extra, parts.hidden, mixers[0], at, bias=bias, out_bias=bias)
        mlp_tensors(extra, parts.hidden, width, at, bias=bias)

    return nextn(f, t, parts, block, Layer((mixers[0],), (Mlp(width),)), ERNIE_PREDICTION, bias=bias)


@architecture("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe")
def hunyuan_v1_moe(f: Fields, dtype: str) -> Parts:
    """Hunyuan-A13B: a shared expert as wide as a routed one, norms of queries and keys a head."""
    n = f.layers()
    width = f.integer("intermediate_size")
    shared = _first(f, "num_shared_expert", n) * width
    moe = Moe(f.integer("num_experts", "num_local_experts", high=MAX_EXPERTS), _first(f, "moe_topk", n), width, shared)
    bias = f.flag("attention_bias")
    names = MoeNames(router="mlp.gate.wg", shared="mlp.shared_mlp")
    a = gqa(f)
    t, parts = moe_decoder(f, dtype, (a,) * n, range(n), moe, names, qkv_bias=bias, out_bias=bias, router_dtype="f32")
    qk_norms(t, a, range(n), names=("self_attn.query_layernorm", "self_attn.key_layernorm"))
    return parts_of(t, parts)


def _first(f: Fields, name: str, n: int) -> int:
    """A number, or the first of a list with one for every layer (Hunyuan repeats one value); 1 when absent."""
    if isinstance(f.get(name)[1], list):
        return f.integers(name, length=n, low=1, high=MAX_EXPERTS)[0]
    return f.integer(name, default=1, high=MAX_EXPERTS)


def _deepseek_like(f: Fields, dense: int = 0, shared: int = 1) -> tuple[int, tuple[int, ...], Moe]:
    """Layers, routing layers and mixture of the keys that DeepSeek introduced."""
    n = f.layers()
    total = shared_width(f, f.integer("moe_intermediate_size"), default=shared)
    return n, after_dense(f, n, default=dense), routed(f, shared=total, grouped=True)


@architecture("Dots1ForCausalLM", "dots1")
def dots1(f: Fields, dtype: str) -> Parts:
    """dots.llm1: DeepSeek's mixture behind grouped-query attention."""
    n, sparse, moe = _deepseek_like(f)
    bias = f.flag("attention_bias")
    mixers = windows(f, n, gqa(f)) if f.has("layer_types") else (gqa(f),) * n
    return moe_decoder(f, dtype, mixers, sparse, moe, DEEPSEEK, qkv_bias=bias, out_bias=bias, qk_norm="head")[1]


@architecture("Glm4MoeForCausalLM", "glm4_moe")
def glm4_moe(f: Fields, dtype: str) -> Parts:
    """GLM-4.5, 4.6, 4.7 with their multi-token-prediction layer behind the last decoder layer.

    transformers saves Sarvam's models under this class, but with their own names.
    """
    if f.text("model_type") == "sarvam_moe":
        return sarvam_moe(f, dtype)
    n, sparse, moe = _deepseek_like(f, dense=1)
    bias, norm = f.flag("attention_bias"), "head" if f.flag("use_qk_norm") else ""
    a = gqa(f)
    t, parts = moe_decoder(f, dtype, (a,) * n, sparse, moe, DEEPSEEK, qkv_bias=bias, qk_norm=norm)

    def block(extra: Table, at: tuple[int, ...]) -> None:
        attention_tensors(extra, parts.hidden, a, at, bias=bias)
        if norm:
            qk_norms(extra, a, at)
        moe_tensors(extra, parts.hidden, moe, at, DEEPSEEK)

    return nextn(f, t, parts, block, Layer((a,), (moe,)))


@architecture("SolarOpenForCausalLM", "solar_open")
def solar_open(f: Fields, dtype: str) -> Parts:
    """Solar Open 100B: every layer routes, a shared expert."""
    n, _, moe = _deepseek_like(f)
    return moe_decoder(f, dtype, (gqa(f),) * n, range(n), moe, DEEPSEEK)[1]


@architecture("ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM", "exaone_moe")
def exaone_moe(f: Fields, dtype: str) -> Parts:
    """K-EXAONE 236B-A23B: three of four layers with a sliding window, first layer dense."""
    n, sparse, moe = _deepseek_like(f, dense=1)
    names = replace(DEEPSEEK, routing_bias="mlp.e_score_correction_bias")
    mixers = windows(f, n, gqa(f), full_every="sliding_window_pattern")
    return moe_decoder(f, dtype, mixers, sparse, moe, names, qk_norm="head")[1]


@architecture("HYV3ForCausalLM", "hy_v3")
def hy_v3(f: Fields, dtype: str) -> Parts:
    """Tencent Hy3: shared expert, routing bias beside the experts."""
    n, sparse, moe = _deepseek_like(f, dense=1)
    names = MoeNames(router="mlp.router.gate", routing_bias="mlp.expert_bias", shared="mlp.shared_mlp")
    return moe_decoder(f, dtype, (gqa(f),) * n, sparse, moe, names, qk_norm="head")[1]


@architecture("MellumForCausalLM", "mellum")
def mellum(f: Fields, dtype: str) -> Parts:
    """Mellum 2: Qwen3's mixture with sliding windows."""
    n = f.layers()
    mixers = windows(f, n, gqa(f))
    sparse = after_dense(f, n)
    return moe_decoder(f, dtype, mixers, sparse, routed(f), MoeNames(), qk_norm="head")[1]


@architecture("AfmoeForCausalLM", "afmoe")
def afmoe(f: Fields, dtype: str) -> Parts:
    """Arcee Trinity: gated attention, four norms a layer, dense first layers, sliding windows."""
    n = f.layers()
    dense = f.integer("num_dense_layers", default=1, low=0, high=MAX_LAYERS)
    width = f.integer("moe_intermediate_size")
    moe = routed(f, shared=shared_width(f, width, "num_shared_experts"), grouped=True)
    names = MoeNames(router="mlp.router.gate", routing_bias="mlp.expert_bias")
    norms = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
    a = replace(gqa(f), gated=True)
    mixers = windows(f, n, a, full_every="global_attn_every_n_layers")
    t, parts = moe_decoder(f, dtype, mixers, range(dense, n), moe, names, qk_norm="head", norms=norms)
    rows = seg("heads", a.heads, a.head_dim)
    t.linear("self_attn.gate_proj", rows, parts.hidden, role="attention", op="gate", layers=range(n))
    return parts_of(t, parts)


@architecture("Cohere2MoeForCausalLM", "cohere2_moe")
def cohere2_moe(f: Fields, dtype: str) -> Parts:
    """Cohere's mixture: one norm a layer (attention and experts side by side), tied embeddings, windows."""
    n = f.layers()
    width = f.integer("intermediate_size")
    moe = routed(f, width=("intermediate_size",), shared=shared_width(f, width, "num_shared_experts"))
    mixers = windows(f, n, gqa(f), full_every="sliding_window_pattern")
    sparse, bias = after_dense(f, n), f.flag("attention_bias")
    prefix = Fields({**f.raw, "intermediate_size": f.raw.get("prefix_dense_intermediate_size")}, f.where, f.assumed)
    names, norms = MoeNames(), ("input_layernorm",)
    return moe_decoder(prefix, dtype, mixers, sparse, moe, names, tied=True, qkv_bias=bias, out_bias=bias, norms=norms)[
        1
    ]

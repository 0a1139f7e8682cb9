"""Decoders with multi-head latent attention: DeepSeek-V2, V3, V3.2, Kimi K2, GLM-5, LongCat and kin.

Names and shapes are those that ``save_pretrained`` of transformers 5.24 writes (``tests/specs/hf``). MLA caches
one latent vector a token: ``kv_lora_rank`` values and the shared rotary key (DeepSeek-V2, arXiv:2405.04434,
section 2.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.errors import InputError
from meshwright.specs.hf.dense import ends, mlp_tensors
from meshwright.specs.hf.fields import MAX_LAYERS, Fields
from meshwright.specs.hf.moe import (
    DEEPSEEK,
    MoeNames,
    after_dense,
    moe_tensors,
    outside,
    routed,
    shared_width,
    stack,
)
from meshwright.specs.hf.mtp import COPIES, NO_COPIES, MtpNames, count_of, nextn
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Attention, Indexer, Layer, Mlp, Moe

MAX_HEADS = 1 << 14
TWO_NORMS = ("input_layernorm", "post_attention_layernorm")


def mla(f: Fields) -> Attention:
    """Latent attention of the usual keys; without ``q_lora_rank`` queries have one full projection."""
    heads = f.integer("num_attention_heads", high=MAX_HEADS)
    rope = f.integer("qk_rope_head_dim")
    return Attention(
        "mla",
        heads,
        1,
        f.integer("qk_nope_head_dim", low=0) + rope,
        f.integer("v_head_dim"),
        q_lora_rank=f.maybe("q_lora_rank", low=0) or 0,
        kv_lora_rank=f.integer("kv_lora_rank"),
        rope_head_dim=rope,
    )


def mla_tensors(
    t: Table,
    hidden: int,
    a: Attention,
    layers: Sequence[int],
    *,
    bias: bool = False,
    module: str = "self_attn",
) -> None:
    """Down and up projections of queries and of the latent, and the output projection.

    Args:
        bias: of the projections from and to the model width.
        module: module of the attention below the layer prefix.
    """
    latent, rank = seg("fixed", a.kv_lora_rank + a.rope_head_dim), seg("fixed", a.kv_lora_rank)
    q = seg("heads", a.heads, a.head_dim)
    if a.q_lora_rank:
        low = seg("fixed", a.q_lora_rank)
        t.linear(f"{module}.q_a_proj", low, hidden, role="attention", op="q_a", layers=layers, bias=bias)
        t.norm(f"{module}.q_a_layernorm", low, layers=layers, role="attention")
        t.linear(f"{module}.q_b_proj", q, low, role="attention", op="q_b", layers=layers)
    else:
        t.linear(f"{module}.q_proj", q, hidden, role="attention", op="q", layers=layers)
    t.linear(f"{module}.kv_a_proj_with_mqa", latent, hidden, role="attention", op="kv_a", layers=layers, bias=bias)
    t.norm(f"{module}.kv_a_layernorm", rank, layers=layers, role="attention")
    kv = seg("heads", a.heads, a.head_dim - a.rope_head_dim + a.v_head_dim)
    t.linear(f"{module}.kv_b_proj", kv, rank, role="attention", op="kv_b", layers=layers)
    out = seg("heads", a.heads, a.v_head_dim)
    t.linear(f"{module}.o_proj", hidden, out, role="attention", op="o", layers=layers, bias=bias)


def indexer(f: Fields) -> Indexer:
    """The token selector of sparse attention (DeepSeek-V3.2)."""
    heads = f.integer("index_n_heads", default=64, high=MAX_HEADS)
    return Indexer(heads, f.integer("index_head_dim", default=128), f.integer("index_topk", default=2048, high=1 << 30))


def indexer_tensors(
    t: Table, hidden: int, x: Indexer, q_rank: int, layers: Sequence[int], *, small_dtype: str | None = None
) -> None:
    """Query, key and weight projections of the selector; its key has one head.

    ``small_dtype``: of the key norm and the weight projection where it is not the model's.
    """
    name, key = "self_attn.indexer", seg("fixed", x.head_dim)
    q = seg("index_heads", x.heads, x.head_dim)
    t.linear(f"{name}.wq_b", q, seg("fixed", q_rank), role="indexer", op="index_q", layers=layers)
    t.linear(f"{name}.wk", key, hidden, role="indexer", op="index_k", layers=layers)
    t.norm(f"{name}.k_norm", key, layers=layers, bias=True, role="indexer", dtype=small_dtype)
    weights = seg("index_heads", x.heads)
    scores = f"{name}.weights_proj"
    t.linear(scores, weights, hidden, role="indexer", op="index_w", layers=layers, dtype=small_dtype)


def sharing(f: Fields, n: int) -> tuple[bool, ...]:
    """Which layers run their own selector (True) and which reuse that of the layer before (GLM-5.2, GLM-5.3).

    ``indexer_types``, else ``index_topk_pattern``, else every ``index_topk_freq``-th layer from
    ``index_skip_topk_offset`` on (``configuration_glm_moe_dsa.py`` of transformers 5.24).
    """
    if f.has("indexer_types"):
        return tuple(word == "full" for word in f.texts("indexer_types", length=n))
    pattern = f.get("index_topk_pattern")[1]
    if isinstance(pattern, str):
        words: tuple[str, ...] = tuple(f.text("index_topk_pattern"))
        if len(words) != n or set(words) - set("FS"):
            raise InputError(f"{f.where}: index_topk_pattern has {len(words)} letters for {n} layers; letters are F, S")
        return tuple(word == "F" for word in words)
    if pattern is not None:
        return tuple(word == "full" for word in f.texts("index_topk_pattern", length=n))
    every = max(1, f.integer("index_topk_freq", default=1, low=0, high=MAX_LAYERS))
    offset = f.integer("index_skip_topk_offset", default=2, low=0, high=MAX_LAYERS)
    return tuple(max(i - offset + 1, 0) % every == 0 for i in range(n))


def latent_decoder(
    f: Fields,
    dtype: str,
    *,
    names: MoeNames = DEEPSEEK,
    dense: int = 0,
    shared: int = 1,
    sparse_attention: bool = False,
    extra_norm: str = "",
    prediction: MtpNames = COPIES,
) -> Parts:
    """A DeepSeek-V3 shaped decoder: dense first layers, then shared and routed experts, then prediction layers.

    Args:
        names: names of the mixture.
        dense: dense first layers where the configuration is silent.
        shared: shared experts where the configuration is silent.
        sparse_attention: whether layers have the token selector.
        extra_norm: a norm behind the experts of routing layers (A.X K1).
        prediction: names of the prediction layers.
    """
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    a, bias = mla(f), f.flag("attention_bias")
    x = indexer(f) if sparse_attention else None
    if x is not None and not a.q_lora_rank:
        raise InputError(f"{f.where}: q_lora_rank is missing; the token selector takes its queries from it")
    own = sharing(f, n) if x is not None else (False,) * n
    mixers = tuple(replace(a, indexer=_shared(x, mine)) for mine in own)
    sparse = after_dense(f, n, default=dense)
    rest = outside(sparse, n)
    moe = routed(f, shared=shared_width(f, f.integer("moe_intermediate_size"), default=shared), grouped=True)
    width = f.integer("intermediate_size") if rest else 0
    router_dtype = "f32" if f.text("moe_router_dtype") in {"float32", "fp32"} else None
    tied = f.flag("tie_word_embeddings")
    t = Table(dtype)
    ends(t, hidden, vocab, tied)

    def block(to: Table, at: tuple[int, ...]) -> None:
        mla_tensors(to, hidden, a, at, bias=bias)
        mine = tuple(i for i in at if i >= n or own[i])
        if x is not None and mine:
            indexer_tensors(to, hidden, x, a.q_lora_rank, mine)
        inside = tuple(i for i in at if i >= n or i in set(sparse))
        moe_tensors(to, hidden, moe, inside, names, router_dtype=router_dtype)

    every = tuple(range(n))
    block(t, every)
    if rest:
        mlp_tensors(t, hidden, width, rest)
    for name in TWO_NORMS:
        t.norm(name, hidden, layers=every)
    if extra_norm:
        t.norm(extra_norm, hidden, layers=sparse)
    longest = f.integer("max_position_embeddings", default=163840, high=1 << 30)
    parts = Parts(hidden, vocab, stack(mixers, sparse, moe, width), tuple(t.families), tied, longest)
    return nextn(f, t, parts, block, Layer((replace(a, indexer=x),), (moe,)), prediction)


def _shared(x: Indexer | None, mine: bool) -> Indexer | None:
    """A selector without heads and keys stands for a layer that reuses the choice of the one before."""
    return x if x is None or mine else Indexer(0, 0, x.topk)


@architecture("DeepseekV2ForCausalLM", "deepseek_v2")
def deepseek_v2(f: Fields, dtype: str) -> Parts:
    """DeepSeek-V2, V2.5 and V2-Lite (no query rank): softmax routing without a bias."""
    return latent_decoder(f, dtype, names=MoeNames(), shared=0)


@architecture("DeepseekV3ForCausalLM", "deepseek_v3", "kimi_k2", "sarvam_mla")
def deepseek_v3(f: Fields, dtype: str) -> Parts:
    """DeepSeek-V3, R1, V3.1, Kimi K2 and the text part of Kimi K2.5."""
    return latent_decoder(f, dtype, dense=3)


@architecture("DeepseekV32ForCausalLM", "deepseek_v32")
def deepseek_v32(f: Fields, dtype: str) -> Parts:
    """DeepSeek-V3.2: V3 with a token selector in every layer."""
    return latent_decoder(f, dtype, dense=3, sparse_attention=True)


@architecture("GlmMoeDsaForCausalLM", "glm_moe_dsa")
def glm_moe_dsa(f: Fields, dtype: str) -> Parts:
    """GLM-5 to GLM-5.3: sparse latent attention; from 5.2 on most layers reuse a neighbour's selection."""
    return latent_decoder(f, dtype, dense=3, sparse_attention=True, prediction=NO_COPIES)


@architecture("Glm4MoeLiteForCausalLM", "glm4_moe_lite")
def glm4_moe_lite(f: Fields, dtype: str) -> Parts:
    """GLM-4.7-Flash: latent attention in the small model of the family."""
    return latent_decoder(f, dtype, dense=1)


@architecture("AXK1ForCausalLM", "axk1")
def axk1(f: Fields, dtype: str) -> Parts:
    """SK Telecom A.X K1: DeepSeek-V3 with a norm behind the experts."""
    return latent_decoder(f, dtype, dense=1, extra_norm="post_mlp_layernorm")


@architecture("Mistral4ForCausalLM", "mistral4")
def mistral4(f: Fields, dtype: str) -> Parts:
    """Mistral Small 4's text part: latent attention, all experts of a layer in two tensors."""
    parts = latent_decoder(f, dtype, names=MoeNames())
    moe = next((m for layer in parts.layers if (m := layer.moe)), None)
    if moe is None:
        return parts
    at = tuple(i for i, layer in enumerate(parts.layers) if layer.moe)
    kept = tuple(x for x in parts.families if x.role != "expert")
    t = Table(dtype)
    rows, inner = seg("experts", moe.experts), seg("expert_mlp", moe.intermediate)
    name = t.prefix + "mlp.experts."
    t.add(name + "gate_up_proj", rows, (inner, inner), parts.hidden, role="expert", op="gate_up", layers=at)
    t.add(name + "down_proj", rows, parts.hidden, inner, role="expert", op="down", layers=at)
    return replace(parts, families=(*kept, *t.families))


@architecture("YoutuForCausalLM", "YoutuLLMForCausalLM", "youtu", "MiniCPM3ForCausalLM", "minicpm3")
def latent_dense(f: Fields, dtype: str) -> Parts:
    """Dense decoders with latent attention: MiniCPM3, Youtu-LLM."""
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    a, inter = mla(f), f.integer("intermediate_size")
    tied, every = f.flag("tie_word_embeddings", default=True), tuple(range(n))
    t = Table(dtype)
    ends(t, hidden, vocab, tied)
    mla_tensors(t, hidden, a, every, bias=f.flag("attention_bias"))
    mlp_tensors(t, hidden, inter, every, bias=f.flag("mlp_bias"))
    for name in TWO_NORMS:
        t.norm(name, hidden, layers=every)
    longest = f.integer("max_position_embeddings", default=32768, high=1 << 30)
    return Parts(hidden, vocab, (Layer((a,), (Mlp(inter),)),) * n, tuple(t.families), tied, longest)


@architecture("LongcatFlashForCausalLM", "longcat_flash")
def longcat_flash(f: Fields, dtype: str) -> Parts:
    """LongCat-Flash: a layer is two attentions and two dense blocks with one mixture beside them.

    The router also scores ``zero_expert_num`` experts without weights that return their input.
    """
    hidden, vocab = f.integer("hidden_size"), f.integer("vocab_size")
    n = f.integer("num_layers", high=MAX_LAYERS) if f.has("num_layers") else f.layers() // 2
    a, bias, every = mla(f), f.flag("attention_bias"), tuple(range(n))
    inter = f.integer("ffn_hidden_size", "intermediate_size")
    moe = routed(f, width=("expert_ffn_hidden_size", "moe_intermediate_size"))
    idle = f.integer("zero_expert_num", default=0, low=0, high=1 << 14)
    tied = f.flag("tie_word_embeddings")
    t = Table(dtype)
    ends(t, hidden, vocab, tied)
    for half in (0, 1):
        mla_tensors(t, hidden, a, every, bias=bias, module=f"self_attn.{half}")
        mlp_tensors(t, hidden, inter, every, name=f"mlps.{half}")
        for name in TWO_NORMS:
            t.norm(f"{name}.{half}", hidden, layers=every)
    rows, name = seg("fixed", moe.experts + idle), "mlp.router.classifier"
    t.linear(name, rows, hidden, role="router", op="router", layers=every, bias=f.flag("router_bias"))
    t.add(t.prefix + "mlp.router.e_score_correction_bias", rows, role="router", part="bias", layers=every, dtype=None)
    _experts_only(t, hidden, moe, every)
    longest = f.integer("max_position_embeddings", default=131072, high=1 << 30)
    layer = Layer((a, a), (Mlp(inter), Mlp(inter), moe))
    parts = Parts(hidden, vocab, (layer,) * n, tuple(t.families), tied, longest)
    return _longcat_prediction(f, t, parts, a, inter)


def _longcat_prediction(f: Fields, t: Table, parts: Parts, a: Attention, inter: int) -> Parts:
    """A dense layer with one attention; its embedding and last norm lie beside the layers."""
    if not count_of(f):
        return parts
    extra = Table(t.dtype, section="mtp")
    extra.add("model.mtp.embed_tokens.weight", seg("vocab", parts.vocab), parts.hidden, role="embedding")
    extra.norm("model.mtp.norm", parts.hidden)

    def block(to: Table, at: tuple[int, ...]) -> None:
        mla_tensors(to, parts.hidden, a, at, bias=f.flag("attention_bias"))
        mlp_tensors(to, parts.hidden, inter, at, name="transformer_layer.mlp")

    names = MtpNames("model.mtp.layers.{layer}.", False, enorm="enorm.m", hnorm="hnorm.m", last="", embed="", head="")
    more = nextn(f, t, parts, block, Layer((a,), (Mlp(inter),)), names)
    return replace(more, families=(*more.families, *extra.families))


def _experts_only(t: Table, hidden: int, moe: Moe, layers: Sequence[int]) -> None:
    inner, names = seg("expert_mlp", moe.intermediate), MoeNames()
    for mat, op in zip(names.mats, ("gate", "up", "down"), strict=True):
        dims = (hidden, inner) if op == "down" else (inner, hidden)
        t.linear(f"{names.experts}.{mat}", *dims, role="expert", op=op, layers=layers, experts=moe.experts)

"""Unknown architectures: read as far as the fields allow, with sentences that say what is assumed."""

from __future__ import annotations

from dataclasses import replace

from meshwright.errors import InputError
from meshwright.specs.hf.dense import attention_tensors, ends, gqa, mlp_tensors, qk_norm_tensors
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.mla import mla, mla_tensors
from meshwright.specs.hf.moe import (
    EXPERT_KEYS,
    MoeNames,
    after_dense,
    moe_tensors,
    outside,
    qwen_layers,
    routed,
    shared_width,
    stack,
    windows,
)
from meshwright.specs.hf.registry import Parts, names_of, read_parts
from meshwright.specs.hf.table import Table
from meshwright.specs.model import Attention, Layer, Mlp, Moe

TEXT_KEYS = ("text_config", "llm_config", "language_config", "language_model_config", "thinker_config")
_EXPERT_WIDTH = ("moe_intermediate_size", "expert_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_INNER = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "ffn_hidden")
#: Fields that only state-space or linear-attention models have.
_RECURRENT = (
    "mamba_d_state", "ssm_state_size", "state_size", "mamba_num_heads", "linear_num_value_heads",
    "linear_attn_config", "rwkv_version", "hybrid_override_pattern", "layers_block_type", "conv_L_cache",
)  # fmt: skip


def generic(f: Fields, dtype: str) -> Parts:
    """Read an unknown architecture as a Llama-like, MoE-like or MLA-like decoder, by the fields it has.

    Raises:
        InputError: sizes are missing that every decoder needs.
    """
    name = (names_of(f) or ("without a name",))[0][:60]
    if f.has(*TEXT_KEYS) and not f.has(*_HIDDEN):
        text = f.sub(*TEXT_KEYS)
        f.assume(f"unknown architecture {name}: only its text part is read; its encoders are not counted")
        return read_parts(text, dtype)
    if not f.has(*_HIDDEN):
        raise InputError(f"{f.where}: {name} is no decoder that can be read: hidden_size is missing")
    return _decoder(f, dtype, name)


def _decoder(f: Fields, dtype: str, name: str) -> Parts:
    hidden, vocab = f.integer(*_HIDDEN), f.integer("vocab_size", "padded_vocab_size")
    n = f.layers("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    tied, every = f.flag("tie_word_embeddings"), tuple(range(n))
    t = Table(dtype)
    ends(t, hidden, vocab, tied)
    a, attention = _attention(f, t, hidden, every)
    moe = _experts(f)
    sparse = _sparse_layers(f, n) if moe else ()
    inner = f.integer(*_INNER, default=moe.intermediate if moe else 4 * hidden)
    dense = outside(sparse, n)
    if dense:
        mlp_tensors(t, hidden, inner, dense, bias=f.flag("mlp_bias", "use_bias"))
    if moe:
        moe_tensors(t, hidden, moe, sparse, MoeNames())
    t.norm("input_layernorm", hidden, layers=every)
    t.norm("post_attention_layernorm", hidden, layers=every)
    mixers = windows(f, n, a)
    layers = stack(mixers, sparse, moe, inner) if moe else tuple(Layer((m,), (Mlp(inner),)) for m in mixers)
    blocks = f"{moe.experts} experts, {moe.topk} a token" if moe else "a gated MLP of three matrices"
    f.assume(
        f"unknown architecture {name}, read as a decoder with {attention} and {blocks}, "
        "two norms a layer and Llama's tensor names"
    )
    if f.has(*_RECURRENT):
        f.assume(f"{name} has state-space or linear-attention layers; they are counted as attention")
    if f.has("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"):
        f.assume(f"multi-token-prediction layers of {name} are not counted")
    positions = f.integer("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", default=2048)
    return Parts(hidden, vocab, layers, tuple(t.families), tied, positions)


def _attention(f: Fields, t: Table, hidden: int, every: tuple[int, ...]) -> tuple[Attention, str]:
    """Attention of all layers with its tensors, and what to call it."""
    if f.has("kv_lora_rank", "qk_rope_head_dim"):
        a = mla(f)
        mla_tensors(t, hidden, a, every, bias=f.flag("attention_bias"))
        return a, "latent attention (MLA)"
    if f.has("num_attention_heads", "n_head"):
        a = gqa(f)
    else:
        heads = f.integer("n_heads", "num_heads", high=1 << 14)
        kv_heads = f.integer("n_kv_heads", "num_kv_heads", default=heads, high=1 << 14)
        width = f.integer("head_dim", default=max(1, hidden // heads))
        a = Attention("gqa", heads, kv_heads, width, width)
    bias = f.flag("attention_bias", "qkv_bias", "use_qkv_bias", "add_qkv_bias", "use_bias")
    attention_tensors(t, hidden, a, every, bias=bias, out_bias=f.flag("attention_bias", "use_bias"))
    if f.flag("use_qk_norm", "qk_norm", "qk_layernorm"):
        qk_norm_tensors(t, a, every, "head")
    return a, f"{a.heads} heads and {a.kv_heads} KV heads of {a.head_dim}"


def _experts(f: Fields) -> Moe | None:
    if not f.has(*EXPERT_KEYS) or f.integer(*EXPERT_KEYS, low=0) <= 1:
        return None
    moe = routed(f, width=_EXPERT_WIDTH, topk=2)
    if f.has("shared_expert_intermediate_size"):
        return replace(moe, shared_intermediate=f.integer("shared_expert_intermediate_size", low=0))
    return replace(moe, shared_intermediate=shared_width(f, moe.intermediate))


def _sparse_layers(f: Fields, n: int) -> tuple[int, ...]:
    if f.has("decoder_sparse_step", "mlp_only_layers"):
        return qwen_layers(f, n)
    return after_dense(f, n)

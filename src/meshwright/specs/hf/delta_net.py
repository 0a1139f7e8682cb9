"""Gated delta net hybrids: Qwen3-Next, Qwen3.5 and 3.6 (dense and with experts), OLMo-Hybrid.

Gated delta net: Yang et al. 2024. Keys and queries have ``linear_num_key_heads`` heads, values more; the state of a
value head is key width x value width. Every fourth layer is softmax attention with an output gate.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.specs.hf.blocks import (
    expert_tensors,
    layer_types,
    mlp3_tensors,
    of,
    qkvo_tensors,
    shared_tensors,
    text_ends,
)
from meshwright.specs.hf.dense import gqa
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.mamba import ssm_dtype, taps
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Attention, Ffn, Layer, Mlp, Moe, Recurrent

KINDS = {"linear_attention": "linear", "full_attention": "attention"}


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Sizes of a gated delta net layer."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    kernel: int

    def recurrent(self, state_dtype: str) -> Recurrent:
        """State of one sequence: value heads x value width x key width; the convolution runs over q, k and v."""
        channels = 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim
        return Recurrent(
            "gated_delta_net", self.v_heads, self.v_dim, self.k_dim, self.k_heads, self.kernel, channels, state_dtype
        )


def sizes(f: Fields, k_heads: int, v_heads: int, k_dim: int, v_dim: int) -> DeltaNet:
    """Sizes by the keys ``linear_*``, with the defaults of the class."""
    return DeltaNet(
        f.integer("linear_num_key_heads", default=k_heads),
        f.integer("linear_num_value_heads", default=v_heads),
        f.integer("linear_key_head_dim", default=k_dim),
        f.integer("linear_value_head_dim", default=v_dim),
        f.integer("linear_conv_kernel_dim", default=4),
    )


def types_of(f: Fields, n: int) -> tuple[str, ...]:
    """The list of layer types, or every ``full_attention_interval``-th layer attention."""
    every = f.integer("full_attention_interval", default=4)
    listed = layer_types(f, n, "layer_types", known=KINDS)
    return listed or tuple("linear" if (i + 1) % every else "attention" for i in range(n))


def _delta_tensors(t: Table, hidden: int, d: DeltaNet, layers: tuple[int, ...], *, fused: bool) -> None:
    """``fused`` (Qwen3-Next): one matrix holds q, k, v and the gate of a key head side by side, one b and a."""
    if not layers:
        return
    k, v, one = (
        seg("linear_k_heads", d.k_heads, d.k_dim),
        seg("linear_v_heads", d.v_heads, d.v_dim),
        seg("linear_v_heads", d.v_heads),
    )
    base = f"{t.prefix}linear_attn."
    for leaf in ("A_log", "dt_bias"):
        t.add(base + leaf, one, role="recurrent", layers=layers)
    t.add(base + "conv1d.weight", (k, k, v), *taps(d.kernel), role="recurrent", layers=layers)
    if fused:
        ratio = max(1, d.v_heads // d.k_heads)
        qkvz = seg("linear_k_heads", d.k_heads, 2 * d.k_dim + 2 * ratio * d.v_dim)
        ba = seg("linear_k_heads", d.k_heads, 2 * ratio)
        t.linear("linear_attn.in_proj_qkvz", qkvz, hidden, role="recurrent", op="in", layers=layers)
        t.linear("linear_attn.in_proj_ba", ba, hidden, role="recurrent", op="ba", layers=layers)
    else:
        t.linear("linear_attn.in_proj_qkv", (k, k, v), hidden, role="recurrent", op="in", layers=layers)
        t.linear("linear_attn.in_proj_z", v, hidden, role="recurrent", op="z", layers=layers)
        for leaf in "ba":
            t.linear(f"linear_attn.in_proj_{leaf}", one, hidden, role="recurrent", op=leaf, layers=layers)
    t.norm("linear_attn.norm", seg("fixed", d.v_dim), layers=layers, role="recurrent")
    t.linear("linear_attn.out_proj", hidden, v, role="recurrent", op="out", layers=layers)


def _attention(f: Fields, head_dim: int) -> Attention:
    heads = f.integer("num_attention_heads", default=16)
    kv_heads, width = f.integer("num_key_value_heads", default=2), f.integer("head_dim", default=head_dim)
    return Attention("gqa", heads, kv_heads, width, width, gated=f.flag("attn_output_gate", default=True))


def _attention_tensors(t: Table, f: Fields, hidden: int, a: Attention, layers: tuple[int, ...]) -> None:
    if not layers:
        return
    bias = f.flag("attention_bias")
    qkvo_tensors(t, hidden, a, layers, bias=bias, out_bias=bias)
    for leaf in ("q_norm", "k_norm"):
        t.norm(f"self_attn.{leaf}", seg("fixed", a.head_dim), layers=layers)


def _moe(f: Fields) -> Moe:
    return Moe(
        f.integer("num_experts", "num_local_experts", high=1 << 14),
        f.integer("num_experts_per_tok", default=10),
        f.integer("moe_intermediate_size", default=512),
        f.integer("shared_expert_intermediate_size", default=512, low=0),
    )


def _moe_tensors(t: Table, hidden: int, moe: Moe, layers: tuple[int, ...]) -> None:
    if not layers:
        return
    t.linear("mlp.gate", seg("fixed", moe.experts), hidden, role="router", op="router", layers=layers)
    expert_tensors(t, hidden, moe.intermediate, moe.experts, layers, name="mlp.experts")
    if moe.shared_intermediate:
        shared_tensors(t, hidden, moe.shared_intermediate, layers, name="mlp.shared_expert")
        gate = seg("fixed", 1)
        t.linear("mlp.shared_expert_gate", gate, hidden, role="shared_expert", op="shared_gate", layers=layers)


def _sparse(f: Fields, n: int) -> tuple[int, ...]:
    """Layers with experts: every ``decoder_sparse_step``-th that is not in ``mlp_only_layers``."""
    if not f.has("num_experts", "num_local_experts"):
        return ()
    only, step = set(f.integers("mlp_only_layers")), f.integer("decoder_sparse_step", default=1)
    return tuple(i for i in range(n) if i not in only and (i + 1) % step == 0)


def _mtp(f: Fields, dtype: str, hidden: int, layer: Layer) -> tuple[tuple[Layer, ...], Table]:
    """``mtp.*``: two norms and a joining projection, attention layers like the decoder's, a norm.

    Names as vLLM's loader reads them (``qwen3_next_mtp.py``); embedding and head are the model's own.
    """
    steps = f.integer("mtp_num_hidden_layers", "num_nextn_predict_layers", default=0, low=0, high=64)
    t = Table(dtype, prefix="mtp.layers.{layer}.", section="mtp")
    if not steps:
        return (), t
    f.assume("names and shapes of the multi-token-prediction layers follow vLLM's loader, not a transformers class")
    every, a = tuple(range(steps)), layer.attention
    t.linear("mtp.fc", hidden, 2 * hidden, role="other", op="eh_proj")
    for leaf in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        t.norm(f"mtp.{leaf}", hidden)
    if a is not None:
        _attention_tensors(t, f, hidden, a, every)
    _ffn_tensors(t, f, hidden, layer, every)
    for leaf in ("input_layernorm", "post_attention_layernorm"):
        t.norm(leaf, hidden, layers=every)
    return (layer,) * steps, t


def _ffn_tensors(t: Table, f: Fields, hidden: int, layer: Layer, layers: tuple[int, ...]) -> None:
    if layer.moe:
        _moe_tensors(t, hidden, layer.moe, layers)
    if layer.mlp:
        mlp3_tensors(t, hidden, layer.mlp.intermediate, layers, name="mlp")


def _qwen(f: Fields, dtype: str, d: DeltaNet, *, fused: bool) -> Parts:
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    types, sparse, a = types_of(f, n), _sparse(f, n), _attention(f, 256)
    dense = tuple(i for i in range(n) if i not in sparse)
    tied = f.flag("tie_word_embeddings")
    t = Table(dtype)
    text_ends(t, hidden, vocab, tied)
    _delta_tensors(t, hidden, d, of(types, "linear"), fused=fused)
    _attention_tensors(t, f, hidden, a, of(types, "attention"))
    ffns: dict[bool, Ffn] = {}
    if sparse:
        ffns[True] = _moe(f)
    if dense:
        ffns[False] = Mlp(f.integer("intermediate_size"))
    for is_moe, layers in ((True, sparse), (False, dense)):
        if layers:
            _ffn_tensors(t, f, hidden, Layer((), (ffns[is_moe],)), layers)
    for leaf in ("input_layernorm", "post_attention_layernorm"):
        t.norm(leaf, hidden, layers=tuple(range(n)))
    r = d.recurrent(ssm_dtype(f, dtype))
    layers_ = tuple(Layer((a if kind == "attention" else r,), (ffns[i in sparse],)) for i, kind in enumerate(types))
    mtp, mtp_table = _mtp(f, dtype, hidden, Layer((a,), (ffns[bool(sparse)],)))
    families = tuple(t.families + mtp_table.families)
    positions = f.integer("max_position_embeddings", default=32768)
    return Parts(hidden, vocab, layers_, families, tied, positions, mtp_layers=mtp)


@architecture("Qwen3NextForCausalLM", "qwen3_next")
def qwen3_next(f: Fields, dtype: str) -> Parts:
    """Qwen3-Next: fused input projections."""
    return _qwen(f, dtype, sizes(f, 16, 32, 128, 128), fused=True)


@architecture("Qwen3_5ForCausalLM", "qwen3_5_text", "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text")
def qwen3_5(f: Fields, dtype: str) -> Parts:
    """Text part of Qwen3.5 and Qwen3.6: separate projections for q k v, the gate, b and a."""
    return _qwen(f, dtype, sizes(f, 16, 32, 128, 128), fused=False)


def _olmo_delta_tensors(t: Table, hidden: int, d: DeltaNet, layers: tuple[int, ...]) -> None:
    """Separate projections and separate convolutions for q, k and v."""
    k, v, one = (
        seg("linear_k_heads", d.k_heads, d.k_dim),
        seg("linear_v_heads", d.v_heads, d.v_dim),
        seg("linear_v_heads", d.v_heads),
    )
    base = f"{t.prefix}linear_attn."
    t.add(base + "A_log", one, role="recurrent", layers=layers, dtype="f32")
    t.add(base + "dt_bias", one, role="recurrent", layers=layers)
    for leaf, dim in (("q", k), ("k", k), ("v", v)):
        t.add(f"{base}{leaf}_conv1d.weight", dim, *taps(d.kernel), role="recurrent", layers=layers)
    for leaf, dim in (("q", k), ("k", k), ("v", v), ("g", v), ("a", one), ("b", one)):
        t.linear(f"linear_attn.{leaf}_proj", dim, hidden, role="recurrent", op=leaf, layers=layers)
    t.norm("linear_attn.o_norm", seg("fixed", d.v_dim), layers=layers, role="recurrent")
    t.linear("linear_attn.o_proj", hidden, v, role="recurrent", op="out", layers=layers)


@architecture("OlmoHybridForCausalLM", "olmo_hybrid")
def olmo_hybrid(f: Fields, dtype: str) -> Parts:
    """OLMo-Hybrid: norms before the linear layers, after the attention layers; norms over all of q and of k."""
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    a = gqa(f)
    k_heads = f.integer("linear_num_key_heads", default=a.heads)
    k_dim = f.integer("linear_key_head_dim", default=max(1, int(0.75 * hidden / k_heads)))
    d = sizes(f, k_heads, a.heads, k_dim, 2 * k_dim)
    types = types_of(f, n)
    linear, attn, every = of(types, "linear"), of(types, "attention"), tuple(range(n))
    tied, inter, bias = f.flag("tie_word_embeddings"), f.integer("intermediate_size"), f.flag("attention_bias")
    t = Table(dtype)
    text_ends(t, hidden, vocab, tied)
    if linear:
        _olmo_delta_tensors(t, hidden, d, linear)
        t.norm("attention_layer_norm", hidden, layers=linear)
    t.norm("feedforward_layer_norm", hidden, layers=every)
    qkvo_tensors(t, hidden, a, attn, bias=bias, out_bias=bias)
    if attn:
        t.norm("self_attn.q_norm", seg("heads", a.heads, a.head_dim), layers=attn)
        t.norm("self_attn.k_norm", seg("kv_heads", a.kv_heads, a.head_dim), layers=attn)
        t.norm("post_feedforward_layernorm", hidden, layers=attn)
    mlp3_tensors(t, hidden, inter, every, name="mlp")
    r, mlp = d.recurrent(ssm_dtype(f, dtype)), (Mlp(inter),)
    layers = tuple(Layer((a if kind == "attention" else r,), mlp) for kind in types)
    return Parts(hidden, vocab, layers, tuple(t.families), tied, f.integer("max_position_embeddings", default=65536))

"""Ling with Kimi delta attention (``bailing_hybrid``): five linear layers to one of gated latent attention, experts."""

from __future__ import annotations

from dataclasses import replace

from meshwright.specs.hf.blocks import expert_tensors, layer_types, mlp3_tensors, of, shared_tensors, text_ends
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.mamba import taps
from meshwright.specs.hf.mla import mla, mla_tensors
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Attention, Layer, Mlp, Moe, Recurrent

KINDS = {"linear_attention": "kda", "full_attention": "mla"}


def _kda_tensors(t: Table, hidden: int, r: Recurrent, at: tuple[int, ...]) -> None:
    """Full-rank decay and output gates, separate convolutions of q, k and v."""
    if not at:
        return
    x, one = seg("heads", r.heads, r.head_dim), seg("heads", r.heads)
    base = f"{t.prefix}attention."
    t.add(base + "A_log", one, role="recurrent", layers=at, dtype="f32")
    t.add(base + "dt_bias", x, role="recurrent", layers=at, dtype="f32")
    for leaf in "qkvfg":
        t.linear(f"attention.{leaf}_proj", x, hidden, role="recurrent", op=leaf, layers=at)
    for leaf in "qkv":
        t.add(f"{base}{leaf}_conv1d.weight", x, *taps(r.conv_kernel), role="recurrent", layers=at, dtype="f32")
    t.linear("attention.b_proj", one, hidden, role="recurrent", op="b", layers=at)
    t.norm("attention.o_norm", seg("fixed", r.head_dim), layers=at, role="recurrent")
    t.linear("attention.dense", hidden, x, role="recurrent", op="out", layers=at)


def _latent_tensors(t: Table, hidden: int, a: Attention, at: tuple[int, ...], bias: bool) -> None:
    """Latent attention whose output is gated by one logit a head; its output projection is called ``dense``."""
    if not at:
        return
    start = len(t.families)
    mla_tensors(t, hidden, a, at, bias=bias, module="attention")
    named = (replace(f, template=f.template.replace("attention.o_proj", "attention.dense")) for f in t.families[start:])
    t.families[start:] = list(named)
    t.linear("attention.g_proj", seg("heads", a.heads), hidden, role="attention", op="g", layers=at)


def _moe_tensors(t: Table, hidden: int, moe: Moe, at: tuple[int, ...]) -> None:
    if not at:
        return
    rows = seg("fixed", moe.experts)
    t.linear("mlp.gate", rows, hidden, role="router", op="router", layers=at, dtype="f32")
    t.add(f"{t.prefix}mlp.gate.expert_bias", rows, role="router", part="bias", layers=at, dtype="f32")
    expert_tensors(t, hidden, moe.intermediate, moe.experts, at, name="mlp.experts")
    if moe.shared_intermediate:
        shared_tensors(t, hidden, moe.shared_intermediate, at, name="mlp.shared_experts")


@architecture("BailingHybridForCausalLM", "bailing_hybrid")
def bailing_hybrid(f: Fields, dtype: str) -> Parts:
    """Ling and Ring with linear attention, as the transformers class has them."""
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    step = f.integer("layer_group_size", default=6)
    types = layer_types(f, n, "layer_types", known=KINDS)
    types = types or tuple("kda" if (i + 1) % step else "mla" for i in range(n))
    a = replace(mla(f), gated=True)
    heads, width = f.integer("linear_num_heads", default=a.heads), f.integer("linear_head_dim", "head_dim", default=128)
    kernel = f.integer("linear_conv_kernel_dim", "short_conv_kernel_size", default=4)
    r = Recurrent("kda", heads, width, width, heads, kernel, 3 * heads * width, "f32")
    each = f.integer("moe_intermediate_size")
    moe = Moe(
        f.integer("num_experts", "num_local_experts", high=1 << 14),
        f.integer("num_experts_per_token", "num_experts_per_tok", default=8),
        each,
        each * f.integer("num_shared_experts", "n_shared_experts", default=1, low=0),
        groups=f.integer("num_expert_group", "n_group", default=8),
        topk_groups=f.integer("topk_group", default=4),
    )
    kinds = layer_types(f, n, "mlp_layer_types", known={"dense": "dense", "sparse": "sparse"})
    first = f.integer("first_k_dense_replace", default=2, low=0)
    sparse = of(kinds, "sparse") if kinds else tuple(range(min(first, n), n))
    every, inter, tied = tuple(range(n)), f.integer("intermediate_size"), f.flag("tie_word_embeddings")
    t = Table(dtype)
    text_ends(t, hidden, vocab, tied, embed="model.word_embeddings")
    _kda_tensors(t, hidden, r, of(types, "kda"))
    _latent_tensors(t, hidden, a, of(types, "mla"), f.flag("attention_bias"))
    mlp3_tensors(t, hidden, inter, tuple(i for i in every if i not in sparse), name="mlp")
    _moe_tensors(t, hidden, moe, sparse)
    for leaf in ("input_layernorm", "post_attention_layernorm"):
        t.norm(leaf, hidden, layers=every)
    if f.integer("num_nextn_predict_layers", "num_mtp_layers", default=0, low=0, high=64):
        f.assume("multi-token-prediction layers of bailing_hybrid are not counted; their tensors are not published")
    layers = tuple(
        Layer((a if kind == "mla" else r,), (moe if i in sparse else Mlp(inter),)) for i, kind in enumerate(types)
    )
    positions = f.integer("model_max_length", "max_position_embeddings", default=262144)
    return Parts(hidden, vocab, layers, tuple(t.families), tied, positions)

"""Kimi Linear and the text part of Kimi K3: Kimi delta attention, latent attention, (latent) experts.

Kimi Linear's names are those of its transformers class. Kimi K3 has no class there: full-rank gates, an output gate
on the latent attention, attention residuals and the latent experts follow the published names of its checkpoint
(``modeling_kimi_linear.py`` beside it) and the shapes follow from the fields of the configuration.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.errors import InputError
from meshwright.specs.hf.blocks import expert_tensors, layer_types, mlp3_tensors, of, shared_tensors, text_ends
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.mamba import taps
from meshwright.specs.hf.mla import mla, mla_tensors
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Layer, Mlp, Moe, Recurrent

KINDS = {"linear_attention": "kda", "full_attention": "mla"}


def _types(f: Fields, linear: Fields, n: int) -> tuple[str, ...]:
    """Layer kinds: ``layer_types``, or the two lists of layer numbers counted from 1, or the default of the class."""
    listed = layer_types(f, n, "layer_types", known=KINDS)
    if listed:
        return listed
    full, kda = set(linear.integers("full_attn_layers")), set(linear.integers("kda_layers"))
    if not full and not kda:
        return tuple("mla" if i and i % 4 == 0 else "kda" for i in range(n))
    if full & kda or full | kda != set(range(1, n + 1)):
        raise InputError(f"{linear.where}: the {len(full)} full and {len(kda)} linear layers are not layers 1 to {n}")
    return tuple("mla" if i + 1 in full else "kda" for i in range(n))


def _kda_tensors(t: Table, hidden: int, heads: int, width: int, kernel: int, full: bool, at: tuple[int, ...]) -> None:
    """Kimi delta attention; ``full``: one full-rank output gate instead of a low-rank pair (K3)."""
    if not at:
        return
    x, one, low = seg("heads", heads, width), seg("heads", heads), seg("fixed", width)
    base, conv_dtype = f"{t.prefix}self_attn.", "f32" if full else None
    for leaf in "qkv":
        t.linear(f"self_attn.{leaf}_proj", x, hidden, role="recurrent", op=leaf, layers=at)
        name = f"{base}{leaf}_conv1d.weight"
        t.add(name, x, *taps(kernel), role="recurrent", layers=at, dtype=conv_dtype)
    # K3 stores one decay rate a key column, padded; Kimi Linear one a head with broadcast dimensions.
    unit = seg("fixed", 1)
    decay = (low,) if full else (unit, unit, one, unit)
    t.add(base + "A_log", *decay, role="recurrent", layers=at, dtype=conv_dtype)
    t.add(base + "dt_bias", x, role="recurrent", layers=at, dtype="f32")
    t.linear("self_attn.f_a_proj", low, hidden, role="recurrent", op="f_a", layers=at)
    t.linear("self_attn.f_b_proj", x, low, role="recurrent", op="f_b", layers=at)
    t.linear("self_attn.b_proj", one, hidden, role="recurrent", op="b", layers=at)
    if full:
        t.linear("self_attn.g_proj", x, hidden, role="recurrent", op="g", layers=at)
    else:
        t.linear("self_attn.g_a_proj", low, hidden, role="recurrent", op="g_a", layers=at)
        t.linear("self_attn.g_b_proj", x, low, role="recurrent", op="g_b", layers=at)
    t.norm("self_attn.o_norm", low, layers=at, role="recurrent")
    t.linear("self_attn.o_proj", hidden, x, role="recurrent", op="out", layers=at)


def _moe(f: Fields) -> Moe:
    width = f.integer("moe_intermediate_size")
    return Moe(
        f.integer("num_experts", "num_local_experts", high=1 << 14),
        f.integer("num_experts_per_token", "num_experts_per_tok"),
        width,
        width * f.integer("num_shared_experts", "n_shared_experts", default=1, low=0),
        latent=f.maybe("routed_expert_hidden_size") or 0,
        groups=f.integer("num_expert_group", "n_group", default=1),
        topk_groups=f.integer("topk_group", default=1),
    )


def _moe_tensors(t: Table, f: Fields, hidden: int, moe: Moe, at: tuple[int, ...]) -> None:
    """Router over the full width; with ``latent`` the experts work between two shared projections."""
    if not at:
        return
    name, rows = "block_sparse_moe", seg("fixed", moe.experts)
    gate_dtype = None if moe.latent else "f32"  # Kimi Linear's class keeps the router in float32
    t.linear(f"{name}.gate", rows, hidden, role="router", op="router", layers=at, dtype=gate_dtype)
    t.add(f"{t.prefix}{name}.gate.e_score_correction_bias", rows, role="router", part="bias", layers=at, dtype="f32")
    if moe.latent:
        latent = seg("fixed", moe.latent)
        t.linear(f"{name}.routed_expert_down_proj", latent, hidden, role="other", op="latent_in", layers=at)
        t.linear(f"{name}.routed_expert_up_proj", hidden, latent, role="other", op="latent_out", layers=at)
        if f.flag("latent_moe_use_norm"):
            t.norm(f"{name}.routed_expert_norm", latent, layers=at)
    leaves = ("w1", "w3", "w2")
    width = moe.latent or hidden
    expert_tensors(t, width, moe.intermediate, moe.experts, at, name=f"{name}.experts", leaves=leaves)
    if moe.shared_intermediate:
        shared_tensors(t, hidden, moe.shared_intermediate, at, name=f"{name}.shared_experts")


def _residuals(t: Table, hidden: int, every: tuple[int, ...]) -> None:
    """Attention residuals of K3: a norm and one row before each half of a layer and at the end."""
    for leaf in ("self_attention_res", "mlp_res"):
        t.norm(f"{leaf}_norm", hidden, layers=every)
        t.linear(f"{leaf}_proj", seg("fixed", 1), hidden, role="other", op="residual", layers=every)
    t.norm("model.output_attn_res_norm", hidden)
    t.linear("model.output_attn_res_proj", seg("fixed", 1), hidden, role="other", op="residual")


def _sparse(f: Fields, n: int) -> tuple[int, ...]:
    kinds = layer_types(f, n, "mlp_layer_types", known={"dense": "dense", "sparse": "sparse"})
    if kinds:
        return of(kinds, "sparse")
    first, step = f.integer("first_k_dense_replace", default=1, low=0), f.integer("moe_layer_freq", default=1)
    return tuple(i for i in range(n) if i >= first and i % step == 0)


@architecture("KimiLinearForCausalLM", "kimi_linear")
def kimi_linear(f: Fields, dtype: str) -> Parts:
    """Kimi Linear 48B and the text part of Kimi K3."""
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    linear = f.sub("linear_attn_config")
    holder = linear if linear.raw else f
    heads = holder.integer("num_heads", "linear_num_heads", default=32)
    width = holder.integer("head_dim" if linear.raw else "linear_head_dim", default=128)
    kernel = holder.integer("short_conv_kernel_size", "linear_conv_kernel_dim", default=4)
    full = linear.flag("use_full_rank_gate")
    types, a = _types(f, linear, n), mla(f)
    kda, latent, every = of(types, "kda"), of(types, "mla"), tuple(range(n))
    t = Table(dtype)
    text_ends(t, hidden, vocab, f.flag("tie_word_embeddings"))
    _kda_tensors(t, hidden, heads, width, kernel, full, kda)
    if latent:
        mla_tensors(t, hidden, a, latent)
        if f.flag("mla_use_output_gate"):
            a = replace(a, gated=True)
            gate = seg("heads", a.heads, a.v_head_dim)
            t.linear("self_attn.g_proj", gate, hidden, role="attention", op="g", layers=latent)
    moe, sparse, inter = _moe(f), _sparse(f, n), f.integer("intermediate_size")
    mlp3_tensors(t, hidden, inter, tuple(i for i in every if i not in sparse), name="mlp")
    _moe_tensors(t, f, hidden, moe, sparse)
    for leaf in ("input_layernorm", "post_attention_layernorm"):
        t.norm(leaf, hidden, layers=every)
    if f.has("attn_res_block_size"):
        _residuals(t, hidden, every)
        f.assume("Kimi K3 has no class in transformers: its tensors follow its published names and these fields")
    r = Recurrent("kda", heads, width, width, heads, kernel, 3 * heads * width, "f32")
    layers = tuple(
        Layer((a if kind == "mla" else r,), (moe if i in sparse else Mlp(inter),)) for i, kind in enumerate(types)
    )
    positions = f.integer("model_max_length", "max_position_embeddings", default=1 << 20)
    return Parts(hidden, vocab, layers, tuple(t.families), f.flag("tie_word_embeddings"), positions)

"""Hybrids of state-space mixers and attention: Bamba, Jamba, Falcon-H1, Granite 4 (granitemoehybrid)."""

from __future__ import annotations

from meshwright.specs.hf.blocks import (
    expert_tensors,
    layer_types,
    mlp3_tensors,
    of,
    qkvo_tensors,
    text_ends,
)
from meshwright.specs.hf.dense import gqa
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.mamba import Mamba1, Mamba2, dt_rank, mamba1_tensors, mamba2_tensors, ssm_dtype
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Ffn, Layer, Mixer, Mlp, Moe
from meshwright.specs.tensors import Role

MAMBA = {"mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention"}


def mamba2_sizes(f: Fields, hidden: int, inner: int | None = None, *, state: int = 256, norm: bool = True) -> Mamba2:
    """Sizes by the keys ``mamba_*``; the head width is stated or the inner width over the heads."""
    inner = inner or f.integer("mamba_expand", default=2) * hidden
    heads = f.integer("mamba_n_heads", default=128)
    _, stated = f.get("mamba_d_head")
    head_dim = max(1, inner // heads) if stated in (None, "auto") else f.integer("mamba_d_head")
    return Mamba2(
        heads,
        head_dim,
        f.integer("mamba_n_groups", default=1),
        f.integer("mamba_d_state", default=state),
        f.integer("mamba_d_conv", default=4),
        f.flag("mamba_conv_bias", default=True),
        f.flag("mamba_proj_bias"),
        norm,
    )


@architecture("BambaForCausalLM", "bamba")
def bamba(f: Fields, dtype: str) -> Parts:
    """Bamba: Mamba-2 layers, attention in ``attn_layer_indices``, a gated MLP in every layer."""
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    a, m = gqa(f), mamba2_sizes(f, hidden)
    where = set(f.integers("attn_layer_indices"))
    types = tuple("attention" if i in where else "mamba" for i in range(n))
    inter, tied = f.integer("intermediate_size"), f.flag("tie_word_embeddings")
    every, bias = tuple(range(n)), f.flag("attention_bias")
    t = Table(dtype)
    text_ends(t, hidden, vocab, tied, norm="model.final_layernorm")
    mamba2_tensors(t, "mamba", hidden, m, of(types, "mamba"))
    qkvo_tensors(t, hidden, a, of(types, "attention"), bias=bias, out_bias=bias)
    mlp3_tensors(t, hidden, inter, every, name="feed_forward", bias=f.flag("mlp_bias"))
    t.norm("input_layernorm", hidden, layers=every)
    t.norm("pre_ff_layernorm", hidden, layers=every)
    r, ffn = m.recurrent(ssm_dtype(f, dtype)), (Mlp(inter),)
    layers = tuple(Layer((a if kind == "attention" else r,), ffn) for kind in types)
    return Parts(hidden, vocab, layers, tuple(t.families), tied, f.integer("max_position_embeddings", default=262144))


@architecture("JambaForCausalLM", "jamba")
def jamba(f: Fields, dtype: str) -> Parts:
    """Jamba: Mamba layers, attention every ``attn_layer_period``, experts every ``expert_layer_period``."""
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    a = gqa(f)
    m = Mamba1(
        f.integer("mamba_expand", default=2) * hidden,
        f.integer("mamba_d_state", default=16),
        dt_rank(f, hidden, "mamba_dt_rank"),
        f.integer("mamba_d_conv", default=4),
        f.flag("mamba_conv_bias", default=True),
        f.flag("mamba_proj_bias"),
        norms=True,
    )
    every = tuple(range(n))
    period, offset = f.integer("attn_layer_period", default=8), f.integer("attn_layer_offset", default=4, low=0)
    attn = tuple(i for i in every if i % period == offset)
    experts = f.integer("num_experts", default=16, high=1 << 14)
    e_period, e_offset = f.integer("expert_layer_period", default=2), f.integer("expert_layer_offset", default=1, low=0)
    sparse = tuple(i for i in every if i % e_period == e_offset) if experts > 1 else ()
    dense = tuple(i for i in every if i not in sparse)
    inter, tied = f.integer("intermediate_size"), f.flag("tie_word_embeddings")
    t = Table(dtype)
    text_ends(t, hidden, vocab, tied, norm="model.final_layernorm")
    mamba1_tensors(t, "mamba", hidden, m, tuple(i for i in every if i not in attn))
    qkvo_tensors(t, hidden, a, attn)
    mlp3_tensors(t, hidden, inter, dense, name="feed_forward")
    if sparse:
        t.linear("feed_forward.router", seg("fixed", experts), hidden, role="router", op="router", layers=sparse)
    expert_tensors(t, hidden, inter, experts, sparse, name="feed_forward.experts")
    t.norm("input_layernorm", hidden, layers=every)
    t.norm("pre_ff_layernorm", hidden, layers=every)
    r, moe = m.recurrent(ssm_dtype(f, dtype)), Moe(experts, f.integer("num_experts_per_tok", default=2), inter)
    layers = tuple(Layer((a if i in attn else r,), (moe if i in sparse else Mlp(inter),)) for i in every)
    return Parts(hidden, vocab, layers, tuple(t.families), tied, f.integer("max_position_embeddings", default=262144))


@architecture("FalconH1ForCausalLM", "falcon_h1")
def falcon_h1(f: Fields, dtype: str) -> Parts:
    """Falcon-H1: attention and Mamba-2 side by side in every layer."""
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    a = gqa(f)
    m = mamba2_sizes(f, hidden, f.maybe("mamba_d_ssm"), norm=f.flag("mamba_rms_norm"))
    inter, tied = f.integer("intermediate_size"), f.flag("tie_word_embeddings")
    every, bias = tuple(range(n)), f.flag("attention_bias")
    t = Table(dtype)
    text_ends(t, hidden, vocab, tied, norm="model.final_layernorm")
    mamba2_tensors(t, "mamba", hidden, m, every, out_bias=f.flag("projectors_bias"))
    qkvo_tensors(t, hidden, a, every, bias=bias, out_bias=bias)
    mlp3_tensors(t, hidden, inter, every, name="feed_forward", bias=f.flag("mlp_bias"))
    t.norm("input_layernorm", hidden, layers=every)
    t.norm("pre_ff_layernorm", hidden, layers=every)
    layer = Layer((a, m.recurrent(ssm_dtype(f, dtype))), (Mlp(inter),))
    positions = f.integer("max_position_embeddings", default=8192)
    return Parts(hidden, vocab, (layer,) * n, tuple(t.families), tied, positions)


def _granite_experts(t: Table, hidden: int, moe: Moe, layers: tuple[int, ...]) -> None:
    """All experts of a layer in two tensors: gate and up in one, down in the other."""
    e, inner = seg("experts", moe.experts), seg("expert_mlp", moe.intermediate)
    name = f"{t.prefix}block_sparse_moe."
    t.add(name + "input_linear.weight", e, (inner, inner), hidden, role="expert", op="gate_up", layers=layers)
    t.add(name + "output_linear.weight", e, hidden, inner, role="expert", op="down", layers=layers)
    rows = seg("fixed", moe.experts)
    t.linear("block_sparse_moe.router.layer", rows, hidden, role="router", op="router", layers=layers)


@architecture("GraniteMoeHybridForCausalLM", "granitemoehybrid")
def granitemoehybrid(f: Fields, dtype: str) -> Parts:
    """Granite 4: Mamba-2 or attention layers, experts (none in the dense sizes) beside a shared gated MLP."""
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    a, m = gqa(f), mamba2_sizes(f, hidden)
    types = layer_types(f, n, "layer_types", "layers_block_type", known=MAMBA) or ("mamba",) * n
    shared = f.integer("shared_intermediate_size", default=1024)
    experts = f.integer("num_local_experts", default=8, low=0, high=1 << 14)
    tied, every, bias = f.flag("tie_word_embeddings"), tuple(range(n)), f.flag("attention_bias")
    t = Table(dtype)
    text_ends(t, hidden, vocab, tied)
    mamba2_tensors(t, "mamba", hidden, m, of(types, "mamba"))
    qkvo_tensors(t, hidden, a, of(types, "attention"), bias=bias, out_bias=bias)
    ffns: tuple[Ffn, ...] = (Mlp(shared),)
    if experts:
        moe = Moe(experts, f.integer("num_experts_per_tok", default=2), f.integer("intermediate_size"), shared)
        _granite_experts(t, hidden, moe, every)
        ffns = (moe,)
    _granite_shared(t, hidden, shared, every, routed=experts > 0)
    t.norm("input_layernorm", hidden, layers=every)
    t.norm("post_attention_layernorm", hidden, layers=every)
    r = m.recurrent(ssm_dtype(f, dtype))
    mixers: dict[str, Mixer] = {"attention": a, "mamba": r}
    layers = tuple(Layer((mixers[kind],), ffns) for kind in types)
    return Parts(hidden, vocab, layers, tuple(t.families), tied, f.integer("max_position_embeddings", default=2048))


def _granite_shared(t: Table, hidden: int, width: int, layers: tuple[int, ...], *, routed: bool) -> None:
    """Gate and up in one matrix; the shared expert beside routed ones, the only MLP in the dense sizes."""
    inner = seg("shared_mlp" if routed else "mlp", width)
    role: Role = "shared_expert" if routed else "mlp"
    t.linear("shared_mlp.input_linear", (inner, inner), hidden, role=role, op="gate_up", layers=layers)
    t.linear("shared_mlp.output_linear", hidden, inner, role=role, op="down", layers=layers)

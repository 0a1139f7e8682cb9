"""Nemotron-H and Nemotron 3: Mamba-2, attention, MLP and (latent) mixture-of-experts layers, one block a layer."""

from __future__ import annotations

from meshwright.errors import InputError
from meshwright.specs.hf.blocks import expert_tensors, mlp3_tensors, of, qkvo_tensors, shared_tensors
from meshwright.specs.hf.fields import MAX_LAYERS, Fields
from meshwright.specs.hf.mamba import Mamba2, backbone_ends, mamba2_tensors, ssm_dtype
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Attention, Layer, Mlp, Moe, Recurrent

#: Letters of ``hybrid_override_pattern`` and the words of ``layers_block_type`` (transformers 4 and 5).
KINDS = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}


def _kinds(f: Fields, words: tuple[str, ...], letters: str) -> tuple[str, ...]:
    listed = f.texts(*words) or tuple(f.text(letters).replace("|", ""))
    if len(listed) > MAX_LAYERS:
        raise InputError(f"{f.where}: {words[0]} has {len(listed)} layers; at most {MAX_LAYERS} are read")
    for item in listed:
        if item not in KINDS:
            raise InputError(f"{f.where}: layer type {item[:30]!r} is unknown; known: {', '.join(sorted(KINDS))}")
    return tuple(KINDS[item] for item in listed)


def _attention(f: Fields, hidden: int) -> Attention:
    heads = f.integer("num_attention_heads")
    kv_heads = f.integer("num_key_value_heads", default=heads)
    head_dim = f.integer("head_dim", "attention_head_dim", default=max(1, hidden // heads))
    return Attention("gqa", heads, kv_heads, head_dim, head_dim, window=f.maybe("sliding_window"))


def _moe(f: Fields) -> Moe:
    shared = f.integer("n_shared_experts", default=1, low=0)
    width = f.integer("moe_shared_expert_intermediate_size", default=0, low=0) if shared else 0
    return Moe(
        f.integer("n_routed_experts", "num_local_experts", low=1, high=1 << 14),
        f.integer("num_experts_per_tok", default=2),
        f.integer("moe_intermediate_size", "intermediate_size"),
        width,
        gated=False,
        latent=f.maybe("moe_latent_size") or 0,
        groups=f.integer("n_group", default=1),
        topk_groups=f.integer("topk_group", default=1),
    )


def _moe_tensors(t: Table, hidden: int, moe: Moe, layers: tuple[int, ...], bias: bool) -> None:
    """Router over the full width; with ``latent`` the experts work between two shared projections."""
    width = moe.latent or hidden
    rows, name = seg("fixed", moe.experts), f"{t.prefix}mixer.gate.e_score_correction_bias"
    t.add(name, rows, role="router", part="bias", layers=layers, dtype="f32")
    t.linear("mixer.gate", rows, hidden, role="router", op="router", layers=layers, dtype="f32")
    if moe.latent:
        latent = seg("fixed", moe.latent)
        t.linear("mixer.fc1_latent_proj", latent, hidden, role="other", op="latent_in", layers=layers, bias=bias)
        t.linear("mixer.fc2_latent_proj", hidden, latent, role="other", op="latent_out", layers=layers, bias=bias)
    leaves = ("up_proj", "down_proj")
    expert_tensors(t, width, moe.intermediate, moe.experts, layers, name="mixer.experts", leaves=leaves)
    if moe.shared_intermediate:
        shared_tensors(
            t, hidden, moe.shared_intermediate, layers, name="mixer.shared_experts", leaves=leaves, bias=bias
        )


def _mtp(f: Fields, dtype: str, hidden: int, attention: Attention) -> tuple[tuple[Layer, ...], Table]:
    """The multi-token-prediction block: its pattern as sub-layers ``mtp.layers.N``.

    Names as vLLM's loader reads them (``nemotron_h_mtp.py``): the first sub-layer starts with two norms and a
    projection of the joined embedding and hidden state, the last ends with a norm.
    """
    t = Table(dtype, prefix="mtp.layers.{layer}.", section="mtp")
    kinds = _kinds(f, ("mtp_layers_block_type",), "mtp_hybrid_override_pattern") or ("attention", "moe")
    if any(kind not in ("attention", "moe") for kind in kinds):
        raise InputError(f"{f.where}: a multi-token-prediction layer is neither attention nor moe")
    f.assume("names and shapes of the multi-token-prediction layers follow vLLM's loader, not a transformers class")
    every = tuple(range(len(kinds)))
    t.norm("norm", hidden, layers=every)
    for leaf in ("enorm", "hnorm"):
        t.norm(leaf, hidden, layers=every[:1])
    t.linear("eh_proj", hidden, 2 * hidden, role="other", op="eh_proj", layers=every[:1])
    t.norm("final_layernorm", hidden, layers=every[-1:])
    qkvo_tensors(t, hidden, attention, of(kinds, "attention"), name="mixer")
    if "moe" in kinds:
        _moe_tensors(t, hidden, _moe(f), of(kinds, "moe"), f.flag("mlp_bias"))
    return tuple(_layer(kind, f, attention, None) for kind in kinds), t


def _layer(kind: str, f: Fields, attention: Attention, recurrent: Recurrent | None) -> Layer:
    if kind == "moe":
        return Layer((), (_moe(f),))
    if kind == "mlp":
        return Layer((), (Mlp(f.integer("intermediate_size"), gated=False),))
    return Layer((attention,) if kind == "attention" or recurrent is None else (recurrent,), ())


@architecture("NemotronHForCausalLM", "nemotron_h")
def nemotron_h(f: Fields, dtype: str) -> Parts:
    """Nemotron-H (8B, 47B, 56B) and Nemotron 3 (Nano, Super, Ultra): one mixer or feed-forward block a layer."""
    hidden, vocab = f.integer("hidden_size"), f.integer("vocab_size")
    kinds = _kinds(f, ("layers_block_type", "layer_types"), "hybrid_override_pattern")
    if not kinds:
        raise InputError(f"{f.where}: hybrid_override_pattern is missing; the kind of every layer is needed")
    stated = f.maybe("num_hidden_layers")
    if stated is not None and stated != len(kinds):
        raise InputError(f"{f.where}: num_hidden_layers is {stated}, but the pattern has {len(kinds)} layers")
    attention = _attention(f, hidden)
    m = Mamba2(
        f.integer("mamba_num_heads", default=128),
        f.integer("mamba_head_dim", default=64),
        f.integer("n_groups", "mamba_n_groups", default=8),
        f.integer("ssm_state_size", default=128),
        f.integer("conv_kernel", "mamba_d_conv", default=4),
        f.flag("use_conv_bias", "mamba_conv_bias", default=True),
        f.flag("use_bias"),
    )
    tied = f.flag("tie_word_embeddings")
    t = Table(dtype, prefix="backbone.layers.{layer}.")
    backbone_ends(t, hidden, vocab, tied)
    t.norm("norm", hidden, layers=tuple(range(len(kinds))))
    mamba2_tensors(t, "mixer", hidden, m, of(kinds, "mamba"))
    qkvo_tensors(t, hidden, attention, of(kinds, "attention"), name="mixer")
    if "mlp" in kinds:
        inner, mlp_bias = f.integer("intermediate_size"), f.flag("mlp_bias")
        leaves = ("up_proj", "down_proj")
        mlp3_tensors(t, hidden, inner, of(kinds, "mlp"), name="mixer", leaves=leaves, bias=mlp_bias)
    if "moe" in kinds:
        _moe_tensors(t, hidden, _moe(f), of(kinds, "moe"), f.flag("mlp_bias"))
    recurrent = m.recurrent(ssm_dtype(f, "f32"))
    mtp: tuple[Layer, ...] = ()
    if f.integer("num_nextn_predict_layers", default=0, low=0, high=64):
        mtp, mtp_table = _mtp(f, dtype, hidden, attention)
        t.families += mtp_table.families
    layers = tuple(_layer(kind, f, attention, recurrent) for kind in kinds)
    positions = f.integer("max_position_embeddings", default=4096)
    return Parts(hidden, vocab, layers, tuple(t.families), tied, positions, mtp_layers=mtp)

"""Building blocks of mixture-of-experts decoders: which layers route, the experts' tensors, the whole decoder.

The readers in ``moe_readers``, ``mla`` and their neighbours say by a few words where an architecture departs
from the usual form: separate q, k, v and o projections, two norms a layer, an expert a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.errors import InputError
from meshwright.specs.hf.dense import attention_tensors, ends, mlp_tensors
from meshwright.specs.hf.fields import MAX_EXPERTS, MAX_LAYERS, Fields
from meshwright.specs.hf.registry import Parts
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Attention, Ffn, Layer, Mlp, Moe

EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
TOPK_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k")


@dataclass(frozen=True, slots=True)
class MoeNames:
    """How a checkpoint names the mixture of experts, below the layer prefix.

    Attributes:
        experts: module of one expert, with ``{expert}``.
        mats: gate, up and down projection of an expert.
        router: module of the router.
        routing_bias: tensor added to the scores for the choice only; empty: none.
        shared: module of the shared experts (always gate_proj, up_proj, down_proj).
        shared_gate: module of one logit a token that scales the shared expert; empty: none.
    """

    experts: str = "mlp.experts.{expert}"
    mats: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "mlp.gate"
    routing_bias: str = ""
    shared: str = "mlp.shared_experts"
    shared_gate: str = ""


MIXTRAL = MoeNames("block_sparse_moe.experts.{expert}", ("w1", "w3", "w2"), "block_sparse_moe.gate")
DEEPSEEK = MoeNames(routing_bias="mlp.gate.e_score_correction_bias")


def routed(
    f: Fields,
    *,
    width: tuple[str, ...] = ("moe_intermediate_size",),
    shared: int = 0,
    grouped: bool = False,
    experts: int | None = None,
    topk: int | None = None,
) -> Moe:
    """The mixture of experts of the usual keys.

    Args:
        width: keys of one expert's width.
        shared: total width of the shared experts.
        grouped: whether routing is limited to groups (``n_group``, ``topk_group``).
        experts, topk: what the class assumes where the configuration is silent.

    Raises:
        InputError: a key is missing, or a token would visit more experts than there are.
    """
    count = f.integer(*EXPERT_KEYS, default=experts, high=MAX_EXPERTS)
    visits = f.integer(*TOPK_KEYS, default=topk, high=MAX_EXPERTS)
    if visits > count:
        raise InputError(f"{f.where}: {visits} experts a token of {count} experts; the first must not exceed the other")
    groups = f.integer("n_group", "num_expert_group", default=1, high=MAX_EXPERTS) if grouped else 1
    kept = f.integer("topk_group", default=groups, high=MAX_EXPERTS) if grouped else 1
    return Moe(count, visits, f.integer(*width), shared, groups=groups, topk_groups=kept)


def shared_width(f: Fields, each: int, *keys: str, default: int = 0) -> int:
    """Total width of the shared experts: how many (``n_shared_experts``) times the width of one."""
    count = f.integer(*(keys or ("n_shared_experts", "num_shared_experts")), default=default, low=0, high=MAX_EXPERTS)
    return count * each


def after_dense(f: Fields, n: int, *, default: int = 0) -> tuple[int, ...]:
    """Routing layers where the first ``first_k_dense_replace`` (or a list of layer types) are dense.

    ``mlp_layer_types`` (dense, sparse) and a list in ``moe_layer_freq`` win; a number in ``moe_layer_freq`` keeps
    every so many layers (DeepSeek's own modelling code).
    """
    if f.has("mlp_layer_types"):
        types = f.texts("mlp_layer_types", length=n)
        return tuple(i for i, word in enumerate(types) if word != "dense")
    if isinstance(f.get("moe_layer_freq")[1], list):
        marks = f.integers("moe_layer_freq", length=n, high=1)
        return tuple(i for i, mark in enumerate(marks) if mark)
    first = f.integer("first_k_dense_replace", default=default, low=0, high=MAX_LAYERS)
    every = f.integer("moe_layer_freq", default=1, high=MAX_LAYERS)
    return tuple(i for i in range(first, n) if i % every == 0)


def qwen_layers(f: Fields, n: int) -> tuple[int, ...]:
    """Routing layers of Qwen: every ``decoder_sparse_step``-th one, without those of ``mlp_only_layers``."""
    step = f.integer("decoder_sparse_step", default=1, high=MAX_LAYERS)
    dense = set(f.integers("mlp_only_layers", high=MAX_LAYERS))
    return tuple(i for i in range(n) if i not in dense and (i + 1) % step == 0)


def moe_tensors(
    t: Table,
    hidden: int,
    m: Moe,
    layers: Sequence[int],
    names: MoeNames,
    *,
    router_dtype: str | None = None,
    bias_dtype: str | None = "f32",
    shared_bias: bool = False,
) -> None:
    """Router, routed experts (an expert a tensor) and shared experts."""
    if not layers:
        return
    rows = seg("fixed", m.experts)
    t.linear(names.router, rows, hidden, role="router", op="router", layers=layers, dtype=router_dtype)
    if names.routing_bias:
        name = t.prefix + names.routing_bias
        t.add(name, rows, role="router", part="bias", layers=layers, dtype=bias_dtype)
    inner = seg("expert_mlp", m.intermediate)
    for mat, op in zip(names.mats[:2], ("gate", "up"), strict=True):
        full = f"{names.experts}.{mat}"
        t.linear(full, inner, hidden, role="expert", op=op, layers=layers, experts=m.experts)
    full = f"{names.experts}.{names.mats[2]}"
    t.linear(full, hidden, inner, role="expert", op="down", layers=layers, experts=m.experts)
    shared_tensors(t, hidden, m, layers, names, bias=shared_bias)


def shared_tensors(
    t: Table, hidden: int, m: Moe, layers: Sequence[int], names: MoeNames, *, bias: bool = False
) -> None:
    """Shared experts, one block as wide as all of them."""
    if not m.shared_intermediate or not layers:
        return
    wide = seg("shared_mlp", m.shared_intermediate)
    for op in ("gate", "up"):
        t.linear(f"{names.shared}.{op}_proj", wide, hidden, role="shared_expert", op=op, layers=layers, bias=bias)
    t.linear(f"{names.shared}.down_proj", hidden, wide, role="shared_expert", op="down", layers=layers, bias=bias)
    if names.shared_gate:
        one = seg("fixed", 1)
        t.linear(names.shared_gate, one, hidden, role="shared_expert", op="shared_gate", layers=layers)


def qk_norms(
    t: Table,
    a: Attention,
    layers: Sequence[int],
    *,
    whole: bool = False,
    names: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm"),
) -> None:
    """Norms of queries and keys, over one head or over the ``whole`` projection (OLMoE, MiniMax-M2)."""
    if whole:
        t.norm(names[0], seg("heads", a.heads, a.head_dim), layers=layers, role="attention")
        t.norm(names[1], seg("kv_heads", a.kv_heads, a.head_dim), layers=layers, role="attention")
        return
    for name in names:
        t.norm(name, seg("fixed", a.head_dim), layers=layers, role="attention")


def outside(layers: Sequence[int], n: int) -> tuple[int, ...]:
    """The layers of ``n`` that are not in ``layers``."""
    inside = set(layers)
    return tuple(i for i in range(n) if i not in inside)


def stack(mixers: Sequence[Attention], sparse: Sequence[int], moe: Moe, dense: int) -> tuple[Layer, ...]:
    """Layers with one mixer each and, by ``sparse``, the mixture or a dense block of width ``dense``."""
    inside = set(sparse)
    ffns: tuple[Ffn, Ffn] = (Mlp(dense) if dense else moe, moe)
    return tuple(Layer((a,), (ffns[i in inside],)) for i, a in enumerate(mixers))


def windows(f: Fields, n: int, a: Attention, *, full_every: str = "", default: int = 4) -> tuple[Attention, ...]:
    """The attention of each layer: the sliding window where ``layer_types`` says so.

    Without ``layer_types`` every layer has the window of ``sliding_window``, or none (Mixtral's reading); or,
    where ``full_every`` names a key, every so many layers (``default`` when it is absent) see all tokens.
    """
    size = f.maybe("sliding_window", low=0, high=1 << 30) or None
    if not f.has("layer_types"):
        every = f.integer(full_every, default=default, high=MAX_LAYERS) if full_every else 0
        return tuple(replace(a, window=None if every and (i + 1) % every == 0 else size) for i in range(n))
    types = f.texts("layer_types")
    if len(types) < n:
        raise InputError(f"{f.where}: layer_types has {len(types)} items for {n} layers")
    sliding = "sliding_attention"
    if size is None and sliding in types:
        raise InputError(f"{f.where}: layer_types has {sliding} layers, but sliding_window is missing")
    return tuple(replace(a, window=size if kind == sliding else None) for kind in types[:n])


def moe_decoder(
    f: Fields,
    dtype: str,
    mixers: Sequence[Attention],
    sparse: Sequence[int],
    moe: Moe,
    names: MoeNames,
    *,
    tied: bool = False,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: str = "",
    norms: Sequence[str] = ("input_layernorm", "post_attention_layernorm"),
    norm_bias: bool = False,
    router_dtype: str | None = None,
    bias_dtype: str | None = "f32",
    positions: int = 4096,
) -> tuple[Table, Parts]:
    """A decoder whose attention is alike in every layer (but for windows), with the mixture in ``sparse`` layers.

    Args:
        mixers: the attention of every layer.
        tied: what the class assumes where ``tie_word_embeddings`` is missing.
        mlp_bias: biases of dense and shared blocks.
        qk_norm: norms of queries and keys: none, ``head`` or ``whole``.
        norms: names of the norms of model width in every layer.
        positions: what the class assumes where ``max_position_embeddings`` is missing.

    Returns:
        The table, open for additions, and the parts as of now (``parts_of`` renews them).
    """
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), len(mixers)
    tied = f.flag("tie_word_embeddings", default=tied)
    every, rest = tuple(range(n)), outside(sparse, n)
    t = Table(dtype)
    ends(t, hidden, vocab, tied, norm_bias=norm_bias)
    attention_tensors(t, hidden, mixers[0], every, bias=qkv_bias, out_bias=out_bias)
    if qk_norm:
        qk_norms(t, mixers[0], every, whole=qk_norm == "whole")
    dense = f.integer("intermediate_size") if rest else 0
    if rest:
        mlp_tensors(t, hidden, dense, rest, bias=mlp_bias)
    kinds = {"router_dtype": router_dtype, "bias_dtype": bias_dtype}
    moe_tensors(t, hidden, moe, sparse, names, **kinds, shared_bias=mlp_bias)
    for name in norms:
        t.norm(name, hidden, layers=every, bias=norm_bias)
    layers = stack(mixers, sparse, moe, dense)
    longest = f.integer("max_position_embeddings", "model_max_length", default=positions, high=1 << 30)
    return t, Parts(hidden, vocab, layers, tuple(t.families), tied, longest)


def parts_of(t: Table, parts: Parts) -> Parts:
    """``parts`` with what has been added to the table since."""
    return replace(parts, families=tuple(t.families))

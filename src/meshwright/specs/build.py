"""ModelSpec from plain dimensions: ``decoder(hidden=4096, layers=32, heads=32, vocab=32000, ...)``.

For models that have no configuration file: Megatron arguments, sizes given in papers, tests. The tensor table
is complete, with the names that Hugging Face checkpoints of such models use (an expert a tensor).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.errors import InputError
from meshwright.specs.hf.fields import MAX_EXPERTS, MAX_LAYERS, MAX_SIZE
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Attention, Ffn, Layer, Mlp, ModelSpec, Moe, Recurrent


@dataclass(frozen=True, slots=True)
class Mamba:
    """Dimensions of a Mamba-2 mixer (Megatron's defaults, ``megatron/core/ssm/mamba_mixer.py``)."""

    heads: int
    head_dim: int = 64
    state_dim: int = 128
    groups: int = 8
    conv_kernel: int = 4

    @property
    def inner(self) -> int:
        """Width of the mixer: heads x head_dim."""
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class _Dims:
    hidden: int
    attention: Attention
    mlp: Mlp
    moe: Moe | None
    mamba: Mamba | None
    bias: bool
    qkv_bias: bool
    norm_bias: bool
    qk_norm: bool
    router_bias: bool


def _attention(t: Table, d: _Dims, at: Sequence[int]) -> None:
    a, h = d.attention, d.hidden
    qkv_bias = d.bias or d.qkv_bias
    if a.kind == "mla":
        nope = a.head_dim - a.rope_head_dim
        if a.q_lora_rank:
            t.linear("self_attn.q_a_proj", seg("fixed", a.q_lora_rank), h, role="attention", op="q_a", layers=at)
            t.norm("self_attn.q_a_layernorm", seg("fixed", a.q_lora_rank), layers=at, role="attention")
        source = seg("fixed", a.q_lora_rank) if a.q_lora_rank else h
        name = "q_b" if a.q_lora_rank else "q"
        q = seg("heads", a.heads, a.head_dim)
        t.linear(f"self_attn.{name}_proj", q, source, role="attention", op=name, layers=at)
        latent = seg("fixed", a.kv_lora_rank + a.rope_head_dim)
        t.linear("self_attn.kv_a_proj_with_mqa", latent, h, role="attention", op="kv_a", layers=at)
        t.norm("self_attn.kv_a_layernorm", seg("fixed", a.kv_lora_rank), layers=at, role="attention")
        kv = seg("heads", a.heads, nope + a.v_head_dim)
        t.linear("self_attn.kv_b_proj", kv, seg("fixed", a.kv_lora_rank), role="attention", op="kv_b", layers=at)
    else:
        for op, label, count in (("q", "heads", a.heads), ("k", "kv_heads", a.kv_heads), ("v", "kv_heads", a.kv_heads)):
            rows = seg(label, count, a.head_dim)  # type: ignore[arg-type]
            t.linear(f"self_attn.{op}_proj", rows, h, role="attention", op=op, layers=at, bias=qkv_bias)
        if d.qk_norm:
            t.norm("self_attn.q_norm", seg("fixed", a.head_dim), layers=at, bias=d.norm_bias, role="attention")
            t.norm("self_attn.k_norm", seg("fixed", a.head_dim), layers=at, bias=d.norm_bias, role="attention")
    out = seg("heads", a.heads, a.v_head_dim)
    t.linear("self_attn.o_proj", h, out, role="attention", op="o", layers=at, bias=d.bias)


def _mlp(t: Table, d: _Dims, at: Sequence[int]) -> None:
    inner = seg("mlp", d.mlp.intermediate)
    for op in ("gate", "up") if d.mlp.gated else ("up",):
        t.linear(f"mlp.{op}_proj", inner, d.hidden, role="mlp", op=op, layers=at, bias=d.bias)
    t.linear("mlp.down_proj", d.hidden, inner, role="mlp", op="down", layers=at, bias=d.bias)


def _moe(t: Table, d: _Dims, at: Sequence[int]) -> None:
    m = d.moe
    assert m is not None
    wide = m.latent or d.hidden
    t.linear("mlp.gate", seg("fixed", m.experts), d.hidden, role="router", op="router", layers=at)
    if d.router_bias:
        name = t.prefix + "mlp.gate.e_score_correction_bias"
        t.add(name, seg("fixed", m.experts), role="router", part="state", layers=at, dtype="f32")
    if m.latent:
        t.linear("mlp.latent_in_proj", seg("fixed", wide), d.hidden, role="shared_expert", op="in", layers=at)
        t.linear("mlp.latent_out_proj", d.hidden, seg("fixed", wide), role="shared_expert", op="out", layers=at)
    ops = ("gate", "up") if m.gated else ("up",)
    inner, n = seg("expert_mlp", m.intermediate), m.experts
    base = "mlp.experts.{expert}."
    for op in ops:
        t.linear(f"{base}{op}_proj", inner, wide, role="expert", op=op, layers=at, experts=n, bias=d.bias)
    t.linear(f"{base}down_proj", wide, inner, role="expert", op="down", layers=at, experts=n, bias=d.bias)
    if m.shared_intermediate:
        shared = seg("shared_mlp", m.shared_intermediate)
        for op in ops:
            t.linear(f"mlp.shared_experts.{op}_proj", shared, d.hidden, role="shared_expert", op=op, layers=at)
        t.linear("mlp.shared_experts.down_proj", d.hidden, shared, role="shared_expert", op="down", layers=at)


def _mamba(t: Table, d: _Dims, at: Sequence[int]) -> None:
    m = d.mamba
    assert m is not None
    x, bc = seg("ssm_heads", m.heads, m.head_dim), seg("ssm_groups", m.groups, m.state_dim)
    per_head = seg("ssm_heads", m.heads)
    t.linear("mixer.in_proj", (x, x, bc, bc, per_head), d.hidden, role="recurrent", op="in", layers=at)
    name = t.prefix + "mixer.conv1d"
    t.add(f"{name}.weight", (x, bc, bc), 1, seg("fixed", m.conv_kernel), role="recurrent", layers=at)
    t.add(f"{name}.bias", (x, bc, bc), role="recurrent", part="bias", layers=at)
    for scalar in ("A_log", "D", "dt_bias"):
        t.add(f"{t.prefix}mixer.{scalar}", per_head, role="recurrent", layers=at, dtype="f32")
    t.add(f"{t.prefix}mixer.norm.weight", x, role="recurrent", layers=at)
    t.linear("mixer.out_proj", d.hidden, x, role="recurrent", op="out", layers=at)


def _blocks(t: Table, d: _Dims, letters: Sequence[str]) -> None:
    """Tensors of the layers whose contents ``letters`` spells (``*-``: attention and MLP, ``M``: Mamba, ...)."""
    for letter, build in (("*", _attention), ("M", _mamba), ("-", _mlp), ("E", _moe)):
        at = tuple(i for i, word in enumerate(letters) if letter in word)
        if at:
            build(t, d, at)
    every = tuple(range(len(letters)))
    t.norm("input_layernorm", d.hidden, layers=every, bias=d.norm_bias)
    two = tuple(i for i, word in enumerate(letters) if len(word) > 1)
    if two:
        t.norm("post_attention_layernorm", d.hidden, layers=two, bias=d.norm_bias)


def _layer(word: str, d: _Dims) -> Layer:
    mixers: list[Attention | Recurrent] = []
    ffns: list[Ffn] = []
    for letter in word:
        if letter == "*":
            mixers.append(d.attention)
        elif letter == "M" and d.mamba is not None:
            m = d.mamba
            channels = m.inner + 2 * m.groups * m.state_dim
            mixers.append(
                Recurrent("mamba2", m.heads, m.head_dim, m.state_dim, m.groups, m.conv_kernel, conv_channels=channels)
            )
        elif letter == "-":
            ffns.append(d.mlp)
        elif letter == "E" and d.moe is not None:
            ffns.append(d.moe)
    return Layer(tuple(mixers), tuple(ffns))


def _mtp(dtype: str, d: _Dims, word: str, count: int) -> Table:
    t = Table(dtype, "model.mtp.{layer}.", section="mtp")
    _blocks(t, d, (word,) * count)
    every = tuple(range(count))
    t.linear("eh_proj", d.hidden, (seg("model", 2 * d.hidden)), role="other", op="in", layers=every)
    for name in ("enorm", "hnorm", "final_layernorm"):
        t.norm(name, d.hidden, layers=every, bias=d.norm_bias)
    return t


def _checked(**sizes: int) -> None:
    for name, value in sizes.items():
        high = MAX_LAYERS if name == "layers" else MAX_EXPERTS if name in {"experts", "topk"} else MAX_SIZE
        if not 0 <= value <= high:
            raise InputError(f"model: {name} is {value}; it must be 0 to {high}")


def decoder(
    *,
    hidden: int,
    layers: int,
    heads: int,
    vocab: int,
    name: str = "custom",
    kv_heads: int | None = None,
    head_dim: int | None = None,
    ffn: int | None = None,
    gated: bool = True,
    tied: bool = False,
    bias: bool = False,
    qkv_bias: bool = False,
    norm_bias: bool = False,
    qk_norm: bool = False,
    learned_positions: int = 0,
    max_positions: int = 0,
    causal: bool = True,
    window: int | None = None,
    experts: int = 0,
    topk: int = 2,
    moe_ffn: int | None = None,
    shared_ffn: int = 0,
    moe_latent: int = 0,
    moe_layers: Sequence[int] | None = None,
    router_bias: bool = False,
    q_lora_rank: int = 0,
    kv_lora_rank: int = 0,
    rope_head_dim: int = 0,
    v_head_dim: int | None = None,
    mtp: int = 0,
    mamba: Mamba | None = None,
    pattern: str = "",
    dtype: str = "bf16",
) -> ModelSpec:
    """A model of equal decoder layers (or of a hybrid ``pattern``) with its full tensor table.

    Args:
        hidden, layers, heads, vocab: model width, layers, query heads, embedding rows as stored (not padded).
        kv_heads: default ``heads``. head_dim: default hidden / heads; with MLA nope + rope.
        ffn: default 4 x hidden. gated: SwiGLU, three matrices.
        tied: the head reuses the embedding. bias: of every linear layer; qkv_bias: of q, k, v only.
        learned_positions: rows of a learned position table, 0 for none.
        experts: routed experts, 0 for a dense model; moe_ffn: width of one (default ``ffn``); shared_ffn: total
            width of the shared ones; moe_latent: width that tokens are projected to before the experts.
        moe_layers: which layers are mixtures (default all); the others have the dense MLP.
        kv_lora_rank: above 0 the attention is MLA, with q_lora_rank (0: a full query projection), rope_head_dim
            and v_head_dim.
        mtp: multi-token-prediction layers.
        pattern: one letter a layer: ``M`` Mamba-2 (``mamba``), ``*`` attention, ``-`` MLP, ``E`` mixture of
            experts, as Megatron's ``--hybrid-layer-pattern``; each layer then has a single block.

    Raises:
        InputError: a size is negative or beyond what any model has, or the pattern names a missing part.
    """
    ffn = 4 * hidden if ffn is None else ffn
    width = head_dim if head_dim is not None else max(1, hidden // max(1, heads))
    _checked(hidden=hidden, layers=layers, heads=heads, vocab=vocab, ffn=ffn, experts=experts, topk=topk, mtp=mtp)
    kind = "mla" if kv_lora_rank else "gqa"
    groups = heads if kv_heads is None else kv_heads
    values = width if v_head_dim is None else v_head_dim
    a = Attention(
        kind,  # type: ignore[arg-type]
        heads,
        1 if kv_lora_rank else groups,
        width,
        values,
        window=window,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=kv_lora_rank,
        rope_head_dim=rope_head_dim,
        causal=causal,
    )
    moe = Moe(experts, topk, moe_ffn or ffn, shared_ffn, gated, moe_latent) if experts else None
    d = _Dims(hidden, a, Mlp(ffn, gated), moe, mamba, bias, qkv_bias, norm_bias, qk_norm, router_bias)
    if pattern:
        words = list(pattern)
        if set(words) - set("M*-E") or len(words) != layers:
            raise InputError(f"model: pattern of {len(words)} letters for {layers} layers; letters are M, *, - and E")
        if ("M" in words and mamba is None) or ("E" in words and moe is None):
            raise InputError("model: the pattern has M or E layers, but mamba or experts is not given")
    else:
        mixed = set(range(layers)) if moe_layers is None else set(moe_layers)
        words = ["*E" if moe and i in mixed else "*-" for i in range(layers)]
    t = Table(dtype)
    t.add("model.embed_tokens.weight", seg("vocab", vocab), hidden, role="embedding")
    if learned_positions:
        t.add("model.embed_positions.weight", seg("fixed", learned_positions), hidden, role="embedding")
    _blocks(t, d, words)
    t.norm("model.norm", hidden, bias=norm_bias)
    if not tied:
        t.add("lm_head.weight", seg("vocab", vocab), hidden, role="head", op="head")
    families = list(t.families)
    last = next((w for w in reversed(words) if "E" in w), words[-1] if words else "*-")
    if mtp:
        families += _mtp(dtype, d, last, mtp).families
    return ModelSpec(
        name=name,
        architecture="custom",
        model_type="custom",
        hidden=hidden,
        vocab=vocab,
        layers=tuple(_layer(w, d) for w in words),
        families=tuple(families),
        tied=tied,
        dtype=dtype,
        max_positions=max_positions or learned_positions,
        mtp_layers=(_layer(last, d),) * mtp,
        learned_positions=learned_positions,
        source="dimensions",
    )

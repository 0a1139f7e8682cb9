"""Gemma 3, 3n and 4: sliding-window and full layers in turn, norms on both sides, shared caches, per-layer inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.specs.hf.blocks import layer_types, mlp3_tensors, of, qkvo_tensors, text_ends
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Attention, Ffn, Layer, Mlp, Moe

KINDS = {"sliding_attention": "sliding", "full_attention": "full"}
NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Defaults of a transformers class, for the keys that published configurations leave out."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    window: int
    every: int
    positions: int = 131072


GEMMA3 = Sizes(262208, 2304, 26, 8, 4, 9216, 4096, 6)
GEMMA3N = Sizes(262400, 2048, 35, 8, 2, 16384, 512, 5, 32768)
GEMMA4 = Sizes(262144, 2304, 30, 8, 4, 9216, 512, 6)


@dataclass(frozen=True, slots=True)
class Base:
    """What the three generations have in common."""

    hidden: int
    vocab: int
    types: tuple[str, ...]
    attention: Attention
    window: int
    tied: bool
    positions: int

    @property
    def every(self) -> tuple[int, ...]:
        """All layers."""
        return tuple(range(len(self.types)))


def _base(f: Fields, d: Sizes) -> Base:
    n = f.integer("num_hidden_layers", default=d.layers, high=2048)
    heads = f.integer("num_attention_heads", default=d.heads)
    kv, width = f.integer("num_key_value_heads", default=d.kv_heads), f.integer("head_dim", default=256)
    step = f.integer("sliding_window_pattern", default=d.every)
    types = layer_types(f, n, "layer_types", known=KINDS)
    types = types or tuple("sliding" if (i + 1) % step else "full" for i in range(n))
    return Base(
        f.integer("hidden_size", default=d.hidden),
        f.integer("vocab_size", default=d.vocab),
        types,
        Attention("gqa", heads, kv, width, width),
        f.integer("sliding_window", default=d.window),
        f.flag("tie_word_embeddings", default=True),
        f.integer("max_position_embeddings", default=d.positions),
    )


def _frame(b: Base, dtype: str) -> Table:
    """Ends and the four norms of every layer."""
    t = Table(dtype)
    text_ends(t, b.hidden, b.vocab, b.tied)
    for leaf in NORMS:
        t.norm(leaf, b.hidden, layers=b.every)
    return t


def _attention(t: Table, f: Fields, b: Base, a: Attention, own: tuple[int, ...], borrowed: tuple[int, ...]) -> None:
    """Layers of one kind: those with an ``own`` cache have keys and values, the others only queries and output."""
    bias, width = f.flag("attention_bias"), seg("fixed", a.head_dim)
    keys_are_values = a.v_head_dim == a.head_dim and f.flag("attention_k_eq_v") and a.window is None
    qkvo_tensors(t, b.hidden, a, own, bias=bias, out_bias=bias, value=not keys_are_values)
    q = seg("heads", a.heads, a.head_dim)
    if borrowed:
        t.linear("self_attn.q_proj", q, b.hidden, role="attention", op="q", layers=borrowed, bias=bias)
        t.linear("self_attn.o_proj", b.hidden, q, role="attention", op="o", layers=borrowed, bias=bias)
    if own or borrowed:
        t.norm("self_attn.q_norm", width, layers=tuple(sorted(own + borrowed)), role="attention")
    if own:
        t.norm("self_attn.k_norm", width, layers=own, role="attention")


def _sharing(f: Fields, types: tuple[str, ...]) -> tuple[int | None, ...]:
    """Whose cache each layer reads: the last ``num_kv_shared_layers`` use the last earlier layer of their kind."""
    n = len(types)
    first = n - min(n, f.integer("num_kv_shared_layers", default=0, low=0, high=2048))
    donors = {kind: max((i for i in range(first) if types[i] == kind), default=None) for kind in set(types)}
    return tuple(None if i < first else donors[kind] for i, kind in enumerate(types))


def _mixers(b: Base, kinds: dict[str, Attention], shares: tuple[int | None, ...]) -> tuple[Attention, ...]:
    return tuple(replace(kinds[kind], shares_kv_with=shares[i]) for i, kind in enumerate(b.types))


def _attentions(t: Table, f: Fields, b: Base, kinds: dict[str, Attention], shares: tuple[int | None, ...]) -> None:
    for kind, a in kinds.items():
        at = of(b.types, kind)
        own = tuple(i for i in at if shares[i] is None)
        _attention(t, f, b, a, own, tuple(i for i in at if shares[i] is not None))


@architecture("Gemma3ForCausalLM", "gemma3_text")
def gemma3(f: Fields, dtype: str) -> Parts:
    """Gemma 3 text: five layers of sliding attention, one of full attention, in turn."""
    b = _base(f, GEMMA3)
    inter = f.integer("intermediate_size", default=GEMMA3.intermediate)
    kinds = {"full": b.attention, "sliding": replace(b.attention, window=b.window)}
    none: tuple[int | None, ...] = (None,) * len(b.types)
    t = _frame(b, dtype)
    _attentions(t, f, b, kinds, none)
    mlp3_tensors(t, b.hidden, inter, b.every, name="mlp")
    layers = tuple(Layer((a,), (Mlp(inter),)) for a in _mixers(b, kinds, none))
    return Parts(b.hidden, b.vocab, layers, tuple(t.families), b.tied, b.positions)


def _per_layer_inputs(t: Table, f: Fields, b: Base) -> None:
    """A second embedding table, all layers side by side, and the two small matrices that feed it into a layer."""
    width = f.integer("hidden_size_per_layer_input", default=256, low=0)
    if not width:
        return
    rows, small = f.integer("vocab_size_per_layer_input", default=262144), seg("fixed", width)
    joined = seg("fixed", len(b.types) * width)
    t.add("model.embed_tokens_per_layer.weight", seg("vocab", rows), joined, role="embedding")
    t.linear("model.per_layer_model_projection", joined, b.hidden, role="other", op="per_layer")
    t.norm("model.per_layer_projection_norm", small)
    t.linear("per_layer_input_gate", small, b.hidden, role="other", op="per_layer_in", layers=b.every)
    t.linear("per_layer_projection", b.hidden, small, role="other", op="per_layer_out", layers=b.every)
    t.norm("post_per_layer_input_norm", b.hidden, layers=b.every)


def _altup(t: Table, f: Fields, b: Base) -> None:
    """Gemma 3n: four residual streams of which one is computed (AltUp), and a low-rank side path (Laurel)."""
    streams, rank = f.integer("altup_num_inputs", default=4, high=64), f.integer("laurel_rank", default=64)
    small, low, h = seg("fixed", streams), seg("fixed", rank), b.hidden
    if streams > 1:
        for leaf in ("altup_projections", "altup_unembed_projections"):
            for i in range(streams - 1):
                t.linear(f"model.{leaf}.{i}", h, h, role="other", op="altup")
    if f.flag("altup_correct_scale", default=True):
        t.add(f"{t.prefix}altup.correct_output_scale", h, role="other", layers=b.every)
    t.linear("altup.correction_coefs", small, small, role="other", op="altup", layers=b.every)
    t.linear("altup.prediction_coefs", seg("fixed", streams**2), small, role="other", op="altup", layers=b.every)
    t.linear("altup.modality_router", small, h, role="other", op="altup", layers=b.every)
    t.norm("altup.router_norm", h, layers=b.every)
    t.linear("laurel.linear_left", low, h, role="other", op="laurel_in", layers=b.every)
    t.linear("laurel.linear_right", h, low, role="other", op="laurel_out", layers=b.every)
    t.norm("laurel.post_laurel_norm", h, layers=b.every)


@architecture("Gemma3nForCausalLM", "gemma3n_text")
def gemma3n(f: Fields, dtype: str) -> Parts:
    """Gemma 3n text. The class makes keys and values for every layer; the last ones do not use theirs."""
    b = _base(f, GEMMA3N)
    n = len(b.types)
    listed = isinstance(f.get("intermediate_size")[1], list)
    inters = f.integers("intermediate_size", length=n, low=1) if listed else ()
    inters = inters or (f.integer("intermediate_size", default=GEMMA3N.intermediate),) * n
    kinds = {"full": b.attention, "sliding": replace(b.attention, window=b.window)}
    if not f.has("num_kv_shared_layers"):
        f = Fields({**f.raw, "num_kv_shared_layers": min(15, n)}, f.where, f.assumed)
    shares = _sharing(f, b.types)
    t = _frame(b, dtype)
    _attentions(t, f, b, kinds, shares)
    for width in sorted(set(inters)):
        mlp3_tensors(t, b.hidden, width, tuple(i for i in b.every if inters[i] == width), name="mlp")
    _per_layer_inputs(t, f, b)
    _altup(t, f, b)
    layers = tuple(Layer((a,), (Mlp(w),)) for a, w in zip(_mixers(b, kinds, shares), inters, strict=True))
    return Parts(b.hidden, b.vocab, layers, tuple(t.families), b.tied, b.positions)


def _experts(t: Table, f: Fields, b: Base) -> Moe:
    """Gemma 4: experts beside the dense MLP of the same layer, all experts of a layer in two tensors."""
    moe = Moe(
        f.integer("num_experts", high=1 << 14),
        f.integer("top_k_experts", default=8),
        f.integer("moe_intermediate_size"),
    )
    e, inner, at = seg("experts", moe.experts), seg("expert_mlp", moe.intermediate), b.every
    t.add(f"{t.prefix}experts.gate_up_proj", e, (inner, inner), b.hidden, role="expert", op="gate_up", layers=at)
    t.add(f"{t.prefix}experts.down_proj", e, b.hidden, inner, role="expert", op="down", layers=at)
    rows = seg("fixed", moe.experts)
    t.linear("router.proj", rows, b.hidden, role="router", op="router", layers=at)
    t.add(f"{t.prefix}router.scale", b.hidden, role="router", layers=at)
    t.add(f"{t.prefix}router.per_expert_scale", rows, role="router", layers=at)
    for leaf in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"):
        t.norm(leaf, b.hidden, layers=at)
    return moe


def _global(f: Fields, b: Base) -> Attention:
    """Attention of the full layers: ``global_head_dim`` and its kin, or (transformers 5) ``per_layer_config``."""
    wide, kv = f.integer("global_head_dim", default=512), f.maybe("num_global_key_value_heads")
    kv = kv if f.flag("attention_k_eq_v") else None
    overrides = f.sub("per_layer_config")
    for layer in of(b.types, "full"):
        if overrides.has(str(layer)):
            own = overrides.sub(str(layer))
            wide, kv = own.integer("head_dim", default=b.attention.head_dim), own.maybe("num_key_value_heads")
            break
    return replace(b.attention, kv_heads=kv or b.attention.kv_heads, head_dim=wide, v_head_dim=wide)


@architecture("Gemma4ForCausalLM", "gemma4_text", "Gemma4UnifiedForCausalLM", "gemma4_unified_text")
def gemma4(f: Fields, dtype: str) -> Parts:
    """Gemma 4 text: full layers have wider, fewer KV heads (and keys as values in the large sizes)."""
    b = _base(f, GEMMA4)
    b = replace(b, types=(*b.types[:-1], "full"))
    full = _global(f, b)
    kinds = {"full": full, "sliding": replace(b.attention, window=b.window)}
    shares = _sharing(f, b.types)
    inter = f.integer("intermediate_size", default=GEMMA4.intermediate)
    double = f.flag("use_double_wide_mlp")
    inters = tuple(2 * inter if double and share is not None else inter for share in shares)
    t = _frame(b, dtype)
    _attentions(t, f, b, kinds, shares)
    for width in sorted(set(inters)):
        mlp3_tensors(t, b.hidden, width, tuple(i for i in b.every if inters[i] == width), name="mlp")
    t.add(f"{t.prefix}layer_scalar", seg("fixed", 1), role="other", layers=b.every)
    _per_layer_inputs(t, f, b)
    extra: tuple[Ffn, ...] = (_experts(t, f, b),) if f.flag("enable_moe_block") else ()
    layers = tuple(Layer((a,), (Mlp(w), *extra)) for a, w in zip(_mixers(b, kinds, shares), inters, strict=True))
    return Parts(b.hidden, b.vocab, layers, tuple(t.families), b.tied, b.positions)

"""Dense decoders with rotary positions: Llama and those that differ in norms, biases, windows and MLP.

``decoder`` reads them all; a ``Style`` says what differs. ``dense_models`` holds the styles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from meshwright.errors import InputError
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Attention, Layer, Mlp

#: A bias that is always there or never, or the key that says so with its default.
Flag = bool | tuple[str, bool]
QkNorm = Literal["", "head", "full", "rows"]
Windows = Callable[[Fields, int], tuple[int | None, ...]]


def gqa(f: Fields, window: int | None = None, *, head_dim: int | None = None) -> Attention:
    """Attention of the usual keys: heads, KV heads (default: heads), head width (default: hidden / heads)."""
    heads = f.integer("num_attention_heads", "n_head", high=1 << 14)
    kv_heads = f.integer("num_key_value_heads", default=heads, high=1 << 14)
    if heads % kv_heads:
        raise InputError(f"{f.where}: {heads} attention heads are not a multiple of {kv_heads} KV heads")
    width = head_dim or max(1, f.integer("hidden_size", "n_embd") // heads)
    width = f.integer("head_dim", default=width)
    return Attention("gqa", heads, kv_heads, width, width, window=window)


def attention_tensors(
    t: Table, hidden: int, a: Attention, layers: tuple[int, ...], *, bias: bool = False, out_bias: bool = False
) -> None:
    """Separate q, k, v and o projections under ``self_attn``."""
    q, kv = seg("heads", a.heads, a.head_dim), seg("kv_heads", a.kv_heads, a.head_dim)
    t.linear("self_attn.q_proj", q, hidden, role="attention", op="q", layers=layers, bias=bias)
    t.linear("self_attn.k_proj", kv, hidden, role="attention", op="k", layers=layers, bias=bias)
    t.linear("self_attn.v_proj", kv, hidden, role="attention", op="v", layers=layers, bias=bias)
    t.linear("self_attn.o_proj", hidden, q, role="attention", op="o", layers=layers, bias=out_bias)


def mlp_tensors(
    t: Table, hidden: int, intermediate: int, layers: tuple[int, ...], *, bias: bool = False, name: str = "mlp"
) -> None:
    """Separate gate, up and down projections."""
    inner = seg("mlp", intermediate)
    t.linear(f"{name}.gate_proj", inner, hidden, role="mlp", op="gate", layers=layers, bias=bias)
    t.linear(f"{name}.up_proj", inner, hidden, role="mlp", op="up", layers=layers, bias=bias)
    t.linear(f"{name}.down_proj", hidden, inner, role="mlp", op="down", layers=layers, bias=bias)


def plain_mlp_tensors(
    t: Table, hidden: int, intermediate: int, layers: tuple[int, ...], *, up: str, down: str, bias: bool = False
) -> None:
    """An MLP of two matrices."""
    inner = seg("mlp", intermediate)
    t.linear(up, inner, hidden, role="mlp", op="up", layers=layers, bias=bias)
    t.linear(down, hidden, inner, role="mlp", op="down", layers=layers, bias=bias)


def qk_norm_tensors(
    t: Table,
    a: Attention,
    layers: tuple[int, ...],
    kind: QkNorm,
    *,
    names: tuple[str, str] = ("q_norm", "k_norm"),
    bias: bool = False,
) -> None:
    """Norms of queries and keys: over one head, over all heads together, or a row of weights a head."""
    for name, label, heads in ((names[0], "heads", a.heads), (names[1], "kv_heads", a.kv_heads)):
        full = f"self_attn.{name}"
        if kind == "head":
            t.norm(full, a.head_dim, layers=layers, bias=bias, role="attention")
        elif kind == "full":
            t.norm(full, seg(label, heads, a.head_dim), layers=layers, bias=bias, role="attention")  # type: ignore[arg-type]
        elif kind == "rows":
            weight = t.prefix + full + ".weight"
            t.add(weight, seg(label, heads), a.head_dim, role="attention", layers=layers)  # type: ignore[arg-type]


def ends(t: Table, hidden: int, vocab: int, tied: bool, *, norm_bias: bool = False) -> None:
    """Embedding, final norm and head of the usual names."""
    rows = seg("vocab", vocab)
    t.add("model.embed_tokens.weight", rows, hidden, role="embedding")
    t.norm("model.norm", hidden, bias=norm_bias)
    if not tied:
        t.add("lm_head.weight", rows, hidden, role="head", op="head")


def no_windows(f: Fields, n: int) -> tuple[int | None, ...]:
    """Every layer sees the whole sequence."""
    return (None,) * n


def same_window(default: int | None = None) -> Windows:
    """One ``sliding_window`` for all layers; ``default`` where the key is absent (null means none)."""

    def read(f: Fields, n: int) -> tuple[int | None, ...]:
        return (_window(f, default),) * n

    return read


def typed_windows(slides: Callable[[Fields, int], bool], default: int | None = None) -> Windows:
    """``layer_types`` says which layers slide; where it is absent, ``slides(fields, layer)`` does."""

    def read(f: Fields, n: int) -> tuple[int | None, ...]:
        window = _window(f, default)
        types = f.texts("layer_types", length=n) if f.has("layer_types") else ()
        if types:
            return tuple(window if kind == "sliding_attention" else None for kind in types)
        return tuple(window if slides(f, layer) else None for layer in range(n))

    return read


def flagged_windows(f: Fields, n: int) -> tuple[int | None, ...]:
    """Qwen2 and Qwen3: only with ``use_sliding_window``, and only from ``max_window_layers`` on."""
    if not f.flag("use_sliding_window"):
        return (None,) * n
    first = f.integer("max_window_layers", default=28, low=0)
    return typed_windows(lambda _, layer: layer >= first, default=4096)(f, n)


def _window(f: Fields, default: int | None) -> int | None:
    return f.maybe("sliding_window") if "sliding_window" in f.raw else default


@dataclass(frozen=True, slots=True)
class Style:
    """How a rotary decoder differs from Llama.

    Attributes:
        norms: norms of a layer, all of the model's width.
        norm_weight, norm_bias: norms carry weights, and biases.
        final_norm: name of the last norm.
        qk_norm: norms of queries and keys; see ``qk_norm_tensors``.
        qk_names: their names.
        qkv_bias, out_bias, mlp_bias: biases of the projections.
        head_bias: bias of the head.
        gated: three MLP matrices instead of two.
        up, down: names of the two matrices where not gated.
        out: name of the output projection.
        head_dim: default where the key is absent; None: hidden / heads.
        tied: default of ``tie_word_embeddings``.
        windows: sliding windows by layer.
        max_positions: default of ``max_position_embeddings``.
    """

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm_weight: bool = True
    norm_bias: bool = False
    final_norm: str = "model.norm"
    qk_norm: QkNorm = ""
    qk_names: tuple[str, str] = ("q_norm", "k_norm")
    qk_bias: bool = False
    qkv_bias: Flag = ("attention_bias", False)
    out_bias: Flag = ("attention_bias", False)
    mlp_bias: Flag = ("mlp_bias", False)
    head_bias: bool = False
    gated: bool = True
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    out: str = "self_attn.o_proj"
    head_dim: int | None = None
    tied: bool = False
    windows: Windows = no_windows
    max_positions: int = 2048


def flag(f: Fields, value: Flag) -> bool:
    """A flag of a style, read from the configuration where it names a key."""
    return value if isinstance(value, bool) else f.flag(value[0], default=value[1])


def decoder(f: Fields, dtype: str, style: Style) -> Parts:
    """Read a rotary decoder with separate projections."""
    t = Table(dtype)
    parts = skeleton(f, t, style)
    a, n, inter = gqa(f, head_dim=style.head_dim), f.layers(), f.integer("intermediate_size")
    every = tuple(range(n))
    q, kv = seg("heads", a.heads, a.head_dim), seg("kv_heads", a.kv_heads, a.head_dim)
    bias = flag(f, style.qkv_bias)
    t.linear("self_attn.q_proj", q, parts.hidden, role="attention", op="q", layers=every, bias=bias)
    t.linear("self_attn.k_proj", kv, parts.hidden, role="attention", op="k", layers=every, bias=bias)
    t.linear("self_attn.v_proj", kv, parts.hidden, role="attention", op="v", layers=every, bias=bias)
    out_bias = flag(f, style.out_bias)
    t.linear(style.out, parts.hidden, q, role="attention", op="o", layers=every, bias=out_bias)
    qk_norm_tensors(t, a, every, style.qk_norm, names=style.qk_names, bias=style.qk_bias)
    mlp_bias = flag(f, style.mlp_bias)
    if style.gated:
        mlp_tensors(t, parts.hidden, inter, every, bias=mlp_bias)
    else:
        plain_mlp_tensors(t, parts.hidden, inter, every, up=style.up, down=style.down, bias=mlp_bias)
    return finish(f, t, parts, style, a, Mlp(inter, style.gated))


def skeleton(f: Fields, t: Table, style: Style) -> Parts:
    """Embedding, norms and head of a decoder of this style; the layers are still empty."""
    hidden, vocab = f.integer("hidden_size"), f.integer("vocab_size")
    tied = f.flag("tie_word_embeddings", default=style.tied)
    every = tuple(range(f.layers()))
    rows = seg("vocab", vocab)
    t.add("model.embed_tokens.weight", rows, hidden, role="embedding")
    if style.norm_weight:
        t.norm(style.final_norm, hidden, bias=style.norm_bias)
        for name in style.norms:
            t.norm(name, hidden, layers=every, bias=style.norm_bias)
    if not tied:
        t.add("lm_head.weight", rows, hidden, role="head", op="head")
    if style.head_bias:
        t.add("lm_head.bias", rows, role="head", op="head", part="bias")
    positions = f.integer("max_position_embeddings", default=style.max_positions)
    return Parts(hidden, vocab, (), (), tied, positions)


def finish(f: Fields, t: Table, parts: Parts, style: Style, a: Attention, mlp: Mlp) -> Parts:
    """The parts with their layers, each with its window, and the families of ``t``."""
    by_window = {w: Layer((_windowed(a, w),), (mlp,)) for w in set(style.windows(f, f.layers()))}
    layers = tuple(by_window[w] for w in style.windows(f, f.layers()))
    return Parts(
        parts.hidden, parts.vocab, layers, tuple(t.families), parts.tied, parts.max_positions, parts.mtp_layers
    )


def _windowed(a: Attention, window: int | None) -> Attention:
    return Attention(a.kind, a.heads, a.kv_heads, a.head_dim, a.v_head_dim, window=window)


@architecture(
    "LlamaForCausalLM", "llama", "InternLM3ForCausalLM", "internlm3", "IQuestCoderForCausalLM", "iquestcoder",
    "YiForCausalLM", "AquilaForCausalLM", "TeleFLMForCausalLM", "XverseForCausalLM", "GraniteForCausalLM", "granite",
)  # fmt: skip
def llama(f: Fields, dtype: str) -> Parts:
    """Llama 1 to 3 and Granite: optional biases on all projections of the attention and of the MLP."""
    return decoder(f, dtype, Style())

"""Styles of dense rotary decoders; what each names and defaults is its configuration class in transformers 5."""

from __future__ import annotations

from dataclasses import replace

from meshwright.specs.hf.dense import (
    Style,
    attention_tensors,
    decoder,
    flagged_windows,
    gqa,
    mlp_tensors,
    same_window,
    typed_windows,
)
from meshwright.specs.hf.fields import MAX_LAYERS, Fields
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Layer, Mlp

_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_QWEN2 = Style(qkv_bias=True, out_bias=False, mlp_bias=False, windows=flagged_windows, max_positions=32768)
_MISTRAL = Style(qkv_bias=False, out_bias=False, mlp_bias=False, windows=same_window(4096), max_positions=131072)


def _pattern(default: int) -> Style:
    """Every ``sliding_window_pattern``-th layer (``default`` where absent) sees everything, the others slide."""

    def slides(f: Fields, layer: int) -> bool:
        return (layer + 1) % f.integer("sliding_window_pattern", default=default) != 0

    return Style(windows=typed_windows(slides, default=4096))


STYLES: dict[tuple[str, ...], Style] = {
    ("MistralForCausalLM", "mistral"): _MISTRAL,
    ("MinistralForCausalLM", "ministral"): replace(
        _MISTRAL, windows=typed_windows(lambda f, _: f.has("sliding_window"), default=4096)
    ),
    ("Ministral3ForCausalLM", "ministral3"): replace(
        _MISTRAL, head_dim=128, windows=same_window(), max_positions=262144
    ),
    ("Qwen2ForCausalLM", "qwen2"): _QWEN2,
    ("Qwen3ForCausalLM", "qwen3"): Style(
        qk_norm="head", mlp_bias=False, head_dim=128, windows=flagged_windows, max_positions=32768
    ),
    ("GemmaForCausalLM", "gemma"): Style(tied=True, head_dim=256, mlp_bias=False, max_positions=8192),
    ("Gemma2ForCausalLM", "gemma2"): Style(
        norms=_FOUR_NORMS,
        tied=True,
        head_dim=256,
        mlp_bias=False,
        windows=typed_windows(lambda _, layer: layer % 2 == 0, default=4096),
        max_positions=8192,
    ),
    ("VaultGemmaForCausalLM", "vaultgemma"): Style(
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        tied=True,
        head_dim=256,
        mlp_bias=False,
        windows=typed_windows(lambda _, layer: layer % 2 == 0, default=4096),
        max_positions=8192,
    ),
    ("Starcoder2ForCausalLM", "starcoder2"): Style(
        norm_bias=True,
        qkv_bias=("use_bias", True),
        out_bias=("use_bias", True),
        mlp_bias=("use_bias", True),
        gated=False,
        up="mlp.c_fc",
        down="mlp.c_proj",
        tied=True,
        windows=same_window(),
        max_positions=4096,
    ),
    ("OlmoForCausalLM", "olmo"): Style(norm_weight=False, mlp_bias=False),
    ("Olmo2ForCausalLM", "olmo2"): Style(norms=_POST_NORMS, qk_norm="full", mlp_bias=False),
    ("Olmo3ForCausalLM", "olmo3"): replace(_pattern(4), norms=_POST_NORMS, qk_norm="full", mlp_bias=False),
    ("Cohere2ForCausalLM", "cohere2"): replace(
        _pattern(4), norms=("input_layernorm",), tied=True, mlp_bias=False, max_positions=8192
    ),
    ("Exaone4ForCausalLM", "exaone4"): replace(
        _pattern(4), norms=_POST_NORMS, qk_norm="head", qkv_bias=False, out_bias=False, mlp_bias=False
    ),
    ("SmolLM3ForCausalLM", "smollm3"): Style(tied=True, windows=flagged_windows, max_positions=32768),
    ("NemotronForCausalLM", "nemotron"): Style(norm_bias=True, gated=False, max_positions=4096),
    ("SeedOssForCausalLM", "seed_oss"): Style(
        qkv_bias=("attention_bias", True), out_bias=("attention_out_bias", False), head_dim=128, max_positions=524288
    ),
    ("ArceeForCausalLM", "arcee"): Style(gated=False, max_positions=4096),
    ("Jais2ForCausalLM", "jais2"): Style(
        norm_bias=True,
        gated=False,
        qkv_bias=("attention_bias", True),
        out_bias=("attention_bias", True),
        mlp_bias=("mlp_bias", True),
        max_positions=8192,
    ),
    ("Ernie4_5ForCausalLM", "ernie4_5"): Style(
        qkv_bias=("use_bias", False),
        out_bias=("use_bias", False),
        mlp_bias=("use_bias", False),
        head_dim=128,
        tied=True,
        max_positions=131072,
    ),
    ("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"): Style(
        qk_norm="head", qk_names=("query_layernorm", "key_layernorm"), mlp_bias=False
    ),
    ("NanoChatForCausalLM", "nanochat"): Style(
        norm_weight=False, gated=False, up="mlp.fc1", down="mlp.fc2", mlp_bias=False
    ),
}


def _register(names: tuple[str, ...], style: Style) -> None:
    @architecture(*names)
    def read(f: Fields, dtype: str) -> Parts:
        return decoder(f, dtype, style)


for _names, _style in STYLES.items():
    _register(_names, _style)


@architecture("HyperCLOVAXForCausalLM", "hyperclovax")
def hyperclovax(f: Fields, dtype: str) -> Parts:
    """HyperCLOVA X: two more norms behind the blocks."""
    extra = ("post_norm1", "post_norm2") if f.flag("use_post_norm") else ()
    return decoder(f, dtype, Style(norms=(*Style().norms, *extra)))


@architecture("CohereForCausalLM", "cohere")
def cohere(f: Fields, dtype: str) -> Parts:
    """Command R: one norm a layer, optional norms with a row of weights a head."""
    qk = "rows" if f.flag("use_qk_norm") else ""
    style = Style(norms=("input_layernorm",), qk_norm=qk, tied=True, mlp_bias=False, max_positions=8192)  # type: ignore[arg-type]
    return decoder(f, dtype, style)


@architecture("PhiForCausalLM", "phi")
def phi(f: Fields, dtype: str) -> Parts:
    """Phi 1 and 2: biases everywhere, attention and MLP side by side behind one norm."""
    style = Style(
        norms=("input_layernorm",),
        norm_bias=True,
        final_norm="model.final_layernorm",
        qk_norm="head" if f.flag("qk_layernorm") else "",
        qk_names=("q_layernorm", "k_layernorm"),
        qk_bias=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        gated=False,
        up="mlp.fc1",
        down="mlp.fc2",
        out="self_attn.dense",
    )
    return decoder(f, dtype, style)


@architecture("StableLmForCausalLM", "stablelm", "StableLMEpochForCausalLM", "stablelm_epoch")
def stablelm(f: Fields, dtype: str) -> Parts:
    """StableLM: layer norms with biases; version 2 12B has a norm of its own for every head."""
    names = Style().norms[: 1 if f.flag("use_parallel_residual") else 2]
    style = Style(
        norms=names,
        norm_bias=True,
        qkv_bias=("use_qkv_bias", False),
        out_bias=False,
        mlp_bias=False,
        max_positions=4096,
    )
    parts = decoder(f, dtype, style)
    if not f.flag("qk_layernorm"):
        return parts
    t, every, a = Table(dtype), tuple(range(f.layers())), gqa(f)
    for name, heads in (("q_layernorm", a.heads), ("k_layernorm", a.kv_heads)):
        for head in range(heads):
            t.norm(f"self_attn.{name}.norms.{head}", a.head_dim, layers=every, role="attention")
    return replace(parts, families=(*parts.families, *t.families))


@architecture("ApertusForCausalLM", "apertus")
def apertus(f: Fields, dtype: str) -> Parts:
    """Apertus: xIELU with two learned scalars a layer (and two constants stored with them)."""
    style = Style(
        norms=("attention_layernorm", "feedforward_layernorm"),
        qk_norm="head",
        mlp_bias=False,
        gated=False,
        max_positions=65536,
    )
    parts = decoder(f, dtype, style)
    t, every = Table(dtype), tuple(range(f.layers()))
    for name, dims in (("alpha_n", (1,)), ("alpha_p", (1,)), ("beta", ()), ("eps", ())):
        t.add(f"{t.prefix}mlp.act_fn.{name}", *(seg("fixed", d) for d in dims), role="mlp", layers=every)
    return replace(parts, families=(*parts.families, *t.families))


@architecture("HeliumForCausalLM", "helium")
def helium(f: Fields, dtype: str) -> Parts:
    """Helium: the output projection is square whatever the heads are."""
    parts = decoder(f, dtype, Style(head_dim=128, out_bias=False, max_positions=4096))
    a = gqa(f, head_dim=128)
    if a.heads * a.head_dim == parts.hidden:
        return parts
    t = Table(dtype)
    every = tuple(range(f.layers()))
    into = seg("fixed", parts.hidden)
    t.linear("self_attn.o_proj", parts.hidden, into, role="attention", op="o", layers=every)
    kept = (x for x in parts.families if x.op != "o")
    return replace(parts, families=(*kept, *t.families))


@architecture("BitNetForCausalLM", "bitnet")
def bitnet(f: Fields, dtype: str) -> Parts:
    """BitNet b1.58: a norm before each of the two output projections."""
    parts = decoder(f, dtype, Style(mlp_bias=False))
    t, every = Table(dtype), tuple(range(f.layers()))
    t.norm("self_attn.attn_sub_norm", parts.hidden, layers=every, role="attention")
    t.norm("mlp.ffn_sub_norm", seg("mlp", f.integer("intermediate_size")), layers=every, role="mlp")
    return replace(parts, families=(*parts.families, *t.families))


@architecture("DiffLlamaForCausalLM", "diffllama")
def diffllama(f: Fields, dtype: str) -> Parts:
    """Differential transformer: four learned vectors a layer."""
    parts = decoder(f, dtype, Style(mlp_bias=False))
    t, every = Table(dtype), tuple(range(f.layers()))
    for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
        t.add(f"{t.prefix}self_attn.{name}", gqa(f).head_dim, role="attention", layers=every)
    return replace(parts, families=(*parts.families, *t.families))


@architecture("GraniteSWAForCausalLM", "granite_swa")
def granite_swa(f: Fields, dtype: str) -> Parts:
    """Granite with sliding layers: a sink logit a head."""
    windows = typed_windows(lambda _, layer: layer % 4 != 0, default=128)
    parts = decoder(f, dtype, Style(tied=True, windows=windows, max_positions=8192))
    t, every, a = Table(dtype), tuple(range(f.layers())), gqa(f)
    t.add(f"{t.prefix}self_attn.sinks", seg("heads", a.heads), role="attention", layers=every)
    layers = tuple(Layer((replace(at, sinks=True),), x.ffns) for x in parts.layers if (at := x.attention))
    return replace(parts, layers=layers, families=(*parts.families, *t.families))


@architecture("MiMoForCausalLM", "mimo")
def mimo(f: Fields, dtype: str) -> Parts:
    """MiMo-7B: Qwen2 with multi-token-prediction layers (names from the published ``modeling_mimo.py``)."""
    count = f.integer("num_nextn_predict_layers", default=0, low=0, high=MAX_LAYERS)
    parts = decoder(f, dtype, _QWEN2)
    if not count:
        return parts
    t = Table(dtype, prefix="model.mtp_layers.{layer}.", section="mtp")
    a, inter, every = gqa(f), f.integer("intermediate_size"), tuple(range(count))
    for name in (*_QWEN2.norms, "token_layernorm", "hidden_layernorm", "final_layernorm"):
        t.norm(name, parts.hidden, layers=every)
    t.linear("input_proj", parts.hidden, 2 * parts.hidden, role="other", op="in", layers=every)
    attention_tensors(t, parts.hidden, a, every, bias=True)
    mlp_tensors(t, parts.hidden, inter, every)
    layer = Layer((a,), (Mlp(inter),))
    return replace(parts, families=(*parts.families, *t.families), mtp_layers=(layer,) * count)

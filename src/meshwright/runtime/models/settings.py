"""What the decoder needs to know beyond the ModelSpec: epsilon, rotary positions, and what it can run at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.errors import IllegalLayoutError, InputError
from meshwright.runtime.models.moe_settings import MOE_FAMILIES, MoeSettings, read_moe
from meshwright.specs.hf.fields import Fields
from meshwright.specs.layout import Layout
from meshwright.specs.model import Attention, ModelSpec

#: ``model_type`` of the families whose forward is this decoder's. Others that share their tensor names (Granite)
#: multiply by factors of their own and are refused.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", *MOE_FAMILIES)
#: Names under which a family is published too: Kimi K2 is a DeepSeek-V3 (its ``architectures`` says so).
SAME = {"kimi_k2": "deepseek_v3"}
#: Activations that feed-forward blocks compute, by their names in configurations.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: ``theta`` and how frequencies are scaled; see ``models.rope``.

    Attributes:
        kind: ``default``, ``linear``, ``llama3`` or ``yarn``.
        theta: base of the frequencies.
        factor: by which the context was stretched.
        original: positions before that (llama3, yarn).
        low_freq_factor, high_freq_factor: bounds between which llama3 blends.
        beta_fast, beta_slow: rotations between which yarn blends. truncate: round its bounds to whole dimensions.
        attention_factor: by which yarn multiplies cosine and sine.
        interleaved: pairs of dimensions are neighbours (DeepSeek), instead of half a head apart.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """Numbers of the forward that no tensor holds.

    Attributes:
        eps: of the norms. rope: rotary positions. eos: ids that end a text.
        local_rope: rotary positions of layers with a sliding window, where they have their own (Gemma 3).
        activation: of the feed-forward blocks, ``silu`` or ``gelu_tanh``.
        norm_offset: is added to the weight of every norm (Gemma: 1).
        embedding_scale: multiplies the embedding (Gemma: square root of the width).
        softmax_scale: multiplies scores; None: 1 / sqrt(head width).
        moe: routing and experts of sparse layers; None for a family without.
        logit_cap: logits become ``cap tanh(logits / cap)``; None: they stay.
    """

    eps: float
    rope: Rope
    eos: tuple[int, ...] = ()
    local_rope: Rope | None = None
    activation: str = "silu"
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    softmax_scale: float | None = None
    logit_cap: float | None = None
    moe: MoeSettings | None = None

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The kinds of rotary positions, in the order of ``Step.turned``."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)


def read_settings(raw: Mapping[str, Any], where: str) -> Settings:
    """Read them from a parsed ``config.json``.

    Raises:
        InputError: a family, activation or kind of rotary positions that the decoder does not compute.
    """
    f = Fields(raw, where)
    family = f.text("model_type")
    family = SAME.get(family, family)
    if family not in FAMILIES:
        raise InputError(f"{where}: the runtime cannot run model_type {family[:40]!r}; it runs {', '.join(FAMILIES)}")
    gemma, deepseek = family == "gemma3_text", family.startswith("deepseek")
    act = f.text("hidden_activation", "hidden_act", default="gelu_pytorch_tanh" if gemma else "silu")
    if act not in ACTIVATIONS:
        raise InputError(f"{where}: hidden_act is {act[:40]!r}; the runtime computes {', '.join(ACTIVATIONS)}")
    settings = Settings(
        _number(f, "rms_norm_eps", 1e-5 if family == "gpt_oss" else 1e-6, high=1.0),
        _gpt_oss_rope(f) if family == "gpt_oss" else _rope(f),
        _eos(f),
        activation=ACTIVATIONS[act],
        moe=read_moe(f, family),
    )
    return _gemma(f, settings) if gemma else _deepseek(f, settings, family) if deepseek else settings


def _gpt_oss_rope(f: Fields) -> Rope:
    """Rotary positions of GPT-OSS; where the configuration is silent those of ``GptOssConfig`` (transformers 5.24)."""
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
    silent = not f.has("rope_parameters", "rope_scaling")
    return _rope(Fields({**f.raw, "rope_parameters": yarn}, f.where, f.assumed) if silent else f, 150000.0)


def _gemma(f: Fields, s: Settings) -> Settings:
    """Gemma 3: norms around one, scaled embedding, own scale of the scores, two bases of rotary positions.

    Raises:
        InputError: bidirectional attention, or capped scores.
    """
    if f.flag("use_bidirectional_attention") or f.has("attn_logit_softcapping"):
        raise InputError(f"{f.where}: bidirectional attention and capped scores are not computed by the runtime")
    cap = _number(f, "final_logit_softcapping", 0.0)
    return replace(
        s,
        local_rope=_gemma_rope(f, "sliding_attention", "rope_local_base_freq", 1e4),
        rope=_gemma_rope(f, "full_attention", "rope_theta", 1e6),
        norm_offset=1.0,
        embedding_scale=f.integer("hidden_size", default=2304) ** 0.5,
        softmax_scale=_number(f, "query_pre_attn_scalar", 256.0, low=1e-6) ** -0.5,
        logit_cap=cap or None,
    )


def _gemma_rope(f: Fields, kind: str, old: str, base: float) -> Rope:
    """Rotary positions of one kind of layer: under its name (transformers 5), or beside it as the older ones had it."""
    given = f.sub("rope_parameters")
    scaling = f.sub("rope_scaling").raw if kind == "full_attention" else {}
    own = given.sub(kind).raw if given.has("full_attention", "sliding_attention") else scaling
    return _rope(Fields({"rope_parameters": own}, f.where, f.assumed), _number(f, old, base, low=1.0))


def _deepseek(f: Fields, s: Settings, family: str) -> Settings:
    """DeepSeek: neighbouring dimensions turn together; yarn also scales the scores, by the square of its mscale."""
    r = f.sub("rope_parameters", "rope_scaling")
    weight, factor = _number(r, "mscale_all_dim", 0.0), _number(r, "factor", 1.0, low=1.0)
    width = f.integer("qk_nope_head_dim", low=0) + f.integer("qk_rope_head_dim")
    scaled = _mscale(factor, weight) if weight and s.rope.kind != "default" else 1.0
    interleaved = family == "deepseek_v2" or f.flag("rope_interleave", default=True)
    return replace(s, rope=replace(s.rope, interleaved=interleaved), softmax_scale=scaled**2 / width**0.5)


def _number(f: Fields, name: str, default: float, *, low: float = 0.0, high: float = 1e12) -> float:
    _, value = f.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InputError(f"{f.where}: {name} is {str(value)[:40]!r}; a number from {low:g} to {high:g} is needed")
    return float(value)


def _eos(f: Fields) -> tuple[int, ...]:
    _, value = f.get("eos_token_id")
    return (
        f.integers("eos_token_id")
        if isinstance(value, list)
        else tuple(v for v in (f.maybe("eos_token_id", low=0),) if v is not None)
    )


def _rope(f: Fields, base: float = 10000.0) -> Rope:
    """``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` (transformers 4).

    ``base``: theta where both are silent.
    """
    _, given = f.get("rope_parameters", "rope_scaling")
    r = f.sub("rope_parameters", "rope_scaling") if given is not None else Fields({}, f.where)
    kind = r.text("rope_type", "type", default="default")
    if kind not in ROPE_TYPES:
        raise InputError(f"{r.where}: rope_type is {kind[:40]!r}; the runtime computes {', '.join(ROPE_TYPES)}")
    for holder in (f, r):
        if _number(holder, "partial_rotary_factor", 1.0) != 1.0:
            raise InputError(f"{holder.where}: partial_rotary_factor is not 1; the runtime turns whole heads")
    theta = _number(r, "rope_theta", _number(f, "rope_theta", base, low=1.0), low=1.0)
    if kind == "default":
        return Rope(theta=theta)
    original = r.integer("original_max_position_embeddings", default=f.integer("max_position_embeddings", default=2048))
    factor = _number(r, "factor", 1.0, low=1.0)
    return Rope(
        kind,
        theta,
        factor,
        original,
        _number(r, "low_freq_factor", 1.0),
        _number(r, "high_freq_factor", 4.0),
        _number(r, "beta_fast", 32.0),
        _number(r, "beta_slow", 1.0),
        r.flag("truncate", default=True),
        _attention_factor(r, factor) if kind == "yarn" else 1.0,
    )


def _attention_factor(r: Fields, factor: float) -> float:
    """Yarn's scale of the attention, 0.1 ln(factor) + 1 (Peng et al., arXiv:2309.00071, section 3.4)."""
    if r.has("attention_factor"):
        return _number(r, "attention_factor", 1.0)
    over, under = _number(r, "mscale", 0.0), _number(r, "mscale_all_dim", 0.0)
    return _mscale(factor, over) / _mscale(factor, under) if over and under else _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def check_family(spec: ModelSpec) -> None:
    """Refuse a model whose checkpoint the runtime cannot read, by its family alone.

    Raises:
        InputError: another family, or a wrapper with parts beside the decoder.
    """
    if SAME.get(spec.model_type, spec.model_type) not in FAMILIES:
        raise InputError(f"{spec.name}: the runtime cannot run model_type {spec.model_type[:40]!r}")
    if any(True for _ in spec.select("vision")):
        raise InputError(f"{spec.name}: the runtime runs the decoder alone, this model has a vision encoder")


def check_runnable(spec: ModelSpec, layout: Layout) -> None:
    """Refuse what the runtime does not compute, before any process starts.

    Raises:
        InputError: quantized weights, or a layer that is not attention with one gated MLP or mixture of experts.
        IllegalLayoutError: an axis that the runtime does not execute yet.
    """
    if spec.quantization is not None:
        raise InputError(f"{spec.name}: {spec.quantization.method} weights; the runtime multiplies bf16, f16 and f32")
    for number, layer in enumerate(spec.layers):
        a, ffn = layer.attention, next(iter(layer.ffns), None)
        if a is None or not _computed(a) or ffn is None or not ffn.gated or len(layer.mixers + layer.ffns) != 2:
            raise InputError(
                f"{spec.name}: layer {number} is not attention with a gated MLP or experts, which the runtime runs"
            )
    _check_experts(spec, layout)
    unknown = [n for n in ("dcp", "virtual") if getattr(layout, n) > 1]
    unknown += ["zero"] if layout.zero else []
    if unknown:
        raise IllegalLayoutError(
            f"layout {layout}: the runtime does not execute {', '.join(unknown)} yet; use tp, sp, pp, dp, cp and ep"
        )


def check_trainable(spec: ModelSpec, layout: Layout) -> None:
    """Refuse what the runtime does not train.

    Raises:
        InputError, IllegalLayoutError: as ``check_runnable``; decode context parallelism has no place in training.
    """
    if layout.dcp > 1:
        raise IllegalLayoutError(f"layout {layout}: dcp cuts the cache of decoding, training has none; use cp")
    check_runnable(spec, layout.with_(zero=0, virtual=1))


def _check_experts(spec: ModelSpec, layout: Layout) -> None:
    """Experts lie inside one tp group, or around whole ones, whole or cut over all ranks of tp.

    Raises:
        IllegalLayoutError: ranks of tp would hold the same experts twice, or share an expert with some of the others.
        InputError: experts behind a projection of their own.
    """
    if spec.moe is None:
        return
    if any(layer.moe is not None and layer.moe.latent for layer in spec.layers):
        raise InputError(f"{spec.name}: experts behind a projection of their own are not computed by the runtime")
    ep, tp = layout.ep, layout.tp
    etp = layout.etp or (tp if ep == 1 or (layout.dp * layout.cp) % ep == 0 else 1)
    inside = ep * etp == tp
    if tp > 1 and not inside and ((ep * etp) % tp or etp not in {1, tp}):
        raise IllegalLayoutError(
            f"layout {layout}: ep {ep} x etp {etp} neither equals tp {tp} nor spans whole tp groups; choose ep = tp, "
            f"ep as a divisor of dp x cp = {layout.dp * layout.cp}, or ep as a multiple of tp"
        )


def _computed(a: Attention) -> bool:
    """Whether the runtime computes an attention."""
    return a.causal and not (a.gated or a.chunk or a.indexer or a.compress_ratio > 1 or a.shares_kv_with is not None)

"""What the decoder needs to know beyond the ModelSpec: epsilon, rotary positions, and what it can run at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import IllegalLayoutError, InputError
from meshwright.specs.hf.fields import Fields
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec

#: ``model_type`` of the families whose forward is this decoder's: pre-norm, rotary, SwiGLU. Others that share their
#: tensor names (Granite) multiply by factors of their own and are refused.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
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


@dataclass(frozen=True, slots=True)
class Settings:
    """Numbers of the forward that no tensor holds: ``eps`` of the norms, rotary positions, ids that end a text."""

    eps: float
    rope: Rope
    eos: tuple[int, ...] = ()


def read_settings(raw: Mapping[str, Any], where: str) -> Settings:
    """Read them from a parsed ``config.json``.

    Raises:
        InputError: a family, activation or kind of rotary positions that the decoder does not compute.
    """
    f = Fields(raw, where)
    family = f.text("model_type")
    if family not in FAMILIES:
        raise InputError(f"{where}: the runtime cannot run model_type {family[:40]!r}; it runs {', '.join(FAMILIES)}")
    act = f.text("hidden_act", default="silu")
    if act not in {"silu", "swish"}:
        raise InputError(f"{where}: hidden_act is {act[:40]!r}; the runtime computes silu")
    return Settings(_number(f, "rms_norm_eps", 1e-6, high=1.0), _rope(f), _eos(f))


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


def _rope(f: Fields) -> Rope:
    """``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` (transformers 4)."""
    _, given = f.get("rope_parameters", "rope_scaling")
    r = f.sub("rope_parameters", "rope_scaling") if given is not None else Fields({}, f.where)
    kind = r.text("rope_type", "type", default="default")
    if kind not in ROPE_TYPES:
        raise InputError(f"{r.where}: rope_type is {kind[:40]!r}; the runtime computes {', '.join(ROPE_TYPES)}")
    for holder in (f, r):
        if _number(holder, "partial_rotary_factor", 1.0) != 1.0:
            raise InputError(f"{holder.where}: partial_rotary_factor is not 1; the runtime turns whole heads")
    theta = _number(r, "rope_theta", _number(f, "rope_theta", 10000.0, low=1.0), low=1.0)
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

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if r.has("attention_factor"):
        return _number(r, "attention_factor", 1.0)
    over, under = _number(r, "mscale", 0.0), _number(r, "mscale_all_dim", 0.0)
    return scale(over) / scale(under) if over and under else scale(1.0)


def check_runnable(spec: ModelSpec, layout: Layout) -> None:
    """Refuse what the runtime does not compute, before any process starts.

    Raises:
        InputError: quantized weights, or a layer that is not plain attention with a dense gated MLP.
        IllegalLayoutError: an axis that the runtime does not execute yet.
    """
    if spec.quantization is not None:
        raise InputError(f"{spec.name}: {spec.quantization.method} weights; the runtime multiplies bf16, f16 and f32")
    for number, layer in enumerate(spec.layers):
        a, mlp = layer.attention, layer.mlp
        plain = a is not None and a.kind == "gqa" and a.causal and not (a.sinks or a.gated or a.chunk or a.indexer)
        if not plain or mlp is None or not mlp.gated or len(layer.mixers) != 1 or len(layer.ffns) != 1:
            raise InputError(
                f"{spec.name}: layer {number} is not attention with a dense gated MLP, which the runtime runs"
            )
    unknown = [n for n in ("cp", "dcp", "ep", "virtual") if getattr(layout, n) > 1]
    unknown += [n for n in ("sp", "zero") if getattr(layout, n)]
    if unknown:
        raise IllegalLayoutError(
            f"layout {layout}: the runtime does not execute {', '.join(unknown)} yet; use tp, pp and dp"
        )

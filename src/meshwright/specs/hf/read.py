"""From a file, a directory, an atlas name or a hub id to a ModelSpec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.errors import InputError
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.registry import names_of, read_parts
from meshwright.specs.hf.resolve import resolve
from meshwright.specs.model import ModelSpec

#: Keys under which multimodal wrappers keep the configuration of their language model.
TEXT_KEYS = ("text_config", "llm_config", "language_config")

_FLOATS = ("bf16", "f16", "f32", "f64")


def read_model(ref: str, *, allow_online: bool = True) -> ModelSpec:
    """Read the model that ``ref`` names.

    Args:
        ref: a file or directory, an atlas name or alias, or a hub id; looked up in this order, hub ids first in
            the local hub cache and then online.
        allow_online: whether the hub may be asked (``HF_HUB_OFFLINE=1`` forbids it too).

    Raises:
        InputError: nothing is found under the name, or the configuration is unreadable or contradictory.
    """
    found = resolve(ref, allow_online=allow_online)
    spec = model_from_config(found.config, found.name, found.where, found.hf_quant, source=found.source)
    return replace(spec, assumptions=(found.note, *spec.assumptions)) if found.note else spec


def model_from_config(
    raw: Mapping[str, Any],
    name: str,
    where: str,
    hf_quant: Mapping[str, Any] | None = None,
    *,
    source: str = "",
) -> ModelSpec:
    """Turn a parsed ``config.json`` into a ModelSpec.

    Args:
        raw: the configuration.
        name: what the user calls the model.
        where: begins every error message (file or name).
        hf_quant: the parsed ``hf_quant_config.json`` beside it (modelopt), or None.
        source: where the configuration came from; ``where`` when empty.

    Raises:
        InputError: a needed key is missing, or a value is of the wrong type, out of range or contradictory.
    """
    if not isinstance(raw, Mapping):
        raise InputError(f"{where}: the configuration is not a JSON object")
    try:
        return _spec(Fields(raw, where), name, hf_quant, source)
    except RecursionError:
        raise InputError(f"{where}: nested too deeply to be a configuration") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Readers check what they read; what they do not foresee is still a file that contradicts itself.
        kind = type(error).__name__
        raise InputError(f"{where}: the configuration contradicts itself ({kind}: {str(error)[:80]})") from error


def _spec(f: Fields, name: str, hf_quant: Mapping[str, Any] | None, source: str) -> ModelSpec:
    text = f.sub(*TEXT_KEYS)
    dtype = _compute_dtype(f, text)
    parts = read_parts(f, dtype)
    names = names_of(f)
    families, quantization = parts.families, None
    if hf_quant is not None or f.has("quantization_config") or text.has("quantization_config"):
        from meshwright.specs.hf.quant import quantize

        families, quantization = quantize(families, f, text, hf_quant, dtype)
    return ModelSpec(
        name=name,
        architecture=names[0] if names else "unknown",
        model_type=text.text("model_type") or f.text("model_type", default="unknown"),
        hidden=parts.hidden,
        vocab=parts.vocab,
        layers=parts.layers,
        families=families,
        tied=parts.tied,
        dtype=dtype,
        max_positions=max(parts.max_positions, stretched_positions(text), stretched_positions(f)),
        mtp_layers=parts.mtp_layers,
        quantization=quantization,
        learned_positions=parts.learned_positions,
        assumptions=tuple(f.assumed),
        source=source or f.where,
    )


def stretched_positions(text: Fields) -> int:
    """Positions that YaRN stretches to: the original ones times the factor (arXiv:2309.00071); 0 without it.

    Configurations that were stretched by hand often keep ``max_position_embeddings`` of the original model.
    """
    for name in ("rope_scaling", "rope_parameters"):
        rope = text.raw.get(name)
        if not isinstance(rope, Mapping) or "yarn" not in (rope.get("rope_type"), rope.get("type")):
            continue
        factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
        if isinstance(factor, int | float) and isinstance(original, int) and 1 <= factor <= 1024 and original > 0:
            return min(int(factor * original), 1 << 30)
    return 0


def _compute_dtype(f: Fields, text: Fields) -> str:
    holder = f if f.has("dtype", "torch_dtype") or not text.has("dtype", "torch_dtype") else text
    dtype = holder.dtype()
    if dtype not in _FLOATS:
        raise InputError(f"{f.where}: dtype is {dtype!r}; a compute dtype is one of {', '.join(_FLOATS)}")
    return dtype

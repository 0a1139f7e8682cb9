"""Quantized checkpoints: turn the families of the plain model into what the checkpoint stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.specs.hf.fields import Fields
from meshwright.specs.model import Quantization
from meshwright.specs.tensors import TensorFamily


def quantize(
    families: tuple[TensorFamily, ...], f: Fields, text: Fields, hf_quant: Mapping[str, Any] | None
) -> tuple[tuple[TensorFamily, ...], Quantization | None]:
    """Apply ``quantization_config`` (of the model or of its text part) or modelopt's ``hf_quant_config.json``."""
    config = (f if f.has("quantization_config") else text).sub("quantization_config")
    f.assume("the quantization is not read yet; sizes are those of the unquantized model")
    return families, Quantization(config.text("quant_method", default="modelopt"), 8)

"""The outside oracle: what ``save_pretrained`` of transformers writes, against the tensor table."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from meshwright.specs.hf.read import model_from_config
from meshwright.specs.model import ModelSpec
from meshwright.specs.tensors import expand

Shapes = dict[str, tuple[tuple[int, ...], str]]


def config_class(model_type: str | type) -> type:
    """The configuration class of a model type, or the class itself."""
    if isinstance(model_type, type):
        return model_type
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers does not know {model_type}")
    return CONFIG_MAPPING[model_type]


def save_small(
    model_type: str | type, *, auto: str = "AutoModelForCausalLM", dtype: str = "bfloat16", **config: Any
) -> tuple[dict[str, Any], Shapes]:
    """Build the class with ``config`` at random, save it, and return its config.json and its tensors.

    Args:
        model_type: ``model_type`` or configuration class.
        auto: the auto class that picks the model class.
        dtype: of the saved tensors.
        config: small sizes, under the names of the configuration class.
    """
    import torch
    import transformers

    built = config_class(model_type)(**config)
    with torch.device("cpu"):
        model = getattr(transformers, auto).from_config(built, dtype=getattr(torch, dtype))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size="4GB")
        raw = json.loads((Path(folder) / "config.json").read_text())
        found: Shapes = {}
        for file in Path(folder).glob("*.safetensors"):
            found |= read_header(file)
    return raw, found


def read_header(path: Path) -> Shapes:
    """Names, shapes and dtypes of a safetensors file."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    return {name: (tuple(row["shape"]), row["dtype"].lower()) for name, row in header.items() if name != "__metadata__"}


def assert_matches_transformers(
    model_type: str | type,
    *,
    auto: str = "AutoModelForCausalLM",
    extra: Mapping[str, Any] | None = None,
    ignore_dtype: bool = False,
    **config: Any,
) -> ModelSpec:
    """Every name, shape and dtype that ``save_pretrained`` writes equals the tensor table; returns the spec.

    Args:
        model_type: ``model_type`` or configuration class.
        auto: the auto class that picks the model class.
        extra: keys laid over the saved config.json before it is read (keys that the class drops).
        ignore_dtype: compare names and shapes only.
        config: small sizes, under the names of the configuration class.
    """
    raw, saved = save_small(model_type, auto=auto, **config)
    raw |= extra or {}
    spec = model_from_config(raw, str(raw.get("model_type")), "test")
    assert_same(expand(spec.families), saved, ignore_dtype=ignore_dtype)
    return spec


def assert_same(ours: Shapes, saved: Shapes, *, ignore_dtype: bool = False) -> None:
    """Compare two tensor tables and say what differs."""
    missing, invented = sorted(saved.keys() - ours.keys()), sorted(ours.keys() - saved.keys())
    assert (missing, invented) == ([], []), f"missing {missing[:20]}, invented {invented[:20]}"
    wrong = {
        name: (ours[name], saved[name])
        for name in saved
        if ours[name][0] != saved[name][0] or (not ignore_dtype and ours[name][1] != saved[name][1])
    }
    assert not wrong, f"(ours, saved): {dict(list(wrong.items())[:10])}"


def count_on_meta(model_type: str | type, *, auto: str = "AutoModelForCausalLM", **config: Any) -> int:
    """Parameters of the class at full size, built without memory on the meta device (tied ones once)."""
    import torch
    import transformers

    built = config_class(model_type)(**config)
    with torch.device("meta"):
        model = getattr(transformers, auto).from_config(built, dtype=torch.bfloat16)
    return sum(p.numel() for p in model.parameters())


def full_size(raw: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters of a class at full size, built without memory on the meta device.

    Tied parameters count once; buffers that are saved are not among them.
    """
    import torch
    import transformers

    built = config_class(raw["model_type"]).from_dict(dict(raw))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(built, dtype=torch.bfloat16)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}

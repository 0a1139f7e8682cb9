"""Load a rank's own slices of a checkpoint, as the placement says, and nothing else; write random ones for tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.errors import InputError
from meshwright.runtime.folder import SINGLE, Model
from meshwright.specs.hf.read import model_from_config
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import Coordinate, Placement, Shard
from meshwright.specs.tensors import TensorFamily

TORCH_DTYPES = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def load(
    model: Model, placement: Placement, coordinate: Coordinate, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """This rank's slices by checkpoint name, converted to ``dtype`` (see ``element_type``).

    Only the intervals of ``placement.shards(coordinate)`` are read from the (memory-mapped) files.

    Raises:
        InputError: a file is gone or no longer what ``read_folder`` saw.
    """
    files: dict[str, list[tuple[str, Shard]]] = {}
    for name, shard in own(placement, coordinate):
        files.setdefault(model.stored[name].file, []).append((name, shard))
    out: dict[str, Tensor] = {}
    for file, rows in files.items():
        path = model.folder / file
        try:
            with safe_open(str(path), framework="pt", device="cpu") as opened:
                for name, shard in rows:
                    piece = cut(opened.get_slice(name), shard)
                    # A slice is a view of the mapped file: the copy reads it, and holds no more than it needs.
                    kept = element_type(shard.family, model.spec, dtype)
                    out[name] = torch.empty(piece.shape, dtype=kept, device=device).copy_(piece)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: cannot be read any more ({str(error).splitlines()[0][:100]})") from None
    return out


def own(placement: Placement, coordinate: Coordinate) -> Iterator[tuple[str, Shard]]:
    """``(checkpoint name, shard)`` of every decoder tensor that a rank holds."""
    for shard in placement.shards(coordinate):
        if shard.family.section != "decoder":
            continue
        for layer in shard.layers or (None,):
            name = shard.family.template.replace("{layer}", str(layer))
            for expert in shard.experts or (None,):
                yield name.replace("{expert}", str(expert)), shard


def element_type(family: TensorFamily, spec: ModelSpec, dtype: torch.dtype) -> torch.dtype:
    """Type in which a rank holds a tensor: ``dtype``, but what a narrower model stores in fp32 stays so (the bias of
    a router)."""
    return torch.float32 if family.dtype == "f32" != spec.dtype and dtype != torch.float64 else dtype


def cut(stored: Any, shard: Shard) -> Tensor:
    """The intervals of one stored tensor that a shard is; several of one dimension are joined."""
    pieces = [stored[tuple(slice(a, b) for a, b in box)] for box in product(*shard.intervals)]
    if len(pieces) == 1:
        return pieces[0]  # type: ignore[no-any-return]
    split = [d for d, cuts in enumerate(shard.intervals) if len(cuts) > 1]
    assert len(split) == 1, "one axis cuts at most one dimension"
    return torch.cat(pieces, dim=split[0])


def write_random(config: Mapping[str, Any], folder: str | Path, seed: int = 0) -> ModelSpec:
    """Write a checkpoint of random weights for ``config``: config.json and one safetensors file.

    Scales keep activations near one whatever the sizes, so that a wrong slice shows in the logits.

    Raises:
        InputError: an unreadable configuration.
    """
    base = Path(folder)
    base.mkdir(parents=True, exist_ok=True)
    spec = model_from_config(config, base.name, str(base / "config.json"))
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for family in spec.select("decoder"):
        for name, _, _ in family.names():
            x = torch.randn(family.shape, generator=random)
            if family.part == "bias":
                x *= 0.1
            elif len(family.shape) == 1:
                x = 1 + 0.1 * x
            else:
                x /= family.shape[-1] ** 0.5
            tensors[name] = x.to(TORCH_DTYPES[family.dtype])
    (base / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    save_file(tensors, str(base / SINGLE), metadata={"format": "pt"})
    return spec

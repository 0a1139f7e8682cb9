"""Read a Hugging Face checkpoint: every rank its own slices, as the placement says, and nothing else.

A checkpoint is a stranger's file: names in an index never leave the folder, sizes are bounded, and whatever does not
agree with the configuration ends in one line that names the tensor, the file and both values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.errors import InputError
from meshwright.runtime.models.settings import Settings, read_settings
from meshwright.specs.hf.read import model_from_config
from meshwright.specs.hf.resolve import parse
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import Coordinate, Placement, Shard
from meshwright.specs.tensors import expand

TORCH_DTYPES = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: Endings of stored tensors that a decoder computes itself, and may be there without being read.
COMPUTED = ("rotary_emb.inv_freq",)
#: Stored by some exporters beside a tied embedding, of which it is a copy.
TIED_COPY = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint folder that was looked at: what it holds and in which file every tensor is."""

    folder: Path
    spec: ModelSpec
    settings: Settings
    files: Mapping[str, str]


def read_folder(folder: str | Path) -> Model:
    """Read the configuration and the list of tensors of a checkpoint, and hold one against the other.

    Raises:
        InputError: a file is missing, unreadable or hostile, or configuration and weights disagree.
    """
    base = Path(folder)
    config = base / "config.json"
    try:
        raw = parse(config.read_bytes(), str(config))
    except OSError as error:
        raise InputError(
            f"{config}: cannot be read ({error.strerror}); a model folder with weights is needed"
        ) from None
    spec = model_from_config(raw, base.name, str(config))
    files = _files(base)
    _agree(spec, files, base)
    return Model(base, spec, read_settings(raw, str(config)), files)


def _files(base: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index or from the header of the only file."""
    index = base / INDEX
    if index.is_file():
        raw = parse(index.read_bytes(), str(index)).get("weight_map")
        if not isinstance(raw, dict) or not raw:
            raise InputError(f"{index}: no weight_map; it must name the file of every tensor")
        for name, file in raw.items():
            if (
                not isinstance(file, str)
                or Path(file).name != file
                or "\\" in file
                or not file.endswith(".safetensors")
            ):
                raise InputError(
                    f"{index}: {name[:60]} lies in {str(file)[:60]!r}; a .safetensors file beside the index is needed"
                )
        return raw
    if not (base / SINGLE).is_file():
        raise InputError(f"{base}: neither {SINGLE} nor {INDEX}; safetensors weights are needed")
    with _opened(base / SINGLE) as file:
        return dict.fromkeys(file.keys(), SINGLE)


def _agree(spec: ModelSpec, files: Mapping[str, str], base: Path) -> None:
    """Every tensor that the configuration asks for is there, and no other."""
    asked = expand(tuple(spec.select("decoder")))
    missing = [name for name in asked if name not in files]
    if missing:
        raise InputError(f"{base}: {missing[0]}{_more(missing)} is missing; config.json and weights disagree")
    known = expand(spec.families).keys() | ({TIED_COPY} if spec.tied else set())
    extra = [name for name in files if name not in known and not name.endswith(COMPUTED)]
    if extra:
        raise InputError(
            f"{base}: {extra[0][:80]}{_more(extra)} is in the weights, but not in what config.json describes"
        )


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


class _opened:
    """``safe_open`` whose errors are one line for the user."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: Any = None

    def __enter__(self) -> Any:
        try:
            self.file = safe_open(str(self.path), framework="pt", device="cpu")
            self.file.__enter__()
        except FileNotFoundError:
            raise InputError(f"{self.path}: no such file") from None
        except (SafetensorError, OSError) as error:
            said = str(error).removeprefix("Error while deserializing header: ").splitlines()[0][:120]
            raise InputError(f"{self.path}: truncated or no safetensors file ({said})") from None
        return self.file

    def __exit__(self, *error: object) -> None:
        self.file.__exit__(None, None, None)


def load(
    model: Model, placement: Placement, coordinate: Coordinate, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """This rank's slices by checkpoint name, converted to ``dtype``.

    Only the intervals of ``placement.shards(coordinate)`` are read from the (memory-mapped) files.

    Raises:
        InputError: a tensor is missing from its file, or has another shape or element type than config.json says.
    """
    wanted: dict[str, list[tuple[str, Shard]]] = {}
    for name, shard in own(placement, coordinate):
        wanted.setdefault(model.files[name], []).append((name, shard))
    out: dict[str, Tensor] = {}
    for file, rows in wanted.items():
        path = model.folder / file
        with _opened(path) as opened:
            there = set(opened.keys())
            for name, shard in rows:
                if name not in there:
                    raise InputError(f"{path}: {name} is missing from the file that the index names")
                out[name] = _slice(opened.get_slice(name), name, shard, path).to(device=device, dtype=dtype)
    return out


def own(placement: Placement, coordinate: Coordinate) -> Iterator[tuple[str, Shard]]:
    """``(checkpoint name, shard)`` of every decoder tensor that a rank holds."""
    for shard in placement.shards(coordinate):
        if shard.family.section != "decoder":
            continue
        for layer in shard.layers or (None,):
            yield shard.family.template.replace("{layer}", str(layer)), shard


def _slice(stored: Any, name: str, shard: Shard, path: Path) -> Tensor:
    """The intervals of one tensor; several of one dimension are joined."""
    shape, dtype = tuple(stored.get_shape()), str(stored.get_dtype()).lower()
    if shape != shard.family.shape:
        raise InputError(f"{path}: {name} is {shape}, config.json makes it {shard.family.shape}")
    if dtype != shard.family.dtype:
        raise InputError(
            f"{path}: {name} is stored as {dtype}, config.json says {shard.family.dtype}; correct its dtype"
        )
    try:
        pieces = [stored[tuple(slice(a, b) for a, b in cut)] for cut in product(*shard.intervals)]
    except SafetensorError as error:
        raise InputError(f"{path}: {name} cannot be read ({str(error)[:120]})") from None
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

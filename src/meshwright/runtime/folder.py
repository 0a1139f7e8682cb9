"""A checkpoint folder before anything is loaded: configuration and headers, held one against the other. No torch.

A checkpoint is a stranger's: names in an index never leave the folder, sizes are bounded, and whatever does not agree
with the configuration ends in one line that names the tensor, the file and both values, before any rank is started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.runtime.models.settings import Settings, read_settings
from meshwright.specs.dtypes import DTYPE_BYTES
from meshwright.specs.hf.read import model_from_config
from meshwright.specs.hf.resolve import MAX_FILE_BYTES, parse
from meshwright.specs.model import ModelSpec
from meshwright.specs.tensors import expand

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: Endings of stored tensors that a decoder computes itself, and may be there without being read.
COMPUTED = ("rotary_emb.inv_freq",)
#: Stored by some exporters beside a tied embedding, of which it is a copy.
TIED_COPY = "lm_head.weight"
MAX_FILES = 4096


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor as a file holds it."""

    file: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint folder that was looked at.

    Attributes:
        folder: where it lies. spec: the model. settings: numbers that no tensor holds.
        stored: by checkpoint name.
    """

    folder: Path
    spec: ModelSpec
    settings: Settings
    stored: Mapping[str, Stored]


def read_folder(folder: str | Path) -> Model:
    """Read configuration and headers of a checkpoint.

    Raises:
        InputError: a file is missing, truncated, mislabelled or hostile, or configuration and weights disagree.
    """
    base = Path(folder)
    config = base / "config.json"
    raw = parse(_bytes(config, "a folder with config.json and safetensors weights is needed"), str(config))
    spec = model_from_config(raw, base.resolve().name, str(config))
    settings = read_settings(raw, str(config))
    stored = _stored(base)
    _agree(spec, stored, base)
    return Model(base, spec, settings, stored)


def _bytes(path: Path, needed: str) -> bytes:
    _regular(path)
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); {needed}") from None


def _regular(path: Path) -> None:
    """Refuse a named pipe, which would be waited for, or a device, which has no end."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: not a regular file; a file of the checkpoint is needed")


def _stored(base: Path) -> dict[str, Stored]:
    """Every tensor of the folder, from the headers of the files that the index names, or of the only file."""
    index = base / INDEX
    if not index.is_file():
        if not (base / SINGLE).is_file():
            raise InputError(f"{base}: neither {SINGLE} nor {INDEX}; safetensors weights are needed")
        return dict(read_header(base / SINGLE))
    named = _weight_map(index)
    headers = {file: dict(read_header(base / file)) for file in dict.fromkeys(named.values())}
    for name, file in named.items():
        if name not in headers[file]:
            raise InputError(f"{base / file}: {name[:80]} is missing, although {INDEX} says it is there")
    return {name: headers[file][name] for name, file in named.items()}


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name; each a plain name of a file beside the index."""
    raw = parse(_bytes(index, "the file of every tensor is needed"), str(index)).get("weight_map")
    if not isinstance(raw, dict) or not raw:
        raise InputError(f"{index}: no weight_map; it must name the file of every tensor")
    for name, file in raw.items():
        plain = isinstance(file, str) and file.endswith(".safetensors") and not set(file) & set("/\\\0")
        if not plain or file != Path(file).name:
            raise InputError(
                f"{index}: {name[:60]} lies in {str(file)[:60]!r}; a .safetensors file beside the index is needed"
            )
    if len(set(raw.values())) > MAX_FILES:
        raise InputError(f"{index}: {len(set(raw.values()))} files; at most {MAX_FILES} are read")
    return raw


def read_header(path: Path) -> Iterator[tuple[str, Stored]]:
    """Tensors of one safetensors file, after a look at its length (format: 8 bytes of header length, JSON, data).

    Raises:
        InputError: no safetensors file, a header that contradicts itself, or fewer bytes than it promises.
    """
    _regular(path)
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            whole = path.stat().st_size
            if not 2 <= length <= whole - 8:
                raise InputError(f"{path}: {whole} bytes with a header of {length}; truncated or no safetensors file")
            raw = parse(file.read(min(length, MAX_FILE_BYTES + 1)), f"{path}: header")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    end = 0
    for name, row in raw.items():
        if name == "__metadata__":
            continue
        stored, stop = _row(path, name, row)
        end = max(end, stop)
        yield name, stored
    if end != whole - 8 - length:
        raise InputError(
            f"{path}: {whole - 8 - length} bytes of data, the header promises {end}; truncated or mixed up"
        )


def _row(path: Path, name: str, row: Any) -> tuple[Stored, int]:
    """One entry of a header and where its bytes end."""
    try:
        shape, dtype, (start, stop) = tuple(row["shape"]), str(row["dtype"]).lower(), row["data_offsets"]
        right = stop - start == prod(shape) * DTYPE_BYTES[dtype] and start >= 0 and all(n >= 0 for n in shape)
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{path}: the header's entry of {name[:80]} is malformed") from None
    if not right or not all(isinstance(n, int) for n in (*shape, start, stop)):
        raise InputError(f"{path}: {name[:80]} of {dtype} {_text(shape)} lies in {stop - start} bytes; mislabelled")
    return Stored(path.name, shape, dtype), stop


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "one value"


def _agree(spec: ModelSpec, stored: Mapping[str, Stored], base: Path) -> None:
    """Every tensor that the configuration asks for is there, as it says, and no other."""
    asked = expand(tuple(spec.select("decoder")))
    missing = [name for name in asked if name not in stored]
    if missing:
        raise InputError(f"{base}: {missing[0]}{_more(missing)} is missing; config.json and weights disagree")
    known = expand(spec.families).keys() | ({TIED_COPY} if spec.tied else set())
    extra = [name for name in stored if name not in known and not name.endswith(COMPUTED)]
    if extra:
        raise InputError(f"{base}: {extra[0][:80]}{_more(extra)} is in the weights, not in what config.json describes")
    for name, (shape, dtype) in asked.items():
        there = stored[name]
        where = f"{base / there.file}: {name}"
        if there.shape != shape:
            raise InputError(f"{where} is {_text(there.shape)}, config.json makes it {_text(shape)}")
        if there.dtype != dtype:
            raise InputError(f"{where} is stored as {there.dtype}, config.json says {dtype}; correct its dtype")


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""

"""A checkpoint of any layout as a Hugging Face folder: the same bytes, whatever the layout was."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from meshwright.errors import InputError
from meshwright.runtime.checkpoint import TORCH_DTYPES
from meshwright.runtime.folder import INDEX, SINGLE
from meshwright.runtime.train.checkpoint import fill
from meshwright.runtime.train.pieces import key_of, whole_piece
from meshwright.runtime.train.source import KEPT, Resumed, read_resumed, source_of
from meshwright.specs.dtypes import DTYPE_BYTES
from meshwright.specs.model import ModelSpec

#: Bytes of one file of weights, as transformers' ``save_pretrained`` cuts them.
FILE_BYTES = 5 * 10**9


def export(checkpoint: Path, folder: Path, dtype: str | None = None) -> Path:
    """Write the weights of a checkpoint, with configuration and tokenizer, so that transformers loads them.

    Args:
        checkpoint: of a step, or folder of a run (its latest).
        folder: made whole or not at all; must not exist, or be empty.
        dtype: of the stored weights; None: what the configuration says.

    Raises:
        InputError: a damaged checkpoint, or a folder that is in the way.
    """
    resumed = read_resumed(checkpoint)
    source = source_of(resumed)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: is there already and not empty; name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        _write_weights(resumed, source.model.spec, made, dtype)
        _write_rest(resumed, made, dtype)
        made.chmod(0o755)
        os.replace(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _plan(spec: ModelSpec, dtype: str | None) -> list[list[tuple[str, tuple[int, ...], str]]]:
    """Files, each a list of (name, shape, element type), in the order of the tensor table."""
    files: list[list[tuple[str, tuple[int, ...], str]]] = [[]]
    room = FILE_BYTES
    for family in spec.select("decoder"):
        kept = dtype if dtype is not None and family.dtype == spec.dtype else family.dtype
        size = family.numel * DTYPE_BYTES[kept]
        for name, _, _ in family.names():
            if size > room and files[-1]:
                files.append([])
                room = FILE_BYTES
            files[-1].append((name, family.shape, kept))
            room -= size
    return files


def _write_weights(resumed: Resumed, spec: ModelSpec, folder: Path, dtype: str | None) -> None:
    """The files of weights, one in memory at a time, and their index."""
    files = _plan(spec, dtype)
    names = [SINGLE] if len(files) == 1 else [_file_name(n, len(files)) for n in range(len(files))]
    index: dict[str, str] = {}
    total = 0
    for name, rows in zip(names, files, strict=True):
        tensors = dict(_tensors(resumed, rows))
        save_file(tensors, str(folder / name), metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    if len(files) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _file_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _tensors(resumed: Resumed, rows: list[tuple[str, tuple[int, ...], str]]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors of one file, read together."""
    tensors = {name: torch.empty(shape, dtype=TORCH_DTYPES[dtype]) for name, shape, dtype in rows}
    fill(resumed.folder, [whole_piece(key_of("weight", name), tensor) for name, tensor in tensors.items()])
    yield from tensors.items()


def _write_rest(resumed: Resumed, folder: Path, dtype: str | None) -> None:
    """Configuration and tokenizer."""
    config = dict(resumed.facts["config"])
    if dtype is not None:
        config |= {"torch_dtype": str(TORCH_DTYPES[dtype]).removeprefix("torch.")}
        config.pop("dtype", None)
    kept = resumed.base / "model"
    for name in KEPT:
        if name != "config.json" and (kept / name).is_file():
            shutil.copyfile(kept / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

"""The folders of a run's checkpoints: written apart, published by a rename, named by a pointer. No torch.

::

    out/
      latest                  one line: step-00000100
      step-00000100/          index.json, state.json, rank-00000.bin, ...
      .saving-step-00000110/  being written, or left by a run that was killed: never read

Everything in a folder is on the disk before its rename, and the folder before the pointer names it. So a kill at any
byte leaves the pointer at a checkpoint that is whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.specs.hf.resolve import parse

LATEST = "latest"
STATE = "state.json"
INDEX = "index.json"
_STEP = re.compile(r"step-(\d{8})")
_SAVING = ".saving-"
_DROPPED = ".dropped-"
#: Most bytes of a JSON file of a checkpoint that are read.
MAX_JSON_BYTES = 1 << 30


def folder_name(step: int) -> str:
    """Folder of the checkpoint behind ``step`` steps."""
    return f"step-{step:08d}"


def saving(base: Path, step: int) -> Path:
    """Where the checkpoint of a step is written before it is published."""
    return base / (_SAVING + folder_name(step))


def sync(path: Path) -> None:
    """Have a file's content, or a folder's list of names, on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that it is either the old one or the new one, whatever happens."""
    new = path.with_name(path.name + ".new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    sync(path.parent)


def publish(base: Path, step: int, keep: int) -> Path:
    """Make the checkpoint that lies in ``saving(base, step)`` the latest one, and drop all but the last ``keep``.

    A run that went back may make a checkpoint of a step again: the pointer leaves the old one before it is dropped.
    Checkpoints of later steps are left alone.
    """
    made, there = saving(base, step), base / folder_name(step)
    sync(made)
    before = [other for other in steps(base) if other < step]
    if there.exists() and before:
        write_whole(base / LATEST, folder_name(before[-1]) + "\n")
    _drop(there)
    os.rename(made, there)
    sync(base)
    write_whole(base / LATEST, there.name + "\n")
    for old in [*before, step][:-keep]:
        _drop(base / folder_name(old))
    return there


def _drop(folder: Path) -> None:
    """Remove a checkpoint; it loses its name first, so that half of one is never found."""
    if folder.exists():
        away = folder.with_name(_DROPPED + folder.name)
        shutil.rmtree(away, ignore_errors=True)
        os.rename(folder, away)
        shutil.rmtree(away, ignore_errors=True)


def clean(base: Path) -> None:
    """Remove what a killed run left half done. Only while no run writes into ``base``."""
    for entry in base.iterdir() if base.is_dir() else ():
        if entry.name.startswith((_SAVING, _DROPPED)):
            shutil.rmtree(entry, ignore_errors=True)


def steps(base: Path) -> list[int]:
    """Steps of the published checkpoints, ascending."""
    found = (_STEP.fullmatch(entry.name) for entry in (base.iterdir() if base.is_dir() else ()))
    return sorted(int(match[1]) for match in found if match)


def latest(base: Path) -> Path | None:
    """The checkpoint that the pointer names; None where there is no pointer.

    Raises:
        InputError: a pointer that names no checkpoint beside it.
    """
    try:
        with (base / LATEST).open("rb") as file:
            name = file.read(100).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{base / LATEST}: cannot be read ({error.strerror})") from None
    if not _STEP.fullmatch(name) or not (base / name).is_dir():
        raise InputError(f"{base / LATEST}: names {name[:40]!r}, which is no checkpoint in this folder{_others(base)}")
    return base / name


def find(path: Path) -> Path:
    """The checkpoint meant by ``--resume``: the latest of a run's folder, or the one named itself.

    Raises:
        InputError: neither.
    """
    if (path / STATE).is_file():
        return path
    found = latest(path)
    if found is None:
        raise InputError(f"{path}: no checkpoint there (no file {LATEST!r}); train with --checkpoint {path} first")
    return found


def _others(base: Path) -> str:
    there = steps(base)
    return f"; resume from {base / folder_name(there[-1])}" if there else ""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a checkpoint as a dict.

    Raises:
        InputError: missing, too large, truncated or no JSON object.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise InputError(f"{path}: {size} bytes; at most {MAX_JSON_BYTES} are read")
        return dict(parse(path.read_bytes(), str(path)))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); the checkpoint is not whole") from None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file and have it on the disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())

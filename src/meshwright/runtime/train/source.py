"""Which model is trained, and where its weights come from: a folder, random numbers, or a run. No torch."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.runtime.folder import Model, read_folder
from meshwright.runtime.models.settings import read_settings
from meshwright.runtime.train.folders import STATE, find, read_json
from meshwright.specs.hf.read import model_from_config
from meshwright.specs.hf.resolve import parse

#: Keys of a configuration that say nothing of the model's shape or numbers.
IGNORED = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache")
#: What a run keeps of the model's folder beside its weights, so that it can be exported whole.
KEPT = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
KEPT_BYTES = 64 << 20
MODEL_FOLDER = "model"


@dataclass(frozen=True, slots=True)
class Source:
    """A model that can be trained.

    Attributes:
        model: spec, settings; with its stored tensors where weights are read from its folder.
        config: as ``config.json`` has it. fingerprint: of it.
        folder: with the files of ``KEPT``.
    """

    model: Model
    config: Mapping[str, Any]
    fingerprint: str
    folder: Path


@dataclass(frozen=True, slots=True)
class Resumed:
    """A checkpoint that a run goes on from.

    Attributes:
        folder: the checkpoint. base: the run's folder. step: steps done. position: samples read.
        facts: everything in ``state.json``.
    """

    folder: Path
    base: Path
    step: int
    position: int
    facts: Mapping[str, Any]


def read_source(folder: Path) -> Source:
    """A folder with configuration and weights.

    Raises:
        InputError: see ``folder.read_folder``.
    """
    model = read_folder(folder)
    config = parse((folder / "config.json").read_bytes(), str(folder / "config.json"))
    return Source(model, config, fingerprint(config), folder)


def from_scratch(path: Path) -> Source:
    """A configuration (file or folder) whose weights are to be random.

    Raises:
        InputError: unreadable, or a model that the runtime does not compute.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = parse(file.read_bytes(), str(file))
    except OSError as error:
        raise InputError(f"--from-scratch {path}: cannot be read ({error.strerror}); a config.json is needed") from None
    return _of_config(raw, file.parent, file.resolve().parent.name, str(file))


def _of_config(raw: Mapping[str, Any], folder: Path, name: str, where: str) -> Source:
    spec = model_from_config(raw, name, where)
    return Source(Model(folder, spec, read_settings(raw, where), {}), raw, fingerprint(raw), folder)


def fingerprint(config: Mapping[str, Any]) -> str:
    """What tells one model from another: a digest of its configuration."""
    kept = {key: value for key, value in config.items() if key not in IGNORED}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def read_resumed(path: Path) -> Resumed:
    """The checkpoint that ``--resume PATH`` means.

    Raises:
        InputError: none there, or malformed.
    """
    folder = find(path)
    facts = read_json(folder / STATE)
    step, position = facts.get("step"), facts.get("position")
    right = all(type(n) is int and 0 <= n < 1 << 48 for n in (step, position))
    if not right or facts.get("version") != 1 or not isinstance(facts.get("config"), dict):
        raise InputError(f"{folder / STATE}: no state of a run; resume from another checkpoint")
    return Resumed(folder, folder.parent, int(step or 0), int(position or 0), facts)


def source_of(resumed: Resumed) -> Source:
    """The model of a checkpoint.

    Raises:
        InputError: malformed, or not the model whose fingerprint it bears.
    """
    where = str(resumed.folder / STATE)
    config = resumed.facts["config"]
    name = str(resumed.facts.get("name", "model"))[:100]
    source = _of_config(config, resumed.base / MODEL_FOLDER, name, where)
    check_same(resumed, source, "its own configuration")
    return source


def check_same(resumed: Resumed, source: Source, what: str) -> None:
    """Refuse to go on with another model.

    Raises:
        InputError: with both fingerprints.
    """
    mark = str(resumed.facts.get("fingerprint"))
    if mark != source.fingerprint:
        raise InputError(
            f"--resume {resumed.folder}: made of another model than {what} (fingerprints {mark[:8]} and "
            f"{source.fingerprint[:8]}); name the model it was made of, or none"
        )


def keep_model(source: Source, base: Path) -> None:
    """Copy configuration and tokenizer into the run's folder."""
    kept = base / MODEL_FOLDER
    kept.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        file = source.folder / name
        if file.is_file() and file.stat().st_size <= KEPT_BYTES and file.resolve() != (kept / name).resolve():
            shutil.copyfile(file, kept / name)
    (kept / "config.json").write_text(json.dumps(dict(source.config), indent=2) + "\n", encoding="utf-8")

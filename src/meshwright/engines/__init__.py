"""One folder an engine: profile, rules, command, logs. Folders are imported when their engine is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import cast

from meshwright.engines.base import Engine
from meshwright.errors import InputError
from meshwright.specs.profile import EngineProfile

#: Engine -> its folder. ``<folder>.profile`` has ``PROFILES``: short version -> profile, newest first;
#: ``<folder>`` has ``ENGINE``, which parses and emits.
FOLDERS: dict[str, str] = {
    "vllm": "meshwright.engines.vllm",
    "sglang": "meshwright.engines.sglang",
    "trtllm": "meshwright.engines.trtllm",
    "meshwright": "meshwright.engines.own",
    "deepspeed": "meshwright.engines.deepspeed",
    "accelerate": "meshwright.engines.accelerate",
    "transformers": "meshwright.engines.transformers",
    "torchrun": "meshwright.engines.torchrun",
    "megatron": "meshwright.engines.megatron",
    "torchtitan": "meshwright.engines.torchtitan",
}

#: The engine of ``plan serve`` when none is named.
DEFAULT = "vllm"


def profiles(engine: str) -> Mapping[str, EngineProfile]:
    """Profiles of one engine by short version, newest first."""
    return cast(Mapping[str, EngineProfile], import_module(f"{FOLDERS[engine]}.profile").PROFILES)


def split_name(name: str) -> tuple[str, str | None]:
    """``"vllm-0.32"``, ``"vllm 0.32.0"`` or ``"vllm==0.32"`` as ``("vllm", "0.32")``; no version: None.

    Raises:
        InputError: the engine or the version is not known.
    """
    text = name.strip().lower().replace("==", "-").replace(" ", "-")
    for engine in sorted(FOLDERS, key=len, reverse=True):
        if text == engine:
            return engine, None
        if text.startswith(engine + "-"):
            wanted = text.removeprefix(engine + "-")
            for version, profile_ in profiles(engine).items():
                if wanted in {version, profile_.version}:
                    return engine, version
            known = ", ".join(f"{engine}-{v}" for v in profiles(engine))
            raise InputError(f"no profile for {name[:40]!r}; known: {known}")
    raise InputError(f"unknown engine {name[:40]!r}; known: {', '.join(FOLDERS)}")


def profile(name: str) -> EngineProfile:
    """The profile behind a name: ``vllm`` (newest), ``vllm-0.32``, ``meshwright``, ...

    Raises:
        InputError: the engine or the version is not known.
    """
    engine, version = split_name(name)
    known = profiles(engine)
    return known[version] if version is not None else next(iter(known.values()))


def load(name: str) -> Engine:
    """The engine behind a name, with everything it can parse and emit.

    Raises:
        InputError: the name is not known.
    """
    engine, _ = split_name(name)
    return cast(Engine, import_module(FOLDERS[engine]).ENGINE)

"""Values that a torchtitan run starts from: the flag's own default, the configuration's, then the command's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshwright.engines.base import FlagTable
from meshwright.engines.flagwords import shown, unexpanded
from meshwright.errors import InputError
from meshwright.specs.atlas import models as atlas

_FOLDER = Path(__file__).parent

#: Assets of configurations that the atlas has under another name.
_ASSETS = {"DeepSeek-V3.1-Base": "deepseek-v3"}


@lru_cache(maxsize=8)
def configurations(version: str) -> Mapping[str, Mapping[str, Any]]:
    """``module/config`` -> what it sets (``bench/flags/torchtitan.py``)."""
    data: dict[str, Any] = json.loads((_FOLDER / f"configs_{version}.json").read_text("ascii"))
    return {k: v for k, v in data.items() if isinstance(v, dict)}


def model_of(configuration: Mapping[str, Any]) -> str | None:
    """Atlas name of a configuration's model, None where the atlas has none."""
    assets = str(configuration.get("assets", "")).rstrip("/").rpartition("/")[2]
    return atlas.find(_ASSETS.get(assets, assets)) if assets else None


def configuration_of(model: str, version: str) -> tuple[str, str]:
    """Module and configuration that train a model; the plainest where several do.

    Raises:
        InputError: torchtitan ships no configuration of it.
    """
    wanted = atlas.find(model) or model
    found = [name for name, c in configurations(version).items() if model_of(c) == wanted and not c.get("float8")]
    found = found or [name for name, c in configurations(version).items() if model_of(c) == wanted]
    if not found:
        known = sorted({str(model_of(c)) for c in configurations(version).values()} - {"None"})
        raise InputError(f"torchtitan {version} ships no configuration of {model[:60]!r}; it has {', '.join(known)}")
    module, _, config = min(found, key=lambda name: (len(name), name)).partition("/")
    return module, config


@dataclass(frozen=True, slots=True)
class Settings:
    """Merged values by dotted name with underscores (``training.seq_len``).

    Attributes:
        table: flags, whose defaults are the last resort.
        configuration: sections of the named configuration.
        given: what the command or file sets.
        policy: activation checkpointing as a word, or None for the configuration's.
    """

    table: FlagTable
    configuration: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, str] = field(default_factory=dict)
    policy: str | None = None

    def text(self, name: str) -> str | None:
        """Value as text; None when it is unset or ``None``."""
        if name in self.given:
            return None if self.given[name] == "None" else self.given[name]
        section, _, key = name.rpartition(".")
        value = self.configuration.get(section, {}).get(key) if section else None
        if value is not None:
            return ",".join(map(str, value)) if isinstance(value, list) else str(value)
        flag = next((f for f in self.table.flags if f.name == f"--{name}"), None)
        return None if flag is None or flag.default in {None, "", "None"} else flag.default

    def whole(self, name: str, low: int) -> int:
        """Whole number of at least ``low``.

        Raises:
            InputError: it is none.
        """
        text = self.text(name) or ""
        try:
            value = int(text) if len(text) < 12 else None
        except ValueError:
            value = None
        if value is None:
            hint = "; a shell variable is not expanded here, write its value" if unexpanded(text) else ""
            raise InputError(f"--{name} {shown(text)} is not a whole number{hint}")
        if value < low:
            raise InputError(f"--{name} {value} is below {low}")
        return value

    def maybe(self, name: str) -> int | None:
        """Whole number of at least 1, or None when it is unset."""
        return None if self.text(name) is None else self.whole(name, 1)

    def on(self, name: str) -> bool:
        """Whether a switch is on."""
        return (self.text(name) or "").lower() == "true"

    @property
    def checkpointing(self) -> str:
        """``selective``, ``full``, ``memory-budget`` or ``none``."""
        return self.policy or str(self.configuration.get("activation_checkpoint", "selective"))

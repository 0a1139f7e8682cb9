"""Model configurations as data: ``model_data/*.json``, found by name through ``model_data/index.json``.

A data file maps names to entries: ``config`` (the keys of ``config.json`` that readers use), ``hf_quant``
(modelopt's ``hf_quant_config.json``), ``aliases`` (hub ids), ``source``, and ``base``: an entry of the same
file whose configuration is taken first. Loading one model reads the index and one file.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.errors import InputError

DATA = Path(__file__).with_name("model_data")


@cache
def _index() -> dict[str, dict[str, Any]]:
    path = DATA / "index.json"
    return json.loads(path.read_bytes()) if path.is_file() else {}


@cache
def _by_name() -> dict[str, str]:
    """Lower-case name or alias -> name of the entry."""
    found = {alias.lower(): name for name, row in _index().items() for alias in row["aliases"]}
    return found | {name.lower(): name for name in _index()}


def names() -> list[str]:
    """Names of all models, sorted."""
    return sorted(_index())


def aliases(name: str) -> tuple[str, ...]:
    """Other names (hub ids) of one model."""
    return tuple(_index()[name]["aliases"])


def find(name: str) -> str | None:
    """The entry that ``name`` stands for, or None: a name or alias in any case, words joined by anything."""
    wanted = name.strip().lower()
    return _by_name().get(wanted) or (_by_spelling().get(_letters(wanted)) if "/" not in wanted else None)


def similar(name: str) -> str | None:
    """The entry whose architecture a repository most likely has: of another owner, or tuned (``-instruct``)."""
    repository = name.strip().lower().rpartition("/")[2]
    found = find(repository)
    while found is None and (shorter := _TUNED.sub("", repository)) != repository:
        repository = shorter
        found = find(repository)
    return found


#: What the name of a tuned or converted checkpoint ends in; its tensors are those of the base model.
_TUNED = re.compile(r"[-_](?:instruct|chat|it|hf|base|pt|bf16|fp16)$")


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name)


@cache
def _by_spelling() -> dict[str, str]:
    """Name without hyphens and blanks -> name of the entry; spellings of two entries are left out."""
    found: dict[str, set[str]] = {}
    for known, name in _by_name().items():
        if "/" not in known:
            found.setdefault(_letters(known), set()).add(name)
    return {spelling: names.pop() for spelling, names in found.items() if len(names) == 1}


def near(name: str, count: int = 4) -> list[str]:
    """Names that look like ``name``."""
    from difflib import get_close_matches

    wanted = name.strip().lower()[:100]
    known = _by_name()
    close = get_close_matches(wanted, known, n=3 * count, cutoff=0.6)
    close += get_close_matches(wanted.rpartition("/")[2], known, n=count, cutoff=0.6)
    return list(dict.fromkeys(known[c] for c in close))[:count]


def load(name: str) -> tuple[str, dict[str, Any], dict[str, Any] | None, str]:
    """Return ``(name of the entry, config, hf_quant, source)``.

    Raises:
        InputError: the name is not in the atlas.
    """
    found = find(name)
    if found is None:
        raise InputError(f"unknown model {name[:80]!r}; `meshwright plan --models` lists the known ones")
    entries = json.loads((DATA / _index()[found]["file"]).read_bytes())
    row = entries[found]
    config: dict[str, Any] = {}
    if "base" in row:
        config |= entries[row["base"]]["config"]
    config |= row["config"]
    return found, config, row.get("hf_quant"), row["source"]


def entry(name: str) -> tuple[dict[str, Any], dict[str, Any] | None, str]:
    """Return ``(config, hf_quant, source)`` of a name or alias.

    Raises:
        InputError: the name is not in the atlas.
    """
    return load(name)[1:]


def build_index() -> dict[str, dict[str, Any]]:
    """The index as the data files give it (``index.json`` must equal it).

    Raises:
        ValueError: two entries claim one name.
    """
    index: dict[str, dict[str, Any]] = {}
    taken: set[str] = set()
    for path in sorted(DATA.glob("*.json")):
        if path.name == "index.json":
            continue
        for name, row in json.loads(path.read_bytes()).items():
            claimed = {name.lower(), *(a.lower() for a in row.get("aliases", []))}
            if claimed & taken:
                raise ValueError(f"{path.name}: {sorted(claimed & taken)} are claimed twice")
            taken |= claimed
            index[name] = {"file": path.name, "aliases": row.get("aliases", [])}
    return index

"""Keys of DeepSpeed's JSON: what this version knows, renamed or removed. Data: ``keys_<version>.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.engines.flagwords import shown
from meshwright.errors import InputError
from meshwright.specs.checks import broken
from meshwright.specs.rules import Rule

VERSION = "0.19.8"

#: Sections that are pydantic models with ``extra="forbid"`` (runtime/config_utils.py): an unknown key stops the start.
_WHERE = "DeepSpeed runtime/config_utils.py, extra='forbid'"
#: A file is taken for DeepSpeed's when it has one of these keys.
SIGNS = ("train_micro_batch_size_per_gpu", "zero_optimization", "train_batch_size", "zero_allow_untested_optimizer")
MAX_DEPTH, MAX_KEYS = 12, 20_000


@cache
def table() -> Mapping[str, Any]:
    """The key table."""
    data: dict[str, Any] = json.loads(Path(__file__).with_name(f"keys_{VERSION}.json").read_text("utf-8"))
    return data


@cache
def section(name: str) -> Mapping[str, Mapping[str, Any]]:
    """Keys of a section by every spelling."""
    rows: Mapping[str, Mapping[str, Any]] = table()["sections"][name]
    return {spelling: row for key, row in rows.items() for spelling in {key, row.get("alias") or key}}


def load(data: bytes, name: str) -> dict[str, Any] | None:
    """The configuration of a file; None when it is no JSON object of DeepSpeed's.

    Raises:
        InputError: it looks like one and is not valid JSON, gives a key twice, or is nested too deeply.
    """
    text = data.decode("utf-8", "replace").strip()
    if not text.startswith("{"):
        return None
    likely = any(f'"{sign}"' in text for sign in SIGNS)
    try:
        value = json.loads(text, object_pairs_hook=_pairs)
    except (ValueError, RecursionError) as error:
        if not likely:
            return None
        where = f" line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else f": {error}"
        raise InputError(f"{name[:80]}{where[:120]}; DeepSpeed reads it as JSON") from None
    return value if isinstance(value, dict) and any(sign in value for sign in SIGNS) else None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"key {shown(key)} is given twice")
        seen[key] = value
    return seen


def flatten(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Leaves as ``("zero_optimization.stage", "3")``.

    Raises:
        InputError: nested too deeply, or too many keys.
    """
    out: list[tuple[str, str]] = []
    stack: list[tuple[str, Any, int]] = [("", config, 0)]
    while stack:
        path, value, depth = stack.pop()
        if depth > MAX_DEPTH or len(out) > MAX_KEYS:
            raise InputError(f"a DeepSpeed configuration nested over {MAX_DEPTH} deep or of over {MAX_KEYS} keys")
        if isinstance(value, Mapping) and (value or not path):
            stack += [(f"{path}.{k}" if path else k, v, depth + 1) for k, v in reversed(list(value.items()))]
        else:
            out.append(
                (path, json.dumps(value) if value is None or isinstance(value, (list, dict, bool)) else str(value))
            )
    return tuple(out)


def check_keys(config: Mapping[str, Any]) -> list[Rule]:
    """Keys that were removed, renamed or never existed, and values of the wrong kind."""
    found = list(_removed(config))
    known = set(table()["top"])
    for key in config:
        if key not in known and key not in table()["removed"]:
            close = get_close_matches(key, known, 1)
            found.append(
                broken(
                    "unknown_key",
                    "unwise",
                    f"DeepSpeed {VERSION} has no key {shown(key)} and ignores it",
                    f"did you mean {close[0]!r}?" if close else "remove it",
                    "DeepSpeed runtime/config.py",
                )
            )
    for name in table()["sections"]:
        inner = inside(config, name)
        if isinstance(inner, Mapping):
            found += _section(name, inner)
    return found


def inside(config: Mapping[str, Any], path: str) -> Any:
    """Value at a dotted path, None when there is none."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _removed(config: Mapping[str, Any]) -> Iterator[Rule]:
    for path in table()["removed"]:
        parent, _, key = path.rpartition(".")
        holder = inside(config, parent) if parent else config
        if isinstance(holder, Mapping) and key in holder:
            yield broken(
                "key_removed",
                "illegal",
                f"{path} was removed: DeepSpeed {VERSION} refuses a configuration that has it",
                "remove it",
                "DeepSpeed runtime/config.py _reject_removed_config_keys",
            )


def _section(name: str, given: Mapping[str, Any]) -> Iterator[Rule]:
    rows = section(name)
    nested = {n.rpartition(".")[2] for n in table()["sections"] if n.startswith(name + ".")}
    for key, value in given.items():
        row = rows.get(key)
        if f"{name}.{key}" in table()["removed"]:
            continue
        if row is None:
            if key in nested:
                continue
            close = get_close_matches(key, list(rows), 1)
            yield broken(
                "unknown_key",
                "illegal",
                f"{name} has no key {shown(key)}; DeepSpeed {VERSION} refuses it",
                f"did you mean {close[0]!r}?" if close else "remove it",
                _WHERE,
            )
        elif row.get("instead") is not None:
            instead = row["instead"]
            yield broken(
                "key_deprecated",
                "unwise",
                f"{name}.{key} is deprecated",
                f"use {name}.{instead}" if instead else "remove it",
                "DeepSpeed runtime/zero/config.py",
            )
        elif value != "auto" and (wrong := _wrong(row, value)):
            yield broken("wrong_value", "illegal", f"{name}.{key} {shown(str(value))} {wrong}", "correct it", _WHERE)


def _wrong(row: Mapping[str, Any], value: Any) -> str | None:
    """Why pydantic would refuse a value; None when it takes it (numbers with no fraction pass as whole ones)."""
    kind = row["type"]
    if value is None or kind == "object":
        return None
    if kind == "choice":
        return None if str(value) in row["choices"] else f"is not one of {', '.join(row['choices'])}"
    if kind == "bool":
        return (
            None if isinstance(value, (bool, int)) or str(value).lower() in {"true", "false"} else "is no true or false"
        )
    number = _number(value)
    if kind in {"int", "float"}:
        if number is None or (kind == "int" and number != int(number)):
            return "is no whole number" if kind == "int" else "is no number"
        low, above, high = (row.get(k) for k in ("low", "above", "high"))
        if (low is not None and number < low) or (above is not None and number <= above):
            return f"is too small ({'at least ' + str(low) if low is not None else 'above ' + str(above)})"
        if high is not None and number > high:
            return f"is above {high}"
    return None


def _number(value: Any) -> float | None:
    try:
        number = float(value) if not isinstance(value, (bool, list, dict)) else None
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number is not None and abs(number) < 1e30 else None

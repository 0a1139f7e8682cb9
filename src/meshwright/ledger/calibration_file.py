"""Calibrations as TOML or JSON. What is read is never trusted."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from math import isfinite
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.ledger.calibrate import DRIVING, Calibration, Sample, Transfer

VERSION = 1
MAX_FILE_BYTES = 4 << 20


def as_dict(c: Calibration) -> dict[str, Any]:
    """Plain values, as they are written."""
    return {"version": VERSION, **asdict(c)}


def from_dict(raw: Mapping[str, Any], where: str = "calibration") -> Calibration:
    """The opposite of ``as_dict``, for values that may come from anywhere.

    Raises:
        InputError: another version, a field that is missing or is no number.
    """
    if raw.get("version") != VERSION:
        raise InputError(f"{where}: version {str(raw.get('version'))[:20]!r}; this reads version {VERSION}")
    try:
        made = {f.name: raw[f.name] for f in fields(Calibration) if f.name in raw}
        for name in ("flops_s", "error"):
            made[name] = {str(k): _positive(v) for k, v in dict(made.get(name, {})).items()}
        for name in ("bandwidth_bytes_s", "light_bytes_s", *DRIVING.values()):
            made[name] = _positive(made.get(name, 0.0))
        made["ranks"] = int(made["ranks"])
        made["machine"] = str(made["machine"])[:200]
        made["work"] = tuple(_sample(row) for row in made.get("work", ()))
        made["transfers"] = tuple(_transfer(row) for row in made.get("transfers", ()))
        found = Calibration(**made)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{where}: no calibration ({str(error)[:80]})") from None
    if not found.bandwidth_bytes_s or not all(found.flops_s.values()):
        raise InputError(f"{where}: a rate of 0; measure again")
    return found


def _positive(value: Any) -> float:
    number = float(value)
    if not isfinite(number) or number < 0:
        raise ValueError(f"{value} where a positive number is needed")
    return number


def _sample(row: Mapping[str, Any]) -> Sample:
    efficiency = _positive(row["efficiency"])
    if not efficiency:
        raise ValueError("an efficiency of 0")
    phase = row.get("phase") or None
    sizes, seconds = tuple(int(n) for n in row["sizes"]), _positive(row.get("seconds", 0.0))
    return Sample(str(row["op"]), str(row["dtype"]), phase, sizes, efficiency, seconds)


def _transfer(row: Mapping[str, Any]) -> Transfer:
    knots = tuple((int(x), _positive(y)) for x, y in row["knots"])
    figures = [_positive(row[name]) for name in ("latency_s", "bandwidth_bytes_s", "error")]
    if not knots or list(knots) != sorted(knots) or not all(x > 0 and y > 0 for x, y in knots) or not figures[1]:
        raise ValueError(f"knots of {row['op']} that do not ascend")
    return Transfer(str(row["op"]), int(row["ranks"]), figures[0], figures[1], figures[2], knots)


def write(c: Calibration, path: Path) -> None:
    """Write TOML, or JSON where the name ends in ``.json``.

    Raises:
        InputError: it cannot be written.
    """
    raw = as_dict(c)
    text = json.dumps(raw, indent=1) + "\n" if path.suffix == ".json" else _toml(raw)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None


def read(path: Path) -> Calibration:
    """Read what ``write`` wrote, or the table ``[calibration]`` of a cluster file with the curves of its links.

    Raises:
        InputError: no such file, too large, or no calibration.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB; no calibration")
    try:
        text = data.decode()
        raw = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: {str(error)[:80]}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path}: no calibration")
    if isinstance(raw.get("calibration"), dict):
        links = [raw[name] for name in ("intra", "inter") if isinstance(raw.get(name), dict)]
        raw = {**raw["calibration"], "transfers": [row for link in links for row in link.get("measured", ())]}
    elif "version" not in raw and "device" in raw:
        raise InputError(f"{path}: a cluster without [calibration]; `meshwright calibrate --out FILE` measures one")
    return from_dict(raw, str(path))


def table_lines(raw: Mapping[str, Any]) -> list[str]:
    """Lines of one TOML table: plain values, then tables, then one inline table a row; None is left out."""
    return _toml(raw).splitlines()


def _toml(raw: Mapping[str, Any]) -> str:
    """Plain values, then tables, then one inline table a row; None is left out."""
    lines = [f"{k} = {_value(v)}" for k, v in raw.items() if not isinstance(v, dict | tuple | list)]
    lines += [f"{k} = {_value(v)}" for k, v in raw.items() if isinstance(v, dict)]
    for name, rows in raw.items():
        if isinstance(rows, tuple | list):
            lines += [f"{name} = [", *(f"    {_value(row)}," for row in rows), "]"]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{json.dumps(str(k))} = {_value(v)}" for k, v in value.items() if v is not None)
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)

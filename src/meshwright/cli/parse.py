"""Text of flags into numbers."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence

from meshwright.errors import InputError

_DURATION = re.compile(r"^(\d+(?:\.\d+)?)\s*(us|ms|s)?$")
_UNIT_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, None: 1.0}


def seconds(text: str, flag: str) -> float:
    """``"40ms"``, ``"2s"`` or ``"0.5"`` (seconds).

    Raises:
        InputError: neither a number nor a number with us, ms or s, or not above zero.
    """
    match = _DURATION.match(text.strip().lower()) if len(text) < 32 else None
    value = float(match.group(1)) * _UNIT_S[match.group(2)] if match else 0.0
    if not value > 0:
        raise InputError(f"{flag} {text[:20]!r} is not a duration; write it as 2s or 40ms")
    return value


def in_range(value: float, flag: str, low: float, high: float) -> None:
    """Refuse a number out of ``[low, high]``.

    Raises:
        InputError: with the number and both bounds.
    """
    if not low <= value <= high:
        raise InputError(f"{flag} {_number(value)} is out of range; it must be {_number(low)} to {_number(high)}")


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def one_of(value: str | None, flag: str, allowed: tuple[str, ...]) -> None:
    """Refuse a word that is not allowed; None is.

    Raises:
        InputError: with the allowed words.
    """
    if value is not None and value not in allowed:
        raise InputError(f"{flag} {value[:20]!r} is not one of {', '.join(allowed)}")


def need(packages: Sequence[str], doing: str, extra: str) -> None:
    """Refuse where a package is not installed.

    Raises:
        InputError: with the first that is missing and the extra that brings it.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise InputError(f"{doing} needs {package}: pip install 'meshwright[{extra}]'")


def need_torch() -> None:
    """Refuse where what runs models is not installed.

    Raises:
        InputError: as ``need``.
    """
    need(("torch", "safetensors"), "running", "run")

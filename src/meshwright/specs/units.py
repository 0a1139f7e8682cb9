"""Sizes as people read them. Memory prints as GiB, traffic as the nearest binary unit."""

from __future__ import annotations

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def gib(nbytes: float, digits: int = 1) -> str:
    """``"12.1 GiB"``."""
    return f"{nbytes / GIB:,.{digits}f} GiB"


def binary(nbytes: float) -> str:
    """Bytes in the largest binary unit that keeps the number at or above 1: ``"392 KiB"``."""
    for unit, size in (("TiB", 1024**4), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(nbytes) >= size:
            value = nbytes / size
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:,.3g} {unit}"
    return f"{nbytes:,.0f} B"


def si(number: float, unit: str = "") -> str:
    """A number with an SI prefix: ``"14.2 T"``."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:,.3g} {prefix}{unit}"
    return f"{number:,.3g} {unit}".rstrip()

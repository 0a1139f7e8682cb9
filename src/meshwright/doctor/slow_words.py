"""Amounts of time, bytes and rates in words."""

from __future__ import annotations


def time_text(seconds: float) -> str:
    """``142 ms``, ``1.1 ms``, ``46.3 s``, ``12 us``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{_short(seconds / size)} {unit}"
    return f"{_short(seconds * 1e6)} us"


def of_text(part_s: float, whole_s: float) -> str:
    """``142 of 176 ms``: both in the unit of the whole."""
    unit, size = ("s", 1.0) if whole_s >= 10 else ("ms", 1e-3) if whole_s >= 1e-3 else ("us", 1e-6)
    return f"{_short(part_s / size)} of {_short(whole_s / size)} {unit}"


def bytes_text(count: float) -> str:
    """``1.00 MiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{_short(count / size)} {unit}"
    return f"{count:.0f} bytes"


def rate_text(bytes_s: float) -> str:
    """``12.3 GB/s``."""
    return f"{_short(bytes_s / 1e9)} GB/s" if bytes_s >= 1e8 else f"{_short(bytes_s / 1e6)} MB/s"


def _short(value: float) -> str:
    """Three digits, no exponent."""
    return f"{value:.0f}" if abs(value) >= 99.5 else f"{value:.1f}" if abs(value) >= 9.95 else f"{value:.2g}"


def faster_text(before_s: float, after_s: float) -> str:
    """``the step takes 41 ms (4.3x faster)``."""
    factor = before_s / after_s if after_s > 0 else 0.0
    shown = f"{factor:.2f}" if factor < 2 else f"{factor:.1f}" if factor < 100 else f"{factor:.0f}"
    return f"the step takes {time_text(after_s)}{f' ({shown}x faster)' if factor > 1.005 else ''}"

"""Seconds with an interval and a word that says where they come from."""

from __future__ import annotations

from collections.abc import Iterable
from math import exp
from typing import Literal, NamedTuple

#: ``exact``: counted. ``calibrated``: rests on measurements of this device, link or engine. ``modelled``: a formula
#: with constants of other devices, links or models.
Word = Literal["exact", "calibrated", "modelled"]

_ORDER: tuple[Word, ...] = ("exact", "calibrated", "modelled")


def weakest(words: Iterable[Word]) -> Word:
    """The least certain of some words; ``exact`` of none."""
    return max(words, key=_ORDER.index, default="exact")


class Seconds(NamedTuple):
    """A time, the 80 % interval around it, and its word."""

    value: float
    low: float
    high: float
    word: Word = "modelled"

    def times(self, factor: float) -> Seconds:
        """The same, ``factor`` times."""
        return Seconds(self.value * factor, self.low * factor, self.high * factor, self.word)

    def json(self) -> dict[str, float | str]:
        """Stable keys for reports."""
        return {"value": self.value, "low": self.low, "high": self.high, "word": self.word}


def spread(value: float, log_width: float, word: Word = "modelled") -> Seconds:
    """``value`` with the interval [value / e^w, value e^w]: errors of times are factors."""
    factor = exp(log_width)
    return Seconds(value, value / factor, value * factor, word)


def total(parts: Iterable[Seconds]) -> Seconds:
    """Sum of times whose errors go together: intervals add up, the weakest word stays (the careful choice)."""
    value = low = high = 0.0
    words: list[Word] = []
    for part in parts:
        value, low, high = value + part.value, low + part.low, high + part.high
        words.append(part.word)
    return Seconds(value, low, high, weakest(words))

"""A Rule is one reason a layout is illegal or unwise, with both numbers and the way out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.specs.layout import Layout

#: ``illegal``: the engine refuses or computes garbage. ``unwise``: it runs and wastes something.
Severity = Literal["illegal", "unwise"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One broken rule.

    Attributes:
        code: stable identifier (``heads_divide_tp``).
        severity: illegal or unwise.
        message: what is wrong, with both numbers: "40 heads are not divisible by tensor parallel size 3".
        way_out: what to do instead.
        where: where the engine says so (``vLLM config/model.py``), or the paper or document behind it.
        numbers: the numbers of the message by name.
        nearest: the nearest legal layouts, best first.
    """

    code: str
    severity: Severity
    message: str
    way_out: str
    where: str = ""
    numbers: tuple[tuple[str, int], ...] = ()
    nearest: tuple[Layout, ...] = ()

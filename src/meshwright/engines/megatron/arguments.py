"""Typed access to Megatron-LM arguments, by name without dashes (``tensor-model-parallel-size``).

Values are text, numbers or flags, so that command lines and recorded configurations read the same way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshwright.engines.flagwords import shown, unexpanded
from meshwright.errors import InputError

#: Longest ``--moe-layer-freq`` or layout expression, and most entries it may expand to.
MAX_EXPRESSION = 20_000
MAX_ENTRIES = 20_000

_TOKEN = re.compile(r"\s*(\d{1,6}|[\[\](),*+])")


class Args:
    """Arguments as given; what is not given is absent."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self.values = values

    def has(self, name: str) -> bool:
        """Whether it is given."""
        return self.values.get(name) is not None

    def whole(self, name: str, low: int = 0) -> int | None:
        """Its whole number, None when it is not given.

        Raises:
            InputError: no whole number, or below ``low``.
        """
        value = self.values.get(name)
        if value is None:
            return None
        text = str(value)
        if len(text) > 12 or not re.fullmatch(r"-?\d+", text):
            hint = "; a shell variable is not expanded here, write its value" if unexpanded(text) else ""
            raise InputError(f"--{name} {shown(text)} is not a whole number{hint}")
        if int(text) < low:
            raise InputError(f"--{name} {text} is below {low}")
        return int(text)

    def count(self, name: str, default: int = 1) -> int:
        """A whole number of at least 1, or the default."""
        found = self.whole(name, 1)
        return default if found is None else found

    def size(self, name: str, default: int = 0) -> int:
        """A whole number of at least 0, or the default."""
        found = self.whole(name)
        return default if found is None else found

    def number(self, name: str, default: float) -> float:
        """Its number, or the default.

        Raises:
            InputError: no number.
        """
        value = self.values.get(name)
        if value is None:
            return default
        try:
            return float(str(value)[:40])
        except ValueError:
            raise InputError(f"--{name} {shown(str(value))} is not a number") from None

    def flag(self, name: str) -> bool:
        """Whether a switch is on."""
        return str(self.values.get(name, "")).lower() in {"true", "1"}

    def text(self, name: str, default: str = "") -> str:
        """Its text, or the default."""
        value = self.values.get(name)
        return default if value is None else str(value)

    def words(self, name: str) -> tuple[str, ...]:
        """Words of a list (``[a b]`` or ``a b``)."""
        return tuple(self.text(name).strip("[]").replace(",", " ").split())


def frequency(text: str, layers: int) -> tuple[int, ...] | None:
    """Layers that ``--moe-layer-freq`` names: ``n`` (every n-th) or a list expression ``([0]*3+[1]*58)``.

    None: all of them. The expression is read, not evaluated: lists of numbers, ``+``, ``*`` and parentheses.

    Raises:
        InputError: another expression, or one that grows beyond ``MAX_ENTRIES``.
    """
    text = text.strip().strip("'\"")
    if not text or text == "1":
        return None
    if text.isdigit() and len(text) < 7:
        every = int(text) or 1
        return tuple(i for i in range(layers) if i % every == 0)
    bits = _List(text).read()
    return tuple(i for i, bit in enumerate(bits[:layers]) if bit)


class _List:
    """Reader of list expressions; no part of it is executed."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[str] = []
        at = 0
        while at < len(text) and len(text) <= MAX_EXPRESSION:
            match = _TOKEN.match(text, at)
            if match is None:
                break
            self.tokens.append(match[1])
            at = match.end()
        if not self.tokens or text[at:].strip():
            raise self._bad()
        self.at = 0

    def _bad(self) -> InputError:
        return InputError(
            f"--moe-layer-freq {shown(self.text)} is neither a number nor a list expression such as ([0]*3+[1]*58)"
        )

    def _next(self) -> str:
        if self.at >= len(self.tokens):
            raise self._bad()
        self.at += 1
        return self.tokens[self.at - 1]

    def _peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def read(self) -> list[int]:
        """The list."""
        out = self._sum(0)
        if self._peek():
            raise self._bad()
        return out

    def _sum(self, depth: int) -> list[int]:
        out = self._product(depth)
        while self._peek() == "+":
            self.at += 1
            out = out + self._product(depth)
            if len(out) > MAX_ENTRIES:
                raise self._bad()
        return out

    def _product(self, depth: int) -> list[int]:
        out = self._atom(depth)
        while self._peek() == "*":
            self.at += 1
            times = self._next()
            if not times.isdigit() or len(out) * int(times) > MAX_ENTRIES:
                raise self._bad()
            out = out * int(times)
        return out

    def _atom(self, depth: int) -> list[int]:
        if depth > 20:
            raise self._bad()
        opening = self._next()
        if opening == "(":
            out = self._sum(depth + 1)
            if self._next() != ")":
                raise self._bad()
            return out
        if opening != "[":
            raise self._bad()
        out = []
        while (token := self._next()) != "]":
            if token.isdigit():
                out.append(int(token))
            elif token != ",":
                raise self._bad()
        return out

"""Words of a command line, sorted: flags with their text, and readers that turn text into values.

Made by ``flagtable.split_words``. Nothing is expanded, executed or opened.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from meshwright.engines.base import Flag
from meshwright.errors import InputError

#: Longest piece of a user's word that a message repeats.
SHOWN = 40

_SUFFIXED = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_SUBSTITUTION = re.compile(r"\$[A-Za-z_{(]|`|%[A-Za-z_]+%")
_STRING = re.compile(r'("(?:[^"\\]|\\.)*")')
_TOKEN = re.compile(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b")
_TRUE, _FALSE = {"true", "1", "yes", "on"}, {"false", "0", "no", "off"}


@dataclass(frozen=True, slots=True)
class Given:
    """One flag as a command line sets it.

    Attributes:
        flag: row of the table.
        value: text; ``true`` or ``false`` for a switch, words of a list joined by one space.
        word: as it was written (``-tp``).
        sub: dotted path behind the name (``kv_role`` of ``--kv-transfer-config.kv_role``), else empty.
        values: words of a list one by one; otherwise the value alone.
    """

    flag: Flag
    value: str
    word: str
    sub: str = ""
    values: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Long name, with the dotted path where there is one."""
        return f"{self.flag.name}.{self.sub}" if self.sub else self.flag.name


@dataclass(frozen=True, slots=True)
class Words:
    """A sorted command line.

    Attributes:
        given: flags in the order written; a later one overrides an earlier one of the same name.
        unknown: words that look like flags and are none.
        positional: other words, in order.
        orphans: words behind an unknown flag: its value, or a positional word.
        problems: what the engine's parser would refuse, one line each (unknown flags apart).
    """

    given: tuple[Given, ...]
    unknown: tuple[str, ...]
    positional: tuple[str, ...]
    orphans: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def find(self, name: str) -> Given | None:
        """The flag as last set, by long name; dotted pieces are not it (see ``json``)."""
        return next((g for g in reversed(self.given) if g.flag.name == name and not g.sub), None)

    def text(self, name: str) -> str | None:
        """Its text, or None when it is not set."""
        found = self.find(name)
        return None if found is None else found.value

    def on(self, name: str) -> bool | None:
        """Whether a switch is on, or None when it is not set.

        Raises:
            InputError: a value that is neither on nor off.
        """
        found = self.find(name)
        if found is None:
            return None
        if found.value.lower() in _TRUE | _FALSE:
            return found.value.lower() in _TRUE
        raise InputError(f"{found.word} {shown(found.value)} is neither true nor false{_hint(found.value)}")

    def whole(self, name: str, low: int | None = None) -> int | None:
        """Its whole number (``128k`` where the flag takes suffixes), or None when it is not set or a word (``auto``).

        Raises:
            InputError: not a whole number, or below ``low``.
        """
        found = self.find(name)
        if found is None or found.value in found.flag.choices:
            return None
        value = whole_number(found.value, found.flag.suffixes)
        if value is None:
            raise InputError(f"{found.word} {shown(found.value)} is not a whole number{_hint(found.value)}")
        if low is not None and value < low:
            raise InputError(f"{found.word} {shown(found.value)} is below {low}")
        return value

    def number(self, name: str) -> float | None:
        """Its number, or None when it is not set or a word.

        Raises:
            InputError: not a finite number.
        """
        found = self.find(name)
        if found is None or found.value in found.flag.choices:
            return None
        value = _float(found.value)
        if value is None:
            raise InputError(f"{found.word} {shown(found.value)} is not a number{_hint(found.value)}")
        return value

    def json(self, name: str) -> object:
        """Its JSON value, or None when it is not set; dotted pieces, where there are some, replace it as a whole.

        Source: vLLM utils/argparse_utils.py FlexibleArgumentParser.parse_args, which appends the pieces as one more
        flag; numbers may carry suffixes (``80m``), ``key+`` appends to a list.

        Raises:
            InputError: not JSON, or dotted pieces that contradict each other.
        """
        pieces = [g for g in self.given if g.flag.name == name and g.sub]
        if not pieces:
            found = self.find(name)
            return None if found is None else _load(found)
        value: dict[str, object] = {}
        for piece in pieces:
            _lay(value, piece)
        return value


def unexpanded(text: str) -> bool:
    """Whether a value still holds a shell substitution (``$TP``, ``$(nproc)``), which is never expanded here."""
    return _SUBSTITUTION.search(text) is not None


def shown(text: str) -> str:
    """A user's word for a message: quoted, control characters escaped, cut to ``SHOWN`` characters."""
    cut = text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"
    return ascii(cut)


def whole_number(text: str, suffixes: bool = False) -> int | None:
    """``8``, ``1_000``; with suffixes also ``1k`` = 1,000 and ``1K`` = 1,024 (vLLM's human_readable_int)."""
    if len(text) > SHOWN:
        return None
    if suffixes and (match := _SUFFIXED.fullmatch(text.strip())):
        amount, unit = match.groups()
        power = "kmgt".index(unit.lower()) + 1
        if unit.islower():
            return int(float(amount) * 1000**power)
        return int(amount) * 1024**power if "." not in amount else None
    try:
        return int(text)
    except ValueError:
        return None


def wrong_value(given: Given) -> str | None:
    """Why a value is not of its flag's type; None when it is."""
    flag = given.flag
    if given.sub or flag.takes == "switch" or (flag.takes == "optional" and not given.value):
        return None
    for value in given.values:
        if value in flag.choices or flag.type == "str":
            continue
        if flag.type == "choice" and flag.choices:
            close = ", ".join(flag.choices[:12])
            return f"{given.word} {shown(value)} is not one of {close}{_hint(value)}"
        needed = {"int": "a whole number", "float": "a number", "bool": "true or false", "json": "JSON"}.get(flag.type)
        if needed is not None and not _is_a(value, flag):
            return f"{given.word} {shown(value)} is not {needed}{_hint(value)}"
    return None


def _is_a(value: str, flag: Flag) -> bool:
    if flag.type == "int":
        return whole_number(value, flag.suffixes) is not None
    if flag.type == "float":
        return _float(value) is not None
    if flag.type == "bool":
        return value.lower() in _TRUE | _FALSE
    try:
        _read(value)
    except ValueError:
        return False
    return True


def _float(text: str) -> float | None:
    try:
        value = float(text) if len(text) <= SHOWN else float("nan")
    except ValueError:
        return None
    return value if abs(value) < 1e30 else None


def _hint(value: str) -> str:
    return "; a shell variable is not expanded here, write its value" if unexpanded(value) else ""


def _read(text: str) -> object:
    """JSON, with numbers that carry a suffix.

    Raises:
        ValueError: not JSON.
    """
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        try:
            value = json.loads(_suffixes_read(text))
        except RecursionError:
            raise ValueError("nested too deeply") from None
    return value


def _suffixes_read(text: str) -> str:
    parts = _STRING.split(text)
    for at in range(0, len(parts), 2):
        parts[at] = _TOKEN.sub(lambda m: str(whole_number(m[0], True) or m[0]), parts[at])
    return "".join(parts)


def _load(given: Given) -> object:
    try:
        return _read(given.value)
    except ValueError:
        raise InputError(f"{given.word} {shown(given.value)} is not JSON{_hint(given.value)}") from None


def _lay(root: dict[str, object], piece: Given) -> None:
    """Set one dotted piece inside an object."""
    keys = piece.sub.split(".")
    last = keys.pop()
    if len(keys) > 20:
        raise InputError(f"{shown(piece.name)} is nested too deeply")
    for key in keys:
        below = root.setdefault(key, {})
        if not isinstance(below, dict):
            raise InputError(f"{shown(piece.name)} does not fit into the value of {piece.flag.name}")
        root = below
    if last.endswith("+"):
        held = root.setdefault(last[:-1], [])
        if not isinstance(held, list):
            raise InputError(f"{shown(piece.name)} appends to what is no list")
        held.extend(piece.value.split(","))
        return
    try:
        root[last] = _read(piece.value)
    except ValueError:
        root[last] = piece.value

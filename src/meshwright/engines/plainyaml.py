"""The plain part of YAML that engine configurations and cluster manifests use, read and written without a library.

Read: block mappings and lists, flow ``[a, b]`` and ``{a: b}`` on one line, plain, single and double quoted scalars,
literal blocks (``|``, ``>``), comments, one document. Not read, and said so with the line: anchors, aliases, tags,
tabs, merge keys. Scalars follow YAML 1.1 as PyYAML reads it (``yes`` and ``on`` are true). Bounded in size and depth.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from meshwright.errors import InputError

#: Most characters, lines and nested levels that are read.
MAX_CHARACTERS = 4 << 20
MAX_LINES = 100_000
MAX_DEPTH = 24

_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+")
_TRUE, _FALSE, _NULL = {"true", "yes", "on"}, {"false", "no", "off"}, {"", "~", "null"}
_COLON = re.compile(r":(?:\s|$)")
_PLAIN = re.compile(r"[A-Za-z0-9_./$(][A-Za-z0-9_./$()@+-]*( [A-Za-z0-9_./$()@+-]+)*")


def load(text: str, name: str = "YAML") -> object:
    """The value of a document: dict, list, str, int, float, bool or None.

    Args:
        text: the document.
        name: what messages call it (a file name).

    Raises:
        InputError: too large, too deep, or YAML beyond the plain part, with the line.
    """
    if len(text) > MAX_CHARACTERS or text.count("\n") > MAX_LINES:
        raise InputError(f"{name[:60]}: over {MAX_CHARACTERS >> 20} MiB or {MAX_LINES} lines of YAML are not read")
    reader = _Reader(text, name[:60])
    value = reader.block(0, 0) if reader.peek() is not None else None
    if (left := reader.peek()) is not None:
        raise reader.error(left[0], "is indented unlike what it belongs to")
    return value


def dump(value: object) -> str:
    """YAML text of nested dicts, lists and scalars; keys keep their order. Ends with a newline."""
    return "\n".join(_lines(value, 0)) + "\n"


def dump_all(values: Sequence[object]) -> str:
    """Several documents in one file."""
    return "---\n".join(dump(value) for value in values)


class _Reader:
    """Lines of one document as ``(number, indent, text)`` without comments and blank lines."""

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self.raw = text.replace("\r\n", "\n").split("\n")
        self.at = 0
        self.rows: list[tuple[int, int, str]] = []
        for number, line in enumerate(self.raw, 1):
            body = line.strip(" ")
            if body.rstrip() == "..." or (body.startswith("---") and self.rows):
                if body.startswith("---"):
                    raise self.error(number, "starts a second document; one is read")
                break
            if body.startswith("\t") and body.strip():
                raise self.error(number, "is indented by a tab; YAML wants spaces")
            if body.strip() and not body.startswith(("#", "---", "%")):
                self.rows.append((number, len(line) - len(line.lstrip(" ")), body.rstrip()))

    def error(self, number: int, what: str) -> InputError:
        line = self.raw[number - 1].strip()[:40] if number <= len(self.raw) else ""
        return InputError(f"{self.name} line {number}: {line!a} {what}")

    def peek(self) -> tuple[int, int, str] | None:
        return self.rows[self.at] if self.at < len(self.rows) else None

    def block(self, indent: int, depth: int) -> object:
        """The block that starts at the current line and is indented by at least ``indent``."""
        row = self.peek()
        if row is None or row[1] < indent:
            return None
        if depth > MAX_DEPTH:
            raise self.error(row[0], f"is nested more than {MAX_DEPTH} deep")
        if row[2] == "-" or row[2].startswith("- "):
            return self._list(row[1], depth)
        if split_key(row[2]) is not None:
            return self._mapping(row[1], depth)
        self.at += 1
        return self._value(row[2], row[0], depth)

    def _list(self, indent: int, depth: int) -> list[object]:
        out: list[object] = []
        while (row := self.peek()) is not None and row[1] == indent and (row[2] == "-" or row[2].startswith("- ")):
            rest = row[2][1:].lstrip(" ")
            inner = indent + len(row[2]) - len(rest)
            if not rest or rest.startswith("#"):
                self.at += 1
                out.append(self.block(indent + 1, depth + 1))
            elif rest == "-" or rest.startswith("- ") or split_key(rest) is not None:
                self.rows[self.at] = (row[0], inner, rest)
                out.append(self.block(inner, depth + 1))
            else:
                self.at += 1
                out.append(self._value(rest, row[0], depth, indent + 1))
        return out

    def _mapping(self, indent: int, depth: int) -> dict[str, object]:
        out: dict[str, object] = {}
        while (row := self.peek()) is not None and row[1] == indent:
            pair = split_key(row[2])
            if pair is None:
                raise self.error(row[0], "is no 'key: value'")
            key, rest = self._key(pair[0], row[0]), pair[1]
            self.at += 1
            if key in out:
                raise self.error(row[0], "gives a key twice")
            if not rest or rest.startswith("#"):
                following = self.peek()
                listed = following is not None and following[1] == indent and following[2].startswith("-")
                out[key] = self.block(indent if listed else indent + 1, depth + 1)
            else:
                out[key] = self._value(rest, row[0], depth, indent + 1)
        return out

    def _key(self, text: str, number: int) -> str:
        if text[0] in "\"'":
            return str(self._scalar(text, number))
        if text == "<<":
            raise self.error(number, "is a merge key, which is not read; write the keys out")
        return text

    def _value(self, text: str, number: int, depth: int, indent: int = 0) -> object:
        """A scalar, a flow collection or a literal block that starts on this line."""
        if text[0] in "|>":
            return self._literal(text, indent)
        if text[0] in "&*!":
            raise self.error(number, "uses an anchor, alias or tag, which are not read; write the value out")
        if text[0] in "[{":
            flow = _Flow(text, self, number)
            value = flow.value(depth)
            flow.end()
            return value
        return self._scalar(text, number)

    def _literal(self, text: str, indent: int) -> str:
        first = self.rows[self.at][0] if self.at < len(self.rows) else len(self.raw) + 1
        start = self.rows[self.at - 1][0]
        rows: list[str] = []
        for number in range(start, len(self.raw)):
            line = self.raw[number]
            if line.strip() and len(line) - len(line.lstrip(" ")) < indent:
                break
            rows.append(line)
        while self.at < len(self.rows) and first <= self.rows[self.at][0] <= start + len(rows):
            self.at += 1
        cut = min((len(r) - len(r.lstrip(" ")) for r in rows if r.strip()), default=0)
        joined = ("\n" if text[0] == "|" else " ").join(r[cut:] for r in rows).rstrip()
        return joined if "-" in text[:3] else joined + "\n"

    def _scalar(self, text: str, number: int) -> object:
        if text[0] in "\"'":
            body, end = quoted(text)
            rest = text[end:].strip()
            if body is None or (rest and not rest.startswith("#")):
                raise self.error(number, "has a quote that does not close")
            return body
        return plain_value(re.split(r"\s+#", text, maxsplit=1)[0].strip())


class _Flow:
    """A flow collection on one line."""

    def __init__(self, text: str, reader: _Reader, number: int) -> None:
        self.text, self.reader, self.number, self.at = text, reader, number, 0

    def error(self) -> InputError:
        return self.reader.error(self.number, "is no complete list or mapping on one line")

    def skip(self) -> str:
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1
        return self.text[self.at] if self.at < len(self.text) else ""

    def end(self) -> None:
        if self.skip() not in {"", "#"}:
            raise self.error()

    def value(self, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise self.reader.error(self.number, f"is nested more than {MAX_DEPTH} deep")
        first = self.skip()
        if first in {"[", "{"}:
            return self._items(first, depth)
        if first and first in "\"'":
            body, end = quoted(self.text[self.at :])
            if body is None:
                raise self.error()
            self.at += end
            return body
        start = self.at
        while self.at < len(self.text) and self.text[self.at] not in ",]}:":
            self.at += 1
        while (
            self.at < len(self.text) and self.text[self.at] == ":" and self.text[self.at + 1 : self.at + 2] not in " "
        ):
            self.at += 1
            while self.at < len(self.text) and self.text[self.at] not in ",]}:":
                self.at += 1
        return plain_value(self.text[start : self.at].strip())

    def _items(self, first: str, depth: int) -> object:
        self.at += 1
        close = "]" if first == "[" else "}"
        items: list[object] = []
        pairs: dict[str, object] = {}
        while self.skip() != close:
            key = self.value(depth + 1)
            if first == "{":
                if self.skip() != ":":
                    raise self.error()
                self.at += 1
                pairs[str(key)] = self.value(depth + 1)
            else:
                items.append(key)
            if self.skip() == ",":
                self.at += 1
            elif self.skip() != close:
                raise self.error()
        self.at += 1
        return items if first == "[" else pairs


def split_key(text: str) -> tuple[str, str] | None:
    """``key: rest`` of a line as ``(key, rest)``, quotes kept; None when the line is none."""
    start = 0
    if text[0] in "\"'":
        _, start = quoted(text)
        after = text[start:].lstrip()
        if not after.startswith(":") or after[1:2] not in {"", " ", "\t"}:
            return None
    elif text[0] in "[]{},#&*!|>%@`":
        return None
    match = _COLON.search(text, start)
    if match is None or " #" in text[: match.start()][start:]:
        return None
    return text[: match.start()].rstrip(), text[match.end() :].strip()


def quoted(text: str) -> tuple[str | None, int]:
    """The string that ``text`` starts with, and where it ends; None when it does not close."""
    if text[0] == "'":
        match = re.match(r"'((?:[^']|'')*)'", text)
        return (match[1].replace("''", "'"), match.end()) if match else (None, len(text))
    match = re.match(r'"(?:[^"\\]|\\.)*"', text)
    if match is None:
        return None, len(text)
    try:
        return str(json.loads(match[0])), match.end()
    except ValueError:
        return match[0][1:-1], match.end()


def plain_value(text: str) -> object:
    """An unquoted scalar: None, bool, int, float or str."""
    low = text.lower()
    if low in _NULL:
        return None
    if low in _TRUE | _FALSE:
        return low in _TRUE
    if len(text) <= 40:
        if _INT.fullmatch(text):
            return int(text.replace("_", ""))
        if _FLOAT.fullmatch(text):
            return float(text.replace("_", ""))
    return text


def _lines(value: object, indent: int) -> list[str]:
    space = " " * indent
    if isinstance(value, Mapping) and value:
        out = []
        for key, item in value.items():
            out += _entry(f"{space}{_text(str(key))}:", item, indent)
        return out
    if isinstance(value, (list, tuple)) and value:
        out = []
        for item in value:
            rows = _lines(item, indent + 2)
            if isinstance(item, str) and "\n" in item:
                out += [f"{space}- |", *(f"{space}  {r}".rstrip() for r in item.rstrip("\n").split("\n"))]
            else:
                out += [f"{space}- {rows[0].strip()}", *rows[1:]]
        return out
    return [space + _scalar_text(value)]


def _entry(head: str, item: object, indent: int) -> list[str]:
    if isinstance(item, str) and "\n" in item:
        space = " " * (indent + 2)
        return [f"{head} |", *(f"{space}{row}".rstrip() for row in item.rstrip("\n").split("\n"))]
    if isinstance(item, (Mapping, list, tuple)) and item:
        return [head, *_lines(item, indent + 2)]
    return [f"{head} {_scalar_text(item)}"]


def _scalar_text(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, (list, tuple)):
        return "[]"
    return _text(str(value))


def _text(text: str) -> str:
    """A string, quoted where YAML would read something else."""
    if _PLAIN.fullmatch(text) and plain_value(text) == text and not text.endswith(":"):
        return text
    return json.dumps(text, ensure_ascii=True)

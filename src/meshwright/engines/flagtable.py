"""Flags of one engine version as data, and words of a command line sorted by them.

A table is ``engines/<name>/flags_<version>.json``, written by ``bench/flags/<name>.py`` from the engine's own source.
``split_words`` sorts words the way Python's argparse does (docs.python.org, argparse: "Option value syntax", "Argument
abbreviations", "Arguments containing -"); nothing is expanded, executed or opened.

A switch that may be turned off has the spellings for it in ``off``. An ``int`` or ``float`` flag may have ``choices``:
words that it takes beside numbers (``auto``).
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from meshwright.engines.base import Flag, FlagTable
from meshwright.engines.flagwords import Given, Words, shown, wrong_value
from meshwright.errors import InputError

#: Most words, and most characters over all words, of one command line.
MAX_WORDS = 10_000
MAX_CHARACTERS = 8 << 20

_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


#: Flag, dotted path behind it, full spelling.
_Match = tuple[Flag, str, str]


@dataclass(frozen=True, slots=True)
class _Index:
    """Spellings of a table: exact ones, and the sorted list that prefixes are looked up in."""

    exact: dict[str, Flag]
    ordered: list[str] = field(default_factory=list)


@lru_cache(maxsize=32)
def load_table(folder: Path, version: str) -> FlagTable:
    """Table of a version, from ``flags_<version>.json`` in an engine's folder.

    Raises:
        InputError: there is no table of this version.
    """
    path = folder / f"flags_{version}.json"
    if not path.is_file():
        known = sorted(p.stem.removeprefix("flags_") for p in folder.glob("flags_*.json"))
        raise InputError(f"no flag table of {folder.name} {version[:20]}; known: {', '.join(known)}")
    return table_from(json.loads(path.read_text(encoding="utf-8")))


def table_from(data: Mapping[str, object]) -> FlagTable:
    """Table from the parsed JSON (see ``table_to``)."""
    rows: Iterable[Mapping[str, object]] = data["flags"]  # type: ignore[assignment]
    flags = tuple(
        Flag(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()})  # type: ignore[arg-type]
        for row in rows
    )
    rest = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k != "flags"}
    return FlagTable(flags=flags, **rest)  # type: ignore[arg-type]


def table_to(table: FlagTable) -> str:
    """JSON text of a table: one line a flag, fields with their default left out, stable order."""
    plain = Flag("")
    rows = []
    for flag in sorted(table.flags, key=lambda f: f.name):
        row = {"name": flag.name}
        for key in ("aliases", "takes", "type", "off", "choices", "default", "suffixes"):
            if (value := getattr(flag, key)) != getattr(plain, key):
                row[key] = value
        rows.append("  " + json.dumps(row, ensure_ascii=True))
    head = {k: getattr(table, k) for k in ("engine", "version", "source", "prefixes", "underscores", "dotted")}
    head["removed"] = dict(sorted(table.removed.items()))
    if table.environment:
        head["environment"] = sorted(table.environment)
    text = json.dumps(head, indent=1, ensure_ascii=True).removesuffix("\n}")
    return text + ',\n "flags": [\n' + ",\n".join(rows) + "\n ]\n}\n"


def find_flag(word: str, table: FlagTable) -> Flag | None:
    """The flag behind a name, an alias or an unambiguous prefix (``=value`` is ignored); None: unknown or ambiguous."""
    match = _match(word.partition("=")[0], table, _index(table))
    return match[0] if match is not None and not isinstance(match, str) else None


def split_words(argv: Sequence[str], table: FlagTable) -> Words:
    """Sort the words of a command line (program and subcommand taken off).

    Args:
        argv: words as a shell would hand them over.
        table: the flags of the engine's launcher.

    Raises:
        InputError: more than ``MAX_WORDS`` words or ``MAX_CHARACTERS`` characters.
    """
    if len(argv) > MAX_WORDS or sum(map(len, argv)) > MAX_CHARACTERS:
        raise InputError(
            f"{len(argv)} words of {sum(map(len, argv))} characters; at most {MAX_WORDS} words and "
            f"{MAX_CHARACTERS} characters are read"
        )
    index = _index(table)
    given: list[Given] = []
    unknown: list[str] = []
    positional: list[str] = []
    orphans: list[str] = []
    problems: list[str] = []
    at = 0
    while at < len(argv):
        word = argv[at]
        at += 1
        if word == "--":
            positional += argv[at:]
            break
        if not is_option(word):
            positional.append(word)
            continue
        key, equals, text = word.partition("=")
        match = _match(key, table, index)
        if match is None and (joined := _joined(word, index)) is not None:
            match, equals, text = (joined[0], "", word[:2]), "=", joined[1]
        if match is None:
            unknown.append(key if equals else word)
            if not equals and at < len(argv) and not is_option(argv[at]):
                orphans.append(argv[at])
                at += 1
            continue
        if isinstance(match, str):
            problems.append(match)
            continue
        flag, sub, spelling = match
        values, at = _values(flag, spelling, sub, text if equals else None, argv, at, problems)
        if values is not None:
            value = " ".join(values)
            given.append(Given(flag, value, key, sub, values))
            if (problem := wrong_value(given[-1])) is not None:
                problems.append(problem)
    return Words(tuple(given), tuple(unknown), tuple(positional), tuple(orphans), tuple(problems))


def rejected(words: Sequence[str], table: FlagTable, positionals: int = 1) -> list[str]:
    """What the engine's own parser would refuse in these words (program and subcommand taken off), one line each.

    Args:
        words: words of the command.
        table: flags of the version.
        positionals: how many words without a flag it takes at most.
    """
    found = split_words(words, table)
    bad = [f"{shown(word)} is no flag of {table.engine} {table.version}" for word in found.unknown]
    bad += found.problems
    if len(found.positional) > positionals:
        extra = found.positional[positionals]
        bad.append(f"{shown(extra)} stands alone; at most {positionals} such words are taken")
    return bad


def owners(word: str, engine: str) -> tuple[str, ...]:
    """Other engines (newest tables) that know a flag which ``engine`` does not: two engines' flags are mixed."""
    key = word.partition("=")[0]
    spellings = tuple(json.dumps(k) for k in (key, key.replace("_", "-"), key.replace("-", "_").replace("__", "--", 1)))
    out = []
    for folder in sorted(p for p in Path(__file__).parent.iterdir() if p.is_dir() and p.name != engine):
        versions = sorted((p.stem.removeprefix("flags_") for p in folder.glob("flags_*.json")), key=_version_key)
        if not versions or not any(s in _text(folder, versions[-1]) for s in spellings):
            continue
        table = load_table(folder, versions[-1])
        if _exact(key, table, _index(table)) is not None:
            out.append(table.engine)
    return tuple(out)


@lru_cache(maxsize=32)
def _text(folder: Path, version: str) -> str:
    return (folder / f"flags_{version}.json").read_text(encoding="utf-8")


def is_option(word: str) -> bool:
    """Whether argparse takes a word for a flag: a dash in front, no negative number, no space before ``=``."""
    if len(word) < 2 or word[0] != "-" or _NUMBER.fullmatch(word):
        return False
    return " " not in word.partition("=")[0]


def _index(table: FlagTable) -> _Index:
    exact: dict[str, Flag] = {}
    for flag in table.flags:
        for spelling in (flag.name, *flag.aliases, *flag.off):
            exact.setdefault(_normal(spelling, table), flag)
    return _Index(exact, sorted(exact))


def _normal(key: str, table: FlagTable) -> str:
    """Where the parser takes underscores for dashes: with dashes, up to the first dot of a dotted piece."""
    if not table.underscores or not key.startswith("--"):
        return key
    if not table.dotted:
        return key.replace("_", "-")
    head, dot, tail = key.partition(".")
    return head.replace("_", "-") + dot + tail


def _exact(key: str, table: FlagTable, index: _Index) -> _Match | None:
    """Flag, dotted path and spelling of an exact spelling."""
    key = _normal(key, table)
    if key in index.exact:
        return index.exact[key], "", key
    if table.dotted:
        head, dot, sub = key.partition(".")
        if dot and sub and head in index.exact and index.exact[head].type in {"json", "str"}:
            return index.exact[head], sub, head
    return None


def _match(key: str, table: FlagTable, index: _Index) -> _Match | str | None:
    """Flag, dotted path and spelling; a line when the prefix is ambiguous; None when nothing matches."""
    found = _exact(key, table, index)
    if found is not None or not table.prefixes or len(key) < 2 or key == "--":
        return found
    head, dot, sub = _normal(key, table).partition(".") if table.dotted else (_normal(key, table), "", "")
    first = bisect_left(index.ordered, head)
    names: list[str] = []
    for name in index.ordered[first : first + 200]:
        if not name.startswith(head):
            break
        names.append(name)
    fates = {(index.exact[name].name, name in index.exact[name].off) for name in names}
    if len(fates) == 1:
        flag = index.exact[names[0]]
        return (flag, sub, names[0]) if not dot or flag.type in {"json", "str"} else None
    if names:
        return f"{shown(key)} could be {', '.join(names[:4])}; write it out"
    return None


def _joined(word: str, index: _Index) -> tuple[Flag, str] | None:
    """``-n4``: a flag of one letter with its value behind it."""
    flag = index.exact.get(word[:2]) if not word.startswith("--") and len(word) > 2 else None
    return None if flag is None or flag.takes == "switch" else (flag, word[2:])


def _values(
    flag: Flag, key: str, sub: str, text: str | None, argv: Sequence[str], at: int, problems: list[str]
) -> tuple[tuple[str, ...] | None, int]:
    """Values of a flag and where the next word stands; None when a value is missing."""
    if flag.takes == "switch" and not sub:
        if text is not None:
            problems.append(f"{shown(key)} is a switch and takes no value; {shown(text)} is given")
        return (("false" if key in flag.off else "true",) if text is None else (text,)), at
    if text is not None:
        return (text,), at
    most = 1 if flag.takes != "list" or sub else len(argv)
    end = at
    while end < len(argv) and end - at < most and not is_option(argv[end]):
        end += 1
    if end > at:
        return tuple(argv[at:end]), end
    if flag.takes == "optional":
        return ("",), at
    following = f"; {shown(argv[at])} follows" if at < len(argv) else ""
    problems.append(f"{shown(key)} needs a value{following}")
    return None, at


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version))

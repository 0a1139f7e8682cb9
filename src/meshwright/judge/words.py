"""A pasted command as words: leading assignments, wrappers, and what a shell would have expanded. Nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import InputError

MAX_CHARACTERS = 1 << 20
MAX_WORDS = 20_000
MAX_FILE_BYTES = 32 << 20

_ASSIGNMENT = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")
#: Words that only start another program; the flag count says how many values follow.
_WRAPPERS = {"sudo", "nohup", "exec", "time", "env", "command"}
#: Operators that end a command; what stands behind them is another one.
_OPERATORS = {"&&", "||", ";", "|", "&"}
#: Commands that only prepare the one that is meant.
_BEFORE = {"cd", "export", "source", ".", "ulimit", "set", "mkdir", "echo"}
#: Characters that make a word something other than what it says.
_EXPANSION = re.compile(r"\$[A-Za-z_{(]|`")
#: Addresses that the commands of ``plan`` leave to the reader, folders and tokens; they decide nothing that is judged.
_OURS = re.compile(r"\$\{?(HEAD_IP|NODE_IP|NODE_RANK|IFNAME|PREFILL_IP|DECODE_IP|HOME|PWD|USER|HF_TOKEN)\b")


@dataclass(frozen=True, slots=True)
class Words:
    """A command split into words.

    Attributes:
        argv: program and arguments.
        env: assignments in front of it.
        unexpanded: words with ``$NAME``, ``$(...)`` or backquotes, which only a shell could resolve.
        notes: what was left out.
    """

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    unexpanded: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def split(words: Sequence[str]) -> Words:
    """Split what stands behind ``--``; one single word is split as a shell would (quotes, backslashes, line ends).

    Raises:
        InputError: too long, an open quote, or nothing to judge.
    """
    if sum(map(len, words)) > MAX_CHARACTERS:
        raise InputError(f"the command has over {MAX_CHARACTERS:,} characters; paste one command")
    if len(words) == 1 and re.search(r"\s", words[0]):
        try:
            words = _as_shell(words[0])
        except ValueError as error:
            raise InputError(f"the command cannot be split into words: {str(error).lower()}") from None
    if len(words) > MAX_WORDS:
        raise InputError(f"the command has {len(words):,} words; at most {MAX_WORDS:,} are read")
    argv = list(words)
    notes: list[str] = []
    env: list[tuple[str, str]] = []
    while (place := _operator(argv)) is not None:
        if argv[0] not in _BEFORE or place + 1 == len(argv):
            notes.append(f"only the command before {argv[place]!r} is judged")
            argv = argv[:place]
            break
        if argv[0] == "export":
            env += [(name, value) for name, _, value in (w.partition("=") for w in argv[1:place])]
        else:
            notes = [f"{argv[0]!r} before the command is left out"]
        argv = argv[place + 1 :]
    while argv and (_ASSIGNMENT.match(argv[0]) or argv[0] in _WRAPPERS):
        word = argv.pop(0)
        if word not in _WRAPPERS:
            name, _, value = word.partition("=")
            env.append((name, value))
    if not argv:
        raise InputError("there is no command behind --; paste one, as in: meshwright check -- vllm serve MODEL -tp 2")
    if any("\0" in word for word in argv):
        raise InputError("the command holds a NUL byte; paste it as text")
    unexpanded = tuple(w for w in (*argv, *(v for _, v in env)) if _EXPANSION.search(_OURS.sub("", w)))
    return Words(tuple(argv), tuple(env), unexpanded, tuple(notes))


def _as_shell(text: str) -> list[str]:
    """Words of a pasted text: quotes and line ends as in a shell; a line end that is not escaped ends only commands
    that prepare another one, and comments."""
    lines = []
    for line in text.replace("\\\n", " ").split("\n"):
        first = line.split(None, 1)[:1]
        if first and first[0].startswith("#"):
            continue
        lines.append(f"{line} ;" if first and first[0] in _BEFORE else line)
    lexer = shlex.shlex("\n".join(lines), posix=True, punctuation_chars=";&|")
    lexer.whitespace_split, lexer.commenters = True, ""
    return list(lexer)


def _operator(argv: Sequence[str]) -> int | None:
    return next((place for place, word in enumerate(argv) if word in _OPERATORS), None)


class Folder:
    """Reads files that a command names, from inside one folder only."""

    def __init__(self, base: Path) -> None:
        self.base = base.resolve()

    def __call__(self, name: str) -> bytes | None:
        """The file's bytes, None when there is none.

        Raises:
            InputError: the path leaves the folder, is no regular file, or is too large.
        """
        if "\0" in name or len(name) > 4096:
            raise InputError(f"file name {name[:40]!r} is not a path")
        path = (self.base / name).resolve()
        if not path.is_relative_to(self.base):
            raise InputError(f"{name[:120]} lies outside {self.base}; run the check in the folder that holds it")
        if not path.exists():
            return None
        if not path.is_file():
            raise InputError(f"{name[:120]} is not a regular file")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{name[:120]} is larger than {MAX_FILE_BYTES >> 20} MiB")
        return path.read_bytes()

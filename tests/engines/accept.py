"""Whether an engine's flag table accepts the commands that are emitted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence

from meshwright.engines.base import FlagTable
from meshwright.engines.flagtable import rejected
from meshwright.specs.command import Command

#: Finds the words that the engine's own parser gets, or None when a command starts something else.
Words = Callable[[Sequence[str]], Sequence[str] | None]

_NUMBER = re.compile(r"\$(NODE_RANK|DP_RANK)\b|\$\(\([^()]*\)\)")


def numbered(words: Iterable[str]) -> list[str]:
    """Words with 1 for the variables of our own that stand for numbers, as a shell would put one in."""
    return [_NUMBER.sub("1", word) for word in words]


def refused(commands: Iterable[Command], table: FlagTable, words_of: Words, positionals: int = 1) -> list[str]:
    """What the table refuses in the commands that start the engine, one line each."""
    bad = []
    for command in commands:
        words = words_of(shlex.split(command.text))
        if words is not None:
            bad += [f"{command.purpose}: {line}" for line in rejected(numbered(words), table, positionals)]
    return bad

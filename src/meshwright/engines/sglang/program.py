"""Where SGLang begins in a pasted command: its module, ``sglang serve``, a script path, inside a shell string or a
container. Nothing is executed: words are read like any others."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_IMAGE_VERSION = re.compile(r"\S*sglang\S*:v?(\d+\.\d+\.\d+)\S*")
_MODULE = "sglang.launch_server"
_SCRIPT = "sglang/launch_server.py"
_SHELLS = frozenset({"sh", "bash", "zsh", "dash"})

#: Words in front of the launcher that are looked at.
MAX_BEFORE = 400


@dataclass(frozen=True, slots=True)
class Program:
    """SGLang as a command starts it.

    Attributes:
        words: what follows the launcher.
        serve: started by ``sglang serve``, which takes the model as its first word too.
        env: assignments in front, container environment included.
        version: of a container image's tag, or None.
    """

    words: tuple[str, ...]
    serve: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    version: str | None = None


def find_program(argv: Sequence[str], depth: int = 0) -> Program | None:
    """The SGLang server that a command starts, or None."""
    for at, word in enumerate(argv[:MAX_BEFORE]):
        following = argv[at + 1] if at + 1 < len(argv) else ""
        name = word.rpartition("/")[2]
        if word == "-m" and following == _MODULE:
            return _started(argv, at, at + 2, serve=False)
        if name == "sglang" and following == "serve":
            return _started(argv, at, at + 2, serve=True)
        if word.endswith(_SCRIPT):
            return _started(argv, at, at + 1, serve=False)
        if name in _SHELLS and depth < 3 and following in {"-c", "-lc"} and at + 2 < len(argv):
            try:
                inner = shlex.split(argv[at + 2].replace("\\\n", " "))
            except ValueError:
                return None
            return find_program(inner, depth + 1)
    return None


def _started(argv: Sequence[str], at: int, start: int, *, serve: bool) -> Program:
    before = [m for word in argv[:at] if (m := _ASSIGNMENT.fullmatch(word)) is not None]
    version = next((m[1] for word in argv[:at] if (m := _IMAGE_VERSION.fullmatch(word)) is not None), None)
    return Program(tuple(argv[start:]), serve, {m[1]: m[2] for m in before}, version)

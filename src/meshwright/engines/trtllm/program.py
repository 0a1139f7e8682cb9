"""Where TensorRT-LLM begins in a pasted command: ``trtllm-serve`` and its subcommands, ``trtllm-bench``,
``trtllm-build``, behind ``mpirun`` or ``srun`` and ``trtllm-llmapi-launch``. Nothing is executed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Form = Literal["serve", "disaggregated", "bench", "build"]

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_SERVING = {"serve": "serve", "disaggregated": "disaggregated", "disaggregated_mpi_worker": "disaggregated"}
_RANKS = ("-n", "-np", "--np", "--ntasks")
_NODES = ("-N", "--nodes")
_SHELLS = frozenset({"sh", "bash", "zsh", "dash"})
MAX_BEFORE = 400


@dataclass(frozen=True, slots=True)
class Program:
    """TensorRT-LLM as a command starts it.

    Attributes:
        form: what is started.
        words: what follows.
        env: assignments in front.
        ranks: processes that ``mpirun`` or ``srun`` starts, or None.
        nodes: nodes that ``srun`` is told, or None.
    """

    form: Form
    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ranks: int | None = None
    nodes: int | None = None


def find_program(argv: Sequence[str], before: Sequence[str] = (), depth: int = 0) -> Program | None:
    """What of TensorRT-LLM a command starts, or None."""
    for at, word in enumerate(argv[:MAX_BEFORE]):
        name = word.rpartition("/")[2]
        front = [*before, *argv[:at]]
        if name == "trtllm-serve":
            following = argv[at + 1] if at + 1 < len(argv) else ""
            if following in _SERVING:
                return _program(_SERVING[following], argv[at + 2 :], front)
            if following not in {"mm_embedding_serve", "grpc"}:
                return _program("serve", argv[at + 1 :], front)
            return None
        if name in {"trtllm-bench", "trtllm-build"}:
            return _program(name.removeprefix("trtllm-"), argv[at + 1 :], front)
        if name in _SHELLS and depth < 3 and argv[at + 1 : at + 2] in (["-c"], ["-lc"]) and at + 2 < len(argv):
            try:
                inner = shlex.split(argv[at + 2].replace("\\\n", " "))
            except ValueError:
                return None
            return find_program(inner, front, depth + 1)
    return None


def _program(form: str, words: Sequence[str], front: Sequence[str]) -> Program:
    env = {m[1]: m[2] for word in front if (m := _ASSIGNMENT.fullmatch(word)) is not None}
    started = any(w.rpartition("/")[2] in {"mpirun", "mpiexec", "srun"} for w in front)
    ranks = _number(front, _RANKS) if started else None
    nodes = _number(front, _NODES) if started else None
    return Program(form, tuple(words), env, ranks, nodes)  # type: ignore[arg-type]


def _number(words: Sequence[str], names: Sequence[str]) -> int | None:
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            text = value if equals else words[at + 1] if at + 1 < len(words) else ""
            if text.isdecimal() and len(text) < 7:
                return int(text)
    return None

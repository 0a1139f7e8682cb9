"""Whether two lines of a user's script lie in one loop, where the script is still at hand. It is parsed, never run."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

MAX_SOURCE_BYTES = 1 << 20

_Span = tuple[int, int]


@lru_cache(maxsize=64)
def _loops(file: str) -> tuple[_Span, ...] | None:
    """First and last line of the body of every loop; None without a readable Python file."""
    path = Path(file)
    try:
        if path.suffix != ".py" or not path.is_file() or path.stat().st_size > MAX_SOURCE_BYTES:
            return None
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While | ast.AsyncFor)]
    return tuple((node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno) for node in loops)


def in_loop_of(file: str, line: int, other: int) -> bool | None:
    """Whether ``line`` is within every loop that ``other`` is in; None without the file or such a loop."""
    loops = _loops(file)
    around = [(a, b) for a, b in loops or () if a <= other <= b]
    return all(a <= line <= b for a, b in around) if around else None

"""Lists of module names as quantization configurations write them: exact names, globs, ``re:`` expressions.

The patterns come from strangers. Exact names are looked up in a set, globs are matched in linear time per
start, and expressions are matched with ``re`` only when they cannot backtrack exponentially, inside a budget.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable

from meshwright.errors import InputError

#: Most patterns, their longest, and the seconds that all expressions of one list may take together.
MAX_PATTERNS = 200_000
MAX_EXPRESSIONS = 500
MAX_LENGTH = 400
BUDGET_S = 2.0

_LAYER = re.compile(r"layers\.(\d+)(?:\.|$)")
_UNSAFE = re.compile(r"\)[*+{]|\\\d|\(\?P=|\(\?\(")
_REPEAT = re.compile(r"(?<!\\)[*+]|(?<!\\)\{\d*,?\d*\}")
#: A pattern without digits, ``?`` and counts cannot tell one layer from another.
_TELLS_LAYERS = re.compile(r"[0-9?{]")


class NameList:
    """A list of module names and patterns.

    An exact name stands for the module, for everything below it (``model.layers.0.self_attn``) and, being a
    run of whole path components, for modules whose path contains it (``gate`` means ``...mlp.gate``, not
    ``...gate_proj``): this is how transformers and vLLM read such lists. A glob may match the module or what
    lies above it, from any path component on. ``re:`` expressions match from the beginning of the name.

    Attributes:
        where: begins every error message.
        rejected: expressions that are not applied because they could take exponential time.
    """

    def __init__(self, patterns: Iterable[str], where: str) -> None:
        self._exact: set[str] = set()
        self._globs: dict[str, list[str]] = defaultdict(list)
        self._expressions: list[re.Pattern[str]] = []
        self._same_globs: list[str] = []
        self._same_expressions: list[re.Pattern[str]] = []
        self._same: dict[str, bool] = {}
        self.rejected: list[str] = []
        self.where = where
        self._left_s = BUDGET_S
        for number, pattern in enumerate(patterns):
            if number >= MAX_PATTERNS or len(pattern) > MAX_LENGTH:
                raise InputError(
                    f"{where}: more than {MAX_PATTERNS} module names, or one longer than {MAX_LENGTH} characters"
                )
            self._add(pattern)

    def _add(self, pattern: str) -> None:
        if pattern.startswith("re:"):
            self._add_expression(pattern[3:])
        elif "*" not in pattern and "?" not in pattern:
            self._exact.add(pattern)
        elif _TELLS_LAYERS.search(pattern):
            layer = _LAYER.search(pattern)
            self._globs[layer[1] if layer else ""].append(pattern)
        else:
            self._same_globs.append(pattern)

    def _add_expression(self, text: str) -> None:
        if len(self._expressions) + len(self._same_expressions) >= MAX_EXPRESSIONS:
            raise InputError(f"{self.where}: more than {MAX_EXPRESSIONS} expressions")
        if _UNSAFE.search(text) or len(_REPEAT.findall(text)) > 5:
            self.rejected.append(text)
            return
        try:
            compiled = re.compile(text)
        except (re.error, OverflowError, RecursionError):
            raise InputError(f"{self.where}: {text[:40]!r} is not a regular expression") from None
        # ``(?:...)`` holds a question mark without counting anything.
        tells = _TELLS_LAYERS.search(text.replace("(?:", "("))
        (self._expressions if tells else self._same_expressions).append(compiled)

    def __bool__(self) -> bool:
        return bool(self._exact or self._globs or self._expressions or self._same_globs or self._same_expressions)

    @property
    def tells_layers(self) -> bool:
        """Whether a pattern could stand for one layer and not for another."""
        return bool(self._globs or self._expressions) or any(_TELLS_LAYERS.search(name) for name in self._exact)

    def match(self, module: str, template: str = "") -> bool:
        """Whether any pattern stands for ``module``.

        Args:
            module: dotted name.
            template: name that all layers of a family share; what cannot differ between layers is matched once.

        Raises:
            InputError: the expressions take longer than their budget.
        """
        if self._exact and not self._exact.isdisjoint(_runs(module)):
            return True
        key = template or module
        if key not in self._same:
            self._same[key] = _any_glob(self._same_globs, module) or self._any(self._same_expressions, module)
        if self._same[key]:
            return True
        if self._globs:
            layer = _LAYER.search(module)
            globs = self._globs.get("", []) + (self._globs.get(layer[1], []) if layer else [])
            if _any_glob(globs, module):
                return True
        return self._any(self._expressions, module)

    def _any(self, expressions: list[re.Pattern[str]], module: str) -> bool:
        if not expressions:
            return False
        start = time.monotonic()
        found = any(e.match(module) for e in expressions)
        self._left_s -= time.monotonic() - start
        if self._left_s < 0:
            raise InputError(f"{self.where}: its regular expressions take more than {BUDGET_S} s")
        return found


def _any_glob(globs: list[str], module: str) -> bool:
    """Whether a glob matches the module or what lies above it, from any path component on."""
    for glob in globs:
        head = glob.replace("?", "*").split("*", 1)[0]
        at = module.find(head)
        while at >= 0:
            if (at == 0 or module[at - 1] == ".") and (_glob(glob, module[at:]) or _glob(glob + ".*", module[at:])):
                return True
            at = module.find(head, at + 1) if head else -1
    return False


def _runs(module: str) -> list[str]:
    """Every run of whole components of a dotted path."""
    parts = module.split(".")
    return [".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)]


def _glob(pattern: str, text: str) -> bool:
    """Shell-style match with ``*`` and ``?`` in at most len(pattern) x len(text) steps."""
    p = t = mark = 0
    star = -1
    while t < len(text):
        if p < len(pattern) and pattern[p] == "*":
            star, mark = p, t
            p += 1
        elif p < len(pattern) and pattern[p] in (text[t], "?"):
            p, t = p + 1, t + 1
        elif star >= 0:
            mark += 1
            p, t = star + 1, mark
        else:
            return False
    return all(c == "*" for c in pattern[p:])

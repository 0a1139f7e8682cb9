"""Public cases and how the tests answer them: ``python bench/cases.py [CASES.csv]``.

Nothing here is typed by hand: ids are read from the tests. A test answers a case when its function's name holds the id
(``test_c004_...``), when its docstring begins with it (``C081, C084: ...``), or when a row of a module's table does
(``"C265-heads-on-6"``). Three tables say more, each a dictionary of id -> reason or a tuple of (id, reason):
``NOT_DECIDED`` (or ``UNDECIDED``) for what no command, configuration or plan decides, and ``WRONG`` for what the tool
answers wrongly. The cases themselves lie in ``cases/cases.csv`` of ``$MESHWRIGHT_SHARED`` or ``../shared``.
"""

from __future__ import annotations

import ast
import csv
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: Kinds that a command, a configuration or a plan may decide.
KINDS = ("config-invalid", "launch", "plan-memory", "plan-choice", "moe", "kv-transfer", "train-memory")

_NOT_DECIDED = frozenset({"NOT_DECIDED", "UNDECIDED"})
_ID = re.compile(r"\bC\d{3}\b")
_ROW = re.compile(r"C\d{3}(?=\Z|[^0-9])")
_NAME = re.compile(r"_(c\d{3})(?=_|\Z)")


@dataclass(frozen=True, slots=True)
class Answers:
    """What the tests say: ids with a test, ids answered wrongly, ids that nothing decides (with the reasons)."""

    tested: frozenset[str]
    wrong: dict[str, str]
    not_decided: dict[str, str]

    @property
    def right(self) -> frozenset[str]:
        """Answered by a test, and not listed as wrong."""
        return self.tested - frozenset(self.wrong) - frozenset(self.not_decided)


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of cases.

    Attributes:
        kind: its name.
        cases: how many there are.
        right, wrong, not_decided: how many of them.
        open: ids of which no test says anything.
    """

    kind: str
    cases: int
    right: int
    wrong: int
    not_decided: int
    open: tuple[str, ...]

    @property
    def decidable(self) -> int:
        """Cases that can be put as a command, a configuration or a plan."""
        return self.cases - self.not_decided


def _pairs(node: ast.expr) -> Iterator[tuple[str, str]]:
    value = ast.literal_eval(node)
    yield from value.items() if isinstance(value, dict) else value


def _heading(function: ast.FunctionDef) -> str:
    """The part of a docstring's first line that may name cases."""
    first = (ast.get_docstring(function) or "").partition("\n")[0]
    return re.split(r"[:.]", first)[0]


def _in_function(function: ast.FunctionDef) -> Iterator[str]:
    yield from (found.upper() for found in _NAME.findall(function.name))
    yield from _ID.findall(_heading(function))
    for decorator in function.decorator_list:
        yield from _in_table(decorator)


def _in_table(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and (found := _ROW.match(part.value)):
            yield found[0]


def read_module(text: str) -> Answers:
    """Ids of one test module."""
    tested: set[str] = set()
    wrong: dict[str, str] = {}
    not_decided: dict[str, str] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            tested |= set(_in_function(node))
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {t.id for t in targets if isinstance(t, ast.Name)}
            if names & _NOT_DECIDED:
                not_decided |= dict(_pairs(node.value))
            elif "WRONG" in names:
                wrong |= dict(_pairs(node.value))
            else:
                tested |= set(_in_table(node.value))
    return Answers(frozenset(tested), wrong, not_decided)


def read_tests(folder: Path) -> Answers:
    """Ids of all test modules below a folder."""
    tested: set[str] = set()
    wrong: dict[str, str] = {}
    not_decided: dict[str, str] = {}
    for path in sorted(folder.rglob("test_*.py")):
        found = read_module(path.read_text(encoding="utf-8"))
        tested |= found.tested
        wrong |= found.wrong
        not_decided |= found.not_decided
    return Answers(frozenset(tested), wrong, not_decided)


def ids_by_kind(path: Path) -> dict[str, list[str]]:
    """Ids of the cases, by kind."""
    out: dict[str, list[str]] = {}
    with path.open(newline="", encoding="utf-8") as f:
        for row in csv.DictReader(f):
            out.setdefault(row["kind"], []).append(row["id"])
    return out


def count(kind: str, ids: list[str], answers: Answers) -> Row:
    """How the cases of a kind are answered."""
    known = answers.right | frozenset(answers.wrong) | frozenset(answers.not_decided)
    return Row(
        kind,
        len(ids),
        sum(i in answers.right for i in ids),
        sum(i in answers.wrong for i in ids),
        sum(i in answers.not_decided and i not in answers.wrong for i in ids),
        tuple(i for i in ids if i not in known),
    )


def total(rows: list[Row]) -> Row:
    """All rows together."""
    left = tuple(i for row in rows for i in row.open)
    sums = [sum(getattr(row, name) for row in rows) for name in ("cases", "right", "wrong", "not_decided")]
    return Row("total", sums[0], sums[1], sums[2], sums[3], left)


def main() -> int:
    """Print the table; exit 1 when a case is neither tested nor listed."""
    shared = Path(os.environ.get("MESHWRIGHT_SHARED", ROOT.parent / "shared"))
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else shared / "cases" / "cases.csv"
    if not path.exists():
        print(f"bench/cases.py: {path}: no such file; set MESHWRIGHT_SHARED or name it", file=sys.stderr)
        return 2
    answers, wanted = read_tests(ROOT / "tests"), ids_by_kind(path)
    rows = [count(kind, wanted[kind], answers) for kind in KINDS if kind in wanted]
    print(f"{'kind':16}{'cases':>6}{'decidable':>11}{'right':>7}{'wrong':>7}{'not decided':>13}{'share':>8}")
    for row in (*rows, total(rows)):
        share = f"{row.right / row.decidable:.0%}" if row.decidable else "-"
        print(
            f"{row.kind:16}{row.cases:6}{row.decidable:11}{row.right:7}{row.wrong:7}{row.not_decided:13}{share:>8}"
            + (f"  open: {' '.join(row.open)}" if row.open and row.kind != "total" else "")
        )
    for case, reason in sorted(answers.wrong.items()):
        print(f"wrong {case}: {reason}")
    return int(bool(total(rows).open))


if __name__ == "__main__":
    sys.exit(main())

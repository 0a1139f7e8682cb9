"""The count of public cases: every one is answered or listed, and enough of them rightly."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import cases
from tests.shared import ROOT, shared_dir

MODULE = '''
"""C001 is only spoken of here."""
NOT_DECIDED = (("C002", "state of a cluster"),)
WRONG = {"C003": "says yes"}
ROWS = [("C004-heads", 1), ("C0055", 2), ("see C006", 3)]

def test_c007_and_c008_together():
    """Text."""

@pytest.mark.parametrize("x", ["C009", "C010-more"])
def test_rows(x):
    """C011, C012: both of them, unlike C013."""

def helper_c014():
    """C015."""
'''


def test_ids_are_read_from_names_docstrings_and_tables() -> None:
    found = cases.read_module(MODULE)
    assert sorted(found.tested) == ["C004", "C007", "C008", "C009", "C010", "C011", "C012"]
    assert found.wrong == {"C003": "says yes"}
    assert found.not_decided == {"C002": "state of a cluster"}


def test_a_case_counts_once_and_wrong_goes_first() -> None:
    answers = cases.Answers(frozenset({"C001", "C002"}), {"C002": "why"}, {"C003": "why"})
    row = cases.count("k", ["C001", "C002", "C003", "C004"], answers)
    assert (row.cases, row.decidable, row.right, row.wrong, row.not_decided) == (4, 3, 1, 1, 1)
    assert row.open == ("C004",)
    assert cases.total([row, row]).open == ("C004", "C004")


def test_ids_by_kind(tmp_path: Path) -> None:
    path = tmp_path / "cases.csv"
    path.write_text("id,kind\nC001,moe\nC002,launch\nC003,moe\n")
    assert cases.ids_by_kind(path) == {"moe": ["C001", "C003"], "launch": ["C002"]}


@pytest.mark.parametrize("kind", cases.KINDS)
def test_every_case_is_answered_or_listed(kind: str) -> None:
    """The aim of 85 % right among what can be decided, kind by kind; all that a command decides for the first two."""
    wanted = cases.ids_by_kind(shared_dir("cases", "cases.csv"))[kind]
    row = cases.count(kind, wanted, cases.read_tests(ROOT / "tests"))
    assert row.open == ()
    assert row.right >= 0.85 * row.decidable
    if kind in {"config-invalid", "launch"}:
        assert row.right == row.decidable

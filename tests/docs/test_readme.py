"""README.zh.md is kept in step with README.md; both say what is built and what is not."""

from __future__ import annotations

import re
import sys
import tomllib
from collections import Counter

import pytest
from bench.scoring import ScoreRow, Summary, summarize

from tests.docs.rendering import text
from tests.docs.test_docs import built_verbs
from tests.shared import ROOT

ENGLISH, CHINESE = "README.md", "README.zh.md"
HAN = re.compile(r"[\u4e00-\u9fff]")


def prose(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)


def code(page: str) -> list[str]:
    return re.findall(r"(?:^<!-- [^\n]*-->\n)*^```.*?^```$", page, flags=re.MULTILINE | re.DOTALL)


def headings(page: str) -> list[int]:
    """Levels of the headings in order."""
    return [len(marks) for marks in re.findall(r"^(#+) ", prose(page), flags=re.MULTILINE)]


def figures(page: str) -> Counter[str]:
    return Counter(re.findall(r"\d+(?:[.,]\d+)*", prose(page)))


def links(page: str) -> list[str]:
    found = re.findall(r"\]\(([^)]+)\)", page)
    return [link for link in found if not link.startswith("README")]


def differences(english: str, chinese: str) -> list[str]:
    """What is not in step."""
    parts = {"headings": headings, "code": code, "figures": figures, "links": links}
    return [name for name, part in parts.items() if part(english) != part(chinese)]


def test_both_languages_say_the_same() -> None:
    english, chinese = text(ENGLISH), text(CHINESE)
    assert figures(english) == figures(chinese)
    assert differences(english, chinese) == []
    assert len(HAN.findall(chinese)) > 500
    assert len(HAN.findall(english)) == 2, "only the link to the Chinese page"


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("## ", "### ", "headings"),
        ("make demo", "make show", "code"),
        ("3.11", "3.12", "figures"),
        ("(docs/plan.md)", "(docs/plans.md)", "links"),
    ],
)
def test_what_is_out_of_step_is_found(old: str, new: str, part: str) -> None:
    changed = text(CHINESE).replace(old, new, 1)
    assert part in differences(text(ENGLISH), changed)


def test_what_is_not_built_is_named_as_missing() -> None:
    built = built_verbs()
    there, _, missing = prose(text(ENGLISH)).partition("Not yet:")
    assert "meshwright plan" in there
    for verb in {"check", "prove", "run", "doctor", "calibrate"} - built:
        assert f"meshwright {verb}" not in there
        assert f"`{verb}`" in missing


def test_the_accuracy_table_is_there_with_a_date() -> None:
    for page in (text(ENGLISH), text(CHINESE)):
        part = page.split("<!-- accuracy -->")[1].split("<!-- /accuracy -->")[0]
        assert part.count("\n|") > 12
        assert re.search(r"\d{4}-\d{2}-\d{2}", part)


def test_accuracy_lines_sum_up_rows_and_leave_none_out() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import accuracy  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    words = tomllib.loads(text("docs/accuracy.toml"))

    def row(source: str, metric: str, predicted: float | None) -> ScoreRow:
        return ScoreRow(source, "m", "m", metric, predicted, 100.0, "bytes")

    rows = [row("torchtitan H100", "peak_memory", 103.0), row("torchtitan H100", "peak_memory", None)]
    held: dict[str, dict[str, Summary]] = {"torchtitan": {"leave one model out": summarize(rows)}}
    for language in (0, 1):
        made = accuracy.table(words, rows, held, language, "2026-01-02").splitlines()
        assert made[2].endswith("| 2 | 1 | 3.00 % | 3.00 % | 3.00 % |")
        assert len(made) == 6
        assert "2026-01-02" in made[5]
    with pytest.raises(ValueError, match="no line of the table sums up elsewhere: peak"):
        accuracy.table(words, [*rows, row("elsewhere", "peak", 1.0)], {}, 0, "2026-01-02")

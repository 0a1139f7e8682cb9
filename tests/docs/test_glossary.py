"""The glossary has every term, each with a Chinese name, a meaning, and a place in the tool that exists."""

from __future__ import annotations

import re

import pytest

from meshwright.specs.layout import parse_layout
from tests.docs.rendering import runner, text

WANTED = [
    *("DP", "TP", "PP", "EP", "SP", "CP", "DCP", "P2P", "NVLink", "RDMA", "ZeRO", "FSDP", "TTFT", "TPOT", "MLA", "GQA"),
    *("ledger", "placement", "layout", "rank class", "KV cache"),
    *("micro-batch", "pipeline bubble", "all-reduce", "all-to-all", "all-gather", "reduce-scatter"),
]
HAN = re.compile(r"[\u4e00-\u9fff]")


def table() -> dict[str, tuple[str, str, str]]:
    """Term (before the comma) to Chinese name, meaning, place."""
    found: dict[str, tuple[str, str, str]] = {}
    for line in text("docs/glossary.md").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] != "Term":
            term, chinese, meaning, place = cells
            found[term.split(",")[0]] = (chinese, meaning, place)
    return found


@pytest.mark.parametrize("term", WANTED)
def test_every_term_is_there(term: str) -> None:
    chinese, meaning, place = table()[term]
    assert HAN.search(chinese)
    assert 40 < len(meaning) < 260
    assert len(re.findall(r"[.:] ", meaning)) <= 2, "one or two sentences"
    assert place


def test_no_term_stands_twice() -> None:
    page = text("docs/glossary.md")
    assert sum(line.startswith("| ") for line in page.splitlines()) == len(table()) + page.count("| Term |")


def test_flags_and_layouts_of_the_glossary_exist() -> None:
    flags = "".join(runner().run(f"meshwright plan {verb} --help")[1] for verb in ("serve", "train"))
    named = 0
    for _, _, place in table().values():
        for code in re.findall(r"`([^`]+)`", place):
            named += 1
            for flag in re.findall(r"--[a-z-]+", code):
                assert flag in flags or flag in {"--models", "--devices"}, code
            if re.fullmatch(r"[a-z_]+=\S+", code):
                parse_layout(code)
    assert named > 30

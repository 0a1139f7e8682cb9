"""docs/doctor.md names every flag, kind and JSON key of ``doctor``, and no others."""

from __future__ import annotations

import json
import re

from meshwright.doctor.findings import KINDS, Finding
from tests.docs.rendering import render, runner, text

PAGE = "docs/doctor.md"


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text(PAGE), flags=re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def first_words(part: str) -> list[str]:
    """What stands in backticks in the first cells of the tables, heads left out."""
    cells = [line.split(" | ")[0] for line in part.splitlines() if line.startswith("| `")]
    return [word.replace("[]", "") for cell in cells for word in re.findall(r"`([^`]+)`", cell)]


def test_every_flag_is_explained() -> None:
    help_text = runner().run("meshwright doctor --help")[1]
    flags = set(re.findall(r"^  (--[a-z-]+)", help_text, re.MULTILINE)) - {"--help"}
    assert sorted(first_words(section("Flags"))) == sorted(flags)


def test_every_kind_is_explained() -> None:
    assert sorted(first_words(section("Verdicts"))) == sorted(KINDS)


def test_every_json_key_is_explained() -> None:
    for block in render.blocks(text(PAGE)):
        if block.file == "train.log":
            runner().write(block)
    code, output = runner().run("meshwright doctor train.log --json")
    data = json.loads(output)
    assert code == 1
    assert sorted(first_words(section("JSON"))) == sorted([*data, *Finding.__slots__])

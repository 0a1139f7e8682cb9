"""docs/check.md names every flag, engine, version and JSON key of ``check``, and no others."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest

from meshwright import engines
from meshwright.judge.check import whose
from tests.docs.rendering import plan, render, runner, text

PAGE = "docs/check.md"
TWO_STAGES = "--on 2xH100-SXM -- vllm serve Qwen/Qwen3-8B -pp 2"
COMMAND = "--on 8xH100-SXM -- vllm serve Qwen/Qwen3-14B -tp 5"


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text(PAGE), flags=re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def rows(part: str) -> list[list[str]]:
    """Cells of the tables, without their heads."""
    lines = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in cells] for cells in lines if not cells[0].startswith(("Flag", "Key", "Engine"))]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def check(arguments: str) -> tuple[int, dict[str, Any]]:
    code, output = runner().run(f"meshwright check --json {arguments}")
    return code, json.loads(output)


def test_every_flag_is_explained() -> None:
    help_text = runner().run("meshwright check --help")[1]
    flags = set(re.findall(r"^  (--[a-z-]+)", help_text, re.MULTILINE)) - {"--help"}
    assert {flag for cells in rows(section("Flags")) for flag in words(cells[0])} == flags


def test_every_engine_is_named_with_its_versions() -> None:
    stated = {words(cells[0])[0]: cells[1].split(", ") for cells in rows(section("Engines and versions"))}
    real = {name: list(engines.profiles(name)) for name in engines.FOLDERS}
    assert stated == real


def test_the_commands_are_understood() -> None:
    """Each form in the table is recognised as its engine's."""
    for cells in rows(section("Engines and versions")):
        name = words(cells[0])[0]
        for form in words(cells[2]):
            if form in {"mpirun", "srun"}:
                continue
            command = {"trtllm-llmapi-launch": "mpirun -np 8 trtllm-llmapi-launch trtllm-serve m"}.get(form, form)
            assert whose(shlex.split(command), None)[0].name == name, form


def keys_of(title: str, part: int) -> set[str]:
    """First words of the keys of one of the tables under a heading."""
    tables = re.split(r"\n\n(?=For a log)", section(title))
    return {key.replace("[]", "") for cells in rows(tables[part]) for key in words(cells[0])}


def test_every_json_key_is_explained() -> None:
    code, data = check(COMMAND)
    assert code == 1
    of_plan = set(plan("serve Qwen/Qwen3-14B --on 8xH100-SXM --layout tp=5"))
    assert set(data) - of_plan | {"verdict", "ok"} == keys_of("JSON", 0)
    understood = next(cells[1] for cells in rows(section("JSON")) if cells[0] == "`understood`")
    assert set(data["understood"]) == set(words(understood))
    for block in render.blocks(text(PAGE)):
        if block.file == "ds_config.json":
            runner().write(block)
    _, training = check("ds_config.json --model llama-3.1-8b --on 1x8xA100-40G")
    for key in ("suggestions", "mended", "mended_files", "misleading"):
        found = next((d[key] for d in (data, training, check(TWO_STAGES)[1]) if d[key]), None)
        stated = next(cells[1] for cells in rows(section("JSON")) if cells[0] == f"`{key}[]`")
        assert found is not None
        assert set(found[0]) == set(words(stated)), key


def test_every_key_of_a_log_is_explained() -> None:
    for block in render.blocks(text(PAGE)):
        if block.file == "boot.log":
            runner().write(block)
    code, data = check("boot.log")
    assert code == 0
    assert set(data) == keys_of("JSON", 1)
    for key in ("holdings", "differences"):
        stated = next(cells[1] for cells in rows(section("JSON")) if cells[0] == f"`{key}[]`")
        assert set(words(stated)) <= set(data[key][0])


@pytest.mark.parametrize(
    ("code", "arguments"),
    [(0, "--on 8xH100-SXM -- vllm serve Qwen/Qwen3-14B -tp 4"), (1, COMMAND), (2, "--on 8xH100-SXM -- make coffee")],
)
def test_exit_codes(code: int, arguments: str) -> None:
    assert f"| {code} |" in section("Exit codes")
    assert runner().run(f"meshwright check {arguments}")[0] == code

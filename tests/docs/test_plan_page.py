"""docs/plan.md names every flag, layout key and JSON key, and no others; docs/strategies.md has every strategy."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from meshwright.specs.cluster_file import _DEVICE, _LINK, _TOP
from meshwright.specs.layout import Fsdp, Layout
from tests.docs.rendering import plan, runner, text

PAGE = "docs/plan.md"
SERVE = "serve llama-3.1-70b --on 2x4xA100-80G --layout tp=4,pp=2"
REFUSED = "serve qwen2.5-14b --on 1x5xA100-80G --layout tp=5"
TRAIN = "train llama-3.1-8b --on 8xH100-SXM --layout dp=8,zero=1 --global-batch 64"


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text(PAGE), flags=re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def codes(part: str, column: int = 0) -> list[str]:
    """Words in backticks in one column of the tables."""
    rows = [line.strip("|").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    return [word for row in rows for word in re.findall(r"`([^`]+)`", row[column])]


def flags_of(verb: str) -> set[str]:
    return set(re.findall(r"^  (--[a-z-]+)", runner().run(f"meshwright plan {verb} --help")[1], re.MULTILINE)) - {
        "--help"
    }


def test_every_flag_is_explained() -> None:
    both = set(re.findall(r"--[a-z][a-z-]+", section("Flags of both: what is shown")))
    assert both <= flags_of("serve") & flags_of("train")
    assert set(codes(section("Flags of `plan serve`"))) | both == flags_of("serve")
    assert set(codes(section("Flags of `plan train`"))) | both == flags_of("train")


def test_every_engine_is_named() -> None:
    help_text = runner().run("meshwright plan serve --help")[1]
    row = next(line for line in text(PAGE).splitlines() if line.startswith("| `--engine`")).split(" | ")[1]
    for name in re.findall(r"`([a-z0-9.-]+)`", row):
        code, output = runner().run(f"meshwright plan serve smollm2-135m --on 1xH100-SXM --engine {name}")
        assert code == 0, output
    stated = re.search(r"--engine <str> +(.+?)\[default", " ".join(help_text.split()))
    assert stated is not None
    wanted = {word for word in re.findall(r"[a-z][a-z0-9.-]*[a-z0-9]", stated[1]) if word not in {"newest"}}
    assert wanted <= set(re.findall(r"`([a-z0-9.-]+)`", row))


def test_every_layout_key_is_explained() -> None:
    part = section("Layout keys")
    named = set(codes(part))
    keys = {f.name for f in fields(Layout)} - {"fsdp"} | {f.name for f in fields(Fsdp)}
    assert keys <= named
    assert named - keys == {"pcp", "vpp", "mbs", "stages"}


def test_every_key_of_a_cluster_file_is_explained() -> None:
    part = section("Model and cluster")
    for key in {*_TOP, *_DEVICE, *_LINK}:
        assert re.search(rf"\b{key}\b", part), key


def stated(prefix: str = "") -> set[str]:
    """Keys that the JSON section names in its first column, under a prefix."""
    found = set()
    for word in codes(section("JSON")):
        key = word.replace("[]", "")
        if prefix and key.startswith(prefix + "."):
            found.add(key.removeprefix(prefix + "."))
        elif not prefix:
            found.add(key.partition(".")[0])
    return found


def meanings(key: str) -> set[str]:
    """Words in backticks that the row of a key explains."""
    for line in section("JSON").splitlines():
        cells = line.strip("|").split(" | ")
        if line.startswith("| ") and f"`{key}`" in cells[0]:
            return set(re.findall(r"`([^`]+)`", cells[1]))
    raise AssertionError(key)


def test_every_json_key_is_explained() -> None:
    serve, train = plan(f"{SERVE} --ledger --strategies"), plan(TRAIN)
    assert set(serve) | set(train) == stated()
    assert set(serve["memory"]) | set(train["memory"]) == stated("memory")


@pytest.mark.parametrize(
    ("key", "words", "pick"),
    [
        ("model", SERVE, lambda d: d["model"]),
        ("cluster", SERVE, lambda d: d["cluster"]),
        ("cost", SERVE, lambda d: d["cost"]),
        ("rules[]", REFUSED, lambda d: d["rules"][0]),
        ("reasons[]", SERVE, lambda d: d["reasons"][0]),
        ("commands[]", SERVE, lambda d: d["commands"][0]),
        ("rejected[]", SERVE, lambda d: d["rejected"][0]),
        ("alternatives[]", SERVE, lambda d: d["alternatives"][0]),
        ("memory.holdings[]", SERVE, lambda d: d["memory"]["holdings"][0]),
        ("memory.ranks[]", SERVE, lambda d: d["memory"]["ranks"][0]),
        ("memory.ranks[]", TRAIN, lambda d: d["memory"]["ranks"][0]),
    ],
)
def test_the_keys_inside_are_explained(key: str, words: str, pick: Any) -> None:
    assert set(pick(plan(words))) <= meanings(key)


def test_exit_codes() -> None:
    part = section("Exit codes")
    for code, words in ((0, SERVE), (1, REFUSED), (2, "serve no-such-model --on 8xH100-SXM")):
        assert f"| {code} |" in part
        assert runner().run(f"meshwright plan {words}")[0] == code


def test_every_strategy_has_a_section() -> None:
    heads = " ".join(re.findall(r"^## (.+)$", text("docs/strategies.md"), flags=re.MULTILINE))
    for row in plan(f"{SERVE} --strategies")["strategies"]:
        name = row["strategy"].partition("-")[0]
        assert re.search(rf"\b{name}\b", heads), name
    assert "FSDP" in heads

"""Every command of the documents runs, ends as it says, and prints what is pasted; every link leads somewhere."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from meshwright.cli.main import app
from tests.docs.rendering import render, runner, text
from tests.shared import ROOT

DOCUMENTS = tuple(name for name in render.DOCUMENTS if (ROOT / name).exists())


@pytest.mark.parametrize("name", DOCUMENTS)
def test_pasted_output_is_what_the_commands_print(name: str) -> None:
    """Each pasted line occurs in the real output, in order, and nothing else is pasted."""
    for block in render.blocks(text(name)):
        if block.file is not None:
            runner().write(block)
        if block.kind != "console":
            continue
        for command, pasted in block.commands():
            code, output = runner().run(command)
            assert code == block.exit_code, (command, output[-1000:])
            real = iter([line.rstrip() for line in output.splitlines()])
            for line in pasted:
                assert line == "..." or line in real, (
                    f"{name}: not in the output of {command!r}: {line!r}; run: python docs/render.py"
                )
            shown = any(line not in {"...", ""} for line in pasted)
            assert shown or " > " in command, f"{name}: no output under {command!r}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_are_rendered(name: str) -> None:
    assert render.render(text(name), runner()) == text(name), f"{name} is out of date; run: python docs/render.py"


def test_a_planted_mistake_is_found(tmp_path: Path) -> None:
    """A changed number, another exit code, and a foreign command do not pass."""
    good = "```console\n$ meshwright plan serve smollm2-135m --on 1x1xA100-40G --layout tp=1\n```\n"
    done = render.render(good, render.Runner(tmp_path))
    assert "weights" in done
    assert render.render(done, render.Runner(tmp_path)) == done
    changed = re.sub(r"rank 0 +\d", "rank 0  9", done)
    assert changed != done
    assert render.render(changed, render.Runner(tmp_path)) == done
    with pytest.raises(ValueError, match="exit 0 instead of 1"):
        render.render("<!-- exit 1 -->\n" + good, render.Runner(tmp_path))
    with pytest.raises(ValueError, match="nothing matches"):
        render.render("<!-- show ^no such line -->\n" + good, render.Runner(tmp_path))
    with pytest.raises(ValueError, match="nothing matches no such line"):
        render.render("<!-- show ^(rank|Why)|no such line -->\n" + good, render.Runner(tmp_path))
    with pytest.raises(ValueError, match="only meshwright is run"):
        render.render("```console\n$ rm -r x\n```\n", render.Runner(tmp_path))


def test_an_output_can_be_kept_in_a_file(tmp_path: Path) -> None:
    page = "```console\n$ meshwright plan serve smollm2-135m --on 1xA100-40G --json > plan.json\n```\n"
    assert render.render(page, render.Runner(tmp_path)) == page
    assert (tmp_path / "plan.json").read_text().startswith("{")
    outside = page.replace("plan.json", "../outside.json")
    render.render(outside, render.Runner(tmp_path))
    assert not (tmp_path.parent / "outside.json").exists()


def test_shortening_keeps_whole_paragraphs() -> None:
    output = "fits: a\ndoes not fit b\n\nWhy\n- one\ntwo\n- three\nrow 1  x\n       y\n"
    assert render.shorten(output, "^- one") == ["...", "- one", "two", "..."]
    assert render.shorten(output, "^fits") == ["fits: a", "does not fit b", "..."]
    assert render.shorten(output, None) == output.rstrip().splitlines()
    table = "head\nrow 1  x\n       y\nrow 2  z\n"
    assert render.shorten(table, "^row 1") == ["...", "row 1  x", "       y", "..."]
    assert render.shorten('{\n  "a": 1,\n  "b": 2\n}', '"b"') == ["...", '  "b": 2', "..."]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_python_examples_run(name: str) -> None:
    failed, _ = doctest.testfile(str(ROOT / name), module_relative=False, encoding="utf-8", verbose=False)
    assert failed == 0


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    page = text(name)
    for target in re.findall(r"\]\(([^)\s]+)\)", page):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = (ROOT / name).parent / path if path else ROOT / name
        assert found.exists(), f"{name}: {target}"
        if anchor:
            assert anchor in anchors(found.read_text(encoding="utf-8")), f"{name}: {target}"


def anchors(page: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    outside = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", outside, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_path_of_a_machine_and_no_verb_that_is_not_built(name: str) -> None:
    page = text(name)
    assert re.search(r"(?<![\w.])/(?:work|home|root|tmp)/", page) is None
    for verb in re.findall(r"^\$ meshwright (\w+)", page, flags=re.MULTILINE):
        assert verb in built_verbs(), f"{name}: {verb} is not built"


def built_verbs() -> set[str | None]:
    return {group.name for group in app.registered_groups} | {command.name for command in app.registered_commands}

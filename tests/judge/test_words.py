"""A pasted command becomes words; nothing in it is run, and no file outside the folder is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.judge.words import Folder, split


def test_words_assignments_and_wrappers() -> None:
    words = split(["sudo", "env", "A=1", "VLLM_PP_LAYER_PARTITION=3,5", "vllm", "serve", "m", "-tp", "2"])
    assert words.argv == ("vllm", "serve", "m", "-tp", "2")
    assert words.env == (("A", "1"), ("VLLM_PP_LAYER_PARTITION", "3,5"))


def test_one_quoted_string_is_split_as_a_shell_would() -> None:
    words = split(["vllm serve 'my model' \\\n  --served-model-name \"a b\" -tp 2"])
    assert words.argv == ("vllm", "serve", "my model", "--served-model-name", "a b", "-tp", "2")


def test_a_second_command_is_not_judged() -> None:
    words = split(["vllm", "serve", "m", "&&", "rm", "-rf", "/"])
    assert words.argv == ("vllm", "serve", "m")
    assert "&&" in words.notes[0]


@pytest.mark.parametrize("word", ["$MODEL", "${MODEL}", "$(reboot)", "`reboot`", "a$(id)b"])
def test_what_only_a_shell_could_resolve_is_named(word: str) -> None:
    assert split(["vllm", "serve", word]).unexpanded == (word,)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no command"),
        (["A=1"], "no command"),
        (["vllm serve 'open"], "cannot be split"),
        (["x" * (1 << 20), "y" * 10], "characters"),
        (["w"] * 20_001, "words"),
        (["vllm", "serve", "a\0b"], "NUL"),
    ],
)
def test_bad_commands_are_one_clear_line(words: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        split(words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "env"),
    [
        ("export A=1; vllm serve m -tp 3", (("A", "1"),)),
        ("export A=1 B=2\nvllm serve m -tp 3", (("A", "1"), ("B", "2"))),
        ("cd /srv/x && A=1 vllm serve m -tp 3", (("A", "1"),)),
        ("# our server\nset -e\nvllm serve m \\\n  -tp 3", ()),
        ("vllm serve m -tp 3;touch x", ()),
        ("vllm serve m -tp 3 > log 2>&1 &", ()),
    ],
)
def test_what_prepares_a_command_is_set_apart(text: str, env: tuple[tuple[str, str], ...]) -> None:
    words = split([text])
    assert words.argv[:5] == ("vllm", "serve", "m", "-tp", "3")
    assert "touch" not in words.argv
    assert words.env == env
    assert len(words.notes) < 3


def test_json_in_quotes_stays_one_word() -> None:
    assert split(["""vllm serve m --x '{"a": "b;c & d"}'"""]).argv[-1] == '{"a": "b;c & d"}'


def test_folders_and_tokens_are_not_called_unexpanded() -> None:
    assert split(["docker run -v $HOME/.cache:/root -e HF_TOKEN=${HF_TOKEN} i m -tp $TP"]).unexpanded == ("$TP",)


@given(st.lists(st.text(max_size=30), max_size=12))
@settings(max_examples=150, deadline=None)
def test_any_words_are_words_or_one_clear_line(words: list[str]) -> None:
    said, argv = "", ()
    try:
        argv = split(words).argv
    except InputError as error:
        said = str(error)
    assert bool(argv) != bool(said)
    assert "\n" not in said


def test_files_come_from_inside_the_folder_only(tmp_path: Path) -> None:
    inside, outside = tmp_path / "here", tmp_path / "secret.yaml"
    inside.mkdir()
    outside.write_text("a: 1")
    (inside / "c.yaml").write_text("b: 2")
    (inside / "link.yaml").symlink_to(outside)
    read = Folder(inside)
    assert read("c.yaml") == b"b: 2"
    assert read("absent.yaml") is None
    for name in ("../secret.yaml", str(outside), "link.yaml"):
        with pytest.raises(InputError, match="outside"):
            read(name)
    with pytest.raises(InputError, match="not a regular file"):
        read(".")

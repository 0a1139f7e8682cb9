"""A tokenizer file is a stranger's: whatever it does ends in one line, and in bounded time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")

from meshwright.errors import InputError
from meshwright.runtime.tokenizer import decode, encode, usable

BPE: dict[str, Any] = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
#: A pattern that backtracks: 2 s for 34 letters, until its engine gives up with a panic.
HARD = {"type": "Split", "pattern": {"Regex": "(a|aa)+$b"}, "behavior": "Isolated", "invert": False}
#: Names a special token that it does not define.
UNDEFINED = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}


def write(folder: Path, **fields: Any) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": BPE, **fields}))
    return folder


def test_text_to_ids_and_back(tmp_path: Path) -> None:
    assert encode(write(tmp_path), ["abba", "b"]) == [[2, 1, 0], [1]]
    assert decode(tmp_path, [[2, 1, 0], []]) == ["ab b a", ""]


@pytest.mark.parametrize(
    "fields",
    [
        {"model": {**BPE, "merges": [["a", "z"]]}},
        {"model": {"type": "Unigram", "unk_id": 5, "vocab": []}},
        {"model": 7},
        {"pre_tokenizer": {**HARD, "pattern": {"Regex": "("}}},
        {"pre_tokenizer": HARD},
        {"post_processor": UNDEFINED},
    ],
)
def test_hostile_files_end_in_one_line(
    tmp_path: Path, fields: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError) as caught:
        encode(write(tmp_path, **fields), ["a" * 40])
    assert "tokenizer.json: not a tokenizer" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")  # the package panics with a backtrace of its own


def test_a_slow_one_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no answer within 0\.01 s"):
        encode(write(tmp_path), ["a"], timeout_s=0.01)


def test_without_a_file(tmp_path: Path) -> None:
    assert not usable(tmp_path)
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        encode(tmp_path, ["a"])

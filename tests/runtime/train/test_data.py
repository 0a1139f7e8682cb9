"""Text becomes one stream once, every sample is read once by somebody, and what is no corpus ends in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.errors import InputError
from meshwright.runtime.train import corpus as corpora
from meshwright.runtime.train.corpus import read_corpus
from meshwright.runtime.train.data import Samples

VOCAB, END = 300, 256


def _bytes(folder: Path, *data: Path, **changes: Any) -> corpora.Corpus:
    options = {"vocab": VOCAB, "end": END, "tokenizer": None, "folder": folder / "made", **changes}
    return read_corpus(list(data), **options)


def test_documents_are_closed_and_packed_in_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "b.jsonl").write_text('{"text": "three"}\n\n{"text": "four"}\n')
    (tmp_path / "text" / "a.txt").write_text("one\ntwo")
    (tmp_path / "text" / "skipped.csv").write_text("no")
    corpus = _bytes(tmp_path, tmp_path / "text")
    want = [*b"one\ntwo", END, *b"three", END, *b"four", END]
    assert list(corpus.open()) == want
    assert (corpus.tokens, corpus.documents, corpus.width, corpus.largest) == (len(want), 3, 2, END)


def test_a_long_document_is_cut_for_the_tokenizer_and_stays_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"line {n}\n" for n in range(400))
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr(corpora, "TEXT_CHARACTERS", 100)
    monkeypatch.setattr(corpora, "CALL_CHARACTERS", 1000)
    corpus = _bytes(tmp_path, tmp_path / "a.txt")
    assert bytes(np.asarray(corpus.open()[:-1], dtype=np.uint8)).decode() == text
    assert corpus.documents == 1


def test_text_is_tokenised_once_and_again_when_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("some text")
    first = _bytes(tmp_path, tmp_path / "a.txt")
    with monkeypatch.context() as patch:
        patch.setattr(corpora, "_tokenised", lambda *a: pytest.fail("tokenised again"))
        assert _bytes(tmp_path, tmp_path / "a.txt") == first
    (tmp_path / "a.txt").write_text("some texts")
    assert _bytes(tmp_path, tmp_path / "a.txt").fingerprint != first.fingerprint


def test_the_tokenizer_of_a_model_is_used_without_the_marks_of_a_prompt(tmp_path: Path) -> None:
    """Words a, b, c; the tokenizer puts [S] before a prompt, which does not belong between documents."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 2, "[S]": 3}, unk_token="c"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.post_processor = tokenizers.processors.TemplateProcessing("[S] $0", None, [("[S]", 3)])
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "t.jsonl").write_text('{"text": "a b a"}\n{"text": "b"}\n')
    assert list(_bytes(tmp_path, tmp_path / "t.jsonl", vocab=9, end=8, tokenizer=tmp_path).open()) == [0, 1, 0, 8, 1, 8]


@pytest.mark.parametrize("ending", [".npy", ".bin"])
def test_token_ids_are_taken_as_they_are(tmp_path: Path, ending: str) -> None:
    ids = np.arange(200, dtype=np.uint16)
    path = tmp_path / f"ids{ending}"
    np.save(path, ids) if ending == ".npy" else ids.tofile(path)
    corpus = _bytes(tmp_path, path)
    assert corpus.tokens == 200
    assert np.array_equal(corpus.open(), ids)
    assert not (tmp_path / "made").exists()


def test_samples_tile_the_stream_and_labels_are_the_tokens_behind(tmp_path: Path) -> None:
    ids = np.arange(50, dtype=np.uint16)
    np.save(tmp_path / "ids.npy", ids)
    samples = Samples(_bytes(tmp_path, tmp_path / "ids.npy"), seq=7, seed=5)
    assert samples.order.count == 7
    whole = samples.batch(0, 7, 1, 0)
    assert sorted(whole.ids[:, 0].tolist()) == [0, 7, 14, 21, 28, 35, 42]
    assert torch.equal(whole.labels, whole.ids + 1)
    parts = [samples.batch(0, 6, 3, index).ids for index in range(3)]
    assert torch.equal(torch.cat(parts), whole.ids[:6])


def test_reading_data_leaves_random_generators_alone(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(50, dtype=np.uint16))
    torch.manual_seed(1)
    before, drawn = torch.get_rng_state(), np.random.get_state()[2]
    Samples(_bytes(tmp_path, tmp_path / "ids.npy"), seq=7, seed=5).batch(0, 6, 3, 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.random.get_state()[2] == drawn


def _write(name: str, content: str | bytes) -> Callable[[Path], list[Path]]:
    def make(folder: Path) -> list[Path]:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return [folder / name]

    return make


def _array(array: np.ndarray[Any, Any]) -> Callable[[Path], list[Path]]:
    def make(folder: Path) -> list[Path]:
        np.save(folder / "ids.npy", array, allow_pickle=True)
        return [folder / "ids.npy"]

    return make


def _empty(folder: Path) -> list[Path]:
    (folder / "empty").mkdir()
    return [folder / "empty"]


BAD: dict[str, tuple[Callable[[Path], list[Path]], str]] = {
    "missing": (lambda folder: [folder / "none.txt"], "no such file or folder"),
    "empty folder": (_empty, "no .txt or .jsonl file"),
    "not text": (_write("a.txt", b"\xff\xfe\xff"), "no UTF-8 text"),
    "not json": (_write("a.jsonl", '{"text": "a"}\n{"words": 1}\n'), "line 2 is no JSON object"),
    "deep json": (_write("a.jsonl", "[" * 100_000), "line 1 is no JSON object"),
    "floats": (_array(np.ones(9)), "one row of whole numbers"),
    "square": (_array(np.ones((3, 3), dtype=np.int64)), "one row of whole numbers"),
    "objects": (_array(np.array([{}, {}], dtype=object)), "no file of token ids"),
    "too large": (_array(np.array([1, 400])), "token id 400 is outside the vocabulary of 300"),
    "negative": (_array(np.array([1, -1])), "token id -1 is outside"),
    "no array": (_write("ids.npy", "text"), "no file of token ids"),
    "empty ids": (_write("ids.bin", ""), "no file of token ids"),
    "both": (lambda f: [*_write("a.txt", "a")(f), *_write("b.bin", "a")(f)], "token ids stand alone"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_corpus_ends_in_one_line(tmp_path: Path, case: str) -> None:
    make, says = BAD[case]
    with pytest.raises(InputError, match=says) as error:
        _bytes(tmp_path, *make(tmp_path))
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "made").glob("*")) if (tmp_path / "made").exists() else True


def test_no_end_token_short_corpus_and_a_lost_stream(tmp_path: Path) -> None:
    (tmp_path / "two.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    with pytest.raises(InputError, match="2 documents and the model has no end token; give --eos"):
        _bytes(tmp_path, tmp_path / "two.jsonl", end=None)
    corpus = _bytes(tmp_path, tmp_path / "two.jsonl")
    with pytest.raises(InputError, match="4 tokens of data; one sequence of 8 needs 9: lower --seq"):
        Samples(corpus, 8, 0)
    Path(corpus.file).write_bytes(b"ab")
    with pytest.raises(InputError, match="1 tokens, 4 were written"):
        corpus.open()
    with pytest.raises(InputError, match="says nothing usable"):
        corpora.corpus_from(json.loads('{"file": 3}'), "state.json")

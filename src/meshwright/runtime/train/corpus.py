"""Text into one stream of token ids, once: documents one after the other, each closed by the end token. No torch.

The stream lies in a file of 16 bit (32 where the vocabulary is larger) numbers, which every rank maps. It is written
into the run's folder, so a run that goes on needs neither the text nor the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from meshwright.errors import InputError
from meshwright.runtime.tokenizer import FILE, encode, usable

if TYPE_CHECKING:
    import numpy as np

#: Files of a folder that are read.
ENDINGS = (".txt", ".jsonl")
#: Characters of one call of the tokenizer, and of one text in it: a longer document is cut at the end of a line.
CALL_CHARACTERS = 8 << 20
TEXT_CHARACTERS = 1 << 20
MAX_FILES = 100_000
#: Bound on tokenising ``CALL_CHARACTERS``.
CALL_S = 300.0
#: Blocks of a file of tokens that its fingerprint is made of.
SAMPLED, BLOCK = 64, 1 << 16
#: Name of the tokenizer that takes the bytes of UTF-8 as ids, with 256 as end token.
BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Corpus:
    """One stream of token ids.

    Attributes:
        file: raw little-endian numbers, or ``.npy``.
        width: bytes of a number; 0: ``.npy``, which says so itself.
        tokens: how many. documents: how many of them (0: not known).
        fingerprint: of what it was made from; a run goes on with the same only.
        largest: largest id.
    """

    file: str
    width: int
    tokens: int
    documents: int
    fingerprint: str
    largest: int

    def samples(self, seq: int) -> int:
        """Sequences of ``seq`` tokens (and the token behind each) in it."""
        return max(0, (self.tokens - 1) // seq)

    def open(self) -> np.ndarray[Any, Any]:
        """The ids, mapped.

        Raises:
            InputError: the file is gone or has another length.
        """
        import numpy as np

        try:
            if not self.width:
                return np.load(self.file, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
            ids = np.memmap(self.file, dtype=f"<u{self.width}", mode="r")
        except (OSError, ValueError) as error:
            raise InputError(f"{self.file}: cannot be read any more ({error}); give --data again") from None
        if len(ids) != self.tokens:
            raise InputError(f"{self.file}: {len(ids)} tokens, {self.tokens} were written; give --data again")
        return ids


def read_corpus(data: Sequence[Path], vocab: int, end: int | None, tokenizer: Path | None, folder: Path) -> Corpus:
    """The stream of a corpus; tokenised into ``folder`` unless it lies there already.

    Args:
        data: text files (``.jsonl``: a document a line, under "text"; else a document a file), folders of them, or
            one file of token ids (``.npy``, or ``.bin``: raw numbers of 16 bits, 32 for a vocabulary over 65,536).
        vocab: of the model. end: token that closes a document; None: there is none.
        tokenizer: folder with ``tokenizer.json``; None: bytes as they are.
        folder: for the stream.

    Raises:
        InputError: nothing to read, not text, no tokenizer, ids outside the vocabulary.
    """
    if len(data) == 1 and data[0].suffix in {".npy", ".bin"}:
        return _ready(data[0], vocab)
    files = list(_files(data))
    if tokenizer is not None and not usable(tokenizer):
        raise InputError(f"{tokenizer}: no {FILE} (or no package tokenizers); give token ids (.npy) or --tokenizer")
    mark = _fingerprint(files, vocab, end, tokenizer)
    made = folder / f"tokens-{mark[:16]}.bin"
    about = made.with_suffix(".json")
    if about.is_file():
        corpus = corpus_from(json.loads(about.read_text("utf-8")), str(about))
        corpus.open()
        return corpus
    corpus = _tokenised(files, vocab, end, tokenizer, made, mark)
    about.write_text(json.dumps(asdict(corpus)) + "\n", encoding="utf-8")
    return corpus


def corpus_from(raw: Any, where: str) -> Corpus:
    """A corpus as it was written down.

    Raises:
        InputError: malformed.
    """
    try:
        corpus = Corpus(**raw)
        numbers = (corpus.width, corpus.tokens, corpus.documents, corpus.largest)
        right = all(type(n) is int and n >= 0 for n in numbers) and corpus.width in {0, 2, 4}
        right = right and isinstance(corpus.file, str) and isinstance(corpus.fingerprint, str)
    except TypeError:
        right = False
    if not right:
        raise InputError(f"{where}: says nothing usable of the data; give --data")
    return corpus


def _ready(path: Path, vocab: int) -> Corpus:
    """A file of ids that someone else made."""
    import numpy as np

    width = 0 if path.suffix == ".npy" else _width(vocab)
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False) if not width else np.memmap(path, f"<u{width}", "r")
        mark = _sampled(path)
    except (OSError, ValueError) as error:
        raise InputError(f"--data {path}: no file of token ids ({str(error).splitlines()[0][:80]})") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        raise InputError(f"--data {path}: {ids.dtype} of shape {ids.shape}; one row of whole numbers is needed")
    low, high = 0, 0
    for start in range(0, len(ids), 1 << 24):
        part = ids[start : start + (1 << 24)]
        low, high = min(low, int(part.min())), max(high, int(part.max()))
    if low < 0 or high >= vocab:
        raise InputError(
            f"--data {path}: token id {low if low < 0 else high} is outside the vocabulary of {vocab}; it was made for "
            "another model"
        )
    return Corpus(str(path.resolve()), width, len(ids), 0, mark, high)


def _width(vocab: int) -> int:
    return 2 if vocab <= 1 << 16 else 4


def _sampled(path: Path) -> str:
    """Fingerprint of a large file: its length and blocks over all of it."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for number in range(SAMPLED):
            file.seek(max(0, size - BLOCK) * number // (SAMPLED - 1))
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def _files(data: Sequence[Path]) -> Iterator[Path]:
    """Every file, folders in order of their names."""
    count = 0
    for path in data:
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix in ENDINGS and p.is_file())
            if not found:
                raise InputError(f"--data {path}: no {' or '.join(ENDINGS)} file in it")
        elif path.is_file():
            if path.suffix in {".npy", ".bin"}:
                raise InputError(f"--data {path}: token ids stand alone; give one file of them, or text")
            found = [path]
        else:
            raise InputError(f"--data {path}: no such file or folder")
        count += len(found)
        if count > MAX_FILES:
            raise InputError(f"--data: more than {MAX_FILES} files; join them")
        yield from found


def _fingerprint(files: Sequence[Path], vocab: int, end: int | None, tokenizer: Path | None) -> str:
    """Of the content of all files and of what makes tokens of it."""
    digest = hashlib.sha256(f"{vocab} {end}".encode())
    for path in [*files, *([tokenizer / FILE] if tokenizer else [])]:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _tokenised(
    files: Sequence[Path], vocab: int, end: int | None, tokenizer: Path | None, made: Path, mark: str
) -> Corpus:
    """Write the stream, whole or not at all."""
    import numpy as np

    made.parent.mkdir(parents=True, exist_ok=True)
    new = made.with_name(f".{made.name}.{os.getpid()}")
    width, tokens, documents, largest = _width(vocab), 0, 0, 0
    try:
        with new.open("wb") as out:
            for ids, closes in _ids(files, tokenizer):
                documents += closes
                if closes and end is None and documents > 1:
                    raise InputError(f"--data: {documents} documents and the model has no end token; give --eos")
                row = np.asarray([*ids, *([end] if closes and end is not None else [])], dtype=np.int64)
                if len(row) and (high := int(row.max())) >= vocab:
                    raise InputError(
                        f"--data: the tokenizer gives id {high}, the vocabulary has {vocab}; another model's"
                    )
                largest = max(largest, int(row.max()) if len(row) else 0)
                tokens += len(row)
                out.write(row.astype(f"<u{width}").tobytes())
            out.flush()
            os.fsync(out.fileno())
        os.replace(new, made)
    finally:
        new.unlink(missing_ok=True)
    return Corpus(str(made.resolve()), width, tokens, documents, mark, largest)


def _ids(files: Sequence[Path], tokenizer: Path | None) -> Iterator[tuple[Sequence[int], bool]]:
    """``(ids, whether a document ends here)`` of every piece of text."""
    for call in _calls(_texts(files)):
        if tokenizer is None:
            rows: Iterable[Sequence[int]] = (text.encode("utf-8") for text, _ in call)
        else:
            rows = encode(tokenizer, [text for text, _ in call], CALL_S, special=False)
        yield from zip(rows, (closes for _, closes in call), strict=True)


def _calls(texts: Iterator[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """Texts, as many as one call of the tokenizer takes."""
    call: list[tuple[str, bool]] = []
    size = 0
    for text, closes in texts:
        call.append((text, closes))
        size += len(text)
        if size >= CALL_CHARACTERS:
            yield call
            call, size = [], 0
    if call:
        yield call


def _texts(files: Sequence[Path]) -> Iterator[tuple[str, bool]]:
    """``(text, whether a document ends behind it)``: long documents in pieces."""
    for path in files:
        try:
            with path.open(encoding="utf-8", newline="") as file:
                yield from _lines(file, path) if path.suffix == ".jsonl" else _pieces(file)
        except UnicodeDecodeError as error:
            raise InputError(f"--data {path}: no UTF-8 text ({error.reason} near byte {error.start})") from None
        except OSError as error:
            raise InputError(f"--data {path}: cannot be read ({error.strerror})") from None


def _pieces(file: IO[str]) -> Iterator[tuple[str, bool]]:
    """A document, cut behind the ends of lines."""
    text = file.read(TEXT_CHARACTERS)
    while text:
        text += file.readline(TEXT_CHARACTERS) if not text.endswith("\n") else ""
        after = file.read(TEXT_CHARACTERS)
        yield text, not after
        text = after


def _lines(file: IO[str], path: Path) -> Iterator[tuple[str, bool]]:
    """A document a line."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise InputError(f'--data {path}: line {number} is no JSON object with "text"')
        yield text, True

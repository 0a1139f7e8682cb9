"""Text to token ids and back, by the ``tokenizer.json`` of a checkpoint, in a process of its own.

The file is a stranger's. The package that reads it may panic, print a native backtrace or match a pattern for ever; a
process apart can be stopped and keeps what it prints to itself. No torch.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import InputError

MAX_BYTES = 64 << 20
TIMEOUT_S = 60.0
FILE = "tokenizer.json"

#: Program of the process apart: a job as JSON on the standard input, the answer as JSON on the standard output.
APART = """
import json, sys
job = json.load(sys.stdin)
try:
    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_file(job["file"])
    out = [tokenizer.encode(text, add_special_tokens=job["special"]).ids for text in job["texts"]]
    out += [tokenizer.decode(ids) for ids in job["ids"]]
except BaseException as error:
    print(json.dumps({"error": str(error)[:80]}))
else:
    print(json.dumps({"out": out}))
"""


def usable(folder: Path) -> bool:
    """Whether a folder has a tokenizer and the package that reads it is installed."""
    return (folder / FILE).is_file() and importlib.util.find_spec("tokenizers") is not None


def encode(
    folder: Path, texts: Sequence[str], timeout_s: float = TIMEOUT_S, *, special: bool = True
) -> list[list[int]]:
    """Token ids of every text; ``special``: with the tokens that the tokenizer puts around a prompt.

    Raises:
        InputError: no usable tokenizer, or one that fails or is too slow on a text.
    """
    return list(_apart(folder, timeout_s, texts=list(texts), ids=[], special=special))


def decode(folder: Path, ids: Sequence[Sequence[int]], timeout_s: float = TIMEOUT_S) -> list[str]:
    """Text of every list of ids.

    Raises:
        InputError: as ``encode``.
    """
    return list(_apart(folder, timeout_s, texts=[], ids=[list(row) for row in ids], special=True))


def _apart(folder: Path, timeout_s: float, **work: Any) -> Any:
    file = folder / FILE
    if not usable(folder):
        raise InputError(f"{folder}: no {FILE} (or no package tokenizers); give --prompt-ids")
    size = file.stat().st_size
    if size > MAX_BYTES:
        raise InputError(f"{file}: {size} bytes; at most {MAX_BYTES} are read")
    job = json.dumps({"file": str(file), **work})
    try:
        done = subprocess.run(
            [sys.executable, "-c", APART], input=job, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"{file}: no answer within {timeout_s:g} s; not a usable tokenizer") from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise InputError(f"{file}: reading it ended with exit code {done.returncode}; not a tokenizer") from None
    if "error" in answer:
        said = " ".join(str(answer["error"]).split())
        raise InputError(f"{file}: not a tokenizer that can read this ({said})")
    return answer["out"]

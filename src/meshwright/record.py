"""``python -m meshwright.record [--out DIR] [--matmuls] prog.py ...``: the ledger of any torch program.

Under torchrun: ``torchrun --nproc-per-node 2 -m meshwright.record prog.py ...``. Every rank writes
``DIR/rankR.jsonl`` (``meshwright-ledger`` unless said otherwise) while it runs. What the program does and its exit
code are its own.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from meshwright.errors import InputError, MeshwrightError

FOLDER = "meshwright-ledger"


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m meshwright.record",
        description="Run a torch program and write down every collective of this rank. Works under torchrun: "
        "torchrun --nproc-per-node 2 -m meshwright.record prog.py",
    )
    parser.add_argument("--out", type=Path, default=Path(FOLDER), help=f"folder of the ledgers (default: {FOLDER})")
    parser.add_argument("--matmuls", action="store_true", help="also record matrix products (slows every op)")
    parser.add_argument("program", help="a Python file, or a module behind -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    return parser.parse_args(words)


def _rank() -> int:
    """Global rank that torchrun names in the environment; 0 without."""
    text = os.environ.get("RANK", "0")
    if not text.isdecimal() or int(text) >= 1 << 31:
        raise InputError(f"RANK={text[:20]!r} in the environment is not a rank; start the program with torchrun")
    return int(text)


def _run(program: str, arguments: list[str]) -> None:
    """Run the program as ``python program`` would."""
    sys.argv = [program, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
    runpy.run_path(program, run_name="__main__")


def record(words: list[str]) -> None:
    """Run a program under the recorder; whatever it raises passes through.

    Raises:
        InputError: no such program, no torch, or a folder that cannot be written.
    """
    options = _arguments(words)
    if not Path(options.program).is_file():
        raise InputError(f"program {options.program[:200]!r} is no file")
    rank = _rank()
    try:
        from meshwright.runtime.ledger_file import LedgerFile
        from meshwright.runtime.record import Recorder
    except ModuleNotFoundError as error:
        raise InputError(f"recording needs {error.name}: pip install 'meshwright[run]'") from None
    recorder = Recorder(rank=rank, matmuls=options.matmuls)
    recorder.meta["program"] = " ".join([options.program, *options.arguments])[:4000]
    recorder.meta["world"] = os.environ.get("WORLD_SIZE", "1")[:20]
    file = LedgerFile(recorder, options.out / f"rank{rank}.jsonl")
    try:
        with recorder:
            _run(options.program, options.arguments)
    finally:
        file.close()


def main() -> None:
    """Command line; errors of ours are one line, those of the program are its own."""
    try:
        record(sys.argv[1:])
    except MeshwrightError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()

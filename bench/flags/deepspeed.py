"""Flags of the ``deepspeed`` launcher and keys of its JSON, read as text: ``python -m bench.flags.deepspeed SDIST``.

Launcher flags: ``launcher/runner.py parse_args``. Keys are made by ``bench.flags.deepspeed_keys``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.flags.reader import flags_of
from bench.flags.sources import Sources
from meshwright.engines.base import FlagTable
from meshwright.engines.flagtable import table_to

TARGET = Path(__file__).parents[2] / "src/meshwright/engines/deepspeed"


def version_of(path: Path) -> str:
    """Version in the file name of a source distribution."""
    return path.name.removesuffix(".tar.gz").rpartition("-")[2]


def table(path: Path) -> FlagTable:
    """Flag table of the launcher."""
    module = Sources(path, "deepspeed").module("deepspeed.launcher.runner")
    assert module is not None
    found = tuple(flags_of(module.function("parse_args"), module))
    return FlagTable("deepspeed", version_of(path), path.name, found)


def main() -> None:
    """Write ``flags_<version>.json`` beside the engine."""
    made = table(Path(sys.argv[1]))
    (TARGET / f"flags_{made.version}.json").write_text(table_to(made), encoding="ascii")
    print(f"{len(made.flags)} flags of {made.source}")


if __name__ == "__main__":
    main()

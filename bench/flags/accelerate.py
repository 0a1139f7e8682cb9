"""Flags of ``accelerate launch`` from its wheel, read as text: ``python -m bench.flags.accelerate WHEEL``.

``commands/launch.py launch_command_parser``; the parser takes hyphens for underscores (``CustomArgumentParser``
registers both spellings) and no prefixes (``allow_abbrev=False``).
"""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import replace
from pathlib import Path

from bench.flags.reader import Wheel, flags_of
from meshwright.engines.base import Flag, FlagTable
from meshwright.engines.flagtable import table_to

TARGET = Path(__file__).parents[2] / "src/meshwright/engines/accelerate"


def both(flag: Flag) -> Flag:
    """The flag with its hyphenated spelling among the aliases."""
    longs = [n for n in (flag.name, *flag.aliases) if n.startswith("--") and "_" in n]
    return replace(flag, aliases=(*flag.aliases, *(n.replace("_", "-") for n in longs)))


def table(path: Path) -> FlagTable:
    """Flag table of one wheel."""
    module = Wheel(path).module("accelerate.commands.launch")
    assert module is not None
    found = tuple(both(f) for f in flags_of(module.function("launch_command_parser"), module))
    version = path.name.split("-")[1]
    return FlagTable("accelerate", version, path.name, found, prefixes=False)


def config_keys(path: Path) -> list[str]:
    """Keys of the YAML: fields of ``BaseConfig`` and ``ClusterConfig``, and old ones that ``process_config`` takes."""
    module = Wheel(path).module("accelerate.commands.config.config_args")
    assert module is not None
    keys = {"fp16", "dynamo_backend"}
    for name in ("BaseConfig", "ClusterConfig"):
        found = module.find(name)
        assert found is not None
        assert isinstance(found.node, ast.ClassDef)
        keys |= {ast.unparse(i.target) for i in found.node.body if isinstance(i, ast.AnnAssign)}
    return sorted(keys)


def main() -> None:
    """Write ``flags_<version>.json`` and ``config_<version>.json`` beside the engine."""
    made = table(Path(sys.argv[1]))
    known = {"version": made.version, "source": made.source, "keys": config_keys(Path(sys.argv[1]))}
    (TARGET / f"config_{made.version}.json").write_text(json.dumps(known, indent=1) + "\n", encoding="ascii")
    (TARGET / f"flags_{made.version}.json").write_text(table_to(made), encoding="ascii")
    print(f"{len(made.flags)} flags of {made.source}")


if __name__ == "__main__":
    main()

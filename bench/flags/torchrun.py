"""Flag table of torchrun from torch's source, read as text: ``python -m bench.flags.torchrun SITE_PACKAGES VERSION``.

``SITE_PACKAGES`` is a folder that holds ``torch/distributed/run.py`` (an unpacked wheel or an environment's
``site-packages``). Two actions are torch's own (``distributed/argparse_util.py``): ``env`` stores a value and takes
its default from ``PET_<NAME>``; ``check_env`` is a switch with the same default.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from pathlib import Path

from bench.flags.reader import Module, add_argument, flag_of
from bench.flags.sources import Sources
from meshwright.engines.base import Flag, FlagTable
from meshwright.engines.flagtable import table_to

TARGET = Path(__file__).parents[2] / "src/meshwright/engines/torchrun"

#: ``torch.distributed.launch`` knew it; ``torchrun`` always passes the rank in the environment.
REMOVED = {"--use-env": "LOCAL_RANK of the environment", "--use_env": "LOCAL_RANK of the environment"}


def flags(module: Module) -> list[Flag]:
    """Every flag of ``get_args_parser``."""
    found = []
    for node in ast.walk(module.function("get_args_parser")):
        call = add_argument(node)
        if call is None or not any(n.startswith("-") for n in call.names):
            continue
        flag = flag_of(call, module)
        action = call.keywords.get("action")
        if isinstance(action, ast.Name) and action.id == "check_env":
            flag = replace(flag, takes="switch", type="bool")
        found.append(flag)
    return found


def table(folder: Path, version: str) -> FlagTable:
    """Flag table of one torch version."""
    module = Sources(folder, "torch/distributed/run.py").module("torch.distributed.run")
    assert module is not None
    source = f"torch {version} torch/distributed/run.py"
    return FlagTable("torchrun", version, source, tuple(flags(module)), removed=REMOVED)


def main() -> None:
    """Write ``flags_<version>.json`` beside the engine."""
    made = table(Path(sys.argv[1]), sys.argv[2])
    (TARGET / f"flags_{made.version}.json").write_text(table_to(made), encoding="ascii")
    print(f"{len(made.flags)} flags of {made.source}")


if __name__ == "__main__":
    main()

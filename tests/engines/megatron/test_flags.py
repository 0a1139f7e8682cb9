"""The flag table of Megatron-core 0.19, and how it is read from a wheel."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from bench.flags.megatron import table

from meshwright.engines.flagtable import find_flag, rejected
from meshwright.engines.megatron import ENGINE

ARGUMENTS = """
import argparse
def add_megatron_arguments(parser):
    parser = _add_some(parser)
    return parser
def _add_some(parser):
    hidden = ["secret"]
    factory = ArgumentGroupFactory(Child, exclude=hidden)
    group = factory.build_group(parser, "x")
    group.add_argument('--tp', '--tensor', type=int, default=1)
    group.add_argument('--names', nargs='+', type=str, choices=['a', 'b'])
    group.add_argument('--no-fusion', action='store_false', dest='fusion')
    return parser
def _add_unused(parser):
    parser.add_argument('--never')
"""
CONFIG = """
@dataclass
class Parent:
    depth: int = 3
    mode: Literal["x", "y"] = "x"
@dataclass
class Child(Parent):
    secret: int = 1
    fast: bool = False
    safe: bool = True
    named: bool = field(default=True, metadata={"argparse_meta": {"arg_names": ["--without-name"]}})
    pair: Optional[List[int]] = None
    made: int = field(init=False, default=0)
raise SystemExit("imported")
"""


def test_a_wheel_is_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "megatron_core-9.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("megatron/training/arguments.py", ARGUMENTS)
        z.writestr("megatron/training/config.py", CONFIG)
    made = table(path)
    assert (made.version, made.source, made.prefixes) == ("9.1", path.name, False)
    flags = {f.name: f for f in made.flags}
    assert set(flags) == {
        "--tp", "--names", "--no-fusion", "--depth", "--mode", "--fast", "--no-safe", "--without-name", "--pair",
    }  # fmt: skip
    assert flags["--tp"].aliases == ("--tensor",)
    assert (flags["--names"].takes, flags["--names"].choices) == ("list", ("a", "b"))
    assert flags["--no-safe"].aliases == ("--disable-safe",)
    assert (flags["--pair"].takes, flags["--pair"].type) == ("list", "int")
    assert (flags["--mode"].type, flags["--mode"].choices) == ("choice", ("x", "y"))


@pytest.mark.parametrize(
    "name",
    [
        "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size", "--num-layers",
        "--expert-model-parallel-size", "--expert-tensor-parallel-size", "--sequence-parallel", "--micro-batch-size",
        "--global-batch-size", "--use-distributed-optimizer", "--use-torch-fsdp2", "--seq-length",
        "--recompute-granularity", "--num-query-groups", "--moe-layer-freq", "--pipeline-model-parallel-layout",
        "--num-virtual-stages-per-pipeline-rank", "--decoder-first-pipeline-num-layers", "--vocab-size", "--mock-data",
    ],
)  # fmt: skip
def test_the_table_knows(name: str) -> None:
    assert find_flag(name, ENGINE.flags()) is not None


def test_the_parser_takes_no_prefixes_and_no_underscores() -> None:
    assert rejected(["--num-layer", "3"], ENGINE.flags(), 1)
    assert rejected(["--num_layers", "3"], ENGINE.flags(), 1)
    assert not rejected(["--num-layers", "3", "--bf16", "--recompute-modules", "core_attn", "mlp"], ENGINE.flags(), 0)


def test_removed_flags_are_unknown_and_their_successors_known() -> None:
    flags = ENGINE.flags()
    known = {n for f in flags.flags for n in (f.name, *f.aliases)}
    for old, new in flags.removed.items():
        assert old not in known
        if new:
            assert new.split()[0] in known, new

"""The script that reads SGLang's flags, on a wheel made here, and on the real one where it lies."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
from bench.flags import sglang

from meshwright.engines.base import Flag
from meshwright.engines.flagtable import load_table, table_to

FIELDS = """
from typing import List, Literal, Optional
import argparse, json
from sglang.srt.arg_groups.arg_utils import A, Arg, Derived
from sglang.srt.arg_groups.choices import COLOURS

class Parallel:
    _NS_PATH = "parallel"
    tp_size: A[int, Arg(help="x", aliases=["--tensor-parallel-size"])] = 1
    trust: A[bool, "help " "in two"] = False
    colour: A[Optional[str], Arg(help="x", choices=COLOURS + ["blue"])] = None
    mode: A[Literal["null", "decode"], "x"] = "null"
    names: A[Optional[List[str]], "x"] = None
    config: A[Optional[dict], Arg(help="x", type_parser=json.loads)] = None
    length: A[Optional[int], Arg(help="x", type_parser=human_readable_int)] = None
    fused: A[Optional[bool], Arg(help="x", action=argparse.BooleanOptionalAction)] = None
    hidden: A[bool, Arg(help="x", no_cli=True)] = False
    rank: A[int, Derived("x")] = 0
    old_name: A[str, Arg(help="x", cli_name="--new-name")] = "a"
    plain: int = 3
"""

ARGS = """
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--enable-dp-attention", action=Deprecated, help="x")
        parser.add_argument("--config-file", type=str, help="x")
"""


def _wheel(folder: Path) -> Path:
    path = folder / "sglang-9.8.7-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as z:
        for name in sglang.FIELDS:
            text = FIELDS if name == "parallel" else "x = 1\n"
            z.writestr(f"sglang/srt/arg_groups/fields/{name}.py", text)
        z.writestr("sglang/srt/arg_groups/choices.py", 'COLOURS = ["red", "green"]\n')
        z.writestr("sglang/srt/server_args.py", ARGS)
    return path


def test_every_form_of_field(tmp_path: Path) -> None:
    table = sglang.read(_wheel(tmp_path))
    assert (table.engine, table.version, table.prefixes) == ("sglang", "9.8.7", True)
    assert {flag.name: flag for flag in table.flags} == {
        "--tp-size": Flag("--tp-size", ("--tensor-parallel-size",), type="int", default="1"),
        "--trust": Flag("--trust", takes="switch", type="bool", default="false"),
        "--colour": Flag("--colour", type="choice", choices=("red", "green", "blue")),
        "--mode": Flag("--mode", type="choice", choices=("null", "decode"), default="null"),
        "--names": Flag("--names", takes="list"),
        "--config": Flag("--config", type="json"),
        "--length": Flag("--length", type="int", suffixes=True),
        "--fused": Flag("--fused", takes="switch", type="bool", off=("--no-fused",)),
        "--new-name": Flag("--new-name", default="a"),
        "--enable-dp-attention": Flag("--enable-dp-attention", takes="switch", type="bool"),
        "--config-file": Flag("--config-file"),
    }
    assert "--enable-deepep-moe" in table.removed


def test_the_committed_table_is_what_the_wheel_says() -> None:
    folder = Path(os.environ.get("MESHWRIGHT_WHEELS", "/nonexistent"))
    found = sorted(folder.glob("sglang-0.5.23-*.whl"))
    if not found:
        pytest.skip("no wheel of SGLang 0.5.23 in MESHWRIGHT_WHEELS")
    committed = load_table(sglang.TARGET, "0.5.23")
    assert table_to(sglang.read(found[0])) == table_to(committed)

"""Flags are read from source text: hints, defaults, spellings, what a version changes; nothing is imported."""

from __future__ import annotations

import ast
import sys
import zipfile
from pathlib import Path

import pytest
from bench.flags.reader import UNKNOWN, Module, Wheel, flags_of, hint, literal
from bench.flags.vllm import read

SOURCES = {
    "vllm/config/__init__.py": (
        "from vllm.config.parallel import ParallelConfig\nfrom vllm.config.top import VllmConfig\n"
    ),
    "vllm/envs.py": "environment_variables: dict = {'VLLM_B': lambda: 1, 'VLLM_A': lambda: 2}\n",
    "vllm/config/utils.py": "raise SystemExit('imported')\n",
    "vllm/config/parallel.py": """
from typing import Literal
Inner = Literal["one", "two"]
Backend = Literal["ray", "mp", Inner, "hidden"]
HIDDEN = "hidden"
@config
class Base:
    node_rank: int = 0
@config
class ParallelConfig(Base):
    tensor_parallel_size: int = 1
    backend: Backend | None = None
    free: Backend | str = "ray"
    bind: bool = Field(default=False)
    cpus: list[int] | None = None
    share: float = Field(default=2 * 1.5, gt=0)
    eplb: "EplbConfig" = Field(default_factory=EplbConfig)
    kernel: Literal["deep_gemm"] = "deep_gemm"
    max_model_len: int | None = None
    big: int = 1 << 10
@config
class EplbConfig:
    x: int = 0
""",
    "vllm/config/top.py": (
        "@config\nclass VllmConfig:\n    transfer: dict | None = None\n    draft: dict[str, object] = None\n"
    ),
    "vllm/utils/argparse_utils.py": "class EnableDisableAction: pass\n",
    "vllm/entrypoints/openai/cli_args.py": """
from vllm.engine.arg_utils import AsyncEngineArgs
class BaseFrontendArgs:
    port: int = 8000
@config
class FrontendArgs(BaseFrontendArgs):
    allowed_origins: list[str] = field(default_factory=list)
    enable_log_requests: bool = True
def make_arg_parser(parser):
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--headless", action="store_true", default=False)
""",
    "vllm/engine/arg_utils.py": """
import json
from vllm.config import ParallelConfig, VllmConfig
from vllm.config.parallel import HIDDEN
def _compute_kwargs(cls):
    human_readable_int_args = {"big"}
class EngineArgs:
    @staticmethod
    def add_cli_args(parser):
        kw = get_kwargs(ParallelConfig)
        kw["backend"]["choices"].remove(HIDDEN)
        group = parser.add_argument_group(title="x")
        group.add_argument("--tensor-parallel-size", "-tp", **kw["tensor_parallel_size"])
        group.add_argument("--node-rank", "-r", **kw["node_rank"])
        group.add_argument("--backend", **kw["backend"])
        group.add_argument("--free", **kw["free"])
        group.add_argument("--enable-bind", **kw["bind"])
        group.add_argument("--cpus", **kw["cpus"])
        group.add_argument("--share", "--portion", dest="share", **{**kw["share"], "default": None})
        group.add_argument("--eplb", **kw["eplb"])
        group.add_argument("--max-model-len", **kw["max_model_len"])
        group.add_argument("--big", **kw["big"])
        kernel = kw["kernel"]
        kernel["type"] = lambda s: s.lower().replace("-", "_")
        group.add_argument("--kernel", **kernel)
        top = get_kwargs(VllmConfig)
        top["draft"]["type"] = optional_type(json.loads)
        group.add_argument("--draft", "-sc", **top["draft"])
        group.add_argument("--transfer", **top["transfer"])
class AsyncEngineArgs(EngineArgs):
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--late", type=int, choices=[1, 2], default=-1)
""",
}


NAMES = (
    "headless port allowed-origins enable-log-requests tensor-parallel-size node-rank backend free enable-bind cpus "
    "share eplb max-model-len big kernel draft transfer late help"
)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "vllm-0.99.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        for name, text in SOURCES.items():
            file.writestr(name, text)
    return path


def test_a_table_is_read_without_importing_anything(wheel: Path) -> None:
    before = set(sys.modules)
    table = read(wheel)
    assert not {name for name in set(sys.modules) - before if name.startswith("vllm")}
    assert (table.version, table.source) == ("0.99.0", wheel.name)
    assert table.environment == ("VLLM_A", "VLLM_B")
    flags = {flag.name: flag for flag in table.flags}
    assert set(flags) == {f"--{name}" for name in NAMES.split()}
    assert (flags["--tensor-parallel-size"].aliases, flags["--tensor-parallel-size"].type) == (("-tp",), "int")
    assert flags["--node-rank"].default == "0"
    assert (flags["--backend"].type, flags["--backend"].choices) == ("choice", ("ray", "mp", "one", "two"))
    assert (flags["--free"].type, flags["--free"].choices) == ("str", ())
    assert flags["--enable-bind"].off == ("--no-enable-bind", "--disable-bind")
    assert (flags["--cpus"].takes, flags["--cpus"].type) == ("list", "int")
    assert (flags["--share"].aliases, flags["--share"].default) == (("--portion",), None)
    assert {flags[n].type for n in ("--eplb", "--draft", "--transfer", "--allowed-origins")} == {"json"}
    assert (flags["--max-model-len"].choices, flags["--big"].suffixes) == (("auto", "-1"), True)
    assert flags["--big"].default == "1024"
    assert flags["--kernel"].choices == ("deep_gemm", "deep-gemm")
    assert (flags["--late"].type, flags["--late"].choices, flags["--late"].default) == ("choice", ("1", "2"), "-1")


def module(text: str, tmp_path: Path) -> Module:
    path = tmp_path / "m.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("m.py", text)
    found = Wheel(path).module("m")
    assert found is not None
    return found


def test_what_only_running_would_tell_stays_unknown(tmp_path: Path) -> None:
    m = module("import os\nA = os.cpu_count()\nB = [1, A]\nC = A if A else 1\nD = D\nE = 2 ** 10\n", tmp_path)
    for name in "ABCDZ":
        assert literal(ast.Name(name), m) is UNKNOWN
    assert literal(ast.Name("E"), m) == 1024


def test_hints_that_lead_nowhere_or_in_circles_end(tmp_path: Path) -> None:
    m = module("A = B\nB = A\nfrom elsewhere import X\n", tmp_path)
    for text in ("A", "X", "Missing", "list[A]", "A | None", "x.y.Z", "Literal[X]", "'A'"):
        assert hint(ast.parse(text, mode="eval").body, m).kinds


def test_plain_argparse_calls(tmp_path: Path) -> None:
    m = module(
        "KINDS = ['a', 'b']\ndef add(p):\n"
        "    p.add_argument('--kind', '-k', choices=KINDS, default='a')\n"
        "    p.add_argument('--on', action='store_true')\n"
        "    p.add_argument('--sizes', type=int, nargs='+')\n"
        "    p.add_argument('--maybe', nargs='?', type=float)\n"
        "    p.add_argument('--both', action=argparse.BooleanOptionalAction)\n"
        "    p.add_argument('position')\n",
        tmp_path,
    )
    found = {f.name: f for f in flags_of(m.function("add"), m)}
    assert set(found) == {"--kind", "--on", "--sizes", "--maybe", "--both"}
    assert (found["--kind"].choices, found["--kind"].aliases, found["--kind"].default) == (("a", "b"), ("-k",), "a")
    assert [found[n].takes for n in ("--on", "--sizes", "--maybe", "--both")] == [
        "switch",
        "list",
        "optional",
        "switch",
    ]
    assert found["--both"].off == ("--no-both",)

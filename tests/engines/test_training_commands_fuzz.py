"""Whatever is pasted, Megatron's and torchtitan's readers answer with an Invocation or one line."""

from __future__ import annotations

import random

import pytest

from meshwright.engines import load
from meshwright.errors import InputError
from meshwright.specs.cluster import parse_cluster
from meshwright.specs.hf.read import read_model
from tests.engines.megatron.commands import LLAMA_8B as MEGATRON_8B
from tests.engines.torchtitan.commands import LLAMA_8B as TITAN_8B

CLUSTER = parse_cluster("4x8xH100-SXM@ib-400g")
STARTS = {
    "megatron": f"torchrun --nproc-per-node 8 pretrain_gpt.py {MEGATRON_8B}".split(),
    "torchtitan": TITAN_8B.split(),
}
VALUES = [
    "0", "1", "2", "3", "8", "-1", "64", "4096", "999999999999", "1e9", "", "None", "true", "$X", "$(id)", "`id`",
    "a b", "'", "\u00e9\x00", "E|t*3|L", "Et*9999|t*9999L", "([1]*3+[0])*2", "[[1]]", "M-M*|*E/M", "fp8", "full",
    "1F1B",
    "layers.0,norm layers.1", "x" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(STARTS))
def test_random_commands(name: str) -> None:
    engine, rng = load(name), random.Random(7)
    spec = read_model("llama-3.1-8b", allow_online=False)
    flags = [f.name for f in engine.flags().flags]
    parallel = [f for f in flags if "parallel" in f or "pipeline" in f or "layer" in f or "expert" in f or "batch" in f]
    understood, refused = 0, []
    for _ in range(200):
        words = list(STARTS[name])
        for _ in range(rng.randint(1, 8)):
            flag = rng.choice(parallel if rng.random() < 0.7 else flags)
            value = rng.choice(VALUES)
            words += rng.choice(([flag, value], [f"{flag}={value}"], [flag], [value]))
        try:
            found = engine.parse(words, {}, lambda path: None)
            describe = getattr(engine, "model_spec", None)
            model = (describe(found) if describe else None) or spec
            found = engine.complete(found, model, CLUSTER)  # type: ignore[attr-defined]
            engine.profile().check(model, found.layout, CLUSTER, found.workload)
            understood += 1
        except InputError as error:
            refused.append(str(error))
    assert understood > 25
    assert len(refused) > 25
    assert not [line for line in refused if "\n" in line or len(line) > 400]

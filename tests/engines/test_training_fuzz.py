"""Mutated configurations and commands of the training engines: understood or refused in one line, never a traceback."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest

from meshwright.engines.accelerate import ENGINE as ACCELERATE
from meshwright.engines.base import Completes, Engine, Invocation
from meshwright.engines.deepspeed import ENGINE as DEEPSPEED
from meshwright.engines.plainyaml import dump
from meshwright.engines.torchrun import ENGINE as TORCHRUN
from meshwright.engines.transformers import ENGINE as TRANSFORMERS
from meshwright.errors import InputError
from tests.specs.builders import gqa, moe
from tests.specs.clusters import cluster

DS = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "tensor_parallel": {"autotp_size": 2},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.0}, "reduce_bucket_size": 5e8},
    "expert_parallel": {"enabled": True, "autoep_size": 2},
    "activation_checkpointing": {"cpu_checkpointing": True},
    "pipeline": {"stages": 1},
    "sequence_parallel_size": 1,
    "data_types": {"grad_accum_dtype": "fp32"},
}
YAML = {
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_processes": 8,
    "num_machines": 1,
    "machine_rank": 0,
    "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "NO_WRAP", "fsdp_sharding_strategy": 1},
    "parallelism_config": {"parallelism_config_tp_size": 2, "parallelism_config_dp_shard_size": 4},
    "deepspeed_config": {"zero_stage": 2, "offload_param_device": "cpu"},
}
CONFIG = {"tp_size": 2, "fsdp_size": 4, "ep_size": 1, "tp_plan": None, "fsdp_cpu_offload": False}
ODD: tuple[object, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        2,
        3,
        1.5,
        1e30,
        1e300,
        10**40,
        "",
        "auto",
        "x",
        "2",
        "$TP",
        "`ls`",
        "\u0000",
        "\u202e",
    ),
    *([], [1], {}, {"a": 1}, {"enabled": "auto"}, "cpu", "DEEPSPEED", "HYBRID_SHARD", "x" * 5000),
)
WORDS = (
    *("--nnodes", "2", "--nproc-per-node", "8", "gpu", "t.py", "--deepspeed", "c", "--tp_size", "--fsdp", "full_shard"),
    *(
        "--bf16",
        "--optim",
        "--max_seq_length",
        "$(x)",
        "-m",
        "--",
        "=",
        "--=",
        "-",
        "--fsdp_config",
        "{",
        '{"tp_size":2}',
    ),
    *("--num_gpus", "--include", "a:0@b", "--hostfile", "srun", "torchrun", "bash", "-c", "accelerate", "launch"),
    *("--config_file", "--num_processes", "--per_device_train_batch_size", "python", "deepspeed", "--module", "\u0000"),
)


def mutated(rng: random.Random, value: object, depth: int = 0) -> object:
    """A configuration with some values replaced, dropped or renamed."""
    if not isinstance(value, dict) or rng.random() < 0.05:
        return rng.choice(ODD) if rng.random() < 0.25 else value
    out = {}
    for key, inner in value.items():
        draw = rng.random()
        if draw < 0.06:
            continue
        out[key + "x" if draw < 0.1 else key] = mutated(rng, inner, depth + 1)
    return out


def one_line(error: InputError) -> None:
    """A message that fits a line of the terminal, or two."""
    assert "\n" not in str(error)
    assert len(str(error)) < 600


def read(engine: Engine, found: Invocation) -> None:
    """What was read is completed and judged by the profile, and every message is one short line."""
    for spec in (gqa(), moe()):
        done = engine.complete(found, spec, cluster(1, 8)) if isinstance(engine, Completes) else found
        rules = [*done.findings, *engine.profile().check(spec, done.layout, cluster(1, 8), done.workload)]
        for rule in rules:
            assert "\n" not in rule.message + rule.way_out
            assert len(rule.message) < 600


def texts(seed: int, count: int) -> Iterator[tuple[Engine, bytes]]:
    rng = random.Random(seed)
    for _ in range(count):
        yield DEEPSPEED, json.dumps(mutated(rng, DS)).encode()
        yield ACCELERATE, dump(mutated(rng, YAML)).encode("utf-8", "replace")
        yield TRANSFORMERS, json.dumps(mutated(rng, CONFIG)).encode()


def test_mutated_configurations() -> None:
    understood = 0
    for engine, data in texts(1, 150):
        try:
            found = engine.parse_file("c", data)
        except InputError as error:
            one_line(error)
            continue
        if found is not None:
            understood += 1
            read(engine, found)
    assert understood > 150


@pytest.mark.parametrize("engine", [DEEPSPEED, ACCELERATE, TRANSFORMERS, TORCHRUN])
def test_shuffled_words(engine: Engine) -> None:
    rng = random.Random(2)
    files = {"c": json.dumps(DS).encode(), "{": b"{}"}
    for _ in range(300):
        words = [
            rng.choice(("torchrun", "deepspeed", "accelerate", "python")),
            *rng.choices(WORDS, k=rng.randint(0, 12)),
        ]
        try:
            if engine.recognises(words):
                read(engine, engine.parse(words, {}, files.get))
        except InputError as error:
            one_line(error)


def test_cut_files() -> None:
    rng = random.Random(3)
    for engine, data in texts(4, 20):
        cut = data[: rng.randint(0, len(data))] + bytes(rng.choices(range(256), k=3))
        try:
            found = engine.parse_file("c", cut)
        except InputError:
            continue
        if found is not None:
            read(engine, found)

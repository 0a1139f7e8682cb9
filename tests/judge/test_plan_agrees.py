"""``plan`` with a layout, and ``check`` of the command it prints, count the same memory and say the same."""

from __future__ import annotations

import random
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright import api, engines
from meshwright.judge.check import check_words
from meshwright.plan.memory import ServeMemory
from meshwright.plan.plan import Plan
from meshwright.specs.cluster import parse_cluster
from meshwright.specs.layout import Layout
from meshwright.specs.workload import Serve

CLUSTERS = ("8xH100-SXM", "2x8xH200-SXM@ib-400g", "4xRTX-3090", "8xA100-80G")
MODELS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b", "deepseek-v3", "mixtral-8x7b", "qwen3-8b", "gpt-oss-120b")
SAMPLE, FULL = 8, 30


def random_plan(engine: str, seed: int) -> Plan | None:
    """A plan with a random layout, None where the engine refuses it."""
    draw = random.Random(seed)
    cluster = parse_cluster(draw.choice(CLUSTERS))
    tp, pp, dp = draw.choice((1, 2, 4, 8, 16)), draw.choice((1, 1, 2, 4)), draw.choice((1, 1, 2, 4, 8))
    layout = Layout(tp=tp, pp=pp, dp=dp, ep=draw.choice((1, tp * dp)))
    if layout.world > cluster.devices:
        return None
    work = Serve(isl=draw.choice((512, 2048)), osl=draw.choice((128, 512)), max_model_len=draw.choice((4096, 16384)))
    plan = api.plan_serve(draw.choice(MODELS), cluster, work, layout=layout, engine=engine)
    return plan if plan.legal and plan.commands else None


def difference(plan: Plan, folder: Path) -> str:
    """What ``check`` of the plan's first command says differently; empty where nothing."""
    first = plan.commands[0]
    words = [*(f"{name}={value}" for name, value in first.env), *shlex.split(first.text)]
    for file in api.emit(plan).files:
        (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
        (folder / file.path).write_text(file.text)
    verdict = check_words(words, plan.cluster, base=folder)
    assert plan.chosen is not None
    assert plan.layout is not None
    # TensorRT-LLM starts every replica of a dense model as a server of its own; one of them is looked at.
    apart = plan.engine.startswith("trtllm") and plan.spec.moe is None
    layout = replace(plan.layout, dp=1) if apart else plan.layout
    if verdict.plan.chosen is None:
        return f"{verdict.verdict} <- {first.text}"
    said, counted = plan.chosen.memory, verdict.plan.chosen.memory
    assert isinstance(said, ServeMemory)
    assert isinstance(counted, ServeMemory)
    pairs = {
        "layout": (str(layout), str(verdict.invocation.layout)),
        "weights": (said.worst.weights_bytes, counted.worst.weights_bytes),
        "pool": (said.kv_pool_bytes, counted.kv_pool_bytes),
        "tokens": (said.kv_cache_tokens, counted.kv_cache_tokens),
        "activations": (said.worst.activations_bytes, counted.worst.activations_bytes),
        "capacity": (said.worst.capacity_bytes, counted.worst.capacity_bytes),
        "longest": (said.longest_context, counted.longest_context),
        "starts": (said.max_requests > 0, verdict.starts),
    }
    wrong = "; ".join(f"{name} {a} in plan, {b} in check" for name, (a, b) in pairs.items() if a != b)
    return f"{wrong} ({verdict.verdict}) <- {first.text}" if wrong else ""


@pytest.mark.parametrize("engine", ["vllm", "vllm-0.26", "sglang", "trtllm"])
@pytest.mark.parametrize("count", [SAMPLE, pytest.param(FULL, marks=pytest.mark.slow)])
def test_check_of_the_planned_command_agrees_with_the_plan(engine: str, count: int, tmp_path: Path) -> None:
    assert engines.profile(engine).serves
    looked, seed = 0, 0
    while looked < count and seed < 40 * count:
        plan = random_plan(engine, seed)
        seed += 1
        if plan is None:
            continue
        looked += 1
        said = difference(plan, tmp_path)
        assert not said, f"seed {seed - 1}: {plan.spec.name}: {said}"
    assert looked == count

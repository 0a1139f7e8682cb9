"""What is emitted for a random legal point parses back to that point, and its flags are the version's."""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from meshwright.engines.base import Emission, Invocation, Request
from meshwright.engines.plainyaml import load
from meshwright.engines.vllm import ENGINE
from meshwright.engines.vllm.pools import pool_rules
from meshwright.engines.vllm.program import find_program
from meshwright.errors import InputError
from meshwright.specs.command import Command
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve
from tests.engines.accept import numbered, refused
from tests.specs.clusters import cluster

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "gpt-oss-120b")
WAYS = ("single", "mp", "ray", "headless", "external", "hybrid", "kuberay", "lws", "slurm", "pools")


@cache
def model(name: str) -> ModelSpec:
    return read_model(name)


@cache
def legal(name: str, layout: Layout) -> bool:
    rules = ENGINE.profile().check(model(name), layout, None, Serve())
    return not any(rule.severity == "illegal" for rule in rules)


def random_layout(r: random.Random, name: str) -> Layout:
    """A legal layout of at most 64 devices."""
    while True:
        tp, pp, dp = r.choice((1, 2, 4, 8, 16)), r.choice((1, 1, 1, 2, 3, 4)), r.choice((1, 1, 2, 3, 4, 8, 16))
        cp, dcp = r.choice((1, 1, 1, 2)), r.choice((1, 1, 2, 4))
        if tp * pp * dp * cp > 64:
            continue
        ep = r.choice((1, tp * dp * cp))
        layers, stages = len(model(name).layers), ()
        if pp > 1 and r.random() < 0.3:
            cuts = sorted(r.sample(range(1, layers), pp - 1))
            stages = tuple(b - a for a, b in zip((0, *cuts), (*cuts, layers), strict=True))
        layout = Layout(tp=tp, pp=pp, dp=dp, ep=ep, cp=cp, dcp=dcp, stage_layers=stages)
        if legal(name, layout):
            return layout


def random_settings(r: random.Random) -> ServeSettings:
    draft = r.random() < 0.2
    return ServeSettings(
        utilization=r.choice((None, 0.9, 0.92, 0.85)),
        max_num_batched_tokens=r.choice((None, 2048, 8192)),
        max_num_seqs=r.choice((None, 64, 1024)),
        kv_dtype=r.choice(("auto", "f8_e4m3", "f8_e5m2", "bf16", "f16")),
        block_size=r.choice((None, 16, 64)),
        enforce_eager=r.random() < 0.3,
        quantization=r.choice((None, "fp8")),
        dtype=r.choice((None, "bf16", "f16", "f32")),
        speculative=draft,
        speculative_tokens=r.choice((1, 3)) if draft else 1,
        text_only=r.random() < 0.2,
    )


def emission(r: random.Random) -> tuple[Request, str, Emission]:
    """A request that vLLM can be started with, and what to type for it."""
    while True:
        name, version = r.choice(MODELS), r.choice(ENGINE.versions())
        layout, way = random_layout(r, name), r.choice(WAYS)
        prefill = random_layout(r, name) if way == "pools" else None
        options = {"connector": r.choice(("nixl", "nixl-push", "mooncake"))} if way == "pools" else {}
        if layout.ep > 1 and r.random() < 0.3:
            options["all2all"] = "deepep"
        request = Request(
            model=f"org/{name}",
            layout=layout,
            cluster=cluster(r.choice((1, 2, 4, 8, 16)), r.choice((4, 8))),
            workload=Serve(max_model_len=r.choice((1, 700, 4096, 131_072))),
            settings=random_settings(r),
            prefill=prefill,
            deployment=r.choice((None, way)) if way in {"single", "mp", "headless"} else way,  # type: ignore[arg-type]
            options=options,
            spec=model(name),
        )
        try:
            return request, version, ENGINE.emit(request, version)
        except InputError:
            continue


def served(found: Emission) -> Iterator[Command]:
    """Commands that start vLLM, those inside files included."""
    for command in found.commands:
        if command.text.startswith("vllm "):
            yield command
    for file in found.files:
        if file.path == "rayjob.yaml":
            job = load(file.text.split("---\n")[0])
            assert isinstance(job, dict)
            env = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
            yield Command(0, "serve", job["spec"]["entrypoint"], tuple((e["name"], e.get("value", "")) for e in env))
        elif file.path == "lws.yaml":
            made = load(file.text.split("---\n")[0])
            assert isinstance(made, dict)
            for role in ("leaderTemplate", "workerTemplate"):
                box = made["spec"]["leaderWorkerTemplate"][role]["spec"]["containers"][0]
                text = box["command"][2].replace("$$", "$").partition("exec ")[2]
                yield Command(0, "serve", text, tuple((e["name"], e.get("value", "")) for e in box["env"]))
        elif file.path == "node.sh":
            for text in re.findall(r"^ *exec (?:env )?(.*)$", file.text, re.MULTILINE):
                words = shlex.split(text)
                at = words.index("vllm")
                env = tuple((w.partition("=")[0], w.partition("=")[2]) for w in words[:at])
                yield Command(0, "serve", shlex.join(words[at:]), env)


def parsed(command: Command, version: str) -> Invocation:
    words = numbered(shlex.split(command.text))
    return ENGINE.parse(words, dict(command.env), lambda name: None, version)


def check(r: random.Random) -> str:
    """Emit, parse, compare; returns the way it was started."""
    request, version, found = emission(r)
    commands = list(served(found))
    assert commands
    assert refused(commands, ENGINE.flags(version), lambda argv: find_program(argv).words) == []  # type: ignore[union-attr]
    sides = set()
    for command in commands:
        back = parsed(command, version)
        side = request.prefill if command.purpose.startswith("prefill") else request.layout
        assert side is not None
        sides.add(side)
        expected = side if side.pp > 1 else replace(side, stage_layers=())
        assert back.layout == expected, command.text
        assert back.settings == request.settings, command.text
        assert isinstance(back.workload, Serve)
        assert back.workload.context == request.workload.context  # type: ignore[union-attr]
        assert back.model == request.model
        assert [f for f in back.findings if f.severity == "illegal" or f.code == "environment_unread"] == [], (
            command.text
        )
        if request.deployment in {"mp", "ray", "headless", "external", "hybrid", "pools"}:
            assert back.deployment == request.deployment, command.text
    assert sides == {x for x in (request.layout, request.prefill) if x is not None}
    return str(request.deployment)


def test_a_sample_of_points_comes_back() -> None:
    r = random.Random(3)
    ways = {check(r) for _ in range(120)}
    assert ways >= {"single", "mp", "ray", "headless", "external", "hybrid", "pools", "kuberay", "lws", "slurm"}


@pytest.mark.slow
def test_two_thousand_points_come_back() -> None:
    r = random.Random(4)
    for _ in range(2000):
        check(r)


def test_a_planted_mistake_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.engines.vllm import words

    monkeypatch.setattr(words, "_DTYPES", {"bf16": "float16"})
    r = random.Random(5)

    def many() -> None:
        for _ in range(60):
            check(r)

    with pytest.raises(AssertionError):
        many()


def test_pools_of_the_sample_keep_the_connector_s_rules() -> None:
    r = random.Random(6)
    seen = 0
    while seen < 10:
        request, _, _ = emission(r)
        if request.prefill is not None:
            seen += 1
            assert pool_rules(request.prefill, request.layout, request.options["connector"], request.spec) == []

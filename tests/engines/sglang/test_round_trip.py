"""What is emitted is what was asked for: emit, then parse, gives layout, lengths and limits back."""

from __future__ import annotations

import random
import shlex
from dataclasses import fields, replace

import pytest

from meshwright.engines.base import Invocation, Request
from meshwright.engines.sglang import ENGINE
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve
from tests.engines.accept import refused
from tests.engines.sglang.commands import nothing, random_layouts, words_of
from tests.specs.clusters import cluster

MODELS = ("llama-3.1-70b", "qwen3-8b", "deepseek-v3", "qwen3-30b-a3b", "gpt-oss-120b")


def _settings(rng: random.Random) -> ServeSettings:
    return ServeSettings(
        utilization=rng.choice((0.8, 0.853, 0.93)),
        max_num_batched_tokens=rng.choice((2048, 8192, 65536)),
        max_num_seqs=rng.choice((1, 64, 1000)),
        kv_dtype=rng.choice(("auto", "f8_e4m3", "f8_e5m2", "bf16")),
        block_size=rng.choice((None, 16, 64)),
        enforce_eager=rng.random() < 0.2,
        quantization=rng.choice((None, None, "fp8")),
        dtype=rng.choice((None, "bf16", "f16")),
        speculative=rng.random() < 0.2,
        speculative_tokens=1,
        text_only=rng.random() < 0.1,
    )


def _servers(request: Request, spec: ModelSpec) -> list[Invocation]:
    emission = ENGINE.emit(request)
    assert refused(emission.commands, ENGINE.flags(), words_of, positionals=0) == []
    found = []
    for command in emission.commands:
        argv = shlex.split(command.text)
        if words_of(argv) is not None:
            parsed = ENGINE.parse(argv, dict(command.env), nothing)
            found.append(ENGINE.complete(parsed, spec, request.cluster))
    return found


def _once(spec: ModelSpec, name: str, layout: Layout, settings: ServeSettings) -> None:
    workload = Serve(isl=1000, osl=24, max_model_len=4096)
    request = Request(name, layout, cluster(1024, 8), workload, settings, spec=spec)
    servers = _servers(request, spec)
    first = servers[0]
    if first.layout.dp != layout.dp:  # replicas over nodes are servers of their own
        dp = sum(s.layout.dp for s in servers if s.nodes is None or s.node_rank == 0)
        assert replace(first.layout, dp=dp, etp=layout.etp) == layout
    else:
        assert all(s.layout == layout for s in servers), (layout, [s.layout for s in servers])
    assert first.workload.max_model_len == 4096  # type: ignore[union-attr]
    assert not [f for f in first.findings if f.severity == "illegal"], first.findings
    assert first.settings is not None
    for f in fields(ServeSettings):
        if f.name not in {"as_typed", "speculative_tokens"} and not (f.name == "speculative" and layout.pp > 1):
            assert getattr(first.settings, f.name) == getattr(settings, f.name), f.name


def _run(count: int, seed: int) -> None:
    rng = random.Random(seed)
    for name in MODELS:
        spec = read_model(name)
        for layout in random_layouts(spec, rng, count // len(MODELS)):
            settings = _settings(rng)
            _once(spec, name, layout, replace(settings, speculative=False) if layout.pp > 1 else settings)


def _pools(count: int, seed: int) -> None:
    """Two pools: each side's commands give its layout back, and the two agree."""
    rng = random.Random(seed)
    for name in ("deepseek-v3", "qwen3-8b"):
        spec = read_model(name)
        options = [x for x in random_layouts(spec, rng, 3 * count) if x.cp == 1 and x.dcp == 1]
        options = [x for x in options if spec.moe is not None or x.dp == 1]
        for prefill, decode in zip(options[::2], options[1::2], strict=False):
            request = Request(
                name, decode, cluster(1024, 8), Serve(max_model_len=4096), ServeSettings(), prefill=prefill, spec=spec
            )
            emission = ENGINE.emit(request)
            assert refused(emission.commands, ENGINE.flags(), words_of, positionals=0) == []
            for command in emission.commands[:-1]:
                found = ENGINE.parse(shlex.split(command.text), dict(command.env), nothing)
                found = ENGINE.complete(found, spec, request.cluster)
                assert found.deployment == "pools"
                wanted = prefill if command.purpose.startswith("prefill") else decode
                assert found.layout == wanted


@pytest.mark.timeout(60)
def test_sample() -> None:
    _run(100, seed=1)
    _pools(5, seed=3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand() -> None:
    _run(2000, seed=2)

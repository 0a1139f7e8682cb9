"""What is emitted is what was asked for: emit, then parse with the emitted files, gives layout and limits back."""

from __future__ import annotations

import random
import shlex
from dataclasses import fields, replace

import pytest

from meshwright.engines.base import Request
from meshwright.engines.trtllm import ENGINE
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve
from tests.engines.accept import refused
from tests.engines.trtllm.commands import files_of, random_layouts, reader, words_of
from tests.specs.clusters import cluster

MODELS = ("llama-3.1-70b", "qwen3-8b", "deepseek-v3", "qwen3-30b-a3b")


def _settings(rng: random.Random) -> ServeSettings:
    draft = rng.random() < 0.2
    return ServeSettings(
        utilization=rng.choice((0.8, 0.85, 0.95)),
        max_num_batched_tokens=rng.choice((2048, 8192, 16384)),
        max_num_seqs=rng.choice((1, 64, 2048)),
        kv_dtype=rng.choice(("auto", "f8_e4m3", "nvfp4")),
        block_size=rng.choice((None, 64, 128)),
        enforce_eager=rng.random() < 0.2,
        dtype=rng.choice((None, "bf16", "f16")),
        speculative=draft,
        speculative_tokens=rng.choice((1, 3)) if draft else 1,
    )


def _once(spec: ModelSpec, name: str, layout: Layout, settings: ServeSettings) -> None:
    where = cluster(1024, 8)
    emission = ENGINE.emit(
        Request(name, layout, where, Serve(isl=1000, osl=24, max_model_len=4096), settings, spec=spec)
    )
    assert refused(emission.commands, ENGINE.flags(), words_of) == []
    read = reader(files_of(emission))
    found = [ENGINE.parse(shlex.split(c.text), dict(c.env), read) for c in emission.commands]
    first = found[0]
    if len(found) > 1:
        assert len(found) == layout.dp
        assert replace(first.layout, dp=layout.dp) == layout
    else:
        assert first.layout == layout
    assert not [f for f in first.findings if f.code != "cp_needs_config"], first.findings
    assert first.workload.max_model_len == 4096  # type: ignore[union-attr]
    assert first.settings is not None
    for f in fields(ServeSettings):
        if f.name != "as_typed":
            assert getattr(first.settings, f.name) == getattr(settings, f.name), f.name


def _run(count: int, seed: int) -> None:
    rng = random.Random(seed)
    for name in MODELS:
        spec = read_model(name)
        for layout in random_layouts(spec, rng, count // len(MODELS)):
            _once(spec, name, layout, _settings(rng))


def _pools(count: int, seed: int) -> None:
    """Two pools: the files and commands of each side give its layout back."""
    rng = random.Random(seed)
    for name in ("deepseek-v3", "qwen3-8b"):
        spec = read_model(name)
        options = [x for x in random_layouts(spec, rng, 3 * count) if spec.moe is not None or x.dp == 1]
        for prefill, decode in zip(options[::2], options[1::2], strict=False):
            request = Request(
                name, decode, cluster(1024, 8), Serve(max_model_len=4096), ServeSettings(), prefill=prefill, spec=spec
            )
            emission = ENGINE.emit(request)
            assert refused(emission.commands, ENGINE.flags(), words_of) == []
            read = reader(files_of(emission))
            sides = [ENGINE.parse(shlex.split(c.text), dict(c.env), read).layout for c in emission.commands[:2]]
            assert sides == [prefill, decode]
            assert ENGINE.parse(shlex.split(emission.commands[2].text), {}, read).deployment == "pools"


@pytest.mark.timeout(60)
def test_sample() -> None:
    _run(100, seed=1)
    _pools(5, seed=3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand() -> None:
    _run(2000, seed=2)

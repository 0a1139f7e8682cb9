"""Random sizes, layouts, prompts and ways of batching against transformers."""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from meshwright.runtime.job import GenerateJob
from tests.runtime import tiny

FAMILIES = ("llama", "tied", "biased", "mistral", "qwen2", "qwen3")
SLOW = 40


def _sizes(draw: random.Random, family: str) -> dict[str, Any]:
    """Sizes that rarely divide: 1 to 5 KV heads, odd vocabularies and widths, windows around the prompt lengths."""
    kv, width = draw.randint(1, 5), draw.choice((4, 8, 10, 16))
    heads, layers = kv * draw.randint(1, 4), draw.randint(1, 5)
    sizes: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": width,
        "hidden_size": heads * draw.choice((2, 4, width)),
        "intermediate_size": draw.randint(4, 90),
        "vocab_size": draw.randint(20, 140),
        "num_hidden_layers": layers,
    }
    if family == "mistral":
        sizes["sliding_window"] = draw.randint(1, 12)
    if family == "qwen2" and draw.random() < 0.5:
        first = draw.randint(0, layers)
        sizes |= {"use_sliding_window": True, "sliding_window": draw.randint(1, 9), "max_window_layers": first}
    return sizes


def _layout(draw: random.Random, sizes: dict[str, Any]) -> str:
    """A legal layout of at most four ranks, half of the pipelines uneven."""
    kv, layers = sizes["num_key_value_heads"], sizes["num_hidden_layers"]
    heads = sizes["num_attention_heads"]
    tp = draw.choice([t for t in (1, 2, 3, 4) if t <= heads and (t <= kv or t % kv == 0)])
    pp = draw.choice([p for p in (1, 2, 3, 4) if p <= layers and p * tp <= 4])
    text = f"tp={tp},pp={pp},dp={draw.choice([d for d in (1, 2) if d * tp * pp <= 4])}"
    if pp == 1 or draw.random() < 0.5:
        return text
    spare = [1] * pp
    for _ in range(layers - pp):
        spare[draw.randrange(pp)] += 1
    assert list(accumulate(spare))[-1] == layers
    return text + ",stage_layers=" + "+".join(map(str, spare))


def _job(seed: int, folder: Path) -> GenerateJob:
    draw = random.Random(seed)
    family = draw.choice(FAMILIES)
    sizes = _sizes(draw, family)
    tiny.write(folder, family, **sizes)
    prompts = [
        [draw.randrange(sizes["vocab_size"]) for _ in range(draw.randint(1, 20))] for _ in range(draw.randint(1, 5))
    ]
    options = {
        "chunk": draw.choice((None, 1, 2, 5)),
        "micro_batches": draw.choice((None, 1, 2, 3)),
        "block_size": draw.choice((1, 2, 4, 16)),
    }
    return tiny.job(folder, _layout(draw, sizes), prompts, 4, **options)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, SLOW))])
def test_random_layout_equals_transformers(tmp_path: Path, seed: int) -> None:
    job = _job(seed, tmp_path / "m")
    tiny.assert_same(tiny.on_ranks(job), tiny.oracle(job.model.folder, job.prompts, 4))


def test_the_draws_cover_every_axis(tmp_path: Path) -> None:
    layouts = [_job(seed, tmp_path / str(seed)).placement.layout for seed in range(SLOW)]
    assert {one.tp for one in layouts} == {one.pp for one in layouts} == {1, 2, 3, 4}
    assert {one.dp for one in layouts} == {1, 2}
    assert sum(bool(one.stage_layers) for one in layouts) > 3
    assert sum(one.tp > 1 and one.pp > 1 for one in layouts) > 3

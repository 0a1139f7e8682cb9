"""Every layout computes what transformers computes: logits within 1e-4 in fp32, the same greedy tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.runtime import collectives
from meshwright.runtime.generate import Generation
from meshwright.runtime.job import GenerateJob, run_job
from meshwright.runtime.launch.local import run_local
from meshwright.runtime.models import decoder
from meshwright.runtime.models.gqa import GroupedQuery
from meshwright.runtime.models.mlp import GatedMlp
from meshwright.runtime.parallel import tensor
from tests.runtime import tiny

Folder = Callable[[str], Path]


@pytest.mark.parametrize("name", tiny.MODELS)
def test_one_process_equals_transformers(checkpoint: Folder, name: str) -> None:
    folder = checkpoint(name)
    result = tiny.alone(tiny.job(folder, "tp=1"))
    tiny.assert_same((result.tokens, result.logits), tiny.oracle(folder))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("even", "tp=2"),
        ("llama", "tp=2"),  # 9 heads over 3 KV heads: 6 + 3; vocabulary 66 + 65, MLP 51 + 50
        ("llama", "tp=3"),
        ("even", "tp=4"),  # 2 KV heads: each held by two ranks
        ("llama", "pp=2"),
        ("llama", "pp=3,stage_layers=1+3+1"),
        ("llama", "dp=2"),
        ("tied", "tp=2,pp=2"),
        ("llama", "pp=2,dp=2"),
        ("biased", "tp=2"),
        ("mistral", "tp=2"),
        ("qwen2", "tp=2,pp=2"),
        ("qwen3", "tp=2"),
    ],
)
def test_layout_equals_transformers_and_one_process(checkpoint: Folder, name: str, layout: str) -> None:
    folder = checkpoint(name)
    found = tiny.on_ranks(tiny.job(folder, layout))
    tiny.assert_same(found, tiny.oracle(folder))
    single = tiny.alone(tiny.job(folder, "tp=1"))
    tiny.assert_same(found, (list(single.tokens.values()), list(single.logits.values())))


def test_ranks_deal_the_uneven_sizes_as_placed(checkpoint: Folder) -> None:
    job = tiny.job(checkpoint("llama"), "tp=2")
    assert run_local(_widths, 2, (job,), 60) == [[48, 16, 51, 66, 2], [24, 8, 50, 65, 1]]


def _widths(rank: int, job: GenerateJob) -> list[int]:
    """Rows of q, k, gate and head, and cached heads, that a rank holds."""
    from meshwright.runtime.checkpoint import load
    from meshwright.runtime.mesh import build_mesh

    weights = load(job.model, job.placement, job.placement.coordinate(rank), torch.float32)
    d = decoder.Decoder(build_mesh(job.placement, rank), weights, job.model.settings, torch.float32)
    mixer, ffn = d.blocks[0].mixer, d.blocks[0].ffn
    assert isinstance(mixer, GroupedQuery)
    assert isinstance(ffn, GatedMlp)
    rows = (x.weight.shape[0] for x in (mixer.q, mixer.k, ffn.gate, d.head))
    return [*rows, d.shapes[0].heads]


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 7])
def test_micro_batches_change_nothing(checkpoint: Folder, micro_batches: int) -> None:
    folder = checkpoint("llama")
    tiny.assert_same(tiny.on_ranks(tiny.job(folder, "pp=2", micro_batches=micro_batches)), tiny.oracle(folder))


def test_more_replicas_than_prompts(checkpoint: Folder) -> None:
    folder = checkpoint("llama")
    tokens, _ = tiny.on_ranks(tiny.job(folder, "dp=3", tiny.PROMPTS[:2]))
    assert list(tokens.values()) == tiny.oracle(folder)[0][:2]


@pytest.mark.parametrize("layout", ["tp=2", "pp=2"])
def test_bfloat16_stays_near(checkpoint: Folder, layout: str) -> None:
    folder = checkpoint("even")
    _, logits = tiny.on_ranks(tiny.job(folder, layout, new=1, dtype="bf16"))
    for i, row in enumerate(tiny.oracle(folder)[1]):
        assert (logits[i][0] - row[0]).abs().max() < 0.1


def test_two_generations_in_one_world(checkpoint: Folder) -> None:
    folder = checkpoint("llama")
    first, second = run_local(_twice, 4, (tiny.job(folder, "tp=2,pp=2"),), 60)[0]
    assert list(first.tokens.values()) == list(second.tokens.values()) == tiny.oracle(folder)[0]


def _twice(rank: int, job: GenerateJob) -> list[Generation]:
    from meshwright.runtime.checkpoint import load
    from meshwright.runtime.generate import generate
    from meshwright.runtime.mesh import build_mesh

    weights = load(job.model, job.placement, job.placement.coordinate(rank), torch.float32)
    mesh = build_mesh(job.placement, rank)
    d = decoder.Decoder(mesh, weights, job.model.settings, torch.float32)
    return [generate(mesh, d, job.prompts, job.max_new_tokens, **job.options) for _ in range(2)]


# The comparison can fail ------------------------------------------------------------------------------------------


def _without_sum(rank: int, job: GenerateJob) -> Generation:
    """A rank whose decoder forgets one all_reduce a layer."""
    honest = tensor.all_reduce

    def forgetful(x: Tensor, group: collectives.Group) -> Tensor:
        from meshwright.runtime.scope import where

        return x if where().name == "mlp output" else honest(x, group)

    tensor.all_reduce = forgetful  # type: ignore[attr-defined]
    return run_job(rank, job)


def test_a_forgotten_sum_is_seen(checkpoint: Folder) -> None:
    folder = checkpoint("llama")
    results = run_local(_without_sum, 2, (tiny.job(folder, "tp=2", new=1),), 60)
    want = tiny.oracle(folder)[1]
    assert max(float((results[0].logits[i][0] - row[0]).abs().max()) for i, row in enumerate(want)) > 0.1


def test_the_window_is_seen(checkpoint: Folder, tmp_path: Path) -> None:
    windowless = tiny.write(tmp_path / "m", "mistral", sliding_window=None)
    with_window, without = tiny.oracle(checkpoint("mistral"))[1], tiny.alone(tiny.job(windowless, "tp=1")).logits
    assert (with_window[0][0] - without[0][0]).abs().max() < 1e-4  # the first prompt fills the window of 7
    assert (with_window[3][0] - without[3][0]).abs().max() > 1e-2

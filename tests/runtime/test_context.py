"""Sequence and context parallelism compute what one process and transformers compute, and send what was predicted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshwright.prove.proof import Proof
from meshwright.runtime.mutate import MUTATIONS
from meshwright.runtime.mutate_context import CONTEXT_MISTAKES
from tests.proving import Case, proofs, prove_cases
from tests.runtime import tiny
from tests.test_prove import NOTICED

Folder = Callable[[str], Path]
CHUNKED = {"chunk": 4, "block_size": 4}

#: Prompts around the sizes at which chunks of two and four places are filled up; one token is less than any of them.
LENGTHS = (7, 1, 13, 4)


def assert_proven(found: list[Proof], cases: list[Case]) -> None:
    for case, proof in zip(cases, found, strict=True):
        assert proof.proven, (case, proof.first, [c for c in proof.checks if not c.ok])


def test_layouts_of_four_ranks_equal_one_process(checkpoint: Folder, tmp_path: Path) -> None:
    """9 heads over 3 KV heads, uneven over tp; unequal prompts; one launch for all layouts."""
    cases = [
        Case("tp=2,cp=2,sp=on"),
        Case("cp=4"),
        Case("cp=2,pp=2", options=CHUNKED),
        Case("cp=2,dp=2"),
        Case("tp=2,pp=2,sp=on", options=CHUNKED),
    ]
    found = prove_cases(checkpoint("llama"), cases, LENGTHS, numbers=tmp_path / "n", new_tokens=3, timeout_s=100)
    assert_proven(found, cases)


@pytest.mark.parametrize("sink", [False, True])
def test_parts_over_some_keys_merge_to_the_whole(sink: bool) -> None:
    """Ten queries of 4 heads over 2 KV heads, 9 keys in parts of 2, 3 and 4; a window; queries that see nothing."""
    from meshwright.runtime.parallel.context import Part, finish, merge, part, visible

    torch.manual_seed(0)
    q, k, v = torch.randn(1, 10, 4, 8), torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 6)
    seen = visible(torch.arange(10) + 3, torch.arange(9), 4)[None]
    seen[0, 7] = False
    sinks = torch.randn(4) if sink else None
    parts = [part(q, *(x[:, a:b] for x in (k, v)), seen[:, :, a:b], None) for a, b in ((0, 2), (2, 5), (5, 9))]
    out, lse = merge(merge(*parts[:2]), parts[2])
    found = finish(Part(out[0], lse[0]), sinks, torch.float32).view(10, 4, 6)
    wide_k, wide_v = (x[0].repeat_interleave(2, dim=1).double() for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q[0].double(), wide_k) / 8**0.5
    weights = scores.masked_fill(~seen, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.double().exp()[:, None, None])
    want = torch.einsum("hts,shv->thv", (weights / total).nan_to_num(), wide_v)
    assert torch.allclose(found.double(), want, atol=1e-5)
    assert not found[7].any()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", "tp=2,sp=on"),
        ("llama", "cp=3"),
        ("mistral", "cp=2,tp=2,sp=on"),
        ("even", "cp=4,cp_kind=ulysses"),
        ("deepseek_v3", "cp=2"),
    ],
)
def test_layout_equals_transformers(checkpoint: Folder, name: str, layout: str) -> None:
    folder = checkpoint(name)
    tiny.assert_same(tiny.on_ranks(tiny.job(folder, layout), 120), tiny.oracle(folder))


def test_two_ranks_and_what_goes_wrong_on_them(checkpoint: Folder, tmp_path: Path) -> None:
    """8 heads over 2 KV heads: ring, all_to_all and tp with sp; then every mistake that is planted in one of them."""
    names = {
        "cp=2": ["unbalanced-positions", "skipped-ring-block", "merge-without-rescale", "no-causal-mask"],
        "cp=2,cp_kind=ulysses": ["no-causal-mask", "stale-kv-block"],
        "tp=2,sp=on": ["unreduced-norm", "own-chunk-only", "neighbours-share", "wrong-head-range"],
        "tp=2": ["unreduced-norm"],
    }
    cases = [Case(layout, name) for layout, planted in names.items() for name in (None, *planted)]
    found = prove_cases(checkpoint("even"), cases, (7,), numbers=tmp_path / "n", new_tokens=4, timeout_s=100)
    right = [i for i, case in enumerate(cases) if case.mutation is None]
    assert_proven([found[i] for i in right], [cases[i] for i in right])
    for case, proof in zip(cases, found, strict=True):
        failed = {c.what for c in proof.checks if not c.ok}
        if case.mutation is not None:
            assert failed >= set(NOTICED[case.mutation]), (case, failed)
    assert {case.mutation for case in cases} >= {mistake.name for mistake in CONTEXT_MISTAKES}


@pytest.mark.parametrize(
    ("name", "layout", "says"),
    [
        ("own-chunk-only", "tp=2", "sp=on"),
        ("skip-all-reduce", "tp=2,sp=on", "without sp"),
        ("wrong-dtype", "tp=2,sp=on", "without sp, or pp"),
        ("skipped-ring-block", "cp=2,cp_kind=ulysses", "on the ring"),
        ("unbalanced-positions", "tp=2", "cp of at least 2"),
    ],
)
def test_a_mistake_that_a_layout_cannot_make_is_refused(checkpoint: Folder, name: str, layout: str, says: str) -> None:
    assert says in str(MUTATIONS[name].needs(tiny.placement(checkpoint("even"), layout), 4))


def test_tokens_lie_in_one_cache_each(checkpoint: Folder, tmp_path: Path) -> None:
    """Keys and values in the caches of both places are all that one process has, each once."""
    from meshwright.runtime.proof import ProofJob, cached_positions

    placement = tiny.placement(checkpoint("even"), "cp=2")
    job = ProofJob("", placement, ((0,) * 7,), 5, "", chunk=3)
    held = [cached_positions(7, job, place) for place in range(2)]
    # Pieces of 3, 3 and 1: chunks of one token each; 7 to 10 are decoded.
    assert held == [[0, 3, 6, 8, 10], [1, 2, 4, 5, 7, 9]]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "layout", "lengths"),
    [
        ("llama", "cp=3", (10, 1, 5)),
        ("llama", "cp=3,cp_kind=ulysses", (10, 1, 5)),
        ("llama", "tp=3,sp=on", (10, 1, 5)),
        ("llama", "tp=2,sp=on,pp=2,dp=2", (5, 6, 7, 8)),
        ("even", "cp=4,cp_kind=ulysses", (9, 8)),
        ("even", "cp=2,tp=2,cp_kind=ulysses", (9, 8)),
        ("even", "tp=4,sp=on", (2, 3)),
        ("biased", "tp=2,sp=on", (5, 6)),
        ("biased", "cp=2,tp=2,sp=on", (5, 6)),
        ("tied", "tp=2,sp=on,pp=2", (5, 6)),
        ("mistral", "cp=2", (20, 9)),
        ("mistral", "cp=3,cp_kind=ulysses", (20, 9)),
        ("qwen2", "cp=2,pp=2", (5, 6)),
        ("qwen3", "cp=2,tp=2", (5, 6)),
        ("gemma3", "cp=2", (20, 9)),
        ("gemma3", "tp=2,sp=on", (20, 9)),
        ("deepseek_v2", "cp=2", (7, 12)),
        ("deepseek_v3", "cp=2,tp=2,sp=on", (7, 12)),
        ("deepseek_v3", "cp=3,cp_kind=ulysses", (7, 12)),
    ],
)
@pytest.mark.parametrize("chunk", [None, 4])
def test_every_family_is_proven(
    checkpoint: Folder, tmp_path: Path, name: str, layout: str, lengths: tuple[int, ...], chunk: int | None
) -> None:
    found = proofs(
        checkpoint(name),
        layout,
        [None],
        lengths=lengths,
        numbers=tmp_path / "n",
        timeout_s=250,
        block_size=4,
        chunk=chunk,
    )
    assert_proven(found, [Case(layout)])

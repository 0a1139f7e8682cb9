"""Gemma 3, DeepSeek and their kin: every layout computes what transformers computes, and proves what it sends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from meshwright.errors import InputError
from meshwright.runtime.folder import read_folder
from meshwright.runtime.models.settings import read_settings
from tests.proving import proofs
from tests.runtime import moe_models, tiny

Folder = Callable[[str], Path]

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "layout", "mistakes"),
    [
        ("gemma3", "tp=2", ["unscaled-embedding", "one-rotary-base"]),
        ("deepseek_v3", "tp=2", ["rope-not-interleaved"]),  # 9 heads: 5 + 4
        pytest.param("deepseek_v2", "tp=3,pp=2", ["rope-not-interleaved", "skip-all-reduce"], marks=slow),
        pytest.param("gemma3", "tp=3,pp=2", ["skip-all-reduce"], marks=slow),
        pytest.param("gemma3", "tp=2,dp=2", [], marks=slow),
        pytest.param("deepseek_v3", "pp=2,dp=2", [], marks=slow),
        pytest.param("deepseek_v3", "tp=4", [], marks=slow),
    ],
)
def test_the_proof_holds_and_fails_on_mistakes_of_the_family(
    checkpoint: Folder, tmp_path: Path, name: str, layout: str, mistakes: list[str]
) -> None:
    """12 tokens reach past the windows of 5; the ledgers, the cache and its bytes are compared too."""
    right, *wrong = proofs(checkpoint(name), layout, [None, *mistakes], numbers=tmp_path / "numbers", tokens=12)
    assert right.proven, right.checks
    for mistake, proof in zip(mistakes, wrong, strict=True):
        assert not proof.proven, mistake
        assert "logits" in {check.what for check in proof.checks if not check.ok}, mistake


#: As the published configurations of GPT-OSS say it.
GPT_OSS = {
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}


@pytest.mark.parametrize(
    ("layout", "mistakes"),
    [("tp=2", ["missing-sink"]), pytest.param("tp=3,pp=2", ["doubled-bias"], marks=slow)],
)
def test_attention_sinks(tmp_path: Path, layout: str, mistakes: list[str]) -> None:
    """GPT-OSS: a sink a head, biases everywhere, a window of 7 in two layers of three, yarn that is not truncated."""
    folder = moe_models.write(tmp_path / "model", "gpt_oss", **GPT_OSS)
    found = tiny.alone(tiny.job(folder, "tp=1"))
    tiny.assert_same((found.tokens, found.logits), tiny.oracle(folder))
    right, *wrong = proofs(folder, layout, [None, *mistakes], numbers=tmp_path / "numbers", tokens=12)
    assert right.proven, right.checks
    for proof in wrong:
        assert "logits" in {check.what for check in proof.checks if not check.ok}


def test_gpt_oss_is_silent_about_its_positions(tmp_path: Path) -> None:
    said = read_settings(moe_models.config("gpt_oss", rope_theta=None), "config.json").rope
    assert (said.kind, said.theta, said.factor, said.original, said.truncate) == ("yarn", 150000.0, 32.0, 4096, False)


@pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
        ("gemma3", "tp=2", {"chunk": 3}),
        ("deepseek_v3", "tp=2,pp=2", {"chunk": 4}),
        pytest.param("deepseek_v2", "tp=2", {}, marks=slow),
        pytest.param("gemma3", "tp=2,pp=2", {"micro_batches": 3}, marks=slow),
    ],
)
def test_layouts_equal_transformers(checkpoint: Folder, name: str, layout: str, options: dict[str, Any]) -> None:
    folder = checkpoint(name)
    tiny.assert_same(tiny.on_ranks(tiny.job(folder, layout, **options)), tiny.oracle(folder))


def test_the_latent_is_cached_whole_on_every_rank(checkpoint: Folder, tmp_path: Path) -> None:
    """A token takes 16 + 4 values a layer, whatever tp; 12 tokens and 3 more fill one block of 16."""
    (proof,) = proofs(checkpoint("deepseek_v3"), "tp=2", [None], numbers=tmp_path / "numbers", tokens=12)
    assert proof.recorded is not None
    held = {h.rank_class: h.bytes for h in proof.recorded.holdings if h.term == "kv_cache"}
    assert held == {"rank0": 5 * 16 * 20 * 4, "rank1": 5 * 16 * 20 * 4}


def test_decoding_never_unfolds_the_cache(checkpoint: Folder, tmp_path: Path) -> None:
    """kv_b unfolds 12 tokens in the prefill; a decode step takes it head by head, on its one token."""
    (proof,) = proofs(checkpoint("deepseek_v3"), "tp=3", [None], numbers=tmp_path / "numbers", tokens=12)
    assert proof.recorded is not None
    rows = [e for e in proof.recorded.entries if e.rank_class == "rank0" and e.layer == 0 and e.op == "matmul"]
    shapes = {phase: [e.shapes for e in rows if e.phase == phase] for phase in ("prefill", "decode")}
    unfold = ((12, 16), (16, 3 * (6 + 5)))
    assert shapes["prefill"].count(unfold) == 1
    for side in (((3, 1, 6), (3, 6, 16)), ((3, 1, 16), (3, 16, 5))):
        assert shapes["decode"].count(side) == 3
        assert side not in shapes["prefill"]
    assert unfold not in shapes["decode"]


def test_gemma_settings_of_both_generations_are_the_same() -> None:
    old = tiny.config("gemma3")
    new = {k: v for k, v in old.items() if k not in {"rope_theta", "rope_local_base_freq", "rope_scaling"}}
    new["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    first, second = (read_settings(raw, "config.json") for raw in (old, new))
    assert first == second
    assert (first.rope.theta, first.rope.factor) == (1e6, 8.0)
    assert first.local_rope is not None
    assert (first.local_rope.theta, first.local_rope.kind) == (1e4, "default")
    assert (first.norm_offset, first.embedding_scale, first.softmax_scale) == (1.0, 72**0.5, 24**-0.5)


def test_the_final_cap_bounds_logits(checkpoint: Folder, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", "gemma3", final_logit_softcapping=3.0)
    found = tiny.alone(tiny.job(folder, "tp=1", new=2))
    tiny.assert_same((found.tokens, found.logits), tiny.oracle(folder, new=2))
    assert max(float(rows.abs().max()) for rows in found.logits.values()) <= 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_bidirectional_attention": True}, "bidirectional"),
        ({"attn_logit_softcapping": 50.0}, "capped scores"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is '0'"),
        ({"rope_parameters": {"full_attention": 3}}, "full_attention is '3'"),
        ({"hidden_activation": "relu"}, "hidden_act is 'relu'"),
    ],
)
def test_settings_that_are_not_computed_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=r"config\.json") as caught:
        read_settings(tiny.config("gemma3", **changes), "config.json")
    assert said in str(caught.value)


def test_yarn_scales_the_scores_of_latent_attention(checkpoint: Folder) -> None:
    """mscale_all_dim 0.9 and factor 4: (0.09 ln 4 + 1)^2 / sqrt(6 + 4)."""
    settings = read_folder(checkpoint("deepseek_v3")).settings
    mscale = 0.09 * 1.3862943611198906 + 1
    assert settings.softmax_scale == pytest.approx(mscale**2 / 10**0.5)
    assert settings.rope.interleaved
    assert settings.rope.attention_factor == pytest.approx((0.07 * 1.3862943611198906 + 1) / mscale)


def test_kimi_k2_is_a_deepseek_v3() -> None:
    kimi, deepseek = (read_settings(tiny.config("deepseek_v3", model_type=m), "") for m in ("kimi_k2", "deepseek_v3"))
    assert kimi == deepseek


def test_sinks_take_their_share_of_the_softmax() -> None:
    """One sink a head beside three equal scores: a quarter of the weight goes to no value."""
    from meshwright.runtime.models.attention import Scores, one

    q, k = torch.zeros(1, 2, 4), torch.zeros(3, 1, 4)
    v = torch.ones(3, 1, 4)
    out = one(q, k, v, Scores(sinks_H=torch.tensor([0.0, float("-inf")])))
    assert torch.allclose(out[0, 0], torch.full((4,), 0.75))
    assert torch.allclose(out[0, 1], torch.ones(4))

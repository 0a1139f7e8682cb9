"""What is proposed to a training command that runs out of memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.judge.asked import check

RUN = "deepspeed --num_gpus 8 train.py --deepspeed ds.json --max_seq_length 4096"


@pytest.mark.parametrize(
    ("model", "first"), [("llama-2-7b", "DP 8, ZeRO-2 with full recompute"), ("llama-3.1-8b", "DP 8, ZeRO-3 with full")]
)
def test_full_recompute_is_proposed_where_activations_do_not_fit(tmp_path: Path, model: str, first: str) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    verdict = check(RUN, "8xA100-40G", model=model, base=tmp_path)
    assert not verdict.starts
    assert verdict.suggestions[0].text.startswith(first)
    assert "gradient checkpointing" in verdict.suggestions[0].text
    if model == "llama-2-7b":
        assert check(f"{RUN} --gradient_checkpointing True", "8xA100-40G", model=model, base=tmp_path).starts


def test_nothing_is_proposed_that_does_not_fit(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    verdict = check(RUN, "8xA100-40G", model="llama-3.1-405b", base=tmp_path)
    assert not verdict.starts
    assert verdict.suggestions == ()

"""What is proposed to a training command that runs out of memory."""

from __future__ import annotations

import json
import re
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


MEGATRON = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size {tp} --num-layers 32 --hidden-size 4096 "
    "--num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 "
    "--global-batch-size 32 --vocab-size 32000 --bf16"
)
TITAN = "torchrun --nproc-per-node 8 -m torchtitan.train --module llama3 --config llama3_8b "
ACCELERATE = """distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""


@pytest.mark.parametrize(
    ("command", "model"),
    [
        (MEGATRON.format(tp=3), None),
        (TITAN + "--parallelism.tensor-parallel-degree 3", None),
        (TITAN + "--training.local-batch-size 8", None),
        ("deepspeed --num_gpus 16 train.py --deepspeed ds.json", "llama-3.1-8b"),
        ("accelerate launch --config_file acc.yaml train.py", "llama-3.1-8b"),
    ],
)
def test_the_mended_command_starts(tmp_path: Path, command: str, model: str | None) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    (tmp_path / "acc.yaml").write_text(ACCELERATE)
    verdict = check(command, "8xH100-SXM", model=model, base=tmp_path)
    assert not verdict.starts
    assert all("rank" in s.text and "GiB of" in s.text for s in verdict.suggestions)
    assert len({s.text for s in verdict.suggestions}) == len(verdict.suggestions) > 0
    for file in verdict.mended_files:
        (tmp_path / file.path).write_text(file.text)
    [mended] = verdict.mended
    env = "".join(f"{name}={value} " for name, value in mended.env)
    again = check(env + mended.text, "8xH100-SXM", model=model, base=tmp_path)
    assert again.starts, again.verdict
    assert again.invocation.layout.world == verdict.suggestions[0].layout.world
    assert again.plan.chosen is not None
    said = re.search(r"takes ([\d.]+) GiB", verdict.suggestions[0].text)
    assert said is not None
    assert float(said[1]) == pytest.approx(again.plan.chosen.memory.worst.total_bytes / 2**30, rel=0.02)


def test_neighbours_of_an_illegal_layout_come_before_others(tmp_path: Path) -> None:
    command = MEGATRON.format(tp=8).replace("8 pretrain", "8 --nnodes 4 pretrain") + " --pipeline-model-parallel-size 3"
    verdict = check(command, "4x8xH100-SXM", base=tmp_path)
    assert verdict.suggestions[0].text.startswith("TP 8 x PP 4: rank 0 takes")
    assert len(verdict.mended) == 4


def test_copies_that_do_not_fit_are_counted_without_activations() -> None:
    verdict = check("torchrun --nproc-per-node 8 train.py", "8xH100-SXM", model="llama-3.1-8b")
    assert verdict.plan.chosen is not None
    worst = verdict.plan.chosen.memory.worst
    states = (worst.total_bytes - worst.activations_bytes - worst.runtime_bytes) / 2**30
    [text] = [t for t in verdict.unwise if "copies" in t]
    assert f"parameters and states take {states:,.1f} GiB a rank of 79.2 GiB" in text


@pytest.mark.parametrize("launcher", ["deepspeed", "accelerate launch", "torchrun --nproc-per-node 8"])
def test_the_trainers_own_fsdp_shards_under_every_launcher(launcher: str) -> None:
    verdict = check(f"{launcher} train.py --fsdp 'full_shard auto_wrap'", "8xH100-SXM", model="llama-3.1-8b")
    assert (verdict.invocation.layout.dp, verdict.invocation.layout.zero) == (8, 3)
    assert verdict.starts


def test_a_flag_of_a_serving_engine_is_translated_for_megatron() -> None:
    command = MEGATRON.format(tp=1).replace("--tensor-model-parallel-size 1", "--tensor-parallel-size 4")
    [rule] = [r for r in check(command, "8xH100-SXM").invocation.findings if r.code == "flag_unknown"]
    assert rule.way_out.endswith("use --tensor-model-parallel-size")

"""Commands in, verdicts out: ``check`` on SGLang's and TensorRT-LLM's command lines, end to end."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from meshwright.judge.check import check_config, check_words
from meshwright.judge.verdict import Verdict
from meshwright.specs.cluster import parse_cluster

R1 = "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-R1"
HEAD = "--node-rank 0 --dist-init-addr 10.0.0.1:20000"


def _check(command: str, on: str, model: str | None = None) -> Verdict:
    return check_words(shlex.split(command), parse_cluster(on), model=model)


@pytest.mark.parametrize(
    ("command", "on", "starts", "said"),
    [
        (f"{R1} --tp 32 --nnodes 4 {HEAD}", "4x8xA100-80G@ib-400g", False, "18432 / 32 = 576"),
        (f"{R1} --tp 16 --nnodes 2 {HEAD}", "2x8xH100-SXM@ib-400g", True, "will start: TP 16"),
        (f"{R1} --tp 8 --dp 2 --enable-dp-attention", "1x8xH200-SXM", True, "will start: TP 4 x DP 2"),
        (f"{R1} --tp 8", "1x8xH100-SXM", False, "of weights on rank 0"),
        (f"{R1} --tp-size 16 --nnodes 2", "2x8xH800-80G@ib-400g", False, "without --dist-init-addr"),
        ("sglang serve meta-llama/Llama-2-13b-hf --tp 3", "1x4xRTX-3090", False, "40 attention heads"),
        ("sglang serve Qwen/Qwen3-8B --tp 16", "1x8xH100-SXM", False, "16 ranks on one node of 8"),
        ("trtllm-serve meta-llama/Llama-2-13b-hf --tp_size 3", "1x4xRTX-3090", False, "40 attention heads"),
        ("trtllm-serve Qwen/Qwen3-32B --max_seq_len 40960", "1x1xRTX-4090", False, "of weights on rank 0"),
        ("trtllm-serve Qwen/Qwen3-8B --max_seq_len 40960", "1x1xRTX-4090", False, "of KV cache"),
        (
            "mpirun -n 8 trtllm-llmapi-launch trtllm-serve Qwen/Qwen3-8B --tp_size 1",
            "1x8xH100-SXM",
            False,
            "Engine world size (1) != Runtime world size (8)",
        ),
    ],
)
def test_verdicts(command: str, on: str, starts: bool, said: str) -> None:
    verdict = _check(command, on)
    assert verdict.starts == starts, verdict.verdict
    assert said in verdict.verdict
    assert "\n" not in verdict.verdict


def test_the_mended_command_starts() -> None:
    verdict = _check("sglang serve meta-llama/Llama-2-13b-hf --tp 3", "1x4xRTX-3090")
    assert verdict.mended
    again = _check(verdict.mended[0].text, "1x4xRTX-3090")
    assert again.starts


def test_default_share_beside_many_attention_replicas_leaves_nothing() -> None:
    """SGLang reserves 512 x 32 x 4.5 MiB for decode graphs of 32 attention replicas; a stated share starts."""
    wide = f"{R1} --tp-size 32 --attn-dp-size 32 --moe-a2a-backend deepep --moe-dense-tp-size 1 --nnodes 4 {HEAD}"
    where = "4x8xH100-SXM@ib-400g"
    bare = _check(wide, where)
    assert not bare.starts
    assert bare.plan.chosen is not None
    assert any("--mem-fraction-static 0.8" in note for note in bare.plan.chosen.memory.notes)
    assert _check(f"{wide} --mem-fraction-static 0.8 --context-length 16384", where).starts


def test_a_disaggregated_file_is_judged_on_both_sides(tmp_path: Path) -> None:
    file = tmp_path / "disagg.yaml"
    text = (
        "model: Qwen/Qwen3-32B\ncache_transceiver_config:\n  backend: UCX\n"
        "context_servers:\n  num_instances: 1\n  tensor_parallel_size: {}\n"
        "generation_servers:\n  num_instances: 1\n  tensor_parallel_size: 4\n"
    )
    file.write_text(text.format(2))
    good = check_config(file, parse_cluster("1x8xH100-SXM"))
    assert good is not None
    assert good.starts
    assert good.prefill is not None
    file.write_text(text.format(3))
    bad = check_config(file, parse_cluster("1x8xH100-SXM"))
    assert bad is not None
    assert not bad.starts
    assert "prefill side" in bad.verdict

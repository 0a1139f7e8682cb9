"""``config-invalid`` and ``launch`` reports about vLLM, in our own words: a command in, the verdict out.

The ids are those of the public cases they come from. Each refusal is shown beside a neighbour that starts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.judge.asked import check, codes

#: id, command, cluster, what the verdict names, code of the rule, a neighbour that starts.
REFUSED = [
    (
        "C001-52-heads",
        "vllm serve huggyllama/llama-30b -tp 8",
        "8xA100-80G",
        ("52", "8"),
        "heads_divide_tp",
        "vllm serve huggyllama/llama-30b -tp 4",
    ),
    (
        "C001-28-heads",
        "vllm serve Qwen/Qwen2-57B-A14B-Instruct -tp 8",
        "8xA100-80G",
        ("28", "8"),
        "heads_divide_tp",
        "vllm serve Qwen/Qwen2-57B-A14B-Instruct -tp 4",
    ),
    (
        "C004-40-heads-on-3",
        "vllm serve meta-llama/Llama-2-13b-hf --tensor-parallel-size 3",
        "3xRTX-3090",
        ("40", "3"),
        "heads_divide_tp",
        "vllm serve meta-llama/Llama-2-13b-hf --tensor-parallel-size 2",
    ),
    (
        "C004-64-heads-on-5",
        "vllm serve meta-llama/Llama-2-70b-hf -tp 5",
        "8xV100-32G",
        ("64", "5"),
        "heads_divide_tp",
        "vllm serve meta-llama/Llama-2-70b-hf -tp 8",
    ),
    (
        "C005-28-heads-on-8",
        "vllm serve Qwen/Qwen2-7B-Instruct -tp 8",
        "8xL40S",
        ("28", "8"),
        "heads_divide_tp",
        "vllm serve Qwen/Qwen2-7B-Instruct -tp 4 -dp 2",
    ),
    (
        "C047-fp8-block",
        "vllm serve Qwen/Qwen3-235B-A22B-FP8 -tp 8",
        "8xH100-SXM",
        ("1536", "192", "128"),
        "quant_block",
        "vllm serve Qwen/Qwen3-235B-A22B-FP8 -tp 4",
    ),
    (
        "C045-fp8-block-30b",
        "vllm serve Qwen/Qwen3-30B-A3B-FP8 -tp 4",
        "4xH100-SXM",
        ("768", "192", "128"),
        "quant_block",
        "vllm serve Qwen/Qwen3-30B-A3B-FP8 -tp 4 --enable-expert-parallel",
    ),
    (
        "C169-40-heads-on-5",
        "vllm serve Qwen/Qwen3-14B -tp 5",
        "8xH100-SXM",
        ("8", "5"),
        "kv_heads_over_tp",
        "vllm serve Qwen/Qwen3-14B -tp 4",
    ),
    (
        "C265-padded-vocabulary",
        "vllm serve codellama/CodeLlama-13b-Instruct-hf -tp 5",
        "5xRTX-4090",
        ("32064", "5"),
        "vocab_over_tp",
        "vllm serve codellama/CodeLlama-13b-Instruct-hf -tp 4",
    ),
    (
        "C265-heads-on-6",
        "vllm serve codellama/CodeLlama-13b-Instruct-hf -tp 6",
        "6xRTX-4090",
        ("40", "6"),
        "heads_divide_tp",
        "vllm serve codellama/CodeLlama-13b-Instruct-hf -tp 2 -pp 3",
    ),
    (
        "C054-more-ranks-than-devices",
        "vllm serve meta-llama/Llama-3.1-8B -tp 4 -pp 4 --distributed-executor-backend ray",
        "2x4xA100-80G",
        ("16", "8"),
        "world_exceeds_cluster",
        "vllm serve meta-llama/Llama-3.1-8B -tp 4 -pp 2 --distributed-executor-backend ray",
    ),
    (
        "C057-second-node-not-named",
        "vllm serve Qwen/Qwen3-8B -tp 2",
        "2x1xDGX-Spark",
        ("2", "1"),
        "one_node_too_small",
        "vllm serve Qwen/Qwen3-8B -tp 2 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1",
    ),
    (
        "C292-no-backend-flag",
        "vllm serve meta-llama/Llama-3.3-70B-Instruct -tp 8",
        "2x4xGB200",
        ("8", "4"),
        "one_node_too_small",
        "vllm serve meta-llama/Llama-3.3-70B-Instruct -tp 8 --distributed-executor-backend ray",
    ),
    (
        "C281-engine-v0-has-no-dp",
        "VLLM_USE_V1=0 vllm serve Qwen/Qwen3-30B-A3B -dp 8",
        "8xH20",
        ("8",),
        None,
        "vllm serve Qwen/Qwen3-30B-A3B -dp 8",
    ),
]


@pytest.mark.parametrize(
    ("command", "on", "named", "code", "neighbour"),
    [case[1:] for case in REFUSED],
    ids=[case[0] for case in REFUSED],
)
def test_refused_with_its_numbers_and_the_neighbour_starts(
    command: str, on: str, named: tuple[str, ...], code: str | None, neighbour: str
) -> None:
    verdict = check(command + " --max-model-len 2048", on)
    assert not verdict.starts
    assert verdict.verdict.startswith("will not start")
    assert all(number in verdict.verdict for number in named), verdict.verdict
    if code is not None:
        assert code in codes(verdict)
    assert check(neighbour + " --max-model-len 2048", on).starts


def test_c004_the_way_out_names_what_each_choice_holds() -> None:
    verdict = check("vllm serve meta-llama/Llama-2-13b-hf --tensor-parallel-size 3", "1x4xRTX-3090")
    texts = " ".join(s.text for s in verdict.suggestions)
    assert "TP 2 (12.1 GiB of weights a device of 23.6" in texts
    assert "stages of 13, 14, 13 layers" in texts
    assert "--tensor-parallel-size" in verdict.mended[0].text


def test_c041_awq_group_does_not_divide_the_shard(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 80,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "torch_dtype": "float16",
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    verdict = check(f"vllm serve {tmp_path} -tp 2", "2xA800-80G")
    assert not verdict.starts
    assert "29568 / 2 = 14784" in verdict.verdict
    assert "128" in verdict.verdict
    assert check(f"vllm serve {tmp_path} -pp 2", "2xA800-80G").starts


def test_c055_tp_over_two_nodes_starts_under_ray_and_is_unwise() -> None:
    command = "vllm serve mistralai/Mistral-Small-3.2-24B-Instruct-2506 -tp 16 --distributed-executor-backend ray"
    verdict = check(command, "2x8xH100-SXM")
    assert verdict.starts
    assert "tp_crosses_node" in codes(verdict)


def test_c153_kimi_k3_runs_as_tp8_pp2_on_two_nodes() -> None:
    verdict = check("vllm serve kimi-k3 -tp 8 -pp 2 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1", "2x8xH200-SXM")
    assert verdict.starts
    alone = check("vllm serve kimi-k3 -tp 8", "1x8xH200-SXM")
    assert not alone.starts
    assert "of weights on rank" in alone.verdict


def test_c293_the_log_line_with_the_world_size_is_explained() -> None:
    command = "vllm serve meta-llama/Llama-3.1-70B -tp 8 -pp 2 --distributed-executor-backend ray"
    verdict = check(command, "2x8xH100-SXM")
    assert verdict.starts
    assert any("(16)" in line and "TP 8 x PP 2" in meaning for line, meaning in verdict.misleading)


def test_context_that_does_not_fit_says_the_longest_that_does() -> None:
    verdict = check("vllm serve THUDM/glm-4-9b-chat --max-model-len 131072 --max-num-seqs 64", "RTX-4090")
    assert not verdict.starts
    assert "the longest that fits has" in verdict.verdict


def test_a_flag_that_the_version_does_not_know_is_named_and_not_fatal() -> None:
    verdict = check("vllm serve Qwen/Qwen3-8B --flux-capacitor 3", "H100-SXM")
    assert verdict.starts
    assert any("--flux-capacitor" in r.message for r in verdict.invocation.findings) or verdict.invocation.unknown

"""``config-invalid`` and ``launch`` reports about the other engines, in our own words: command in, verdict out.

Reports about vLLM are in ``test_vllm_cases.py``. ``NOT_DECIDED`` lists those that no command or configuration decides;
``bench/cases.py`` counts.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from bench.cases import ids_by_kind, read_tests

from meshwright.errors import InputError
from tests.cases.serving import LLAMA, dense
from tests.engines.megatron.commands import LLAMA_8B, replaced
from tests.judge.asked import check, codes
from tests.shared import ROOT, shared_dir

#: Reports of the two kinds that nothing pasted decides.
NOT_DECIDED = (
    ("C114", "vLLM 0.6.6 lost what 0.6.3 could: no profile of either; the cure is the addresses of a running Ray"),
    ("C113", "whether Ray registered the IPv6 or the IPv4 address of a node: state of the cluster"),
    ("C115", "the driver runs on a node without devices: state of the cluster"),
    ("C116", "Ray chose nodes without the head: state of the cluster, in a version before the profiles"),
    ("C117", "devices of an existing Ray cluster are taken by other actors: state of the cluster"),
    ("C225", "host memory while reading .bin shards: no command names the files of the checkpoint"),
    ("C277", "a bug of vLLM 0.17.0 in the order of start-up: no profile of that version"),
)

SGLANG = "python -m sglang.launch_server --model-path"
FOUR_NODES = "--nnodes 4 --node-rank 0 --dist-init-addr 10.0.0.1:20000"
TRTLLM = "trtllm-llmapi-launch trtllm-serve"
SPLIT = replaced(
    f"CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 8 --nnodes 4 --node-rank 0 --master-addr a "
    f"pretrain_gpt.py {LLAMA_8B}",
    tensor_model_parallel_size=8,
    pipeline_model_parallel_size=4,
    sequence_parallel=True,
)
ONE_NODE = f"CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 8 pretrain_gpt.py {LLAMA_8B}"
EXPERTS = replaced(
    ONE_NODE,
    num_experts=64,
    moe_ffn_hidden_size=512,
    moe_router_topk=2,
    moe_token_dispatcher_type="alltoall",
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=2,
    sequence_parallel=True,
    expert_tensor_parallel_size=1,
    recompute_granularity="full",
    recompute_method="uniform",
    recompute_num_layers=1,
)
TRANSFORMERS = "torchrun --nproc-per-node {} train.py --max_seq_length 512 --distributed_config '{{\"tp_size\": {}}}'"
DEEPSPEED = "deepspeed --num_gpus {} train.py --deepspeed ds.json --max_seq_length {} --gradient_checkpointing True"

#: id, command, cluster, model where the command names none, what the verdict names, code, a neighbour that starts.
REFUSED: list[tuple[str, str, str, str | None, tuple[str, ...], str, str]] = [
    (
        "C043-fp8-block-over-32",
        f"{SGLANG} deepseek-ai/DeepSeek-R1 --tp 32 {FOUR_NODES}",
        "4x8xH100-SXM",
        None,
        ("18432", "32", "576", "128"),
        "quant_block",
        f"{SGLANG} deepseek-ai/DeepSeek-R1 --tp 16 --pp-size 2 {FOUR_NODES}",
    ),
    (
        "C046-shared-expert-over-4",
        f"{SGLANG} stepfun-ai/Step-3.7-Flash-FP8 --tp 4",
        "4xH100-SXM",
        None,
        ("1280", "4", "320", "128"),
        "quant_block",
        f"{SGLANG} stepfun-ai/Step-3.7-Flash-FP8 --tp 2 --pp-size 2",
    ),
    (
        "C121-attention-replicas-do-not-divide",
        f"{SGLANG} deepseek-ai/DeepSeek-V3 --tp 8 --attn-dp-size 3",
        "8xH200-SXM",
        None,
        ("8", "3"),
        "attention_inside_tp_size",
        f"{SGLANG} deepseek-ai/DeepSeek-V3 --tp 8 --dp 2 --enable-dp-attention",
    ),
    (
        "C197-46-layers-over-4",
        replaced(SPLIT, num_layers=46),
        "4x8xH100-SXM",
        None,
        ("46", "4"),
        "layers_divide_pp",
        replaced(SPLIT, num_layers=46, decoder_first_pipeline_num_layers=11, decoder_last_pipeline_num_layers=11),
    ),
    (
        "C201-30-layers-over-8",
        replaced(ONE_NODE, num_layers=30, pipeline_model_parallel_size=8),
        "8xH100-SXM",
        None,
        ("30", "8"),
        "layers_divide_pp",
        replaced(ONE_NODE, num_layers=32, pipeline_model_parallel_size=8),
    ),
    (
        "C254-experts-against-ranks-of-a-stage",
        replaced(EXPERTS, expert_model_parallel_size=8),
        "8xH100-SXM",
        None,
        ("8", "4"),
        "expert_grid",
        replaced(EXPERTS, expert_model_parallel_size=4),
    ),
    (
        "C202-heads-over-10-ranks",
        TRANSFORMERS.format(10, 10),
        "10xA100-80G",
        "llama-2-7b",
        ("32", "10"),
        "heads_divide_tp",
        TRANSFORMERS.format(8, 8),
    ),
    (
        "C203-kv-heads-fewer-than-ranks",
        TRANSFORMERS.format(16, 16),
        "16xA100-80G",
        "llama-3.1-8b",
        ("8 KV heads", "16"),
        "kv_heads_over_tp",
        TRANSFORMERS.format(8, 8),
    ),
    (
        "C267-engine-of-one-rank-under-8",
        f"mpirun -n 8 {TRTLLM} meta-llama/Llama-2-70b-hf --tp_size 1",
        "8xA100-80G",
        None,
        ("Engine world size (1) != Runtime world size (8)",),
        "mpi_ranks",
        f"mpirun -n 8 {TRTLLM} meta-llama/Llama-2-70b-hf --tp_size 8",
    ),
    (
        "C269-sixteen-ranks-wanted",
        f"mpirun -n 1 {TRTLLM} microsoft/Phi-3-mini-128k-instruct --tp_size 4 --pp_size 4",
        "2x8xA100-80G",
        None,
        ("1 MPI ranks", "16"),
        "mpi_ranks",
        f"mpirun -n 16 {TRTLLM} microsoft/Phi-3-mini-128k-instruct --tp_size 4 --pp_size 4",
    ),
    (
        "C271-four-ranks-wanted",
        f"mpirun -n 1 {TRTLLM} mistralai/Mistral-7B-v0.1 --tp_size 4",
        "4xA10G",
        None,
        ("1 MPI ranks", "4", "mpiSize == tp * pp"),
        "mpi_ranks",
        f"mpirun -n 4 {TRTLLM} mistralai/Mistral-7B-v0.1 --tp_size 4",
    ),
]


@pytest.mark.parametrize(
    ("command", "on", "model", "named", "code", "neighbour"),
    [case[1:] for case in REFUSED],
    ids=[case[0] for case in REFUSED],
)
def test_refused_with_its_numbers_and_the_neighbour_starts(
    command: str, on: str, model: str | None, named: tuple[str, ...], code: str, neighbour: str
) -> None:
    verdict = check(command, on, model=model)
    assert not verdict.starts
    assert verdict.verdict.startswith("will not start")
    assert all(number in verdict.verdict for number in named), verdict.verdict
    assert code in codes(verdict)
    other = check(neighbour, on, model=model)
    assert other.starts, other.verdict


def folder(at: Path, config: dict[str, Any], quantization: dict[str, Any]) -> Path:
    """A model folder with nothing but its configuration."""
    (at / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return at


@pytest.mark.parametrize(("width", "starts"), [(29568, False), (29696, True)])
def test_c042_awq_group_does_not_divide_the_shard(tmp_path: Path, width: int, starts: bool) -> None:
    """29568 / 2 = 14784 ends inside a group of 128; the padded width 29696 of the later checkpoint does not."""
    config = dense("Qwen2ForCausalLM", 8192, 80, 64, 8, width, 152064, 32768, model_type="qwen2")
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    verdict = check(f"{SGLANG} {folder(tmp_path, config, awq)} --tp 2", "2xA800-80G")
    assert verdict.starts is starts
    assert ("29568 / 2 = 14784" in verdict.verdict) is not starts


@pytest.mark.parametrize(
    ("flags", "starts"), [("-tp 8", False), ("-tp 4", False), ("-tp 2", False), ("-tp 1", True), ("-tp 8 -ep", True)]
)
def test_c044_experts_of_320_channels(tmp_path: Path, flags: str, starts: bool) -> None:
    """320 / TP is no multiple of the block of 128 for 2, 4 and 8 ranks; whole experts and one rank are fine."""
    config = dense(
        "Qwen3MoeForCausalLM", 2048, 8, 32, 8, 6144, 151936, 40960, model_type="qwen3_moe", head_dim=128,
        num_experts=64, num_experts_per_tok=8, moe_intermediate_size=320, decoder_sparse_step=1,
    )  # fmt: skip
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    verdict = check(f"vllm serve {folder(tmp_path, config, fp8)} {flags} --max-model-len 2048", "8xL40S")
    assert verdict.starts is starts, verdict.verdict
    if not starts:
        assert "320" in verdict.verdict
        assert "128" in verdict.verdict
        assert "quant_block" in codes(verdict)


def test_c121_two_replicas_of_attention_are_attention_tp_4() -> None:
    verdict = check(f"{SGLANG} deepseek-ai/DeepSeek-V3 --tp 8 --dp 2 --enable-dp-attention", "8xH200-SXM")
    assert verdict.starts
    assert (verdict.invocation.layout.tp, verdict.invocation.layout.dp) == (4, 2)


def test_c140_the_paged_cache_must_hold_one_sequence(tmp_path: Path) -> None:
    """A share too small for one sequence does not start; a cap below one is named; both say what to change."""
    command = "trtllm-serve meta-llama/Llama-2-7b-hf --max_seq_len 4096"
    small = check(f"{command} --kv_cache_free_gpu_memory_fraction 0.1", "A10")
    assert not small.starts
    assert "the longest that fits has" in small.verdict
    assert check(f"{command} --kv_cache_free_gpu_memory_fraction 0.9", "A10").starts
    (tmp_path / "c.yml").write_text("kv_cache_config:\n  max_tokens: 2048\n")
    capped = check(f"{command} --config c.yml", "A10", base=tmp_path)
    rule = next(r for r in capped.invocation.findings if r.code == "cache_below_one_sequence")
    assert dict(rule.numbers) == {"max_tokens": 2048, "max_seq_len": 4096}
    assert "maxTokensInPagedKvCache must be large enough" in rule.message
    (tmp_path / "c.yml").write_text("kv_cache_config:\n  max_tokens: 4096\n")
    assert "cache_below_one_sequence" not in codes(check(f"{command} --config c.yml", "A10", base=tmp_path))


def test_c217_a_model_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match=r"Llama-3\.2-70B-Instruct.*near: llama-3"):
        check("vllm serve meta-llama/Llama-3.2-70B-Instruct -tp 4", "4xA100-80G")


def sharded(at: Path, ulysses: int, nodes: int = 1) -> Path:
    """A DeepSpeed configuration of stage 3 with Ulysses, and a host file."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "sequence_parallel_size": ulysses,
    }
    (at / "ds.json").write_text(json.dumps(config))
    (at / "h").write_text("".join(f"n{i} slots=8\n" for i in range(nodes)))
    return at


@pytest.mark.parametrize(("degree", "starts"), [(8, False), (4, True)])
def test_c260_28_heads_over_ulysses_8(tmp_path: Path, degree: int, starts: bool) -> None:
    verdict = check(DEEPSPEED.format(8, 4096), "8xA100-80G", model="qwen2.5-7b", base=sharded(tmp_path, degree))
    assert verdict.starts is starts, verdict.verdict
    if starts:
        assert (verdict.invocation.layout.cp, verdict.invocation.layout.dp) == (4, 2)
    else:
        assert "28 attention heads are not divisible by sequence_parallel_size 8" in verdict.verdict
        rule = next(r for r in verdict.plan.rules if r.code == "heads_over_ulysses")
        assert "1, 2, 4" in rule.way_out
        assert "ring attention" in rule.way_out


@pytest.mark.parametrize(("degree", "starts"), [(64, False), (16, True)])
def test_c261_48_heads_over_64(tmp_path: Path, degree: int, starts: bool) -> None:
    config = dense(LLAMA, 6144, 40, 48, 48, 16384, 32000, 4096, model_type="llama")
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = DEEPSPEED.replace("--num_gpus {}", "--hostfile h").format(4096)
    verdict = check(command, "8x8xA100-80G", model=str(tmp_path / "config.json"), base=sharded(tmp_path, degree, 8))
    assert verdict.starts is starts, verdict.verdict
    assert ("48 attention heads are not divisible by sequence_parallel_size 64" in verdict.verdict) is not starts


@pytest.mark.parametrize(("tokens", "starts"), [(4097, False), (4096, True)])
def test_c264_sequence_over_ulysses(tmp_path: Path, tokens: int, starts: bool) -> None:
    base = sharded(tmp_path, 8)
    verdict = check(DEEPSPEED.format(8, tokens), "8xA100-80G", model="mistral-7b", base=base)
    assert verdict.starts is starts, verdict.verdict
    if not starts:
        assert "4097" in verdict.verdict
        assert "pad the sequence to 4104" in next(
            r.way_out for r in verdict.plan.rules if r.code == "sequence_over_ulysses"
        )


def test_c111_c112_ray_and_the_engine_get_the_same_address() -> None:
    """Waiting for ``node:IP``: the mended commands start Ray and vLLM under one address on every node."""
    verdict = check(
        "vllm serve meta-llama/Llama-3.1-70B -tp 16 --distributed-executor-backend ray --max-model-len 4096", "2x8xL4"
    )
    assert verdict.starts
    meaning = next(meaning for line, meaning in verdict.misleading if "node:" in line)
    assert "VLLM_HOST_IP" in meaning
    assert "--node-ip-address" in meaning
    inside = check("vllm serve Qwen/Qwen3-8B -tp 8 --distributed-executor-backend ray", "2x8xL40S")
    assert not any("node:" in line for line, _ in inside.misleading)


def test_commands_are_words_a_shell_would_see() -> None:
    assert all(shlex.split(case[1]) and shlex.split(case[-1]) for case in REFUSED)


def test_every_case_of_both_kinds_is_answered_or_listed() -> None:
    """What a test answers and what is listed are together all of them; 20 at least are answered as commands."""
    wanted = ids_by_kind(shared_dir("cases", "cases.csv"))
    asked = {*wanted["config-invalid"], *wanted["launch"]}
    answers = read_tests(ROOT / "tests")
    listed = dict(NOT_DECIDED)
    assert asked - answers.tested - set(listed) == set()
    assert asked & answers.tested & set(listed) == set()
    assert not asked & set(answers.wrong)
    judged = read_tests(ROOT / "tests" / "judge").right & asked
    assert len(judged) >= 20
    assert set(listed) <= asked

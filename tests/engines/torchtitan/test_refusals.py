"""A torchtitan command that will not start is told why, with both numbers, and what to write instead."""

from __future__ import annotations

import pytest

from meshwright.engines.torchtitan import ENGINE
from tests.engines.torchtitan.commands import LLAMA_8B, LLAMA_405B, judged, p, parse, t

QWEN = "torchrun --nproc-per-node 8 -m torchtitan.train --module qwen3 --config qwen3_30b_a3b"
OFF = t(disable_cuda_graphs=True)

#: Command, cluster, code, numbers of the message, a piece of the way out.
CASES = [
    (LLAMA_8B + p(tensor_parallel_degree=3), "1x8xH100-SXM", "world_divides", ("6", "8"), "tp from 1, 2, 4, 8"),
    (LLAMA_8B + p(data_parallel_shard_degree=2, tensor_parallel_degree=2), "1x8xH100-SXM", "world_divides", ("4", "8"),
     "data_parallel_shard_degree 4"),
    (LLAMA_8B + p(data_parallel_replicate_degree=3), "1x8xH100-SXM", "world_divides", ("6", "8"), "9 devices"),
    (LLAMA_405B + p(tensor_parallel_degree=16), "64x8xH100-SXM", "kv_heads_divide_tp", ("8", "16"),
     "tp from 1, 2, 4, 8"),
    (LLAMA_8B + t(seq_len=8190) + p(context_parallel_degree=4), "1x8xH100-SXM", "sequence_over_cp", ("8190", "8"),
     "8192"),
    (LLAMA_8B + t(seq_len=8190) + p(tensor_parallel_degree=4), "1x8xH100-SXM", "sequence_over_sp", ("8190", "4"),
     "multiple of 4"),
    (LLAMA_8B + t(seq_len=262144), "1x8xH100-SXM", "positions_below_sequence", ("262144", "131072"), "131072"),
    (LLAMA_8B + t(global_batch_size=12), "1x8xH100-SXM", "batch_not_whole", ("12", "8"), "use 8"),
    (LLAMA_8B + p(pipeline_parallel_degree=2) + t(local_batch_size=4), "1x8xH100-SXM", "graphs_under_pipeline", ("2",),
     "--training.disable_cuda_graphs"),
    (LLAMA_8B + OFF + p(pipeline_parallel_degree=2, pipeline_parallel_microbatch_size=3) + t(local_batch_size=4),
     "1x8xH100-SXM", "local_batch_micro", ("4", "3"), "choose 1, 2, 4"),
    (QWEN + p(expert_parallel_degree=8), "1x8xH100-SXM", "graphs_with_experts", ("8",), "MinimalAsyncEP"),
    (QWEN + OFF + p(expert_parallel_degree=3, data_parallel_shard_degree=8), "1x8xH100-SXM", "experts_divide_ep",
     ("128", "3"), "ep from 1, 2, 4"),
    (QWEN + OFF + p(expert_parallel_degree=8, data_parallel_replicate_degree=2), "1x8xH100-SXM", "expert_grid",
     ("8", "4"), "ep from 1, 2, 4"),
    (LLAMA_8B + p(expert_parallel_degree=2), "1x8xH100-SXM", "ep_without_experts", ("2", "0"), "ep 1"),
    (LLAMA_8B + " --compile.enable_async_tensor_parallel", "1x8xH100-SXM", "async_tp_compiled", (), "--compile.enable"),
    (LLAMA_8B + " activation_checkpoint:memory-budget", "1x8xH100-SXM", "memory_budget_compiled", (),
     "--compile.enable"),
    (LLAMA_8B + " activation_checkpoint:full --training.steps 3", "1x8xH100-SXM", "flag_misplaced", (), "at the end"),
    (LLAMA_8B + " --activation_checkpoint.debug", "1x8xH100-SXM", "flag_misplaced", (),
     "activation_checkpoint:selective"),
    (LLAMA_8B + " --activation_checkpoint.mode full", "1x8xH100-SXM", "flag_removed", (), "activation_checkpoint:full"),
    (LLAMA_8B + " --training.dtype float16", "1x8xH100-SXM", "flag_value", (), "correct"),
    (LLAMA_8B + " --training.disable_cuda_graphs True", "1x8xH100-SXM", "word_alone", (), "leave it out"),
    (LLAMA_8B + " --tensor-parallel-size 2", "1x8xH100-SXM", "flag_unknown", (), "vllm"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "on", "code", "numbers", "way"), CASES, ids=[f"{c[2]}-{i}" for i, c in enumerate(CASES)]
)
def test_refused_with_numbers_and_way_out(command: str, on: str, code: str, numbers: tuple[str, ...], way: str) -> None:
    _, _, rules = judged(command, on)
    found = [r for r in rules if r.code == code]
    assert found, [r.code for r in rules]
    assert found[0].severity == "illegal"
    assert found[0].where
    for number in numbers:
        assert number in found[0].message.replace(",", ""), found[0].message
    assert way in found[0].way_out, found[0].way_out


@pytest.mark.parametrize(
    "command",
    [
        LLAMA_8B,
        LLAMA_8B
        + " --training.local-batch-size=2 --compile.enable activation-checkpoint:full --activation_checkpoint.debug",
        LLAMA_8B + " --optimizer.param_groups.0.optimizer_kwargs.lr 1e-4 --metrics.no-enable-tensorboard",
        LLAMA_405B + p(pipeline_parallel_degree=8) + t(local_batch_size=32),
        QWEN + OFF + p(expert_parallel_degree=8),
    ],
)
def test_good_commands_are_not_refused(command: str) -> None:
    _, _, rules = judged(command, "64x8xH100-SXM" if "nnodes" in command else "1x8xH100-SXM")
    assert [r for r in rules if r.severity == "illegal"] == []


def test_the_module_and_configuration_are_needed() -> None:
    found = parse("torchrun --nproc-per-node 8 -m torchtitan.train --module llama3")
    assert [(r.code, r.severity) for r in found.findings if r.severity == "illegal"] == [("flag_missing", "illegal")]
    found = parse("torchrun --nproc-per-node 8 -m torchtitan.train --module llama3 --config llama3_9b")
    assert "llama3_8b" in next(r for r in found.findings if r.code == "configuration_unknown").way_out


def test_nearest_layouts_are_legal() -> None:
    found, spec, rules = judged(CASES[3][0], CASES[3][1])
    rule = next(r for r in rules if r.code == "kv_heads_divide_tp")
    assert rule.nearest
    for layout in rule.nearest:
        legal = ENGINE.profile().check(spec, layout, None, found.workload)
        assert not [r for r in legal if r.severity == "illegal"], layout

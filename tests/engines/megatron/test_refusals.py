"""A Megatron command that will not start is told why, with both numbers, and what to write instead."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.engines.megatron import ENGINE
from meshwright.specs.rules import Rule
from tests.engines.megatron.commands import LLAMA_8B, judged, parse, replaced

RUN = f"torchrun --nproc-per-node 8 --nnodes 4 --node-rank 0 --master-addr a pretrain_gpt.py {LLAMA_8B}"
ONE = f"torchrun --nproc-per-node 8 pretrain_gpt.py {LLAMA_8B}"
MIXTRAL = replaced(
    RUN,
    num_experts=8,
    moe_ffn_hidden_size=14336,
    moe_router_topk=2,
    num_query_groups=8,
    moe_token_dispatcher_type="alltoall",
)


def illegal(rules: list[Rule], code: str) -> Rule:
    found = [r for r in rules if r.code == code]
    assert found, f"{code} is not among {[r.code for r in rules]}"
    assert found[0].severity == "illegal"
    assert found[0].where
    assert found[0].way_out
    return found[0]


#: Command, cluster, code, numbers of the message, a piece of the way out, and the public case behind it.
CASES: list[tuple[Any, ...]] = [
    # The example: 32 devices for tp 8 x pp 3.
    (replaced(f"torchrun pretrain_gpt.py {LLAMA_8B}", tensor_model_parallel_size=8, pipeline_model_parallel_size=3),
     "4x8xH100-SXM", "world_divides", ("32", "24"), "pp from 1, 2, 4"),
    # 46 layers over 4 stages.
    (replaced(RUN, num_layers=46, tensor_model_parallel_size=8, pipeline_model_parallel_size=4, sequence_parallel=True),
     "4x8xH100-SXM", "layers_divide_pp", ("46", "4"), "--decoder-first-pipeline-num-layers 11", "C197"),
    # The same assertion without virtual stages.
    (replaced(ONE, pipeline_model_parallel_size=8, num_layers=30),
     "1x8xH100-SXM", "layers_divide_pp", ("30", "8"), "pp from 1, 2, 3, 5, 6, 10", "C201"),
    # 80 layers, 16 stages, 2 chunks: 5 layers a stage do not divide.
    (replaced(RUN, num_layers=80, pipeline_model_parallel_size=16, num_virtual_stages_per_pipeline_rank=2,
              global_batch_size=64),
     "4x8xH100-SXM", "stage_divides_chunks", ("5", "2", "80", "16"), "virtual from 1, 5", "C199"),
    # Ranks of a stage against ep x etp.
    (replaced(MIXTRAL, num_experts=64, tensor_model_parallel_size=4, sequence_parallel=True,
              expert_model_parallel_size=16, expert_tensor_parallel_size=4, pipeline_model_parallel_size=2),
     "4x8xH100-SXM", "expert_grid", ("16", "4", "64", "16"), "ep from 1, 2, 4"),
    # Heads over Ulysses.
    (replaced(ONE, num_attention_heads=28, hidden_size=3584, num_query_groups=4, context_parallel_size=8,
              cp_comm_type="a2a"),
     "1x8xH100-SXM", "heads_over_ulysses", ("28", "8"), "--cp-comm-type p2p", "C260"),
    # Sequence over context parallelism.
    (replaced(ONE, seq_length=8200, max_position_embeddings=8200, context_parallel_size=8, cp_comm_type="a2a"),
     "1x8xH100-SXM", "sequence_over_cp", ("8200", "16"), "8208", "C264"),
    (replaced(ONE, seq_length=1022, tensor_model_parallel_size=4, sequence_parallel=True),
     "1x8xH100-SXM", "sequence_over_sp", ("1022", "4"), "multiple of 4"),
    (replaced(RUN, num_attention_heads=40, hidden_size=5120, num_query_groups=8, tensor_model_parallel_size=16),
     "4x8xH100-SXM", "heads_divide_tp", ("40", "16"), "tp from 2, 4, 5, 8, 10, 20"),
    (replaced(RUN, num_query_groups=6, num_attention_heads=48, hidden_size=6144, tensor_model_parallel_size=4),
     "4x8xH100-SXM", "kv_heads_over_tp", ("6", "4"), "tp from 1, 2, 3, 6"),
    (replaced(ONE, ffn_hidden_size=11009, tensor_model_parallel_size=2),
     "1x8xH100-SXM", "width_divides_tp", ("11009", "2"), "tp from"),
    (replaced(RUN, global_batch_size=100), "4x8xH100-SXM", "batch_not_whole", ("100", "32"), "25"),
    (replaced(RUN, pipeline_model_parallel_size=4, num_layers_per_virtual_pipeline_stage=4, global_batch_size=48),
     "4x8xH100-SXM", "interleaved_micro_batches", ("6", "4"), "global batch"),
    (replaced(MIXTRAL, expert_model_parallel_size=3), "4x8xH100-SXM", "experts_divide_ep", ("8", "3"),
     "ep from 1, 2, 4"),
    (replaced(MIXTRAL, expert_model_parallel_size=16), "4x8xH100-SXM", "ep_exceeds_experts", ("16", "8"), "at most 8"),
    (replaced(RUN, expert_model_parallel_size=4), "4x8xH100-SXM", "ep_without_experts", ("4", "0"), "ep 1"),
    (replaced(MIXTRAL, tensor_model_parallel_size=2), "4x8xH100-SXM", "experts_need_sp", ("2",), "--sequence-parallel"),
    (replaced(MIXTRAL, moe_ffn_hidden_size=1405, tensor_model_parallel_size=2, sequence_parallel=True),
     "4x8xH100-SXM", "width_divides_tp", ("1405", "2"), "etp from"),
    (replaced(ONE, pipeline_model_parallel_size=8, num_layers=4), "1x8xH100-SXM", "more_stages_than_layers", ("8", "4"),
     "at most 4"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "on", "code", "numbers", "way"),
    [c[:5] for c in CASES],
    ids=[f"{c[5]}-{c[2]}" if len(c) > 5 else f"{c[2]}-{i}" for i, c in enumerate(CASES)],
)
def test_refused_with_numbers_and_way_out(command: str, on: str, code: str, numbers: tuple[str, ...], way: str) -> None:
    _, _, rules = judged(command, on)
    rule = illegal(rules, code)
    for number in numbers:
        assert number in rule.message.replace(",", ""), rule.message
    assert way in rule.way_out


#: Arguments that exclude or need one another: changes to a good command, code, piece of the way out.
SWITCHES = [
    ({"micro_batch_size": None}, "flag_missing", "give one"),
    ({"num_layers": None}, "flag_missing", "--use-checkpoint-args"),
    ({"max_position_embeddings": 4096}, "positions_below_sequence", "8192"),
    ({"batch_size": 4}, "flag_refused", "--micro-batch-size"),
    ({"model_parallel_size": 4}, "flag_refused", "--tensor-model-parallel-size"),
    ({"fp16": True}, "two_precisions", "--bf16"),
    ({"recompute_granularity": "full"}, "recompute_method", "uniform"),
    ({"recompute_granularity": "full", "recompute_method": "block"}, "recompute_layers", "1 to 16"),
    ({"recompute_granularity": "selective", "recompute_num_layers": 1}, "recompute_selective", "core_attn"),
    ({"use_megatron_fsdp": True}, "megatron_fsdp_checkpoint", "fsdp_dtensor"),
    ({"use_torch_fsdp2": True}, "torch_fsdp2", "--pipeline-model-parallel-size 1"),
    ({"overlap_param_gather": True}, "overlap_param_gather", "--use-distributed-optimizer"),
    ({"fp8_format": "hybrid", "fp8_param_gather": True}, "fp8_param_gather", "--use-distributed-optimizer"),
    ({"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}, "te_cross_entropy", "native"),
    ({"tp_comm_overlap": True}, "tp_comm_overlap", "--sequence-parallel"),
    ({"num_layers_per_virtual_pipeline_stage": 8, "num_virtual_stages_per_pipeline_rank": 2}, "virtual_twice", "one"),
    ({"num_virtual_stages_per_pipeline_rank": 2, "no_overlap_p2p_communication": True}, "interleaved_two_stages", "pp"),
    ({"decoder_first_pipeline_num_layers": 15, "num_layers_per_virtual_pipeline_stage": 4}, "virtual_of_uneven", "4"),
    ({"account_for_embedding_in_pipeline_split": True}, "layers_divide_pp", "pp from 1, 3, 11, 33"),
    ({"pipeline_model_parallel_layout": "Et*15|t*16L"}, "stage_sum", "32"),
    ({"pipeline_model_parallel_layout": "t*16|t*16L"}, "layout_ends", "Et*3"),
    ({"pipeline_model_parallel_layout": "Et*10|t*11|t*11L"}, "parts_divide_pp", "2 or 4"),
    ({"recompute_granularity": "everything"}, "flag_value", "correct"),
    ({"use_custom_fsdp": True}, "flag_removed", "--use-megatron-fsdp"),
    ({"standalone_embedding_stage": True}, "flag_removed", "--account-for-embedding"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "code", "way"), SWITCHES, ids=[f"{c[1]}-{i}" for i, c in enumerate(SWITCHES)])
def test_arguments_that_exclude_each_other(changes: dict[str, object], code: str, way: str) -> None:
    good = replaced(RUN, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert not [r for r in parse(good).findings if r.severity == "illegal"]
    rule = illegal(list(parse(replaced(good, **changes)).findings), code)
    assert way in rule.way_out


def test_connections_follow_the_environment() -> None:
    tp = replaced(ONE, tensor_model_parallel_size=2)
    assert illegal(list(parse(tp, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}).findings), "device_connections")
    unset = [r for r in parse(tp, {"X": "1"}).findings if r.code == "device_connections"]
    assert [r.severity for r in unset] == ["unwise"]
    assert not [r for r in parse(tp).findings if r.code == "device_connections"]
    fsdp = replaced(ONE, use_megatron_fsdp=True, ckpt_format="fsdp_dtensor")
    assert illegal(list(parse(fsdp).findings), "fsdp_connections")
    assert not parse(fsdp, {"X": "1"}).findings


def test_a_good_command_is_not_refused() -> None:
    command = replaced(RUN, tensor_model_parallel_size=4, pipeline_model_parallel_size=2, sequence_parallel=True)
    found, spec, rules = judged(replaced(command, use_distributed_optimizer=True), "4x8xH100-SXM")
    assert rules == []
    assert str(found.layout) == "tp=4,pp=2,dp=4,sp=on,zero=1"
    assert sum(f.elements for f in spec.families) > 0


def test_nearest_layouts_are_legal() -> None:
    found, spec, rules = judged(CASES[1][0], CASES[1][1])
    rule = illegal(rules, "layers_divide_pp")
    assert rule.nearest
    for layout in rule.nearest:
        legal = ENGINE.profile().check(spec, layout, None, found.workload)
        assert not [r for r in legal if r.severity == "illegal"], layout


def test_the_ways_out_start() -> None:
    """What the refusals of 46 layers over 4 stages propose is accepted."""
    command = replaced(CASES[1][0], decoder_first_pipeline_num_layers=11, decoder_last_pipeline_num_layers=11)
    found, _, rules = judged(command, "4x8xH100-SXM")
    assert found.layout.stage_layers == (11, 12, 12, 11)
    assert not [r for r in rules if r.severity == "illegal"]


@pytest.mark.parametrize(
    ("batch", "group", "starts", "way"),
    [
        (40, None, False, "--microbatch-group-size-per-virtual-pipeline-stage 5, or a global batch of 32"),
        (40, 5, True, ""),
        (56, 4, False, "--microbatch-group-size-per-virtual-pipeline-stage 7"),
        (56, 7, True, ""),
        (64, None, True, ""),
        (40, 3, False, "5"),
        (24, None, False, "a global batch of 32"),
    ],
)
def test_groups_of_the_interleaved_schedule(batch: int, group: int | None, starts: bool, way: str) -> None:
    """4 stages, 2 chunks, dp 2, micro-batches of 4: 5, 7, 8 and 3 micro-batches."""
    command = replaced(
        ONE,
        pipeline_model_parallel_size=4,
        num_virtual_stages_per_pipeline_rank=2,
        micro_batch_size=4,
        global_batch_size=batch,
        microbatch_group_size_per_virtual_pipeline_stage=group,
    )
    for text in (command, command.replace("--nproc-per-node 8 ", "")):
        _, _, rules = judged(text, "1x8xH100-SXM")
        refused = [r for r in rules if r.severity == "illegal"]
        assert (refused == []) is starts, refused
        if not starts:
            assert way in refused[0].way_out

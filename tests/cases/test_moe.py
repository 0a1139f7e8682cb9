"""``moe`` reports: sizes of expert groups, copies of the latent cache, flags of the expert balancer, as commands."""

from __future__ import annotations

import pytest

from meshwright.api import plan_serve
from meshwright.plan.memory import ServeMemory
from meshwright.specs.layout import parse_layout
from meshwright.specs.workload import Serve
from tests.engines.megatron.commands import LLAMA_8B, replaced
from tests.judge.asked import check, codes

#: Reports that no command, configuration or plan decides.
NOT_DECIDED = {
    "C227": "throughput with and without the expert balancer of another engine: there is no time model of imbalance",
    "C228": "gain of a rebalance in a short benchmark: no time model of imbalance",
    "C229": "gain of the balancer on one node: no time model of imbalance",
}

DEEPSEEK = "vllm serve deepseek-ai/DeepSeek-V3 {} --max-model-len 8192"
MEGATRON = f"CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 8 {{}} pretrain_gpt.py {LLAMA_8B}"


def test_c070_experts_lie_over_all_ranks_of_tp_and_dp() -> None:
    """TP 2 x DP 4 with the switch is EP 8: 16 of 128 experts a rank, attention cut by 2 and held 4 times."""
    wide = check("vllm serve Qwen/Qwen3-30B-A3B -tp 2 -dp 4 --enable-expert-parallel", "8xH100-SXM")
    assert wide.starts
    assert wide.invocation.layout == parse_layout("tp=2,dp=4,ep=8")
    one = check("vllm serve Qwen/Qwen3-30B-A3B -tp 2 --enable-expert-parallel", "2xH100-SXM")
    assert one.invocation.layout == parse_layout("tp=2,ep=2")
    sizes = []
    for verdict in (wide, one):
        assert verdict.plan.chosen is not None
        sizes.append(verdict.plan.chosen.memory.worst.weights_bytes)
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    assert sizes[1] - sizes[0] == pytest.approx(experts / 2 - experts / 8, rel=0.02)


def test_c071_the_expert_group_of_vllm_is_not_chosen_and_that_of_tensorrt_llm_is() -> None:
    """EP 4 on 8 ranks: vLLM has 1 or 8 only, TensorRT-LLM takes it."""
    flag = check(DEEPSEEK.format("-tp 8 --enable-expert-parallel --expert-parallel-size 4"), "8xH200-SXM")
    assert not flag.starts
    assert "--expert-parallel-size" in flag.verdict
    asked = plan_serve("deepseek-v3", "1x8xH200-SXM", Serve(), layout="tp=8,ep=4", engine="vllm")
    assert not asked.ok
    rule = next(r for r in asked.rules if r.severity == "illegal")
    assert "ep 4: in vLLM expert parallel is off or tp 8 x cp 1 x dp 1 = 8" in rule.message
    assert "use ep=8 (--enable-expert-parallel) or ep=1" in rule.way_out
    other = check("trtllm-serve deepseek-ai/DeepSeek-V3 --tp_size 8 --ep_size 4 --max_seq_len 8192", "8xH200-SXM")
    assert other.starts
    assert other.invocation.layout.ep == 4


def test_c072_replicas_of_attention_hold_a_token_once() -> None:
    """TP 8 holds 8 copies of the latent cache, which is said; DP 8 with EP holds one, and more tokens in all."""
    flat, wide = (check(DEEPSEEK.format(f), "8xH200-SXM") for f in ("-tp 8", "-dp 8 --enable-expert-parallel"))
    rule = next(r for r in flat.plan.rules if r.code == "latent_cache_replicated")
    assert "8 copies" in rule.message
    assert "dp 8 with expert parallelism" in rule.way_out
    assert "latent_cache_replicated" not in codes(wide)
    tokens = []
    for verdict, replicas in ((flat, 1), (wide, 8)):
        assert verdict.plan.chosen is not None
        memory = verdict.plan.chosen.memory
        assert isinstance(memory, ServeMemory)
        tokens.append(replicas * memory.kv_cache_tokens)
    assert tokens[1] > 3 * tokens[0]


@pytest.mark.parametrize("version", [None, "vllm-0.26"])
def test_c230_flags_of_the_balancer_moved_into_one_configuration(version: str | None) -> None:
    base = DEEPSEEK.format("-dp 8 --enable-expert-parallel --enable-eplb")
    old = check(
        f"{base} --num-redundant-experts 32 --eplb-window-size 1000 --eplb-step-interval 3000",
        "8xH200-SXM",
        engine=version,
    )
    moved = {r.message.split("'")[1]: r.way_out for r in old.invocation.findings if r.code == "flag_removed"}
    assert moved == {
        "--num-redundant-experts": "use --eplb-config.num_redundant_experts",
        "--eplb-window-size": "use --eplb-config.window_size",
        "--eplb-step-interval": "use --eplb-config.step_interval",
    }
    assert old.starts is (version is None)
    new = check(
        base + """ --eplb-config '{"num_redundant_experts": 32, "window_size": 1000, "step_interval": 3000}'""",
        "8xH200-SXM",
        engine=version,
    )
    assert new.starts
    assert not new.invocation.findings


def test_c252_context_and_expert_parallelism_together() -> None:
    """CP 2 and EP 8 in one Megatron command start: attention and experts have grids of their own."""
    command = replaced(
        MEGATRON.format("--nnodes 2 --node-rank 0 --master-addr a"),
        num_experts=8,
        moe_ffn_hidden_size=2048,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        context_parallel_size=2,
        expert_model_parallel_size=8,
    )
    verdict = check(command, "2x8xH100-SXM@ib-400g")
    assert verdict.starts, verdict.verdict
    assert verdict.invocation.layout == parse_layout("dp=8,cp=2,ep=8")


def test_c253_world_of_235b_is_a_multiple_of_64() -> None:
    """TP 2, EP 32, PP 2, ETP 1: 47 layers a stage, 4 experts a rank; 64 ranks do, 32 do not."""
    for nodes, legal in ((4, False), (8, True), (16, True)):
        command = replaced(
            MEGATRON.format(f"--nnodes {nodes} --node-rank 0 --master-addr a"),
            num_layers=94, hidden_size=4096, num_attention_heads=64, num_query_groups=4, kv_channels=128,
            num_experts=128, moe_ffn_hidden_size=1536, moe_router_topk=8, moe_token_dispatcher_type="alltoall",
            tensor_model_parallel_size=2, sequence_parallel=True, pipeline_model_parallel_size=2,
            expert_model_parallel_size=32, expert_tensor_parallel_size=1, use_distributed_optimizer=True,
        )  # fmt: skip
        verdict = check(command, f"{nodes}x8xH100-SXM@ib-400g")
        assert ("expert_grid" in codes(verdict)) is not legal, (nodes, verdict.verdict)
        if legal:
            assert verdict.plan.chosen is not None
            assert [len(s.layers) for s in verdict.plan.chosen.placement.stages] == [47, 47]

"""Public reports about SGLang, as commands in and verdicts out (issue numbers are those of sgl-project/sglang)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.api import plan_serve
from meshwright.engines.sglang import ENGINE
from meshwright.plan.memory import ServeMemory
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import parse_layout
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve
from tests.engines.sglang.commands import broken_rules, understood
from tests.specs import builders

LAUNCH = "python -m sglang.launch_server --model-path"
PAIR = "--nnodes 2 --node-rank 0 --dist-init-addr 10.0.0.1:20000"


def test_awq_width_halved_ends_inside_a_group() -> None:
    """Issue 3571: 29568 / 2 = 14784 is no multiple of the group of 128; one rank is fine."""
    spec = builders.int4(builders.gqa(heads=8, kv_heads=2, head_dim=128, hidden=1024, intermediate=29568), 128)
    said = broken_rules(f"{LAUNCH} Qwen/Qwen2.5-VL-72B-Instruct-AWQ --tp 2", spec)
    assert any("29568 / 2 = 14784" in line and "128" in line for line in said)
    assert broken_rules(f"{LAUNCH} Qwen/Qwen2.5-VL-72B-Instruct-AWQ --tp 1", spec) == []


def test_deepseek_over_32_ranks_ends_inside_a_block() -> None:
    """Issue 3345: 18432 / 32 = 576 is no multiple of 128; TP 16 with pipeline stages works, so does 1 dense rank."""
    spec = read_model("deepseek-r1")
    four = "--nnodes 4 --node-rank 0 --dist-init-addr 10.0.0.1:20000"
    said = broken_rules(f"{LAUNCH} deepseek-ai/DeepSeek-R1 --tp 32 {four}", spec)
    assert any("18432 / 32 = 576" in line and "128" in line for line in said)
    assert broken_rules(f"{LAUNCH} deepseek-ai/DeepSeek-R1 --tp 16 --pp-size 2 {four}", spec) == []
    wide = f"{LAUNCH} deepseek-ai/DeepSeek-R1 --tp-size 32 --attn-dp-size 32 --moe-a2a-backend deepep {four}"
    assert any("576" in line for line in broken_rules(wide, spec))
    assert broken_rules(f"{wide} --moe-dense-tp-size 1", spec) == []


def test_step_shared_expert_over_four_ranks_ends_inside_a_block() -> None:
    """Issue 26107: the shared expert's width over 4 ranks is no multiple of the block of 128."""
    spec = read_model("step-3.7-flash-fp8")
    moe = spec.moe
    assert moe is not None
    shard = moe.shared_intermediate // 4
    assert shard % 128
    said = broken_rules(f"{LAUNCH} stepfun-ai/Step-3.5-Flash-FP8 --tp 4", spec)
    assert any("shared expert" in line and f"/ 4 = {shard}" in line for line in said)
    assert not any("shared expert" in line for line in broken_rules(f"{LAUNCH} stepfun-ai/S --tp 2", spec))


def test_attention_replicas_may_be_fewer_than_ranks() -> None:
    """Issue 3750: TP 8 with 2 attention replicas is attention TP 4; 3 of them do not divide 8."""
    spec = read_model("deepseek-v3")
    command = f"{LAUNCH} deepseek-ai/DeepSeek-V3 --tp 8 --dp 2 --enable-dp-attention"
    assert understood(command, spec).layout == parse_layout("tp=4,dp=2")
    assert broken_rules(command, spec) == []
    said = broken_rules(f"{LAUNCH} deepseek-ai/DeepSeek-V3 --tp-size 8 --attn-dp-size 3", spec)
    assert any("--tp-size 8" in line and "3" in line for line in said)


def _memory(model: str, on: str, layout: str, settings: ServeSettings) -> ServeMemory:
    plan = plan_serve(model, on, Serve(), layout=layout, engine="sglang", settings=settings)
    assert plan.chosen is not None
    memory = plan.chosen.memory
    assert isinstance(memory, ServeMemory)
    return memory


def test_static_share_of_qwen_on_four_h100() -> None:
    """C015: 367,404 tokens of 48,128 bytes at --mem-fraction-static 0.93."""
    memory = _memory("qwen3-235b-a22b-fp8", "1x4xH100-SXM", "tp=4", ServeSettings(utilization=0.93))
    assert memory.kv_bytes_per_token == 48128
    assert memory.kv_cache_tokens == pytest.approx(367404, rel=0.02)


def test_sparse_attention_counts_the_keys_of_its_selector() -> None:
    """C134: 656 bytes of MLA in fp8 and 132 of the selector in each of 61 layers; 975,424 tokens are 43.67 GiB."""
    memory = _memory("deepseek-v3.2", "1x8xB200", "dp=8", ServeSettings(kv_dtype="fp8", utilization=0.85))
    assert memory.kv_bytes_per_token == 61 * (656 + 132) == 48068
    assert 975424 * memory.kv_bytes_per_token / 2**30 == pytest.approx(43.67, abs=0.01)


def test_every_rank_holds_the_latent_cache_again() -> None:
    """Issue 2591: TP 8 keeps 8 copies of the MLA cache; attention data parallelism keeps one."""
    spec = read_model("deepseek-v2")
    unwise = broken_rules(f"{LAUNCH} deepseek-ai/DeepSeek-V2 --tp 8", spec, "unwise")
    assert any("8 copies of the MLA cache" in line for line in unwise)
    share = ServeSettings(utilization=0.85)
    flat = _memory("deepseek-v2", "1x8xH200-SXM", "tp=8", share)
    wide = _memory("deepseek-v2", "1x8xH200-SXM", "dp=8", share)
    assert flat.kv_bytes_per_token == wide.kv_bytes_per_token
    spec_rules = ENGINE.profile().check(spec, parse_layout("dp=8"), None, None)
    assert not any(rule.code == "latent_cache_replicated" for rule in spec_rules)


def test_partial_attention_replicas_of_v4_without_all_to_all() -> None:
    """Issue 31699, pull 32609: DP 1 and DP 8 of TP 8 are right, DP 2 and DP 4 give garbage."""
    spec = replace(read_model("deepseek-v3"), model_type="deepseek_v4")
    for dp, bad in ((1, False), (2, True), (4, True), (8, False)):
        command = f"{LAUNCH} deepseek-ai/DeepSeek-V4-Pro --tp 8 --attn-dp-size {dp}"
        assert any("garbage" in line for line in broken_rules(command, spec, "unwise")) == bad


def test_reference_launch_of_large_pools() -> None:
    """Pull 5295: two nodes a side, TP 16 and 8 attention replicas are attention TP 2; both sides agree."""
    spec = read_model("deepseek-v3")
    side = f"--tp-size 16 --dp-size 8 --enable-dp-attention --moe-a2a-backend deepep --mem-fraction-static 0.8 {PAIR}"
    both = [
        understood(f"{LAUNCH} deepseek-ai/DeepSeek-V3-0324 --disaggregation-mode {mode} {side}", spec)
        for mode in ("prefill", "decode")
    ]
    for found in both:
        assert found.deployment == "pools"
        assert found.layout == parse_layout("tp=2,dp=8,ep=16")
        assert not [f for f in found.findings if f.severity == "illegal"]
        assert any("--attn-dp-size 8" in f.way_out for f in found.findings)
    assert ENGINE.pool_rules(spec, both[0].layout, both[1].layout) == []


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "severity"),
    [
        ("qwen3-32b", "tp=2", "tp=1", "unwise"),
        ("qwen3-32b", "tp=2", "tp=2", ""),
        ("deepseek-v3", "tp=8", "tp=2,dp=8,ep=16", ""),
        ("qwen3-32b", "tp=4", "tp=3", "illegal"),
        ("qwen3-32b", "tp=8", "tp=8,dcp=2", "illegal"),
        ("deepseek-v3", "tp=8", "tp=8,dcp=2", ""),
    ],
)
def test_pools_of_unequal_width(model: str, prefill: str, decode: str, severity: str) -> None:
    """Issue 15674: unequal TP of a model without MLA crashes under load; equal TP or MLA is stable."""
    rules = ENGINE.pool_rules(read_model(model), parse_layout(prefill), parse_layout(decode))
    assert [r.severity for r in rules] == ([severity] if severity else [])


def test_transfer_over_tcp_needs_to_be_asked_for() -> None:
    """Issues 7338 and 23272: Mooncake without a reachable RDMA device fails at the first request."""
    base = f"{LAUNCH} Qwen/Qwen3-8B --disaggregation-mode prefill"
    said = [f.message for f in understood(base).findings]
    assert any("Failed to get kvcache from prefill instance" in line for line in said)
    for named in ("--disaggregation-ib-device mlx5_0", "--disaggregation-transfer-backend nixl"):
        assert understood(f"{base} {named}").findings == ()


def test_attention_replicas_are_for_many_requests() -> None:
    """Issue 2882: DP attention is slower at few requests; the note says so."""
    found = understood(
        f"{LAUNCH} deepseek-ai/DeepSeek-V3 --tp 8 --dp 8 --enable-dp-attention", read_model("deepseek-v3")
    )
    assert any("at few requests plain tensor parallelism" in note for note in found.notes)


def test_balancing_experts_is_no_cure_for_a_short_run() -> None:
    """Pull 6739 and issue 6017: little gain in 300 prompts or on one node; a rebalance takes about 1.8 s."""
    command = f"{LAUNCH} deepseek-ai/DeepSeek-V3 --tp-size 8 --ep-size 8 --enable-eplb"
    found = understood(command, read_model("deepseek-v3"))
    assert any("1.8 s" in note and "balancedness" in note for note in found.notes)
    assert not any("1.8 s" in note for note in understood(f"{LAUNCH} m --tp-size 8 --ep-size 8").notes)

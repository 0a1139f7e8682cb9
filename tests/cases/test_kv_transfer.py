"""``kv-transfer`` reports: pools of prefill and decode and the connector between them, as commands and plans."""

from __future__ import annotations

import json

import pytest

from meshwright.api import emit, plan_pools, plan_serve
from meshwright.errors import InputError
from meshwright.judge.verdict import Verdict
from meshwright.specs.layout import parse_layout
from meshwright.specs.workload import Serve
from tests.judge.asked import check, codes

#: Reports that no command, configuration or plan decides.
NOT_DECIDED = {
    "C065": "a release of the transfer library that did not fit a release candidate of vLLM: no profile of either",
    "C067": "a bug of one transfer backend after minutes of load; the other backend, not the command, was at fault",
    "C096": "UCX chose TCP although rc is named in UCX_TLS: what the network interfaces of the machine are",
    "C097": "measured throughput of a deployment: there is no time model, only lower bounds",
    "C257": "fields of the requests that the router sends, not of the command",
    "C258": "measured time to first token and per token: there is no time model, only lower bounds",
}

SGLANG = "python -m sglang.launch_server --model-path {} --disaggregation-mode {}"
WORK = Serve(isl=2048, osl=256)


def connected(connector: str, flags: str) -> Verdict:
    """A vLLM command with a connector."""
    config = json.dumps({"kv_connector": connector, "kv_role": "kv_both"})
    return check(f"vllm serve Qwen/Qwen3-8B --max-model-len 8192 --kv-transfer-config '{config}' {flags}", "2xH100-SXM")


def said(model: str, prefill: str, decode: str, engine: str = "sglang") -> str:
    """What is noted under the commands of two pools."""
    first, second = plan_pools(model, "2x8xH100-SXM@ib-400g", WORK, prefill=prefill, decode=decode, engine=engine)
    return " ".join(emit(second, prefill=first).notes)


def test_c066_unequal_tensor_parallelism_of_a_model_without_mla() -> None:
    """Prefill TP 2 and decode TP 1 cut every head out; equal sides and MLA models do not."""
    text = said("qwen3-32b", "tp=2", "tp=1")
    assert "many small transfers" in text
    assert "use the same attention tensor parallel size on both sides (2)" in text
    assert "many small transfers" not in said("qwen3-32b", "tp=2", "tp=2")
    assert "many small transfers" not in said("deepseek-v2-lite", "tp=2", "tp=1")
    with pytest.raises(InputError, match="4 of prefill and 3 of decode"):
        said("smollm2-135m", "tp=4", "tp=3")


def test_c068_mooncake_without_a_device_named() -> None:
    """The first request fails over an unreachable device; naming it, or another transport, is the cure."""
    silent = check(SGLANG.format("Qwen/Qwen3-8B", "prefill"), "1xL40S")
    rule = next(r for r in silent.invocation.findings if r.code == "no_rdma_device")
    assert "Failed to get kvcache from prefill instance" in rule.message
    assert "nixl" in rule.way_out
    for more in ("--disaggregation-ib-device mlx5_0", "--disaggregation-transfer-backend nixl"):
        assert "no_rdma_device" not in codes(check(f"{SGLANG.format('Qwen/Qwen3-8B', 'prefill')} {more}", "1xL40S"))


def test_c231_pools_of_two_nodes_each() -> None:
    """TP 16 with 8 attention replicas is attention TP 2 on both sides, which may be joined; the new flag is said."""
    flags = (
        "--tp-size 16 --dp-size 8 --enable-dp-attention --moe-a2a-backend deepep --ep-num-redundant-experts 32 "
        "--mem-fraction-static 0.8 --nnodes 2 --node-rank 0 --dist-init-addr 10.0.0.1:20000 "
        "--disaggregation-ib-device mlx5_1"
    )
    for mode in ("prefill", "decode"):
        verdict = check(f"{SGLANG.format('deepseek-ai/DeepSeek-V3-0324', mode)} {flags}", "2x8xH100-SXM")
        assert verdict.starts, verdict.verdict
        assert verdict.invocation.layout == parse_layout("tp=2,dp=8,ep=16")
        assert any("--attn-dp-size 8" in r.way_out for r in verdict.invocation.findings)
    pools = plan_pools(
        "deepseek-v3",
        "4x8xH100-SXM@ib-400g",
        WORK,
        prefill="tp=2,dp=8,ep=16",
        decode="tp=2,dp=8,ep=16",
        engine="sglang",
    )
    typed = [c.text for c in emit(pools[1], prefill=pools[0]).commands]
    assert sum("--attn-dp-size 8" in text for text in typed) == 4


@pytest.mark.parametrize(("size", "small"), [(16, True), (64, False)])
def test_c255_small_blocks_are_many_transfers(size: int, small: bool) -> None:
    verdict = connected("NixlConnector", f"--block-size {size}")
    assert verdict.starts
    assert ("transfer_blocks_small" in codes(verdict)) is small
    if small:
        assert any("--block-size 64 on both sides" in r.way_out for r in verdict.invocation.findings)


def test_c256_one_pool_of_four_prefills_faster_than_two_of_two() -> None:
    """At low load TP 4 has nearly twice the prefill compute of the TP 2 side, so no gain is expected of the split."""
    first, second = plan_pools("llama-3-8b", "1x4xA100-80G", WORK, prefill="tp=2", decode="tp=2")
    whole = plan_serve("llama-3-8b", "1x4xA100-80G", WORK, layout="tp=4")
    chosen = (first.chosen, second.chosen, whole.chosen)
    assert all(c is not None for c in chosen)
    prefill, decode, one = (c.cost for c in chosen if c is not None)
    assert 1.5 < prefill.prefill_s / one.prefill_s < 2.1
    assert decode.step_s > one.step_s


def test_c295_a_connector_in_one_process() -> None:
    """TP 1 with several replicas starts worker and scheduler in one process; the mp backend parts them."""
    replicas = connected("NixlConnector", "-dp 2 --block-size 64")
    rule = next(r for r in replicas.invocation.findings if r.code == "connector_in_one_process")
    assert "--distributed-executor-backend mp" in rule.way_out
    for flags in ("-dp 2 --distributed-executor-backend mp", "-tp 2"):
        assert "connector_in_one_process" not in codes(connected("NixlConnector", f"{flags} --block-size 64"))

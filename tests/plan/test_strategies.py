"""What each strategy would send, as the ledger counts it, and the words that go with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.engines import profiles
from meshwright.engines.own.profile import OWN
from meshwright.plan.strategies import StrategyRow, strategies
from meshwright.specs.build import decoder
from meshwright.specs.cluster import Cluster, Device, Link
from meshwright.specs.model import ModelSpec
from meshwright.specs.workload import Serve, Train, Workload

FAST, SLOW = Link("fast", "nvlink", 4e11, 3e-6), Link("slow", "infiniband", 5e10, 5e-6)
DEVICE = Device("card", "gpu", "nvidia", 80 << 30, (("bf16", 1e15),), 3e12, "9.0", FAST, 4, "slow")
CLUSTER = Cluster(2, 4, DEVICE, FAST, SLOW)
DENSE = decoder(hidden=8192, layers=80, heads=64, kv_heads=8, vocab=128256, ffn=28672)
MOE = decoder(hidden=512, layers=3, heads=8, kv_heads=2, vocab=1000, ffn=256, experts=16, topk=2)
NAMES = ["TP", "PP", "DP", "EP", "SP", "CP", "DCP", "ZeRO-1", "ZeRO-2", "ZeRO-3"]


def rows(spec: ModelSpec, workload: Workload, cluster: Cluster = CLUSTER) -> dict[str, StrategyRow]:
    found = strategies(spec, cluster, workload, OWN)
    assert [r.strategy for r in found] == NAMES
    return {r.strategy: r for r in found}


def test_serving_a_dense_model() -> None:
    """TP 4: 2,560 KiB a token in the layers and 16 KiB for the embedding, and the gathered logits."""
    found = rows(DENSE, Serve(1000, 100))
    tp = found["TP"]
    assert tp.layout is not None
    assert (tp.layout.tp, tp.per) == (4, "token")
    assert tp.payload_bytes == (2560 + 16) * 1024 + 128256 // 4 * 2
    assert tp.pattern == "161 x all_reduce + 1 x gather"
    assert "inside the node" in tp.belongs
    pp = found["PP"]
    assert (str(pp.layout), pp.payload_bytes, pp.pattern) == ("pp=2", 8192 * 2, "1 x send")
    assert "across nodes" in pp.belongs
    assert (found["DP"].payload_bytes, found["DP"].pattern) == (0, "none")
    assert (found["EP"].layout, found["EP"].payload_bytes, found["EP"].note) == (
        None,
        None,
        "this model has no experts",
    )
    assert "only for training" in found["ZeRO-3"].note
    assert found["SP"].wire_bytes is not None
    assert "prefill" in found["SP"].note


def test_serving_a_mixture_of_experts() -> None:
    ep = rows(MOE, Serve(1000, 100))["EP"]
    assert str(ep.layout) == "dp=8,ep=8"
    assert ep.pattern == "6 x all_to_all"
    assert ep.payload_bytes == 6 * 2 * 512 * 2
    assert "only with experts" in ep.belongs
    dcp = rows(MOE, Serve(1000, 100))["DCP"]
    assert dcp.layout is not None
    assert dcp.layout.dcp > 1
    assert dcp.pattern == "6 x all_gather + 3 x reduce_scatter"


def test_training() -> None:
    found = rows(MOE, Train(seq=128, global_batch=16))
    assert {r.per for r in found.values()} == {"step"}
    assert found["DCP"].note == "only for inference"
    p = MOE.parameters("decoder")
    assert found["DP"].payload_bytes == 4 * p
    assert found["ZeRO-1"].pattern == "1 x reduce_scatter + 1 x all_gather"
    zero = [found[f"ZeRO-{n}"].wire_bytes or 0 for n in (1, 2, 3)]
    assert 0 < zero[0] < zero[1]
    assert zero[2] > zero[0]


@pytest.mark.parametrize("devices", [1, 3])
def test_odd_clusters_and_batches_give_a_reason_or_a_row(devices: int) -> None:
    """One device: counted for two. Three devices and a batch of 16: no data-parallel degree divides both."""
    cluster = replace(CLUSTER, nodes=1, devices_per_node=devices)
    found = rows(MOE, Train(seq=128, global_batch=16), cluster)
    assert found["TP"].layout is not None
    if devices == 3:
        assert "no degree above one" in found["DP"].note
        assert found["DP"].payload_bytes is None


def test_vllm_communicates_in_its_own_ways() -> None:
    """Hidden states and residual, each in halves that are gathered; all tokens to all experts; logits everywhere."""
    found = {r.strategy: r for r in strategies(MOE, CLUSTER, Serve(1000, 100), profiles("vllm")["0.33"])}
    assert found["PP"].pattern == "2 x send"
    assert found["PP"].payload_bytes == 2 * 512 * 2
    assert found["EP"].pattern == "3 x all_gather + 3 x reduce_scatter"
    assert found["TP"].pattern.endswith("+ 1 x all_gather")
    assert "cannot" in found["SP"].note

"""Prefill and decode pools on a Ray cluster of two nodes of two cores each, all on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshwright.runtime.launch.ray import _counted, _named, shortage
from meshwright.runtime.serve.engine import Engine
from meshwright.runtime.serve.setup import on_ray
from meshwright.runtime.serve.split import SplitEngine
from tests.runtime import tiny
from tests.runtime.serve.test_engine import PROMPTS, all_said, run
from tests.runtime.serve.test_split import NEW, split


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a Ray cluster."""
    pytest.importorskip("ray")
    for name, value in (("RAY_AUTH_MODE", "disabled"), ("RAY_USAGE_STATS_ENABLED", "0")):
        monkeypatch.setenv(name, value)
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 100_000_000, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=node)
    try:
        made.add_node(num_cpus=2, object_store_memory=100_000_000)
        yield str(made.address)
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("prefill", "decode"), [("tp=2", "pp=2"), ("tp=1", "tp=2")])
def test_tp_groups_of_both_pools_lie_on_one_node_and_say_what_one_process_says(
    cluster: str, checkpoint: Callable[[str], Path], prefill: str, decode: str
) -> None:
    import ray

    folder = checkpoint("even")
    config = on_ray(split(folder, prefill, decode).config, cluster)
    assert config.world == (4 if decode == "pp=2" else 3)
    bundles: list[dict[str, float]] = []

    async def asked(served: Engine) -> list[list[int]]:
        table = ray.util.placement_group_table()
        (group,) = [one for one in table.values() if one["state"] == "CREATED"]
        bundles.extend(group["bundles"][at] for at in sorted(group["bundles"]))
        nodes = group["bundles_to_node_id"]
        assert len(set(nodes.values())) == 2
        return await all_said(served, PROMPTS)

    served = SplitEngine(config)
    assert run(served, asked) == tiny.oracle(folder, PROMPTS, NEW)[0]
    cores = [2.0, 1.0, 1.0] if decode == "pp=2" else [1.0, 2.0]
    assert [bundle["CPU"] for bundle in bundles] == cores
    assert all(s.pool.owned == 0 for s in served.schedulers)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_pool_that_no_node_holds_is_told_at_once(cluster: str, checkpoint: Callable[[str], Path]) -> None:
    served = SplitEngine(on_ray(split(checkpoint("even"), "tp=1", "tp=4").config, cluster))
    with pytest.raises(Exception, match=r"a tp group needs 4 CPU on one node, and no node of the Ray cluster has that"):
        asyncio.run(served.start())


def test_nodes_at_one_address_are_told_apart() -> None:
    nodes = _named([("10.0.0.1", {"CPU": 2.0}), ("10.0.0.1", {"CPU": 1.0}), ("10.0.0.2", {"CPU": 1.0})])
    assert list(nodes) == ["10.0.0.1", "10.0.0.1 (2)", "10.0.0.2"]
    assert shortage([{"CPU": 2.0}, {"CPU": 1.0}], nodes) == ""
    assert _counted([{"CPU": 1.0}, {"CPU": 2.0}, {"CPU": 1.0}]) == "2 x 1 CPU and 1 x 2 CPU"

"""Small clusters for tests, built by hand."""

from __future__ import annotations

from meshwright.specs.cluster import Cluster, Device, Link

NVLINK = Link("nvlink", "nvlink", 450e9, 1e-6)
IB = Link("ib-400g", "infiniband", 50e9, 5e-6)


def cluster(nodes: int, devices: int, memory_gib: float = 79.19) -> Cluster:
    """``nodes`` nodes of ``devices`` H100-like devices."""
    device = Device(
        "H100-SXM",
        "gpu",
        "nvidia",
        int(memory_gib * (1 << 30)),
        (("bf16", 989e12),),
        3.35e12,
        "9.0",
        NVLINK,
        8,
        "ib-400g",
    )
    return Cluster(nodes, devices, device, NVLINK, IB)

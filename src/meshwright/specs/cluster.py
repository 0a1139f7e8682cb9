"""Cluster: nodes of equal devices, and the links inside and between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LinkKind = Literal["nvlink", "nvswitch", "pcie", "xgmi", "c2c", "infiniband", "roce", "ethernet", "efa", "memory"]


@dataclass(frozen=True, slots=True)
class Link:
    """A way between devices.

    Attributes:
        name: as the user may write it behind ``@`` (``ib-400g``), or as the atlas calls it.
        kind: technology.
        bandwidth_bytes_s: bytes a second in one direction that one device can send.
        latency_s: seconds of an empty message.
        per: whether the bandwidth is each ``device``'s or shared by all devices of a ``node``.
        source: document or measurement.
    """

    name: str
    kind: LinkKind
    bandwidth_bytes_s: float
    latency_s: float
    per: Literal["device", "node"] = "device"
    source: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator (or CPU rank).

    Attributes:
        name: atlas name (``H100-SXM``).
        kind: gpu or cpu.
        vendor: nvidia, amd, cpu, ...
        memory_bytes: usable memory as the driver reports it (an H100-SXM is 79.19 GiB).
        peak_flops: dense peak a second by dtype (``bf16``, ``f16``, ``f8_e4m3``, ``fp4``, ``f32``, ``i8``);
            a dtype without hardware support is absent.
        bandwidth_bytes_s: memory bandwidth.
        capability: compute capability (``9.0``) or gfx name.
        links: link inside a node, by preference.
        devices_per_node: how many the usual node has.
        default_inter: name of the usual link between nodes.
        source: document.
    """

    name: str
    kind: Literal["gpu", "cpu"]
    vendor: str
    memory_bytes: int
    peak_flops: tuple[tuple[str, float], ...]
    bandwidth_bytes_s: float
    capability: str
    intra: Link
    devices_per_node: int
    default_inter: str
    source: str = ""

    def peak(self, dtype: str) -> float | None:
        """Dense peak in FLOP/s for ``dtype``, or None where the hardware has no such unit."""
        return dict(self.peak_flops).get(dtype)


@dataclass(frozen=True, slots=True)
class Cluster:
    """``nodes`` nodes of ``devices_per_node`` equal devices.

    Attributes:
        intra, inter: links inside and between nodes.
        inter_assumed: True when the user named no link between nodes and the kind's usual one is taken.
        switched: every pair inside the node has full bandwidth (NVSwitch, one PCIe root).
        detected: the cluster is this machine.
        notes: sentences that the output repeats (assumptions, what detection could not see).
    """

    nodes: int
    devices_per_node: int
    device: Device
    intra: Link
    inter: Link
    inter_assumed: bool = False
    switched: bool = True
    detected: bool = False
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """Devices of the whole cluster."""
        return self.nodes * self.devices_per_node

    @property
    def node_memory_bytes(self) -> int:
        """Usable device memory of one node."""
        return self.devices_per_node * self.device.memory_bytes

    def node_of(self, rank: int) -> int:
        """Node of a rank when ranks fill the nodes in order."""
        return rank // self.devices_per_node

    def __str__(self) -> str:
        tail = f"@{self.inter.name}" if self.nodes > 1 else ""
        return f"{self.nodes}x{self.devices_per_node}x{self.device.name}{tail}"

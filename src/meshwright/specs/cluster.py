"""Cluster: nodes of equal devices, and the links inside and between them.

``parse_cluster`` reads what users write behind ``--on``: ``2x4xA100-80G@ib-200g``, ``here``, or a TOML file
(``cluster_file``). The devices and links that have names are data in ``atlas/``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from meshwright.errors import InputError

#: Most devices of a cluster; above it the input is taken for a mistake.
MAX_DEVICES = 1 << 20

LinkKind = Literal["nvlink", "nvswitch", "pcie", "xgmi", "c2c", "infiniband", "roce", "ethernet", "efa", "memory"]


class MeasuredMove(NamedTuple):
    """A collective or hand-off that was measured over a link.

    Attributes:
        op: all_reduce, all_gather, reduce_scatter, all_to_all, gather, send. ranks: of the group.
        latency_s, bandwidth_bytes_s: of the line through it. error: median distance from that line, as a share.
        knots: (payload bytes that enter on a rank, seconds), ascending.
    """

    op: str
    ranks: int
    latency_s: float
    bandwidth_bytes_s: float
    error: float
    knots: tuple[tuple[int, float], ...]


class MeasuredPoint(NamedTuple):
    """What work of an intensity (FLOPs a byte) takes: its time at the best rates over ``share``, ``besides_s``, and
    ``output_s`` for each element of a product's result."""

    intensity: float
    share: float
    besides_s: float
    output_s: float = 0.0


class MeasuredShare(NamedTuple):
    """Shares of a device's memory bandwidth and peak that a class of work (dense, attention; passes: what lies between
    products) reached in a dtype; ``points``: ascending, see ``MeasuredPoint``."""

    work: str
    dtype: str
    memory: float
    compute: float
    points: tuple[MeasuredPoint, ...] = ()


class Driver(NamedTuple):
    """What the own engine's driver takes beside the device's work: seconds of the smallest operation, a layer, a pass,
    and a message to all ranks of a replica; what its server adds to a decode step, and for each request in it."""

    launch_s: float
    layer_s: float
    pass_s: float
    message_s: float
    serve_s: float = 0.0
    sequence_s: float = 0.0


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
        switched: every pair has the full bandwidth at once (NVSwitch, a network); False for meshes and buses.
        max_devices: devices that one domain of this link can join (72 for an NVL72 rack); None: no such limit.
        measured: collectives that ``calibrate`` measured over it.
    """

    name: str
    kind: LinkKind
    bandwidth_bytes_s: float
    latency_s: float
    per: Literal["device", "node"] = "device"
    source: str = ""
    switched: bool = True
    max_devices: int | None = None
    measured: tuple[MeasuredMove, ...] = ()

    def device_bandwidth_bytes_s(self, devices: int) -> float:
        """Bytes a second that each of ``devices`` devices of a node can send when all of them send at once."""
        return self.bandwidth_bytes_s / devices if self.per == "node" else self.bandwidth_bytes_s


class MeasuredBoot(NamedTuple):
    """Memory of one rank that is not torch's (context, communicators), as a boot log printed it.

    Attributes:
        engine: that started. tp, pp: its degrees, on which communicators depend. outside_bytes: of the rank with most.
    """

    engine: str
    tp: int
    pp: int
    outside_bytes: int


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator (or CPU rank).

    Attributes:
        name: atlas name (``H100-SXM``).
        kind: gpu or cpu.
        vendor: nvidia, amd, cpu, ...
        memory_bytes: usable memory as the driver reports it (an H100-SXM is 79.19 GiB).
        peak_flops: dense peak a second by dtype (``bf16``, ``f16``, ``f8_e4m3``, ``fp4``, ``tf32``, ``f32``,
            ``i8``); ``f32`` is the plain unit, ``tf32`` the tensor unit; a dtype without hardware is absent.
        bandwidth_bytes_s: memory bandwidth.
        capability: compute capability (``9.0``) or gfx name.
        intra: link inside a node.
        devices_per_node: how many the usual node has.
        default_inter: name of the usual link between nodes.
        source: document.
        memory_basis: ``driver``: read in logs of the driver or the framework; ``nominal``: computed from the
            size on the label; ``detected``: this machine's; ``stated``: the user's.
        memory_source: where ``memory_bytes`` comes from.
        note: what a reader of a plan must know (shared memory, no peer-to-peer, ...).
        measured, driver: what ``calibrate`` measured; peaks and bandwidth are then the best that it saw.
        booted: memory outside torch that engines printed when they started on it.
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
    memory_basis: Literal["driver", "nominal", "detected", "stated"] = "driver"
    memory_source: str = ""
    note: str = ""
    measured: tuple[MeasuredShare, ...] = ()
    driver: Driver | None = None
    booted: tuple[MeasuredBoot, ...] = ()

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


_COUNT = re.compile(r"\s*(\d{1,12})\s*[xX*]\s*")
_FORM = "write it as NODESxDEVICESxKIND@LINK (2x4xA100-80G@ib-200g), here, or a TOML file"


def parse_cluster(text: str) -> Cluster:
    """Read ``NODESxDEVICESxKIND@LINK``, ``here`` (this machine, detected) or the path of a TOML file.

    ``8xH100`` is one node, ``H100-SXM`` one device. Names and aliases are not case-sensitive. Without ``@LINK``
    and with several nodes the kind's usual link is taken, ``inter_assumed`` is True and a note says so.

    Raises:
        InputError: a malformed text, an unknown device or link (with near names), counts out of range, or an
            unreadable file.
    """
    text = text.strip()
    if not text or len(text) > 300:
        raise InputError(f"cluster: {len(text)} characters; {_FORM}")
    if text.lower() == "here":
        from meshwright.specs.detect import detect

        return detect()
    if text.lower().endswith(".toml"):
        from meshwright.specs.cluster_file import read_cluster_file

        return read_cluster_file(text)
    head, at, link = text.partition("@")
    counts, kind = _counts(head)
    from meshwright.specs.atlas.devices import find_device
    from meshwright.specs.atlas.links import find_link

    if at and not link.strip():
        raise InputError(f"cluster: no link behind @ in {text[:60]!r}; {_FORM}")
    device = find_device(kind)
    nodes, per_node = (1, *counts)[-2:] if counts else (1, 1)
    return make_cluster(nodes, per_node, device, find_link(link) if at else None)


def _counts(head: str) -> tuple[list[int], str]:
    """Split ``2x4xA100`` into ([2, 4], "A100"); a device name may itself begin with digits (``4xA``, ``2x4090``)."""
    counts: list[int] = []
    while (match := _COUNT.match(head)) and len(counts) < 3:
        counts.append(int(match[1]))
        head = head[match.end() :]
    if len(counts) > 2:
        raise InputError(f"cluster: three counts before {head[:40]!r}, at most two are read; {_FORM}")
    if not head.strip():
        raise InputError(f"cluster: no device named; {_FORM}")
    return counts, head.strip()


def make_cluster(
    nodes: int,
    devices_per_node: int,
    device: Device,
    inter: Link | None = None,
    intra: Link | None = None,
    notes: tuple[str, ...] = (),
) -> Cluster:
    """A cluster of known devices; None takes the device's own link inside, its usual one between nodes.

    Raises:
        InputError: counts out of range, or a link whose domain is too small for the devices.
    """
    for what, count in (("nodes", nodes), ("devices a node", devices_per_node)):
        if count < 1:
            raise InputError(f"cluster: {count} {what}; there must be at least 1")
    total = nodes * devices_per_node
    if total > MAX_DEVICES:
        raise InputError(f"cluster: {nodes} x {devices_per_node} = {total} devices; at most {MAX_DEVICES} are planned")
    said = list(notes)
    intra = intra or device.intra
    assumed = inter is None and nodes > 1
    inter = inter or _usual_link(device, total, said if assumed else [])
    if nodes > 1 and inter.max_devices is not None and total > inter.max_devices:
        raise InputError(
            f"cluster: {inter.name} joins at most {inter.max_devices} devices, {nodes} x {devices_per_node} = {total} "
            "were asked for; name the link between such domains, for example @ib-400g"
        )
    if intra.max_devices is None and device.kind == "gpu" and devices_per_node > device.devices_per_node > 1:
        said.append(
            f"{devices_per_node} devices in one node; the usual {device.name} node has {device.devices_per_node}"
        )
    if device.note:
        said.append(f"{device.name}: {device.note}")
    return Cluster(
        nodes,
        devices_per_node,
        device,
        intra,
        inter,
        assumed,
        switched=intra.switched,
        notes=tuple(dict.fromkeys(said)),
    )


def _usual_link(device: Device, total: int, notes: list[str]) -> Link:
    """The kind's usual link between nodes, with a note; a rack-wide NVLink only as far as its domain reaches."""
    from meshwright.specs.atlas.links import find_link

    link = find_link(device.default_inter)
    if link.max_devices is not None and total > link.max_devices:
        notes.append(f"{total} devices are more than the {link.max_devices} that {link.name} joins")
        link = find_link("ib-800g" if device.capability == "10.3" else "ib-400g")
    notes.append(f"link between nodes not named: {describe_link(link)} assumed, the usual one for {device.name}")
    return link


def describe_link(link: Link) -> str:
    """A link as the output names it: ``ib-200g (25 GB/s each way per device)``."""
    return f"{link.name} ({link.bandwidth_bytes_s / 1e9:g} GB/s each way per {link.per})"

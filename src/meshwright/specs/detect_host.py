"""What the host itself says: cores, memory limits, NUMA nodes, network adapters; and CPU ranks as devices."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshwright.specs.atlas.devices import GIB
from meshwright.specs.atlas.links import find_link
from meshwright.specs.cluster import Cluster, Device, Link
from meshwright.specs.probe import Probe

#: Most CPU ranks that are proposed; more cores make the ranks wider, not more.
MAX_RANKS = 8

#: Modelled memory bandwidth: what one core and one socket of a server of the years 2019 to 2024 can read.
CORE_BANDWIDTH_BYTES_S = 12e9
SOCKET_BANDWIDTH_BYTES_S = 100e9

#: f32 operations a core retires a cycle (two fused multiply-adds of the vector width), best flag first.
_F32_PER_CYCLE = (("avx512f", 64), ("avx2", 32), ("avx", 16), ("sve", 32), ("asimd", 16), ("sse2", 8))

#: bf16 operations a core retires a cycle, where the hardware has them at all.
_BF16_PER_CYCLE = (("amx_bf16", 1024), ("avx512_bf16", 128), ("bf16", 64))


@dataclass(frozen=True, slots=True)
class Host:
    """Cores and memory that this process may use.

    Attributes:
        cores: usable cores: the smaller of affinity and cgroup quota, at least 1.
        memory_bytes: the smaller of MemTotal and the cgroup limit.
        numa_nodes: NUMA nodes of the machine.
        mhz: clock, or None when it is not told.
        flags: feature flags of the CPU.
        notes: where the figures come from.
    """

    cores: int
    memory_bytes: int
    numa_nodes: int
    mhz: float | None
    flags: frozenset[str]
    notes: tuple[str, ...]


def read_host(probe: Probe) -> Host:
    """Read the host; what cannot be read is assumed small and said in ``notes``."""
    notes: list[str] = []
    cores = max(probe.cores(), 1)
    quota = cgroup_cores(probe)
    if quota is not None and quota < cores:
        notes.append(f"{cores} cores in the affinity mask, limited to {quota:g} by the cgroup")
        cores = max(int(quota), 1)
    total = meminfo_bytes(probe.read("/proc/meminfo"))
    limit = cgroup_memory_bytes(probe)
    if total is None and limit is None:
        total = GIB
        notes.append("memory of the host could not be read; 1 GiB is taken")
    elif limit is not None and (total is None or limit < total):
        notes.append(f"memory limited to {limit / GIB:.2f} GiB by the cgroup")
    memory = min(value for value in (total, limit) if value is not None)
    nodes = [n for n in probe.names("/sys/devices/system/node") if re.fullmatch(r"node\d{1,4}", n)]
    mhz, flags = cpuinfo(probe.read("/proc/cpuinfo"))
    return Host(cores, memory, max(len(nodes), 1), mhz, flags, tuple(notes))


def meminfo_bytes(text: str | None) -> int | None:
    """``MemTotal`` of ``/proc/meminfo``; None when it is not there."""
    match = re.search(r"^MemTotal:\s+(\d{1,15}) kB", text or "", re.MULTILINE)
    return int(match[1]) * 1024 if match and int(match[1]) else None


def free_memory_bytes(probe: Probe) -> int | None:
    """``MemAvailable``, or the limit of the cgroup where that is smaller; None when neither can be read."""
    match = re.search(r"^MemAvailable:\s+(\d{1,15}) kB", probe.read("/proc/meminfo") or "", re.MULTILINE)
    known = [value for value in (int(match[1]) * 1024 if match else None, cgroup_memory_bytes(probe)) if value]
    return min(known, default=None)


def cpuinfo(text: str | None) -> tuple[float | None, frozenset[str]]:
    """Clock in MHz (the highest told) and the feature flags of ``/proc/cpuinfo``."""
    text = text or ""
    clocks = [float(m) for m in re.findall(r"^cpu MHz\s*:\s*(\d{1,6}(?:\.\d{1,6})?)", text, re.MULTILINE)]
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return max(clocks, default=0.0) or None, frozenset(flags[1].split()) if flags else frozenset()


def _cgroup_files(probe: Probe, controller: str, name: str, old_name: str) -> list[str]:
    """Contents of the limit files of this process's cgroup and all above it, both versions."""
    paths: list[str] = []
    for line in (probe.read("/proc/self/cgroup") or "").splitlines()[:64]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if ".." in path:
            continue
        parts = [p for p in path.split("/") if p][:32]
        v2 = not controllers
        if not v2 and controller not in controllers.split(","):
            continue
        base = "/sys/fs/cgroup" if v2 else f"/sys/fs/cgroup/{controllers}"
        paths += ["/".join([base, *parts[:depth], name if v2 else old_name]) for depth in range(len(parts), -1, -1)]
    paths += [f"/sys/fs/cgroup/{name}", f"/sys/fs/cgroup/{controller}/{old_name}"]
    return [text for path in dict.fromkeys(paths) if (text := probe.read(path)) is not None]


def cgroup_memory_bytes(probe: Probe) -> int | None:
    """Smallest memory limit of the cgroups above this process; None when there is none."""
    limits = [
        int(text)
        for text in _cgroup_files(probe, "memory", "memory.max", "memory.limit_in_bytes")
        if re.fullmatch(r"\s*\d{1,19}\s*", text)
    ]
    # Version 1 writes "no limit" as the largest page-aligned 63-bit number.
    return min((limit for limit in limits if 0 < limit < 1 << 60), default=None)


def cgroup_cores(probe: Probe) -> float | None:
    """Smallest CPU quota of the cgroups above this process, in cores; None when there is none."""
    quotas: list[float] = []
    for text in _cgroup_files(probe, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        if match := re.fullmatch(r"\s*(\d{1,12})(?:\s+(\d{1,12}))?\s*", text):
            quotas.append(int(match[1]) / max(int(match[2] or 100_000), 1))
    return min((quota for quota in quotas if quota > 0), default=None)


def network_link(probe: Probe, devices: int) -> tuple[Link | None, str]:
    """The link between nodes that the adapters of this host allow, and a sentence about it.

    InfiniBand and RoCE ports from ``/sys/class/infiniband``, else the fastest wired ``/sys/class/net`` interface.
    """
    ports: list[tuple[float, str]] = []
    for adapter in probe.names("/sys/class/infiniband")[:64]:
        for port in probe.names(f"/sys/class/infiniband/{adapter}/ports")[:8]:
            where = f"/sys/class/infiniband/{adapter}/ports/{port}"
            rate = re.match(r"(\d{1,5}(?:\.\d)?) Gb/sec", probe.read(f"{where}/rate") or "")
            if rate and "ACTIVE" in (probe.read(f"{where}/state") or ""):
                ports.append((float(rate[1]), (probe.read(f"{where}/link_layer") or "").strip()))
    if ports:
        top = max(rate for rate, _ in ports)
        best = [layer for rate, layer in ports if rate == top]
        each = len(best) >= devices
        gbit = top if each else top * len(best)
        kind = "roce" if best[0] == "Ethernet" else "infiniband"
        prefix = "roce" if kind == "roce" else "ib"
        name = f"{prefix}-{gbit:g}g" + ("" if each else "/node")
        known = find_link(f"{prefix}-400g")
        link = Link(
            name, known.kind, gbit / 8 * 1e9, known.latency_s, "device" if each else "node", "/sys/class/infiniband"
        )
        return link, f"{len(best)} active {best[0] or 'InfiniBand'} ports of {top:g} Gb/s"
    speeds = [
        int(text)
        for name in probe.names("/sys/class/net")[:64]
        if "device" in probe.names(f"/sys/class/net/{name}")
        and re.fullmatch(r"\d{1,7}\s*", text := probe.read(f"/sys/class/net/{name}/speed") or "")
    ]
    if speeds and max(speeds) > 0:
        gbit = max(speeds) / 1000
        tcp = find_link("eth-10g")
        return (
            Link(f"eth-{gbit:g}g/node", "ethernet", gbit / 8 * 1e9, tcp.latency_s, "node", "/sys/class/net"),
            f"fastest network interface {gbit:g} Gb/s",
        )
    return None, "no network adapter's speed could be read"


def cpu_cluster(probe: Probe) -> Cluster:
    """This host as one node of CPU ranks: one rank a core up to eight, memory and cores divided among them."""
    host = read_host(probe)
    ranks = min(host.cores, MAX_RANKS)
    width = host.cores // ranks
    mhz = host.mhz or 2500.0
    f32 = next((n for flag, n in _F32_PER_CYCLE if flag in host.flags), 8)
    bf16 = next((n for flag, n in _BF16_PER_CYCLE if flag in host.flags), 0)
    peaks = (("f32", f32 * width * mhz * 1e6),) + ((("bf16", bf16 * width * mhz * 1e6),) if bf16 else ())
    bandwidth = min(host.cores * CORE_BANDWIDTH_BYTES_S, host.numa_nodes * SOCKET_BANDWIDTH_BYTES_S) / ranks
    memory = host.memory_bytes // ranks
    shared = Link("host-memory", "memory", bandwidth, 1e-6, "device", "shared memory, modelled as the read bandwidth")
    wide, seen = network_link(probe, ranks)
    plural = "" if width == 1 else "s"
    device = Device(
        name=f"CPU-{width}core",
        kind="cpu",
        vendor="cpu",
        memory_bytes=memory,
        peak_flops=peaks,
        bandwidth_bytes_s=bandwidth,
        capability="x86-64" if {"sse2", "avx"} & host.flags else "cpu",
        intra=shared,
        devices_per_node=ranks,
        default_inter="eth-10g/node",
        source="detected: affinity, cgroup, /proc/cpuinfo, /proc/meminfo; peak from vector width and clock",
        memory_basis="detected",
        memory_source="the smaller of MemTotal and the cgroup limit, divided by the ranks",
    )
    notes = (
        f"no accelerator: a device is a CPU rank of {width} core{plural} with {memory / GIB:.2f} GiB, "
        f"{ranks} of them from {host.cores} cores and {host.memory_bytes / GIB:.2f} GiB",
        f"memory bandwidth modelled at {bandwidth / 1e9:.1f} GB/s a rank, compute at {mhz / 1e3:.2f} GHz; not measured",
        *host.notes,
        *(
            (f"{host.numa_nodes} NUMA nodes: ranks on different ones share memory more slowly",)
            if host.numa_nodes > 1
            else ()
        ),
        f"link between nodes: {seen}",
    )
    return Cluster(
        1, ranks, device, shared, wide or find_link("eth-10g/node"), wide is None, detected=True, notes=notes
    )

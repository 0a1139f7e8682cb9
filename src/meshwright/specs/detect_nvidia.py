"""NVIDIA devices of this machine from ``nvidia-smi``: parsers of its text, and the cluster they amount to.

Formats read: ``--query-gpu=... --format=csv,noheader,nounits``, ``topo -m`` and ``-L`` of drivers 450 to 595.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

from meshwright.specs.atlas.devices import GIB, match_device
from meshwright.specs.atlas.links import find_link
from meshwright.specs.cluster import Cluster, Device, Link
from meshwright.specs.detect_host import meminfo_bytes, network_link
from meshwright.specs.probe import Probe

QUERY = "name,memory.total,memory.reserved,compute_cap,mig.mode.current,pcie.link.gen.max,pcie.link.width.max"

#: GB/s one NVLink link carries in one direction, by compute capability (NVIDIA whitepapers; 8.6: GA102 whitepaper).
NVLINK_GB_S = {"6.0": 20.0, "7.0": 25.0, "8.0": 25.0, "8.6": 14.0625, "9.0": 25.0, "10.0": 50.0, "10.3": 50.0}

#: Usable GB/s of one PCIe lane in one direction by generation: the x16 figures of ``links.json``, divided.
PCIE_LANE_GB_S = {1: 0.2, 2: 0.4, 3: 0.78125, 4: 1.5625, 5: 3.125, 6: 6.25}

#: Share of ``memory.total`` that is taken for usable when neither the reserve nor the atlas is known.
USABLE_SHARE = 0.994

#: Most devices that are read of one machine.
MAX_GPUS = 256


@dataclass(frozen=True, slots=True)
class Gpu:
    """One row of ``nvidia-smi --query-gpu``; None where it says ``[N/A]``."""

    name: str
    total_mib: int | None
    reserved_mib: int | None
    capability: str
    mig: bool
    pcie_gen: int | None
    pcie_width: int | None


@dataclass(frozen=True, slots=True)
class Topology:
    """The GPU part of ``nvidia-smi topo -m``: for each pair (i < j) ``NV18``, ``PIX``, ``PHB``, ``NODE``, ``SYS``."""

    pairs: tuple[tuple[int, int, str], ...]

    @property
    def nvlinks(self) -> dict[tuple[int, int], int]:
        """Links of every pair that NVLink joins."""
        return {(i, j): int(how[2:]) for i, j, how in self.pairs if how.startswith("NV")}

    @property
    def worst(self) -> str:
        """The slowest way between two GPUs of the machine that is not NVLink; empty when there is none."""
        order = ("PIX", "PXB", "PHB", "NODE", "SYS")
        return max((how for _, _, how in self.pairs if how in order), key=order.index, default="")


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,9}", text) else None


def parse_gpus(text: str) -> list[Gpu]:
    """Rows of the csv output; rows that are cut off or malformed are left out."""
    gpus: list[Gpu] = []
    for line in text.splitlines()[:MAX_GPUS]:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 7 or not cells[0] or len(cells[0]) > 80 or not cells[0].isprintable():
            continue
        name, total, reserved, cap, mig, gen, width = cells
        if not re.fullmatch(r"\d{1,2}\.\d", cap):
            continue
        gpus.append(Gpu(name, _whole(total), _whole(reserved), cap, mig == "Enabled", _whole(gen), _whole(width)))
    return gpus


def parse_topology(text: str, gpus: int) -> Topology | None:
    """The matrix of ``nvidia-smi topo -m``; None unless it is whole for all ``gpus``."""
    rows: dict[int, list[str]] = {}
    columns: list[int] = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()[:4096]:
        cells = line.split()
        if not columns and cells[:1] == ["GPU0"] and (len(cells) == 1 or cells[1] != "X"):
            columns = [int(c[3:]) for c in cells if re.fullmatch(r"GPU\d{1,4}", c)]
        elif cells and (match := re.fullmatch(r"GPU(\d{1,4})", cells[0])) and columns:
            rows[int(match[1])] = cells[1 : len(columns) + 1]
    if columns != list(range(gpus)) or any(len(rows.get(i, ())) != gpus for i in columns):
        return None
    pairs = tuple((i, j, rows[i][j]) for i in range(gpus) for j in range(i + 1, gpus))
    known = re.compile(r"NV\d{1,3}|PIX|PXB|PHB|NODE|SYS")
    return Topology(pairs) if all(known.fullmatch(how) for _, _, how in pairs) else None


def parse_mig(text: str) -> list[str]:
    """Profiles (``1g.10gb``) of the MIG instances that ``nvidia-smi -L`` lists."""
    return re.findall(r"^\s+MIG (\d{1,2}g\.\d{1,4}gb)(?:\+\S+)?\s+Device", text, re.MULTILINE)[:MAX_GPUS]


def usable_bytes(gpu: Gpu, known: Device | None, host_bytes: int | None) -> tuple[int, str]:
    """Usable memory of one GPU and where the figure comes from.

    The atlas figure where it agrees with the driver's to 2 % (frameworks see less than ``memory.total``); else the
    total less the driver's reserve. A GPU without memory of its own (GB10) has the host's.
    """
    if gpu.total_mib is None:
        if known is not None:
            return known.memory_bytes, f"nvidia-smi tells no memory; atlas: {known.memory_source}"
        return host_bytes or GIB, "nvidia-smi tells no memory; the host's is taken"
    total = gpu.total_mib << 20
    if known is not None and abs(total - known.memory_bytes) <= 0.02 * total:
        return known.memory_bytes, f"nvidia-smi {gpu.total_mib} MiB; usable by the atlas: {known.memory_source}"
    if gpu.reserved_mib is not None and gpu.reserved_mib < gpu.total_mib:
        return total - (gpu.reserved_mib << 20), f"nvidia-smi {gpu.total_mib} MiB less {gpu.reserved_mib} MiB reserved"
    return int(total * USABLE_SHARE), f"nvidia-smi {gpu.total_mib} MiB less 0.6 % for the driver"


def pcie_link(gpu: Gpu, worst: str) -> Link:
    """The PCIe way between two GPUs by generation and lanes; ``switched`` when all sit under one switch."""
    gen, width = gpu.pcie_gen, gpu.pcie_width
    base = find_link(f"pcie{gen}" if gen in (3, 4, 5, 6) else "pcie3")
    rate = PCIE_LANE_GB_S.get(gen or 0, PCIE_LANE_GB_S[3]) * 1e9 * (width if width in (1, 2, 4, 8, 16) else 16)
    name = f"pcie{gen or '?'}-x{width or '?'}"
    return replace(base, name=name, bandwidth_bytes_s=rate, switched=worst in ("PIX", "PXB"))


def intra_link(gpu: Gpu, known: Device | None, topology: Topology | None, count: int) -> tuple[Link, list[str]]:
    """The link that any two GPUs of the machine can count on, with what must be said about it."""
    fallback = known.intra if known is not None else pcie_link(gpu, "")
    if count == 1:
        return fallback, []
    if topology is None:
        return fallback, [
            f"topology could not be read (nvidia-smi topo -m): {fallback.name} between devices is assumed"
        ]
    links = topology.nvlinks
    if len(links) == len(topology.pairs):
        fewest = min(links.values())
        rate = NVLINK_GB_S.get(gpu.capability, 25.0) * 1e9 * fewest
        even = len(set(links.values())) == 1
        # Behind an NVSwitch every pair reports all links of a device; in a mesh the links are divided among the peers.
        meshed = known is None or rate < 0.95 * known.intra.bandwidth_bytes_s
        if known is not None and known.intra.kind == "nvswitch" and not meshed and even:
            return known.intra, []
        mesh = count > 2 and gpu.capability in ("6.0", "7.0")
        link = Link(f"nvlink-x{fewest}", "nvlink", rate, find_link("nvlink3").latency_s, "device", "nvidia-smi topo -m")
        said = [f"every pair is joined by {fewest} or more NVLink links: {rate / 1e9:g} GB/s each way"]
        if known is not None and known.intra.kind == "nvswitch":
            said.append(f"the usual {known.name} has {known.intra.bandwidth_bytes_s / 1e9:g} GB/s each way")
        return replace(link, switched=even and not mesh), said
    slow = pcie_link(gpu, topology.worst)
    if not links:
        way = {"SYS": "across sockets", "NODE": "across host bridges", "PHB": "through the host bridge"}
        said = [f"no NVLink: devices reach each other over {slow.name}, {way.get(topology.worst, 'through switches')}"]
        return slow, said
    named = ", ".join(f"{i}-{j}" for i, j in sorted(links)[:8]) + (", ..." if len(links) > 8 else "")
    rate = NVLINK_GB_S.get(gpu.capability, 25.0) * min(links.values())
    return slow, [
        f"NVLink joins only the pairs {named} ({rate:g} GB/s each way); groups wider than such a pair are planned at "
        f"the speed of {slow.name}"
    ]


def nvidia_cluster(probe: Probe) -> tuple[Cluster | None, list[str]]:
    """The NVIDIA devices of this machine as one node, and notes; no cluster when there is no usable device."""
    text = probe.run(("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"))
    if text is None:
        return None, []
    gpus = parse_gpus(text)
    if not gpus:
        return None, ["nvidia-smi is installed but lists no device (no driver, or its output was cut off)"]
    notes: list[str] = []
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) != len(gpus):
        notes.append(f"{len(lines) - len(gpus)} lines of nvidia-smi could not be read and are left out")
    topo_text = probe.run(("nvidia-smi", "topo", "-m")) if len(lines) > 1 else None
    topology = parse_topology(topo_text or "", len(lines)) if topo_text and len(lines) == len(gpus) else None
    if any(gpu.mig for gpu in gpus):
        return _mig_cluster(probe, gpus, notes), []
    chosen = _visible(probe, list(range(len(gpus))), notes)
    kinds = Counter((gpus[i].name, gpus[i].total_mib) for i in chosen)
    (name, total), _ = max(kinds.items(), key=lambda item: (item[1], item[0][1] or 0))
    kept = [i for i in chosen if (gpus[i].name, gpus[i].total_mib) == (name, total)]
    if len(kept) < len(chosen):
        rest = ", ".join(f"{n} x {k[0]}" for k, n in kinds.items() if k != (name, total))
        notes.append(f"devices differ: the {len(kept)} x {name} are planned for, left out: {rest}")
    if topology is not None:
        place = {gpu: n for n, gpu in enumerate(kept)}
        topology = Topology(tuple((place[i], place[j], h) for i, j, h in topology.pairs if i in place and j in place))
    return _cluster(probe, gpus[kept[0]], len(kept), topology, notes), []


def _visible(probe: Probe, gpus: list[int], notes: list[str]) -> list[int]:
    """GPUs that CUDA_VISIBLE_DEVICES leaves, where it is a list of numbers."""
    text = probe.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return gpus
    if not re.fullmatch(r"\s*\d{1,3}(\s*,\s*\d{1,3})*\s*", text):
        notes.append("CUDA_VISIBLE_DEVICES is not a list of numbers and is not applied")
        return gpus
    kept = [i for i in dict.fromkeys(int(part) for part in text.split(",")) if i in gpus]
    if not kept:
        notes.append("CUDA_VISIBLE_DEVICES names no device of this machine and is not applied")
        return gpus
    if len(kept) < len(gpus):
        notes.append(f"CUDA_VISIBLE_DEVICES leaves {len(kept)} of {len(gpus)} devices")
    return kept


def _cluster(probe: Probe, gpu: Gpu, count: int, topology: Topology | None, notes: list[str]) -> Cluster:
    known = match_device(gpu.name)
    memory, memory_source = usable_bytes(gpu, known, meminfo_bytes(probe.read("/proc/meminfo")))
    intra, said = intra_link(gpu, known, topology, count)
    notes += said
    wide, seen = network_link(probe, count)
    notes.append(f"link between nodes: {seen}")
    if known is None:
        notes.append(f"{gpu.name} is not in the atlas: peaks and bandwidth of its generation are guessed")
        known = _unknown(gpu, intra)
    elif known.note and not (topology and topology.nvlinks):
        notes.append(f"{known.name}: {known.note}")
    device = replace(
        known,
        memory_bytes=memory,
        memory_basis="detected",
        memory_source=memory_source,
        capability=gpu.capability,
        intra=intra,
    )
    return Cluster(
        1,
        count,
        device,
        intra,
        wide or find_link(device.default_inter),
        inter_assumed=wide is None,
        switched=intra.switched,
        detected=True,
        notes=tuple(dict.fromkeys(notes)),
    )


def _unknown(gpu: Gpu, intra: Link) -> Device:
    """A device of which only name and capability are known: figures of the smallest card of its generation."""
    major = int(gpu.capability.split(".")[0])
    like = match_device({7: "T4", 8: "A10", 9: "H20", 10: "B200", 12: "RTX-5090"}.get(major, "P100-PCIe"))
    assert like is not None
    return replace(
        like,
        name=gpu.name.removeprefix("NVIDIA ").replace(" ", "-"),
        intra=intra,
        source=f"not in the atlas; peaks and bandwidth guessed from {like.name}",
        note="",
    )


def _mig_cluster(probe: Probe, gpus: list[Gpu], notes: list[str]) -> Cluster | None:
    """MIG instances as devices: equal slices, no peer-to-peer between them (NVIDIA MIG user guide)."""
    profiles = parse_mig(probe.run(("nvidia-smi", "-L")) or "")
    gpu = next(g for g in gpus if g.mig)
    if not profiles:
        notes.append("MIG is on and no instance could be listed: one whole device is planned for, which cannot be used")
        return _cluster(probe, replace(gpu, mig=False), 1, None, notes)
    profile, count = Counter(profiles).most_common(1)[0]
    if count < len(profiles):
        notes.append(f"MIG instances differ: the {count} x {profile} are planned for")
    if not all(g.mig for g in gpus):
        notes.append("devices without MIG are left out")
    slices, gigabytes = (int(n) for n in re.findall(r"\d+", profile))
    whole = _cluster(probe, replace(gpu, mig=False), 1, None, notes)
    total = (gpu.total_mib or 0) / 1024
    share = min(gigabytes / total, 1.0) if total else slices / 7
    notes = [
        *whole.notes,
        f"MIG: a device is one {profile} instance; memory and bandwidth are {share:.2f} of the card, peaks {slices}/7",
        "MIG instances have no peer-to-peer: collectives among them pass through host memory",
    ]
    link = pcie_link(gpu, "SYS")
    device = replace(
        whole.device,
        name=f"{whole.device.name}-MIG-{profile}",
        memory_bytes=int(whole.device.memory_bytes * share),
        memory_source=f"{whole.device.memory_source}; share of the MIG profile",
        peak_flops=tuple((dtype, flops * slices / 7) for dtype, flops in whole.device.peak_flops),
        bandwidth_bytes_s=whole.device.bandwidth_bytes_s * share,
        intra=link,
    )
    return replace(whole, devices_per_node=count, device=device, intra=link, switched=False, notes=tuple(notes))

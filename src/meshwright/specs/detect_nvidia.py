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
from meshwright.specs.detect_topology import Topology, judge, parse_topology, pcie_link
from meshwright.specs.probe import Probe

#: Fields asked for. Drivers before 510 know no ``memory.reserved`` and fail on it, so the short form is tried after.
FIELDS = ("name", "memory.total", "mig.mode.current", "pcie.link.gen.max", "pcie.link.width.max")
FIELDS_510 = (*FIELDS, "memory.reserved", "compute_cap")

#: Share of ``memory.total`` that is taken for usable when neither the reserve nor the atlas is known.
USABLE_SHARE = 0.994

#: Most devices that are read of one machine.
MAX_GPUS = 256


@dataclass(frozen=True, slots=True)
class Gpu:
    """One row of ``nvidia-smi --query-gpu``; None (or an empty ``capability``) where it says ``[N/A]``."""

    name: str
    total_mib: int | None
    mig: bool = False
    pcie_gen: int | None = None
    pcie_width: int | None = None
    reserved_mib: int | None = None
    capability: str = ""


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,9}", text) else None


def parse_gpus(text: str) -> list[Gpu]:
    """Rows of the csv output, with or without the last two fields; rows that are cut off or malformed are left out."""
    gpus: list[Gpu] = []
    for line in text.splitlines()[:MAX_GPUS]:
        cells = [cell.strip() for cell in line.split(",")]
        if (
            len(cells) not in (len(FIELDS), len(FIELDS_510))
            or not 1 <= len(cells[0]) <= 80
            or not cells[0].isprintable()
        ):
            continue
        name, total, mig, gen, width, *new = cells
        reserved, cap = new or ("", "")
        if new and not re.fullmatch(r"\d{1,2}\.\d", cap):
            continue
        gpus.append(Gpu(name, _whole(total), mig == "Enabled", _whole(gen), _whole(width), _whole(reserved), cap))
    return gpus


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


def intra_link(gpu: Gpu, known: Device | None, topology: Topology | None, count: int) -> tuple[Link, list[str]]:
    """The link that any two GPUs of the machine can count on, with what must be said about it."""
    pcie = pcie_link(gpu.pcie_gen, gpu.pcie_width, topology.worst if topology else "")
    usual = known.intra if known is not None else pcie
    if count == 1:
        return usual, []
    if topology is None:
        return usual, [f"topology could not be read (nvidia-smi topo -m): {usual.name} between devices is assumed"]
    return judge(topology, gpu.capability or (known.capability if known else ""), known.intra if known else None, pcie)


def nvidia_cluster(probe: Probe) -> tuple[Cluster | None, list[str]]:
    """The NVIDIA devices of this machine as one node, and notes; no cluster when there is no usable device."""
    if not probe.installed("nvidia-smi"):
        return None, []
    text = _query(probe, FIELDS_510)
    if text is None:
        text = _query(probe, FIELDS)
    if text is None:
        return None, ["nvidia-smi is installed and fails or does not answer within 5 s (no driver?)"]
    gpus = parse_gpus(text)
    if not gpus:
        return None, ["nvidia-smi answers but lists no device that could be read"]
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
        topology = topology.restrict(kept)
    return _cluster(probe, gpus[kept[0]], len(kept), topology, notes), []


def _query(probe: Probe, fields: tuple[str, ...]) -> str | None:
    return probe.run(("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"))


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
        capability=gpu.capability or known.capability,
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
    major = int(gpu.capability.split(".")[0] or 0)
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
    link = pcie_link(gpu.pcie_gen, gpu.pcie_width, "SYS")
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

"""How the GPUs of a machine reach each other: the matrix of ``nvidia-smi topo -m``, read and judged."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from meshwright.specs.atlas.links import find_link
from meshwright.specs.cluster import Link, LinkKind

#: By compute capability: NVLink links of a device, and GB/s one of them carries in one direction
#: (NVIDIA whitepapers of P100, V100, A100, GA102, H100; B200 datasheet).
NVLINKS = {
    "6.0": (4, 20.0),
    "7.0": (6, 25.0),
    "8.0": (12, 25.0),
    "8.6": (4, 14.0625),
    "9.0": (18, 25.0),
    "10.0": (18, 50.0),
    "10.3": (18, 50.0),
}

#: Usable GB/s of one PCIe lane in one direction by generation: the x16 figures of ``links.json``, divided.
PCIE_LANE_GB_S = {1: 0.2, 2: 0.4, 3: 0.78125, 4: 1.5625, 5: 3.125, 6: 6.25}

_ORDER = ("PIX", "PXB", "PHB", "NODE", "SYS")
_WAY = {"SYS": "across sockets", "NODE": "across host bridges", "PHB": "through the host bridge"}


@dataclass(frozen=True, slots=True)
class Topology:
    """For each pair (i < j) of GPUs ``NV18``, ``PIX``, ``PXB``, ``PHB``, ``NODE`` or ``SYS``."""

    gpus: int
    pairs: tuple[tuple[int, int, str], ...]

    @property
    def nvlinks(self) -> dict[tuple[int, int], int]:
        """Links of every pair that NVLink joins."""
        return {(i, j): int(how[2:]) for i, j, how in self.pairs if how.startswith("NV")}

    @property
    def worst(self) -> str:
        """The slowest way between two GPUs that is not NVLink; empty when there is none."""
        return max((how for _, _, how in self.pairs if how in _ORDER), key=_ORDER.index, default="")

    def links_of(self, gpu: int) -> int:
        """NVLink links of one GPU to all others of the matrix."""
        return sum(n for pair, n in self.nvlinks.items() if gpu in pair)

    @property
    def woven(self) -> bool:
        """NVLink joins all GPUs such that a ring can stay on it: connected, and two neighbours for each of three."""
        peers: dict[int, set[int]] = {gpu: set() for gpu in range(self.gpus)}
        for i, j in self.nvlinks:
            peers[i].add(j)
            peers[j].add(i)
        reached, todo = {0}, [0]
        while todo:
            new = peers[todo.pop()] - reached
            reached |= new
            todo += new
        return len(reached) == self.gpus and min(map(len, peers.values())) >= min(2, self.gpus - 1)

    def restrict(self, kept: list[int]) -> Topology:
        """The matrix of some of the GPUs, numbered anew."""
        place = {gpu: n for n, gpu in enumerate(sorted(kept))}
        rest = tuple((place[i], place[j], how) for i, j, how in self.pairs if i in place and j in place)
        return Topology(len(place), rest)


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
    return Topology(gpus, pairs) if all(known.fullmatch(how) for _, _, how in pairs) else None


def pcie_link(gen: int | None, width: int | None, worst: str) -> Link:
    """The PCIe way between two GPUs by generation and lanes; ``switched`` when all sit under one switch."""
    base = find_link(f"pcie{gen}" if gen in (3, 4, 5, 6) else "pcie3")
    rate = PCIE_LANE_GB_S.get(gen or 0, PCIE_LANE_GB_S[3]) * 1e9 * (width if width in (1, 2, 4, 8, 16) else 16)
    name = f"pcie{gen or '?'}-x{width or '?'}"
    return replace(base, name=name, bandwidth_bytes_s=rate, switched=worst in ("PIX", "PXB"))


def judge(topology: Topology, capability: str, usual: Link | None, pcie: Link) -> tuple[Link, list[str]]:
    """The link that any group of the machine's GPUs can count on, and what must be said about it.

    Args:
        topology: the matrix of at least two GPUs.
        capability: compute capability, for the rate of one NVLink link.
        usual: the link that the atlas has for this device.
        pcie: the way without NVLink.
    """
    joined = topology.nvlinks
    most, rate = NVLINKS.get(capability, (18, 25.0))
    if not joined:
        return pcie, [f"no NVLink: devices reach each other over {pcie.name}, {_way(topology.worst)}"]
    if not topology.woven:
        named = ", ".join(f"{i}-{j}" for i, j in sorted(joined)[:8]) + (", ..." if len(joined) > 8 else "")
        fewest = min(joined.values()) * rate
        return pcie, [
            f"NVLink joins only the pairs {named} ({fewest:g} GB/s each way); wider groups are planned at the speed of "
            f"{pcie.name}, {_way(topology.worst)}"
        ]
    # Behind an NVSwitch every pair shows all links of a device; in a mesh a device's links are divided among its peers.
    sums = [topology.links_of(gpu) for gpu in range(topology.gpus)]
    switch = topology.gpus > 2 and max(sums) > most
    links = min(joined.values()) if switch else min(sums)
    each = links * rate * 1e9
    if usual is not None and usual.kind in ("nvswitch", "nvlink") and abs(each - usual.bandwidth_bytes_s) < 0.05 * each:
        return replace(usual, switched=switch or topology.gpus == 2), []
    said = [f"NVLink with {links} links a device: {each / 1e9:g} GB/s each way"]
    if usual is not None and usual.kind in ("nvswitch", "nvlink"):
        said.append(f"usual for this device: {usual.bandwidth_bytes_s / 1e9:g} GB/s each way")
    latency = find_link("nvlink3").latency_s
    kind: LinkKind = "nvswitch" if switch else "nvlink"
    found = Link(f"nvlink-x{links}", kind, each, latency, "device", "nvidia-smi topo -m", switch or topology.gpus == 2)
    return found, said


def _way(worst: str) -> str:
    return _WAY.get(worst, "through switches")

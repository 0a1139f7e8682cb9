"""Detection of this machine: parsers on recorded outputs of every kind of machine, bounded commands, honest notes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.specs import probe as probe_module
from meshwright.specs.atlas.devices import GIB, find_device
from meshwright.specs.cluster import Cluster, parse_cluster
from meshwright.specs.detect import detect
from meshwright.specs.detect_amd import parse_amd_smi, parse_rocm_smi
from meshwright.specs.detect_host import cgroup_cores, cgroup_memory_bytes, cpuinfo, meminfo_bytes, network_link
from meshwright.specs.detect_nvidia import FIELDS, FIELDS_510, parse_gpus, parse_mig
from meshwright.specs.detect_topology import parse_topology
from meshwright.specs.probe import Probe


class Recorded(Probe):
    """A machine made of recorded answers: commands by their first words, files by path."""

    def __init__(
        self,
        commands: Mapping[str, str | None] | None = None,
        files: Mapping[str, str] | None = None,
        cores: int = 8,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(Path("/nowhere"), environ or {})
        object.__setattr__(self, "commands", dict(commands or {}))
        object.__setattr__(self, "files", dict(files or {}))
        object.__setattr__(self, "count", cores)

    def installed(self, program: str) -> bool:
        return any(key.split()[0] == program for key in self.commands)  # type: ignore[attr-defined]

    def run(self, command: Sequence[str]) -> str | None:
        line = " ".join(command)
        keys = [k for k in self.commands if line.startswith(k)]  # type: ignore[attr-defined]
        return self.commands[max(keys, key=len)] if keys else None  # type: ignore[attr-defined]

    def read(self, path: str) -> str | None:
        found: str | None = self.files.get(path)  # type: ignore[attr-defined]
        return found

    def names(self, path: str) -> tuple[str, ...]:
        below = [f[len(path) + 1 :] for f in self.files if f.startswith(path + "/")]  # type: ignore[attr-defined]
        return tuple(sorted({f.split("/")[0] for f in below}))

    def cores(self) -> int:
        count: int = self.count  # type: ignore[attr-defined]
        return count


QUERY = f"nvidia-smi --query-gpu={','.join(FIELDS_510)}"
OLD_QUERY = f"nvidia-smi --query-gpu={','.join(FIELDS)}"
MEMINFO = "MemTotal:       2113407000 kB\nMemFree:        1000 kB\n"


def gpu_row(
    name: str, mib: str = "81559", cap: str = "9.0", mig: str = "Disabled", gen: int = 5, width: int = 16
) -> str:
    return f"{name}, {mib}, {mig}, {gen}, {width}, 551, {cap}\n"


def topo(pairs: Mapping[tuple[int, int], str], gpus: int, other: str, nics: int = 0) -> str:
    """A matrix in nvidia-smi's form: tabs, `` X `` on the diagonal, adapters and affinities behind the GPUs."""
    head = ["", *(f"GPU{i}" for i in range(gpus)), *(f"NIC{i}" for i in range(nics)), "CPU Affinity", "NUMA Affinity"]
    lines = ["\t".join(head)]
    for i in range(gpus):
        cells = [" X " if i == j else pairs.get((min(i, j), max(i, j)), other) for j in range(gpus)]
        lines.append("\t".join([f"GPU{i}", *cells, *("PXB" for _ in range(nics)), "0-55,112-167", str(i // 4)]))
    lines += ["\t".join([f"NIC{i}", *("SYS" for _ in range(gpus))]) for i in range(nics)]
    return "\n".join(
        [*lines, "", "Legend:", "", "  X    = Self", "  NV#  = Connection traversing a set of # NVLinks", ""]
    )


def all_pairs(gpus: int, how: str) -> dict[tuple[int, int], str]:
    return {(i, j): how for i in range(gpus) for j in range(i + 1, gpus)}


def machine(rows: str, matrix: str | None, files: Mapping[str, str] | None = None, **extra: str) -> Recorded:
    commands = {QUERY: rows, "nvidia-smi topo -m": matrix, **{k.replace("_", " "): v for k, v in extra.items()}}
    return Recorded(commands, {"/proc/meminfo": MEMINFO, **(files or {})})


def said(cluster: Cluster) -> str:
    return "\n".join(cluster.notes)


# NVIDIA -------------------------------------------------------------------------------------------------------------


def test_eight_h100_behind_nvswitch() -> None:
    found = detect(machine(gpu_row("NVIDIA H100 80GB HBM3") * 8, topo(all_pairs(8, "NV18"), 8, "SYS", nics=10)))
    assert str(found) == "1x8xH100-SXM"
    assert found.detected
    assert found.switched
    assert found.intra.kind == "nvswitch"
    assert found.intra.bandwidth_bytes_s == 450e9
    # What frameworks see, not the 79.65 GiB that nvidia-smi prints.
    assert found.device.memory_bytes == round(79.19 * GIB)
    assert "81559 MiB" in found.device.memory_source
    assert found.device.memory_basis == "detected"


def test_eight_h800_have_fewer_links() -> None:
    found = detect(machine(gpu_row("NVIDIA H800") * 8, topo(all_pairs(8, "NV8"), 8, "SYS")))
    assert found.intra.bandwidth_bytes_s == 200e9
    crippled = detect(machine(gpu_row("NVIDIA H100 80GB HBM3") * 8, topo(all_pairs(8, "NV8"), 8, "SYS")))
    assert crippled.intra.bandwidth_bytes_s == 200e9
    assert "usual for this device: 450 GB/s" in said(crippled)


def test_four_a100_without_a_switch_are_a_mesh() -> None:
    """Four links to each of three peers are the same 12 links as behind a switch, but no pair has them all."""
    rows = gpu_row("NVIDIA A100-SXM4-40GB", "40960", "8.0", gen=4) * 4
    found = detect(machine(rows, topo(all_pairs(4, "NV4"), 4, "SYS")))
    assert found.intra.bandwidth_bytes_s == 300e9
    assert not found.switched


def test_dgx1_cube_mesh_stays_on_nvlink() -> None:
    near = {(0, 1): 1, (0, 2): 1, (0, 3): 2, (1, 2): 2, (1, 3): 1, (2, 3): 2, (4, 5): 1, (4, 6): 1, (4, 7): 2}
    near |= {(5, 6): 2, (5, 7): 1, (6, 7): 2, (0, 4): 2, (1, 5): 2, (2, 6): 1, (3, 7): 1}
    pairs = {pair: f"NV{n}" for pair, n in near.items()}
    found = detect(machine(gpu_row("Tesla V100-SXM2-16GB", "16384", "7.0", gen=3) * 8, topo(pairs, 8, "SYS")))
    assert found.intra.kind == "nvlink"
    assert found.intra.bandwidth_bytes_s == 150e9
    assert not found.switched


def test_four_3090_on_pcie() -> None:
    rows = gpu_row("NVIDIA GeForce RTX 3090", "24576", "8.6", gen=4, width=16) * 4
    pairs = {(0, 1): "PHB", (2, 3): "PHB"}
    found = detect(machine(rows, topo(pairs, 4, "NODE")))
    assert found.device.name == "RTX-3090"
    assert found.intra.name == "pcie4-x16"
    assert found.intra.bandwidth_bytes_s == 25e9
    assert not found.switched
    assert "no NVLink" in said(found)
    assert "across host bridges" in said(found)


def test_narrow_slots_are_slow() -> None:
    rows = gpu_row("NVIDIA GeForce RTX 3090", "24576", "8.6", gen=3, width=4) * 2
    assert detect(machine(rows, topo({}, 2, "PHB"))).intra.bandwidth_bytes_s == 12.5e9 / 4


def test_one_switch_gives_every_pair_full_bandwidth() -> None:
    rows = gpu_row("NVIDIA L40S", "46068", "8.9", gen=4) * 4
    assert detect(machine(rows, topo({}, 4, "PIX"))).switched
    assert not detect(machine(rows, topo({(0, 1): "PIX"}, 4, "SYS"))).switched


def test_two_bridged_pairs() -> None:
    rows = gpu_row("NVIDIA GeForce RTX 3090", "24576", "8.6", gen=4) * 4
    found = detect(machine(rows, topo({(0, 1): "NV4", (2, 3): "NV4"}, 4, "SYS")))
    assert found.intra.kind == "pcie"
    assert "only the pairs 0-1, 2-3 (56.25 GB/s each way)" in said(found)
    pair = Recorded(
        {QUERY: rows, "nvidia-smi topo -m": topo({(0, 1): "NV4", (2, 3): "NV4"}, 4, "SYS")},
        environ={"CUDA_VISIBLE_DEVICES": "2,3"},
    )
    bridged = detect(pair)
    assert (bridged.devices, bridged.intra.kind, bridged.intra.bandwidth_bytes_s) == (2, "nvlink", 56.25e9)
    assert "CUDA_VISIBLE_DEVICES leaves 2 of 4 devices" in said(bridged)


def test_a_chain_of_bridges_is_no_ring() -> None:
    """Joined, but a ring of all three would leave NVLink between the ends."""
    rows = gpu_row("NVIDIA RTX A6000", "49140", "8.6", gen=4) * 3
    found = detect(machine(rows, topo({(0, 1): "NV2", (1, 2): "NV2"}, 3, "PHB")))
    assert found.intra.kind == "pcie"
    assert "only the pairs 0-1, 1-2" in said(found)


def test_mig_instances_are_devices() -> None:
    listing = "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-5d5ba0d6)\n" + "".join(
        f"  MIG 2g.20gb     Device  {i}: (UUID: MIG-{i})\n" for i in range(3)
    )
    rows = gpu_row("NVIDIA A100-SXM4-80GB", "81920", "8.0", "Enabled", 4)
    found = detect(Recorded({QUERY: rows, "nvidia-smi -L": listing, "nvidia-smi topo -m": None}))
    assert found.devices == 3
    assert found.device.name == "A100-80G-MIG-2g.20gb"
    assert found.device.memory_bytes == pytest.approx(79.25 * GIB / 4, rel=0.01)
    assert found.device.peak("bf16") == pytest.approx(312e12 * 2 / 7)
    assert found.intra.kind == "pcie"
    assert "no peer-to-peer" in said(found)
    assert "no instance could be listed" in said(detect(Recorded({QUERY: rows, "nvidia-smi -L": None})))


def test_without_a_driver_the_cpu_remains_and_says_why() -> None:
    found = detect(Recorded({"nvidia-smi": None}, {"/proc/meminfo": MEMINFO}))
    assert found.device.kind == "cpu"
    assert "nvidia-smi is installed and fails" in found.notes[0]
    empty = detect(Recorded({QUERY: "No devices were found\n"}, {"/proc/meminfo": MEMINFO}))
    assert "lists no device" in empty.notes[0]
    assert "nvidia-smi" not in said(detect(Recorded({}, {"/proc/meminfo": MEMINFO})))


def test_truncated_output_is_used_as_far_as_it_goes() -> None:
    rows = gpu_row("NVIDIA H100 80GB HBM3") * 8
    cut = detect(machine(rows[: rows.rindex("Disabled") + 3], topo(all_pairs(8, "NV18"), 8, "SYS")))
    assert cut.devices == 7
    assert "1 lines of nvidia-smi could not be read" in said(cut)
    matrix = topo(all_pairs(8, "NV18"), 8, "SYS")
    half = detect(machine(rows, matrix[: len(matrix) // 2]))
    assert half.devices == 8
    assert "topology could not be read" in said(half)
    assert half.intra.name == "nvlink4"


def test_old_driver_without_the_new_fields() -> None:
    old = Recorded(
        {QUERY: None, OLD_QUERY: "Tesla T4, 15109, [N/A], 3, 16\n" * 2, "nvidia-smi topo -m": topo({}, 2, "SYS")}
    )
    found = detect(old)
    assert str(found) == "1x2xT4"
    assert found.device.capability == "7.5"
    assert found.intra.bandwidth_bytes_s == 12.5e9


def test_unequal_cards_leave_the_largest_group() -> None:
    rows = gpu_row("NVIDIA GeForce RTX 3090", "24576", "8.6", gen=4) * 2 + gpu_row("NVIDIA L4", "23034", "8.9", gen=4)
    found = detect(machine(rows, topo({(0, 1): "NV4"}, 3, "PHB")))
    assert (found.device.name, found.devices) == ("RTX-3090", 2)
    assert "left out: 1 x NVIDIA L4" in said(found)
    assert found.intra.kind == "nvlink"


def test_memory_that_the_atlas_does_not_know() -> None:
    """A 4090 soldered to 48 GB is no 24 GB card; the driver's figures count."""
    found = detect(machine(gpu_row("NVIDIA GeForce RTX 4090", "49140", "8.9", gen=4), None))
    assert found.device.memory_bytes == (49140 - 551) << 20
    unknown = detect(machine(gpu_row("NVIDIA Rubin X1", "300000", "11.0"), None))
    assert unknown.device.name == "Rubin-X1"
    assert "not in the atlas" in said(unknown)


def test_gb10_has_no_memory_of_its_own() -> None:
    found = detect(machine(gpu_row("NVIDIA GB10", "[N/A]", "12.1"), None))
    assert found.device.name == "GB10"
    assert found.device.memory_bytes == find_device("GB10").memory_bytes
    assert "shared with the host" in said(found)


def test_adapters_make_the_link_between_nodes() -> None:
    files = {
        f"/sys/class/infiniband/mlx5_{i}/ports/1/{key}": value
        for i in range(8)
        for key, value in (("rate", "400 Gb/sec (4X NDR)\n"), ("state", "4: ACTIVE\n"), ("link_layer", "InfiniBand\n"))
    }
    matrix = topo(all_pairs(8, "NV18"), 8, "SYS")
    found = detect(machine(gpu_row("NVIDIA H100 80GB HBM3") * 8, matrix, files))
    assert (found.inter.name, found.inter.per, found.inter_assumed) == ("ib-400g", "device", False)
    one = {path: text for path, text in files.items() if "mlx5_0/" in path}
    shared, _ = network_link(Recorded({}, one), 8)
    assert shared is not None
    assert (shared.name, shared.per, shared.bandwidth_bytes_s) == ("ib-400g/node", "node", 50e9)
    down, why = network_link(Recorded({}, {p: t.replace("ACTIVE", "DOWN") for p, t in one.items()}), 8)
    assert down is None
    assert "could be read" in why
    roce, _ = network_link(Recorded({}, {p: t.replace("InfiniBand", "Ethernet") for p, t in one.items()}), 1)
    assert roce is not None
    assert roce.kind == "roce"
    wired, _ = network_link(
        Recorded({}, {"/sys/class/net/eth0/speed": "25000\n", "/sys/class/net/eth0/device/x": ""}), 1
    )
    assert wired is not None
    assert wired.name == "eth-25g/node"


def test_mig_listing() -> None:
    text = "  MIG 1g.10gb+me  Device  0: (UUID: MIG-a)\n  MIG 3g.40gb     Device  1: (UUID: MIG-b)\nGPU 1: x\n"
    assert parse_mig(text) == ["1g.10gb", "3g.40gb"]


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=400), st.integers(1, 9))
def test_parsers_survive_any_text(text: str, gpus: int) -> None:
    parse_gpus(text)
    parse_topology(text, gpus)
    parse_topology("\tGPU0\tGPU1\n" + text, 2)
    parse_mig(text)
    parse_amd_smi(text)
    parse_rocm_smi(text)
    cpuinfo(text)
    meminfo_bytes(text)
    files = dict.fromkeys(("/proc/self/cgroup", "/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/memory.max"), text)
    assert (cgroup_cores(Recorded({}, files)) or 1) > 0
    assert (cgroup_memory_bytes(Recorded({}, files)) or 1) > 0


# AMD ----------------------------------------------------------------------------------------------------------------


def test_amd_smi_and_rocm_smi() -> None:
    row = {
        "asic": {"market_name": "AMD Instinct MI300X"},
        "vram": {"type": "HBM3", "size": {"value": 196592, "unit": "MB"}},
    }
    listing = json.dumps([{"gpu": i, **row} for i in range(8)])
    found = detect(Recorded({"amd-smi static": listing}))
    assert str(found) == "1x8xMI300X"
    assert found.device.memory_bytes == round(191.98 * GIB)
    assert parse_amd_smi("WARNING: old kernel\n" + json.dumps({"gpu_data": [row]})) == [
        ("AMD Instinct MI300X", 196592 << 20)
    ]
    cards = {
        f"card{i}": {"Card Series": "AMD Instinct MI210", "VRAM Total Memory (B)": "68702699520"} for i in range(2)
    }
    older = detect(Recorded({"rocm-smi": json.dumps({**cards, "system": {"Driver version": "6.7"}})}))
    assert str(older) == "1x2xMI210"
    assert "is assumed" in said(older)
    assert detect(Recorded({"rocm-smi": '{"card0": [1, 2'})).device.kind == "cpu"


# CPU ----------------------------------------------------------------------------------------------------------------

CPUINFO = (
    "processor : 0\ncpu MHz\t\t: 2500.000\nflags\t\t: fpu sse2 avx avx2 fma avx512f\nprocessor : 1\ncpu MHz : 3000.5\n"
)


def test_cpu_ranks_share_cores_and_memory() -> None:
    files = {"/proc/meminfo": "MemTotal:  33554432 kB\n", "/proc/cpuinfo": CPUINFO}
    found = detect(Recorded({}, files, cores=4))
    assert (found.devices, found.device.kind, found.device.memory_bytes) == (4, "cpu", 8 * GIB)
    assert found.device.peak("f32") == pytest.approx(64 * 3000.5e6)
    assert found.device.peak("bf16") is None
    assert "not measured" in said(found)
    wide = detect(Recorded({}, files, cores=64))
    assert (wide.devices, wide.device.name) == (8, "CPU-8core")


def test_cgroup_limits_count() -> None:
    files = {
        "/proc/meminfo": "MemTotal:  33554432 kB\n",
        "/proc/self/cgroup": "0::/pod/box\n",
        "/sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
        "/sys/fs/cgroup/pod/box/memory.max": "max\n",
        "/sys/fs/cgroup/pod/box/cpu.max": "250000 100000\n",
    }
    found = detect(Recorded({}, files, cores=16))
    assert (found.devices, found.device.memory_bytes) == (2, 4 * GIB)
    assert "limited to 2.5 by the cgroup" in said(found)
    assert "limited to 8.00 GiB" in said(found)
    old = {
        "/proc/self/cgroup": "7:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n",
        "/sys/fs/cgroup/memory/docker/a/memory.limit_in_bytes": f"{2 * GIB}",
        "/sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_quota_us": "150000",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    }
    assert cgroup_memory_bytes(Recorded({}, old)) == 2 * GIB
    assert cgroup_cores(Recorded({}, old)) == 1.5
    assert cgroup_cores(Recorded({}, {"/sys/fs/cgroup/cpu.max": "max 100000\n"})) is None
    assert cgroup_memory_bytes(Recorded({}, {"/proc/self/cgroup": "0::/../../etc\n"})) is None


def test_numa_nodes_are_mentioned() -> None:
    files = {f"/sys/devices/system/node/node{i}/cpulist": "" for i in range(2)}
    assert "2 NUMA nodes" in said(detect(Recorded({}, {**files, "/proc/meminfo": MEMINFO})))


# This machine -------------------------------------------------------------------------------------------------------


def test_here_is_this_machine_and_quick() -> None:
    start = time.perf_counter()
    found = parse_cluster("here")
    assert time.perf_counter() - start < 15
    assert found.detected
    assert found.nodes == 1
    assert found.device.memory_bytes > 0
    if found.device.kind == "cpu":
        assert found.devices <= len(os.sched_getaffinity(0))
        assert found.node_memory_bytes <= (meminfo_bytes(Probe().read("/proc/meminfo")) or 1 << 60)


def script(folder: Path, body: str) -> Probe:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return Probe(environ={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"})


def test_commands_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "TIMEOUT_S", 0.3)
    start = time.perf_counter()
    assert script(tmp_path, "sleep 60 & sleep 60").run(("nvidia-smi",)) is None
    assert script(tmp_path, "yes").run(("nvidia-smi",)) is None
    assert time.perf_counter() - start < 5
    assert script(tmp_path, "echo out; exit 3").run(("nvidia-smi",)) is None
    assert script(tmp_path, "echo fine; cat").run(("nvidia-smi",)) == "fine\n"
    assert Probe().run(("no-such-program-here",)) is None
    assert Probe(tmp_path).read("/proc/none") is None
    assert Probe(tmp_path).names("/proc/none") == ()

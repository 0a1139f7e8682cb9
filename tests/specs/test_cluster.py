"""Clusters as text and as TOML, the atlas of devices and links, and what bad input is told."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.specs.atlas import devices as atlas
from meshwright.specs.atlas.devices import GIB, device_names, device_rows, find_device, link_rows, match_device
from meshwright.specs.atlas.links import find_link, link_names, parse_rate
from meshwright.specs.cluster import MAX_DEVICES, parse_cluster
from meshwright.specs.cluster_file import PEAK_DTYPES, cluster_from_toml
from meshwright.specs.detect_topology import PCIE_LANE_GB_S

ATLAS = json.loads(Path(atlas.__file__).with_name("devices.json").read_text("utf-8"))

# Text ---------------------------------------------------------------------------------------------------------------


def test_nodes_devices_kind_and_link() -> None:
    cluster = parse_cluster("2x4xA100-80G@ib-200g")
    assert (cluster.nodes, cluster.devices_per_node, cluster.devices) == (2, 4, 8)
    assert cluster.device.name == "A100-80G"
    assert cluster.inter.name == "ib-200g"
    assert cluster.inter.bandwidth_bytes_s == 25e9
    assert not cluster.inter_assumed
    assert cluster.notes == ()
    assert str(cluster) == "2x4xA100-80G@ib-200g"
    assert str(parse_cluster(str(cluster))) == str(cluster)


def test_short_forms() -> None:
    assert str(parse_cluster("8xH100")) == "1x8xH100-SXM"
    assert str(parse_cluster("H100-SXM")) == "1x1xH100-SXM"
    assert str(parse_cluster(" 2X4090 ")) == "1x2xRTX-4090"
    assert str(parse_cluster("1x8xMI300X")) == "1x8xMI300X"


def test_link_left_out_is_assumed_and_said() -> None:
    cluster = parse_cluster("2x8xH100")
    assert cluster.inter_assumed
    assert cluster.inter.name == "ib-400g"
    assert "ib-400g (50 GB/s each way per device) assumed, the usual one for H100-SXM" in cluster.notes[0]
    assert not parse_cluster("8xH100").inter_assumed


def test_rack_of_nvlink_reaches_as_far_as_it_does() -> None:
    rack = parse_cluster("18x4xGB200")
    assert rack.inter.name == "nvlink-nvl72"
    assert rack.inter_assumed
    two = parse_cluster("36x4xGB300")
    assert two.inter.name == "ib-800g"
    assert "144 devices are more than the 72" in two.notes[0]
    with pytest.raises(InputError, match=r"at most 72 devices, 36 x 4 = 144"):
        parse_cluster("36x4xGB200@nvl72")


def test_more_devices_than_a_node_has_is_said() -> None:
    assert "16 devices in one node; the usual H100-SXM node has 8" in parse_cluster("16xH100").notes
    assert parse_cluster("8xH100").notes == ()


def test_meshes_and_buses_are_not_switched() -> None:
    assert parse_cluster("8xH100").switched
    assert not parse_cluster("4xRTX-3090").switched
    assert not parse_cluster("8xMI300X").switched


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("A100-40G", "A100-40G"),
        ("A100-SXM4-80GB", "A100-80G"),
        ("RTX-3090", "RTX-3090"),
        ("rtx3090", "RTX-3090"),
        ("3090", "RTX-3090"),
        ("GH200-96G", "GH200-96G"),
        ("H800-80G", "H800"),
        ("H20-141G", "H20-141G"),
        ("h20-96g", "H20"),
        ("GB200", "GB200"),
        ("GB200-NVL4", "GB200"),
        ("DGX-Spark", "GB10"),
        ("DGX Spark", "GB10"),
        ("h100", "H100-SXM"),
        ("H100-80G", "H100-SXM"),
        ("H100-80G-SXM", "H100-SXM"),
        ("b200-sxm", "B200"),
        ("B300-SXM", "B300"),
        ("RTX6000Pro", "RTX-PRO-6000"),
        ("A6000-48G", "RTX-A6000"),
        ("L40S-46G", "L40S"),
        ("V100-32GB", "V100-32G"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("cpu", "CPU"),
    ],
)
def test_aliases(text: str, name: str) -> None:
    assert find_device(text).name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8xH1000", r"unknown device 'H1000'; near: H100-SXM.*meshwright plan --devices"),
        ("8xTPUv5", r"unknown device 'TPUv5'; near: .*meshwright plan --devices"),
        ("2x8xH100@ib-4000g", r"unknown link 'ib-4000g'; near: .*ib-400g.*meshwright plan --devices"),
        ("2x8xH100@", r"no link behind @"),
        ("0x8xH100", r"0 nodes; there must be at least 1"),
        ("0xH100", r"0 devices a node"),
        ("2x2x2xH100", r"three counts before 'H100'"),
        ("8x", r"no device named; write it as NODESxDEVICESxKIND@LINK"),
        ("2097152xH100", r"1 x 2097152 = 2097152 devices; at most 1048576"),
        ("99999999999999999999xH100", r"unknown device"),
        ("-1xH100", r"unknown device"),
        ("", r"write it as"),
        ("x" * 400, r"400 characters"),
        ("2x8xH100@0GB/s", r"bandwidth: '0GB/s' is not a rate"),
        ("no/such/file.toml", r"cluster file 'no/such/file.toml': no such file"),
        ("~nobody-here/a.toml", r"no such file"),
        ("a\0b.toml", r"no such file"),
    ],
)
def test_bad_text_is_told_the_way_out(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse_cluster(text)
    assert len(str(caught.value).splitlines()) <= 2
    assert len(str(caught.value)) < 400


def test_a_million_devices_cost_nothing() -> None:
    start = time.perf_counter()
    assert parse_cluster("131072x8xH100@ib-400g").devices == MAX_DEVICES
    assert time.perf_counter() - start < 0.5


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=320))
def test_any_text_is_a_cluster_or_an_input_error(text: str) -> None:
    if text.strip().lower() == "here":
        return
    try:
        devices = parse_cluster(text).devices
    except InputError:
        return
    assert 1 <= devices <= MAX_DEVICES


# Links --------------------------------------------------------------------------------------------------------------


def test_links_by_name_alias_and_rate() -> None:
    assert find_link("ndr").name == "ib-400g"
    assert find_link("HDR").bandwidth_bytes_s == 25e9
    assert find_link("ib-xdr").name == "ib-800g"
    assert find_link("eth-10g").bandwidth_bytes_s == 1.25e9
    assert find_link("100GbE").name == "eth-100g"
    assert find_link("NVL72").max_devices == 72
    custom = find_link("500GB/s/node")
    assert (custom.bandwidth_bytes_s, custom.per, custom.name) == (500e9, "node", "500GB/s/node")
    assert find_link("400Gb/s").bandwidth_bytes_s == 50e9


def test_a_node_s_adapter_is_shared() -> None:
    own, shared = find_link("ib-400g"), find_link("ib-400g/node")
    assert (own.per, shared.per) == ("device", "node")
    assert (own.device_bandwidth_bytes_s(8), shared.device_bandwidth_bytes_s(8)) == (50e9, 6.25e9)
    assert find_link(shared.name) == shared
    assert find_link("efa-3200g").per == "node"
    assert find_link("efa-3200g").device_bandwidth_bytes_s(8) == 50e9
    assert find_link("efa-400g/device").per == "device"


@pytest.mark.parametrize("text", ["GB/s", "-5GB/s", "1e99GB/s", "5", "5 GB", "999999999TB/s", "nanGB/s", "0Gb/s"])
def test_bad_rates(text: str) -> None:
    with pytest.raises(InputError, match="is not a rate"):
        parse_rate(text)


# Atlas --------------------------------------------------------------------------------------------------------------


def test_enough_devices_and_all_named_generations() -> None:
    assert len(device_names()) >= 45
    named = (
        "V100-32G T4 A100-80G L40S RTX-3090 RTX-4090 RTX-5090 RTX-PRO-6000 H100-SXM H200 H20 GH200-96G B200 B300 GB200"
    )
    for name in [*named.split(), "GB300", "GB10", "MI300X", "MI355X", "CPU"]:
        assert find_device(name).name == name


@pytest.mark.parametrize("name", device_names())
def test_every_device_is_whole_and_plausible(name: str) -> None:
    device = find_device(name)
    row = ATLAS["devices"][name]
    assert device.source
    assert device.memory_source
    assert 4 * GIB < device.memory_bytes < 400 * GIB
    assert 5e9 <= device.bandwidth_bytes_s <= 10e12
    assert device.peak_flops
    assert {dtype for dtype, _ in device.peak_flops} <= set(PEAK_DTYPES)
    assert all(0 < flops < 3e16 for _, flops in device.peak_flops)
    assert find_link(device.default_inter).bandwidth_bytes_s > 0
    assert 1 <= device.devices_per_node <= 16
    assert row["memory_basis"] in ("driver", "nominal")
    # The size on the label is in the names; the driver reports a little less and never more.
    if label := re.search(r"-(\d{2,3})g(?: |$)", " ".join([name, *row.get("aliases", ())]).lower()):
        assert 0.85 * int(label[1]) < device.memory_bytes / GIB < 1.01 * int(label[1])
    peak = dict(device.peak_flops)
    if "tf32" in peak:
        assert peak["bf16"] == pytest.approx(2 * peak["tf32"], rel=0.02)
    if "f8_e4m3" in peak and device.vendor != "intel":
        assert peak["f8_e4m3"] == pytest.approx(2 * peak["bf16"], rel=0.02)
    assert match_device(name) == device


def test_spellings_are_unique() -> None:
    seen: dict[str, str] = {}
    for name, row in ATLAS["devices"].items():
        for alias in {atlas._key(a) for a in (name, *row.get("aliases", ()), *row.get("driver_names", ()))}:
            assert seen.setdefault(alias, name) == name, f"{alias} is {seen[alias]} and {name}"
    assert len({atlas._key(n) for n in device_names()}) == len(device_names())


def test_every_link_is_whole() -> None:
    for name in link_names():
        link = find_link(name)
        assert link.name == name
        assert link.source
        assert 1e8 <= link.bandwidth_bytes_s <= 1e12
        assert 0 < link.latency_s < 1e-3
        if rate := re.search(r"-(\d+)g$", name):
            assert link.bandwidth_bytes_s == int(rate[1]) / 8 * 1e9
    for gen in (3, 4, 5, 6):
        assert find_link(f"pcie{gen}").bandwidth_bytes_s == PCIE_LANE_GB_S[gen] * 16e9


def test_memory_is_what_drivers_report() -> None:
    """Figures of boot logs and error reports, not of labels."""
    reported = {"H100-SXM": 79.19, "A100-80G": 79.25, "RTX-3090": 23.58, "T4": 14.56, "B200": 178.35, "GB200": 184.31}
    for name, gib in reported.items():
        assert find_device(name).memory_bytes / GIB == pytest.approx(gib, abs=0.01)
    assert round(parse_cluster("2x4xA100-40G").node_memory_bytes / GIB) == 158


def test_a_dtype_without_hardware_is_absent() -> None:
    assert find_device("A100-80G").peak("f8_e4m3") is None
    assert find_device("V100-32G").peak("bf16") is None
    assert find_device("H100-SXM").peak("fp4") is None
    assert find_device("H100-SXM").peak("f8_e4m3") == pytest.approx(1979e12, rel=0.001)
    assert find_device("B200").peak("fp4") == 9000e12


def test_links_inside_a_node_are_one_way() -> None:
    each_way = {"H100-SXM": 450, "H800": 200, "A100-80G": 300, "B200": 900, "GB200": 900, "V100-32G": 150, "H20": 450}
    for name, gb_s in each_way.items():
        assert find_device(name).intra.bandwidth_bytes_s == gb_s * 1e9
    assert find_device("RTX-3090").intra.kind == "pcie"


def test_rows_for_a_table() -> None:
    rows = device_rows()
    assert [row["name"] for row in rows] == list(device_names())
    row = next(row for row in rows if row["name"] == "H100-SXM")
    assert row["memory"] == "79.19 GiB"
    assert "bf16 989.4" in row["peaks"]
    assert row["node"] == "8 x nvlink4 (450 GB/s each way per device)"
    assert row["inter"] == "ib-400g (50 GB/s each way per device)"
    assert all(row["source"] for row in rows)
    assert next(row for row in rows if row["name"] == "A16")["memory"].startswith("~")
    assert next(row for row in link_rows() if row["name"] == "efa-400g")["bandwidth"] == "50 GB/s each way per node"


# TOML ---------------------------------------------------------------------------------------------------------------

OWN = """
nodes = 2
devices_per_node = 4
[device]
base = "A100-80G"
name = "A100 of rack 7"
memory_gib = 78.9
peak_tflops = { bf16 = 280, i8 = 0 }
[inter]
kind = "infiniband"
bandwidth = "400Gb/s"
direction = "both"
per = "node"
latency_us = 4
[intra]
base = "nvlink3"
bandwidth = "250GB/s"
direction = "one"
"""


def test_toml_with_own_figures(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(OWN)
    cluster = parse_cluster(str(file))
    assert (cluster.nodes, cluster.devices_per_node) == (2, 4)
    assert cluster.device.name == "A100 of rack 7"
    assert cluster.device.memory_bytes == round(78.9 * GIB)
    assert cluster.device.memory_basis == "stated"
    assert cluster.device.peak("bf16") == 280e12
    assert cluster.device.peak("i8") is None
    assert cluster.device.peak("f16") == 312e12
    assert cluster.device.bandwidth_bytes_s == 2039e9
    assert (cluster.inter.bandwidth_bytes_s, cluster.inter.per) == (25e9, "node")
    assert cluster.inter.latency_s == pytest.approx(4e-6)
    assert (cluster.intra.bandwidth_bytes_s, cluster.switched) == (250e9, True)
    assert not cluster.inter_assumed


def test_toml_with_names_only() -> None:
    cluster = cluster_from_toml('nodes = 2\ndevices_per_node = 8\ndevice = "h100"\ninter = "ndr/node"\nintra = "pcie5"')
    assert str(cluster) == "2x8xH100-SXM@ib-400g/node"
    assert not cluster.switched
    assert cluster_from_toml('nodes = 2\ndevice = "h100"').inter_assumed


def test_toml_with_a_new_device() -> None:
    text = '[device]\nname = "X1"\nmemory_gib = 100\nbandwidth = "4TB/s"\npeak_tflops = { bf16 = 500 }'
    device = cluster_from_toml(text).device
    assert (device.name, device.bandwidth_bytes_s, device.peak_flops) == ("X1", 4e12, (("bf16", 500e12),))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes = ", r"not valid TOML"),
        ("a = " + "[" * 5000, r"not valid TOML"),
        ("nodes = 2", r"device must be a name"),
        ('device = "H100"\nnodes = "two"', r"nodes = 'two' is not a whole number"),
        ('device = "H100"\nnodes = true', r"nodes = 'True' is not a whole number"),
        ('device = "H100"\nnodes = -3', r"-3 nodes"),
        ('device = "H100"\nnode = 3', r"unknown key 'node' in the file; known: nodes"),
        ('device = "H1000"', r"unknown device"),
        ('[device]\nbase = "H100"\nmemory_gib = -1', r"memory_gib = '-1' is not a number from"),
        ('[device]\nbase = "H100"\nmemory_gib = nan', r"memory_gib = 'nan' is not a number"),
        ('[device]\nbase = "H100"\nmemory_gib = "80"', r"memory_gib = '80' is not a number"),
        ('[device]\nbase = "H100"\npeak_tflops = { fp3 = 1 }', r"unknown key 'fp3' in device.peak_tflops"),
        ('[device]\nbase = "H100"\nbandwidth = 3350', r"has no unit"),
        ('[device]\nname = "X"', r"without base needs memory_gib, bandwidth, peak_tflops"),
        ('[device]\nbase = "H100"\nname = "a\\u001bb"', r"is not a text of"),
        ('device = "H100"\n[intra]\nbandwidth = "300GB/s"\nkind = "nvlink"', r"needs intra.direction"),
        ('device = "H100"\n[inter]\ndirection = "one"', r"\[inter\] without base needs kind, bandwidth"),
        ('device = "H100"\n[inter]\nbase = "ndr"\nper = "rack"', r"per = 'rack' is not one of device, node"),
        ('device = "H100"\ninter = 400', r"inter must be a name"),
    ],
)
def test_bad_toml_is_told_what_and_where(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        cluster_from_toml(text)
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=r"bad\.toml': "):
        parse_cluster(str(file))


def test_bad_files(tmp_path: Path) -> None:
    large, binary = tmp_path / "large.toml", tmp_path / "binary.toml"
    large.write_text("# " + "x" * 1_100_000)
    binary.write_bytes(b"\xff\xfe\x00")
    for file, message in (
        (large, "larger than 1048576 bytes"),
        (binary, "not UTF-8"),
        (tmp_path / "x.toml", "no such file"),
    ):
        with pytest.raises(InputError, match=message):
            parse_cluster(str(file))


def test_direction_is_one_way() -> None:
    """A datasheet's 900 GB/s of NVLink are 450 each way."""
    for ways, gb_s in (("one", 900), ("both", 450)):
        text = f'device = "H100"\n[intra]\nbase = "nvlink4"\nbandwidth = "900GB/s"\ndirection = "{ways}"'
        assert cluster_from_toml(text).intra.bandwidth_bytes_s == gb_s * 1e9

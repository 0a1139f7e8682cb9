"""Devices by name: the table ``devices.json`` (each figure with its source), aliases and near names."""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.specs.atlas.links import find_link
from meshwright.specs.cluster import Device, describe_link

GIB = 1 << 30

#: Words of marketing names that carry no information.
_NOISE = re.compile(r"nvidia|geforce|tesla|quadro|amd|instinct|generation|graphics")


@cache
def _table() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Path(__file__).with_name("devices.json").read_text("utf-8"))
    return data


@cache
def _names() -> dict[str, str]:
    """Every accepted spelling (normalised) to its atlas name."""
    names: dict[str, str] = {}
    for name, row in _table()["devices"].items():
        for alias in (name, *row.get("aliases", ()), *row.get("driver_names", ())):
            names.setdefault(_key(alias), name)
    return names


def _key(name: str) -> str:
    """Lower case without vendor words and punctuation; ``80GB`` is ``80g``."""
    key = re.sub(r"[^a-z0-9]", "", _NOISE.sub("", name.lower()))
    return re.sub(r"(\d)gb$|(\d)gb(?=[a-z])", lambda m: f"{m[1] or m[2]}g", key)


def device_names() -> tuple[str, ...]:
    """Names of the atlas, in its order."""
    return tuple(_table()["devices"])


@cache
def _device(name: str) -> Device:
    row = _table()["devices"][name]
    return Device(
        name=name,
        kind=row["kind"],
        vendor=row["vendor"],
        memory_bytes=round(row["memory_gib"] * GIB),
        peak_flops=tuple((dtype, tflops * 1e12) for dtype, tflops in row["peak_tflops"].items()),
        bandwidth_bytes_s=row["bandwidth_gb_s"] * 1e9,
        capability=row["capability"],
        intra=find_link(row["intra"]),
        devices_per_node=row["devices_per_node"],
        default_inter=row["inter"],
        source=_table()["sources"][row["source"]],
        memory_basis=row["memory_basis"],
        memory_source=row["memory_source"],
        note=row.get("note", ""),
    )


def match_device(name: str) -> Device | None:
    """The atlas device of a name, an alias or the name that a driver reports; None when there is none."""
    found = _names().get(_key(name))
    return None if found is None else _device(found)


def find_device(name: str) -> Device:
    """The atlas device of a name or an alias, not case-sensitive (``rtx3090``, ``A100-SXM4-80GB``, ``DGX-Spark``).

    Raises:
        InputError: no such device, with near names.
    """
    device = match_device(name)
    if device is None:
        near = get_close_matches(_key(name[:60]), _names(), n=8, cutoff=0.5)
        hint = ", ".join(list(dict.fromkeys(_names()[k] for k in near))[:4]) or "H100-SXM, A100-80G, RTX-4090, MI300X"
        raise InputError(f"unknown device {name[:40]!r}; near: {hint} (all: meshwright plan --devices)")
    return device


def device_rows() -> list[dict[str, str]]:
    """The atlas as rows of text for a table.

    Columns: name, memory (GiB, ``~`` where nominal), peaks (dense TFLOP/s by dtype), bandwidth (GB/s), node (usual
    devices and the link inside), inter (usual link between nodes), aliases, source.
    """
    rows: list[dict[str, str]] = []
    for name in device_names():
        device = _device(name)
        sure = "" if device.memory_basis == "driver" else "~"
        rows.append(
            {
                "name": name,
                "memory": f"{sure}{device.memory_bytes / GIB:.2f} GiB",
                "peaks": ", ".join(f"{dtype} {flops / 1e12:g}" for dtype, flops in device.peak_flops),
                "bandwidth": f"{device.bandwidth_bytes_s / 1e9:g} GB/s",
                "node": f"{device.devices_per_node} x {describe_link(device.intra)}",
                "inter": describe_link(find_link(device.default_inter)),
                "aliases": ", ".join(_table()["devices"][name].get("aliases", ())),
                "source": f"{device.source}; memory: {device.memory_source}",
            }
        )
    return rows


def link_rows() -> list[dict[str, str]]:
    """The links as rows of text for a table: name, kind, bandwidth (each way), latency, source."""
    from meshwright.specs.atlas.links import link_names

    rows: list[dict[str, str]] = []
    for name in link_names():
        link = find_link(name)
        rows.append(
            {
                "name": name,
                "kind": link.kind,
                "bandwidth": f"{link.bandwidth_bytes_s / 1e9:g} GB/s each way per {link.per}",
                "latency": f"{link.latency_s * 1e6:g} us",
                "source": link.source,
            }
        )
    return rows

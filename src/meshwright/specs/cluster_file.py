"""Clusters from a TOML file.

    nodes = 2                       # default 1
    devices_per_node = 4            # default 1
    device = "A100-80G"             # a name of the atlas, or the table [device]
    inter = "ib-200g/node"          # a name, a rate (50GB/s), or the table [inter]; default: the kind's usual one
    intra = "pcie4"                 # likewise; default: the device's own

    [device]                        # instead of the name: figures of your own
    base = "A100-80G"               # optional: everything that is not stated below is taken from it
    name = "A100 of rack 7"
    vendor = "nvidia"
    memory_gib = 78.9               # what the driver reports as total
    bandwidth = "1.9TB/s"           # device memory
    capability = "8.0"
    peak_tflops = { bf16 = 280, i8 = 560 }   # dense; replaces the base's figures dtype by dtype, 0 removes one

    [inter]                         # and [intra]
    base = "ib-200g"                # optional
    name = "rail"
    kind = "infiniband"
    bandwidth = "400Gb/s"           # GB/s are bytes, Gb/s are bits
    direction = "one"               # "one": what one side sends; "both": the sum of both, as datasheets print it
    per = "device"                  # or "node": shared by the devices of a node
    latency_us = 4.0

``meshwright calibrate`` writes such a file with what it measured besides: ``device.measured``, ``device.driver``,
``device.booted`` (of boot logs), the rows ``measured`` of a link, and a table ``[calibration]`` that only
``ledger.calibration_file`` reads.

A link table with a bandwidth must name its direction, so that a datasheet's doubled figure is never taken for one way.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, Literal, cast, get_args

from meshwright.errors import InputError
from meshwright.specs.atlas.devices import GIB, find_device
from meshwright.specs.atlas.links import CUSTOM_LATENCY_S, find_link, parse_rate
from meshwright.specs.cluster import (
    Cluster,
    Device,
    Driver,
    Link,
    LinkKind,
    MeasuredBoot,
    MeasuredMove,
    MeasuredPoint,
    MeasuredShare,
    make_cluster,
)

#: Largest file that is read.
MAX_FILE_BYTES = 1 << 20
#: Most measured rows of a device or a link, and most knots of one.
MAX_ROWS, MAX_KNOTS = 256, 64

#: Dtypes that ``peak_tflops`` may name.
PEAK_DTYPES = ("bf16", "f16", "f8_e4m3", "fp4", "tf32", "f32", "i8")

_TOP = ("nodes", "devices_per_node", "device", "inter", "intra", "calibration")
_DEVICE = (
    "base",
    "name",
    "vendor",
    "kind",
    "memory_gib",
    "bandwidth",
    "capability",
    "peak_tflops",
    "measured",
    "driver",
    "booted",
)
_LINK = ("base", "name", "kind", "bandwidth", "direction", "per", "latency_us", "measured")


def read_cluster_file(path: str) -> Cluster:
    """Read the cluster of the TOML file at ``path``.

    Raises:
        InputError: the file cannot be read, is no TOML, is larger than 64 KiB, or states something impossible.
    """
    file = Path(path)
    if path.startswith("~"):
        with suppress(RuntimeError):
            file = file.expanduser()
    if not file.is_file():
        raise InputError(f"cluster file {path[:200]!r}: no such file")
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"cluster file {path[:200]!r}: cannot be read ({error.strerror or error})") from None
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"cluster file {path[:200]!r}: larger than {MAX_FILE_BYTES} bytes")
    try:
        return cluster_from_toml(data.decode("utf-8"))
    except InputError as error:
        raise InputError(f"cluster file {path[:200]!r}: {error}") from None
    except UnicodeDecodeError:
        raise InputError(f"cluster file {path[:200]!r}: not UTF-8 text") from None


def cluster_from_toml(text: str) -> Cluster:
    """The cluster that a TOML text states; see the module's docstring for the keys.

    Raises:
        InputError: not TOML, an unknown key, or a value of the wrong type or out of range.
    """
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"not valid TOML ({str(error)[:100]})") from None
    _known("the file", data, _TOP)
    device = data.get("device")
    if isinstance(device, Mapping):
        spec = _device(device)
    elif isinstance(device, str):
        spec = find_device(device)
    else:
        raise InputError('device must be a name (device = "A100-80G") or a table [device]')
    nodes = _count("nodes", data.get("nodes", 1))
    per_node = _count("devices_per_node", data.get("devices_per_node", 1))
    inter = _link("inter", data["inter"]) if "inter" in data else None
    intra = _link("intra", data["intra"]) if "intra" in data else None
    return make_cluster(nodes, per_node, spec, inter, intra)


def _known(where: str, table: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    for key in table:
        if key not in allowed:
            raise InputError(f"unknown key {str(key)[:40]!r} in {where}; known: {', '.join(allowed)}")


def _count(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{key} = {str(value)[:30]!r} is not a whole number")
    return value


def _number(key: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or not low <= value <= high:
        raise InputError(f"{key} = {str(value)[:30]!r} is not a number from {low:g} to {high:g}")
    return float(value)


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not 1 <= len(value.strip()) <= 60 or not value.isprintable():
        raise InputError(f"{key} = {str(value)[:30]!r} is not a text of 1 to 60 characters")
    return value.strip()


def _choice(key: str, value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise InputError(f"{key} = {str(value)[:30]!r} is not one of {', '.join(allowed)}")
    return cast(str, value)


def _rate(key: str, value: Any) -> float:
    if not isinstance(value, str):
        raise InputError(f'{key} = {str(value)[:30]!r} has no unit; write "300GB/s" (bytes) or "400Gb/s" (bits)')
    return parse_rate(value)


def _device(table: Mapping[str, Any]) -> Device:
    _known("[device]", table, _DEVICE)
    base = find_device(_text("device.base", table["base"])) if "base" in table else None
    peaks = dict(base.peak_flops) if base else {}
    stated = table.get("peak_tflops", {})
    if not isinstance(stated, Mapping):
        raise InputError("device.peak_tflops must be a table: peak_tflops = { bf16 = 312 }")
    _known("device.peak_tflops", stated, PEAK_DTYPES)
    for dtype, tflops in stated.items():
        peaks[dtype] = _number(f"device.peak_tflops.{dtype}", tflops, 0, 1e6) * 1e12
    peaks = {dtype: flops for dtype, flops in peaks.items() if flops > 0}
    if base is None:
        missing = [key for key in ("name", "memory_gib", "bandwidth", "peak_tflops") if key not in table]
        if missing:
            raise InputError(f"[device] without base needs {', '.join(missing)}")
    if not peaks:
        raise InputError("[device] has no peak; state at least peak_tflops = { bf16 = ... }")
    base = base or Device("", "gpu", "", 0, (), 0.0, "", find_link("pcie4"), 8, "ib-200g")
    memory = _number("device.memory_gib", table["memory_gib"], 0.01, 1e6) if "memory_gib" in table else None
    return replace(
        base,
        name=_text("device.name", table.get("name", base.name)),
        kind=cast(Literal["gpu", "cpu"], _choice("device.kind", table.get("kind", base.kind), ("gpu", "cpu"))),
        vendor=_text("device.vendor", table["vendor"]) if "vendor" in table else base.vendor,
        memory_bytes=base.memory_bytes if memory is None else round(memory * GIB),
        memory_basis=base.memory_basis if memory is None else "stated",
        memory_source=base.memory_source if memory is None else "the cluster file",
        peak_flops=tuple(peaks.items()),
        bandwidth_bytes_s=_rate("device.bandwidth", table["bandwidth"])
        if "bandwidth" in table
        else base.bandwidth_bytes_s,
        capability=_text("device.capability", table["capability"]) if "capability" in table else base.capability,
        measured=tuple(_share(row) for row in _rows("device.measured", table)),
        driver=_driver(table["driver"]) if "driver" in table else None,
        booted=tuple(_boot(row) for row in _rows("device.booted", table, "booted")),
        source=f"the cluster file; the rest: {base.source}" if base.source else "the cluster file",
    )


def _link(where: str, value: Any) -> Link:
    if isinstance(value, str):
        return find_link(value)
    if not isinstance(value, Mapping):
        raise InputError(f'{where} must be a name ({where} = "ib-200g") or a table [{where}]')
    _known(f"[{where}]", value, _LINK)
    base = find_link(_text(f"{where}.base", value["base"])) if "base" in value else None
    if base is None:
        missing = [key for key in ("kind", "bandwidth") if key not in value]
        if missing:
            raise InputError(f"[{where}] without base needs {', '.join(missing)}")
        base = Link(where, "infiniband", 0.0, CUSTOM_LATENCY_S, switched=where == "inter")
    bandwidth = base.bandwidth_bytes_s
    if "bandwidth" in value:
        if "direction" not in value:
            raise InputError(
                f'{where}.bandwidth needs {where}.direction: "one" (what one side sends) or "both" (the sum)'
            )
        ways = _choice(f"{where}.direction", value["direction"], ("one", "both"))
        bandwidth = _rate(f"{where}.bandwidth", value["bandwidth"]) / (2 if ways == "both" else 1)
    kind = cast(LinkKind, _choice(f"{where}.kind", value.get("kind", base.kind), get_args(LinkKind)))
    per = cast(Literal["device", "node"], _choice(f"{where}.per", value.get("per", base.per), ("device", "node")))
    latency = base.latency_s
    if "latency_us" in value:
        latency = _number(f"{where}.latency_us", value["latency_us"], 0, 1e6) / 1e6
    return replace(
        base,
        name=_text(f"{where}.name", value.get("name", base.name)),
        kind=kind,
        bandwidth_bytes_s=bandwidth,
        latency_s=latency,
        per=per,
        switched=base.switched or kind == "nvswitch",
        measured=tuple(_move(f"{where}.measured", row) for row in _rows(f"{where}.measured", value)),
        source=f"the cluster file; the rest: {base.source}" if base.source else "the cluster file",
    )


def _rows(where: str, table: Mapping[str, Any], key: str = "measured", kind: type = dict) -> list[Any]:
    rows = table.get(key, [])
    if not isinstance(rows, list) or len(rows) > MAX_ROWS or not all(isinstance(row, kind) for row in rows):
        raise InputError(f"{where} must be a list of at most {MAX_ROWS} rows, as calibrate writes them")
    return rows


def _share(row: Mapping[str, Any]) -> MeasuredShare:
    where = "device.measured"
    memory, compute = (_number(f"{where}.{name}", row.get(name), 1e-9, 10) for name in ("memory", "compute"))
    points = _rows(where, row, "points", list)
    found = tuple(_point(f"{where}.points", point) for point in points)
    if list(found) != sorted(found):
        raise InputError(f"{where}.points must ascend")
    return MeasuredShare(
        _text(f"{where}.work", row.get("work")), _text(f"{where}.dtype", row.get("dtype")), memory, compute, found
    )


def _boot(row: Mapping[str, Any]) -> MeasuredBoot:
    tp, pp = (_count(f"device.booted.{name}", row.get(name)) for name in ("tp", "pp"))
    if not 1 <= tp * pp <= 1 << 20 or tp < 1:
        raise InputError(f"device.booted: tp = {tp}, pp = {pp}; degrees of a start are from 1 on")
    size = _number("device.booted.outside_bytes", row.get("outside_bytes"), 0, 1 << 50)
    return MeasuredBoot(_text("device.booted.engine", row.get("engine")), tp, pp, round(size))


def _driver(table: Any) -> Driver:
    if not isinstance(table, Mapping):
        raise InputError("device.driver must be a table, as calibrate writes it")
    known = {**Driver._field_defaults, **table}
    return Driver(*(_number(f"device.driver.{name}", known.get(name), 0, 1e3) for name in Driver._fields))


def _move(where: str, row: Mapping[str, Any]) -> MeasuredMove:
    knots = row.get("knots")
    if not isinstance(knots, list) or not 1 <= len(knots) <= MAX_KNOTS:
        raise InputError(f"{where}.knots must be 1 to {MAX_KNOTS} pairs of bytes and seconds")
    if not all(isinstance(knot, list) and len(knot) == 2 for knot in knots):
        raise InputError(f"{where}.knots must be pairs of bytes and seconds")
    pairs = tuple(
        (round(_number(f"{where}.knots", size, 1, 1 << 60)), _number(f"{where}.knots", took, 1e-9, 1e6))
        for size, took in knots
    )
    if any(a[0] >= b[0] for a, b in pairwise(pairs)):
        raise InputError(f"{where}.knots do not ascend in bytes")
    return MeasuredMove(
        _text(f"{where}.op", row.get("op")),
        round(_number(f"{where}.ranks", row.get("ranks"), 2, 1 << 20)),
        _number(f"{where}.latency_s", row.get("latency_s"), 0, 1e6),
        _number(f"{where}.bandwidth_bytes_s", row.get("bandwidth_bytes_s"), 1e-3, 1e18),
        _number(f"{where}.error", row.get("error"), 0, 1e6),
        pairs,
    )


def _point(where: str, point: list[Any]) -> MeasuredPoint:
    if len(point) not in {3, 4}:
        raise InputError(
            f"{where} must be FLOPs a byte, a share, seconds and seconds an output, as calibrate writes them"
        )
    bounds = ((1e-9, 1e12), (1e-9, 1e3), (0, 10), (0, 1))
    return MeasuredPoint(*(_number(where, value, *bound) for value, bound in zip(point, bounds, strict=False)))

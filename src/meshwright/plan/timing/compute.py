"""Seconds of work on a device: a roofline whose roofs carry measured efficiencies by shape class and dtype.

Williams, Waterman, Patterson 2009 with a rounded corner: where reading and multiplying take about the same time, a
kernel hides neither fully, so the two times are joined by a p-norm instead of the larger one. The formulas use only
``+ * / **``, so that they take floats as well as arrays.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from functools import cache
from math import exp, inf, log
from pathlib import Path
from typing import Any, Literal, NamedTuple

from meshwright.plan.timing.estimate import Seconds, Word, spread
from meshwright.plan.wire import Op
from meshwright.specs.cluster import Device, MeasuredPoint

#: Shape classes with efficiencies of their own: products with plain and with expert weights, attention cores, and all
#: that only moves memory (norms, look-ups, recurrent states).
ShapeClass = Literal["dense", "experts", "attention", "light"]

#: dtype whose units compute where the hardware has none for the weights' own (weights are unpacked first).
FALLBACK = {"fp4": ("bf16", "f16"), "f8_e4m3": ("bf16", "f16"), "f8_e5m2": ("bf16", "f16"), "i8": ("bf16",)}


def unit_dtype(device: Device, dtype: str) -> str:
    """Element type of the units that multiply ``dtype``: its own, else what it is unpacked to."""
    for name in (dtype, *FALLBACK.get(dtype, ()), "bf16", "f16", "f32"):
        if device.peak(name):
            return name
    return device.peak_flops[0][0] if device.peak_flops else dtype


def peak_flops(device: Device, dtype: str) -> float:
    """Peak of the units that multiply ``dtype`` (see ``unit_dtype``), FLOP/s."""
    return device.peak(unit_dtype(device, dtype)) or 1e12


class Efficiency(NamedTuple):
    """Shares of memory bandwidth and of the peak that one shape class reaches, and where the latter comes from.

    Attributes:
        memory: share of the device's memory bandwidth.
        compute: share of the peak of the units used, for wide products.
        ramp: width at which a product loses as much time as it computes: time x (1 + ramp / width).
        points: of a measured device; they then stand for all of the above.
    """

    memory: float
    compute: float
    ramp: float = 0.0
    points: tuple[MeasuredPoint, ...] = ()

    def seconds(self, moved_bytes: float, flops: float, rate: float, peak: float, outputs: float = 0.0) -> float:
        """By ``points``: what was measured at this intensity, between two of them straight in its logarithm.

        ``outputs``: elements of a product's result.
        """
        intensity = flops / moved_bytes if moved_bytes else self.points[-1][0]
        at = bisect_right(self.points, (intensity, inf, inf))
        p, q = self.points[max(at - 1, 0)], self.points[min(at, len(self.points) - 1)]
        part = log(intensity / p.intensity) / log(q.intensity / p.intensity) if q.intensity > p.intensity else 0.0
        share = exp(log(p.share) + part * log(q.share / p.share))
        besides = p.besides_s + part * (q.besides_s - p.besides_s)
        each = p.output_s + part * (q.output_s - p.output_s)
        return max(moved_bytes / rate, flops / peak) / share + besides + each * outputs


@cache
def constants() -> Mapping[str, float]:
    """Fitted values by name (``constants/timing.json``, where each has its prior and its reason)."""
    return {name: entry["value"] for name, entry in _file()["constants"].items()}


@cache
def _file() -> Mapping[str, Any]:
    text = Path(__file__).parents[1].joinpath("constants", "timing.json").read_bytes()
    data: Mapping[str, Any] = json.loads(text)
    return data


def generation(device: Device) -> str:
    """``hopper`` (and everything older or of another vendor) or ``blackwell``: whose constants a device takes."""
    major = device.capability.partition(".")[0]
    return "blackwell" if device.vendor == "nvidia" and major.isdigit() and int(major) >= 10 else "hopper"


def shape_class(op: Op) -> ShapeClass:
    """The class of an op on the compute stream."""
    if op.op == "matmul":
        return "experts" if op.name.startswith("expert.") else "dense"
    return "attention" if op.op == "attention" else "light"


def efficiency(device: Device, kind: ShapeClass, dtype: str) -> Efficiency:
    """Constants of a shape class on a device for weights of ``dtype``; measured shares of a calibrated device."""
    if device.measured:
        return _measured(device, kind, dtype)
    return _efficiency(generation(device), kind, dtype, unit_dtype(device, dtype))


def _measured(device: Device, kind: ShapeClass, dtype: str) -> Efficiency:
    """Of the same class and dtype, else of the class in another dtype; what only moves memory reaches all of it."""
    work = {"experts": "dense"}.get(kind, kind)
    unit = unit_dtype(device, dtype)
    found = sorted((m for m in device.measured if m.work == work), key=lambda m: m.dtype != unit)
    return Efficiency(found[0].memory, found[0].compute, 0.0, found[0].points) if found else Efficiency(1.0, 1.0)


def measured_passes(device: Device) -> float | None:
    """Share of the memory bandwidth at which inputs and outputs of products pass through what lies between products
    on a calibrated device; None where it was not measured."""
    return next((m.memory for m in device.measured if m.work == "passes"), None)


def calibrated(device: Device) -> bool:
    """Whether constants were fitted on devices of this generation (Hopper, Blackwell), or this one was measured."""
    fitted = device.vendor == "nvidia" and device.capability.partition(".")[0] in {"9", "10"}
    return fitted or bool(device.measured)


@cache
def _efficiency(of: str, kind: ShapeClass, dtype: str, unit: str) -> Efficiency:
    c = constants()
    memory, compute = c[f"memory.{of}.{kind}"], c[f"compute.{of}.{kind}"]
    unpacked = dtype == "fp4" and unit != "fp4"
    if unpacked:
        memory *= c["unpacked"]
    elif dtype == "fp4":
        compute *= c["compute.fp4"]
        memory *= c["memory.fp4"] if kind == "dense" else 1.0
    elif dtype == "f8_e4m3":
        compute *= c["compute.fp8"]
    return Efficiency(memory, compute, c["ramp.experts" if kind == "experts" else "ramp"])


def roofline(moved_bytes: Any, flops: Any, rate: Any, peak: Any, sharpness: float) -> Any:
    """Seconds to move ``moved_bytes`` at ``rate`` and compute ``flops`` at ``peak``; ``sharpness``: of the corner."""
    reading, computing = moved_bytes / rate, flops / peak
    return (reading**sharpness + computing**sharpness) ** (1.0 / sharpness)


def work_seconds(
    moved_bytes: float,
    flops: float,
    width: float,
    device: Device,
    kind: ShapeClass,
    dtype: str,
    outputs: float = 0.0,
) -> float:
    """Seconds of one kernel without its launch; ``width``: the narrower side of a product's weight (0: none);
    ``outputs``: elements of its result (0: no product)."""
    e, peak = efficiency(device, kind, dtype), peak_flops(device, dtype)
    if e.points:
        return e.seconds(moved_bytes, flops, device.bandwidth_bytes_s, peak, outputs)
    peak *= e.compute
    if width:
        peak /= 1.0 + e.ramp / width
    rate = device.bandwidth_bytes_s * e.memory
    found: float = roofline(moved_bytes, flops, rate, peak, constants()["sharpness"])
    return found


def op_width(op: Op) -> float:
    """The narrower side of a product's weight; 0 for other ops."""
    return float(min(op.shapes[1][-2:])) if op.op == "matmul" else 0.0


def op_outputs(op: Op) -> float:
    """Elements of a product's result; 0 for other ops."""
    return float(op.shapes[0][-2] * op.shapes[1][-1]) if op.op == "matmul" and len(op.shapes[0]) > 1 else 0.0


def op_seconds(op: Op, device: Device) -> float:
    """Seconds of one run of an op on the compute stream, without launch (``repeats`` is left to the caller)."""
    return work_seconds(op.payload, op.flops, op_width(op), device, shape_class(op), op.dtype, op_outputs(op))


def op_time(op: Op, device: Device) -> Seconds:
    """The same with interval and word: calibrated on the generations that the constants were fitted on."""
    word: Word = "calibrated" if calibrated(device) else "modelled"
    return spread(op_seconds(op, device), _file()["width_log"][word], word)

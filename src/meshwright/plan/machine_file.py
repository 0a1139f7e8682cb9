"""A machine that was measured, as a cluster for the planner and as the file that ``--on`` reads.

The planner counts with a device's peaks and bandwidth and a link's curves. Of a calibration it takes the best measured
rates as these peaks, the share of them that products and attention cores reach, the curve of every collective, and
what the own engine's driver needs. The table ``[calibration]`` of the file keeps the rest: the efficiency of each
measured shape, with which ``ledger.calibrate`` times a ledger entry by entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import log2, prod
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.errors import InputError
from meshwright.ledger.calibrate import Calibration, Sample, Transfer
from meshwright.ledger.calibration_file import as_dict, table_lines
from meshwright.specs.atlas.devices import match_device
from meshwright.specs.cluster import Cluster, Device, Driver, Link, MeasuredMove, MeasuredPoint, MeasuredShare
from meshwright.specs.dtypes import size_bytes
from meshwright.specs.units import GIB

#: FLOPs a byte from which a product is bound by arithmetic on the measured machine: twice the ridge of its roofline.
BEYOND_RIDGE = 2.0
#: Where attention cores stand: decode steps below the one, prefills above the other.
DECODE_INTENSITY, PREFILL_INTENSITY = 4.0, 16.0
#: Shape classes of the planner by the op of a sample.
CLASSES = {"matmul": "dense", "attention": "attention"}


def measured_cluster(cluster: Cluster, c: Calibration, across: Iterable[Transfer] = ()) -> Cluster:
    """``cluster`` with what was measured in place of what was detected or looked up.

    Args:
        cluster: devices and links by name or detection.
        c: of one of its nodes; without rates only its transfers count. across: transfers between nodes.
    """
    device, intra, inter = cluster.device, cluster.intra, cluster.inter
    if c.flops_s:
        peaks = {**dict(device.peak_flops), **c.flops_s}
        device = replace(
            device,
            peak_flops=tuple(peaks.items()),
            bandwidth_bytes_s=c.bandwidth_bytes_s,
            measured=tuple(shares(c)),
            driver=Driver(c.launch_s, c.layer_s, c.pass_s, c.message_s, c.serve_s, c.sequence_s),
            source=f"measured by calibrate: {c.machine}",
        )
    intra, inter = measured_link(intra, c.transfers), measured_link(inter, tuple(across))
    notes = tuple(note for note in cluster.notes if "not measured" not in note)
    return replace(cluster, device=device, intra=intra, inter=inter, notes=notes)


def measured_link(link: Link, transfers: Sequence[Transfer]) -> Link:
    """A link with measured curves; latency and bandwidth are those of the hand-off, where one was measured."""
    if not transfers:
        return link
    moves = tuple(MeasuredMove(t.op, t.ranks, t.latency_s, t.bandwidth_bytes_s, t.error, t.knots) for t in transfers)
    link = replace(link, measured=moves, source="measured by calibrate")
    sent = next((t for t in transfers if t.op == "send"), None)
    return link if sent is None else replace(link, bandwidth_bytes_s=sent.bandwidth_bytes_s, latency_s=sent.latency_s)


def wire_share(op: str, ranks: int) -> float:
    """Bytes that a rank sends in a ring for each byte that enters: bus over algorithm bandwidth (nccl-tests,
    ``doc/PERFORMANCE.md``), over the payload of the ledger."""
    if op in {"all_gather", "gather"}:
        return float(ranks - 1)
    rounds = 2 if op == "all_reduce" else 1
    return rounds * (ranks - 1) / ranks


def shares(c: Calibration) -> Iterable[MeasuredShare]:
    """By class and dtype the median share of bandwidth and of the peak, of what one of them binds, and by intensity the
    share of the roofline and the seconds besides."""
    for (op, dtype), samples in _by_kind(c.work).items():
        bound = {True: [], False: []}  # type: dict[bool, list[float]]
        at: dict[float, list[tuple[float, float, int]]] = {}
        ridge = c.flops_s.get(dtype, min(c.flops_s.values())) / c.bandwidth_bytes_s
        for s in samples:
            intensity = _intensity(s)
            bound[intensity > BEYOND_RIDGE * ridge].append(s.efficiency)
            if s.seconds:
                at.setdefault(_place(s), []).append((s.efficiency * s.seconds, s.seconds, _outputs(s)))
        computing, reading = bound[True] or bound[False], bound[False] or bound[True]
        points = tuple(MeasuredPoint(intensity, *_reached(found)) for intensity, found in sorted(at.items()))
        yield MeasuredShare(CLASSES[op], dtype, min(median(reading), 10.0), min(median(computing), 10.0), points)
    if c.light_bytes_s:
        yield MeasuredShare("passes", "f32", min(c.light_bytes_s / c.bandwidth_bytes_s, 1.0), 1.0)


def _reached(found: Sequence[tuple[float, float, int]]) -> tuple[float, float, float]:
    """Share of the roofline, seconds besides and seconds an output of ``(seconds at the best rates, seconds,
    outputs)``: the plane with the least squares of relative distances, none of its coefficients negative."""
    import numpy as np

    best, took, outputs = np.array(found, dtype=float).T
    rows, least = np.stack([best, np.ones_like(best), outputs], axis=1) / took[:, None], float("inf")
    kept = median(best / took), 0.0, 0.0
    for columns in ([0], [0, 1], [0, 2], [0, 1, 2]):
        values, _, rank, _ = np.linalg.lstsq(rows[:, columns], np.ones(len(found)), rcond=None)
        off = float(np.square(rows[:, columns] @ values - 1).sum())
        if rank == len(columns) < max(len(found), 2) and values[0] > 0 and (values >= 0).all() and off < least - 1e-12:
            least, by = off, dict(zip(columns, map(float, values), strict=True))
            kept = 1 / by[0], by.get(1, 0.0), by.get(2, 0.0)
    return kept


def _outputs(s: Sample) -> int:
    """Elements of a product's result."""
    return s.sizes[0] * s.sizes[2] if s.op == "matmul" and len(s.sizes) == 3 else 0


def _by_kind(work: Sequence[Sample]) -> dict[tuple[str, str], list[Sample]]:
    found: dict[tuple[str, str], list[Sample]] = {}
    for s in work:
        if s.op in CLASSES:
            found.setdefault((s.op, s.dtype), []).append(s)
    return found


def _place(s: Sample) -> float:
    """FLOPs a byte at which a sample stands among ``points``. Of attention cores the shapes do not tell them: decode
    steps have some (heads for each KV head, over the bytes of an element), prefills many."""
    if s.op == "matmul":
        return float(2.0 ** round(log2(_intensity(s))))
    return PREFILL_INTENSITY if s.phase == "prefill" else DECODE_INTENSITY


def _intensity(s: Sample) -> float:
    """FLOPs a byte: of a product by its sides, of a core by whether it has more than one new token a sequence."""
    if s.op == "matmul" and len(s.sizes) == 3:
        return 2 * prod(s.sizes) / _moved_bytes(s)
    return 1e9 if s.phase == "prefill" else 0.0


def _moved_bytes(s: Sample) -> int:
    m, k, n = s.sizes
    return size_bytes(s.dtype) * (m * k + k * n + m * n)


def as_toml(cluster: Cluster, c: Calibration, remarks: Sequence[str] = ()) -> str:
    """The file that ``--on`` reads; ``remarks`` are comments at its head."""
    device = cluster.device
    head: dict[str, Any] = {"nodes": cluster.nodes, "devices_per_node": cluster.devices_per_node}
    dev = {
        "name": device.name,
        "kind": device.kind,
        "vendor": device.vendor,
        "memory_gib": device.memory_bytes / GIB,
        "bandwidth": _rate(device.bandwidth_bytes_s),
        "capability": device.capability,
        "peak_tflops": {dtype: flops / 1e12 for dtype, flops in device.peak_flops},
    }
    if device.measured:
        dev["measured"] = [{k: v for k, v in m._asdict().items() if v != ()} for m in device.measured]
    if device.driver is not None:
        dev["driver"] = device.driver._asdict()
    if device.booted:
        dev["booted"] = [b._asdict() for b in device.booted]
    atlas = match_device(device.name)
    known = atlas == device
    if atlas is not None and _but_memory(device, atlas) == atlas:
        dev = {"base": device.name, **{key: dev[key] for key in ("memory_gib", "booted") if key in dev}}
    if known:
        head["device"] = device.name
    kept = {k: v for k, v in as_dict(c).items() if k != "transfers"}
    lines = [f"# {remark}" for remark in remarks]
    lines += table_lines(head)
    if not known:
        lines += ["", "[device]", *table_lines({k: v for k, v in dev.items() if v != ""})]
    for name, link in (("intra", cluster.intra), ("inter", cluster.inter)):
        if name == "intra" or cluster.nodes > 1 or link.measured:
            lines += ["", f"[{name}]", *table_lines(_link(link))]
    if c.flops_s:
        lines += ["", "[calibration]", *table_lines(kept)]
    return "\n".join(lines) + "\n"


def _but_memory(device: Device, atlas: Device) -> Device:
    """The device with the memory of ``atlas``: equal to it where nothing but boot logs was read."""
    told = (atlas.memory_bytes, atlas.memory_basis, atlas.memory_source)
    return replace(device, memory_bytes=told[0], memory_basis=told[1], memory_source=told[2], booted=atlas.booted)


def _rate(bytes_s: float) -> str:
    return f"{bytes_s / 1e6:.3f}MB/s"


def _link(link: Link) -> dict[str, Any]:
    out: dict[str, Any] = {
        "name": link.name,
        "kind": link.kind,
        "bandwidth": _rate(link.bandwidth_bytes_s),
        "direction": "one",
        "per": link.per,
        "latency_us": link.latency_s * 1e6,
    }
    return {**out, "measured": [m._asdict() for m in link.measured]} if link.measured else out


def write(cluster: Cluster, c: Calibration, path: Path, remarks: Sequence[str] = ()) -> None:
    """Write ``as_toml``.

    Raises:
        InputError: it cannot be written.
    """
    try:
        path.write_text(as_toml(cluster, c, remarks), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None

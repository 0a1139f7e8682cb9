"""From a ledger with times to the figures of the machine that made it, and from these to the time of any ledger.

Work on the device (products, attention cores) is a roofline with measured efficiencies: an operation of F operations
that moves B bytes takes

    seconds = max(F / peak, B / bandwidth) / efficiency

where ``peak`` and ``bandwidth`` are the best that was measured and the efficiency is that of the measured operations
of the same kind, dtype and phase around it: exact at a measured shape, between shapes weighted by the inverse square
of their distance in the logarithms of their sizes. (Williams, Waterman, Patterson, "Roofline", CACM 2009; the
interpolation is Shepard's, 1968.) What is only memory traffic (norms, look-ups) is bytes over bandwidth.

A transfer is a curve over bytes through its measured medians, straight in logarithms; outside it follows the line
``latency + bytes / bandwidth`` of least squares relative to what was measured. Groups of more ranks than measured take
latency by the rounds of a tree and bytes by what a ring sends.

More figures belong to whoever drives the device: seconds of a layer, of a pass through the model, and of a message to
all ranks of a replica, beyond the operations themselves; and of a step of a server beyond its pass.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, exp, log, log2, prod
from statistics import median

from meshwright.errors import InputError
from meshwright.ledger.schema import Entry, Ledger

#: Ops that are work on the device with a shape.
WORK = ("matmul", "attention")
#: Ops that say what drives the device, and the field of ``Calibration`` that they become (in the order of its fields).
DRIVING = {
    "launch": "launch_s",
    "layer": "layer_s",
    "pass": "pass_s",
    "message": "message_s",
    "serve": "serve_s",
    "sequence": "sequence_s",
}
#: Op of entries that are what happens between products (norm, rotation, activation, residual): time and bytes.
LIGHT = "light"
#: Op of entries that only move memory.
COPY = "copy"
#: A transfer that was not measured is timed as another that moves bytes alike.
LIKE = {
    "gather": ("all_gather", "reduce", "send", "all_reduce"),
    "all_gather": ("gather", "reduce_scatter", "all_reduce"),
    "reduce_scatter": ("all_gather", "all_reduce"),
    "all_to_all": ("all_gather", "reduce_scatter", "all_reduce"),
    "broadcast": ("all_gather", "send"),
    "recv": ("send",),
    "send": ("recv",),
    "barrier": ("all_reduce",),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """Efficiency of one measured operation.

    Attributes:
        op, dtype, phase: of the entry (phase None: of any). sizes: its dimensions, see ``sizes_of``.
        efficiency: share of the roofline that it reached. seconds: that it took; 0: not kept.
    """

    op: str
    dtype: str
    phase: str | None
    sizes: tuple[int, ...]
    efficiency: float
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective or hand-off between ``ranks`` ranks.

    Attributes:
        latency_s, bandwidth_bytes_s: of the line through it, over the payload that enters on a rank.
        error: median distance of the line from what was measured, as a share.
        knots: ``(payload bytes, seconds)``, ascending.
    """

    op: str
    ranks: int
    latency_s: float
    bandwidth_bytes_s: float
    error: float
    knots: tuple[tuple[int, float], ...]

    def seconds(self, payload_bytes: float) -> float:
        """Between the smallest and largest measured payload the curve, below it its first value, above it the line."""
        sizes = [size for size, _ in self.knots]
        if payload_bytes <= sizes[0]:
            return self.knots[0][1]
        if payload_bytes >= sizes[-1]:
            return self.knots[-1][1] + (payload_bytes - sizes[-1]) / self.bandwidth_bytes_s
        at = bisect_right(sizes, payload_bytes)
        (x0, y0), (x1, y1) = self.knots[at - 1], self.knots[at]
        share = log(payload_bytes / x0) / log(x1 / x0)
        return exp(log(y0) + share * log(y1 / y0))


@dataclass(frozen=True, slots=True)
class Calibration:
    """A machine as it was measured.

    Attributes:
        machine: what it is, in words. ranks: processes that measured at once, and so shared it.
        flops_s: best rate by dtype. bandwidth_bytes_s: best rate of memory, of one rank.
        launch_s: smallest operation on the device. layer_s, pass_s: of the driver, for a layer and for a pass.
        message_s: a message to all ranks of a replica.
        serve_s, sequence_s: what a server adds to a decode step, and to it for each request in it.
        light_bytes_s: rate at which inputs and outputs of products pass through what lies between products (norm,
            rotation, activation, residual); 0: not measured.
        work: efficiencies. transfers: collectives and hand-offs.
        error: of the fit, by kind: median relative distance when each sample in turn is left out.
    """

    machine: str
    ranks: int
    flops_s: Mapping[str, float]
    bandwidth_bytes_s: float
    launch_s: float = 0.0
    layer_s: float = 0.0
    pass_s: float = 0.0
    message_s: float = 0.0
    serve_s: float = 0.0
    sequence_s: float = 0.0
    light_bytes_s: float = 0.0
    work: tuple[Sample, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    error: Mapping[str, float] = field(default_factory=dict)

    def roofline(self, flops: int, moved: int, dtype: str) -> float:
        """Seconds at the best rates; a dtype that was not measured takes the rate of the slowest one."""
        peak = self.flops_s.get(dtype) or min(self.flops_s.values(), default=0.0)
        return max(flops / peak if peak else 0.0, moved / self.bandwidth_bytes_s, 1e-12)

    def seconds(self, entry: Entry, ranks: int = 1) -> float:
        """Seconds of an entry, its repetitions counted; ``ranks``: members of its group.

        Raises:
            InputError: a transfer of which nothing alike was measured.
        """
        if entry.group is not None:
            return self.transfer_s(entry.op, entry.payload_bytes or 0, ranks) * entry.count
        moved = entry.payload_bytes or 0
        if entry.op not in WORK or entry.shapes is None:
            return moved / self.bandwidth_bytes_s * entry.count
        dtype = entry.dtype or ""
        best = self.roofline(entry.flops or 0, moved, dtype)
        return best / self._efficiency(entry.op, dtype, entry.phase, sizes_of(entry)) * entry.count

    def _efficiency(self, op: str, dtype: str, phase: str | None, sizes: Sequence[int]) -> float:
        """Of the nearest kind that was measured: same dtype and phase, then same dtype, then any."""
        alike = [s for s in self.work if s.op == op and len(s.sizes) == len(sizes)]
        for wanted in (
            [s for s in alike if s.dtype == dtype and s.phase in {None, phase}],
            [s for s in alike if s.dtype == dtype],
            alike,
        ):
            if wanted:
                return interpolated(wanted, sizes)
        return 1.0

    def transfer_s(self, op: str, payload_bytes: int, ranks: int) -> float:
        """Seconds of one transfer.

        Raises:
            InputError: nothing alike was measured.
        """
        if ranks < 2:
            return 0.0
        for name in (op, *LIKE.get(op, ("all_reduce",))):
            known = [t for t in self.transfers if t.op == name]
            if known:
                nearest = min(known, key=lambda t: abs(log(t.ranks / ranks)))
                return _more_ranks(nearest, payload_bytes, ranks)
        raise InputError(f"no {op} was measured; calibrate on at least 2 ranks")


def _more_ranks(t: Transfer, payload_bytes: int, ranks: int) -> float:
    """The time of another number of ranks: latency by rounds of a tree, the rest by the bytes that a ring sends."""
    whole = t.seconds(payload_bytes)
    if t.ranks == ranks or t.op in {"send", "recv"}:
        return whole
    latency = min(t.latency_s, whole)
    rounds = ceil(log2(ranks)) / max(1, ceil(log2(t.ranks)))
    gathers = t.op in {"all_gather", "gather"}
    sent = (ranks - 1) / (t.ranks - 1) if gathers else (1 - 1 / ranks) / (1 - 1 / t.ranks)
    return latency * rounds + (whole - latency) * sent


def sizes_of(entry: Entry) -> tuple[int, ...]:
    """What the efficiency of an entry depends on: m, k, n of a product (with experts first); tokens, cached tokens,
    heads and head width of an attention core."""
    shapes = entry.shapes or ()
    if entry.op == "attention" and len(shapes) > 1 and len(shapes[0]) > 2:
        tokens, heads, width = shapes[0]
        return tokens, shapes[1][0], heads, width
    if entry.op == "matmul" and len(shapes) == 2:
        return (*shapes[0][:1], *shapes[1])
    return tuple(prod(shape) for shape in shapes)


def interpolated(samples: Sequence[Sample], sizes: Sequence[int]) -> float:
    """Efficiency at some sizes: the geometric mean of the samples, weighted by nearness; a sample at hand is exact."""
    weights = total = 0.0
    for s in samples:
        far = sum((log(max(1, a)) - log(max(1, b))) ** 2 for a, b in zip(s.sizes, sizes, strict=True))
        if far < 1e-12:
            return s.efficiency
        weights += far**-2
        total += far**-2 * log(s.efficiency)
    return exp(total / weights)


def duration_s(entry: Entry) -> float | None:
    """Seconds of one repetition of an entry, None where its times are not known or it took none."""
    if entry.started_ns is None or entry.ended_ns is None or entry.count < 1:
        return None
    took = (entry.ended_ns - entry.started_ns) / entry.count * 1e-9
    return took if took > 0 else None


def fit(ledger: Ledger) -> Calibration:
    """Fit a calibration to a ledger of measured entries.

    Products, attention cores and transfers (entries with a group) are used wherever they have times; entries named by
    ``COPY`` and ``DRIVING`` give the rest. ``meta``: ``machine``, ``ranks``, and the members of every group as
    ``group.tp`` (2 where that is missing). Of several entries of one shape the median counts.

    Raises:
        InputError: nothing measured from which bandwidth or rates could be known.
    """
    timed = [(e, t) for e in ledger.entries if (t := duration_s(e)) is not None]
    flops: dict[str, float] = {}
    moved = 0.0
    for (op, dtype, *_), (e, t) in _medians(timed).items():
        if op == "matmul" and e.flops:
            flops[dtype] = max(flops.get(dtype, 0.0), e.flops / t)
        if op == COPY:
            moved = max(moved, (e.payload_bytes or 0) / t)
    if not moved or not flops:
        missing = "memory traffic" if not moved else "matrix product"
        raise InputError(f"the ledger has no {missing} with times; measure with `runtime.microbench`")
    launch, layer, each, message, serve, sequence = (_median_of(timed, op) for op in DRIVING)
    ranks = _int(ledger.meta, "ranks", 1)
    light = median([(e.payload_bytes or 0) / t for e, t in timed if e.op == LIGHT] or [0.0])
    machine = ledger.meta.get("machine", "unknown")
    base = Calibration(machine, ranks, flops, moved, launch, layer, each, message, serve, sequence, light)
    work = tuple(
        Sample(op, dtype, e.phase, sizes, base.roofline(e.flops or 0, e.payload_bytes or 0, dtype) / t, t)
        for (op, dtype, _, sizes), (e, t) in _medians(timed).items()
        if op in WORK and e.group is None
    )
    transfers = _transfers(timed, ledger.meta)
    return replace(base, work=work, transfers=transfers, error=_errors(work))


def transfers_of(ledger: Ledger) -> tuple[Transfer, ...]:
    """Only the curves of a ledger's transfers (see ``fit``)."""
    return _transfers([(e, t) for e in ledger.entries if (t := duration_s(e)) is not None], ledger.meta)


Timed = Sequence[tuple[Entry, float]]
Kind = tuple[str, str, str | None, tuple[int, ...]]


def _medians(timed: Timed) -> dict[Kind, tuple[Entry, float]]:
    """Entries on the device by op, dtype, phase and sizes, with the median of their seconds."""
    found: dict[Kind, list[tuple[Entry, float]]] = {}
    for e, t in timed:
        if e.group is None:
            phase = e.phase if e.op == "attention" else None
            found.setdefault((e.op, e.dtype or "", phase, sizes_of(e)), []).append((e, t))
    return {key: (rows[0][0], median(t for _, t in rows)) for key, rows in found.items()}


def _median_of(timed: Timed, op: str) -> float:
    return median(found) if (found := [t for e, t in timed if e.op == op]) else 0.0


def _int(meta: Mapping[str, str], name: str, default: int) -> int:
    text = meta.get(name, "")
    return int(text) if text.isdigit() and int(text) > 0 else default


def _transfers(timed: Timed, meta: Mapping[str, str]) -> tuple[Transfer, ...]:
    """A curve and a line for every op and size of group."""
    found: dict[tuple[str, int], dict[int, list[float]]] = {}
    for e, t in timed:
        if e.group is not None and e.payload_bytes:
            key = e.op, _int(meta, f"group.{e.group}", 2)
            found.setdefault(key, {}).setdefault(e.payload_bytes, []).append(t)
    out = []
    for (op, ranks), sizes in sorted(found.items()):
        knots = tuple((size, median(times)) for size, times in sorted(sizes.items()))
        out.append(Transfer(op, ranks, *line(knots), knots))
    return tuple(out)


def line(knots: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """``(latency, bytes per second, median relative distance)`` of the line with the least squares of relative
    distances; with one knot, all of it is latency."""
    xx = sum((x / y) ** 2 for x, y in knots)
    x1 = sum(x / y**2 for x, y in knots)
    one = sum(1 / y**2 for _, y in knots)
    xy, y1 = sum(x / y for x, y in knots), sum(1 / y for _, y in knots)
    det = xx * one - x1 * x1
    smallest = min(y for _, y in knots)
    slope, latency = 0.0, smallest
    if len(knots) > 1 and det > 0:
        slope, latency = (xy * one - y1 * x1) / det, (xx * y1 - x1 * xy) / det
    if slope <= 0:  # larger is not slower: all is latency, and bytes are as quick as the largest shows
        error = median(abs(smallest - y) / y for _, y in knots)
        return smallest, max(x / y for x, y in knots), error
    latency = min(max(latency, 0.0), smallest)
    error = median(abs(latency + slope * x - y) / y for x, y in knots)
    return latency, 1 / slope, error


def _errors(work: Sequence[Sample]) -> dict[str, float]:
    """How far a sample lies from what the others of its kind say of it, by op."""
    out: dict[str, list[float]] = {}
    for s in work:
        others = [o for o in work if o is not s and (o.op, o.dtype, o.phase) == (s.op, s.dtype, s.phase)]
        others = [o for o in others if len(o.sizes) == len(s.sizes)]
        if others:
            out.setdefault(s.op, []).append(abs(s.efficiency / interpolated(others, s.sizes) - 1))
    return {op: median(found) for op, found in out.items()}


def passed_bytes(entry: Entry) -> float:
    """Bytes of a product's input and output, which pass through what lies between products; 0 of other entries."""
    if entry.op != "matmul" or not entry.shapes or len(entry.shapes) < 2:
        return 0.0
    left, right = entry.shapes[:2]
    passed = left[0] * (left[-1] + right[-1])
    return (entry.payload_bytes or 0) * passed / (passed + prod(right))


def pass_seconds(
    c: Calibration, entries: Iterable[Entry], groups: Mapping[str, int], *, driver: bool = True
) -> dict[tuple[str, int | None, int | None], float]:
    """Seconds of every pass of every rank class: ``(rank class, step, micro-batch)``.

    Args:
        c: the machine. entries: predicted or recorded. groups: members of every group.
        driver: add the time of the driver for layers and passes, and of what lies between products.
    """
    out: dict[tuple[str, int | None, int | None], float] = {}
    layers: dict[tuple[str, int | None, int | None], set[int]] = {}
    for e in entries:
        key = e.rank_class, e.step, e.microbatch
        # Sending does not wait: the receiver has the time of a hand-off.
        took = c.launch_s if e.op == "send" else c.seconds(e, groups.get(e.group or "", 1))
        if driver and c.light_bytes_s:
            took += passed_bytes(e) / c.light_bytes_s * e.count
        out[key] = out.get(key, 0.0) + took
        if e.layer is not None:
            layers.setdefault(key, set()).add(e.layer)
    if driver:
        for key in out:
            out[key] += c.pass_s + c.layer_s * len(layers.get(key, ()))
    return out

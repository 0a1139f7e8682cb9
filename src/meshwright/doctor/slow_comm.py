"""What collectives themselves take, waiting apart: latency or bandwidth, too many small ones, one slow link."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from weakref import WeakKeyDictionary

import numpy as np

from meshwright.doctor.findings import Finding, ranks_text
from meshwright.doctor.slow_advice import ADVICE
from meshwright.doctor.slow_replay import step_seconds
from meshwright.doctor.slow_view import SlowView
from meshwright.doctor.slow_words import bytes_text, faster_text, of_text, rate_text, time_text
from meshwright.ledger.arrivals import Meeting
from meshwright.ledger.tracks import LABELS, PLACE

#: Exposed transfer counts from this share of a step.
MIN_SHARE = 0.08
#: A collective of fewer bytes than this is taken for latency where its sizes do not vary enough to tell.
SMALL_BYTES = 256 << 10
#: One whose size is not recorded is taken for latency below this: what a device sends in a fast node in it is a few MB.
SHORT_S = 40e-6
#: Gradient collectives of a step from which on they are many; share of latency in a bucket that is well made.
MANY, WELL_MADE = 8, 0.1
MIN_BUCKET_BYTES, MAX_BUCKET_BYTES, USUAL_BUCKET_BYTES = 1 << 20, 256 << 20, 25 << 20
#: Share of the exposed transfers that gradients have to have beside gathers of parameters.
IN_PAIR = 0.4
#: A group is slow when its bus bandwidth is below this share of its like's.
SLOW_LINK = 0.5
_BUCKETS = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True, slots=True)
class Traffic:
    """All meetings of one operation.

    Attributes:
        per_step: how many. payload_bytes, wire_bytes: of one in the middle, None unknown.
        transfer_s: of one in the middle. exposed_s: of all a step, what nothing hides.
        latency_s, slope_s: of the line through sizes that differ (seconds, seconds a byte of payload), None without.
        gradient: share that begins between the first backward work and the optimizer's.
    """

    op: str
    per_step: float
    payload_bytes: int | None
    wire_bytes: int | None
    transfer_s: float
    exposed_s: float
    latency_s: float | None
    slope_s: float | None
    gradient: float

    @property
    def bus_bytes_s(self) -> float | None:
        """Bytes a second over the wire of one rank (NCCL's bus bandwidth)."""
        return self.wire_bytes / self.transfer_s if self.wire_bytes and self.transfer_s > 0 else None

    @property
    def latency_share(self) -> float:
        """Share of the transfer that does not depend on its size."""
        if self.latency_s is not None and self.transfer_s > 0:
            return min(1.0, self.latency_s / self.transfer_s)
        if self.payload_bytes is None:
            return 1.0 if self.transfer_s < SHORT_S else 0.0
        return 1.0 if self.payload_bytes < SMALL_BYTES else 0.0


def traffic(view: SlowView) -> list[Traffic]:
    """By operation, the one with the longest exposed transfer first; worked out once a view."""
    if view not in _TRAFFIC:
        _TRAFFIC[view] = _traffic(view)
    return _TRAFFIC[view]


#: What ``traffic`` has worked out, as long as the view lives.
_TRAFFIC: WeakKeyDictionary[SlowView, list[Traffic]] = WeakKeyDictionary()


def _traffic(view: SlowView) -> list[Traffic]:
    by: dict[str, list[Meeting]] = defaultdict(list)
    for meeting in view.meetings:
        by[meeting.op].append(meeting)
    found = []
    for op, held in by.items():
        sizes = [m.payload_bytes for m in held if m.payload_bytes is not None]
        wires = [w for m in held if (w := wire(view, m)) is not None]
        line = _line([(m.payload_bytes, m.transfer_ns / 1e9) for m in held if m.payload_bytes is not None])
        latency, slope = line if line is not None else (None, None)
        found.append(
            Traffic(
                op,
                len(held) / view.steps,
                int(median(sizes)) if sizes else None,
                int(median(wires)) if wires else None,
                median(m.transfer_ns for m in held) / 1e9,
                view.transfer_s(op),
                latency,
                slope,
                _gradient(view, held),
            )
        )
    return sorted(found, key=lambda t: -t.exposed_s)


def wire(view: SlowView, meeting: Meeting) -> int | None:
    """Bytes that a rank sends; of groups that are not recorded when all ranks of the job are in the meeting."""
    from meshwright.doctor.readers.kineto_calls import wire_bytes

    known = [c.wire_bytes for c in meeting.calls.values() if c.wire_bytes is not None]
    if known:
        return max(known)
    if len(meeting.calls) < view.world and meeting.op != "send":
        return None
    return wire_bytes(meeting.op, meeting.payload_bytes, None, len(meeting.calls))


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Latency and seconds a byte from the medians of small and large ones; None where sizes are too alike."""
    by: dict[int, list[float]] = defaultdict(list)
    for size, seconds in points:
        by[max(1, size).bit_length()].append(seconds)
    if len(by) < 2 or max(by) - min(by) < 3:
        return None
    low, high = min(by), max(by)
    small = median(s for s, _ in points if max(1, s).bit_length() == low)
    large = median(s for s, _ in points if max(1, s).bit_length() == high)
    slope = (median(by[high]) - median(by[low])) / max(1.0, large - small)
    if slope <= 0:
        return median(by[low]), 0.0
    return max(0.0, median(by[low]) - slope * small), slope


def _gradient(view: SlowView, held: Sequence[Meeting]) -> float:
    """Share of meetings that begin after backward work of their step began and before its optimizer's."""
    track = view.tracks[0]
    own = [m for m in held if track.rank in m.calls]
    if not own or not track.steps:
        return 0.0
    times = np.array([m.start_ns[track.rank] - track.offset_ns for m in own], np.int64)
    starts = np.array([s.start_ns for s in track.steps], np.int64)
    place = np.maximum(np.searchsorted(starts, times, side="right") - 1, 0)
    done = track.segments.sums(times, len(LABELS)) - track.segments.sums(starts[place], len(LABELS))
    inside = (done[:, PLACE["backward"]] > 0) & (done[:, PLACE["optimizer"]] == 0)
    return float(inside.mean())


def peak_bytes_s(view: SlowView) -> tuple[float, str] | None:
    """What the link that all ranks share can carry one way: of the plan's cluster where one was given; else of the
    device that the traces name, while the job is in a node."""
    from meshwright.specs.atlas.devices import match_device

    told = view.incident.peaks
    if told is not None:
        hosts = {t.host for t in view.tracks if t.host}
        peak = told.inter if view.world > told.devices or len(hosts) > 1 else told.intra
        return peak.bytes_s, peak.name
    names = {t.device for t in view.tracks if t.device}
    device = match_device(next(iter(names))) if len(names) == 1 else None
    hosts = {t.host for t in view.tracks if t.host}
    if device is None or view.world > device.devices_per_node or len(hosts) > 1:
        return None
    return device.intra.bandwidth_bytes_s, device.intra.name


def transfer_text(view: SlowView, op: str) -> str:
    """``True transfer 1.1 ms, 12 % of the link's peak.``; empty where the operation was not matched."""
    found = next((t for t in traffic(view) if t.op == op), None)
    if found is None:
        return ""
    text = f"True transfer {time_text(found.transfer_s)}"
    peak, rate = peak_bytes_s(view), found.bus_bytes_s
    if rate is not None:
        share = f", {100 * rate / peak[0]:.0f} % of the link's peak ({peak[1]})" if peak is not None else ""
        text += share or f" at {rate_text(rate)}"
    return f"{text}."


def finding(view: SlowView) -> Finding | None:
    """Exposed transfer as the cause, where it takes its share."""
    rows = [t for t in traffic(view) if t.op != "barrier"]
    exposed = sum(t.exposed_s for t in rows)
    if not rows or exposed < MIN_SHARE * view.step_s:
        return None
    first = rows[0]
    kind = _kind(first)
    if kind == "latency_bound_comm":  # of equal parts (gathers before, reductions after) gradients tell of buckets
        own = next((t for t in rows if _kind(t) == "tiny_buckets" and t.exposed_s >= IN_PAIR * exposed), None)
        first, kind = (own, "tiny_buckets") if own is not None else (first, kind)
    after = step_seconds(view, transfer=0.0)
    if kind == "tiny_buckets":
        fused = _fused(first)
        saved = first.exposed_s * (1 - fused[1] / first.per_step) * first.latency_share
        after = max(after, view.step_s - saved)
    return Finding(
        kind,
        (),
        view.ranks,
        confidence="high" if first.payload_bytes is not None else "medium",
        headline=_headline(view, first, kind, exposed, after),
        evidence=tuple(_row(view, t) for t in rows[:6]),
        unknown=() if first.payload_bytes is not None else ("sizes of collectives: record_shapes=True",),
        advice=ADVICE[kind],
        op=first.op,
        numbers=(
            ("step_s", view.step_s),
            ("exposed_transfer_s", exposed),
            ("wait_s", view.wait_s(op=first.op)),
            ("transfer_s", first.transfer_s),
            ("per_step", first.per_step),
            ("payload_bytes", float(first.payload_bytes or 0)),
            ("bus_bytes_s", first.bus_bytes_s or 0.0),
            ("step_without_s", after),
        ),
    )


def _kind(found: Traffic) -> str:
    if found.latency_share < 0.5:
        return "bandwidth_bound_comm"
    many = found.op in _BUCKETS and found.per_step >= MANY and found.gradient >= 0.5
    return "tiny_buckets" if many else "latency_bound_comm"


def _fused(found: Traffic) -> tuple[int, int]:
    """Bytes that a bucket should have, and how many there would be."""
    best = USUAL_BUCKET_BYTES
    if found.latency_s is not None and found.slope_s:
        best = int((1 / WELL_MADE - 1) * found.latency_s / found.slope_s)
    best = min(MAX_BUCKET_BYTES, max(MIN_BUCKET_BYTES, best))
    total = (found.payload_bytes or 0) * found.per_step
    return best, max(1, ceil(total / best))


def _headline(view: SlowView, first: Traffic, kind: str, exposed: float, after: float) -> str:
    part = f"transfers that nothing hides take {of_text(exposed, view.step_s)} of every step"
    what = f"{first.per_step:.0f} {first.op} a step"
    if first.payload_bytes is not None:
        what += f" of {bytes_text(first.payload_bytes)}"
    what += f", {time_text(first.transfer_s)} each"
    if kind == "tiny_buckets":
        size, count = _fused(first)
        why = f"nearly all of it latency; {count} of {bytes_text(size)} would do"
    elif kind == "latency_bound_comm":
        why = f"{100 * first.latency_share:.0f} % of it latency"
    else:
        rate, peak = first.bus_bytes_s, peak_bytes_s(view)
        share = f", {100 * rate / peak[0]:.0f} % of the peak of {peak[1]}" if rate and peak else ""
        why = f"bound by bandwidth ({rate_text(rate)} over the wire{share})" if rate else "bound by bandwidth"
    end = "Without this" if kind == "tiny_buckets" else "Hidden behind computation"
    return f"{part}: {what}, {why}. {end} {faster_text(view.step_s, after)}"


def _row(view: SlowView, t: Traffic) -> str:
    size = f" of {bytes_text(t.payload_bytes)}" if t.payload_bytes is not None else ""
    rate = t.bus_bytes_s
    speed = ""
    if rate and t.payload_bytes:
        algorithm = t.payload_bytes / t.transfer_s
        speed = f"; algorithm {rate_text(algorithm)}, bus {rate_text(rate)}"
    return (
        f"{t.op}: {t.per_step:.1f} a step{size}, transfer {time_text(t.transfer_s)}{speed}; "
        f"exposed {time_text(t.exposed_s)} a step"
    )


def _lost_s(view: SlowView, ranks: tuple[int, ...], op: str, share: float) -> float:
    """Seconds of a step that the transfers of a slow group take longer than those of its like, where nothing hides
    them; the mean of its ranks."""
    spent = sum(
        v.exposed_transfer
        for m, row in zip(view.meetings, view.visits, strict=True)
        if m.op == op and m.ranks == ranks
        for v in row.values()
    )
    return spent / 1e9 / len(ranks) / view.steps * (1 - share)


def slow_link(view: SlowView) -> Finding | None:
    """A group or pair that carries the same much more slowly than its like."""
    by: dict[tuple[str, int, int], dict[tuple[int, ...], list[float]]] = defaultdict(lambda: defaultdict(list))
    for meeting in view.meetings:
        moved = wire(view, meeting) or meeting.payload_bytes
        if moved and moved >= SMALL_BYTES and meeting.transfer_ns > 0:
            key = (meeting.op, len(meeting.ranks), moved.bit_length())
            by[key][meeting.ranks].append(moved / (meeting.transfer_ns / 1e9))
    worst: tuple[float, tuple[int, ...], float, float, str] | None = None
    for (op, _, _), groups in by.items():
        rates = {ranks: median(found) for ranks, found in groups.items()}
        if len(rates) < 2:
            continue
        ranks = min(rates, key=lambda r: rates[r])
        usual = median(rate for r, rate in rates.items() if r != ranks)
        share = rates[ranks] / usual
        if share < SLOW_LINK and (worst is None or share < worst[0]):
            worst = (share, ranks, rates[ranks], usual, op)
    if worst is None:
        return None
    share, ranks, rate, usual, op = worst
    hosts = sorted({t.host for t in view.tracks if t.rank in ranks and t.host})
    where = f" on {', '.join(hosts[:4])}" if hosts else ""
    return Finding(
        "slow_link",
        ranks,
        (),
        confidence="medium",
        headline=f"{op} between {ranks_text(ranks)}{where} runs at {rate_text(rate)}, between others at "
        f"{rate_text(usual)}: {100 * share:.0f} %",
        evidence=(f"medians of {len(by)} kinds of collectives by group and size",),
        unknown=("which NIC: a log with NCCL_DEBUG=INFO tells",),
        advice=ADVICE["slow_link"],
        op=op,
        numbers=(
            ("rate_bytes_s", rate),
            ("lost_s", _lost_s(view, ranks, op, share)),
            ("usual_bytes_s", usual),
            ("share", share),
        ),
    )

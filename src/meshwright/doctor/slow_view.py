"""What the parts of ``slow`` share: time of every rank and step, who made whom wait in which collective, and why.

Waiting that computation hides costs nothing and is left out. Every moment of a rank's waiting counts once, for the
first collective that it waits in. Its cause is what the last to arrive did since the collective before, beyond what the
others did meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean, median

import numpy as np
from numpy.typing import NDArray

from meshwright.doctor.incident import Incident
from meshwright.ledger.arrivals import Matched, Meeting, match
from meshwright.ledger.tracks import COMM_OPS, LABELS, PLACE, StepParts, Track, breakdown

#: Lateness that a rank brought along from before the recording.
BEFORE = "before"
_COMM = [PLACE[op] for op in COMM_OPS]
_OWN = [n for n in range(len(LABELS)) if n not in _COMM]

Sums = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Visit:
    """One rank in one meeting; nanoseconds by the common clock.

    Attributes:
        start, end: of its call. exposed_wait: of its waiting, what nothing hides and no earlier meeting has taken.
        exposed: of the whole call, what nothing hides. blocking: whether the rank stood still in it.
        since: place of the meeting that it left last, -1 none (since its recording began). origin: when that was.
        gap: nanoseconds by label from there to its arrival.
    """

    start: int
    end: int
    exposed_wait: int
    exposed_transfer: int
    blocking: bool
    since: int
    origin: int
    gap: Sums


class SlowView:
    """The tracks of an incident and what follows from them."""

    def __init__(self, incident: Incident) -> None:
        self.incident = incident
        self.tracks: list[Track] = [t for t in incident.tracks if t.steps]
        self.parts: dict[int, list[StepParts]] = {t.rank: breakdown(t) for t in self.tracks}
        self.matched: Matched = match(self.tracks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that are recorded."""
        return tuple(t.rank for t in self.tracks)

    @property
    def meetings(self) -> tuple[Meeting, ...]:
        """Collectives of several recorded ranks."""
        return self.matched.meetings

    @property
    def world(self) -> int:
        """Ranks of the job as far as is known."""
        return max([len(self.tracks), *(t.world or 0 for t in self.tracks)])

    @property
    def on_device(self) -> bool:
        """Whether accelerators were recorded."""
        return any(t.device for t in self.tracks)

    @cached_property
    def steps(self) -> int:
        """Steps that count: of the rank with the fewest."""
        return max(1, min((len(p) for p in self.parts.values()), default=1))

    @cached_property
    def step_s(self) -> float:
        """A step in the middle of ranks, the mean of steps; what lies between steps belongs to them."""
        spans = [(t.span_ns[1] - t.span_ns[0]) / 1e9 / len(t.steps) for t in self.tracks]
        return median(spans) if spans else 0.0

    def label_s(self, rank: int, *labels: str) -> float:
        """Seconds of a step that a rank spends so, the mean of its steps."""
        rows = self.parts[rank]
        return sum(p.parts_s.get(name, 0.0) for p in rows for name in labels) / len(rows)

    def mean_s(self, *labels: str) -> float:
        """The same over all ranks."""
        return mean(self.label_s(r, *labels) for r in self.ranks) if self.tracks else 0.0

    @cached_property
    def visits(self) -> list[dict[int, Visit]]:
        """By meeting, every rank in it."""
        out: list[dict[int, Visit]] = [{} for _ in self.meetings]
        for track in self.tracks:
            own = [(n, m) for n, m in enumerate(self.meetings) if track.rank in m.calls]
            own.sort(key=lambda pair: pair[1].start_ns[track.rank])
            for n, visit in _visits(track, own):
                out[n][track.rank] = visit
        return out

    @cached_property
    def blames(self) -> list[Blame]:
        """What made others wait, one row a meeting and label."""
        return [b for n, meeting in enumerate(self.meetings) for b in _blames(meeting, self.visits[n], self.visits)]

    def transfer_s(self, op: str | None = None) -> float:
        """Exposed transfer a step in matched collectives, the mean of ranks."""
        spent = [
            v.exposed_transfer
            for m, row in zip(self.meetings, self.visits, strict=True)
            if op is None or m.op == op
            for v in row.values()
        ]
        return sum(spent) / 1e9 / max(1, len(self.ranks)) / self.steps

    def wait_s(self, rank: int | None = None, op: str | None = None) -> float:
        """Exposed waiting a step, of one rank or the mean of all; of an operation or of all."""
        rows = [
            v.exposed_wait
            for m, row in zip(self.meetings, self.visits, strict=True)
            if op is None or m.op == op
            for r, v in row.items()
            if rank is None or r == rank
        ]
        return sum(rows) / 1e9 / self.steps / (1 if rank is not None else max(1, len(self.ranks)))


def view_of(incident: Incident) -> SlowView:
    """The view of an incident, made once."""
    if incident.times is None:
        incident.times = SlowView(incident)
    return incident.times


@dataclass(frozen=True, slots=True)
class Blame:
    """A share of the waiting of a meeting.

    Attributes:
        rank: that came last. label: what it did longer than the others, ``BEFORE`` where its recording began later.
        op: of the meeting. step: number or None.
        wait_s: mean exposed waiting of the others that this explains.
    """

    rank: int
    label: str
    op: str
    step: int | None
    wait_s: float


def _visits(track: Track, own: Sequence[tuple[int, Meeting]]) -> Iterable[tuple[int, Visit]]:
    """A rank's way through its meetings in the order of its arrivals."""
    rank, offset = track.rank, track.offset_ns
    if not own:
        return
    start = np.array([m.start_ns[rank] for _, m in own], np.int64)
    end = np.array([m.end_ns[rank] for _, m in own], np.int64)
    arrived = np.array([m.arrived_ns for _, m in own], np.int64)
    covered = np.concatenate(([start[0]], np.maximum.accumulate(end)[:-1]))
    first = np.minimum(np.maximum(start, covered), end)
    waited = np.clip(arrived, first, end)
    sums = track.segments.sums(np.concatenate([start, end, first, waited]) - offset, len(LABELS))
    count = len(own)
    at_start, at_end = sums[:count], sums[count : 2 * count]
    comm = sums[:, _COMM].sum(axis=1)
    exposed_wait = comm[3 * count :] - comm[2 * count : 3 * count]
    transfer = comm[count : 2 * count] - comm[3 * count :]
    exposed = comm[count : 2 * count] - comm[:count]
    base = track.segments.sums(np.array([track.span_ns[0]], np.int64), len(LABELS))[0]
    order = np.argsort(end, kind="stable")
    before = np.searchsorted(end[order], start, side="right") - 1
    left = np.where(before >= 0, order[np.maximum(before, 0)], -1)
    gaps = at_start - np.where((left >= 0)[:, None], at_end[left], base)
    origins = np.where(left >= 0, end[left], track.span_ns[0] + offset)
    blocking = exposed > 0.5 * (end - start)
    numbers = [number for number, _ in own]
    columns = (start, end, exposed_wait, transfer, blocking, left, origins)
    for place, (begun, ended, wait, moved, stands, since, origin) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        met = numbers[since] if since >= 0 else -1
        yield numbers[place], Visit(begun, ended, wait, moved, stands, met, origin, gaps[place])


def _blames(meeting: Meeting, row: dict[int, Visit], visits: Sequence[Mapping[int, Visit]]) -> list[Blame]:
    """Why the last one came last: what it did longer than the others since its last meeting; where that explains less
    than half of the waiting, since the last meeting that it had with them."""
    last = meeting.last
    others = [v for r, v in row.items() if r != last]
    waited = sum(v.exposed_wait for v in others) / len(others) / 1e9
    if waited <= 0:
        return []
    own = row[last]
    same = [v for v in others if v.since == own.since] or others
    usual = np.median(np.array([v.gap for v in same]), axis=0)
    excess: dict[str, float] = defaultdict(float)
    for n in _OWN:
        beyond = float(own.gap[n] - usual[n])
        if beyond > 0:
            excess[LABELS[n]] += beyond
    if own.since < 0:
        before = own.origin - median(v.origin for v in others)
        excess |= {BEFORE: before} if before > 0 else {}
    whole = sum(excess.values())
    if whole < 0.5e9 * waited and waited > TRACED_S:
        earlier = _since_together(last, row, visits)
        if sum(earlier.values()) > max(whole, 0.5e9 * waited):
            excess, whole = earlier, sum(earlier.values())
    if whole <= 0:
        return [Blame(last, "idle", meeting.op, meeting.step, waited)]
    return [Blame(last, label, meeting.op, meeting.step, waited * e / whole) for label, e in excess.items()]


#: Meetings that are looked back over, and seconds of waiting that are worth it.
MAX_BACK, TRACED_S = 32, 20e-6


def _since_together(last: int, row: Mapping[int, Visit], visits: Sequence[Mapping[int, Visit]]) -> dict[str, float]:
    """Nanoseconds by label that the last one spent beyond the others since they met; the median over them."""
    own = dict(_history(last, row[last], visits))
    beyond = []
    for rank, visit in row.items():
        met = next(((p, gap) for p, gap in _history(rank, visit, visits) if p in own), None) if rank != last else None
        if met is not None:
            beyond.append(own[met[0]] - met[1])
    if not beyond:
        return {}
    usual = np.median(np.array(beyond), axis=0)
    return {LABELS[n]: float(usual[n]) for n in _OWN if usual[n] > 0}


def _history(rank: int, visit: Visit, visits: Sequence[Mapping[int, Visit]]) -> Iterable[tuple[int, Sums]]:
    """Meetings that a rank left before a visit, the latest first, with its own time by label from each to the visit."""
    total, place = visit.gap, visit.since
    for _ in range(MAX_BACK):
        yield place, total
        if place < 0:
            return
        before = visits[place][rank]
        total, place = total + before.gap, before.since

"""One collective as all of its ranks lived it: who came last, how long the others waited, what the transfer took.

Calls of the ranks belong together by group and number where the recording has both; else by their place in the order
of calls of the same group and operation within a step, which holds only while operation, bytes and times agree.

Clocks are set by the ends: a collective that gives every rank something of every rank ends everywhere at about the
same moment. What the last one to arrive spends in it is transfer; what the others spend before that is waiting.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from meshwright.ledger.schema import Entry
from meshwright.ledger.tracks import Track

#: Operations that end everywhere together.
TOGETHER = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "collective"})
HAND_OFFS = ("send", "recv")
#: Calls of a group are aligned over so many places when their counts differ.
MAX_SHIFT = 64
#: Calls of a rank that are looked at for the shift.
MAX_COMPARED = 1000


@dataclass(frozen=True, slots=True)
class Meeting:
    """One collective, or one hand-off, of several ranks; times in nanoseconds on one clock.

    Attributes:
        group: name of the group as recorded, None unknown. op, seq, step: of the call.
        calls: by rank. start_ns, end_ns: by rank, clocks set. arrived_ns: when the last rank arrived.
    """

    group: str | None
    op: str
    seq: int
    step: int | None
    calls: Mapping[int, Entry]
    start_ns: Mapping[int, int]
    end_ns: Mapping[int, int]
    arrived_ns: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who took part, ascending."""
        return tuple(sorted(self.calls))

    @property
    def last(self) -> int:
        """The rank that arrived last; of several the one whose call took the least."""
        return max(self.start_ns, key=lambda r: (self.start_ns[r], self.start_ns[r] - self.end_ns[r]))

    @property
    def transfer_ns(self) -> int:
        """What the last one to arrive spends in it."""
        return max(0, self.end_ns[self.last] - self.arrived_ns)

    def wait_ns(self, rank: int) -> int:
        """How long a rank waited for the last one, at most until its own end."""
        return max(0, min(self.arrived_ns, self.end_ns[rank]) - self.start_ns[rank])

    @property
    def late_ns(self) -> int:
        """How much later the last one came than the others do in the middle."""
        others = [t for r, t in self.start_ns.items() if r != self.last]
        return max(0, self.arrived_ns - int(median(others))) if others else 0

    @property
    def payload_bytes(self) -> int | None:
        """Bytes that enter on a rank, the most of any; None unknown."""
        known = [c.payload_bytes for c in self.calls.values() if c.payload_bytes is not None]
        return max(known, default=None)


@dataclass(frozen=True, slots=True)
class Matched:
    """All meetings by the time of their begin, and what could not be matched.

    Attributes:
        alone: calls whose partners are in no recording. doubtful: calls left out because their place in the order
            does not fit their partners' (by operation, bytes or time).
        spread_ns: how far ends of one collective lie apart once clocks are set, in the middle.
        numbered: whether all matches rest on recorded numbers.
    """

    meetings: tuple[Meeting, ...]
    alone: int
    doubtful: int
    spread_ns: int
    numbered: bool


#: Calls of every rank in order; and calls that belong together, keyed by group, operation and place.
Lane = dict[int, list[Entry]]
Row = tuple[tuple[str | None, str, int], dict[int, Entry]]


def match(tracks: Sequence[Track]) -> Matched:
    """Match the calls of all ranks and set ``offset_ns`` of every track."""
    rough = [row for key, lane in _lanes(tracks).items() for row in _rows(key, lane)] + _hand_offs(tracks)
    whole = [(key, calls) for key, calls in rough if len(calls) > 1]
    for track in tracks:
        track.offset_ns = 0
    for rank, offset in offsets([calls for key, calls in whole if key[1] in TOGETHER]).items():
        next(t for t in tracks if t.rank == rank).offset_ns = offset
    shift = {t.rank: t.offset_ns for t in tracks}
    meetings, doubtful = [], 0
    for (group, op, place), calls in whole:
        met = _meeting(group, op, place, calls, shift)
        if met is None:
            doubtful += len(calls)
        else:
            meetings.append(met)
    meetings.sort(key=lambda m: (min(m.start_ns.values()), m.seq))
    ends = [max(m.end_ns.values()) - min(m.end_ns.values()) for m in meetings if m.op in TOGETHER]
    numbered = all(c.seq is not None for m in meetings for c in m.calls.values())
    alone = sum(len(calls) for _, calls in rough if len(calls) == 1)
    return Matched(tuple(meetings), alone, doubtful, int(median(ends)) if ends else 0, numbered)


def _lanes(tracks: Sequence[Track]) -> dict[tuple[str | None, str], Lane]:
    """Calls of every rank by group and operation, in the order of issue."""
    lanes: dict[tuple[str | None, str], Lane] = defaultdict(dict)
    for track in tracks:
        for call in track.calls:
            if call.op not in HAND_OFFS:
                lanes[call.group, call.op].setdefault(track.rank, []).append(call)
    return lanes


def _rows(key: tuple[str | None, str], lane: Lane) -> Iterable[Row]:
    """Rows of calls that belong together, keyed by group, operation and place."""
    group, op = key
    if all(c.seq is not None for calls in lane.values() for c in calls):
        by: dict[int, dict[int, Entry]] = defaultdict(dict)
        for rank, calls in lane.items():
            for call in calls:
                by[call.seq or 0][rank] = call
        yield from (((group, op, seq), row) for seq, row in sorted(by.items()))
        return
    counts = {rank: Counter(c.step for c in calls) for rank, calls in lane.items()}
    if len({tuple(sorted(c.items(), key=str)) for c in counts.values()}) == 1:
        for place in range(len(next(iter(lane.values())))):
            yield (group, op, place), {rank: calls[place] for rank, calls in lane.items()}
        return
    steps = set.intersection(*(set(c) for c in counts.values())) - {None}
    if steps and all(len({c[s] for c in counts.values()}) == 1 for s in steps):
        kept = {rank: [c for c in calls if c.step in steps] for rank, calls in lane.items()}
        for place in range(len(next(iter(kept.values())))):
            yield (group, op, place), {rank: calls[place] for rank, calls in kept.items()}
        return
    yield from (((group, op, place), row) for place, row in enumerate(_shifted(lane)))


def _shifted(lane: Lane) -> list[dict[int, Entry]]:
    """Calls of ranks whose recordings begin or end at different calls: the shift that agrees best with the longest."""
    first = max(lane, key=lambda r: len(lane[r]))
    rows: list[dict[int, Entry]] = [{first: c} for c in lane[first]]
    for rank, calls in lane.items():
        if rank == first:
            continue
        spare = len(rows) - len(calls)
        low, high = -MAX_SHIFT, min(MAX_SHIFT, spare + MAX_SHIFT)
        best = min(range(low, high + 1), key=lambda s: (_disagreement(lane[first], calls, s), abs(s)))
        for place, call in enumerate(calls):
            if 0 <= place + best < len(rows):
                rows[place + best][rank] = call
    return rows


def _disagreement(long: Sequence[Entry], short: Sequence[Entry], shift: int) -> float:
    """How badly two orders of calls fit at a shift: wrong sizes, then how unevenly their ends lie apart."""
    pairs = [(long[i + shift], c) for i, c in enumerate(short[:MAX_COMPARED]) if 0 <= i + shift < len(long)]
    if not pairs:
        return float("inf")
    wrong = sum(1 for a, b in pairs if a.payload_bytes != b.payload_bytes)
    apart = [(a.ended_ns or 0) - (b.ended_ns or 0) for a, b in pairs]
    middle = median(apart)
    spread = median(abs(d - middle) for d in apart)
    return wrong / len(pairs) * 1e12 + spread + 1e3 * (min(len(short), MAX_COMPARED) - len(pairs))


def _hand_offs(tracks: Sequence[Track]) -> list[Row]:
    """Sends with their receives, by pair of ranks in the order of issue; only where the peers are known."""
    sent: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    got: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    for track in tracks:
        for call in track.calls:
            peer = call.peer
            if call.op == "send" and peer is not None:
                sent[track.rank, peer].append(call)
            elif call.op == "recv" and peer is not None:
                got[peer, track.rank].append(call)
    rows: list[Row] = []
    for pair, calls in sent.items():
        for place, (send, recv) in enumerate(zip(calls, got.get(pair, ()), strict=False)):
            rows.append(((f"{pair[0]}->{pair[1]}", "send", place), {pair[0]: send, pair[1]: recv}))
    return rows or _by_time(tracks)


def _by_time(tracks: Sequence[Track]) -> list[Row]:
    """Hand-offs whose peers are not recorded (gloo), on one clock: to every receive the send of equal bytes on another
    rank that began last before its end."""
    sends = [(c.started_ns or 0, t.rank, c) for t in tracks for c in t.calls if c.op == "send"]
    receives = [(c.ended_ns or 0, t.rank, c) for t in tracks for c in t.calls if c.op == "recv"]
    sends.sort(key=lambda s: s[0])
    begins = [s[0] for s in sends]
    used: set[int] = set()
    rows: list[Row] = []
    for end, rank, recv in sorted(receives, key=lambda r: r[0]):
        last = bisect_right(begins, end) - 1
        for place in range(last, max(-1, last - MAX_SHIFT), -1):
            _, other, send = sends[place]
            if place not in used and other != rank and send.payload_bytes == recv.payload_bytes:
                used.add(place)
                rows.append(((f"{other}->{rank}", "send", place), {other: send, rank: recv}))
                break
    return rows


def offsets(rows: Sequence[Mapping[int, Entry]]) -> dict[int, int]:
    """What to add to each rank's times so that calls end together: the median over calls of the way to their middle.

    Ranks whose ends lie within the scatter of their own differences keep their clock.
    """
    apart: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        ends = {r: c.ended_ns for r, c in row.items() if c.ended_ns is not None}
        if len(ends) < 2:
            continue
        middle = int(median(ends.values()))
        for rank, end in ends.items():
            apart[rank].append(middle - end)
    found = {}
    for rank, ways in apart.items():
        way = int(median(ways))
        scatter = median(abs(w - way) for w in ways)
        found[rank] = way if abs(way) > 3 * scatter else 0
    return found


def _meeting(
    group: str | None, op: str, place: int, calls: Mapping[int, Entry], shift: Mapping[int, int]
) -> Meeting | None:
    """The calls as one meeting; None where they cannot have been one (some ended before others began)."""
    start = {r: (c.started_ns or 0) + shift[r] for r, c in calls.items()}
    end = {r: (c.ended_ns or 0) + shift[r] for r, c in calls.items()}
    longest = max(end[r] - start[r] for r in calls)
    apart = max(start.values()) - min(end.values())
    if op in TOGETHER and apart > max(1_000_000, longest):
        return None
    step = Counter(c.step for c in calls.values()).most_common(1)[0][0]
    return Meeting(group, op, place, step, calls, start, end, max(start.values()))

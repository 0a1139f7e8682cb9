"""Who waits for whom when a job stands still: pending calls of all ranks, groups and back ends in one graph.

A rank waits in a call for the members that have not issued it. Ranks that others wait for and that wait for nobody
themselves are roots; ranks that wait for each other are a cycle. A hand-off waits for its other side only.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from meshwright.ledger.lanes import COMPLETED, SCHEDULED, STARTED, UNKNOWN, Lanes, Rows

#: Operations that one side may complete before the others come.
ONE_SIDED = frozenset({"broadcast", "reduce", "gather", "scatter", "send", "coalesced"})


@dataclass(frozen=True, slots=True)
class Pending:
    """A call that a rank issued and that has not completed.

    Attributes:
        rank, row: whose, and where in its columns.
        group, seq, p2p: which call.
        missing: ranks that it waits for: members that have not issued it.
        absent: members of which nobody knows, because they left no record.
        completed_by: members that completed it.
    """

    rank: int
    row: int
    group: int
    seq: int
    p2p: bool
    missing: tuple[int, ...]
    absent: tuple[int, ...]
    completed_by: tuple[int, ...]


@dataclass(slots=True)
class Stall:
    """The state of all ranks.

    Attributes:
        pending: calls that have not completed, by rank, in the order of issue.
        awaited: calls that others wait in, by the rank that they wait for.
        roots: ranks that are waited for and wait for nobody.
        cycles: ranks that wait for each other and for nobody else.
        stale: ranks whose dump was written before the others went on.
        issued: last collective that a rank issued, by group and rank; None unknown.
    """

    pending: dict[int, list[Pending]] = field(default_factory=dict)
    awaited: dict[int, list[Pending]] = field(default_factory=dict)
    roots: tuple[int, ...] = ()
    cycles: tuple[tuple[int, ...], ...] = ()
    stale: tuple[int, ...] = ()
    issued: dict[int, dict[int, int | None]] = field(default_factory=dict)
    completed: dict[int, dict[int, int]] = field(default_factory=dict)


class _Work:
    """Builds a ``Stall``."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes, self.ranks, self.kinds = lanes, lanes.ranks, lanes.kinds
        self.out = Stall()
        self.partners: dict[tuple[int, int], set[int]] = {}
        self.last_p2p: dict[tuple[int, int], int] = {}
        self.p2p_rows: dict[tuple[int, int, str, int], array[int]] = {}
        self.p2p_keys: dict[tuple[int, int], list[tuple[str, int]]] = {}
        self._absence: dict[tuple[int, int, bool], tuple[tuple[int, ...], ...]] = {}
        self._lasts: dict[int, dict[int, int | None]] = {}
        self.users: dict[int, list[int]] = {}
        for rank, rows in self.ranks.items():
            for group in {*rows.group, *rows.status}:
                self.users.setdefault(group, []).append(rank)
        self._index_hand_offs()
        self.mixed = {g for g, _ in self.last_p2p} & set(lanes.of)
        self.hand_off_only = {g for g, _ in self.last_p2p} - self.mixed
        self._counters()

    def _index_hand_offs(self) -> None:
        for rank, rows in self.ranks.items():
            if 1 not in rows.p2p:
                continue
            for row, (group, number, flag) in enumerate(zip(rows.group, rows.signature, rows.p2p, strict=True)):
                if not flag:
                    continue
                kind, key = self.kinds[number], (group, rank)
                self.last_p2p[key] = max(self.last_p2p.get(key, -1), rows.seq[row])
                if kind.peer is not None:
                    self.partners.setdefault(key, set()).add(kind.peer)
                    self.p2p_rows.setdefault((group, rank, kind.op, kind.peer), array("i")).append(row)
        for group, rank, op, peer in self.p2p_rows:
            self.p2p_keys.setdefault((group, rank), []).append((op, peer))

    def _counts_hand_offs(self, rows: Rows, group: int) -> bool | None:
        """Whether a rank's counter of a group counts hand-offs; None where that cannot be told."""
        for row in range(len(rows.seq) - 1, -1, -1):
            if rows.group[row] == group:
                return bool(rows.p2p[row])
        if group in self.mixed:
            return None
        return group in self.hand_off_only

    def _counters(self) -> None:
        for group, ranks in self.users.items():
            issued = self.out.issued.setdefault(group, {})
            completed = self.out.completed.setdefault(group, {})
            for rank in ranks:
                rows, lane = self.ranks[rank], self.lanes.of.get(group, {}).get(rank)
                counter = rows.status.get(group)
                hand_offs = self._counts_hand_offs(rows, group) if counter is not None else None
                last = lane.end - 1 if lane is not None else None
                if counter is not None and hand_offs is False:
                    # gloo counts hand-offs with the collectives, and records none: its rows tell, where there are any
                    counted = counter.enqueued if rows.settled or lane is None else None
                    found = [n for n in (last, counted) if n is not None]
                    last = max(found, default=None)
                    if counter.completed is not None and rows.settled:
                        completed[rank] = counter.completed
                elif counter is not None and hand_offs and counter.enqueued is not None:
                    self.last_p2p[group, rank] = max(self.last_p2p.get((group, rank), -1), counter.enqueued)
                issued[rank] = last if last is not None else self._never(rank)
        reached: dict[tuple[int, ...], dict[int, int]] = {}
        for rank, rows in self.ranks.items():
            if not rows.settled:
                continue
            key = tuple(map(id, (rows.group, rows.state, rows.seq, rows.p2p)))  # columns that ranks share are one
            own = reached.get(key)
            if own is None:
                own = reached[key] = self._last_completed(rows)
            for group, seq in own.items():
                held = self.out.completed[group]
                held[rank] = max(seq, held.get(rank, -1))

    def _never(self, rank: int) -> int | None:
        """0 where a rank's rows are whole and none is of a group, so that it never issued one there; else None."""
        rows = self.ranks.get(rank)
        return 0 if rows is not None and len(rows.record) and not rows.active_only and self._whole(rows) else None

    @staticmethod
    def _last_completed(rows: Rows) -> dict[int, int]:
        """Last collective that a rank completed, by group, from the end of its rows."""
        out: dict[int, int] = {}
        left = set(rows.group)
        group, state, p2p = rows.group, rows.state, rows.p2p
        for row in range(len(state) - 1, -1, -1):
            if state[row] == COMPLETED and group[row] in left and not p2p[row]:
                out[group[row]] = rows.seq[row]
                left.discard(group[row])
                if not left:
                    break
        return out

    def find_stale(self) -> None:
        """Dumps that end before a call which others completed although it needs everyone."""
        stale = set()
        for group, completed in self.out.completed.items():
            reach = max((n for n in completed.values()), default=-1)
            for rank, last in self.out.issued[group].items():
                lane = self.lanes.of.get(group, {})
                if last is None or last >= reach or rank not in self.lanes.members[group]:
                    continue
                if not self._one_sided(group, last + 1, lane) and self._is_gloo_free(group):
                    stale.add(rank)
        self.out.stale = tuple(sorted(stale))

    def _is_gloo_free(self, group: int) -> bool:
        """Whether completion is real: a recorder of gloo takes a failed call for a completed one."""
        return all(getattr(self.ranks[r], "backend", "") == "nccl" for r in self.users[group])

    def _one_sided(self, group: int, seq: int, lanes: object) -> bool:
        for lane in self.lanes.of.get(group, {}).values():
            if lane.first <= seq < lane.end:
                number = memoryview(lane.kinds).cast("i")[seq - lane.first]
                return self.kinds[number].op in ONE_SIDED
        return True

    def _absent(self, group: int, seq: int) -> tuple[tuple[int, ...], ...]:
        """Members that miss a collective, members of which nothing is known, members that completed it."""
        key = (group, seq, False)
        if key not in self._absence:
            issued, completed = self.out.issued[group], self.out.completed[group]
            members = self.lanes.members[group] or tuple(sorted(issued))
            stale = set(self.out.stale)
            last = self._lasts.get(group)
            if last is None:
                last = self._lasts[group] = {
                    m: None if m in stale else issued[m] if m in issued else self._never(m) for m in members
                }
            unknown = tuple(m for m, n in last.items() if n is None)
            lacking = tuple(m for m, n in last.items() if n is not None and n < seq)
            done = tuple(m for m in members if m not in stale and completed.get(m, -1) >= seq)
            self._absence[key] = (lacking, unknown, done)
        return self._absence[key]

    def _other_side(self, rank: int, row: int, ordinal: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Whom a hand-off waits for: (the other side,) if it has not come, else (); second: nobody knows."""
        rows = self.ranks[rank]
        group, kind, members = rows.group[row], self.kinds[rows.signature[row]], self.lanes.members[rows.group[row]]
        if kind.peer is None or kind.peer >= len(members) or rank not in members:
            return (), ()
        peer = members[kind.peer]
        if peer not in self.ranks or peer in self.out.stale:
            return (), (peer,)
        place, op = members.index(rank), "recv" if kind.op == "send" else "send"
        only = self.partners.get((group, rank), set()) <= {kind.peer}
        if len(members) == 2 or (only and self.partners.get((group, peer), {place}) <= {place}):
            reach = self.last_p2p.get((group, peer))
            if reach is not None:
                came = reach >= rows.seq[row] and self._complements(peer, group, rows.seq[row], op)
                return (() if came else (peer,)), ()
        other = self.ranks[peer]
        theirs = self.p2p_rows.get((group, peer, op, place), array("i"))
        if not other.active_only and not rows.active_only and self._whole(rows) and self._whole(other):
            mine = self.p2p_rows[group, rank, kind.op, kind.peer]
            return (() if mine.index(row) < len(theirs) else (peer,)), ()
        waiting = sum(1 for r in theirs if other.state[r] not in (COMPLETED, UNKNOWN))
        return (() if ordinal < waiting else (peer,)), ()

    def _complements(self, peer: int, group: int, seq: int, op: str) -> bool:
        """Whether the other side's hand-off of this number is the matching one, as far as it is recorded."""
        rows, found = self.ranks[peer], False
        for kind, place in self.p2p_keys.get((group, peer), ()):
            if any(rows.seq[i] == seq for i in reversed(self.p2p_rows[group, peer, kind, place])):
                found = True
                if kind == op:
                    return True
        return not found

    @staticmethod
    def _whole(rows: Rows) -> bool:
        return not len(rows.record) or rows.record[0] == 0

    def _open_rows(self, rank: int) -> Iterator[int]:
        """Rows that have not completed; of recorders that take failure for completion also what cannot have."""
        rows = self.ranks[rank]
        doubtful = getattr(rows, "backend", "") != "nccl"
        if not doubtful:
            if SCHEDULED in rows.state or STARTED in rows.state:
                yield from [row for row, state in enumerate(rows.state) if state not in (COMPLETED, UNKNOWN)]
            return
        for row, state in enumerate(rows.state):
            undone = state not in (COMPLETED, UNKNOWN)
            checked = not undone and not rows.p2p[row] and self._is_collective(rows, row)
            if undone or (checked and self._absent_of(rows, row)):
                yield row

    def _is_collective(self, rows: Rows, row: int) -> bool:
        return self.kinds[rows.signature[row]].op not in ONE_SIDED

    def _absent_of(self, rows: Rows, row: int) -> tuple[int, ...]:
        return self._absent(rows.group[row], rows.seq[row])[0]

    def find_pending(self) -> None:
        for rank in sorted(self.ranks):
            if rank in self.out.stale:
                continue
            rows, found = self.ranks[rank], []
            ordinals: dict[tuple[int, int], int] = {}
            for row in self._open_rows(rank):
                group, seq, p2p = rows.group[row], rows.seq[row], bool(rows.p2p[row])
                if p2p:
                    if self.kinds[rows.signature[row]].op == "coalesced":
                        continue
                    key = (group, rows.signature[row])
                    ordinal = ordinals[key] = ordinals.get(key, -1) + 1
                    lacking, unknown = self._other_side(rank, row, ordinal)
                    done: tuple[int, ...] = ()
                else:
                    lacking, unknown, done = self._absent(group, seq)
                found.append(Pending(rank, row, group, seq, p2p, lacking, unknown, done))
            if found:
                self.out.pending[rank] = found
                for call in found:
                    for other in call.missing:
                        self.out.awaited.setdefault(other, []).append(call)

    def find_roots(self) -> None:
        edges = {
            r: tuple(sorted({m for c in calls for m in c.missing if m != r})) for r, calls in self.out.pending.items()
        }
        parts = components(edges)
        home = {rank: n for n, part in enumerate(parts) for rank in part}
        leaves = [part for n, part in enumerate(parts) if not any(home[m] != n for r in part for m in edges.get(r, ()))]
        self.out.roots = tuple(sorted(p[0] for p in leaves if len(p) == 1 and p[0] in self.out.awaited))
        self.out.cycles = tuple(sorted(tuple(sorted(p)) for p in leaves if len(p) > 1))


def components(edges: dict[int, tuple[int, ...]]) -> list[list[int]]:
    """Strongly connected components (Tarjan), iteratively; nodes without edges included."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    held: set[int] = set()
    stack: list[int] = []
    out: list[list[int]] = []
    for start in sorted({*edges, *(m for to in edges.values() for m in to)}):
        if start in index:
            continue
        work = [(start, iter(edges.get(start, ())))]
        index[start] = low[start] = len(index)
        stack.append(start)
        held.add(start)
        while work:
            node, targets = work[-1]
            for target in targets:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    held.add(target)
                    work.append((target, iter(edges.get(target, ()))))
                    break
                if target in held:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    part = []
                    while True:
                        last = stack.pop()
                        held.discard(last)
                        part.append(last)
                        if last == node:
                            break
                    out.append(part)
    return out


def stall(lanes: Lanes) -> Stall:
    """State of all ranks."""
    work = _Work(lanes)
    work.find_stale()
    work.find_pending()
    work.find_roots()
    return work.out


def passed_by_all(state: Stall, lanes: Lanes, group: int, seq: int) -> bool:
    """Whether every member that is known completed a call; recorders of gloo take a failed call for a completed one."""
    completed = state.completed.get(group, {})
    ranks = lanes.of.get(group, {})
    sound = all(getattr(lanes.ranks[rank], "backend", "") == "nccl" for rank in ranks)
    return bool(ranks) and sound and all(completed.get(rank, -1) >= seq for rank in ranks)

"""Who waits for whom: calls of all ranks matched as they come, and the ranks that nothing can free any more.

Collectives match first in, first out by (group, rank); hand-offs by (group, source, destination, tag), because that is
how NCCL and gloo pair them. Calls are compared as soon as two members have posted, so a mistake is known before the
last one comes.

Waiting is a graph with AND nodes (a collective needs every member, a wait all of its operations) and OR nodes (receive
from anyone; a rank with several threads). Ranks that no sequence of other ranks' progress can free are stuck; a cycle
among them is named where there is one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

from meshwright.ledger.matching import HAND_OFFS, Call, disagreement, majority

#: How a rank left: it ended, raised, was killed, or was stopped by us (which never counts against it).
How = Literal["finished", "raised", "killed", "stopped"]


@dataclass(slots=True, eq=False)
class Ticket:
    """One posted call, its order within (group, rank) and whether its peers have come."""

    call: Call
    seq: int
    matched: bool = False


@dataclass(slots=True)
class _Group:
    members: tuple[int, ...]
    heads: dict[int, deque[Ticket]]
    done: int = 0
    posted: dict[int, int] = field(default_factory=dict)
    broken: bool = False
    shift: tuple[Call, ...] = ()


@dataclass(slots=True)
class _Wait:
    tickets: list[Ticket]

    def open(self) -> list[Ticket]:
        return [t for t in self.tickets if not t.matched]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong.

    Attributes:
        kind: a kind of ``disagreement``; ``deadlock`` (a cycle); ``peer_left`` (ranks wait for one that ended);
            ``peer_failed`` (for one that raised or was killed); ``stuck`` (none of these, yet nothing can go on).
        group: where (of the first call).
        guilty: ranks that differ from the majority, or that left; all of the cycle; () where there is no majority.
        calls: what every rank concerned is at, by rank.
        cycle: ranks that wait for one another, each for the next.
        left: (rank, how, why) of ranks that are waited for and have left.
        shift: calls of the first collective of this group that came from different lines; a clue, legal by itself.
        counts: (rank, collectives entered in this group).
    """

    kind: str
    group: str
    guilty: tuple[int, ...]
    calls: tuple[Call, ...]
    cycle: tuple[int, ...] = ()
    left: tuple[tuple[int, How, str], ...] = ()
    shift: tuple[Call, ...] = ()
    counts: tuple[tuple[int, int], ...] = ()


class Matcher:
    """Matches the calls of ``world`` ranks as they come.

    Args:
        world: number of ranks.
        ignore_tags: pair hand-offs as NCCL does, which knows no tags.
    """

    def __init__(self, world: int, *, ignore_tags: bool = False) -> None:
        self.world = world
        self.ignore_tags = ignore_tags
        self.matched = 0
        self._groups: dict[str, _Group] = {}
        self._sends: dict[tuple[object, ...], deque[Ticket]] = {}
        self._recvs: dict[tuple[object, ...], deque[Ticket]] = {}
        self._waits: dict[int, dict[int, _Wait]] = {r: {} for r in range(world)}
        self._left: dict[int, tuple[How, str]] = {}
        self._wrong: tuple[str, tuple[Call, ...]] | None = None

    def post(self, call: Call) -> Ticket:
        """Enter a call; ``ticket.matched`` tells whether all of its peers have come."""
        if call.op in HAND_OFFS:
            return self._post_hand_off(call)
        group = self._groups.get(call.group)
        if group is None:
            members = call.members or tuple(range(self.world))
            group = self._groups[call.group] = _Group(members, {r: deque() for r in members})
        seq = group.posted.get(call.rank, 0)
        group.posted[call.rank] = seq + 1
        ticket = Ticket(call, seq)
        queue = group.heads.setdefault(call.rank, deque())
        queue.append(ticket)
        if len(queue) == 1:
            self._advance(call.group, group, call.rank)
        return ticket

    def wait(self, rank: int, tickets: Iterable[Ticket], *, thread: int = 0) -> bool:
        """A thread of a rank goes on only when all tickets are matched; returns whether they are."""
        held = _Wait(list(tickets))
        self._waits[rank][thread] = held
        return not held.open()

    def release(self, rank: int, thread: int = 0) -> None:
        """Let a thread of a rank go on although its operation is not matched yet."""
        self._waits[rank][thread] = _Wait([])

    def thread_ended(self, rank: int, thread: int) -> None:
        """A thread of a rank is gone; it frees nobody any more."""
        self._waits[rank].pop(thread, None)

    def exited(self, rank: int, how: How, why: str = "") -> None:
        """A rank is gone."""
        self._left[rank] = (how, why)

    @property
    def wrong(self) -> bool:
        """Whether two calls disagree."""
        return self._wrong is not None

    def waiting(self) -> dict[int, tuple[Call, ...]]:
        """What every rank that waits is waiting in."""
        found = {r: [t.call for w in waits.values() for t in w.open()] for r, waits in self._waits.items()}
        return {r: tuple(calls) for r, calls in found.items() if calls}

    def quiet(self) -> bool:
        """Whether every rank has left or waits with all of its threads."""
        return all(r in self._left or self._blocked(r) for r in range(self.world))

    def verdict(self) -> Verdict | None:
        """What is wrong by now: a disagreement, or ranks that nothing can free."""
        if self._wrong is not None:
            return self._mismatch(*self._wrong)
        return self._stuck()

    def shifts(self) -> list[tuple[Call, ...]]:
        """For every group the calls of its first collective that ranks came to from different lines."""
        return [g.shift for g in self._groups.values() if g.shift]

    def leftovers(self) -> list[Call]:
        """Calls that were never matched, of ranks that are gone."""
        queues: list[Iterable[Ticket]] = [*self._sends.values(), *self._recvs.values()]
        queues += [q for g in self._groups.values() for q in g.heads.values()]
        return [t.call for q in queues for t in q if t.call.rank in self._left]

    def _post_hand_off(self, call: Call) -> Ticket:
        ticket, tag = Ticket(call, 0), None if self.ignore_tags else call.tag
        key: tuple[object, ...]
        if call.op == "send":
            key = (call.group, call.rank, call.peer, tag)
            other = self._pop(self._recvs, key) or self._pop(self._recvs, (call.group, None, call.peer, tag))
            mine = self._sends
        else:
            key = (call.group, call.peer, call.rank, tag)
            keys = [key] if call.peer is not None else [k for k in self._sends if (k[0], *k[2:]) == (key[0], *key[2:])]
            other = next((found for k in keys if (found := self._pop(self._sends, k))), None)
            mine = self._recvs
        if other is None:
            mine.setdefault(key, deque()).append(ticket)
            return ticket
        kind = disagreement(other.call, call)
        if kind is not None:
            self._wrong = self._wrong or (kind, (other.call, call))
            return ticket
        ticket.matched = other.matched = True
        self.matched += 1
        return ticket

    @staticmethod
    def _pop(table: dict[tuple[object, ...], deque[Ticket]], key: tuple[object, ...]) -> Ticket | None:
        queue = table.get(key)
        return queue.popleft() if queue else None

    def _advance(self, name: str, group: _Group, rank: int) -> None:
        """Compare the new head of a rank with those of others; take off what all members have posted."""
        fresh = [rank]
        while not group.broken and fresh:
            for new in fresh:
                if not self._compare(name, group, new):
                    return
            if not all(group.heads[m] for m in group.members):
                return
            tickets = [group.heads[m].popleft() for m in group.members]
            for ticket in tickets:
                ticket.matched = True
            group.done += 1
            self.matched += 1
            if not group.shift and len({t.call.call_site for t in tickets} - {None}) > 1:
                group.shift = tuple(t.call for t in tickets)
            fresh = [m for m in group.members if group.heads[m]]

    def _compare(self, name: str, group: _Group, rank: int) -> bool:
        new = group.heads[rank][0].call
        others = (q[0].call for r, q in group.heads.items() if r != rank and q)
        for other in others:
            kind = disagreement(other, new)
            if kind is not None:
                group.broken = True
                self._wrong = self._wrong or (kind, (other, new))
                return False
            if new.op != "all_to_all":
                return True
        return True

    def _blocked(self, rank: int) -> bool:
        waits = self._waits[rank]
        return bool(waits) and all(w.open() for w in waits.values())

    def _needs(self, ticket: Ticket) -> tuple[set[int], bool]:
        """Ranks that must act before the ticket is matched, and whether all of them must."""
        call = ticket.call
        if call.op in HAND_OFFS:
            return ({call.peer}, True) if call.peer is not None else (set(call.members) - {call.rank}, False)
        group = self._groups[call.group]
        return {m for m in group.members if group.posted.get(m, 0) <= ticket.seq}, True

    def _live(self) -> set[int]:
        """Ranks that run, were stopped by us, or can be freed by ranks that are live."""
        live = {r for r in range(self.world) if r not in self._left and not self._blocked(r)}
        live |= {r for r, (how, _) in self._left.items() if how == "stopped"}
        rest = [r for r in range(self.world) if r not in live and r not in self._left]
        needs = {r: [[self._needs(t) for t in w.open()] for w in self._waits[r].values()] for r in rest}
        grown = True
        while grown:
            grown = False
            for r in rest:
                if r not in live and any(all(_met(n, live) for n in wait) for wait in needs[r]):
                    live.add(r)
                    grown = True
        return live

    def _stuck(self) -> Verdict | None:
        live = self._live()
        dead = [r for r in range(self.world) if r not in live and r not in self._left]
        if not dead:
            return None
        held = {r: [t for w in self._waits[r].values() for t in w.open()] for r in dead}
        edges = {r: {p for t in tickets for p in self._needs(t)[0] if p not in live} for r, tickets in held.items()}
        cycle = _cycle({r: sorted(p for p in to if p in held) for r, to in edges.items()})
        gone = sorted({p for to in edges.values() for p in to if p in self._left})
        failed = [p for p in gone if self._left[p][0] != "finished"]
        kind = "peer_failed" if failed else "deadlock" if cycle else "peer_left" if gone else "stuck"
        guilty = tuple(failed or cycle or gone)
        calls = tuple(t.call for r in dead for t in held[r])
        at = next((c for c in calls if c.rank in guilty), calls[0])
        if kind == "peer_left":
            at = next(t.call for r in dead for t in held[r] if self._needs(t)[0] & set(gone))
        left = tuple((p, *self._left[p]) for p in (failed or gone))
        if kind == "peer_left" and len({c.rank for c in calls if c.group == at.group}) < len(gone):
            guilty = tuple(sorted({c.rank for c in calls if c.group == at.group}))
        return self._finish(kind, at.group, guilty, calls, cycle if kind == "deadlock" else (), left)

    def _mismatch(self, kind: str, pair: tuple[Call, ...]) -> Verdict:
        calls: tuple[Call, ...] = pair
        group = self._groups.get(pair[0].group)
        if pair[0].op not in HAND_OFFS and group is not None:
            calls = tuple(group.heads[m][0].call for m in group.members if group.heads[m])
        classes, found = majority(calls)
        lead = len(classes) > 1 and len(classes[0]) > len(classes[1])
        guilty = tuple(sorted(c.rank for rest in classes[1:] for c in rest)) if lead else ()
        if kind == "wrong_splits":
            guilty = _in_every_pair(calls)
        return self._finish(found or kind, pair[0].group, guilty, calls, (), ())

    def _finish(
        self,
        kind: str,
        name: str,
        guilty: tuple[int, ...],
        calls: tuple[Call, ...],
        cycle: tuple[int, ...],
        left: tuple[tuple[int, How, str], ...],
    ) -> Verdict:
        group = self._groups.get(name)
        counts = tuple((m, group.posted.get(m, 0)) for m in group.members) if group is not None else ()
        return Verdict(kind, name, guilty, calls, cycle, left, group.shift if group is not None else (), counts)


def _in_every_pair(calls: Sequence[Call]) -> tuple[int, ...]:
    """Splits disagree in pairs: the rank that is in all of them, or both of the only pair; () if neither."""
    pairs = [{a.rank, b.rank} for a, b in combinations(calls, 2) if disagreement(a, b)]
    return tuple(sorted(set.intersection(*pairs))) if pairs else ()


def _met(need: tuple[set[int], bool], live: set[int]) -> bool:
    ranks, every = need
    return ranks <= live if every else bool(ranks & live)


def _cycle(edges: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """The first cycle that is met by going from every node in order; () if there is none."""
    done: set[int] = set()
    for start in edges:
        path: list[int] = []
        steps: list[Iterator[int]] = []
        if start not in done:
            path, steps = [start], [iter(edges[start])]
        while steps:
            step = next(steps[-1], None)
            if step is None:
                done.add(path.pop())
                steps.pop()
            elif step in path:
                return tuple(path[path.index(step) :])
            elif step not in done:
                path.append(step)
                steps.append(iter(edges[step]))
    return ()

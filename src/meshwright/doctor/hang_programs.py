"""Holds the whole order of calls of one rank, over all groups, against that of its peers.

A call of equal shape that a rank skips leaves no trace within its group when stacks are not recorded. How calls of
different groups follow each other still tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from meshwright.doctor.incident import Trace
from meshwright.doctor.view import View
from meshwright.ledger.check import fit_of

#: Rows of a rank that are compared, the last ones.
WINDOW = 4000
MAX_PEERS = 16
LOOK_AHEAD = 64
#: With fewer peers in the group, ranks of other groups are asked as well.
FEW_PEERS = 3


@dataclass(frozen=True, slots=True)
class Deviation:
    """Calls too few, too many or in another order on a rank; ``found_stack`` is where its own call came from."""

    kind: str
    rank: int
    peers: tuple[int, ...]
    group: int
    seq: int
    signature: int
    stack: int
    matched: int
    count: int
    found_stack: int
    confidence: str


def _axis(view: View, group: int, rank: int) -> tuple[object, ...]:
    """A group by its role, equal on ranks that run the same program: description or size and spacing."""
    held = view.incident.groups[group]
    members = held.members
    if held.desc and held.desc != "undefined":
        return held.desc, len(members)
    spacing = members[1] - members[0] if len(members) > 1 else 0
    return len(members), spacing


def _keys(view: View, trace: Trace) -> list[tuple[object, ...]]:
    axes = {g: _axis(view, g, trace.rank) for g in set(trace.group)}
    numbers = view.lanes.numbers
    start = max(0, len(trace) - WINDOW)
    rows = zip(trace.group[start:], trace.signature[start:], trace.p2p[start:], strict=True)
    ops = view.incident.signatures
    return [(axes[g], ops[s].op) if p else (axes[g], numbers[s]) for g, s, p in rows]


def _anchor(view: View, trace: Trace, peer: Trace) -> tuple[int, int] | None:
    """First rows of both, within the window, that are the same collective of a group they share."""
    starts = max(0, len(trace) - WINDOW), max(0, len(peer) - WINDOW)
    places = {
        (g, s): i
        for i, (g, s, p) in enumerate(zip(peer.group, peer.seq, peer.p2p, strict=True))
        if not p and i >= starts[1]
    }
    for row in range(starts[0], len(trace)):
        place = places.get((trace.group[row], trace.seq[row]))
        if place is not None and not trace.p2p[row]:
            return row - starts[0], place - starts[1]
    return None


@dataclass(frozen=True, slots=True)
class _Found:
    """What one peer shows: kind, count, row on the rank that has the call in question, matched calls behind."""

    kind: str
    count: int
    row: int
    on_peer: bool
    matched: int
    mine: int
    usual: bool


def _usual(keys: list[tuple[object, ...]], at: int, histories: list[list[tuple[object, ...]]]) -> bool:
    """Whether what ends at a place came before in the same order, in any of the histories."""
    piece = keys[max(0, at - 3) : at + 1]
    size = len(piece)
    return any(piece == h[i : i + size] for h in histories for i in range(min(at, len(h)) - size))


def _against(view: View, trace: Trace, peer: Trace) -> _Found | None:
    anchor = _anchor(view, trace, peer)
    if anchor is None:
        return None
    mine, theirs = _keys(view, trace)[anchor[0] :], _keys(view, peer)[anchor[1] :]
    at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
    if at is None:
        return None
    here, there = (at + a + max(0, len(t) - WINDOW) for a, t in ((anchor[0], trace), (anchor[1], peer)))
    usual = _usual(mine, at, [mine[:at], theirs[:at]]) and not _usual(theirs, at, [mine[:at], theirs[:at]])
    a, b = mine[at:], theirs[at:]
    if len(a) > 2 and len(b) > 2 and a[:2] == b[1::-1] and a[0][0] != a[1][0]:
        rest = min(len(a), len(b), 2 + LOOK_AHEAD)
        if a[2:rest] == b[2:rest]:
            return _Found("group_order", 1, here, False, rest - 2, here, usual)
    fit = fit_of(b, a)
    if fit is not None and fit.kind == "extra" and all(call in theirs[:at] for call in a[: fit.count]):
        skipped = fit_of(b, a, ("skipped",))  # of calls that all know, one is rather left out than made twice
        fit = skipped if skipped is not None and skipped.matched >= fit.matched - 1 else fit
    if fit is None or fit.kind == "other" or fit.matched < 2:
        return None
    if fit.kind == "skipped":
        return _Found("skipped_call", fit.count, there, True, fit.matched, here, usual)
    return _Found("extra_call", fit.count, here, False, fit.matched, here, usual)


def _peers(view: View, rank: int) -> list[int]:
    """Ranks to hold a rank against: those in the groups of its trouble, and others where these are few."""
    traces, stall = view.incident.traces, view.stall
    calls = [*stall.awaited.get(rank, ()), *stall.pending.get(rank, ())]
    groups = {c.group for c in calls}
    near = {m for g in groups for m in view.incident.groups[g].members if m != rank and m in traces}
    far = sorted(set(traces) - near - {rank}) if len(near) < FEW_PEERS else []
    return [*sorted(near)[:MAX_PEERS], *far[: max(0, MAX_PEERS - len(near))]]


def deviation(view: View, rank: int) -> Deviation | None:
    """How a rank's order of calls departs from that of most peers; None if not, or if the peers are the odd ones."""
    traces = view.incident.traces
    trace = traces[rank]
    if trace.active_only or not len(trace):
        return None
    peers = [p for p in _peers(view, rank) if not traces[p].active_only and _anchor(view, trace, traces[p]) is not None]
    by: dict[tuple[object, ...], list[tuple[int, _Found]]] = {}
    for peer in peers:
        found = _against(view, trace, traces[peer])
        if found is not None:
            of = traces[peer] if found.on_peer else trace
            axis = _axis(view, of.group[found.row], of.rank)
            by.setdefault((found.kind, axis, of.seq[found.row]), []).append((peer, found))
    if not by:
        return None
    _, rows = sorted(by.items(), key=lambda item: (-len(item[1]), str(item[0])))[0]
    alone = len(peers) == 1
    if len(rows) * 2 <= len(peers) or (alone and rows[0][1].usual):
        return None
    peer, found = rows[0]
    of = traces[peer] if found.on_peer else trace
    confidence = "high" if len(rows) >= 2 and found.matched >= 4 else "medium"
    return Deviation(
        found.kind,
        rank,
        tuple(p for p, _ in rows),
        of.group[found.row],
        of.seq[found.row],
        of.signature[found.row],
        of.stack[found.row],
        found.matched,
        found.count,
        trace.stack[found.mine],
        confidence,
    )


def departs(trace: Trace, row: int) -> bool:
    """Whether a call is not what followed the call before it whenever that was made earlier by the same rank."""
    first = max(0, row - WINDOW)
    keys = list(zip(trace.group[first : row + 1], trace.signature[first : row + 1], strict=True))
    earlier = {after for before, after in pairwise(keys[:-1]) if before == keys[-2]} if len(keys) > 1 else set()
    return bool(earlier) and keys[-1] not in earlier

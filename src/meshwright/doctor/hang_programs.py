"""Holds the whole order of calls of one rank, over all groups, against that of its peers.

A call of equal shape that a rank skips leaves no trace within its group when stacks are not recorded. How calls of
different groups follow each other still tells.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from meshwright.doctor.incident import Trace
from meshwright.doctor.view import View

#: Rows of a rank that are compared, the last ones.
WINDOW = 4000
LOOK_AHEAD = 64


@dataclass(frozen=True, slots=True)
class Deviation:
    """One call too few or too many of a rank against its peers."""

    kind: str
    rank: int
    peers: tuple[int, ...]
    group: int
    seq: int
    signature: int
    stack: int
    matched: int
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


def _against(view: View, trace: Trace, peer: Trace) -> tuple[str, int, int] | None:
    """Kind, row of the peer (skipped) or of the rank (extra) and calls that line up behind."""
    anchor = _anchor(view, trace, peer)
    if anchor is None:
        return None
    mine, theirs = _keys(view, trace)[anchor[0] :], _keys(view, peer)[anchor[1] :]
    at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
    if at is None:
        return None
    best: tuple[str, int, int] | None = None
    for kind, a, b, row in (
        ("skipped_call", mine[at:], theirs[at + 1 :], at + anchor[1] + max(0, len(peer) - WINDOW)),
        ("extra_call", mine[at + 1 :], theirs[at:], at + anchor[0] + max(0, len(trace) - WINDOW)),
    ):
        count = min(len(a), len(b), LOOK_AHEAD)
        matched = sum(x == y for x, y in zip(a[:count], b[:count], strict=True))
        if count >= 2 and matched == count and (best is None or matched > best[2]):
            best = (kind, row, matched)
    return best


def deviation(view: View, rank: int) -> Deviation | None:
    """How a rank's order of calls departs from that of most peers in the groups where it is missing; None if not."""
    traces, stall = view.incident.traces, view.stall
    trace = traces[rank]
    if trace.active_only or not len(trace):
        return None
    groups = {c.group for c in stall.awaited.get(rank, ())}
    peers = sorted({m for g in groups for m in view.incident.groups[g].members if m != rank and m in traces})
    votes: Counter[tuple[str, int, int]] = Counter()
    rows: dict[tuple[str, int, int], tuple[int, int, int]] = {}
    by: dict[tuple[str, int, int], list[int]] = {}
    for peer in peers[:16]:
        found = _against(view, trace, traces[peer])
        if found is None:
            continue
        kind, row, matched = found
        of = traces[peer] if kind == "skipped_call" else trace
        key = (kind, of.group[row], of.seq[row])
        votes[key] += 1
        rows[key] = (of.signature[row], of.stack[row], matched)
        by.setdefault(key, []).append(peer)
    if not votes:
        return None
    key, count = sorted(votes.items(), key=lambda item: (-item[1], item[0]))[0]
    if count * 2 <= min(len(peers), 16):
        return None
    signature, stack, matched = rows[key]
    confidence = "high" if count >= 2 and matched >= 4 else "medium"
    return Deviation(key[0], rank, tuple(by[key]), key[1], key[2], signature, stack, matched, confidence)

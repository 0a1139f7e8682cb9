"""Ranks that passed by a call that others wait in: they wait in a later one, or in one that only they entered.

A rank that issued a call which its peers issue *after* the one that they wait for has skipped it, or takes the two in
another order, or went down a branch of its own. Which of these is told by the lines that the calls come from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from meshwright.doctor.advice import ADVICE
from meshwright.doctor.findings import Finding, ranks_text
from meshwright.doctor.incident import Trace
from meshwright.doctor.view import View
from meshwright.ledger.stall import Pending

#: Words in a stack of code that one rank often runs alone.
ALONE = re.compile(r"save|checkpoint|ckpt|state_dict|export|push_to_hub|only_rank|is_main", re.IGNORECASE)
MAX_PEERS = 16


def call_name(view: View, call: Pending) -> str:
    """``all_reduce #59958 of default_pg``."""
    trace = view.incident.traces[call.rank]
    kind = view.incident.signatures[trace.signature[call.row]]
    return f"{kind.op} #{call.seq} of {view.label(call.group)}"


def created(view: View, call: Pending) -> float | None:
    """When a pending call was issued, Unix seconds."""
    at = view.incident.traces[call.rank].created_ns[call.row]
    return at / 1e9 if at else None


def since(view: View, calls: Iterable[Pending]) -> float | None:
    """When the first of these calls was issued."""
    times = [at for c in calls if (at := created(view, c)) is not None]
    return min(times) if times else None


def earliest(view: View, calls: Sequence[Pending]) -> Pending:
    """The call that was issued first, by any rank."""
    return min(calls, key=lambda c: (created(view, c) or 1e18, c.rank, c.row))


def _stack(view: View, call: Pending) -> int:
    return view.incident.traces[call.rank].stack[call.row]


def _signature(view: View, call: Pending) -> int:
    return view.incident.traces[call.rank].signature[call.row]


def _issued_after(view: View, rank: int, later: Pending, call: Pending) -> bool | None:
    """Whether a rank issued ``later`` after ``call``; True as well where it never came to ``later``; None unknown."""
    trace = view.incident.traces[rank]
    own = next((c.row for c in view.stall.pending.get(rank, ()) if (c.group, c.seq, c.p2p) == _key(call)), None)
    if own is None:
        return None
    if later.p2p:
        return None
    row = view.row_of(trace, later.group, later.seq)
    if row is not None:
        return row > own
    members = view.incident.groups[later.group].members
    return True if rank in members and not trace.active_only else None


def _key(call: Pending) -> tuple[int, int, bool]:
    return call.group, call.seq, call.p2p


def _rows_like(view: View, trace: Trace, call: Pending, with_stack: bool) -> bool:
    """Whether a rank made a call like this one: same role of the group, comparable call, and line where wanted."""
    numbers, want = view.lanes.numbers, view.lanes.numbers[_signature(view, call)]
    label, stack = view.label(call.group), _stack(view, call)
    labels = {g: view.label(g) == label for g in set(trace.group)}
    own = call.row if trace.rank == call.rank else -1
    rows = zip(trace.signature, trace.group, trace.stack, strict=True)
    return any(
        numbers[s] == want and labels[g] and (not with_stack or k == stack)
        for place, (s, g, k) in enumerate(rows)
        if place != own
    )


def _known(view: View, ranks: Sequence[int], call: Pending) -> bool:
    with_stack = _stack(view, call) >= 0
    traces = view.incident.traces
    return any(_rows_like(view, traces[r], call, with_stack) for r in ranks[:MAX_PEERS] if r in traces)


def crossings(view: View, roots: frozenset[int]) -> tuple[list[Finding], frozenset[int]]:
    """Findings about roots that wait in a call which their peers issue later, and the ranks that they cover."""
    stall = view.stall
    by_call: dict[tuple[int, int, bool], list[int]] = {}
    for rank in sorted(roots):
        own = stall.pending.get(rank)
        if not own or any(c.completed_by or c.absent for c in own):
            continue
        waited = earliest(view, stall.awaited[rank])
        if waited.p2p:
            continue
        votes = [_issued_after(view, c.rank, own[0], c) for c in stall.awaited[rank] if _key(c) == _key(waited)]
        if votes.count(True) > votes.count(False):
            by_call.setdefault(_key(waited), []).append(rank)
    out, handled = [], set()
    for key, odd in by_call.items():
        waiters = [c for r in sorted(stall.pending) for c in stall.pending[r] if _key(c) == key]
        out.append(_verdict(view, waiters, [stall.pending[r][0] for r in odd]))
        handled |= set(odd)
    return out, frozenset(handled)


def cycle_crossing(view: View, ranks: tuple[int, ...]) -> Finding | None:
    """The same for ranks that wait for each other; None where all of them wait in hand-offs."""
    inside = set(ranks)
    blocked = [next(c for c in view.stall.pending[r] if set(c.missing) & inside) for r in ranks]
    stopped = [c for c in blocked if _came_before(view, c, _collective_waiters(view, c.rank))]
    if stopped and len(stopped) < len(ranks):
        return _stopped(view, _collective_waiters(view, stopped[0].rank), stopped)
    classes: dict[tuple[int, int, bool], list[Pending]] = {}
    for call in blocked:
        if not call.p2p:
            classes.setdefault(_key(call), []).append(call)
    if not classes:
        return None
    key = min(classes, key=lambda k: (-len(classes[k]), since(view, classes[k]) or 1e18, k))
    odd = [c for c in blocked if _key(c) != key and c.rank in classes[key][0].missing]
    return _verdict(view, classes[key], odd) if odd else None


def _collective_waiters(view: View, rank: int) -> list[Pending]:
    """The first collective in which several ranks wait for a rank, as they have it."""
    by_call: dict[tuple[int, int, bool], list[Pending]] = {}
    for call in view.stall.awaited.get(rank, ()):
        if not call.p2p:
            by_call.setdefault(_key(call), []).append(call)
    several = [calls for calls in by_call.values() if len(calls) > 1]
    return min(several, key=lambda calls: (since(view, calls) or 1e18, calls[0].seq), default=[])


def _came_before(view: View, own: Pending, waiters: Sequence[Pending]) -> bool:
    """Whether the waiters issued the like of a hand-off before the call that they wait in: its rank did not pass by."""
    if not own.p2p:
        return False
    label, kind = view.label(own.group), view.incident.signatures[_signature(view, own)]
    votes = 0
    for call in waiters[:MAX_PEERS]:
        trace = view.incident.traces[call.rank]
        rows = [
            row
            for row in range(len(trace))
            if trace.p2p[row] and trace.seq[row] == own.seq and view.label(trace.group[row]) == label
        ]
        like = [r for r in rows if view.incident.signatures[trace.signature[r]].op == kind.op]
        votes += 1 if like and like[0] < call.row else -1
    return votes > 0


def _stopped(view: View, waiters: list[Pending], odd: list[Pending]) -> Finding:
    """Ranks that came as far as their peers' call before the one that these wait in, and not to that one."""
    ranks = tuple(sorted(c.rank for c in odd))
    who = ranks_text(ranks)
    return Finding(
        "host_stuck",
        ranks,
        view.waiting(ranks),
        None,
        since(view, waiters),
        "high" if len(waiters) > 1 else "medium",
        f"{who} never entered {call_name(view, waiters[0])}",
        (
            f"{ranks_text([c.rank for c in waiters])} wait for {who} in {call_name(view, waiters[0])}",
            f"the last call of {who}, {call_name(view, odd[0])}, is one that the others issue just before",
        ),
        (f"no stack of {who}: where it stands in the program is not known",),
        ADVICE["host_stuck"],
        None,
        view.label(waiters[0].group),
        waiters[0].seq,
        view.incident.signatures[_signature(view, waiters[0])].op,
    )


def _verdict(view: View, waiters: list[Pending], odd: list[Pending]) -> Finding:
    """``waiters`` are in one call; ``odd`` never issued it and are in later ones."""
    members = view.incident.groups[waiters[0].group].members
    extra = len(waiters) < len(odd)
    tie = len(waiters) == len(odd)
    if tie:
        vote = _axis_vote(view, waiters[0])
        known = _stack(view, waiters[0]) < 0 or _known(view, [c.rank for c in odd], waiters[0])
        extra = vote < 0 if vote else not known
    unsure = [m for m in members if m not in view.incident.traces]
    margin = abs(len(waiters) - len(odd)) > len(unsure)
    if extra:
        return _extra(view, waiters, odd, tie, margin)
    kind, sure = _kind(view, waiters, odd)
    call = odd[0] if kind in {"extra_call", "group_order"} else waiters[0]
    who = ranks_text([c.rank for c in odd])
    place = view.where(_stack(view, call))
    text = view.call_text(_signature(view, call))
    head = {
        "skipped_call": f"{who} skipped {text}{place}, call #{call.seq} of {view.label(call.group)}",
        "extra_call": f"{who} issued an extra {text}{place}, call #{call.seq} of {view.label(call.group)}",
        "group_order": f"{who} entered {call_name(view, odd[0])}{place} before {call_name(view, waiters[0])}",
    }[kind]
    other = {"skipped_call": "the two calls are taken in another order", "group_order": "the call was skipped"}
    confidence = "low" if not margin and not tie else "high" if sure and not tie else "medium"
    alternative = f"{ranks_text([c.rank for c in waiters])} issued an extra call" if tie else None
    return _made(view, kind, odd, waiters, call, confidence, head, alternative or (None if sure else other.get(kind)))


def _axis_vote(view: View, call: Pending) -> int:
    """Other groups of the same role: how many more of their ranks came as far as this call than did not."""
    label, size = view.label(call.group), len(view.incident.groups[call.group].members)
    vote = 0
    for group, issued in view.stall.issued.items():
        held = view.incident.groups[group]
        if group != call.group and held.label == label and len(held.members) == size:
            vote += sum(1 if last >= call.seq else -1 for last in issued.values() if last is not None)
    return vote


def _kind(view: View, waiters: list[Pending], odd: list[Pending]) -> tuple[str, bool]:
    """Skipped, extra or in another order; and whether lines tell it."""
    later, peers = odd[0], [c.rank for c in waiters]
    stack, awaited = _stack(view, later), _stack(view, waiters[0])
    if stack < 0:
        past = _rows_like(view, view.incident.traces[later.rank], waiters[0], False)
        return ("skipped_call" if past else "group_order"), False
    if _known(view, peers, later):
        if view.site(stack) == view.site(awaited) and later.group != waiters[0].group:
            return "group_order", False
        return "skipped_call", later.group == waiters[0].group
    words = " ".join(f"{f.function} {f.file}" for f in view.incident.stacks[stack] if "torch/" not in f.file)
    kind = view.incident.signatures[_signature(view, later)]
    if ALONE.search(words) or later.rank == 0 or kind.op == "barrier":
        return "extra_call", True
    return "group_order", view.site(stack) != view.site(awaited)


def _extra(view: View, waiters: list[Pending], odd: list[Pending], tie: bool, margin: bool) -> Finding:
    """The few that wait in a call that most passed by issued it as an extra one."""
    call = waiters[0]
    text, place = view.call_text(_signature(view, call)), view.where(_stack(view, call))
    alone = _stack(view, call) >= 0 and not _known(view, [c.rank for c in odd], call)
    confidence = "medium" if tie else "high" if alone and margin else "medium" if margin else "low"
    head = f"{ranks_text([c.rank for c in waiters])} issued an extra {text}{place if alone else ''}, "
    head += (
        f"call #{call.seq} of {view.label(call.group)}" if alone else f"and are one ahead in {view.label(call.group)}"
    )
    alternative = f"{ranks_text([c.rank for c in odd])} skipped it" if tie or not alone else None
    return _made(view, "extra_call", waiters, odd, call if alone else None, confidence, head, alternative)


def _made(
    view: View,
    kind: str,
    guilty: list[Pending],
    others: list[Pending],
    call: Pending | None,
    confidence: str,
    head: str,
    alternative: str | None,
) -> Finding:
    ranks = tuple(sorted(c.rank for c in guilty))
    evidence = [
        f"{ranks_text([c.rank for c in side])} wait in {call_name(view, side[0])}{view.where(_stack(view, side[0]))}"
        for side in (others, guilty)
    ]
    unknown = ("what they would have called next: nothing is recorded behind it",)
    shown = call or guilty[0]
    return Finding(
        kind,
        ranks,
        view.waiting(ranks),
        view.site(_stack(view, call)) if call is not None else None,
        since(view, [*guilty, *others]),
        confidence,
        head,
        tuple(evidence),
        unknown,
        ADVICE[kind],
        alternative,
        view.label(shown.group),
        shown.seq,
        view.incident.signatures[_signature(view, shown)].op,
    )

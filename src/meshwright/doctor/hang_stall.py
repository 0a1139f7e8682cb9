"""Findings from who waits for whom: ranks that never entered, devices that stand still, cycles, nobody missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from meshwright.doctor.advice import ADVICE
from meshwright.doctor.findings import Finding, ranks_text
from meshwright.doctor.hang_calls import after_loop
from meshwright.doctor.hang_crossed import call_name, crossings, cycle_crossing, earliest, since
from meshwright.doctor.hang_programs import Deviation, departs, deviation
from meshwright.doctor.hang_splits import splits
from meshwright.doctor.incident import SCHEDULED, STARTED, Frame, user_frame
from meshwright.doctor.view import View, site_of, stack_of
from meshwright.ledger.stall import Pending

#: Functions at the innermost frames of a host that waits for its own device.
_DEVICE_WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "synchronize",
    "item",
    "_local_scalar_dense",
    "cpu",
    "tolist",
    "hipStreamSynchronize",
)
#: Ranks whose whole order of calls is held against others'.
MAX_SUSPECTS = 16


def _waits_for_device(frames: Sequence[Frame]) -> bool:
    return any(f.function in _DEVICE_WAITS for f in frames[:4])


def roots(view: View, explained: frozenset[int]) -> list[Finding]:
    """One finding for every set of ranks that is waited for and waits for nobody, by kind."""
    stall = view.stall
    own = [r for r in stall.roots if r not in explained]
    held = frozenset(r for r in own if r in stall.pending)
    waiters = sorted({c.rank for r in own for c in stall.awaited[r]})
    suspects = waiters if held and len(waiters) < len(own) else own
    if held and len(waiters) == len(own):
        suspects = [*own, *waiters]
    out = [deviated(view, off) for r in suspects[:MAX_SUSPECTS] if (off := deviation(view, r)) is not None]
    blamed = {r for f in out for r in f.guilty_ranks}
    if any(r in waiters for r in blamed):
        return out
    crossed, handled = crossings(view, held - blamed)
    out += crossed
    sorted_out: dict[tuple[str, str], list[tuple[int, list[str], list[str]]]] = {}
    for rank in own:
        if rank in handled or rank in blamed:
            continue
        kind, confidence, evidence, unknown = _judge(view, rank)
        few = len(waiters) <= len(own) and rank in stall.pending
        if kind == "device_stuck" and few and not any(c.completed_by for c in stall.pending[rank]):
            kind, confidence = "unknown", "low"
            unknown.append("no majority is ahead: whether those that wait went one call too far is not recorded")
        if kind == "host_stuck" and len(waiters) < len(own):
            confidence = "low"
            unknown.append(f"most are behind: {ranks_text(waiters)} may rather have gone a call too far")
        sorted_out.setdefault((kind, confidence), []).append((rank, evidence, unknown))
    for (kind, confidence), rows in sorted_out.items():
        out.append(_root_finding(view, kind, confidence, rows))
    return out


def deviated(view: View, off: Deviation) -> Finding:
    """A rank whose order of calls over all groups departs from its peers'."""
    kind, stack = off.kind, off.stack
    peer = view.incident.traces[off.peers[0]]
    upto = view.row_of(peer, off.group, off.seq) or 0
    usual = {n for n in peer.stack[:upto] if n >= 0}
    unknown_line = off.found_stack >= 0 and off.found_stack not in usual
    if kind == "skipped_call" and unknown_line and after_loop(view, off.found_stack, usual):
        kind, stack = "uneven_inputs", off.found_stack
    verb = {
        "skipped_call": "skipped",
        "extra_call": "issued an extra",
        "group_order": "took in another order",
        "uneven_inputs": "left the loop before",
    }[kind]
    who, many = ranks_text((off.rank,)), f" and {off.count - 1} more" if off.count > 1 else ""
    text = f"{view.call_text(off.signature)}{many}{view.where(off.stack)}"
    evidence = (
        f"against {ranks_text(off.peers)} its calls over all groups part at #{off.seq} of {view.label(off.group)}; "
        f"with {off.count} {'taken in' if off.kind == 'skipped_call' else 'taken out'}, {off.matched} calls behind "
        "it agree",
    )
    calls = [*view.stall.awaited.get(off.rank, []), *view.stall.pending.get(off.rank, [])]
    return Finding(
        kind,
        (off.rank,),
        view.waiting((off.rank,)),
        view.site(stack),
        since(view, calls),
        off.confidence,
        f"{who} {verb} {text}, call #{off.seq} of {view.label(off.group)}",
        evidence,
        (),
        ADVICE[kind],
        f"{ranks_text(off.peers)} are wrong and {who} right" if len(off.peers) == 1 else None,
        view.label(off.group),
        off.seq,
        view.incident.signatures[off.signature].op,
    )


def _judge(view: View, rank: int) -> tuple[str, str, list[str], list[str]]:
    """Kind, confidence, evidence and what is unknown about one root."""
    stall, trace = view.stall, view.incident.traces[rank]
    own = stall.pending.get(rank, [])
    first = earliest(view, stall.awaited[rank])
    issued = stall.issued.get(first.group, {}).get(rank)
    evidence = [
        f"{ranks_text(sorted({c.rank for c in stall.awaited[rank]}))} wait for rank {rank} in {call_name(view, first)}"
    ]
    unknown: list[str] = []
    if issued is not None and not first.p2p:
        evidence.append(f"the last call that rank {rank} issued in {view.label(first.group)} is #{issued}")
    frames, fact = stack_of(view.incident, rank)
    if fact is not None:
        evidence.append(f"stack of rank {rank}: {fact.text} ({fact.source})")
    done = [c for c in own if c.completed_by]
    if trace.recorder == "ledger" and own and not any(c.absent for c in own):
        # Ends are written every half second, and there is no device: a call that all entered is over.
        evidence.append(f"all members entered {call_name(view, own[0])}; the records of rank {rank} end there")
        unknown.append(f"whether rank {rank} ended or stands still: its exit code, or a stack")
        return "host_stuck", "medium", evidence, unknown
    if done and trace.recorder != "ledger":
        evidence.append(
            f"{len(done)} calls that rank {rank} still waits for completed on other ranks, the first "
            f"{call_name(view, done[0])}: its device no longer finishes work"
        )
        return "device_stuck", "high", evidence, unknown
    if own and any(c.absent for c in own):
        unknown.append(f"rank {rank} may itself wait for {ranks_text(own[0].absent)}, of which there is no record")
        return "unknown", "low", evidence, unknown
    if own:
        evidence.append(f"all members entered {call_name(view, own[0])}, which rank {rank} issued, yet it does not end")
        return "device_stuck", "high" if _waits_for_device(frames) else "medium", evidence, unknown
    if _waits_for_device(frames):
        return "device_stuck", "medium", evidence, unknown
    evidence.append(f"rank {rank} has no call of its own that has not completed: its host never came to the next one")
    return "host_stuck", _host_confidence(view, rank, trace.backend or _backend(view), unknown), evidence, unknown


def _backend(view: View) -> str:
    found = Counter(t.backend for t in view.incident.traces.values() if t.backend)
    return found.most_common(1)[0][0] if found else ""


def _host_confidence(view: View, rank: int, backend: str, unknown: list[str]) -> str:
    trace = view.incident.traces[rank]
    if not len(trace) and not trace.status:
        unknown.append(f"the dump of rank {rank} is empty and has no counters")
        return "medium"
    if backend == "gloo" and trace.recorder == "flight_recorder":
        unknown.append("gloo's recorder leaves out send and recv; the rank may wait in one")
        return "medium"
    if trace.rank_from == "nothing":
        return "low"
    return "high"


def _root_finding(view: View, kind: str, confidence: str, rows: list[tuple[int, list[str], list[str]]]) -> Finding:
    ranks = tuple(sorted(r for r, _, _ in rows))
    awaited = [c for r in ranks for c in view.stall.awaited[r]]
    first = earliest(view, awaited)
    frames: list[Frame] = []
    site, inside = None, ""
    for rank in ranks:
        frames, _ = stack_of(view.incident, rank)
        if frames:
            frame = user_frame(frames)
            site = site_of(frame)
            inside = f"; it sits in {frame.function}, {site}" if frame is not None else ""
            break
    name, who = call_name(view, first), ranks_text(ranks)
    waiting = view.waiting(ranks)
    if kind == "host_stuck":
        head = f"{who} never entered {name}{inside}"
    elif kind == "device_stuck":
        head = f"the device of {who} stands still: calls that it issued do not end{inside}"
    else:
        head = f"{who} did not enter {name}, but may itself wait for ranks without a record"
    unknown = tuple(dict.fromkeys(u for _, _, us in rows for u in us))
    if not frames and kind in {"host_stuck", "device_stuck"}:
        unknown += (f"no stack of {who}: where it stands in the program is not known",)
    evidence = tuple(dict.fromkeys(e for _, es, _ in rows for e in es))
    trace = view.incident.traces[first.rank]
    return Finding(
        kind,
        ranks if kind != "unknown" else (),
        waiting,
        site,
        since(view, awaited),
        confidence,
        head,
        evidence,
        unknown,
        ADVICE[kind],
        None,
        view.label(first.group),
        first.seq,
        view.incident.signatures[trace.signature[first.row]].op,
    )


def cycles(view: View, explained: frozenset[int]) -> list[Finding]:
    """Ranks that wait for each other in calls of different groups, or in hand-offs."""
    out = []
    for ranks in view.stall.cycles:
        if explained & set(ranks):
            continue
        crossed = cycle_crossing(view, ranks)
        suspects = [*(crossed.guilty_ranks if crossed is not None else ()), *ranks][:MAX_SUSPECTS]
        off = next((o for r in suspects if (o := deviation(view, r)) is not None), None)
        out.append(deviated(view, off) if off is not None else crossed or _cycle(view, ranks))
    return out


def _cycle(view: View, ranks: tuple[int, ...]) -> Finding:
    blocked = {r: next(c for c in view.stall.pending[r] if set(c.missing) & set(ranks)) for r in ranks}
    classes: dict[tuple[object, ...], list[int]] = {}
    for rank, call in blocked.items():
        trace = view.incident.traces[rank]
        kind = view.incident.signatures[trace.signature[call.row]]
        key: tuple[object, ...] = (kind.op,) if call.p2p else (view.label(call.group), call.group)
        classes.setdefault(key, []).append(rank)
    p2p = all(call.p2p for call in blocked.values())
    order = sorted(classes.values(), key=lambda c: (-len(c), c))
    lead = len(order) > 1 and len(order[0]) > len(order[1]) and not p2p
    guilty = tuple(sorted(r for c in order[1:] for r in c)) if lead else ranks
    odd = tuple(r for r in ranks if departs(view.incident.traces[r], blocked[r].row)) if not lead else ()
    if 0 < len(odd) < len(ranks):
        guilty = odd
    some = guilty[0]
    stack = view.incident.traces[some].stack[blocked[some].row]
    evidence = tuple(
        f"rank {r} waits in {call_name(view, c)} for {ranks_text(c.missing)}"
        f"{view.where(view.incident.traces[r].stack[c.row])}"
        for r, c in list(blocked.items())[:16]
    )
    kind_name = "p2p_order" if any(c.p2p for c in blocked.values()) else "group_order"
    own = f", in which {ranks_text(odd)} left the order of the calls before" if guilty == odd else ""
    head = (
        f"{ranks_text(ranks)} wait for each other in hand-offs{own}"
        if p2p
        else f"{ranks_text(guilty)} entered {call_name(view, blocked[some])} before the call that the others are in"
    )
    return Finding(
        kind_name,
        guilty,
        view.waiting(guilty),
        view.site(stack),
        since(view, list(blocked.values())),
        "high" if lead else "medium",
        head,
        evidence,
        (),
        ADVICE[kind_name],
        None if lead else "any rank of the cycle may be the one to change: there is no majority",
        view.label(blocked[some].group),
        blocked[some].seq,
    )


def nobody_missing(view: View) -> list[Finding]:
    """Calls that do not end although all members, as far as known, entered them."""
    pending = view.stall.pending
    calls = [c for own in pending.values() for c in own]
    if not calls or any(c.missing for c in calls):
        return []
    absent = sorted({r for c in calls for r in c.absent})
    first = earliest(view, calls)
    name, began = call_name(view, first), since(view, calls)
    unlike = splits(view, first)
    if unlike is not None:
        return [unlike]
    lagging = sorted(r for r, own in pending.items() if any(c.completed_by for c in own))
    if lagging and len(lagging) < len(view.incident.traces) / 2 and not absent:
        return [_lag(view, tuple(lagging), began)]
    silent = tuple(r for r in absent if r in view.incident.traces and r not in pending and r not in view.stall.stale)
    if silent:
        return [_silent(view, silent, first, began)]
    if absent:
        return [
            Finding(
                "unknown",
                (),
                view.waiting(()),
                None,
                began,
                "low",
                f"everything recorded waits in calls with {ranks_text(absent)}, of which there is no record",
                (f"all other members entered {name}",),
                (f"dumps, logs or stacks of {ranks_text(absent)}",),
                ADVICE["unknown"],
                f"{ranks_text(absent)} died or never entered the call",
                view.label(first.group),
                first.seq,
            )
        ]
    started: dict[int, set[int]] = {STARTED: set(), SCHEDULED: set()}
    for rank, own in pending.items():
        for call in own:
            if (call.group, call.seq, call.p2p) == (first.group, first.seq, first.p2p):
                started.setdefault(view.incident.traces[rank].state[call.row], set()).add(rank)
    late = started[SCHEDULED]
    if late and len(late) < len(started[STARTED]):
        ranks = tuple(sorted(late))
        return [
            Finding(
                "device_stuck",
                ranks,
                view.waiting(ranks),
                None,
                began,
                "medium",
                f"the device of {ranks_text(ranks)} never began {name}, which the other members began",
                (f"state is 'started' on {ranks_text(sorted(started[STARTED]))}, 'scheduled' on {ranks_text(ranks)}",),
                (),
                ADVICE["device_stuck"],
                None,
                view.label(first.group),
                first.seq,
            )
        ]
    return [
        Finding(
            "all_arrived",
            (),
            view.waiting(()),
            None,
            began,
            "medium",
            f"every member entered {name} with the same operation, shape and type, yet it does not end",
            (f"{len(pending)} ranks wait, none is missing from any call",),
            ("whether it is the network or a device; or the dumps were taken while the call was still running",),
            ADVICE["all_arrived"],
            None,
            view.label(first.group),
            first.seq,
        )
    ]


def _silent(view: View, ranks: tuple[int, ...], first: Pending, began: float | None) -> Finding:
    """Ranks whose dump lists no pending call and no counters, while everybody else waits in calls with them."""
    who = ranks_text(ranks)
    return Finding(
        "host_stuck",
        ranks,
        view.waiting(ranks),
        None,
        began,
        "medium",
        f"{who} waits in no call, while the others wait in calls with it, first {call_name(view, first)}",
        (f"only {who} of the members dumped no pending call",),
        (f"how far {who} came: its dump has no counters of the group", f"no stack of {who}"),
        ADVICE["host_stuck"],
        None,
        view.label(first.group),
        first.seq,
    )


def _lag(view: View, ranks: tuple[int, ...], began: float | None) -> Finding:
    call = next(c for c in view.stall.pending[ranks[0]] if c.completed_by)
    return Finding(
        "device_stuck",
        ranks,
        view.waiting(ranks),
        None,
        began,
        "medium",
        f"the device of {ranks_text(ranks)} stands still: calls that ended elsewhere do not end there",
        (f"{call_name(view, call)} completed on {ranks_text(call.completed_by)}, not on {ranks_text(ranks)}",),
        (),
        ADVICE["device_stuck"],
        None,
        view.label(call.group),
        call.seq,
    )

"""Findings from what logs, metrics and stacks say: deaths, counters of the watchdog, reports of torch itself."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from meshwright.doctor.advice import ADVICE
from meshwright.doctor.findings import Finding, ranks_text
from meshwright.doctor.incident import Fact, Frame, Incident, user_frame
from meshwright.doctor.view import frames_of, site_of, weak

#: Errors that only say that another rank went first or that the wait was given up.
_FOLLOWS = re.compile(
    r"closed by peer|reset by peer|broken pipe|timed out|timeout|NCCL communicator was aborted|DistBackendError|"
    r"NCCL error|ncclRemoteError|ncclInternalError|ProcessGroup|ChildFailedError|SIGTERM|SIGABRT|SignalException|"
    r"KeyboardInterrupt|TCPStore|Watchdog|CollectiveFingerPrint|monitoredBarrier",
    re.IGNORECASE,
)
_CLOSED = re.compile(r"closed by peer|reset by peer|broken pipe", re.IGNORECASE)
_GAVE_UP = re.compile(r"timed out|timeout", re.IGNORECASE)
_LOOSE_NAMES = ("NCCL_", "nccl", "torch", "cuda", "driver")


def follows(fact: Fact) -> bool:
    """Whether an error is a consequence of another rank's trouble."""
    return bool(fact.data.get("consequence")) or (fact.kind == "exception" and _FOLLOWS.search(fact.text) is not None)


def time_of(fact: Fact) -> float:
    """When it was, later than everything where that is not known."""
    return fact.at if fact.at is not None else 1e18


def deaths(incident: Incident) -> list[Finding]:
    """Ranks that ended by themselves, with the first error of each; the earliest is the cause of all."""
    first: dict[int | None, Fact] = {}
    order = {"oom": 0, "exception": 1, "xid": 2, "killed": 3}
    for fact in incident.facts:
        if fact.kind not in order or follows(fact) or fact.data.get("cut"):
            continue
        held = first.get(fact.rank)
        if held is None or (time_of(fact), order[fact.kind], fact.source) < (
            time_of(held),
            order[held.kind],
            held.source,
        ):
            first[fact.rank] = fact
    if len(first) > 1:
        first.pop(None, None)
    facts = sorted(first.values(), key=lambda f: (time_of(f), -1 if f.rank is None else f.rank))
    facts = facts or _ended_first(incident)
    if not facts:
        return []
    cause = facts[0]
    together = [f for f in facts if f.rank is not None and _same_moment(cause, f)]
    return [_death(cause, together or [cause], incident, facts)]


def _ended_first(incident: Incident) -> list[Fact]:
    """The process that the launcher saw end first, without its error, unless its errors follow from others'."""
    echoing = {f.rank for f in incident.facts if follows(f)}
    ended = [f for f in incident.facts if f.kind == "exited" and f.data.get("first_observed")]
    return [f for f in ended if f.rank is not None and f.rank not in echoing][:1]


def _same_moment(a: Fact, b: Fact) -> bool:
    if a.at is None or b.at is None:
        return a.at is b.at and (a is b or a.text == b.text)
    return abs(a.at - b.at) <= 1.0 and a.text[:60] == b.text[:60]


def _death(cause: Fact, together: Sequence[Fact], incident: Incident, facts: Sequence[Fact]) -> Finding:
    ranks = tuple(sorted({f.rank for f in together if f.rank is not None}))
    how = {
        "oom": "ran out of memory",
        "killed": "was killed",
        "exception": "raised",
        "xid": "lost its device",
        "exited": "ended",
    }[cause.kind]
    signal = cause.data.get("signal")
    if cause.kind == "killed" and isinstance(signal, str):
        how = f"was killed by {signal}"
    site = site_of(user_frame(frames_of(cause) or _raised(cause, incident)))
    who = ranks_text(ranks) if ranks else "a process whose rank is not known"
    later = [f"{f.text} ({f.source})" for f in facts if f not in together]
    unknown = () if ranks else ("which rank the process was; keep one log a rank, or torchrun's --log-dir",)
    everyone = set(incident.traces) | {f.rank for f in incident.facts if f.rank is not None}
    sure = cause.at is not None or len(facts) == len(together)
    if cause.kind == "exited":
        unknown, sure = (*unknown, "the error with which it ended: none of its lines are here"), False
    confidence = "low" if not ranks else "medium" if weak(cause) or not sure else "high"
    return Finding(
        "dead_rank",
        ranks,
        tuple(sorted(everyone - set(ranks))),
        site,
        cause.at,
        confidence,
        f"{who} {how}: {cause.text}",
        tuple(f"{f.text} ({f.source})" for f in together[:8]),
        unknown,
        ADVICE["dead_rank"],
        consequences=tuple(later[:12]),
    )


def vanished(incident: Incident, finding: Finding) -> Finding:
    """A rank that never came and whose connections others saw closed before any wait was given up has ended."""
    guilty = set(finding.guilty_ranks)
    if finding.kind != "host_stuck" or len(guilty) != 1:
        return finding
    closed = [f for f in incident.facts if f.rank not in guilty and _CLOSED.search(f.text)]
    gave_up = [f for f in incident.facts if _GAVE_UP.search(f.text)]
    own = [f for f in incident.facts if f.rank in guilty and f.kind in {"exception", "gloo_error", "stack"}]
    if not closed or own or any(time_of(f) <= min(map(time_of, closed)) for f in gave_up):
        return finding
    who = ranks_text(finding.guilty_ranks)
    return replace(
        finding,
        kind="dead_rank",
        confidence="medium",
        headline=f"the process of {who} ended without a word before {finding.op or 'the call'} #{finding.seq}",
        evidence=(*finding.evidence, *(f"{f.text} ({f.source})" for f in closed[:3])),
        unknown=(*finding.unknown, f"how {who} died: the launcher's log or the kernel's (dmesg) tells"),
        advice=ADVICE["dead_rank"],
        alternative=f"{who} stands still on its host",
    )


def _raised(cause: Fact, incident: Incident) -> list[Frame]:
    """The stack of the exception that a line about memory belongs to."""
    for fact in incident.facts:
        if fact.kind == "exception" and fact.rank == cause.rank and cause.text.strip() in fact.text:
            return frames_of(fact)
    return []


def reported(incident: Incident) -> list[Finding]:
    """What torch itself, RAS or a monitor names outright."""
    out: list[Finding] = []
    barrier = _named(incident.facts, "missing_at_barrier")
    if barrier:
        out.append(_plain("host_stuck", barrier, "did not come to a monitored barrier", incident, "high"))
    desync = [f for f in incident.facts if f.kind == "desync_report"]
    if desync:
        out += _desync(desync, incident)
    prints = [f for f in incident.facts if f.kind == "fingerprint_mismatch"]
    if prints:
        out += _fingerprints(prints, incident)
    hung = sorted({f.rank for f in incident.facts if f.kind == "metric" and f.data.get("hung") and f.rank is not None})
    if hung:
        out.append(_hung(hung, incident))
    return out


def _named(facts: Iterable[Fact], kind: str) -> tuple[int, ...]:
    rows = (f.data.get("ranks") for f in facts if f.kind == kind)
    return tuple(sorted({r for row in rows if isinstance(row, list) for r in row}))


def _plain(kind: str, ranks: tuple[int, ...], what: str, incident: Incident, confidence: str) -> Finding:
    source = [f"{f.text} ({f.source})" for f in incident.facts if f.kind in {"missing_at_barrier", "desync_report"}]
    return Finding(
        kind, ranks, (), None, None, confidence, f"{ranks_text(ranks)} {what}", tuple(source[:4]), (), ADVICE[kind]
    )


def _desync(facts: list[Fact], incident: Incident) -> list[Finding]:
    joined = {r for f in facts if f.data.get("joined") for r in _list(f.data.get("ranks"))}
    behind = tuple(sorted({r for f in facts if not f.data.get("joined") for r in _list(f.data.get("ranks"))} - joined))
    if not behind:
        return []
    return [_plain("host_stuck", behind, "finished the call before and did not join the next", incident, "high")]


def _list(value: object) -> list[int]:
    return [n for n in value if isinstance(n, int)] if isinstance(value, list) else []


def _fingerprints(facts: list[Fact], incident: Incident) -> list[Finding]:
    """Fingerprints that disagree (TORCH_DISTRIBUTED_DEBUG=DETAIL): the majority over all messages decides."""
    calls: dict[int, tuple[object, ...]] = {}
    for fact in facts:
        sides = fact.data.get("sides")
        for side in sides if isinstance(sides, list) else ():
            if isinstance(side, dict) and isinstance(side.get("rank"), int):
                calls[side["rank"]] = (side.get("op"), tuple(_list(side.get("shape"))), side.get("dtype"))
    found = minority(calls)
    if found is None:
        return []
    guilty, usual, clear = found
    odd = calls[guilty[0]]
    kind = "wrong_op" if odd[0] != usual[0] else "wrong_shape" if odd[1] != usual[1] else "wrong_dtype"
    text = f"{ranks_text(guilty)} called {_words(odd)}, the others {_words(usual)}"
    return [
        Finding(
            kind,
            guilty,
            (),
            None,
            None,
            "high" if clear and len(calls) > 2 else "low",
            text,
            tuple(f"{f.text} ({f.source})" for f in facts[:4]),
            (),
            ADVICE[kind],
        )
    ]


def _words(call: tuple[object, ...]) -> str:
    return " ".join(str(part) for part in call if part not in (None, ()))


def minority(calls: dict[int, tuple[object, ...]]) -> tuple[tuple[int, ...], tuple[object, ...], bool] | None:
    """Ranks whose call differs from most, and that call; None when all agree."""
    order = sorted(Counter(calls.values()).items(), key=lambda item: (-item[1], str(item[0])))
    if len(order) < 2:
        return None
    usual = order[0][0]
    return tuple(sorted(r for r, c in calls.items() if c != usual)), usual, order[0][1] > order[1][1]


def _hung(ranks: list[int], incident: Incident) -> Finding:
    known = {f.rank for f in incident.facts if f.kind == "metric" and f.rank is not None}
    every = len(ranks) == len(known)
    text = f"the monitor reports {ranks_text(ranks)} as hung" + (
        f", all of {len(known)}" if every else f" of {len(known)}"
    )
    return Finding(
        "all_arrived" if every else "unknown",
        (),
        tuple(ranks),
        None,
        None,
        "low",
        text,
        tuple(f"{f.text} ({f.source})" for f in incident.facts if f.data.get("hung"))[:8],
        ("a monitor says who hangs, not who is to blame; dumps or stacks of all ranks",),
        ADVICE["all_arrived" if every else "unknown"],
        None if every else f"the silent {ranks_text(sorted(known - set(ranks)))} may be what the others wait for",
    )


def environments(incident: Incident) -> list[Finding]:
    """Versions or NCCL variables that differ between ranks."""
    values: dict[str, dict[str, set[int]]] = {}
    for fact in incident.facts:
        name, value = fact.data.get("name"), fact.data.get("value")
        if fact.kind != "env" or fact.rank is None or fact.data.get("per_process"):
            continue
        if isinstance(name, str) and name.startswith(_LOOSE_NAMES):
            values.setdefault(name, {}).setdefault(str(value), set()).add(fact.rank)
    out = []
    for rank, trace in incident.traces.items():
        for key in ("comm_lib_version", "nccl_version"):
            if trace.meta.get(key):
                values.setdefault("NCCL version", {}).setdefault(trace.meta[key], set()).add(rank)
    for name, by_value in sorted(values.items()):
        if len(by_value) < 2:
            continue
        order = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[0]))
        clear = len(order[0][1]) > len(order[1][1])
        guilty = tuple(sorted(r for _, ranks in order[1:] for r in ranks - order[0][1])) if clear else ()
        listed = "; ".join(f"{v} on {ranks_text(sorted(r))}" for v, r in order[:6])
        out.append(
            Finding(
                "environment_mismatch",
                guilty,
                (),
                None,
                None,
                "medium" if clear else "low",
                f"{name} differs between ranks: {listed}",
                (listed,),
                ("whether it is the cause: a difference of settings alone does not prove it",),
                ADVICE["environment_mismatch"],
            )
        )
    return out


def hints(incident: Incident) -> list[str]:
    """Lines of NCCL and the system that point at network, shared memory or devices, for ``all_arrived``."""
    kinds = {"nccl_warn", "shm", "xid", "heartbeat", "engine_wait", "rendezvous"}
    found = [f for f in incident.facts if f.kind in kinds or (f.kind == "nccl_info" and f.data.get("hint"))]
    return [f"{f.text} ({f.source})" for f in sorted(found, key=lambda f: (f.kind != "nccl_warn", f.source))[:12]]

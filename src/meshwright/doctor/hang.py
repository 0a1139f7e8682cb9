"""Why does it hang: from an ``Incident`` to findings, the earliest cause first.

Order of belief: a rank that died by itself explains everybody who waits for it. Calls that disagree explain ranks
that are behind in the same group. What is left are ranks that others wait for and that wait for nobody (their host or
their device stands still), cycles, and calls that everybody entered. Logs alone are read by the watchdog's counters.
Confidence is high only where nothing that is missing could turn the verdict.
"""

from __future__ import annotations

import re
from dataclasses import replace

from meshwright.doctor import hang_calls, hang_counters, hang_facts, hang_progress, hang_stacks, hang_stall
from meshwright.doctor.advice import ADVICE
from meshwright.doctor.findings import Finding, ranks_text
from meshwright.doctor.hang_splits import odd_splits
from meshwright.doctor.incident import Incident
from meshwright.doctor.view import View, weak
from meshwright.ledger.process import collector_at_rest

MAX_FINDINGS = 20
MAX_ECHOES = 6
#: What stands around an error and differs between ranks: its type and C++ source, and an address with what follows it.
_WRAPPING = re.compile(r"^(?:\S*(?:Error|Exception): )?(?:\[[^\]]*\] )?")
_ADDRESS = re.compile(r"\[?(?:\d{1,3}\.){3}\d{1,3}\b.*")


def diagnose(incident: Incident) -> list[Finding]:
    """All findings, the cause first; never empty."""
    with collector_at_rest():
        return _diagnosed(incident)


def _diagnosed(incident: Incident) -> list[Finding]:
    view = View(incident)
    found = _from_traces(view) if incident.traces else []
    dead = hang_facts.deaths(incident)
    told = hang_facts.reported(incident)
    if not found or all(f.kind in {"unknown", "all_arrived"} for f in found):
        found = [*told, *hang_counters.counters(incident), *found] if told or incident.facts else found
        if not incident.traces and all(f.kind == "unknown" for f in found):
            found = [*hang_stacks.elsewhere(incident), *found]
    found = _with_deaths(view, found, dead) if dead else [hang_facts.vanished(incident, f) for f in found]
    environment = hang_facts.environments(incident)
    if any(f.kind == "all_arrived" for f in found[:1]) and environment:
        found = [*found[:1], *environment, *found[1:]]
    else:
        found = [*found, *environment]
    slow = hang_progress.moving(view, found) if incident.earlier else None
    found = [slow] if slow is not None else found
    if not found:
        found = [_nothing(view)]
    found = [_with_echoes(incident, found[0]), *found[1:MAX_FINDINGS]]
    return [_finished(view, f) for f in found]


def _from_traces(view: View) -> list[Finding]:
    readings = hang_calls.readings(view)
    findings, explained = _calls(view, readings)
    if not findings and any(t.recorder == "ledger" for t in view.incident.traces.values()):
        findings = odd_splits(view)
        explained = frozenset(view.incident.traces) if findings else explained
    stuck = hang_stall.roots(view, explained) + hang_stall.cycles(view, explained)
    stuck.sort(key=lambda f: (f.kind == "unknown", f.since if f.since is not None else 1e18, f.guilty_ranks))
    if findings and stuck:
        first = findings[0].since
        before = [
            f for f in stuck if f.since is not None and first is not None and f.since < first and f.kind != "unknown"
        ]
        stuck = [*before, *(f for f in stuck if f not in before)]
        findings = [*before, *findings, *stuck[len(before) :]]
    else:
        findings = [*findings, *stuck]
    return findings or hang_stall.nobody_missing(view)


def _calls(view: View, readings: list[hang_calls.Reading]) -> tuple[list[Finding], frozenset[int]]:
    """Findings of calls that disagree, later ones of the same ranks folded in, and the ranks that they explain."""
    findings: list[Finding] = []
    explained: set[int] = set()
    for reading in readings:
        finding, d = reading.finding, reading.divergence
        explained |= {*d.guilty, *d.others}
        same = next((i for i, f in enumerate(findings) if set(f.guilty_ranks) & set(finding.guilty_ranks)), None)
        if same is None:
            findings.append(finding)
        else:
            held = findings[same]
            findings[same] = replace(held, consequences=(*held.consequences, finding.headline))
    return findings, frozenset(explained)


def _with_deaths(view: View, found: list[Finding], dead: list[Finding]) -> list[Finding]:
    """A death is the cause when the dead are whom others wait for, or when nothing else is known."""
    if not dead:
        return found
    death = dead[0]
    ranks = set(death.guilty_ranks)
    mismatch = [f for f in found if f.kind not in {"host_stuck", "unknown", "all_arrived", "dead_rank", "device_stuck"}]
    rest = [f for f in found if f not in mismatch and not set(f.guilty_ranks) <= ranks]
    rest = [f for f in rest if f.kind not in {"unknown", "all_arrived"}]
    if mismatch and death.since is not None and mismatch[0].since is not None and mismatch[0].since < death.since:
        return [*mismatch, *rest, death]
    if mismatch and not ranks:
        return [*mismatch, *rest, death]
    merged = next((f for f in found if f.kind in {"host_stuck", "device_stuck"} and set(f.guilty_ranks) == ranks), None)
    if merged is not None:
        death = replace(
            death,
            evidence=(*death.evidence, *merged.evidence),
            waiting_ranks=merged.waiting_ranks or death.waiting_ranks,
            since=merged.since if death.since is None else death.since,
            group=merged.group,
            seq=merged.seq,
            op=merged.op,
        )
    return [death, *mismatch, *rest]


def _nothing(view: View) -> Finding:
    """Nothing stands still, or nothing is known."""
    incident = view.incident
    errors = [f for f in incident.facts if f.kind in {"gloo_error", "heartbeat", "engine_wait", "watchdog_timeout"}]
    if not incident.traces or errors:
        text = (
            "what was found does not tell who is to blame" if incident.facts else "nothing here says why the job hangs"
        )
        return Finding(
            "unknown",
            (),
            (),
            None,
            min((f.at for f in errors if f.at is not None), default=None),
            "low",
            text,
            tuple(f"{f.text} ({f.source})" for f in errors[:8]),
            ("dumps of the Flight Recorder or stacks of all ranks",),
            ADVICE["unknown"],
        )
    absent = view.absent
    unknown = (f"no record of {ranks_text(absent)}",) if absent else ()
    return Finding(
        "healthy" if not absent else "unknown",
        (),
        (),
        None,
        None,
        "medium" if not absent else "low",
        "every call that is recorded was entered by all members and completed; nothing disagrees"
        if not absent
        else f"nothing that is recorded stands still, but there is no record of {ranks_text(absent)}",
        (f"{len(incident.traces)} ranks, {sum(map(len, incident.traces.values()))} calls",),
        unknown,
        ADVICE["healthy" if not absent else "unknown"],
    )


def _finished(view: View, finding: Finding) -> Finding:
    """Say what the incident lacks; take blame back where the rank's own number is a guess."""
    lacks = tuple(view.incident.lacks[:20])
    stale = view.stall.stale if view.incident.traces else ()
    lost = tuple(r for r in view.absent if r not in stale) if view.incident.traces else ()
    if lost:
        lacks = (f"no record of {ranks_text(lost)}: whether they have a part in it cannot be told", *lacks)
    if stale:
        lacks += (f"dumps of {ranks_text(stale)} end before the others went on (stale)",)
    if finding.kind == "all_arrived":
        finding = replace(finding, evidence=(*finding.evidence, *hang_facts.hints(view.incident)))
    files = view.unnamed(finding.guilty_ranks)
    if files:
        finding = replace(
            finding,
            guilty_ranks=(),
            confidence="low",
            headline=f"{finding.headline} (ranks are guessed: it is the rank that wrote {', '.join(files[:3])})",
        )
    finding = _hosted(view, finding)
    wrapped = sum(1 for t in view.incident.traces.values() if t.wrapped)
    if wrapped and finding.kind in {"healthy", "unknown", "host_stuck"}:
        lacks += (f"on {wrapped} ranks the ring buffer dropped older calls (TORCH_FR_BUFFER_SIZE)",)
    return replace(finding, unknown=tuple(dict.fromkeys((*finding.unknown, *lacks))))


def _with_echoes(incident: Incident, finding: Finding) -> Finding:
    """The cause with the loud errors that merely follow from it, one line for all ranks that print the same."""
    if finding.kind in {"unknown", "healthy"}:
        return finding
    echoes: dict[str, set[int]] = {}
    for fact in incident.facts:
        if fact.rank is None or fact.rank in finding.guilty_ranks or fact.kind not in {"exception", "gloo_error"}:
            continue
        if hang_facts.follows(fact):
            text = _ADDRESS.sub("", _WRAPPING.sub("", fact.text))[:120].strip()
            echoes.setdefault(text, set()).add(fact.rank)
    lines = [f'"{text}" on {ranks_text(sorted(ranks))} (follows from it)' for text, ranks in echoes.items() if text]
    return replace(finding, consequences=(*finding.consequences, *lines[:MAX_ECHOES]))


def _hosted(view: View, finding: Finding) -> Finding:
    """Name the machine of the guilty rank where the job ran on several."""
    hosts: dict[int, set[str]] = {}
    for fact in view.incident.facts:
        host = fact.data.get("host")
        if fact.rank is not None and isinstance(host, str) and not weak(fact):
            hosts.setdefault(fact.rank, set()).add(host)
    if len(finding.guilty_ranks) != 1 or len(set().union(*hosts.values())) < 2:
        return finding
    rank = finding.guilty_ranks[0]
    own = hosts.get(rank, set())
    if len(own) != 1:
        return finding
    named = re.sub(rf"\brank {rank}\b", lambda found: f"{found[0]} ({next(iter(own))})", finding.headline, count=1)
    return replace(finding, headline=named)

"""Verdicts from the watchdog's counters in logs: who is behind, whose call differs, where it sits."""

from __future__ import annotations

from dataclasses import replace

from meshwright.doctor.advice import ADVICE
from meshwright.doctor.findings import Finding, ranks_text
from meshwright.doctor.hang_facts import minority, time_of
from meshwright.doctor.incident import Fact, Incident, user_frame
from meshwright.doctor.view import site_of, stack_of, weak

#: Calls of a group up to which a hang is one of its setting up.
FIRST_CALLS = 5
_WEAK = "from a place in a group, a file's name, a task or a local rank"


def counters(incident: Incident) -> list[Finding]:
    """Without dumps: the rank whose counters in the logs are behind, or whose call differs, is the one waited for."""
    last: dict[str, dict[int, int]] = {}
    calls: dict[tuple[str, int], dict[int, tuple[object, ...]]] = {}
    sources: dict[int, Fact] = {}
    ordered = sorted(incident.facts, key=lambda f: (time_of(f), f.source))
    for fact in ordered:
        if fact.rank is None or fact.kind not in {"watchdog_timeout", "pg_status", "dump_signal"}:
            continue
        group = str(fact.data.get("group_name", fact.data.get("group", "")))
        enqueued, seq = fact.data.get("last_enqueued"), fact.data.get("seq")
        if isinstance(enqueued, int):
            last.setdefault(group, {}).setdefault(fact.rank, enqueued)
            sources.setdefault(fact.rank, fact)
        if fact.kind == "watchdog_timeout" and isinstance(seq, int):
            call = (fact.data.get("op"), fact.data.get("numel_in"), fact.data.get("numel_out"))
            calls.setdefault((group, seq), {}).setdefault(fact.rank, call)
            sources[fact.rank] = fact
            held = last.setdefault(group, {})
            held[fact.rank] = max(held.get(fact.rank, -1), seq)
    _join_unnamed(last)
    found = _behind(last, calls, sources) or _differing(calls, sources)
    if not found and not incident.traces:
        found = _together(incident, last, calls, sources)
    labels = {
        str(f.data["group_name"]): str(f.data["group"]) for f in ordered if {"group_name", "group"} <= set(f.data)
    }
    return [_told(finding, incident, sources, labels) for finding in found]


def _told(finding: Finding, incident: Incident, sources: dict[int, Fact], labels: dict[str, str]) -> Finding:
    """Where the guilty rank sits, the group by its description, and less belief where ranks are inferred."""
    label = labels.get(finding.group or "", finding.group)
    finding = replace(finding, group=label, headline=finding.headline.replace(f" of {finding.group}", f" of {label}"))
    if finding.confidence == "high" and any(weak(sources[r]) for r in (*finding.guilty_ranks, *finding.waiting_ranks)):
        finding = replace(finding, confidence="medium", unknown=(*finding.unknown, "some ranks are inferred: " + _WEAK))
    if finding.kind != "host_stuck":
        return finding
    frames, fact = stack_of(incident, finding.guilty_ranks[0])
    frame = user_frame(frames)
    if fact is None or frame is None:
        return finding
    return replace(
        finding,
        call_site=site_of(frame),
        headline=f"{finding.headline}; it sits in {frame.function}, {site_of(frame)}",
        evidence=(*finding.evidence, f"stack: {fact.text} ({fact.source})"),
        unknown=tuple(u for u in finding.unknown if not u.startswith("where ")),
    )


def began(fact: Fact) -> float | None:
    """When a rank entered the call that it gave up: the time of the line less what it waited."""
    waited = fact.data.get("ran_ms")
    return fact.at - waited / 1e3 if fact.at is not None and isinstance(waited, int) else fact.at


def _join_unnamed(last: dict[str, dict[int, int]]) -> None:
    """Lines without a group are of the default group when only one other is named."""
    named = [g for g in last if g]
    if "" in last and len(named) == 1:
        for rank, value in last.pop("").items():
            last[named[0]].setdefault(rank, value)


def _behind(
    last: dict[str, dict[int, int]],
    calls: dict[tuple[str, int], dict[int, tuple[object, ...]]],
    sources: dict[int, Fact],
) -> list[Finding]:
    for group, counts in sorted(last.items()):
        timed = [seq for g, seq in calls if g in {group, ""}]
        if len(counts) < 2 or not timed:
            continue
        first = min(timed)
        ranks = tuple(sorted(r for r, n in counts.items() if n < first))
        if not ranks or len(ranks) * 2 > len(counts):
            continue
        ahead = tuple(sorted(r for r, n in counts.items() if n >= first))
        waited = next(iter(calls.get((group, first), calls.get(("", first), {})).values()), ("a call",))
        kind = "host_stuck"
        times = [began(sources[r]) for r in ahead]
        return [
            Finding(
                kind,
                ranks,
                ahead,
                None,
                min((t for t in times if t is not None), default=None),
                "high" if len(ahead) > len(ranks) else "medium",
                f"{ranks_text(ranks)} never entered {waited[0]} #{first} of {group or 'its group'}",
                tuple(f"{sources[r].text} ({sources[r].source})" for r in (*ranks[:3], *ahead[:2])),
                ("no dumps: only counters tell", f"where {ranks_text(ranks)} stands: take its stack"),
                ADVICE[kind],
                None,
                group or None,
                first,
                str(waited[0]),
            )
        ]
    return []


def _differing(calls: dict[tuple[str, int], dict[int, tuple[object, ...]]], sources: dict[int, Fact]) -> list[Finding]:
    for (group, seq), by_rank in sorted(calls.items(), key=lambda item: item[0][1]):
        compared = {r: c for r, c in by_rank.items() if c[0] != "all_to_all"}
        found = minority(compared)
        if found is None:
            continue
        guilty, usual, clear = found
        odd = compared[guilty[0]]
        kind = "wrong_op" if odd[0] != usual[0] else "wrong_shape"
        waiting = tuple(sorted(set(by_rank) - set(guilty)))
        return [
            Finding(
                kind,
                guilty if clear else tuple(sorted(compared)),
                waiting,
                None,
                sources[guilty[0]].at,
                "medium" if clear else "low",
                f"call #{seq} is {odd[0]} of {odd[1]} elements on {ranks_text(guilty)}, "
                f"{usual[0]} of {usual[1]} elsewhere",
                tuple(f"{sources[r].text} ({sources[r].source})" for r in (*guilty[:3], *waiting[:2])),
                ("no dumps: a skipped or extra call before this one would look the same",),
                ADVICE[kind],
                "a skipped or extra call shifted the numbering",
                group or None,
                seq,
                str(odd[0]),
            )
        ]
    return []


def _together(
    incident: Incident,
    last: dict[str, dict[int, int]],
    calls: dict[tuple[str, int], dict[int, tuple[object, ...]]],
    sources: dict[int, Fact],
) -> list[Finding]:
    """Ranks that gave up in one and the same call: everybody where the size of the job is known, else unknown."""
    same = [(seq, group) for (group, seq), by_rank in calls.items() if len(by_rank) > 1]
    if not same:
        return []
    seq, group = min(same)
    entered = sorted({*calls[group, seq], *(r for r, n in last.get(group, {}).items() if n >= seq)})
    everybody = incident.world is not None and len(entered) >= incident.world
    kind, call = ("all_arrived" if everybody else "unknown"), next(iter(calls[group, seq].values()))
    times = [t for r in entered if (t := began(sources[r])) is not None]
    name = f"{call[0]} #{seq} of {group or 'its group'}"
    evidence = [f"{sources[r].text} ({sources[r].source})" for r in entered[:4]]
    if seq <= FIRST_CALLS:
        evidence.append("it is among the first calls of its group, so communication may never have been up")
    return [
        Finding(
            kind,
            (),
            tuple(entered),
            None,
            min(times, default=None),
            "medium" if everybody else "low",
            f"every rank entered {name}, yet it does not end"
            if everybody
            else f"{ranks_text(entered)} gave up in {name}; of no other rank is anything heard",
            tuple(evidence),
            () if everybody else ("how many ranks the job has: one that printed nothing may be the cause",),
            ADVICE["all_arrived"],
            None if everybody else "if these are all ranks, everybody arrived: network or device",
            group or None,
            seq,
            str(call[0]),
        )
    ]

"""Why is it slow: from tracks, jobs and metrics to findings, what costs most first.

Ranks that make others wait come before what is slow everywhere, because waiting looks like slow collectives. What a
collective costs is judged only where all sides of it are known; on one rank of many, waiting and transfer cannot be
told apart, and the verdict says so.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.doctor import slow_cache, slow_comm, slow_host, slow_inspector, slow_job, slow_late, slow_serving
from meshwright.doctor.findings import Finding, ranks_text
from meshwright.doctor.incident import Incident
from meshwright.doctor.slow_advice import ADVICE
from meshwright.doctor.slow_view import BEFORE, SlowView, view_of
from meshwright.doctor.slow_words import of_text, time_text
from meshwright.ledger.tracks import COMPUTE

#: Collectives of a recording without partners are worth a word from this share of a step.
MIN_UNTOLD = 0.15
#: Healthy needs this share of the time to be work or collectives.
MIN_WORK = 0.4
MAX_FINDINGS = 8


def diagnose(incident: Incident) -> list[Finding]:
    """All findings, what costs most first; never empty."""
    found = [f for job in incident.jobs for f in slow_job.findings(job)]
    found += [*slow_serving.findings(incident), *slow_inspector.findings(incident)]
    if any(t.steps for t in incident.tracks) or (incident.tracks and not found):
        found += _of_tracks(view_of(incident))
    found += slow_cache.findings(incident)
    healthy = [f for f in found if f.kind == "healthy"]
    found = [f for f in found if f.kind != "healthy"] or healthy[:1]
    if not found and (moving := slow_cache.healthy(incident)) is not None:
        found = [moving]
    if not found:
        found = [Finding("unknown", headline="nothing here says why the job is slow", advice=ADVICE["unknown"])]
    cache = slow_cache.lines(incident)
    found = [replace(f, evidence=(*f.evidence, *(line for line in cache if line not in f.evidence))) for f in found]
    lacks = tuple(incident.lacks[:20])
    return [replace(f, unknown=tuple(dict.fromkeys((*f.unknown, *lacks)))) for f in found[:MAX_FINDINGS]]


def _of_tracks(view: SlowView) -> list[Finding]:
    if not view.tracks:
        lacks = tuple(dict.fromkeys(f"{t.source}: {line}" for t in view.incident.tracks for line in t.lacks))
        return [
            Finding("unknown", headline="the traces hold no time to judge", unknown=lacks, advice=ADVICE["unknown"])
        ]
    found: list[tuple[float, Finding]] = []
    blamed: dict[str, float] = {}
    for late in slow_late.causes(view):
        if not slow_late.counts(view, late):
            continue
        blamed[late.cause] = _blamed(view, late)
        text = slow_comm.transfer_text(view, late.op)
        found.append((late.wait_s, slow_late.finding(view, late, text)))
    found += [(f.numbers[1][1], f) for f in slow_host.findings(view, blamed)]
    comm = slow_comm.finding(view)
    if comm is not None:
        found.append((comm.numbers[1][1], comm))
    link = slow_comm.slow_link(view)
    if link is not None:
        found.append((link.numbers[1][1] if found else view.step_s, link))
    found.sort(key=lambda pair: -pair[0])
    kept = [f for _, f in found]
    untold = _untold(view)
    if untold is not None:
        kept.append(untold)
    shared = _waiting_line(view)
    lacks = _lacks(view)
    return [replace(f, evidence=(*f.evidence, *shared), unknown=(*f.unknown, *lacks)) for f in kept or [_healthy(view)]]


def _waiting_line(view: SlowView) -> tuple[str, ...]:
    """What the time in collectives is: never the network alone."""
    waited = sum(m.wait_ns(r) for m in view.meetings for r in m.ranks)
    inside = sum(m.end_ns[r] - m.start_ns[r] for m in view.meetings for r in m.ranks)
    if not inside:
        return ()
    share = 100 * waited / inside
    return (
        f"of the time in collectives {share:.0f} % is waiting for the last to arrive, {100 - share:.0f} % transfer",
    )


def _blamed(view: SlowView, late: slow_late.Late) -> float:
    """Seconds of a step, the mean of ranks, that a cause of waiting explains of its label."""
    if late.cause == BEFORE or len(late.ranks) < len(view.ranks):
        return late.excess_s * len(late.ranks) / len(view.ranks)
    return view.mean_s(*slow_late.CAUSES[late.cause])


def _untold(view: SlowView) -> Finding | None:
    """Exposed collectives whose other side is not recorded."""
    exposed = sum(sum(p.exposed_s for p in rows) / len(rows) for rows in view.parts.values()) / len(view.parts)
    known = view.transfer_s() + view.wait_s()
    rest = exposed - known
    complete = len(view.ranks) >= view.world and bool(view.meetings)
    if rest < MIN_UNTOLD * view.step_s or complete:
        return None
    return Finding(
        "unknown",
        (),
        (),
        confidence="low",
        headline=f"collectives that nothing hides take {of_text(rest, view.step_s)} of every step; how much of it is "
        f"waiting for other ranks and how much is transfer cannot be told from {ranks_text(view.ranks)} of "
        f"{view.world} alone",
        unknown=(f"traces of the other {view.world - len(view.ranks)} ranks, of the same steps",),
        advice=ADVICE["unknown"],
        numbers=(("step_s", view.step_s), ("exposed_s", rest)),
    )


def _healthy(view: SlowView) -> Finding:
    """Nothing takes a share that is worth a word; unknown where most of the time nothing at all is recorded."""
    work = view.mean_s(*COMPUTE)
    if view.step_s > 0 and work + view.wait_s() + view.transfer_s() < MIN_WORK * view.step_s:
        share = 100 * work / view.step_s
        text = f"only {share:.0f} % of the time is computation, and nothing recorded says what the rest is"
        return Finding("unknown", headline=text, advice=ADVICE["unknown"], numbers=(("step_s", view.step_s),))
    whole = len(view.ranks) >= view.world
    wait, transfer = view.wait_s(), view.transfer_s()
    text = (
        f"a step takes {time_text(view.step_s)}, of which {100 * work / view.step_s:.0f} % is computation"
        if view.step_s
        else "no time"
    )
    return Finding(
        "healthy",
        (),
        (),
        confidence="low" if not view.tracks[0].marked else "high" if whole and view.steps > 1 else "medium",
        headline=f"no rank is waited for and nothing but work takes its time: {text}",
        evidence=(f"waiting {time_text(wait)}, exposed transfer {time_text(transfer)} a step, the mean of ranks",),
        numbers=(("step_s", view.step_s), ("compute_s", work), ("wait_s", wait), ("exposed_transfer_s", transfer)),
    )


def _lacks(view: SlowView) -> tuple[str, ...]:
    """What the recording does not hold, the same line of several ranks once."""
    lines: dict[str, list[int]] = {}
    for track in view.incident.tracks:
        for line in track.lacks:
            lines.setdefault(line, []).append(track.rank)
    said = [f"{ranks_text(ranks)}: {line}" for line, ranks in lines.items()]
    absent = view.world - len(view.ranks)
    if absent > 0:
        said.insert(0, f"traces of {absent} of {view.world} ranks: who is waited for among them cannot be told")
    matched = view.matched
    if matched.doubtful:
        said.append(f"{matched.doubtful} collectives do not fit those of their partners by order and time; left out")
    if view.meetings and not matched.numbered:
        said.append("collectives carry no numbers; they are matched by order within group and step")
    return tuple(said[:24])

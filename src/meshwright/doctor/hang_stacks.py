"""Verdicts from stacks alone: who waits in a collective, and who is somewhere else."""

from __future__ import annotations

from meshwright.doctor.advice import ADVICE
from meshwright.doctor.findings import Finding, ranks_text
from meshwright.doctor.incident import Fact, Frame, Incident, user_frame
from meshwright.doctor.view import site_of, stack_of

#: Ranks in a collective that it takes to call another one late.
FEWEST_WAITING = 2


def elsewhere(incident: Incident) -> list[Finding]:
    """The ranks that are in no collective while most are in one; nothing without a stack of most ranks."""
    ranks = sorted({f.rank for f in incident.facts if f.kind == "stack" and f.rank is not None})
    stacks: dict[int, tuple[list[Frame], Fact]] = {}
    for rank in ranks:
        frames, fact = stack_of(incident, rank)
        if fact is not None:
            stacks[rank] = frames, fact
    waiting = tuple(r for r, (_, fact) in stacks.items() if fact.data.get("where") == "collective")
    others = tuple(r for r in stacks if r not in waiting)
    if len(waiting) < FEWEST_WAITING or not others or len(others) >= len(waiting):
        return []
    frame = user_frame(stacks[others[0]][0])
    inside = f"; it sits in {frame.function}, {site_of(frame)}" if frame is not None else ""
    lines = [f"stack of rank {r}: {stacks[r][1].text} ({stacks[r][1].source})" for r in (*others[:4], *waiting[:3])]
    return [
        Finding(
            "host_stuck",
            others,
            waiting,
            site_of(frame),
            None,
            "medium" if len(waiting) > len(others) + 1 else "low",
            f"{ranks_text(others)} is in no collective while {ranks_text(waiting)} wait in one{inside}",
            tuple(lines),
            ("no dumps and no counters: stacks show one moment, and not which call each rank is at",),
            ADVICE["host_stuck"],
            f"{ranks_text(others)} may have passed a call by and ended its work",
        )
    ]

"""What the times of NCCL's Inspector tell: who comes last, what transfers reach, which communicator is slow.

The Inspector times each collective on each rank from its begin to its end, waiting included. All end together, so the
rank with the shortest time came last, and its time is the transfer. Bus bandwidth as the Inspector writes it takes
waiting for transfer.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from statistics import median

from meshwright.doctor.findings import Finding, ranks_text
from meshwright.doctor.incident import Incident
from meshwright.doctor.readers.kineto_calls import wire_bytes
from meshwright.doctor.readers.kineto_names import op_of
from meshwright.doctor.slow_advice import ADVICE
from meshwright.doctor.slow_words import bytes_text, of_text, rate_text

#: A rank is late when it is last in this share of the collectives and this share of the others' time is waiting.
LAST_SHARE, WAIT_SHARE = 0.6, 0.2
#: A communicator is slow below this share of what its like reach.
SLOW = 0.5
MIN_CALLS = 3

Times = dict[int, tuple[int, int, str]]


def findings(incident: Incident) -> list[Finding]:
    """Late ranks by communicator, then slow communicators; ``healthy`` without either."""
    by: dict[str, list[tuple[str, Times]]] = defaultdict(list)
    for (identity, op, _), times in incident.timings.items():
        if len(times) > 1:
            by[identity].append((op, times))
    if not by:
        return []
    late = [f for identity, calls in by.items() if (f := _late(identity, calls)) is not None]
    late.sort(key=lambda f: -f.numbers[0][1])
    ranks = _global_ranks(incident)
    return [_renumbered(f, ranks) for f in (*late, *_slow(by))] or [_healthy(by)]


Places = dict[tuple[str, int], int]


def _global_ranks(incident: Incident) -> Places:
    """(communicator, place in it) -> rank: the place of the same process in the one communicator that is the widest.

    Empty where several are equally wide, or a process drives several devices.
    """
    rows = [f.data for f in incident.facts if f.kind == "inspector" and f.data.get("pid") is not None]
    widest = max((n for d in rows if isinstance(n := d.get("nranks"), int)), default=0)
    whole = [d for d in rows if d.get("nranks") == widest]
    if len({d.get("comm_id") for d in whole}) != 1:
        return {}
    of = {(d.get("host"), d.get("pid")): d.get("comm_rank") for d in whole}
    if len(of) < len(whole):
        return {}
    found: Places = {}
    for d in rows:
        rank, place = of.get((d.get("host"), d.get("pid"))), d.get("comm_rank")
        if isinstance(rank, int) and isinstance(place, int):
            found[str(d.get("comm_id")), place] = rank
    return found


def _renumbered(finding: Finding, ranks: Places) -> Finding:
    """The finding with ranks of the job in place of places in its communicator, where all of them are known."""
    group = finding.group or ""
    places = (*finding.guilty_ranks, *finding.waiting_ranks)
    if any((group, place) not in ranks for place in places) or all(ranks[group, p] == p for p in places):
        return finding
    guilty, waiting = (
        tuple(sorted(ranks[group, place] for place in side)) for side in (finding.guilty_ranks, finding.waiting_ranks)
    )
    text = finding.headline.replace(ranks_text(finding.guilty_ranks), ranks_text(guilty), 1)
    return replace(finding, guilty_ranks=guilty, waiting_ranks=waiting, headline=text)


def _late(identity: str, calls: list[tuple[str, Times]]) -> Finding | None:
    if len(calls) < MIN_CALLS:
        return None
    last = [min(times, key=lambda r: times[r][0]) for _, times in calls]
    rank = max(sorted(set(last)), key=last.count)
    spent = sum(t[0] for _, times in calls for r, t in times.items() if r != rank)
    waited = sum(
        max(0, t[0] - times[rank][0]) for _, times in calls if rank in times for r, t in times.items() if r != rank
    )
    if last.count(rank) < LAST_SHARE * len(calls) or waited < WAIT_SHARE * spent:
        return None
    others = len({r for _, times in calls for r in times} - {rank})
    mean_wait, mean_spent = (x / 1e6 / len(calls) / others for x in (waited, spent))
    return Finding(
        "compute_straggler",
        (rank,),
        tuple(sorted({r for _, times in calls for r in times} - {rank})),
        confidence="low",
        headline=f"{ranks_text((rank,))} of communicator {identity} comes last in {last.count(rank)} of {len(calls)} "
        f"collectives; {of_text(mean_wait, mean_spent)} that the others spend in one is waiting for it, not the "
        "network",
        evidence=("the shortest time in a collective is that of the last to arrive (NCCL Inspector)",),
        unknown=("what it does meanwhile: profiler traces of that rank and of one other",),
        advice=ADVICE["compute_straggler"],
        alternative="it may wait for data or its host: times of collectives alone do not tell",
        group=identity,
        numbers=(
            ("wait_s", mean_wait),
            ("own_s", mean_spent - mean_wait),
            ("share_of_collectives", last.count(rank) / len(calls)),
        ),
    )


def _rates(calls: list[tuple[str, Times]]) -> dict[tuple[str, int, int], float]:
    """(operation, ranks, size class) -> bytes a second over the wire, in the middle."""
    found: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for op, times in calls:
        took, size = min(t[0] for t in times.values()), max(t[1] for t in times.values())
        name = op_of(op)
        if name in ("all_gather", "reduce_scatter"):  # the piece of a rank is what is counted (its algobw is of all)
            size *= len(times)
        moved = wire_bytes(name, size, size if name == "all_gather" else None, len(times))
        if moved:
            found[name, len(times), size.bit_length()].append(moved / (took / 1e6))
    return {key: median(rates) for key, rates in found.items()}


def _slow(by: dict[str, list[tuple[str, Times]]]) -> list[Finding]:
    """Communicators that move the same bytes at less than half the speed of others."""
    rates = {identity: _rates(calls) for identity, calls in by.items()}
    found = []
    for identity, own in rates.items():
        shares = []
        for key, rate in own.items():
            others = [r[key] for name, r in rates.items() if name != identity and key in r]
            if others:
                shares.append((rate / median(others), key, rate, median(others)))
        if shares and (worst := min(shares))[0] < SLOW:
            found.append(_link(identity, by[identity], *worst))
    return found


def _link(
    identity: str, calls: list[tuple[str, Times]], share: float, key: tuple[str, int, int], rate: float, usual: float
) -> Finding:
    ranks = tuple(sorted({r for _, times in calls for r in times}))
    hosts = sorted({t[2] for _, times in calls for t in times.values() if t[2]})
    return Finding(
        "slow_link",
        ranks,
        confidence="medium",
        headline=f"{key[0]} of communicator {identity} ({ranks_text(ranks)} on "
        f"{', '.join(hosts[:4]) or 'unknown hosts'}) runs at {rate_text(rate)}, others of its size at "
        f"{rate_text(usual)}: {100 * share:.0f} %",
        evidence=(f"messages of about {bytes_text(1 << (key[2] - 1))}, the last to arrive timed",),
        unknown=("which NIC: a log with NCCL_DEBUG=INFO tells",),
        advice=ADVICE["slow_link"],
        group=identity,
        op=key[0],
        numbers=(("rate_bytes_s", rate), ("usual_bytes_s", usual), ("share", share)),
    )


def _healthy(by: dict[str, list[tuple[str, Times]]]) -> Finding:
    best: dict[str, float] = {}
    for calls in by.values():
        for (op, _, _), rate in _rates(calls).items():
            best[op] = max(best.get(op, 0.0), rate)
    shown = ", ".join(f"{op} {rate_text(rate)}" for op, rate in sorted(best.items()))
    text = f"no rank comes last again and again, no communicator is slower than its like; over the wire: {shown}"
    return Finding("healthy", confidence="low", headline=text, unknown=("computation: only collectives were timed",))

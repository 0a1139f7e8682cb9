"""Ranks that make others wait: which, doing what, in every step or now and then, and what the step takes without it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median

from meshwright.doctor.findings import Finding, ranks_text
from meshwright.doctor.slow_advice import ADVICE
from meshwright.doctor.slow_replay import Less, step_seconds
from meshwright.doctor.slow_view import BEFORE, SlowView, Visit
from meshwright.doctor.slow_words import faster_text, of_text, time_text
from meshwright.ledger.tracks import COMPUTE, PLACE

#: A rank is guilty when this share of a cause's waiting is due to it; together the guilty have this share of it.
GUILTY_SHARE, TOGETHER_SHARE = 0.15, 0.85
#: It does clearly more than the mean from this factor on.
MORE = 1.08
#: It is systematic when the same rank is the latest in this share of the steps.
SYSTEMATIC = 0.7
#: Waiting counts from this share of a step, where every rank is late now and then from a larger one; and only where the
#: guilty spend this share of a step more than the others.
MIN_SHARE, JITTER, MIN_EXCESS = 0.05, 0.1, 0.02
#: Operators or kernels that must all be slower by about as much before a device counts as throttled.
MIN_ALIKE, ALIKE = 5, 0.12

#: Cause -> labels that tell of it.
CAUSES: dict[str, tuple[str, ...]] = {
    "data": ("data",),
    "gc": ("gc",),
    "compile": ("compile",),
    "checkpoint": ("checkpoint",),
    "sync": ("sync",),
    "compute": (*COMPUTE, "copy"),
    "host": ("launch", "idle"),
    BEFORE: (BEFORE,),
}
_DOES = {
    "data": "waits for data",
    "gc": "collects garbage",
    "compile": "compiles",
    "checkpoint": "writes a checkpoint",
    "sync": "synchronizes with its device",
    "compute": "computes",
    "host": "is held up by its host",
    BEFORE: "began the recorded steps late",
}

_PLURAL = {"data": "wait for data", "sync": "synchronize with their devices", "host": "are held up by their hosts"} | {
    "gc": "collect garbage",
    BEFORE: _DOES[BEFORE],
}


@dataclass(frozen=True, slots=True)
class Late:
    """One cause of waiting.

    Attributes:
        cause: of ``CAUSES``. ranks: the guilty. wait_s: exposed waiting of the others a step. op: where they wait.
        steps: share of the steps in which one of the guilty is the one that is late.
        after_s: a step without it. excess_s: what the guilty spend beyond the others, a step.
    """

    cause: str
    ranks: tuple[int, ...]
    wait_s: float
    op: str
    steps: float
    after_s: float
    excess_s: float


def causes(view: SlowView) -> list[Late]:
    """All causes of waiting, the one that costs most first."""
    by: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    ops: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    names = {label: cause for cause, labels in CAUSES.items() for label in labels}
    for blame in view.blames:
        cause = names[blame.label]
        by[cause][blame.rank] += blame.wait_s / view.steps
        ops[cause][blame.op] += blame.wait_s
    found = []
    for cause, of in by.items():
        total = sum(of.values())
        ranks: list[int] = []
        for rank in sorted(of, key=lambda r: -of[r]):
            if of[rank] >= GUILTY_SHARE * total and sum(of[r] for r in ranks) < TOGETHER_SHARE * total:
                ranks.append(rank)
        guilty = _more(view, cause, tuple(sorted(ranks)) or tuple(sorted(of)))
        balanced = cause == "compute" and pipelined(view)
        after = step_seconds(view, _balanced(view) if balanced else _without(view, cause, guilty))
        excess = _excess(view, cause, guilty)
        op = max(ops[cause], key=lambda o: ops[cause][o])
        found.append(Late(cause, guilty, total, op, _steps(view, cause, guilty), after, excess))
    return sorted(found, key=lambda late: -late.wait_s)


def _more(view: SlowView, cause: str, guilty: tuple[int, ...]) -> tuple[int, ...]:
    """Where every rank is late now and then: those that do clearly more of it than the mean, else all (jitter)."""
    if len(guilty) < len(view.ranks) or cause == BEFORE:
        return guilty
    own = {r: view.label_s(r, *CAUSES[cause]) for r in guilty}
    even = sum(own.values()) / len(own)
    return tuple(r for r in guilty if own[r] > MORE * even) or guilty


def _beyond(view: SlowView, place: int, rank: int, visit: Visit, labels: tuple[str, ...]) -> float:
    """What a rank spent so before a meeting beyond what the others did, nanoseconds."""
    row = view.visits[place]
    others = [v for r, v in row.items() if r != rank and v.since == visit.since] or [
        v for r, v in row.items() if r != rank
    ]
    if not others:
        return 0.0
    if labels == (BEFORE,):
        return max(0.0, visit.origin - median(v.origin for v in others)) if visit.since < 0 else 0.0
    return sum(max(0.0, float(visit.gap[PLACE[n]]) - median(float(v.gap[PLACE[n]]) for v in others)) for n in labels)


def _without(view: SlowView, cause: str, guilty: tuple[int, ...]) -> Less:
    """Without what the guilty do beyond the others of a meeting; where all of it are guilty, beyond the ranks that
    are not, of which they take the same share off everywhere."""
    labels, others = CAUSES[cause], [r for r in view.ranks if r not in guilty]
    beyond = {}
    if others and cause != BEFORE:
        usual = median(view.label_s(r, *labels) for r in others)
        beyond = {r: max(0.0, 1 - usual / own) for r in guilty if (own := view.label_s(r, *labels)) > 0}

    def less(place: int, rank: int, visit: Visit) -> float:
        if rank not in guilty:
            return 0.0
        if beyond and all(r in guilty for r in view.visits[place]):
            return sum(float(visit.gap[PLACE[n]]) for n in labels) * beyond.get(rank, 0.0)
        return _beyond(view, place, rank, visit, labels)

    return less


def _balanced(view: SlowView) -> Less:
    """All ranks compute as long as they do in the mean."""
    own = {r: view.label_s(r, *COMPUTE) for r in view.ranks}
    even = sum(own.values()) / len(own)
    places = [PLACE[name] for name in COMPUTE]

    def less(place: int, rank: int, visit: Visit) -> float:
        return float(visit.gap[places].sum()) * (1 - even / own[rank]) if own[rank] > 0 else 0.0

    return less


def _excess(view: SlowView, cause: str, guilty: tuple[int, ...]) -> float:
    """Seconds a step that the guilty spend beyond the others, the mean of them."""
    labels = CAUSES[cause]
    if cause == BEFORE:
        return 0.0
    others = [r for r in view.ranks if r not in guilty]
    if not others:
        return 0.0
    own = sum(view.label_s(r, *labels) for r in guilty) / len(guilty)
    return max(0.0, own - median(view.label_s(r, *labels) for r in others))


def _steps(view: SlowView, cause: str, guilty: tuple[int, ...]) -> float:
    """Share of the steps with waiting in which the first of the guilty is the one who is late."""
    labels = CAUSES[cause]
    late: dict[int | None, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for blame in view.blames:
        if blame.label in labels:
            late[blame.step][blame.rank] += blame.wait_s
    least = 0.1 * sum(sum(of.values()) for of in late.values()) / max(1, len(late))
    worst = [max(of, key=of.__getitem__) for of in late.values() if sum(of.values()) >= least]
    if not worst:
        return 0.0
    return max(worst.count(r) for r in guilty) / view.steps


def counts(view: SlowView, late: Late) -> bool:
    """Whether a cause is worth a finding: more than jitter, and seen in what the guilty spend as a whole."""
    everyone = len(late.ranks) == len(view.ranks)
    if late.wait_s < (JITTER if everyone else MIN_SHARE) * view.step_s:
        return False
    # Ranks that take turns spend no more than others in sum.
    turns = len(late.ranks) > 1 and late.steps < SYSTEMATIC and late.wait_s >= JITTER * view.step_s
    return late.cause == BEFORE or everyone or turns or late.excess_s >= MIN_EXCESS * view.step_s


def finding(view: SlowView, late: Late, transfer: str) -> Finding:
    """The cause as a finding; ``transfer`` says what the collective itself takes."""
    kind, confidence = _kind(view, late)
    who = ranks_text(late.ranks)
    one = len(late.ranks) == 1
    waiting = tuple(r for r in view.ranks if r not in late.ranks)
    own = sum(view.label_s(r, *CAUSES[late.cause]) for r in late.ranks) / len(late.ranks) if late.cause != BEFORE else 0
    return Finding(
        kind,
        late.ranks,
        waiting,
        confidence=confidence,
        headline=_headline(view, late, kind, who, own, transfer, one),
        evidence=_evidence(view, late),
        unknown=_unknown(view, late),
        advice=ADVICE[kind],
        alternative=_alternative(view, late, kind),
        op=late.op,
        numbers=(
            ("step_s", view.step_s),
            ("own_s", own),
            (
                "all_ranks_s",
                sum(view.label_s(r, *CAUSES[late.cause]) for r in view.ranks) if late.cause != BEFORE else 0.0,
            ),
            ("excess_s", late.excess_s),
            ("wait_s", late.wait_s),
            ("step_without_s", late.after_s),
            ("share_of_steps", late.steps),
        ),
    )


def _headline(view: SlowView, late: Late, kind: str, who: str, own: float, transfer: str, one: bool) -> str:
    does = _DOES[late.cause]
    does = does if one else _PLURAL.get(late.cause, does.replace("s", "", 1))
    how = "of every step" if late.steps >= SYSTEMATIC else "of a step on average, not in every step"
    other = "rank's" if len(view.ranks) - len(late.ranks) == 1 else "ranks'"
    wait = f"the other {other} {late.op} time is waiting for {'it' if one else 'them'}, not the network"
    if late.cause == BEFORE:
        begin = f"{who} {does}, by {time_text(late.wait_s)} of waiting a step; the cause lies before the recording"
    elif kind == "sequence_imbalance":
        begin = f"another rank is late in each step with more to compute, {time_text(late.wait_s)} of {_step(view)}"
    elif len(late.ranks) == len(view.ranks):
        total = sum(view.label_s(r, *CAUSES[late.cause]) for r in view.ranks)
        begin = f"{who} {does} at different times, {of_text(total, view.step_s)} of a step in sum"
        wait = f"time in {late.op} is waiting for each other, not the network"
    else:
        begin = f"{who} {does} {of_text(own, view.step_s)} {how}"
        if late.cause == "compute":
            begin += f", {time_text(late.excess_s)} more than the others"
    text = f"{begin}; {wait}. {transfer}".rstrip()
    if late.cause == BEFORE:
        return text
    whose = f"{who}'s stall" if one and late.cause != "compute" else "this"
    return f"{text} Without {whose} {faster_text(view.step_s, late.after_s)}"


def _step(view: SlowView) -> str:
    return time_text(view.step_s)


def _kind(view: SlowView, late: Late) -> tuple[str, str]:
    sure = "high" if len(view.ranks) >= view.world else "medium"
    plain = {"data": "input_bound", "gc": "gc_pauses", "compile": "launch_bound", "sync": "sync_bound"}
    if late.cause in plain:
        return plain[late.cause], sure
    if late.cause == "checkpoint":
        return "sync_bound", "medium"
    if late.cause == BEFORE:
        return "unknown", "low"
    if late.cause == "host":
        return _host_kind(view, late)
    if pipelined(view):
        return "stage_imbalance", sure
    if late.op == "all_to_all":
        return "expert_imbalance", sure
    if late.steps < SYSTEMATIC and len(late.ranks) > 1:
        return "sequence_imbalance", "medium"
    return ("throttled" if view.on_device and _alike(view, late.ranks) else "compute_straggler"), sure


def _host_kind(view: SlowView, late: Late) -> tuple[str, str]:
    """Time in which nothing is recorded: pauses now and then, or every step."""
    if late.steps < SYSTEMATIC:
        return "gc_pauses", "low"
    return ("launch_bound", "medium") if view.on_device else ("compute_straggler", "medium")


def pipelined(view: SlowView) -> bool:
    """Whether ranks hand activations on."""
    return any(c.op in ("send", "recv") for t in view.tracks for c in t.calls)


def bubble_line(view: SlowView) -> tuple[str, ...]:
    """Waiting in hand-offs beside the bubble of a pipeline whose stages are equal: (p - 1) / (m + p - 1), of p stages
    and m micro-batches (Narayanan et al. 2021, arXiv 2104.04473, section 2.2; one chunk a stage)."""
    pairs = {m.group for m in view.meetings if m.op == "send"}
    stages = 1 + len({frozenset(str(p).split("->")) for p in pairs})
    if stages < 2 or stages > len(view.ranks):
        return ()
    often = sum(m.op == "send" for m in view.meetings) / len(pairs) / view.steps
    waited = sum(
        v.exposed_wait
        for m, row in zip(view.meetings, view.visits, strict=True)
        if m.op == "send"
        for v in row.values()
    )
    share = waited / 1e9 / view.steps / len(view.ranks) / view.step_s if view.step_s else 0.0
    closed = (stages - 1) / (often + stages - 1)
    return (
        f"pipeline of {stages} stages and {often:.0f} micro-batches: {100 * share:.0f} % of the step is waiting in "
        f"hand-offs; with equal stages the bubble is {100 * closed:.0f} %",
    )


def _alike(view: SlowView, guilty: tuple[int, ...]) -> bool:
    """Whether the same kernels, equally often, are all slower by about the same factor."""
    ratios = slower(view, guilty)
    if len(ratios) < MIN_ALIKE:
        return False
    middle = median(ratios)
    return middle > 1.05 and median(abs(r - middle) for r in ratios) < ALIKE * middle


def slower(view: SlowView, guilty: tuple[int, ...]) -> list[float]:
    """Factors by which kernels of the guilty take longer than the same ones of the others, run equally often."""
    others = [t for t in view.tracks if t.rank not in guilty]
    ratios = []
    for track in view.tracks:
        if track.rank not in guilty:
            continue
        for name, (often, spent) in list(track.work.items())[:40]:
            same = [t.work[name] for t in others if name in t.work and t.work[name][0] == often]
            usual = median(s for _, s in same) if same else 0
            if usual > 0 and spent > 0:
                ratios.append(spent / usual)
    return ratios


def _evidence(view: SlowView, late: Late) -> tuple[str, ...]:
    labels = CAUSES[late.cause]
    lines = []
    if late.cause != BEFORE:
        rows = sorted(view.ranks, key=lambda r: -view.label_s(r, *labels))
        shown = ", ".join(f"rank {r} {time_text(view.label_s(r, *labels))}" for r in rows[:6])
        lines.append(f"{' and '.join(labels[:3])} a step: {shown}{', ...' if len(rows) > 6 else ''}")
    waits = sorted(view.ranks, key=lambda r: -view.wait_s(r))
    lines.append("waiting a step: " + ", ".join(f"rank {r} {time_text(view.wait_s(r))}" for r in waits[:8]))
    last = [m.last for m in view.meetings]
    worst = max(set(last), key=last.count)
    lines.append(f"last to arrive: rank {worst} in {last.count(worst)} of {len(last)} collectives")
    ratios = slower(view, late.ranks) if late.cause == "compute" else []
    if len(ratios) >= MIN_ALIKE:
        lines.append(f"the same operations take {median(ratios):.2f} times as long there ({len(ratios)} compared)")
    return (*lines, *(bubble_line(view) if pipelined(view) else ()))


def _unknown(view: SlowView, late: Late) -> tuple[str, ...]:
    lines = []
    if late.cause == "host":
        lines.append("what the host does there: record with_stack=True and record_python_gc_info=True")
    if late.cause == BEFORE:
        lines.append("what came before: record several steps")
    return tuple(lines)


def _alternative(view: SlowView, late: Late, kind: str) -> str | None:
    if late.cause == "host" and kind == "gc_pauses":
        return "another pause of the process: paging, the GIL, a noisy neighbour; no event of the recording tells"
    if kind == "compute_straggler" and late.cause == "host":
        return "work that no operator shows, or a process that does not get its core"
    if kind == "sync_bound" and late.cause == "checkpoint":
        return "asynchronous checkpoints, or all ranks writing at once, would take it off the path"
    return None

"""Why a pipelined training job is slow, from its operations played again: slow workers, stages, sequences, pauses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import numpy as np

from meshwright.doctor.findings import Finding, ranks_text
from meshwright.doctor.job import Job
from meshwright.doctor.slow_advice import ADVICE
from meshwright.doctor.slow_words import faster_text, time_text
from meshwright.ledger.pipeline_graph import COMPUTE, graph_of
from meshwright.ledger.replay import Graph, Op, Seconds, ideal_seconds, play, replaced, work_seconds

#: Slowdown from which on a job has stragglers; share of the workers that counts as the worst (both as in the paper).
MIN_SLOWDOWN, WORST = 1.05, 0.03
#: Share of the loss that a cause must explain to be named first; of the rest, to be named at all.
MAIN, NAMED = 0.5, 0.1
#: A worker computes longer than its peers from this factor on.
COMPUTES_MORE = 1.1


@dataclass(frozen=True, slots=True)
class Loss:
    """What the job loses, and to what.

    Attributes:
        step_s: of a step, delays of launching left out. ideal_s: nobody slower than others. recorded_s: as it was.
        workers: the worst ones, with the share of the loss that goes away without them (``workers_share``).
        link, link_factor: ranks of the pair whose hand-offs take so many times what others do; empty where no one
            pair stands out.
        slow, slow_share: the worst workers and those that are slow like them, and what goes away without all of these.
        last_stage_share: the same without the last stage being different. shares: by cause.
    """

    step_s: float
    ideal_s: float
    recorded_s: float
    workers: tuple[int, ...]
    workers_share: float
    last_stage_share: float
    shares: dict[str, float]
    factor: float
    where: str
    link: tuple[int, ...] = ()
    link_factor: float = 1.0
    slow: tuple[int, ...] = ()
    slow_share: float = 0.0

    @property
    def slowdown(self) -> float:
        """How many times longer than ideal."""
        return self.step_s / self.ideal_s if self.ideal_s else 1.0


def loss_of(job: Job) -> Loss:
    """Play the job with and without each cause.

    Raises:
        ValueError: the operations make no graph.
    """
    graph = graph_of(job.ops)
    order, seconds = graph.order(), work_seconds(graph)
    ideal = ideal_seconds(graph, seconds)

    def mean(values: list[Seconds]) -> float:
        return float(play(graph, order, values).mean())

    step, best = mean(seconds), mean(ideal)
    lost = max(step - best, 1e-12)
    cells = _scores(graph, seconds, ideal, mean)
    count = ceil(WORST * len(cells))
    worst = sorted(cells, key=lambda cell: (-cells[cell], cell))[:count]
    without = mean(_workers(graph, seconds, ideal, worst))
    stages = 1 + max(op.stage for op in graph.ops)
    last = mean(replaced(seconds, ideal, lambda p: graph.ops[p].stage == stages - 1))
    shares = {
        "workers": (step - without) / lost,
        "stages": max(step - mean(_balanced_stages(graph, seconds)), step - last) / lost if stages > 1 else 0.0,
        "sequences": (step - mean(_same_sequences(graph, seconds))) / lost,
        "communication": (step - mean(replaced(seconds, ideal, lambda p: graph.ops[p].communicates))) / lost,
        "gc": (step - mean(_no_pauses(graph, seconds))) / lost,
    }
    copy, stage = worst[0]
    slow = _alike(graph, seconds, {cell: score - best for cell, score in cells.items()}, worst)
    ends = np.maximum.reduce([op.end_s for op in graph.ops]).max(axis=0)
    pair, slower = _slow_pair(graph, seconds)
    return Loss(
        step,
        best,
        float(ends.mean()),
        tuple(job.rank(job.copies[c], s) for c, s in worst),
        shares["workers"],
        (step - last) / lost,
        shares,
        _factor(graph, seconds, copy, stage),
        f"stage {stage} of copy {job.copies[copy]}",
        tuple(sorted(job.rank(job.copies[c], s) for c, s in pair)),
        slower,
        tuple(sorted(job.rank(job.copies[c], s) for c, s in slow)),
        (step - mean(_workers(graph, seconds, ideal, slow))) / lost,
    )


Cells = dict[tuple[int, int], float]


def _scores(
    graph: Graph, seconds: list[Seconds], ideal: list[Seconds], mean: Callable[[list[Seconds]], float]
) -> Cells:
    """How much longer a step gets by a worker alone: the smaller of what its copy and its stage alone cost."""
    copies = graph.ops[0].start_s.shape[0]
    stages = 1 + max(op.stage for op in graph.ops)
    rows = np.arange(copies)[:, None]

    def only_copy(copy: int) -> float:
        return mean(replaced(ideal, seconds, lambda p: rows == copy))

    def only_stage(stage: int) -> float:
        return mean(replaced(ideal, seconds, lambda p: graph.ops[p].stage == stage))

    by_copy, by_stage = [only_copy(c) for c in range(copies)], [only_stage(s) for s in range(stages)]
    return {(c, s): min(by_copy[c], by_stage[s]) for c in range(copies) for s in range(stages)}


def _workers(graph: Graph, seconds: list[Seconds], ideal: list[Seconds], cells: list[tuple[int, int]]) -> list[Seconds]:
    rows = np.arange(graph.ops[0].start_s.shape[0])[:, None]
    copies = {s: [c for c, t in cells if t == s] for _, s in cells}
    return replaced(seconds, ideal, lambda p: np.isin(rows, copies.get(graph.ops[p].stage, [])))


def _balanced_stages(graph: Graph, seconds: list[Seconds]) -> list[Seconds]:
    """Computation of every stage scaled so that all stages take what they take in the middle."""
    typical: dict[tuple[str, int], float] = {}
    for kind in COMPUTE:
        for stage in {op.stage for op in graph.ops}:
            held = [seconds[p] for p, op in enumerate(graph.ops) if op.kind == kind and op.stage == stage]
            if held:
                typical[kind, stage] = float(np.median(np.stack(held).mean(axis=0)))
    even = {kind: float(np.mean([v for (k, _), v in typical.items() if k == kind])) for kind, _ in typical}
    out = []
    for op, own in zip(graph.ops, seconds, strict=True):
        usual = typical.get((op.kind, op.stage), 0.0)
        out.append(own * (even[op.kind] / usual) if usual > 0 else own)
    return out


def _same_sequences(graph: Graph, seconds: list[Seconds]) -> list[Seconds]:
    """Every micro-batch of a worker as long as its usual one: nothing but what is in the data differs between them."""
    held: dict[tuple[str, int, int | None], list[Seconds]] = {}
    for op, own in zip(graph.ops, seconds, strict=True):
        if op.kind in COMPUTE:
            held.setdefault((op.kind, op.stage, op.chunk), []).append(own)
    mean = {key: np.stack(rows).mean(axis=(0, 2))[:, None] for key, rows in held.items()}
    out = []
    for op, own in zip(graph.ops, seconds, strict=True):
        key = (op.kind, op.stage, op.chunk)
        out.append(np.broadcast_to(mean[key], own.shape) if key in mean else own)
    return out


def _no_pauses(graph: Graph, seconds: list[Seconds]) -> list[Seconds]:
    return [np.zeros_like(s) if op.kind == "gc" else s for op, s in zip(graph.ops, seconds, strict=True)]


#: A worker is slow like the worst when alone it costs this share of what the worst does.
LIKE_WORST = 0.5


def _alike(graph: Graph, seconds: list[Seconds], costs: Cells, worst: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The worst workers and others that compute longer than their peers and cost nearly as much; of no stage more than
    half of the copies, which would be the stage."""
    copies = graph.ops[0].start_s.shape[0]
    least = LIKE_WORST * costs[worst[0]]
    more = [c for c, cost in costs.items() if cost >= least > 0 and _factor(graph, seconds, *c) >= COMPUTES_MORE]
    kept = [c for c in more if 2 * sum(other[1] == c[1] for other in more) <= copies]
    return sorted({*worst, *kept})


#: A pair's link is slow from this factor over the others', where it has this share of what all pairs take beyond it.
SLOW_PAIR, ITS_SHARE = 2.0, 0.5


def _slow_pair(graph: Graph, seconds: list[Seconds]) -> tuple[tuple[tuple[int, int], ...], float]:
    """The two workers (copy, stage) whose hand-offs are slow while others are not, and by which factor."""
    stages = 1 + max(op.stage for op in graph.ops)
    taken: dict[tuple[int, int], float] = {}
    for op, own in zip(graph.ops, seconds, strict=True):
        other = _OTHER_SIDE.get(op.kind)
        if other is None:
            continue
        lower = (op.stage if other > 0 else op.stage - 1) % stages
        for copy, spent in enumerate(own.mean(axis=1)):
            taken[copy, lower] = taken.get((copy, lower), 0.0) + float(spent)
    if len(taken) < 3:
        return (), 1.0
    worst = max(taken, key=lambda cell: taken[cell])
    usual = float(np.median(list(taken.values())))
    beyond = sum(max(0.0, t - usual) for t in taken.values())
    if usual <= 0 or taken[worst] < SLOW_PAIR * usual or taken[worst] - usual < ITS_SHARE * beyond:
        return (), 1.0
    copy, lower = worst
    return ((copy, lower), (copy, (lower + 1) % stages)), taken[worst] / usual


#: Where the other side of a hand-off is: a stage up or down.
_OTHER_SIDE = {"forward-send": 1, "forward-recv": -1, "backward-send": -1, "backward-recv": 1}


def _factor(graph: Graph, seconds: list[Seconds], copy: int, stage: int) -> float:
    """How many times longer a worker computes than workers of the other copies at its stage (else all others)."""
    own = sum(float(s[copy].sum()) for op, s in zip(graph.ops, seconds, strict=True) if _is(op, stage))
    copies = graph.ops[0].start_s.shape[0]
    if copies > 1:
        rest = sum(
            float(np.delete(s, copy, axis=0).sum()) for op, s in zip(graph.ops, seconds, strict=True) if _is(op, stage)
        )
        return own * (copies - 1) / rest if rest else 1.0
    others = sum(
        float(s[copy].sum())
        for op, s in zip(graph.ops, seconds, strict=True)
        if op.kind in COMPUTE and op.stage != stage
    )
    stages = 1 + max(op.stage for op in graph.ops)
    return own * (stages - 1) / others if others else 1.0


def _is(op: Op, stage: int) -> bool:
    return op.kind in COMPUTE and op.stage == stage


_KINDS = {
    "workers": "compute_straggler",
    "stages": "stage_imbalance",
    "sequences": "sequence_imbalance",
    "communication": "bandwidth_bound_comm",
    "gc": "gc_pauses",
}


def findings(job: Job) -> list[Finding]:
    """One a cause that explains its share, the largest first; ``healthy`` without stragglers."""
    try:
        loss = loss_of(job)
    except ValueError as error:
        return [Finding("unknown", headline=f"{job.source}: {error}", advice=ADVICE["unknown"])]
    numbers = (
        ("step_s", loss.step_s),
        ("step_without_s", loss.ideal_s),
        ("slowdown", loss.slowdown),
        ("recorded_step_s", loss.recorded_s),
        ("share_of_worst_workers", loss.workers_share),
        ("share_of_last_stage", loss.last_stage_share),
        *((f"share_{name}", share) for name, share in loss.shares.items()),
    )
    if loss.slowdown < MIN_SLOWDOWN:
        text = f"no worker, stage or sequence holds the others up: {loss.slowdown:.2f}x of the ideal step"
        return [Finding("healthy", confidence="high", headline=text, numbers=numbers)]
    ranked = sorted(loss.shares.items(), key=lambda pair: -pair[1])
    if loss.link and loss.factor < COMPUTES_MORE:  # a worker without its slow link is not slow
        ranked = [pair for pair in ranked if pair[0] != "workers"]
    elif loss.workers_share >= MAIN:
        ranked.sort(key=lambda pair: pair[0] != "workers")
    named = [name for name, share in ranked if share >= NAMED] or [ranked[0][0]]
    return [_finding(job, loss, name, numbers) for name in named]


def _finding(job: Job, loss: Loss, name: str, numbers: tuple[tuple[str, float], ...]) -> Finding:
    kind = "slow_link" if name == "communication" and loss.link else _KINDS[name]
    share = loss.slow_share if name == "workers" else loss.shares[name]
    after = loss.step_s - share * (loss.step_s - loss.ideal_s)
    who: tuple[int, ...] = ()
    if name == "workers":
        who = loss.slow
        many = f"compute up to {loss.factor:.2g}x as long as their peers"
        one = f"({loss.where}) computes {loss.factor:.2g}x as long as its peers"
        head = f"{ranks_text(who)} {one if len(who) == 1 else many}, and the others wait"
    elif name == "stages":
        who = _slow_stage(job)
        head = f"stages are unequal: {ranks_text(who)} compute longest, and the others wait"
    elif name == "sequences":
        head = "micro-batches are unequal: their lengths differ, and the others wait for the longest"
    elif name == "gc":
        head = "garbage collection stops workers one by one, and the others wait"
    elif loss.link:
        who = loss.link
        head = f"hand-offs between {ranks_text(who)} take {loss.link_factor:.2g}x as long as others, and the rest wait"
    else:
        head = "transfers differ, and the slow ones hold the step up"
    head += f": {100 * min(share, 1.0):.0f} % of what is lost. The step takes {loss.slowdown:.2f}x the ideal one"
    ops = "; ".join(f"{n} {100 * s:.0f} %" for n, s in loss.shares.items())
    return Finding(
        kind,
        who,
        (),
        confidence="high" if share >= MAIN else "medium",
        headline=f"{head}. Without this {faster_text(loss.step_s, after)}",
        evidence=(
            f"played again: {time_text(loss.step_s)} a step, {time_text(loss.ideal_s)} with nobody slower than others "
            f"(recorded {time_text(loss.recorded_s)} with delays of launching)",
            f"share of the loss that goes away: without the worst workers {loss.workers_share:.2f}, with a usual last "
            f"stage {loss.last_stage_share:.2f}",
            f"by cause: {ops}",
            _bubble(job, loss),
        ),
        advice=ADVICE[kind],
        numbers=numbers,
    )


def _bubble(job: Job, loss: Loss) -> str:
    """Time without computation beside the closed form (p - 1) / (m v + p - 1) of p equal stages, m micro-batches and v
    chunks a stage (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)."""
    stages = 1 + max(op.stage for op in job.ops)
    passes = sum(op.kind == "forward-compute" for op in job.ops) / stages
    closed = (stages - 1) / (passes + stages - 1)
    work = sum(float(op.duration_s.mean()) for op in job.ops if op.kind in COMPUTE) / stages
    idle = 1 - work / loss.recorded_s
    return (
        f"pipeline of {stages} stages, {passes:.0f} passes each: {100 * idle:.0f} % of the step is not computation; "
        f"the bubble of equal stages is {100 * closed:.0f} %"
    )


def _slow_stage(job: Job) -> tuple[int, ...]:
    """Ranks of the stage that computes longest."""
    totals: dict[int, float] = {}
    for op in job.ops:
        if op.kind in COMPUTE:
            totals[op.stage] = totals.get(op.stage, 0.0) + float(np.median(op.duration_s))
    stage = max(totals, key=lambda s: totals[s])
    return tuple(sorted(job.rank(copy, stage) for copy in job.copies))

"""The predicted timeline: when every entry of a pass or of a step starts and ends.

Serving: one prompt through the stages (``prefill``) and one round of decoding (``decode``), on the first rank class of
every stage. An engine runs compute and collectives one after the other, so a pass is a chain; what a step takes beyond
its ops (launches and unfused passes; ``timing.step_time``) stands at the end of every layer, the host at the end of
the pass. The sums are those of ``serving_time``: a prefill lasts what all stages take, a round of decoding p passes of
the slowest stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from meshwright.ledger.schema import Entry
from meshwright.plan.cores import Batch
from meshwright.plan.forward import embedding_ops, head_ops, stage_hand_off
from meshwright.plan.layer_ops import layer_ops
from meshwright.plan.plan import Candidate
from meshwright.plan.serving_time_steps import StageRank, stage_ranks
from meshwright.plan.timing.compute import efficiency, peak_flops
from meshwright.plan.timing.step import Groups, Message, StepContexts, contexts, step_work, work_of
from meshwright.plan.timing.step_time import (
    EngineTime,
    StepTime,
    engine_time,
    kernel_seconds,
    message_seconds,
    step_seconds,
)
from meshwright.plan.wire import Op
from meshwright.specs.cluster import Cluster
from meshwright.specs.placement import Placement
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve

#: Nanoseconds of a second; entries carry whole ones.
NS = 1e9
#: Ops that stand for what a step takes beyond its entries.
OVERHEAD, HOST = "launch", "host"


@dataclass(frozen=True, slots=True)
class Track:
    """What the ranks of one class do.

    Attributes:
        rank_class, rank, ranks: class, its first rank, how many ranks are like it on the stage.
        stage: pipeline stage.
        entries: with start and end, in the order of their starts; those of a schedule (``op`` ``action``) enclose
            the ones that they consist of.
    """

    rank_class: str
    rank: int
    ranks: int
    stage: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """One phase of a plan.

    Attributes:
        phase: ``prefill``, ``decode`` or ``step``.
        seconds: what the phase takes in all.
        tracks: one a pipeline stage.
        note: what the picture leaves out, for people.
    """

    phase: str
    seconds: float
    tracks: tuple[Track, ...]
    note: str = ""


def timed(entry: Entry, start_s: float, seconds: float) -> Entry:
    """The entry with its start and end; both are rounded, so that neighbours touch."""
    entry.started_ns, entry.ended_ns = round(start_s * NS), round((start_s + seconds) * NS)
    return entry


def entry_of(op: Op, rank_class: str, phase: str, layer: int | None = None, microbatch: int | None = None) -> Entry:
    """An op as a predicted entry."""
    entry = Entry(rank_class, op.op, 0, microbatch, layer, phase, op.stream, op.group, None, op.name, op.peer)
    entry.shapes, entry.dtype, entry.flops, entry.splits = op.shapes, op.dtype, op.flops, op.splits
    entry.payload_bytes, entry.wire_bytes, entry.count = op.payload, op.wire, op.repeats
    entry.state, entry.source = "predicted", "predict"
    return entry


def serving_timeline(
    candidate: Candidate, cluster: Cluster, workload: Serve, settings: ServeSettings
) -> list[Timeline]:
    """Prefill of one prompt, and one round of decoding.

    Args:
        candidate: layout with its cost, whose ``running`` requests decode together.
        cluster, settings: as it was planned for. workload: lengths.
    """
    placement = candidate.placement
    passes = _Passes(placement, cluster, settings, stage_ranks(placement))
    predicted = candidate.cost.predicted
    running = predicted.running if predicted is not None else max(1, candidate.cost.requests)
    drafted = settings.speculative_tokens if settings.speculative else 0
    past = workload.isl + workload.osl // 2
    each = Batch("decode", ceil(running / placement.layout.pp), 1 + drafted, past)
    return [
        passes.timeline("prefill", contexts(placement, settings, Batch("prefill", 1, workload.isl))),
        passes.timeline("decode", contexts(placement, settings, each)),
    ]


@dataclass(frozen=True, slots=True)
class _Passes:
    """Timed passes through the stages of one layout."""

    placement: Placement
    cluster: Cluster
    settings: ServeSettings
    ranks: Sequence[StageRank]

    @property
    def engine(self) -> EngineTime:
        return engine_time(self.placement.profile.engine, self.cluster.device.driver)

    def timeline(self, phase: str, step: StepContexts) -> Timeline:
        """One pass; a decoding round gives every stage the slot of the slowest one."""
        found = [self._step(rank, step) for rank in self.ranks]
        eager = self.engine.eager_decode_s if phase == "decode" and self.settings.enforce_eager else 0.0
        lasts = [max(step_time.seconds, step_time.launches * eager) for step_time in found]
        slot = max(lasts)
        tracks, at = [], 0.0
        for rank, step_time, seconds in zip(self.ranks, found, lasts, strict=True):
            tracks.append(self._track(rank, phase, step, at, seconds, step_time.of("host")))
            at += slot if phase == "decode" else seconds
        return Timeline(phase, at, tuple(tracks))

    def _step(self, rank: StageRank, step: StepContexts) -> StepTime:
        work = step_work(self.placement, self.cluster.devices_per_node, rank.own, rank.stage, rank.at, step)
        return step_seconds(work, self.cluster, self.engine)

    def _track(
        self, rank: StageRank, phase: str, step: StepContexts, start: float, seconds: float, host: float
    ) -> Track:
        rank_class = self.placement.class_of(self.placement.rank(rank.at))
        rows = self._rows(rank, step)
        layers = len(rank.own.kinds)
        beyond = max(0.0, seconds - host - sum(lasts for _, _, lasts in rows))
        rest = _own(OVERHEAD, "kernel launches and passes")
        entries: list[Entry] = []
        at = start

        def put(op: Op, layer: int | None, lasts: float) -> None:
            nonlocal at
            entries.append(timed(entry_of(op, rank_class.name, phase, layer), at, lasts))
            at += lasts

        for number, (layer, op, lasts) in enumerate(rows):
            put(op, layer, lasts)
            if layer is not None and (number + 1 == len(rows) or rows[number + 1][0] != layer):
                put(rest, layer, beyond / layers)
        if not layers:
            put(rest, None, beyond)
        put(_own(HOST, "scheduler and sampling"), None, host)
        return Track(rank_class.name, rank_class.first_rank, rank_class.ranks, rank.stage, tuple(entries))

    def _rows(self, rank: StageRank, step: StepContexts) -> list[tuple[int | None, Op, float]]:
        """Layer, op and seconds (with repeats) of a pass, by the formulas of ``timing.step_time``."""
        groups = Groups(self.placement, self.cluster.devices_per_node, rank.at)
        spread, device = self.placement.cuts.grid.ep > 1, self.cluster.device
        known: dict[int, float] = {}
        rows = []
        for layer, op, held in self._ops(rank, step):
            if id(op) not in known:
                work = work_of(op, 1, held, spread, groups)
                if isinstance(work, Message):
                    one = message_seconds(work, self.cluster)
                else:
                    e, peak = efficiency(device, work.kind, work.dtype), peak_flops(device, work.dtype)
                    one = kernel_seconds(work, e, device.bandwidth_bytes_s, peak)
                known[id(op)] = one * work.repeats
            rows.append((layer, op, known[id(op)]))
        return rows

    def _ops(self, rank: StageRank, step: StepContexts) -> list[tuple[int | None, Op, int]]:
        """Layer, op and experts held, in program order and as ``timing.step.step_work`` counts them."""
        whole, last, ends = step.whole, len(self.placement.stages) - 1, rank.own.ends
        head = embedding_ops(whole, ends) if rank.stage == 0 else stage_hand_off(whole, "recv", rank.stage - 1)
        rows: list[tuple[int | None, Op, int]] = [(None, op, 0) for op in head]
        known: dict[int, list[Op]] = {}
        for layer, kind in rank.own.kinds.items():
            if id(kind) not in known:
                known[id(kind)] = [op for op in layer_ops(whole, kind) if op.op != "mark"]
            held = max((p.experts for p in kind.products if p.role == "expert"), default=0)
            rows += [(layer, op, held) for op in known[id(kind)]]
        if rank.stage == last:
            tail = head_ops(self.placement, whole, ends, step.sampled)
        else:
            tail = stage_hand_off(whole, "send", rank.stage + 1)
        return rows + [(None, op, 0) for op in tail]


def _own(op: str, name: str) -> Op:
    return Op(op, name, "host" if op == HOST else "compute", None, (), "", 0, 0, 0)

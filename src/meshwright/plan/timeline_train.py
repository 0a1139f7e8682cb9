"""The predicted timeline of an optimizer step: the pipeline schedule with the times of its chunks.

The ops of one micro-batch are timed one by one (``timing.compute``, ``timing.collective``) and summed by chunk, and the
table of ``moves.pipeline`` is simulated with these sums, so that uneven stages show. Inside a micro-batch products and
the collectives of tp, cp and ep are a chain. Gathers of parameters run one layer ahead of the layer that needs them
(FSDP's prefetch; Zhao et al. 2023, arXiv 2304.11277, section 3.3), sums of gradients behind the layer that made them.
What is summed once a step starts with the last backward and ends a bucket, here a layer, after it (Li et al. 2020,
arXiv 2006.15704). All times are scaled alike, so that the whole is the step that ``training_time`` predicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.ledger.schema import Entry
from meshwright.moves.pipeline import FOLDED, Action, Simulation, Table, refusal, schedule, simulate
from meshwright.plan.timeline import Timeline, Track, timed
from meshwright.plan.timing.collective import curve
from meshwright.plan.timing.compute import op_seconds
from meshwright.plan.timing.step import Groups
from meshwright.plan.train_cost import is_data_parallel
from meshwright.plan.train_shards import train_stages
from meshwright.plan.training_step import chunk_places, microbatches, training_entries
from meshwright.plan.wire import Op
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.placement import Placement, RankClass
from meshwright.specs.workload import Train

#: Actions of all stages that are simulated; of a longer step the first micro-batches are.
MAX_ACTIONS = 40_000
#: Entries inside actions that are written for all stages together; later micro-batches are actions only.
MAX_DETAIL = 20_000
#: What the actions of a schedule are called.
WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
#: ``op`` of an entry that encloses the ops of an action.
ACTION = "action"


class Piece(NamedTuple):
    """An entry of an action: seconds from the start of the action, and how long it takes."""

    entry: Entry
    start: float
    seconds: float


class Laid(NamedTuple):
    """An action laid out: its pieces, its seconds, and those of the hand-off behind it."""

    pieces: tuple[Piece, ...]
    seconds: float
    hand_off: Piece | None


#: Actions that differ: kind, chunk, and whether the micro-batch is the first (which alone may gather parameters).
Key = tuple[str, int, bool]


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """A step: its schedule, when every action runs, and the timeline of every stage.

    Attributes:
        table, simulation: actions and their spans in seconds; scaled as the timeline is.
        microbatches: of the whole step; the table has fewer where only the first ones are simulated.
        timeline: one track a stage.
    """

    table: Table
    simulation: Simulation
    microbatches: int
    timeline: Timeline


def training_timeline(
    placement: Placement, cluster: Cluster, train: Train, step_s: float | None = None
) -> StepTimeline:
    """The timeline of one step.

    Args:
        placement, cluster, train: what is planned.
        step_s: predicted seconds of the step; None: the sum of the ops stands as it is.

    Raises:
        InputError: the batch does not divide, or the schedule has no table for it.
    """
    m = microbatches(placement.layout, train)
    table = _table(placement.layout, m)
    stages = _stage_classes(placement)
    laid, once = _laid(placement, cluster, train, table, stages)
    transfer = max((x.hand_off.seconds for x in laid.values() if x.hand_off is not None), default=0.0)

    def seconds_of(action: Action) -> float:
        return _of(laid, action).seconds

    found = simulate(table, transfer_s=transfer, seconds_of=seconds_of)
    writer = _Writer(table, found, laid, once)
    tracks, total = writer.tracks(stages)
    left = m - table.microbatches
    pace = max(sum(seconds_of(a) for a in row) for row in table.actions) / table.microbatches
    factor = step_s / (total + left * pace) if step_s is not None else 1.0
    tracks = tuple(replace(t, entries=tuple(_scaled(t.entries, factor))) for t in tracks)
    spans = tuple(tuple((a * factor, b * factor) for a, b in row) for row in found.spans)
    note = f"the first {table.microbatches} of {m} micro-batches" if left else ""
    return StepTimeline(table, Simulation(spans), m, Timeline("step", total * factor, tracks, note))


def _scaled(entries: Iterable[Entry], factor: float) -> Iterable[Entry]:
    for entry in entries:
        assert entry.started_ns is not None
        assert entry.ended_ns is not None
        entry.started_ns, entry.ended_ns = round(entry.started_ns * factor), round(entry.ended_ns * factor)
        yield entry


def _stage_classes(placement: Placement) -> list[RankClass]:
    """The first rank class of every stage."""
    first: dict[int, RankClass] = {}
    for rank_class in placement.classes:
        first.setdefault(rank_class.coordinate.pp, rank_class)
    return [first[stage] for stage in sorted(first)]


def _table(layout: Layout, m: int) -> Table:
    """The schedule, of fewer micro-batches where all of them are too many."""
    name, p, v = layout.schedule, layout.pp, layout.virtual
    if p == 1 and v == 1:
        name = "1f1b"
    elif v > 1 and name == "1f1b":
        name = "interleaved"
    v = 2 if name in FOLDED else v
    kinds = 3 if name in {"zb-h1", *FOLDED} else 2
    most = MAX_ACTIONS // (kinds * p * v)
    if m > most:
        few = max(2, most // p) * p
        m = few if few < m and not refusal(name, p, few, v) else m
    return schedule(name, p, m, v)


def _of(laid: dict[Key, Laid], action: Action) -> Laid:
    return laid[action.kind, action.chunk, action.microbatch == 0]


def _laid(
    placement: Placement, cluster: Cluster, train: Train, table: Table, stages: Sequence[RankClass]
) -> tuple[dict[Key, Laid], list[list[Piece]]]:
    """Every action that differs, and by stage what is done once a step (its pieces start at 0)."""
    layout = placement.layout
    few = min(table.microbatches, 2 * layout.pp if layout.schedule == "dualpipev" else 2)
    short = replace(train, global_batch=few * layout.dp * layout.micro_batch)
    where = {rank_class.name: stage for stage, rank_class in enumerate(stages)}
    chunks = _chunk_of_layer(placement, table)
    parts: dict[Key, list[Entry]] = {}
    once: list[list[Piece]] = [[] for _ in stages]
    timers = [_Timer(placement, cluster, c) for c in stages]
    run: tuple[str, str | None, int | None] | None = None
    chunk, waiting = None, list[Entry]()
    for entry in training_entries(placement, short, each=True):
        stage = where.get(entry.rank_class)
        if stage is None:
            continue
        if entry.microbatch is None:
            once[stage].append(Piece(entry, 0.0, timers[stage].seconds(entry)))
            continue
        if entry.microbatch > 1:
            continue
        key = (entry.rank_class, entry.phase, entry.microbatch)
        if key != run or (entry.layer is None and entry.op == "recv"):
            run, chunk, waiting = key, None, []
        if entry.layer is not None:
            chunk = chunks[stage][entry.layer]
        elif chunk is None:
            waiting.append(entry)
            continue
        for each in (*waiting, entry):
            _put(parts, table, each, chunk, stage)
        waiting = []
    by_chunk = {key: lay_out(entries, timers[table.rank_of(key[1])]) for key, entries in parts.items()}
    return _complete(table, by_chunk), once


def _put(parts: dict[Key, list[Entry]], table: Table, entry: Entry, chunk: int, stage: int) -> None:
    first = entry.microbatch == 0
    if entry.phase == "forward":
        kinds: tuple[str, ...] = ("F",)
    else:
        kinds = ("B", "W" if "weight gradient" in (entry.name or "") else "I")
    for kind in kinds:
        parts.setdefault((kind, chunk, first), []).append(entry)


def _complete(table: Table, laid: dict[Key, Laid]) -> dict[Key, Laid]:
    """Actions without entries take no time; without a second micro-batch nobody asks for it."""
    nothing = Laid((), 0.0, None)
    return {
        (kind, chunk, first): laid.get((kind, chunk, first), nothing)
        for kind in WORDS
        for chunk in range(table.chunks)
        for first in (True, False)
    }


def _chunk_of_layer(placement: Placement, table: Table) -> list[dict[int, int]]:
    """By stage: layer -> chunk (its place in the model)."""
    layout = placement.layout
    places = chunk_places(layout)
    if table.chunks == table.stages:
        layers: list[tuple[tuple[int, ...], ...]] = [(stage.layers,) for stage in placement.stages]
    else:
        layers = [stage.chunks for stage in train_stages(placement.spec, layout)]
    return [
        {layer: place for place, held in zip(row, own, strict=True) for layer in held}
        for row, own in zip(places, layers, strict=True)
    ]


class _Timer:
    """Seconds of the entries of one rank."""

    def __init__(self, placement: Placement, cluster: Cluster, rank_class: RankClass) -> None:
        self.cluster = cluster
        self.groups = Groups(placement, cluster.devices_per_node, rank_class.coordinate)

    def seconds(self, e: Entry) -> float:
        """Seconds of an entry with its repeats."""
        if e.group is None:
            assert e.shapes is not None
            op = Op(e.op, e.name or "", "compute", None, e.shapes, e.dtype or "", e.payload_bytes or 0, 0, e.flops or 0)
            return op_seconds(op, self.cluster.device) * e.count
        wiring = self.groups.of(e.group)
        if wiring.members <= 1:
            return 0.0
        return curve(e.op, wiring, self.cluster).seconds(e.payload_bytes or 0) * e.count


def lay_out(entries: Sequence[Entry], timer: _Timer) -> Laid:
    """Entries of one action one after the other, gathers and sums of parameters beside them (see the module).

    A receive is the send of its peer and takes no time of its own."""
    compute = wire = ready = layer_start = before = 0.0
    layer: int | None = -1
    pieces: list[Piece] = []
    hand_off = None
    for entry in entries:
        if entry.op == "recv":
            continue
        lasts = timer.seconds(entry)
        if entry.layer != layer:
            layer, before, layer_start = entry.layer, layer_start, max(compute, ready)
        if entry.op == "send" and entry.group == "pp":
            hand_off = Piece(entry, 0.0, lasts)
        elif is_data_parallel(entry.group):
            start = max(wire, before if entry.op == "all_gather" else compute)
            wire = start + lasts
            ready = wire if entry.op == "all_gather" else ready
            pieces.append(Piece(entry, start, lasts))
        else:
            start = max(compute, ready)
            compute = start + lasts
            pieces.append(Piece(entry, start, lasts))
    return Laid(tuple(pieces), max(compute, wire), hand_off)


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes the tracks of a simulated step."""

    table: Table
    found: Simulation
    laid: dict[Key, Laid]
    once: list[list[Piece]]

    def tracks(self, stages: Sequence[RankClass]) -> tuple[tuple[Track, ...], float]:
        """One track a stage, and the end of the step."""
        each = sum(len(self.laid[kind, chunk, False].pieces) for kind in "FB" for chunk in range(self.table.chunks))
        detail = max(1, MAX_DETAIL // max(1, each))
        rows = [self._actions(stage, c.name, detail) for stage, c in enumerate(stages)]
        reduced = [self._gradients(stage, rows[stage]) for stage in range(len(stages))]
        barrier, ends = max(reduced), []
        for stage in range(len(stages)):
            at = barrier
            for piece in self.once[stage]:
                if piece.entry.phase == "optimizer":
                    rows[stage].append(timed(piece.entry, at, piece.seconds))
                    at += piece.seconds
            ends.append(at)
        tracks = (
            Track(c.name, c.first_rank, c.ranks, stage, tuple(sorted(rows[stage], key=_order)))
            for stage, c in enumerate(stages)
        )
        return tuple(tracks), max(ends)

    def _actions(self, stage: int, rank_class: str, detail: int) -> list[Entry]:
        rows: list[Entry] = []
        sending = 0.0
        for action, (start, end) in zip(self.table.actions[stage], self.found.spans[stage], strict=True):
            laid = _of(self.laid, action)
            name = f"{WORDS[action.kind]} {action.microbatch}"
            if self.table.virtual > 1:
                name += f", chunk {action.chunk}"
            phase = "forward" if action.kind == "F" else "backward"
            one = Entry(rank_class, ACTION, 0, action.microbatch, None, phase, "compute", name=name, source="predict")
            rows.append(timed(one, start, end - start))
            if action.microbatch < detail:
                for piece in laid.pieces:
                    copy = replace(piece.entry, microbatch=action.microbatch)
                    rows.append(timed(copy, start + piece.start, piece.seconds))
            if laid.hand_off is not None:
                sending = max(sending, end)
                copy = replace(laid.hand_off.entry, microbatch=action.microbatch)
                rows.append(timed(copy, sending, laid.hand_off.seconds))
                sending += laid.hand_off.seconds
        return rows

    def _gradients(self, stage: int, rows: list[Entry]) -> float:
        """Sums of gradients once a step, beside the last backward; the end of them."""
        actions = list(zip(self.table.actions[stage], self.found.spans[stage], strict=True))
        backward = max(start for action, (start, _) in actions if action.kind != "F")
        at = max(end for _, (_, end) in actions)
        wires = [e.ended_ns or 0 for e in rows if is_data_parallel(e.group)]
        free = max(wires, default=0) / 1e9
        layers = {e.layer for e in rows if e.layer is not None}
        for piece in self.once[stage]:
            if piece.entry.phase == "optimizer":
                continue
            if is_data_parallel(piece.entry.group):
                start = max(free, backward, at + piece.seconds / max(1, len(layers)) - piece.seconds)
                free = start + piece.seconds
                at = max(at, free)
            else:
                start, at = at, at + piece.seconds
            rows.append(timed(piece.entry, start, piece.seconds))
        return at


def _order(entry: Entry) -> tuple[int, int, int]:
    return (entry.started_ns or 0, -(entry.ended_ns or 0), entry.op != ACTION)

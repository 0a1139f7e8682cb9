"""What one rank did in time, as a profiler recorded it: steps, stretches with labels, collectives.

Collectives and steps are rows of the ledger (``Entry``); the hundred thousands of kernels between them are columns,
of which every moment has one label. From these follow the breakdown of a step (``breakdown``) and what a rank did
before it came to a collective.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.ledger.intervals import Segments, Stretches, Times, clip, intersection, length, union
from meshwright.ledger.schema import Entry

#: Collectives that are told apart in a breakdown.
COMM_OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send",
    "recv",
    "barrier",
    "collective",
)
#: Work that the step is made for.
COMPUTE = ("forward", "backward", "optimizer", "compute")
#: What a host does while its device has nothing to do.
HOST = ("checkpoint", "compile", "gc", "data", "sync", "launch", "idle")
LABELS = (*COMPUTE, "copy", *COMM_OPS, *HOST)
PLACE = {name: place for place, name in enumerate(LABELS)}


@dataclass(frozen=True, slots=True)
class Step:
    """One training or engine step on one rank; times in Unix nanoseconds by this rank's clock."""

    number: int
    start_ns: int
    end_ns: int
    name: str = ""


@dataclass(slots=True)
class Track:
    """One rank's recording.

    Attributes:
        rank: global rank. source: file. recorder: ``kineto``, ``ledger``, ...
        steps: in the order of time; one made up of the whole recording where none was marked (``marked`` False).
        segments: every moment with the first of ``LABELS`` that holds; disjoint.
        calls: collectives and hand-offs in the order of their begin, with ``started_ns`` and ``ended_ns``.
        world: ranks of the job, None unknown. host: machine. device: name of the accelerator, "" on CPU.
        backend: ``nccl``, ``gloo``, ``mpi``, "" unknown.
        counts: kernels, launches, graph_launches, synchronizations, ... in the whole recording.
        work: name of a kernel (or operator on CPU) -> (how often, nanoseconds), the longest ones.
        offset_ns: to add to this rank's times, so that collectives end together.
        lacks: what the recording does not hold.
    """

    rank: int
    source: str
    recorder: str = "kineto"
    steps: list[Step] = field(default_factory=list)
    marked: bool = True
    segments: Segments = field(default_factory=lambda: Segments(*_none()))
    calls: list[Entry] = field(default_factory=list)
    world: int | None = None
    host: str | None = None
    device: str = ""
    backend: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    work: dict[str, tuple[int, int]] = field(default_factory=dict)
    offset_ns: int = 0
    lacks: list[str] = field(default_factory=list)

    @property
    def span_ns(self) -> tuple[int, int]:
        """First and last moment."""
        return (self.steps[0].start_ns, self.steps[-1].end_ns) if self.steps else (0, 0)


def _none() -> tuple[Times, Times, NDArray[np.int8]]:
    return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int8)


@dataclass(frozen=True, slots=True)
class StepParts:
    """Where the time of one step of one rank went; seconds.

    Attributes:
        step_s: from its begin to its end.
        parts_s: by label; they add up to ``step_s``, collectives with what of them nothing overlaps.
        comm_s: time in which any collective ran. overlapped_s: the part of it beside computation.
    """

    number: int
    step_s: float
    parts_s: dict[str, float]
    comm_s: float
    overlapped_s: float

    def share(self, *labels: str) -> float:
        """Share of the step that the labels took together."""
        return sum(self.parts_s.get(label, 0.0) for label in labels) / self.step_s if self.step_s else 0.0

    @property
    def exposed_s(self) -> float:
        """Time of collectives that nothing overlaps."""
        return sum(self.parts_s.get(op, 0.0) for op in COMM_OPS)


def breakdown(track: Track) -> list[StepParts]:
    """The parts of every step of a rank."""
    comm = calls_union(track)
    edges = np.array([t for s in track.steps for t in (s.start_ns, s.end_ns)], np.int64)
    sums = track.segments.sums(edges, len(LABELS))
    compute = [track.segments.by_label(len(LABELS))[PLACE[name]] for name in COMPUTE]
    busy = union(np.concatenate([c[0] for c in compute]), np.concatenate([c[1] for c in compute]))
    both = intersection(comm, busy)
    rows = []
    for place, step in enumerate(track.steps):
        spent = sums[2 * place + 1] - sums[2 * place]
        parts = {name: int(spent[n]) / 1e9 for name, n in PLACE.items() if spent[n] > 0}
        whole = (step.end_ns - step.start_ns) / 1e9
        rest = whole - sum(parts.values())
        if rest > 1e-9:
            parts["idle"] = parts.get("idle", 0.0) + rest
        held, shared = (length(clip(s, step.start_ns, step.end_ns)) / 1e9 for s in (comm, both))
        rows.append(StepParts(step.number, whole, parts, held, shared))
    return rows


def calls_union(track: Track) -> Stretches:
    """Time in which a rank was in any collective."""
    times = [(c.started_ns, c.ended_ns) for c in track.calls if c.started_ns is not None and c.ended_ns is not None]
    pairs = np.array(times, np.int64).reshape(-1, 2)
    return union(pairs[:, 0], pairs[:, 1])

"""A step played again with other durations: what would it take without the slow worker, with balanced stages?

The recording gives the order of operations on every stage and how long each took. An operation begins when all that it
needs has ended. Those of one meeting (a send with its receive, a collective of stages, or of all data parallel copies)
end when the last of them has begun, plus the transfer of each. All copies of a pipeline and all steps have the same
graph and are played at once, as arrays (copies x steps).

What-if analysis by replay: Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis"
(OSDI 2025), whose definitions of transfer and of the ideal are used: an operation that computes takes the mean of its
kind, one that communicates the median of the transfers of its kind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Seconds: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a stage in all copies and steps.

    Attributes:
        kind: ``forward-compute``, ``grads-reduce-scatter``, ... stage: of the pipeline. seq: order within kind and
            stage. chunk: place of the model chunk in the whole model (None outside computation). microbatch: or None.
        start_s, duration_s: copies x steps. communicates: whether its kind moves data at all.
    """

    kind: str
    stage: int
    seq: int
    start_s: Seconds
    duration_s: Seconds
    chunk: int | None = None
    microbatch: int | None = None
    communicates: bool = False

    @property
    def end_s(self) -> Seconds:
        """When it ended."""
        return self.start_s + self.duration_s


@dataclass(frozen=True, slots=True)
class Graph:
    """What waits for what.

    Attributes:
        ops: all operations. needs: place -> places that must have ended. meetings: places that end together;
            ``meeting_of`` tells each one's. across: meetings of all copies at once.
    """

    ops: tuple[Op, ...]
    needs: tuple[tuple[int, ...], ...]
    meetings: tuple[tuple[int, ...], ...]
    meeting_of: Mapping[int, int]
    across: frozenset[int]

    def order(self) -> list[int]:
        """Places in an order in which everything comes after what it needs.

        Raises:
            ValueError: there is a circle.
        """
        waits = [len(set(n)) for n in self.needs]
        open_ = [len(m) for m in self.meetings]
        after: list[list[int]] = [[] for _ in self.ops]
        for place, needs in enumerate(self.needs):
            for need in set(needs):
                after[need].append(place)
        queue = deque(p for p, n in enumerate(waits) if not n)
        found: list[int] = []
        while queue:
            place = queue.popleft()
            found.append(place)
            meeting = self.meeting_of.get(place)
            ended: Sequence[int] = (place,)
            if meeting is not None:
                open_[meeting] -= 1
                ended = self.meetings[meeting] if not open_[meeting] else ()
            for done in ended:
                for later in after[done]:
                    waits[later] -= 1
                    if not waits[later]:
                        queue.append(later)
        if len(found) < len(self.ops):
            raise ValueError(f"{len(self.ops) - len(found)} operations wait for each other in a circle")
        return found


def work_seconds(graph: Graph) -> list[Seconds]:
    """What every operation takes by itself: its duration, or in a meeting the time after the last one has begun."""
    found = [op.duration_s for op in graph.ops]
    for number, places in enumerate(graph.meetings):
        begun = np.maximum.reduce([graph.ops[p].start_s for p in places])
        if number in graph.across:
            begun = np.broadcast_to(begun.max(axis=0, keepdims=True), begun.shape)
        for place in places:
            found[place] = np.maximum(graph.ops[place].end_s - begun, 0.0)
    return found


def play(graph: Graph, order: Sequence[int], seconds: Sequence[Seconds]) -> Seconds:
    """Duration of every step when each operation takes ``seconds``; copies and stages all begin at zero."""
    shape = graph.ops[0].start_s.shape
    start: dict[int, Seconds] = {}
    end: dict[int, Seconds] = {}
    begun = [0] * len(graph.meetings)
    for place in order:
        needed = [end[n] for n in graph.needs[place]]
        start[place] = np.maximum.reduce(needed) if needed else np.zeros(shape)
        meeting = graph.meeting_of.get(place)
        if meeting is None:
            end[place] = start[place] + seconds[place]
            continue
        begun[meeting] += 1
        places = graph.meetings[meeting]
        if begun[meeting] == len(places):
            last = np.maximum.reduce([start[p] for p in places])
            if meeting in graph.across:
                last = np.broadcast_to(last.max(axis=0, keepdims=True), shape)
            for p in places:
                end[p] = last + seconds[p]
    return np.asarray(np.maximum.reduce(list(end.values())).max(axis=0))


def ideal_seconds(graph: Graph, seconds: Sequence[Seconds]) -> list[Seconds]:
    """Nobody slower than others: the mean of the kind for computation, the median for communication."""
    middle: dict[str, float] = {}
    by: dict[str, list[int]] = {}
    for place, op in enumerate(graph.ops):
        by.setdefault(op.kind, []).append(place)
    for kind, places in by.items():
        held = np.concatenate([seconds[p].ravel() for p in places])
        middle[kind] = float(np.median(held) if graph.ops[places[0]].communicates else np.mean(held))
    return [np.full(s.shape, middle[op.kind]) for op, s in zip(graph.ops, seconds, strict=True)]


def replaced(
    seconds: Sequence[Seconds], other: Sequence[Seconds], where: Callable[[int], NDArray[np.bool_] | bool]
) -> list[Seconds]:
    """``other`` where ``where(place)`` holds (for a copy, a step, or the whole operation), else ``seconds``."""
    out = []
    for place, (own, new) in enumerate(zip(seconds, other, strict=True)):
        mask = where(place)
        out.append((new if mask else own) if isinstance(mask, bool) else np.where(mask, new, own))
    return out

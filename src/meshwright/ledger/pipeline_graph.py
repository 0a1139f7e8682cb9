"""The graph of one training step of a pipeline from its recorded operations, in the names of ByteDance's profiler.

Order within a stage is that of the recording. A receive stands between the computation before it and the one that
needs it, a send after the one whose result it carries; the next stage's receive meets it. What follows the last
computation (reductions of gradients, clipping, the optimizer) is a chain. Of virtual stages the model chunk tells who
sends to whom.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from meshwright.ledger.replay import Graph, Op

COMPUTE = ("forward-compute", "backward-compute")
HAND_OFFS = ("forward-send", "forward-recv", "backward-send", "backward-recv")
#: Collectives among data parallel copies, and those among stages.
ACROSS = ("params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce")
CLIP = "optimizer-clip-main-grad"
EMBEDDING = "embedding-grads-all-reduce"
COMMUNICATES = (*HAND_OFFS, *ACROSS, "layernorm-grads-all-reduce", EMBEDDING, CLIP)
#: Receives and sends that no computation fits are recorded at the ends of a step; clocks are this exact (seconds).
SLACK_S = 5e-5


class _Builder:
    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = tuple(ops)
        self.needs: list[list[int]] = [[] for _ in ops]
        self.meetings: list[tuple[int, ...]] = []
        self.across: set[int] = set()
        self.stages = 1 + max(op.stage for op in ops)
        self.chunks = 1 + max((op.chunk for op in ops if op.chunk is not None), default=0)
        self.at: dict[tuple[str, int], list[int]] = defaultdict(list)
        for place, op in enumerate(ops):
            self.at[op.kind, op.stage].append(place)
        for places in self.at.values():
            places.sort(key=lambda p: (self._begin(p), self.ops[p].seq))

    def _begin(self, place: int) -> float:
        return float(self.ops[place].start_s[0, 0])

    def _finish(self, place: int) -> float:
        return float(self.ops[place].end_s[0, 0])

    def computes(self, stage: int) -> list[int]:
        """Computation of a stage in the order of time."""
        places = [p for kind in COMPUTE for p in self.at[kind, stage]]
        return sorted(places, key=lambda p: (self._begin(p), self.ops[p].seq))

    def chain(self, places: Sequence[int], after: Sequence[int] = ()) -> None:
        """Each after the one before it, the first after ``after``."""
        last = list(after)
        for place in places:
            self.needs[place] += last
            last = [place]

    def meet(self, places: Sequence[int], across: bool = False) -> None:
        """These end together."""
        if across:
            self.across.add(len(self.meetings))
        self.meetings.append(tuple(places))

    def real(self, kind: str, direction: str, place: int) -> bool:
        """Whether a computation hands on (or gets) anything: not at the ends of the model."""
        chunk = self.ops[place].chunk
        outer = self.chunks - 1 if (kind == "forward") == (direction == "send") else 0
        return chunk != outer

    def partners(self, kind: str, direction: str, stage: int) -> dict[int, int]:
        """Hand-off -> the computation that it belongs to."""
        moves, computes = self.at[f"{kind}-{direction}", stage], self.at[f"{kind}-compute", stage]
        if not moves or not computes:
            return {}
        if direction == "recv":
            last = max(self._begin(p) for p in computes)
            moves = [p for p in moves if self._begin(p) <= last + SLACK_S]
        else:
            first = min(self._finish(p) for p in computes)
            moves = [p for p in moves if self._finish(p) >= first - SLACK_S]
        real = [p for p in computes if self.real(kind, direction, p)]
        if len(moves) == len(real):
            return dict(zip(moves, real, strict=True))
        skipped = 1 if direction == "recv" and len(moves) + 1 == len(computes) else 0
        return dict(zip(moves, computes[skipped:], strict=False))


def graph_of(ops: Sequence[Op]) -> Graph:
    """The graph.

    Raises:
        ValueError: no computation, or operations wait for each other in a circle.
    """
    if not any(op.kind in COMPUTE for op in ops):
        raise ValueError("no computation is recorded")
    build = _Builder(ops)
    _hand_offs(build)
    copies = ops[0].start_s.shape[0]
    for stage in range(build.stages):
        _stage(build, stage, copies > 1)
    _meetings(build, copies > 1)
    meeting_of = {p: n for n, places in enumerate(build.meetings) for p in places}
    needs = tuple(tuple(n) for n in build.needs)
    graph = Graph(build.ops, needs, tuple(build.meetings), meeting_of, frozenset(build.across))
    graph.order()
    return graph


def _hand_offs(build: _Builder) -> None:
    """Sends and receives: what they wait for, who waits for them, and who meets whom."""
    ends: dict[tuple[str, str, int, int], int] = {}
    for stage in range(build.stages):
        for kind in ("forward", "backward"):
            computes = build.at[f"{kind}-compute", stage]
            for direction in ("send", "recv"):
                build.chain(build.at[f"{kind}-{direction}", stage])
                for move, compute in build.partners(kind, direction, stage).items():
                    _tie(build, direction, move, compute, computes)
                    op = build.ops[compute]
                    if build.real(kind, direction, compute):
                        batch = op.microbatch if op.microbatch is not None and op.microbatch >= 0 else op.seq
                        ends[kind, direction, op.chunk or 0, batch] = move
    for (kind, direction, chunk, batch), move in ends.items():
        if direction == "send":
            there = chunk + 1 if kind == "forward" else chunk - 1
            other = ends.get((kind, "recv", there, batch))
            build.meet((move, other) if other is not None else (move,))
    met = {p for places in build.meetings for p in places}
    for kind in HAND_OFFS:
        for stage in range(build.stages):
            for place in build.at[kind, stage]:
                if place not in met:
                    build.meet((place,))


def _tie(build: _Builder, direction: str, move: int, compute: int, computes: list[int]) -> None:
    if direction == "send":
        build.needs[move].append(compute)
        return
    build.needs[compute].append(move)
    before = computes.index(compute) - 1
    if before >= 0:
        build.needs[move].append(computes[before])


def _stage(build: _Builder, stage: int, copies: bool) -> None:
    """Order of computation, the first backward hand-offs, and what follows the last computation."""
    computes = build.computes(stage)
    if not computes:
        return
    build.chain(computes)
    first = next((i for i, p in enumerate(computes) if build.ops[p].kind == "backward-compute"), 0)
    if first >= 2:
        for kind in ("backward-recv", "backward-send"):
            if build.at[kind, stage]:
                build.needs[build.at[kind, stage][0]].append(computes[first - 2])
    gathers, scatters = build.at["params-all-gather", stage], build.at["grads-reduce-scatter", stage]
    overlapped = bool(copies and any(build.at["separate-grads-all-reduce", s] for s in range(build.stages)))
    if copies:
        build.chain(gathers)
        _feeds(build, gathers, stage)
    if overlapped:
        build.chain(scatters)
        _fed(build, scatters, stage)
    known = {*COMPUTE, *HAND_OFFS, "params-all-gather", *(["grads-reduce-scatter"] if overlapped else [])}
    rest = [p for p, op in enumerate(build.ops) if op.stage == stage and op.kind not in known]
    rest.sort(key=lambda p: (_rank(build.ops[p].kind), build._begin(p), build.ops[p].seq))
    build.chain(rest, [max(computes, key=build._finish), *(scatters[-1:] if overlapped else [])])


#: Order of what follows the last computation, where the recording begins several at once.
_AFTER = ("gc", "layernorm-grads-all-reduce", EMBEDDING, "grads-reduce-scatter", "separate-grads-all-reduce", CLIP)


def _rank(kind: str) -> int:
    return _AFTER.index(kind) if kind in _AFTER else len(_AFTER) + (kind == "optimizer")


def _feeds(build: _Builder, gathers: Sequence[int], stage: int) -> None:
    """The first forward pass of a chunk needs its gathered weights; of several gathers of a chunk the last."""
    chunk = {build.ops[g].chunk: g for g in gathers}
    forward = build.at["forward-compute", stage]
    own = sorted({build.ops[p].chunk or 0 for p in forward})
    for place, gather in enumerate(chunk.values()):
        wanted = build.ops[gather].chunk
        target = own[wanted] if wanted is not None and 0 <= wanted < len(own) else own[min(place, len(own) - 1)]
        build.needs[next(p for p in forward if (build.ops[p].chunk or 0) == target)].append(gather)


def _fed(build: _Builder, scatters: Sequence[int], stage: int) -> None:
    """Reductions that overlap the backward pass follow the last backward of their chunk."""
    backward = build.at["backward-compute", stage]
    own = sorted({build.ops[p].chunk or 0 for p in backward})
    for scatter in scatters:
        wanted = build.ops[scatter].chunk
        if wanted is not None and 0 <= wanted < len(own):
            held = [p for p in backward if (build.ops[p].chunk or 0) == own[wanted]]
            build.needs[scatter].append(held[-1])


def _meetings(build: _Builder, copies: bool) -> None:
    """Collectives: among copies one a stage, the tied embedding between its ends, clipping among all."""
    if copies:
        for place, op in enumerate(build.ops):
            if op.kind in ACROSS:
                build.meet((place,), across=True)
    last = build.stages - 1
    embedding = [build.at[EMBEDDING, s][:1] for s in sorted({0, last})]
    if all(embedding):
        build.meet([p for places in embedding for p in places])
    clips = [p for s in range(build.stages) for p in build.at[CLIP, s][:1]]
    if clips:
        build.meet(clips, across=copies)

"""Tables of schedules that split the backward: ZB-H1 (one or more chunks a rank), ZBV and DualPipeV.

Each function lists one rank's actions. Sources: Qi et al. 2023, arXiv 2401.10241 (ZB-H1); Qi et al. 2024, arXiv
2405.15362 (ZBV); DeepSeek's DualPipe, and Sea AI Lab's cut-in-half of it (DualPipeV), whose eight steps are named
below. Two actions that DualPipeV overlaps stand one after the other, forward first. The orders are those of
torch.distributed.pipelining (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV).
"""

from __future__ import annotations

from collections import Counter, deque

from meshwright.moves.pipeline import Action, Kind


class _Run:
    """One rank's list; every action takes the next micro-batch of its kind and chunk."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.done: Counter[tuple[Kind, int]] = Counter()
        self.waiting: deque[tuple[int, int]] = deque()

    def add(self, chunk: int, *kinds: Kind) -> None:
        """Append actions; a whole backward moves both halves on, an input gradient leaves its weight gradient due."""
        for kind in kinds:
            key: Kind = "I" if kind == "B" else kind
            number = self.done[key, chunk]
            self.actions.append(Action(kind, chunk, number))
            self.done[key, chunk] += 1
            if kind == "I":
                self.waiting.append((chunk, number))

    def weight(self) -> None:
        """The weight gradient that has waited longest, if any."""
        if self.waiting:
            chunk, number = self.waiting.popleft()
            self.actions.append(Action("W", chunk, number))


def zb_h1(stages: int, microbatches: int, virtual: int, rank: int) -> list[Action]:
    """Interleaved 1F1B with half the warm-up; weight gradients begin after ``rank`` input gradients and follow in
    their order, so that no rank holds more than the first stage of 1F1B does."""
    run = _Run()
    per_round = microbatches // max(1, microbatches // stages)
    total = microbatches * virtual
    warmup = min((virtual - 1) * per_round + stages - 1 - rank, total)

    def forward(n: int) -> None:
        run.add(n // per_round % virtual * stages + rank, "F")

    def backward(n: int) -> None:
        run.add((virtual - 1 - n // per_round % virtual) * stages + rank, "I")
        if n >= rank:
            run.weight()

    for n in range(warmup):
        forward(n)
    for n in range(total):
        if warmup + n < total:
            forward(warmup + n)
        backward(n)
    while run.waiting:
        run.weight()
    return run.actions


def zbv(stages: int, microbatches: int, virtual: int, rank: int) -> list[Action]:
    """Zero bubble on a folded model; planned for at least 2p - 1 micro-batches, those beyond m are left out."""
    m = max(2 * stages - 1, microbatches)
    down, up = rank, 2 * stages - 1 - rank
    run = _Run()

    def both(chunk: int) -> None:
        run.add(chunk, "I", "W")

    for _ in range(2 * (stages - rank) - 1):
        run.add(down, "F")
    for _ in range(rank):
        run.add(up, "F")
        run.add(down, "F")
    for _ in range(stages - rank):
        run.add(up, "F")
        both(up)
    while run.done["F", up] < run.done["F", down] or run.done["F", down] < m:
        if run.done["F", down] < m:
            run.add(down, "F")
        both(down)
        run.add(up, "F")
        both(up)
    for _ in range(rank):
        run.add(down, "I")
        run.add(up, "I")
    for _ in range(stages - rank):
        run.add(down, "I", "W")
    for chunk in (up, down):
        while run.done["W", chunk] < run.done["I", chunk]:
            run.add(chunk, "W")
    return [a for a in run.actions if a.microbatch < microbatches]


def dualpipev(stages: int, microbatches: int, virtual: int, rank: int) -> list[Action]:
    """DualPipeV's eight steps; needs at least 2p micro-batches."""
    down, up = rank, 2 * stages - 1 - rank
    behind = stages - rank - 1
    run = _Run()
    for _ in range(2 * behind):  # 1: forwards of the first chunk
        run.add(down, "F")
    for _ in range(rank + 1):  # 2: forwards of both
        run.add(down, "F")
        run.add(up, "F")
    for _ in range(behind):  # 3: input gradient, weight gradient, forward of the second
        run.add(up, "I")
        run.weight()
        run.add(up, "F")
    for _ in range(microbatches - 2 * stages + rank + 1):  # 4: both overlap with the other's backward
        run.add(down, "F")
        run.add(up, "B")
        run.add(up, "F")
        run.add(down, "B")
    for _ in range(behind):  # 5: backward of the second, then its forward beside the backward of the first
        run.add(up, "B")
        run.add(up, "F")
        run.add(down, "B")
    split = False
    for n in range(rank + 1):  # 6: backwards, the later half with their weight gradients put off
        middle = n == (rank + 1) // 2
        split = split or (middle and rank % 2 == 1)
        run.add(up, "I" if split else "B")
        split = split or (middle and rank % 2 == 0)
        run.add(down, "I" if split else "B")
    for _ in range(behind):  # 7: weight gradients between the last backwards
        run.weight()
        run.add(down, "I" if split else "B")
    while run.waiting:  # 8: the remaining weight gradients
        run.weight()
    return run.actions

"""Climbs the rungs of ``doctor.ladder``: every rank logs before and after each call; the first failing rung ends it.

Calls are handed in as plain data, so that this room need not know the doctor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.job import own_device


class Step(Protocol):
    """A call of a rung (``doctor.ladder.Step``)."""

    @property
    def op(self) -> str:
        """Operation."""

    @property
    def group(self) -> str:
        """Name of the group."""

    @property
    def elements(self) -> int:
        """Elements on every rank."""

    @property
    def repeats(self) -> int:
        """Times in a row."""


@dataclass(frozen=True, slots=True)
class Climb:
    """What every rank is told.

    Attributes:
        rungs: the steps of every rung.
        groups: by name, the ranks of each group of that name.
        sizes: elements of every place, by rung, step and turn.
        folder: where each rank writes its log. device: ``cpu`` or ``cuda``.
        absent: ``(rung, rank)`` of a planted mistake: the rank leaves the rung out (tests).
    """

    rungs: tuple[tuple[Step, ...], ...]
    groups: Mapping[str, tuple[tuple[int, ...], ...]]
    sizes: Callable[[Any, int, int], list[int]]
    folder: str
    device: str = "cpu"
    absent: tuple[int, int] | None = None


def climb(rank: int, job: Climb) -> list[float]:
    """Body of a rank: seconds of every rung. Log lines: ``TIME RUNG STEP TURN before|after WHAT``."""
    device = torch.device(own_device(job.device, rank))
    groups = {name: _mine(rank, sets) for name, sets in job.groups.items()}
    seconds = []
    with (Path(job.folder) / f"rank{rank}.log").open("w", buffering=1) as log:
        for number, steps in enumerate(job.rungs):
            began = time.perf_counter()
            if job.absent == (number, rank):
                time.sleep(3600)
            for place, step in enumerate(steps):
                members, pg = groups[step.group]
                if pg is None:
                    continue
                for turn in range(step.repeats):
                    log.write(f"{time.time():.6f} {number} {place} {turn} before {step}\n")
                    _call(step, pg, members.index(rank), job.sizes(step, len(members), turn), device)
                    log.write(f"{time.time():.6f} {number} {place} {turn} after {step}\n")
            log.write(f"{time.time():.6f} {number} done\n")
            seconds.append(time.perf_counter() - began)
    return seconds


Member = tuple[tuple[int, ...], dist.ProcessGroup | None]


def _mine(rank: int, sets: Sequence[tuple[int, ...]]) -> Member:
    """Make all groups of a name; the one that holds the rank, None with nobody else in it."""
    mine: Member = ((), None)
    for ranks in sets:
        pg = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if rank in ranks:
            mine = ranks, pg
    return mine


def _call(step: Step, pg: dist.ProcessGroup, place: int, sizes: Sequence[int], device: torch.device) -> None:
    """One call, waited for."""
    count = len(sizes)
    x = torch.ones(sizes[place], device=device)
    if step.op == "barrier":
        dist.barrier(group=pg)
    elif step.op == "broadcast":
        dist.broadcast(x, group=pg, group_src=0)
    elif step.op == "all_reduce":
        dist.all_reduce(x, group=pg)
    elif step.op == "all_gather":
        dist.all_gather([torch.empty_like(x) for _ in range(count)], x, group=pg)
    elif step.op == "reduce_scatter":
        dist.reduce_scatter(torch.empty_like(x), [x.clone() for _ in range(count)], group=pg)
    elif step.op == "all_to_all":
        _all_to_all(sizes, place, pg, device)
    elif step.op == "send_next":
        _send_next(x, pg, place, count)
    else:
        out = torch.empty_like(x)
        works = [
            dist.isend(x, group=pg, group_dst=(place + 1) % count),
            dist.irecv(out, group=pg, group_src=(place - 1) % count),
        ]
        for work in works:
            if work is not None:
                work.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _all_to_all(sizes: Sequence[int], place: int, pg: dist.ProcessGroup, device: torch.device) -> None:
    """Every place gets as many elements from each other place as that one has."""
    count = len(sizes)
    out = torch.empty(sum(sizes), device=device)
    x = torch.ones(sizes[place] * count, device=device)
    dist.all_to_all_single(out, x, list(sizes), [sizes[place]] * count, group=pg)


def _send_next(x: Tensor, pg: dist.ProcessGroup, place: int, count: int) -> None:
    """From the first to the last, as through the stages of a pipeline."""
    if place:
        dist.recv(torch.empty_like(x), group=pg, group_src=place - 1)
    if place < count - 1:
        dist.send(x, group=pg, group_dst=place + 1)

"""The rungs of ``doctor --ladder``: from one element between two ranks up to the patterns of a training or serving job.

Pure data: a rung is a list of calls that every rank makes in order. ``runtime.ladder`` climbs them and stops at the
first that fails; what is above a failing rung would only fail as well.
"""

from __future__ import annotations

from typing import NamedTuple

#: What a call may be; ``exchange`` is a hand-off to the next rank and from the one before, at once.
OPS = (
    "barrier",
    "broadcast",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send_next",
    "exchange",
)
#: Groups of ranks: all; the first two; halves and pairs across them, as tensor groups and pipelines lie.
GROUPS = ("world", "pair", "inner", "outer")


class Step(NamedTuple):
    """One call.

    Attributes:
        op: of ``OPS``. group: of ``GROUPS``. elements: fp32 elements on every rank.
        uneven: sizes that differ from rank to rank, some of them zero.
        repeats: how often in a row.
    """

    op: str
    group: str = "world"
    elements: int = 1
    uneven: bool = False
    repeats: int = 1

    def __str__(self) -> str:
        size = "uneven sizes" if self.uneven else f"{self.elements * 4:,} bytes"
        often = f" x {self.repeats}" if self.repeats > 1 else ""
        return f"{self.op} in {self.group}, {size}{often}"


class Rung(NamedTuple):
    """One step of the ladder: a name, what its failure means, and its calls. ``rate``: print bytes a second."""

    name: str
    means: str
    steps: tuple[Step, ...]
    rate: bool = False


_KB, _MB = 256, 262_144

RUNGS: tuple[Rung, ...] = (
    Rung(
        "two ranks, one element",
        "ranks 0 and 1 cannot talk at all: interface, firewall, P2P or shared memory between these two",
        (Step("all_reduce", "pair"),),
    ),
    Rung(
        "two ranks, every operation",
        "one kind of operation does not work between two ranks",
        tuple(Step(op, "pair", 16) for op in OPS),
    ),
    Rung(
        "all ranks, one element",
        "some rank cannot reach another: compare interfaces and devices of all hosts",
        (Step("barrier"), Step("all_reduce")),
    ),
    Rung(
        "all ranks, every operation",
        "one kind of operation does not work between all ranks",
        tuple(Step(op, "world", 16) for op in OPS),
    ),
    Rung(
        "sizes",
        "small messages pass and large ones do not: GID, MTU, ACS or IOMMU, /dev/shm",
        tuple(Step("all_reduce", "world", n) for n in (_KB, 64 * _KB, _MB, 4 * _MB, 16 * _MB)),
        rate=True,
    ),
    Rung(
        "tensor parallel",
        "two sums a layer inside a node: P2P or custom all-reduce",
        (Step("all_reduce", "inner", 64 * _KB, repeats=32),),
    ),
    Rung(
        "pipeline parallel",
        "hand-offs from stage to stage: point-to-point between nodes",
        (Step("send_next", "outer", 64 * _KB, repeats=8), Step("exchange", "outer", 64 * _KB, repeats=8)),
    ),
    Rung(
        "expert parallel",
        "dispatch and combine: all_to_all",
        (Step("all_to_all", "world", 64 * _KB, repeats=8), Step("all_to_all", "world", _KB, uneven=True, repeats=8)),
    ),
    Rung(
        "tensor x pipeline",
        "two groups in turn: order of communicators",
        (Step("all_reduce", "inner", 16 * _KB), Step("send_next", "outer", 16 * _KB)) * 4,
    ),
    Rung(
        "tensor x expert x data",
        "three groups in turn: order of communicators",
        (
            Step("all_reduce", "inner", 16 * _KB),
            Step("all_to_all", "world", 16 * _KB),
            Step("reduce_scatter", "outer", 16 * _KB),
            Step("all_gather", "outer", 16 * _KB),
        )
        * 2,
    ),
    Rung(
        "lengths that change, empty ranks",
        "ranks with nothing to send must join all the same",
        (Step("all_to_all", "world", 8, uneven=True, repeats=16), Step("barrier")),
    ),
    Rung(
        "KV transfer",
        "large hand-offs between pairs, as between a prefill and a decode pool",
        (Step("exchange", "world", 4 * _MB, repeats=4),),
        rate=True,
    ),
)


def members(group: str, world: int, rank: int) -> tuple[int, ...]:
    """Ranks of the group that holds ``rank``; empty when it is in none.

    ``inner`` and ``outer`` cut the world into two halves: runs of ranks, and ranks of equal place in the halves. An odd
    last rank is alone.
    """
    if group == "world":
        return tuple(range(world))
    if group == "pair":
        return (0, 1) if rank < 2 else ()
    half = max(1, world // 2)
    if rank >= 2 * half:
        return (rank,)
    if group == "inner":
        first = rank // half * half
        return tuple(range(first, first + half))
    return (rank % half, rank % half + half) if world > 1 else (0,)


def sizes(step: Step, count: int, turn: int) -> list[int]:
    """Elements that each of ``count`` places contributes to a turn of a step; uneven ones change with the turn."""
    if not step.uneven:
        return [step.elements] * count
    return [(place + turn) % count * step.elements for place in range(count)]

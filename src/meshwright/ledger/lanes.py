"""Calls of all ranks sorted into lanes: the collectives of one rank in one group, in order.

Lanes are compared by the thousand, so equal ones are one object and their columns are bytes. Numbers stand for what is
called (``Kind``) and from where (stacks); two calls may match when their *comparable* numbers are equal.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple, Protocol

SCHEDULED, STARTED, COMPLETED, UNKNOWN = 0, 1, 2, 3


class Kind(Protocol):
    """What a call is (``doctor.incident.Signature``)."""

    @property
    def op(self) -> str:
        """Operation."""

    @property
    def shapes_in(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of what enters."""

    @property
    def shapes_out(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of what comes out."""

    @property
    def dtype(self) -> str | None:
        """Element type."""

    @property
    def peer(self) -> int | None:
        """Place of the other side or root."""

    @property
    def splits(self) -> tuple[int, ...] | None:
        """Elements to every place."""


class Counters(Protocol):
    """Last call issued and completed of one rank in one group; None unknown."""

    @property
    def enqueued(self) -> int | None:
        """Order number of the last call issued."""

    @property
    def completed(self) -> int | None:
        """Order number of the last call completed."""


class Rows(Protocol):
    """The calls of one rank as columns of equal length (``doctor.incident.Trace``)."""

    @property
    def rank(self) -> int:
        """Global rank."""

    @property
    def group(self) -> array[int]:
        """Number of the group."""

    @property
    def signature(self) -> array[int]:
        """Number of what is called."""

    @property
    def stack(self) -> array[int]:
        """Number of where from, -1 unknown."""

    @property
    def seq(self) -> array[int]:
        """Order number within the group."""

    @property
    def record(self) -> array[int]:
        """Order number within the rank."""

    @property
    def state(self) -> array[int]:
        """State of the call."""

    @property
    def p2p(self) -> array[int]:
        """1 for a hand-off."""

    @property
    def status(self) -> Mapping[int, Counters]:
        """Counters by group."""

    @property
    def settled(self) -> bool:
        """Whether states tell completion."""

    @property
    def active_only(self) -> bool:
        """Whether completed calls are left out."""


class Lane(NamedTuple):
    """The collectives of a rank in a group: order numbers from ``first`` on without gaps, columns as bytes of int32.

    ``calls`` are comparable numbers, ``kinds`` exact ones, ``stacks`` where they came from.
    """

    first: int
    calls: bytes
    kinds: bytes
    stacks: bytes

    def __len__(self) -> int:
        return len(self.calls) // 4

    @property
    def end(self) -> int:
        """Order number behind the last call."""
        return self.first + len(self)


def ints(column: bytes) -> memoryview[int]:
    """A column of a lane as numbers."""
    return memoryview(column).cast("i")


def _counts(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(prod, shapes))


def comparable(kind: Kind) -> tuple[object, ...]:
    """What must be equal on all members of a collective; what may rightly differ by rank is left out.

    Pieces of an all_to_all, tensors that only a root holds, and uneven lists differ rightly.
    """
    ins, outs = _counts(kind.shapes_in), _counts(kind.shapes_out)
    op = kind.op
    if op in {"barrier", "coalesced"}:
        return (op,)
    if op == "all_to_all":
        return op, kind.dtype
    if op == "gather":
        return op, kind.dtype, ins
    if op == "scatter":
        return op, kind.dtype, outs
    if op == "all_gather" and len(set(outs)) > 1:
        return op, kind.dtype, outs
    if op == "reduce_scatter" and len(set(ins)) > 1:
        return op, kind.dtype, ins
    if op in {"broadcast", "reduce"}:
        return op, kind.dtype, ins or outs, kind.peer
    return op, kind.dtype, ins, outs


class Lanes:
    """All lanes of a job.

    Args:
        ranks: rows of every rank that was read.
        members: global ranks of every group, () unknown.
        kinds: what the numbers in ``Rows.signature`` stand for.

    ``of[group][rank]`` is a lane; ``rows[rank][group]`` the places of all its rows in the rank's columns.
    """

    def __init__(self, ranks: Mapping[int, Rows], members: Sequence[tuple[int, ...]], kinds: Sequence[Kind]) -> None:
        self.ranks, self.members, self.kinds = ranks, members, kinds
        numbers: dict[object, int] = {}
        self.numbers = [numbers.setdefault(comparable(k), len(numbers)) for k in kinds]
        self._joint: dict[tuple[tuple[int, int, int], ...], tuple[int, int, int]] = {}
        self._kept: dict[Lane, Lane] = {}
        self.of: dict[int, dict[int, Lane]] = {}
        cut: dict[tuple[int, ...], dict[int, Lane]] = {}
        for rank in sorted(ranks):
            rows = ranks[rank]  # columns that ranks have in common are often one object
            key = tuple(map(id, (rows.group, rows.p2p, rows.seq, rows.signature, rows.stack)))
            own = cut.get(key)
            if own is None:
                lanes = ((g, self._lane(rows, places)) for g, places in self._places(rows).items())
                own = cut[key] = {g: lane for g, lane in lanes if lane is not None}
            for group, lane in own.items():
                self.of.setdefault(group, {})[rank] = lane

    @staticmethod
    def _places(rows: Rows) -> dict[int, list[int]]:
        out: dict[int, list[int]] = {group: [] for group in set(rows.group)}
        if 1 in rows.p2p:
            for place, (group, flag) in enumerate(zip(rows.group, rows.p2p, strict=True)):
                if not flag:
                    out[group].append(place)
        else:
            for place, group in enumerate(rows.group):
                out[group].append(place)
        return out

    def _lane(self, rows: Rows, places: list[int]) -> Lane | None:
        """The longest run without gaps at the end of a rank's collectives in a group; several of one number are one."""
        if not places:
            return None
        signature, stack, seq, number = rows.signature, rows.stack, rows.seq, self.numbers
        seqs = [seq[i] for i in places]
        kinds = [signature[i] for i in places]
        stacks = [stack[i] for i in places]
        calls = [number[k] for k in kinds]
        if seqs != list(range(seqs[0], seqs[0] + len(seqs))):
            seqs, calls, kinds, stacks = self._mended(seqs, calls, kinds, stacks)
        lane = Lane(seqs[0], array("i", calls).tobytes(), array("i", kinds).tobytes(), array("i", stacks).tobytes())
        return self._kept.setdefault(lane, lane)

    def _mended(
        self, seqs: list[int], calls: list[int], kinds: list[int], stacks: list[int]
    ) -> tuple[list[int], list[int], list[int], list[int]]:
        """Join the calls of one order number (coalesced ones) and keep what follows the last gap."""
        rows: dict[int, list[tuple[int, int, int]]] = {}
        for seq, *row in zip(seqs, calls, kinds, stacks, strict=True):
            rows.setdefault(seq, []).append((row[0], row[1], row[2]))
        order = sorted(rows)
        start = next((i for i in range(len(order) - 1, 0, -1) if order[i] - order[i - 1] != 1), 0)
        order = order[start:]
        out = []
        for seq in order:
            several = tuple(sorted(rows[seq], key=lambda r: r[0]))
            if len(several) == 1:
                out.append(several[0])
            else:
                key = tuple((c, 0, 0) for c, _, _ in several)
                joint = self._joint.setdefault(key, (-2 - len(self._joint), 0, 0))
                out.append((joint[0], several[-1][1], several[-1][2]))
        return order, [r[0] for r in out], [r[1] for r in out], [r[2] for r in out]


def first_difference(a: Lane, b: Lane, column: str, start: int) -> int | None:
    """First order number from ``start`` on at which both have a call and the column differs."""
    low, high = max(a.first, b.first, start), min(a.end, b.end)
    if low >= high:
        return None
    x: bytes = getattr(a, column)[4 * (low - a.first) : 4 * (high - a.first)]
    y: bytes = getattr(b, column)[4 * (low - b.first) : 4 * (high - b.first)]
    if x == y:
        return None
    left, right = 0, high - low
    while right - left > 1:
        middle = (left + right) // 2
        if x[4 * left : 4 * middle] != y[4 * left : 4 * middle]:
            right = middle
        else:
            left = middle
    return low + left

"""Who sends which rows to whom when tokens go to their experts and back. Pure counting, no tensors.

A token visits K experts: it becomes K *rows*. The ranks of an expert group share out the E experts in runs; each
rank sorts its rows by expert, which also sorts them by member of the group, sends every member its run, and sorts
what arrives, member by member, by expert again::

    rows of a rank, sorted by expert      |e0 e0|e1|e2 e2 e2|e3|          two members hold {e0, e1} and {e2, e3}
    sent                                  3 rows to member 0, 4 to member 1
    received by member 0, of two senders  |e0 e0 e1|e0 e1 e1|  ->  |e0 e0 e0|e1 e1 e1|   one product an expert

Results go the same way back. Nothing is dropped: there is no capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshwright.errors import InputError
from meshwright.specs.placement import Placement
from meshwright.specs.shares import part


def replicas_meet(placement: Placement) -> bool:
    """Whether tokens of several replicas meet at the experts, so that the replicas must walk their passes in step."""
    layout, grid = placement.layout, placement.cuts.grid
    return placement.spec.moe is not None and grid.ep > 1 and grid.ep * grid.etp > layout.tp * layout.cp


@lru_cache(maxsize=1 << 10)
def dealt(experts: int, members: int) -> tuple[tuple[int, int], ...]:
    """First and one past the last expert of every member; the first ``experts % members`` hold one more."""
    return tuple(part(experts, members, index) for index in range(members))


@dataclass(frozen=True, slots=True)
class Exchange:
    """One rank's part of one dispatch.

    Attributes:
        index: place of the rank in the expert group.
        sent: rows of this rank for each of the E experts.
        received: by member that sends: rows for each expert held here. Where nothing travels there is one row of
            counts, this rank's own.
    """

    index: int
    sent: tuple[int, ...]
    received: tuple[tuple[int, ...], ...]

    @property
    def sent_rows(self) -> tuple[int, ...]:
        """Rows to every member."""
        return tuple(sum(self.sent[low:high]) for low, high in dealt(len(self.sent), len(self.received)))

    @property
    def received_rows(self) -> tuple[int, ...]:
        """Rows from every member."""
        return tuple(map(sum, self.received))

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of every expert held here, from all members."""
        return tuple(map(sum, zip(*self.received, strict=True)))

    def by_expert(self) -> list[int]:
        """Where in what arrived, member by member, the rows sorted by expert lie; members in order within one."""
        starts, position = [], 0
        for counts in self.received:
            firsts = []
            for count in counts:
                firsts.append(position)
                position += count
            starts.append(firsts)
        out: list[int] = []
        for expert in range(len(self.received[0])):
            for firsts, counts in zip(starts, self.received, strict=True):
                out += range(firsts[expert], firsts[expert] + counts[expert])
        return out


def slice_of(tokens: int, slices: int, place: int) -> tuple[int, int]:
    """First and one past the last token of a slice: all equally long but for the last ones."""
    each = -(-tokens // slices)
    low = min(tokens, place * each)
    return low, min(tokens, low + each)


def counted(chosen: Sequence[Sequence[int]], experts: int) -> tuple[int, ...]:
    """Rows for every expert, of the experts that each token chose.

    Raises:
        InputError: an expert that does not exist.
    """
    counts = [0] * experts
    for choices in chosen:
        for expert in choices:
            if not 0 <= expert < experts:
                raise InputError(f"expert {expert} of {experts}; a routing names experts from 0 to {experts - 1}")
            counts[expert] += 1
    return tuple(counts)


@lru_cache(maxsize=1 << 12)
def round_robin(low: int, high: int, experts: int) -> tuple[int, ...]:
    """Rows for every expert when choice number i of a pass goes to expert ``i % experts``, for choices low to high."""

    def below(stop: int, expert: int) -> int:
        return (stop - expert + experts - 1) // experts

    return tuple(below(high, e) - below(low, e) for e in range(experts))


def exchange(counts: Sequence[Sequence[int]], index: int) -> Exchange:
    """The part of member ``index`` when member m has ``counts[m][e]`` rows for expert e."""
    low, high = dealt(len(counts[index]), len(counts))[index]
    return Exchange(index, tuple(counts[index]), tuple(tuple(c[low:high]) for c in counts))


def kept(counts: Sequence[int], members: int, index: int) -> Exchange:
    """The same without a dispatch: all members have all tokens, each takes the rows of its own experts."""
    low, high = dealt(len(counts), members)[index]
    return Exchange(0, tuple(counts), (tuple(counts[low:high]),))

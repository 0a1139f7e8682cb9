"""Ranks that serve under one layout, replica by replica: which pass is told to whom, in turns where replicas must meet.

Replicas whose tokens meet at experts get their passes in turns: each turn is a pass, or an idle one, for every replica.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from meshwright.errors import InputError
from meshwright.moves.expert import replicas_meet
from meshwright.runtime.serve.scheduler import Pass, Scheduler
from meshwright.specs.placement import Placement

#: Told to ranks: their numbers and a message.
Tell = Callable[[Iterable[int], Any], None]


@dataclass(frozen=True, slots=True)
class Replica:
    """One data-parallel place: its scheduler and its ranks (numbers in the world)."""

    scheduler: Scheduler
    ranks: tuple[int, ...]


class Pool:
    """All replicas of one layout.

    Args:
        placement: of the model. scheduler: makes one for each replica. first: number of its first rank in the world.

    Raises:
        InputError: a layout whose sequences are dealt over context parallel ranks.
    """

    def __init__(self, placement: Placement, scheduler: Callable[[], Scheduler], first: int = 0) -> None:
        layout = placement.layout
        if layout.cp > 1:
            raise InputError(
                f"serving deals no sequence over context parallel {layout.cp}; take cp=1 and more tp, pp or dp"
            )
        self.placement, self.first = placement, first
        ranks: list[list[int]] = [[] for _ in range(layout.dp)]
        for rank in range(layout.world):
            ranks[placement.coordinate(rank).dp].append(first + rank)
        self.replicas = [Replica(scheduler(), tuple(members)) for members in ranks]
        self.in_step = replicas_meet(placement)
        self.depth = self.replicas[0].scheduler.limits.depth
        self._turns: deque[set[tuple[int, int]]] = deque()

    def replica_of(self, rank: int) -> int:
        """Number of the replica of a rank of the world."""
        return self.placement.coordinate(rank - self.first).dp

    def least(self) -> int:
        """Number of the replica with the least to do."""
        loads = [replica.scheduler.load for replica in self.replicas]
        return loads.index(min(loads))

    def pump(self, tell: Tell, more: Callable[[int, Pass], dict[str, Any]] | None = None) -> None:
        """Hand out passes while there is something to do and room for it.

        Args:
            tell: sends. more: what a pass of a replica is told beside its rows.
        """
        if self.in_step:
            while len(self._turns) < self.depth and self._turn(tell, more):
                pass
            return
        for number, replica in enumerate(self.replicas):
            while (made := replica.scheduler.next_pass()) is not None:
                tell(replica.ranks, _said(made) | (more(number, made) if more else {}))

    def _turn(self, tell: Tell, more: Callable[[int, Pass], dict[str, Any]] | None) -> bool:
        """One pass for every replica, idle where one has nothing to do; False where none has."""
        made = [replica.scheduler.next_pass() for replica in self.replicas]
        if not any(made):
            return False
        self._turns.append({(number, one.number) for number, one in enumerate(made) if one is not None})
        for number, one in enumerate(made):
            idle = {"op": "idle", "n": 0}
            said = idle if one is None else _said(one) | (more(number, one) if more else {})
            tell(self.replicas[number].ranks, said)
        return True

    def over(self, replica: int, number: int) -> None:
        """A pass of a replica is over."""
        for turn in self._turns:
            turn.discard((replica, number))
        while self._turns and not self._turns[0]:
            self._turns.popleft()

    def restart(self) -> None:
        """The ranks are gone; nothing is under way."""
        self._turns.clear()
        for replica in self.replicas:
            replica.scheduler.restart()


def _said(made: Pass) -> dict[str, Any]:
    """A pass as its ranks are told."""
    rows = [
        (r.line.number, r.start, r.line.slice(r.start, r.start + r.length), r.line.table, r.wanted) for r in made.rows
    ]
    choose = []
    for line in made.wanted:
        s = line.sampling
        place = line.said + len(line.new)
        choose.append((s.temperature, s.top_k, s.top_p, s.seed, place, line.logprobs, line.bias))
    return {"op": "pass", "n": made.number, "rows": rows, "choose": choose}

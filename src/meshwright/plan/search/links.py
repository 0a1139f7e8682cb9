"""Seconds of collectives over columns: the curves of ``timing.collective`` read for many groups at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.plan.timing.collective import Wiring, curve
from meshwright.specs.cluster import Cluster

if TYPE_CHECKING:
    from meshwright.plan.search.columns import Floats, Ints, Mask

#: Room for one curve on the common axis of log bytes (4 TiB x 2^14 and more).
ROOM = 64.0
#: More than the ranks of a node: both numbers of a wiring in one.
NEAR = 1 << 24


class Links:
    """Links of a cluster, with the curves that were joined."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._known: dict[tuple[str, tuple[Wiring, ...]], tuple[Floats, Floats]] = {}

    def curves(self, op: str, wirings: tuple[Wiring, ...]) -> tuple[Floats, Floats]:
        """Curves of some groups one behind the other, ``ROOM`` apart: log bytes and log seconds."""
        import numpy as np

        if (op, wirings) not in self._known:
            # A group of one has no curve: it gets that of two, and no seconds (``Group.seconds``).
            found = [curve(op, w if w.members > 1 else Wiring(2, 2), self.cluster) for w in wirings]
            knots = np.concatenate([np.array(c.log_bytes) + i * ROOM for i, c in enumerate(found)])
            self._known[op, wirings] = knots, np.concatenate([c.log_seconds for c in found])
        return self._known[op, wirings]


class Group:
    """A group of ranks of every row: its members, and those of them on one node."""

    def __init__(self, links: Links, members: Ints, near: Ints) -> None:
        import numpy as np

        self.links, self.members = links, np.asarray(members)
        found, self.number = np.unique(self.members * NEAR + near, return_inverse=True)
        self.wirings = tuple(Wiring(*divmod(int(code), NEAR)) for code in found)

    @property
    def alone(self) -> bool:
        """Whether every group has one rank."""
        return all(w.members <= 1 for w in self.wirings)

    def part(self, replicas: Ints) -> tuple[Group, Group]:
        """The sharded part of a data-parallel group, and the ranks that hold the same shard (see
        ``training_time_work.part_of``)."""
        import numpy as np

        near = np.array([w.near for w in self.wirings])[self.number]
        sharded = np.maximum(1, self.members // replicas)
        shard = Group(self.links, sharded, np.minimum(sharded, near))
        return shard, Group(self.links, replicas, np.maximum(1, near // sharded))

    def seconds(self, op: str, payload: Ints) -> Floats:
        """Seconds of ``op`` by row for the bytes that enter on a rank; 0 for one rank and for nothing to send."""
        import numpy as np

        knots, values = self.links.curves(op, self.wirings)
        x = np.log(np.maximum(payload, 1.0)) + self.number * ROOM
        live: Mask = (self.members > 1) & (np.asarray(payload) > 0)
        return np.asarray(np.where(live, np.exp(np.interp(x, knots, values)), 0.0))

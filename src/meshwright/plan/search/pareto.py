"""Points that no other point beats in everything, and what a point loses by against the best."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.plan.training_time import PARTS, WORDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwright.plan.search.columns import Floats, Ints


def front(value: Floats, cost: Floats) -> Ints:
    """Rows on the Pareto front: no other row has at least this ``value`` (more is better) at no more ``cost``.

    In the order of falling value; of equal points the first row stands.
    """
    import numpy as np

    order = np.lexsort((np.arange(len(value)), cost, -value))
    least = np.minimum.accumulate(cost[order])
    first = np.ones(len(order), dtype=bool)
    first[1:] = cost[order][1:] < least[:-1]
    return order[first].astype(np.int64)


def lost_by(best: Mapping[str, float], other: Mapping[str, float]) -> tuple[str, float]:
    """The part of the step in which ``other`` takes longest beside ``best``, and by how many seconds.

    Args:
        best, other: seconds by part (``training_time.PARTS``).
    """
    part = max(PARTS, key=lambda name: other[name] - best[name])
    return WORDS[part], other[part] - best[part]

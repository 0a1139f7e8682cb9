"""Points that no other point beats in everything, and what a point loses by against the best."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


#: Parts of a step that layouts differ in: column of the cost, and how it is called.
COMPONENTS = (
    ("compute_s", "compute"),
    ("link_s", "communication of activations"),
    ("exposed_s", "gradients and parameters that the backward does not hide"),
    ("idle_s", "pipeline bubble"),
)


def lost_by(cost: Mapping[str, Floats], best: int, other: int) -> tuple[str, float]:
    """The part of the step in which ``other`` takes longest beside ``best``, and by how many seconds."""
    more = [(float(cost[name][other] - cost[name][best]), text) for name, text in COMPONENTS]
    seconds, text = max(more)
    return text, seconds

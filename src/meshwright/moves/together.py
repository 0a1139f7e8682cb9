"""Which ranks of a world must lie on one node: every tp group, of one layout or of pools that follow one another."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.specs.placement import Placement


def tp_groups(placements: Sequence[Placement]) -> list[tuple[int, ...]]:
    """Ranks that talk in every layer, and so belong inside a node, group by group in the order of their first rank.

    Args:
        placements: of one layout, or of pools; ranks of each follow those of the one before in the world.
    """
    out: list[tuple[int, ...]] = []
    first = 0
    for placement in placements:
        world = placement.layout.world
        own = (placement.group("tp", placement.coordinate(rank)) for rank in range(world))
        out += [tuple(first + rank for rank in group) for group in dict.fromkeys(own)]
        first += world
    return out

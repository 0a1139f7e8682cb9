"""How gradients are gathered into buckets that are reduced while the backward goes on; pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

#: Elements at which a bucket is closed: 32 MiB of fp32, near the 25 MiB of torch's DistributedDataParallel.
BUCKET_ELEMENTS = 8 << 20


def fill(sizes: Sequence[int], most: int = BUCKET_ELEMENTS) -> tuple[tuple[int, int], ...]:
    """Runs of consecutive units, as first and one past the last; a run ends with the unit that makes it reach ``most``.

    Args:
        sizes: elements of every unit, in the order in which their gradients are ready.
        most: elements at which a run is closed, at least 1.

    Returns:
        Runs that cover all units in order; none is empty but that of no units, which has no run.
    """
    runs: list[tuple[int, int]] = []
    first = held = 0
    for number, size in enumerate(sizes):
        held += size
        if held >= most or number == len(sizes) - 1:
            runs.append((first, number + 1))
            first, held = number + 1, 0
    return tuple(runs)


def piece(numel: int, members: int) -> int:
    """Elements that each member of a group keeps of a flat buffer, which is padded to ``members`` times as many."""
    return -(-numel // members)

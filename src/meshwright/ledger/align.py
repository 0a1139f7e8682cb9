"""Two lists that should be the same: which places belong together."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from difflib import SequenceMatcher

#: Length of the stretch between common beginning and end up to which it is aligned; a longer one goes place by place,
#: because aligning takes the square of the length.
MAX_ALIGNED = 1000

Pair = tuple[int | None, int | None]


def pairs(a: Sequence[Hashable], b: Sequence[Hashable]) -> Iterator[Pair]:
    """Places of ``a`` and ``b`` that belong together, in order; None where one side has nothing.

    Elements that differ are paired while both sides have some, so that a changed element is not one lost and one new.
    """
    start, short = 0, min(len(a), len(b))
    while start < short and a[start] == b[start]:
        start += 1
    end = 0
    while end < short - start and a[-1 - end] == b[-1 - end]:
        end += 1
    stop_a, stop_b = len(a) - end, len(b) - end
    yield from ((i, i) for i in range(start))
    yield from _between(a[start:stop_a], b[start:stop_b], start)
    yield from ((stop_a + i, stop_b + i) for i in range(end))


def _between(a: Sequence[Hashable], b: Sequence[Hashable], base: int) -> Iterator[Pair]:
    if max(len(a), len(b)) > MAX_ALIGNED:
        blocks = [("replace", 0, len(a), 0, len(b))]
    else:
        blocks = [(o[0], o[1], o[2], o[3], o[4]) for o in SequenceMatcher(None, a, b, autojunk=False).get_opcodes()]
    for _, low_a, high_a, low_b, high_b in blocks:
        both = min(high_a - low_a, high_b - low_b)
        yield from ((base + low_a + i, base + low_b + i) for i in range(both))
        yield from ((base + i, None) for i in range(low_a + both, high_a))
        yield from ((None, base + i) for i in range(low_b + both, high_b))

"""Context parallelism: which rank holds which positions, and which blocks of keys travel where.

New tokens of a sequence are dealt in *pieces* (a whole prompt, or a chunk of one). A piece of n tokens is cut into 2 cp
chunks of c = ceil(n / 2cp) tokens; place r of cp holds chunks r and 2cp - 1 - r, so that under a causal mask all places
score equally many pairs (as in Llama 3, arXiv:2407.21783, section 3.3.2). Every place holds 2c rows of it; rows behind
the last token are filled up and seen by nobody. A token that is decoded afterwards goes to the place of its position
modulo cp.

On the ring, at step s, place r works on the keys of place r - s and hands them to r + 1 (Liu et al.,
arXiv:2310.01889); with all_to_all every place gets the keys of all for its share of the heads (Jacobs et al.,
arXiv:2309.14509).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

#: Position of a row behind the last token.
NOWHERE = 1 << 40


class Piece(NamedTuple):
    """Tokens ``start`` to ``start + length`` of a sequence that entered in one pass."""

    start: int
    length: int


def chunk(length: int, cp: int) -> int:
    """c: tokens of a chunk of a piece."""
    return -(-length // (2 * cp))


def rows(length: int, cp: int) -> int:
    """Rows of a piece on every place: all its tokens without context parallelism, else two chunks."""
    return length if cp == 1 else 2 * chunk(length, cp)


def dealt(piece: Piece, cp: int, place: int) -> list[int]:
    """Positions of the rows of a piece on a place, in order; rows behind the last token too, by their number."""
    if cp == 1:
        return list(range(piece.start, piece.start + piece.length))
    c = chunk(piece.length, cp)
    starts = (piece.start + place * c, piece.start + (2 * cp - 1 - place) * c)
    return [start + i for start in starts for i in range(c)]


def keys(pieces: Sequence[Piece], cp: int, place: int) -> list[int]:
    """Positions of the keys of some pieces on a place, in the order of its cache; ``NOWHERE`` behind the last token."""
    return [at if at < piece.start + piece.length else NOWHERE for piece in pieces for at in dealt(piece, cp, place)]


def holder(piece: Piece, cp: int, position: int) -> tuple[int, int]:
    """Place and row of a position of a piece."""
    c = chunk(piece.length, cp)
    number, offset = divmod(position - piece.start, c)
    return (number, offset) if number < cp else (2 * cp - 1 - number, c + offset)


def decoded_at(position: int, cp: int) -> int:
    """Place that caches a decoded token."""
    return position % cp


def pieces_of(length: int, most: int | None) -> list[int]:
    """Lengths of the pieces in which a prompt enters: all at once, or at most ``most`` tokens each."""
    if most is None or most >= length:
        return [length]
    whole, rest = divmod(length, most)
    return [most] * whole + [rest] * (rest > 0)


def slots(pieces: Sequence[int], decoded: int, cp: int) -> int:
    """Cache slots of a sequence on every place: rows of its pieces (by length), and its share of decoded tokens."""
    return sum(rows(length, cp) for length in pieces) + -(-decoded // cp)


def owner(step: int, cp: int, place: int) -> int:
    """Whose keys a place works on at a step of the ring."""
    return (place - step) % cp


def neighbours(cp: int, place: int) -> tuple[int, int]:
    """Places to which, and from which, blocks move on the ring."""
    return (place + 1) % cp, (place - 1) % cp


class Reach(NamedTuple):
    """What of a block can be seen: first row of the queries that see any of it, and how many of its rows are seen."""

    first_query: int
    keys: int


def reach(pieces: Sequence[Piece], cp: int, place: int, other: int) -> Reach:
    """What the queries of the last piece on ``place`` can see of the keys of all pieces on ``other``.

    Of the last piece itself: an earlier place's first chunk is seen by all queries and its second by none; a later
    place's chunks are seen by the second half of the queries. Earlier pieces are seen by all.
    """
    held = sum(rows(piece.length, cp) for piece in pieces)
    c = chunk(pieces[-1].length, cp)
    if other < place:
        return Reach(0, held - c)
    return Reach(c if other > place and len(pieces) == 1 else 0, held)

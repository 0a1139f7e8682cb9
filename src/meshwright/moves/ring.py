"""Collectives on a ring of n ranks: how many bytes each rank sends, and who sends which piece to whom when.

*Payload* is the tensor that enters the collective on one rank: the whole tensor for all_reduce, reduce_scatter,
all_to_all, broadcast and scatter; the rank's own piece for all_gather and gather.

Sources of the formulas: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005), sections 3 and 4 (ring all-gather, ring reduce-scatter); Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations" (2009): 2 (n-1)/n of the payload. An all_to_all and the
one-to-many collectives are counted as direct sends, a broadcast as a chain.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.errors import InputError

#: Collectives whose payload is one rank's piece of the result.
GATHERING = frozenset({"all_gather", "gather"})

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
)


def wire_bytes(op: str, ranks: int, payload_bytes: int, *, root: bool = False) -> int:
    """Bytes that one rank sends for one collective, rounded up to a whole byte.

    Args:
        op: one of ``COLLECTIVES``.
        ranks: members of the group, n.
        payload_bytes: bytes of the tensor that enters on this rank.
        root: this rank is the root of a gather, scatter or reduce (ignored by the others).

    Raises:
        InputError: an unknown collective, or a size out of range.
    """
    if ranks < 1 or payload_bytes < 0:
        raise InputError(f"{op}: {ranks} ranks and {payload_bytes} bytes; at least 1 rank and 0 bytes are needed")
    if op not in COLLECTIVES:
        raise InputError(f"unknown collective {op[:30]!r}; known: {', '.join(COLLECTIVES)}")
    if op == "send":
        return payload_bytes
    if ranks == 1 or op in {"recv", "barrier"}:
        return 0
    if op == "all_reduce":
        return -(-2 * (ranks - 1) * payload_bytes // ranks)
    if op in {"reduce_scatter", "all_to_all"}:
        return -(-(ranks - 1) * payload_bytes // ranks)
    if op == "all_gather":
        return (ranks - 1) * payload_bytes
    if op in {"gather", "reduce"}:
        return 0 if root else payload_bytes
    if op == "scatter":
        return -(-(ranks - 1) * payload_bytes // ranks) if root else 0
    return payload_bytes


@dataclass(frozen=True, slots=True)
class Hop:
    """At ``step``, rank ``src`` sends piece ``piece`` (of n) to ``dst``; ``reduces``: the receiver adds it."""

    step: int
    src: int
    dst: int
    piece: int
    reduces: bool


def _circle(ranks: int, first_step: int, offset: int, reduces: bool) -> list[Hop]:
    return [
        Hop(first_step + step, r, (r + 1) % ranks, (r + offset - step) % ranks, reduces)
        for step in range(ranks - 1)
        for r in range(ranks)
    ]


def ring_hops(op: str, ranks: int) -> tuple[Hop, ...]:
    """Every hop of a ring ``all_gather``, ``reduce_scatter`` or ``all_reduce``, or of a direct ``all_to_all``.

    After the reduce_scatter rank r holds piece r complete. A piece is 1/n of the tensor, except in an
    all_gather, where piece r is the payload of rank r.

    Raises:
        InputError: another collective, or more than 1024 ranks (the table has n (n-1) rows).
    """
    if not 1 <= ranks <= 1024:
        raise InputError(f"hops of {op}: {ranks} ranks is out of range; it must be 1 to 1024")
    if op == "all_gather":
        return tuple(_circle(ranks, 0, 0, False))
    if op == "reduce_scatter":
        return tuple(_circle(ranks, 0, -1, True))
    if op == "all_reduce":
        return tuple(_circle(ranks, 0, -1, True) + _circle(ranks, ranks - 1, 0, False))
    if op == "all_to_all":
        return tuple(
            Hop(step - 1, r, (r + step) % ranks, (r + step) % ranks, False)
            for step in range(1, ranks)
            for r in range(ranks)
        )
    raise InputError(f"no ring for {op[:30]!r}; known: all_gather, reduce_scatter, all_reduce, all_to_all")

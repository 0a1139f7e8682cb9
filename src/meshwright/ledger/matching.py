"""What makes two calls of one operation disagree: the same rules online and offline.

What must agree: the operation, root, reduction, element type and element counts; of an all_to_all, what i sends to j
against what j expects of i. Shapes of equal element count agree: NCCL and gloo move elements. What only the root of an
operation holds is never compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

Shapes = tuple[tuple[int, ...], ...]

HAND_OFFS = frozenset({"send", "recv"})
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter"})
#: Operations without a payload.
BARE = frozenset({"barrier", "new_group", "init_process_group"})


class Call(NamedTuple):
    """One collective or hand-off of one rank, as posted or dumped; None and () mean unknown.

    Attributes:
        rank: global rank.
        group: key of the group, the same text on every member.
        members: global ranks of the group in the order of their places.
        op: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, ``all_to_all``, ``reduce``, ``gather``,
            ``scatter``, ``barrier``, ``send``, ``recv``, ``new_group``, ...
        shapes_in: of the tensors that enter.
        shapes_out: of the tensors that are filled.
        dtype: element type.
        peer: global rank of the other side (send, recv; None: from anyone) or of the root.
        splits_in: elements of an all_to_all to every place.
        splits_out: elements of an all_to_all from every place.
        reduce_op: ``sum``, ``avg``, ...
        tag: of a hand-off.
        call_site: ``file:line``.
        is_async: the caller may go on before the operation is done.
        creates: ranks of the group that a ``new_group`` makes.
    """

    rank: int
    group: str
    members: tuple[int, ...]
    op: str
    shapes_in: Shapes = ()
    shapes_out: Shapes = ()
    dtype: str | None = None
    peer: int | None = None
    splits_in: tuple[int, ...] | None = None
    splits_out: tuple[int, ...] | None = None
    reduce_op: str | None = None
    tag: int | None = None
    call_site: str | None = None
    is_async: bool = False
    creates: tuple[int, ...] | None = None


def disagreement(a: Call, b: Call) -> str | None:
    """Why two calls cannot be the same collective, or the two sides of one hand-off; None if they can.

    Returns:
        ``wrong_op``, ``group_order`` (another group is made), ``wrong_root``, ``wrong_reduce_op``, ``wrong_dtype``,
        ``wrong_shape`` or ``wrong_splits``: the first of these that differs.
    """
    sides = {a.op, b.op} == HAND_OFFS
    if a.op != b.op and not sides:
        return "wrong_op"
    if _differ(a.creates, b.creates):
        return "group_order"
    if a.op in ROOTED and _differ(a.peer, b.peer):
        return "wrong_root"
    if a.op in REDUCING and _differ(a.reduce_op, b.reduce_op):
        return "wrong_reduce_op"
    if a.op in BARE:
        return None
    if _differ(a.dtype, b.dtype):
        return "wrong_dtype"
    if sides:
        return "wrong_shape" if _differ(_payload(a), _payload(b)) else None
    if a.op == "all_to_all":
        return _splits_disagree(a, b)
    return _counts_disagree(a, b)


def _differ(x: object, y: object) -> bool:
    return x is not None and y is not None and x != y


def _counts(shapes: Shapes) -> tuple[int, ...] | None:
    return tuple(prod(s) for s in shapes) or None


def _payload(call: Call) -> int | None:
    counts = _counts(call.shapes_in or call.shapes_out)
    return sum(counts) if counts else None


def _place(call: Call) -> int | None:
    return call.members.index(call.rank) if call.rank in call.members else None


def _pieces(whole: Shapes, part: Shapes, ranks: int) -> tuple[int, ...] | None:
    """Elements of every place's piece: of a list with one tensor a place, or of one tensor cut evenly."""
    counts = _counts(whole)
    if counts is None or len(part) > 1 or not ranks:
        return None
    if len(counts) == ranks:
        return counts
    return (counts[0] // ranks,) * ranks if len(counts) == 1 else None


def _counts_disagree(a: Call, b: Call) -> str | None:
    """Element counts of anything but an all_to_all. Tensors that only the root holds are not compared."""
    if a.op in {"all_gather", "reduce_scatter"}:
        sides = [(c.shapes_out, c.shapes_in) if c.op == "all_gather" else (c.shapes_in, c.shapes_out) for c in (a, b)]
        pieces = [_pieces(whole, part, len(c.members)) for c, (whole, part) in zip((a, b), sides, strict=True)]
        if pieces[0] is not None and pieces[1] is not None:
            own = [_counts(part) for _, part in sides]
            for c, mine, other in ((a, own[0], pieces[1]), (b, own[1], pieces[0])):
                place = _place(c)
                if mine is not None and place is not None and mine != (other[place],):
                    return "wrong_shape"
            return "wrong_shape" if pieces[0] != pieces[1] else None
        return "wrong_shape" if any(_differ(_counts(x), _counts(y)) for x, y in zip(*sides, strict=True)) else None
    if a.op == "scatter":
        return "wrong_shape" if _differ(_counts(a.shapes_out), _counts(b.shapes_out)) else None
    ins = [_counts(c.shapes_in or c.shapes_out) for c in (a, b)]
    return "wrong_shape" if _differ(*ins) else None


def _splits(call: Call, given: tuple[int, ...] | None, shapes: Shapes) -> tuple[int, ...] | None:
    if given is not None or not call.members:
        return given
    return _pieces(shapes, (), len(call.members))


def splits_between(sender: Call, receiver: Call) -> tuple[int | None, int | None]:
    """Elements that one rank of an all_to_all sends to another, and that the other expects; -1: no such place."""
    i, j = _place(sender), _place(receiver)
    sent = _splits(sender, sender.splits_in, sender.shapes_in)
    expected = _splits(receiver, receiver.splits_out, receiver.shapes_out)
    if i is None or j is None or sent is None or expected is None:
        return None, None
    return (sent[j] if j < len(sent) else -1), (expected[i] if i < len(expected) else -1)


def _splits_disagree(a: Call, b: Call) -> str | None:
    """What one sends to the other against what the other expects of it, both ways."""
    if a.rank == b.rank:
        return None
    return "wrong_splits" if any(_differ(*splits_between(x, y)) for x, y in ((a, b), (b, a))) else None


def majority(calls: Sequence[Call]) -> tuple[list[list[Call]], str | None]:
    """Calls in classes that agree, the largest first, and how the second differs from the first.

    With splits, which disagree in pairs, a class is every call that agrees with all before it.
    """
    classes: list[list[Call]] = []
    for call in sorted(calls, key=lambda c: c.rank):
        for known in classes:
            if all(disagreement(call, other) is None for other in known):
                known.append(call)
                break
        else:
            classes.append([call])
    classes.sort(key=lambda c: (-len(c), c[0].rank))
    kind = next((k for x in classes[0] for y in classes[1] if (k := disagreement(x, y))), None) if classes[1:] else None
    return classes, kind

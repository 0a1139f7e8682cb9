"""Where the calls of ranks part ways: the first collective of every group on which its members disagree.

Collectives of a group match by their order. At the first order number at which calls differ, the majority decides
what was right; how the others' calls line up again behind it tells a skipped call from an extra one and from a wrong
one (edit distance of one insertion, deletion or substitution, with look-ahead). Calls of equal shapes show a shift
only in where they came from, so stacks are compared as well; a stack that differs without a shift is legal code that
reaches one collective from two lines. What lies before a ring buffer's first row is never read as a mistake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshwright.ledger.lanes import Lane, Lanes, first_difference, ints

#: Calls behind a divergence that are held against each other, and how far a shift may be.
LOOK_AHEAD = 64
MAX_SHIFT = 64
#: Share of the look-ahead that must agree for an alignment to count.
AGREES = 0.9
#: Differences of stacks without a shift that are passed over before a group counts as legal.
MAX_BENIGN = 64
#: Calls of the history in which it is looked up what usually follows what.
HISTORY = 4000


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first disagreement in a group.

    Attributes:
        kind: ``skipped`` or ``extra`` (calls of the guilty), ``other`` (another call in its place), ``jumped`` (a call
            that comes later for the others, or that only the guilty know, and nothing recorded after it).
        group: number of the group.
        seq: order number in it.
        guilty, others: ranks, ascending.
        clear: the others are more than the guilty.
        count: how many calls were skipped or are extra.
        matched: calls behind the divergence that the alignment explains.
        expected, found: exact numbers of what the others and the guilty called at ``seq``.
        expected_stack, found_stack: numbers of where from, -1 unknown.
        known_before: the guilty's call occurs in the history of the others.
        usual: the others' call is what followed before, too.
        by_stack: only stacks show it.
    """

    kind: str
    group: int
    seq: int
    guilty: tuple[int, ...]
    others: tuple[int, ...]
    clear: bool
    count: int
    matched: int
    expected: int
    found: int
    expected_stack: int
    found_stack: int
    known_before: bool
    usual: bool
    by_stack: bool


def _value(lane: Lane, seq: int, column: str) -> int:
    return ints(getattr(lane, column))[seq - lane.first]


def _pairs(lane: Lane, with_stacks: bool) -> list[tuple[int, int]]:
    calls = ints(lane.calls)
    stacks: Sequence[int] = ints(lane.stacks) if with_stacks else [0] * len(lane)
    return list(zip(calls, stacks, strict=True))


@dataclass(frozen=True, slots=True)
class Fit:
    """How two sequences line up: ``kind`` of ``count`` calls, ``matched`` of ``compared`` behind agree."""

    kind: str
    count: int
    matched: int
    compared: int


def _agreement(a: Sequence[object], b: Sequence[object]) -> tuple[int, int]:
    compared = min(len(a), len(b), LOOK_AHEAD)
    return sum(x == y for x, y in zip(a[:compared], b[:compared], strict=True)), compared


def fit_of(
    right: Sequence[object], odd: Sequence[object], kinds: tuple[str, ...] = ("other", "skipped", "extra")
) -> Fit | None:
    """How ``odd`` lines up with ``right``, both from the divergence on; None when nothing lines up or none follows."""
    best: tuple[float, int, int] | None = None
    chosen: Fit | None = None
    options: list[tuple[str, int, Sequence[object], Sequence[object]]] = [("other", 1, right[1:], odd[1:])]
    for shift in range(1, MAX_SHIFT + 1):
        options.append(("skipped", shift, right[shift:], odd))
        options.append(("extra", shift, right, odd[shift:]))
    for kind, count, a, b in options:
        matched, compared = _agreement(a, b)
        if kind not in kinds or not compared or matched < AGREES * compared or not matched:
            continue
        # The longest agreement wins; of equal ones the smaller change; a substitution before a shift.
        rank = (min(matched, 8) - 2.0 * (count - 1), matched, -count)
        if best is None or rank > best:
            best, chosen = rank, Fit(kind, count, matched, compared)
    return chosen


def _follows(history: Sequence[tuple[int, int]], before: tuple[int, int], after: tuple[int, int]) -> bool:
    return any(a == before and b == after for a, b in pairwise(history))


def _jump(right: Lane, odd: Lane, seq: int, stacks: bool) -> tuple[str, bool, bool]:
    """Reading of a divergence behind which nothing lines up: kind, whether the odd call was known, the right usual."""
    rights, odds = _pairs(right, stacks), _pairs(odd, stacks)
    past = rights[max(0, seq - right.first - HISTORY) : seq - right.first]
    want, got = rights[seq - right.first], odds[seq - odd.first]
    before = past[-1:]
    usual = bool(before) and _follows(past, before[0], want)
    known = got in past
    if known and _follows([*past, want], want, got):
        return "skipped", True, usual
    if stacks and want[1] == got[1] and want[1] >= 0:
        return "other", known, usual
    return "jumped", known, usual


def _split(lanes: dict[int, Lane], seq: int, column: str) -> dict[int, list[int]]:
    """Ranks by what they have at an order number."""
    out: dict[int, list[int]] = {}
    for rank, lane in lanes.items():
        if lane.first <= seq < lane.end:
            out.setdefault(_value(lane, seq, column), []).append(rank)
    return out


def _first(lanes: dict[int, Lane], column: str, start: int) -> int | None:
    """First order number at which any two members differ."""
    distinct = Counter(lanes.values())
    if len(distinct) < 2:
        return None
    ordered = sorted(distinct, key=lambda lane: (-distinct[lane], -len(lane), lane))
    found: int | None = None
    covered: list[Lane] = []
    for lane in ordered:
        for other in covered[:4]:
            at = first_difference(other, lane, column, start)
            if at is not None and (found is None or at < found):
                found = at
        if len(covered) < 4:
            covered.append(lane)
    return found


def _majority(classes: dict[int, list[int]]) -> tuple[int, bool]:
    """The value of most ranks (of equals the one that the lowest rank has), and whether it leads."""
    order = sorted(classes, key=lambda value: (-len(classes[value]), classes[value][0]))
    return order[0], len(order) == 1 or len(classes[order[0]]) > len(classes[order[1]])


def _longest(lanes: dict[int, Lane], ranks: Sequence[int], seq: int) -> Lane:
    """The lane of these ranks that reaches furthest; of equals the one that begins first."""
    return max((lanes[r] for r in ranks), key=lambda lane: (lane.end, -lane.first, lane))


def _divergence(
    group: int,
    lanes: dict[int, Lane],
    seq: int,
    right_ranks: list[int],
    odd_ranks: list[int],
    clear: bool,
    by_stack: bool,
) -> Divergence:
    right, odd = _longest(lanes, right_ranks, seq), _longest(lanes, odd_ranks, seq)
    stacks = min(*ints(right.stacks), *ints(odd.stacks)) >= 0
    rights, odds = _pairs(right, stacks)[seq - right.first :], _pairs(odd, stacks)[seq - odd.first :]
    fit = fit_of(rights, odds)
    if fit is None and stacks and not by_stack:
        fit = fit_of([c for c, _ in rights], [c for c, _ in odds])
    if fit is not None and fit.kind == "other" and stacks and rights[0][1] != odds[0][1] and odds[0] not in rights:
        extra = fit_of(rights, odds, ("extra",))  # a line that nobody else reaches is rather extra than another's place
        fit = extra if extra is not None and extra.count == 1 and extra.matched >= fit.matched else fit
    kind, known, usual = _jump(right, odd, seq, stacks)
    matched, count = 0, 1
    same_line = stacks and rights[0][1] == odds[0][1] and rights[0][0] != odds[0][0]
    if same_line and fit is not None:  # a line that makes different calls (a wrapper, a backward pass) tells nothing
        made = {call for call, stack in _pairs(right, True) if stack == rights[0][1]}
        same_line = odds[0][0] not in made
    if same_line:
        kind, matched = "other", fit.matched if fit is not None and fit.kind == "other" else 0
    elif fit is not None:
        kind, count, matched = fit.kind, fit.count, fit.matched
    return Divergence(
        kind,
        group,
        seq,
        tuple(sorted(odd_ranks)),
        tuple(sorted(right_ranks)),
        clear,
        count,
        matched,
        _value(right, seq, "kinds"),
        _value(odd, seq, "kinds"),
        _value(right, seq, "stacks"),
        _value(odd, seq, "stacks"),
        known,
        usual,
        by_stack,
    )


def _oriented(found: Divergence, lanes: dict[int, Lane]) -> Divergence:
    """Of two equal halves the one is odd whose call did not come before, when the other's is what usually follows."""
    if found.kind not in {"jumped", "other"} or (found.usual and not found.known_before):
        return found
    turned = _divergence(found.group, lanes, found.seq, list(found.guilty), list(found.others), False, found.by_stack)
    return turned if turned.usual and not turned.known_before else found


def _of_calls(group: int, lanes: dict[int, Lane], passed: Callable[[int, int], bool]) -> list[Divergence]:
    """The first order number at which calls differ, unless all members completed it."""
    start = -(1 << 60)
    for _ in range(MAX_BENIGN):
        seq = _first(lanes, "calls", start)
        if seq is None:
            return []
        classes = _split(lanes, seq, "calls")
        if passed(group, seq):
            start = seq + 1
            continue
        value, clear = _majority(classes)
        rights = classes.pop(value)
        found = [_divergence(group, lanes, seq, rights, odd, clear, False) for odd in classes.values()]
        return found if clear or len(found) > 1 else [_oriented(found[0], lanes)]
    return []


def _strays(right: Lane, odd: Lane, seq: int) -> bool:
    """Whether a rank's last call is the first one from a line that nobody reached before, while the others went on."""
    if odd.end != seq + 1 or right.end <= odd.end:
        return False
    stack, own = _value(odd, seq, "stacks"), ints(odd.stacks)[: seq - odd.first]
    return len(own) > 0 and stack not in own and stack not in ints(right.stacks)


def _of_stacks(group: int, lanes: dict[int, Lane], before: int | None) -> list[Divergence]:
    """The first order number from which stacks of some members are shifted against the others'."""
    if any(min(ints(lane.stacks), default=-1) < 0 for lane in lanes.values()):
        return []
    start = -(1 << 60)
    for _ in range(MAX_BENIGN):
        seq = _first(lanes, "stacks", start)
        if seq is None or (before is not None and seq >= before):
            return []
        classes = _split(lanes, seq, "stacks")
        value, clear = _majority(classes)
        rights = classes.pop(value)
        found = []
        for odd in classes.values():
            right, other = _longest(lanes, rights, seq), _longest(lanes, odd, seq)
            a = ints(right.stacks)[seq - right.first :].tolist()
            b = ints(other.stacks)[seq - other.first :].tolist()
            fit = fit_of(a, b)
            shifted = fit is not None and fit.kind in {"skipped", "extra"}
            if shifted or (clear and _strays(right, other, seq)):
                found.append(_divergence(group, lanes, seq, rights, odd, clear, True))
        if found:
            return found
        start = seq + 1
    return []


def divergences(
    lanes: Lanes, passed: Callable[[int, int], bool], left_out: frozenset[int] = frozenset()
) -> list[Divergence]:
    """The first disagreement of every group.

    Args:
        lanes: of all ranks.
        passed: whether all members of a group completed an order number, so that a difference there did no harm.
        left_out: ranks whose rows are not to be trusted (stale dumps).
    """
    out: list[Divergence] = []
    for group in sorted(lanes.of):
        own = {r: lane for r, lane in lanes.of[group].items() if r not in left_out}
        if len(own) < 2:
            continue
        calls = _of_calls(group, own, passed)
        before = min((d.seq for d in calls), default=None)
        stacks = _of_stacks(group, own, before)
        out += stacks or calls
    return out

"""Predicted against recorded, entry by entry: is what ran what was foretold?

For every recorded rank and every group of it the collectives and hand-offs are compared in order: op, group, peer,
splits, shapes, dtype, bytes, layer, phase, step, micro-batch. Matrix products are compared as multisets, because
independent products may run in any order: how many there are of each shape and dtype in each layer and phase. Other
work on the device (norms, look-ups, attention cores) is not compared. Names, times and call sites
are for people.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.errors import InputError
from meshwright.ledger.align import pairs
from meshwright.ledger.schema import Entry, Ledger

#: What is compared of a collective or hand-off. Where a value is None on one side those of ``MAYBE`` count as unknown.
FIELDS = (
    "op",
    "group",
    "peer",
    "splits",
    "shapes",
    "dtype",
    "payload_bytes",
    "layer",
    "phase",
    "step",
    "microbatch",
)
MAYBE = frozenset({"peer", "splits", "step", "microbatch"})
#: Ops whose peer is the other side and must be known; elsewhere it is the root, which a prediction need not name.
HAND_OFFS = frozenset({"send", "recv"})
#: Ops of the compute stream that are compared.
PRODUCT = "matmul"

#: Differences that are kept; all are counted.
MAX_KEPT = 1000
#: Entries of one group of one rank, repetitions counted; a ledger with more is refused.
MAX_UNFOLDED = 5_000_000


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that is not as predicted.

    Attributes:
        rank: global rank. stream: axis of the group, ``compute`` for products, the term for holdings.
        entry: number of the entry within its stream, from 0; None for products and holdings.
        layer, phase, step: of the predicted entry, of the recorded one where nothing was predicted.
        op, name: of the same.
        what: field that differs; ``missing`` (predicted, not recorded), ``extra`` (recorded, not predicted).
        predicted, recorded: both values as text.
        call_site: where the recorded entry was issued.
        order: place in the program of the rank, by which the first difference is found.
        times: how many folded repetitions differ alike.
    """

    rank: int
    stream: str
    entry: int | None
    layer: int | None
    phase: str | None
    step: int | None
    op: str
    name: str | None
    what: str
    predicted: str
    recorded: str
    call_site: str | None = None
    order: int = 0
    times: int = 1

    def __str__(self) -> str:
        where = [f"rank {self.rank}"]
        where += [] if self.layer is None else [f"layer {self.layer}"]
        where += [] if self.phase is None else [self.phase + ("" if self.step is None else f" step {self.step}")]
        label = self.op + (f" ({self.name})" if self.name and self.name != self.op else "")
        where.append(label if self.entry is None else f"{self.stream} entry {self.entry}, {label}")
        said = f"{', '.join(where)}: {self.what}: predicted {self.predicted}, recorded {self.recorded}"
        return said + (f", at {self.call_site}" if self.call_site else "")


@dataclass(slots=True)
class Comparison:
    """What was compared and what differed.

    Attributes:
        differences: in program order, rank by rank where they fall together; at most ``MAX_KEPT``.
        total: how many there are.
        ranks: recorded ranks that were compared.
        entries: predicted collectives and hand-offs of these ranks, repetitions counted.
        products: predicted matrix products of these ranks.
        unknown: for every field how many entries did not have it on one side, and so could not be compared.
    """

    differences: list[Difference] = field(default_factory=list)
    total: int = 0
    ranks: int = 0
    entries: int = 0
    products: int = 0
    unknown: Counter[str] = field(default_factory=Counter)

    @property
    def equal(self) -> bool:
        """Nothing differs."""
        return self.total == 0

    @property
    def first(self) -> Difference | None:
        """The earliest difference in program order."""
        return self.differences[0] if self.differences else None

    @property
    def scope(self) -> str:
        """What was compared, in a line."""
        text = f"{self.entries} collectives and hand-offs and {self.products} matrix products on {self.ranks} ranks"
        missing = ", ".join(f"{name} of {count}" for name, count in sorted(self.unknown.items()))
        return text + (f" (not known on one side: {missing})" if missing else "")

    def add(self, difference: Difference) -> None:
        """Count a difference."""
        self.total += difference.times
        self.differences.append(difference)


def merged(ledgers: Iterable[Ledger]) -> Ledger:
    """One ledger of several ranks' ledgers; the facts are those of the first.

    Raises:
        InputError: two ledgers name the same rank or rank class.
    """
    out = Ledger()
    for ledger in ledgers:
        for kind, known, new in (
            ("rank", {r.rank for r in out.ranks}, {r.rank for r in ledger.ranks}),
            ("rank class", {r.rank_class for r in out.ranks}, {r.rank_class for r in ledger.ranks}),
        ):
            if twice := known & new:
                raise InputError(f"{kind} {min(twice)} is in two of the ledgers; give one ledger a rank")
        out.entries += ledger.entries
        out.holdings += ledger.holdings
        out.ranks += ledger.ranks
        out.meta = out.meta or dict(ledger.meta)
    return out


def compare(
    predicted: Ledger,
    recorded: Ledger,
    *,
    classes: Mapping[int, str] | None = None,
    fields: Sequence[str] = FIELDS,
    products: bool = True,
    every_rank: bool = True,
) -> Comparison:
    """Compare what ran with what was predicted.

    Args:
        predicted: its rank classes stand for many ranks each.
        recorded: every row of ``ranks`` is one rank (``merged`` of the ranks' ledgers).
        classes: predicted class of every recorded rank; None: by the rows of ``predicted.ranks``, a row of n ranks
            standing for n consecutive ones.
        fields: of ``FIELDS``: what must be equal.
        products: compare matrix products too (the recorder must have been asked for them).
        every_rank: a predicted rank that was not recorded is a difference.

    Raises:
        InputError: a ledger of more than ``MAX_UNFOLDED`` entries a rank and group.
    """
    out = Comparison()
    known = dict(classes) if classes is not None else _classes(predicted)
    by_class = {name: list(rows) for name, rows in _by_class(predicted).items()}
    runs = _by_class(recorded)
    seen = {row.rank: row.rank_class for row in recorded.ranks}
    if every_rank:
        for rank in sorted(known.keys() - seen.keys()):
            out.add(_whole_rank(rank, "missing", known[rank], "no ledger"))
    for rank in sorted(seen):
        if rank not in known:
            out.add(_whole_rank(rank, "extra", "no such rank", seen[rank]))
            continue
        out.ranks += 1
        _compare_rank(out, rank, by_class.get(known[rank], []), runs.get(seen[rank], []), fields, products)
    out.differences.sort(key=lambda d: (d.order, d.rank))
    del out.differences[MAX_KEPT:]
    return out


def _classes(predicted: Ledger) -> dict[int, str]:
    return {row.rank + i: row.rank_class for row in predicted.ranks for i in range(row.ranks)}


def _by_class(ledger: Ledger) -> dict[str, list[Entry]]:
    out: dict[str, list[Entry]] = {}
    for entry in ledger.entries:
        out.setdefault(entry.rank_class, []).append(entry)
    return out


def _whole_rank(rank: int, what: str, predicted: str, recorded: str) -> Difference:
    return Difference(rank, "ranks", None, None, None, None, "rank", None, what, predicted, recorded, order=-1)


Placed = tuple[int, Entry]


def _compare_rank(
    out: Comparison,
    rank: int,
    predicted: Sequence[Entry],
    recorded: Sequence[Entry],
    fields: Sequence[str],
    products: bool,
) -> None:
    """All streams of one rank."""
    ours, theirs = _streams(predicted), _streams(recorded)
    for stream in dict.fromkeys([*ours, *theirs]):
        left, right = ours.get(stream, []), theirs.get(stream, [])
        out.entries += sum(max(0, e.count) for _, e in left)
        _compare_stream(out, rank, stream, left, right, fields)
    if products:
        _compare_products(out, rank, predicted, recorded)


def _streams(entries: Sequence[Entry]) -> dict[str, list[Placed]]:
    """Collectives and hand-offs by group, in order (by ``seq`` where all have one), with their place in the program."""
    out: dict[str, list[Placed]] = {}
    for place, entry in enumerate(entries):
        if entry.group is not None:
            out.setdefault(entry.group, []).append((place, entry))
    for rows in out.values():
        if all(e.seq is not None for _, e in rows):
            rows.sort(key=lambda row: row[1].seq or 0)
    return out


def _signature(entry: Entry, fields: Sequence[str]) -> tuple[object, ...]:
    return tuple(getattr(entry, name) for name in fields if name not in MAYBE)


def _compare_stream(
    out: Comparison,
    rank: int,
    stream: str,
    left: Sequence[Placed],
    right: Sequence[Placed],
    fields: Sequence[str],
) -> None:
    """Walk both lists; where they part, align what lies between their common beginning and end.

    Where one list is longer, names help to tell which of several equal entries is missing or too many.
    """
    a, b = _unfolded(left), _unfolded(right)
    named = {e.name for _, e in a} & {e.name for _, e in b} if len(a) != len(b) else set()
    keys_a, keys_b = (
        [(*_signature(e, fields), e.name if e.name in named else None) for _, e in rows] for rows in (a, b)
    )
    for i, j in pairs(keys_a, keys_b):
        _compare_pair(out, rank, stream, a, b, i, j, fields)


def _unfolded(rows: Sequence[Placed]) -> list[Placed]:
    """Entries that repeat in a row (``count``) one by one; a count below 1 stands for none."""
    count = sum(max(0, e.count) for _, e in rows)
    if count > MAX_UNFOLDED:
        raise InputError(f"{rows[0][1].group}: {count} entries of one rank; at most {MAX_UNFOLDED} are compared")
    return [row for row in rows for _ in range(row[1].count)]


def _compare_pair(
    out: Comparison,
    rank: int,
    stream: str,
    a: Sequence[Placed],
    b: Sequence[Placed],
    i: int | None,
    j: int | None,
    fields: Sequence[str],
) -> None:
    """Compare one predicted entry with one recorded entry, or report the one that has no partner."""
    if i is None or j is None:
        at = (i if i is not None else j) or 0
        order, entry = a[at] if i is not None else b[at]
        what, text = ("missing" if i is not None else "extra"), _text(entry)
        sides = (text, "nothing") if i is not None else ("nothing", text)
        out.add(_difference(rank, stream, at, entry, what, *sides, None if i is not None else entry.call_site, order))
        return
    (order, x), (_, y) = a[i], b[j]
    for name in fields:
        p, r = getattr(x, name), getattr(y, name)
        if name in MAYBE and (p is None or r is None) and not (name == "peer" and x.op in HAND_OFFS):
            if p is not r:
                out.unknown[name] += 1
            continue
        if p != r:
            out.add(_difference(rank, stream, i, x, name, _value(p), _value(r), y.call_site, order))


def _difference(
    rank: int,
    stream: str,
    at: int | None,
    e: Entry,
    what: str,
    predicted: str,
    recorded: str,
    call_site: str | None,
    order: int,
) -> Difference:
    return Difference(
        rank, stream, at, e.layer, e.phase, e.step, e.op, e.name, what, predicted, recorded, call_site, order
    )


def _value(value: object) -> str:
    """A value for people: shapes as ``8x576 . 576x192``, at most 200 characters."""
    if value is None:
        return "none"
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return " . ".join("x".join(map(str, shape)) or "1" for shape in value)[:200]
    return str(value)[:200]


def _text(entry: Entry) -> str:
    """An entry in a few words."""
    known = (_value(entry.shapes) if entry.shapes else "", entry.dtype or "")
    size = "" if entry.payload_bytes is None else f"{entry.payload_bytes} bytes"
    return " ".join(word for word in (entry.op, *known, size) if word)


Key = tuple[int | None, str | None, tuple[tuple[int, ...], ...] | None, str | None]


def _products(entries: Sequence[Entry]) -> tuple[Counter[Key], dict[Key, Placed]]:
    """How many products there are of each kind, and the first of them."""
    counts: Counter[Key] = Counter()
    first: dict[Key, Placed] = {}
    for place, e in enumerate(entries):
        if e.op == PRODUCT:
            key = (e.layer, e.phase, e.shapes, e.dtype)
            counts[key] += max(0, e.count)
            first.setdefault(key, (place, e))
    return counts, first


def _compare_products(out: Comparison, rank: int, predicted: Sequence[Entry], recorded: Sequence[Entry]) -> None:
    ours, at = _products(predicted)
    theirs, there = _products(recorded)
    out.products += sum(ours.values())
    for key in dict.fromkeys([*ours, *theirs]):
        p, r = ours[key], theirs[key]
        if p == r:
            continue
        order, entry = at[key] if key in at else there[key]
        what = f"how often {_value(key[2])} {key[3]}"
        site = there[key][1].call_site if key in there else None
        out.add(_difference(rank, "compute", None, entry, what, str(p), str(r), site, order))


def compare_holdings(
    predicted: Ledger, recorded: Ledger, terms: Sequence[str], *, classes: Mapping[int, str] | None = None
) -> Comparison:
    """Compare the bytes that every recorded rank holds, summed by term.

    Args:
        predicted, recorded, classes: as in ``compare``.
        terms: of ``Holding.term``: what must be equal to the byte.
    """
    out = Comparison()
    known = dict(classes) if classes is not None else _classes(predicted)
    ours, theirs = _held(predicted), _held(recorded)
    for row in sorted(recorded.ranks, key=lambda row: row.rank):
        name = known.get(row.rank)
        if name is None:
            out.add(_whole_rank(row.rank, "extra", "no such rank", row.rank_class))
            continue
        out.ranks += 1
        for term in terms:
            p, r = ours[name, term], theirs[row.rank_class, term]
            out.entries += 1
            if p != r:
                out.add(Difference(row.rank, term, None, None, None, None, term, None, "bytes held", str(p), str(r)))
    return out


def _held(ledger: Ledger) -> Counter[tuple[str, str]]:
    sums: Counter[tuple[str, str]] = Counter()
    for h in ledger.holdings:
        sums[h.rank_class, h.term] += h.bytes
    return sums

"""Equal ledgers compare equal however they are folded; every planted difference is found and named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.ledger import compare as module
from meshwright.ledger.compare import FIELDS, compare, compare_holdings, merged
from meshwright.ledger.schema import Entry, Holding, Ledger, Rank

OPS = ("all_reduce", "all_gather", "send", "recv", "gather", "all_to_all")

communications = st.builds(
    Entry,
    rank_class=st.just("stage"),
    op=st.sampled_from(OPS),
    step=st.integers(0, 2),
    microbatch=st.integers(0, 1),
    layer=st.none() | st.integers(0, 3),
    phase=st.sampled_from(("prefill", "decode")),
    group=st.sampled_from(("tp", "pp")),
    peer=st.integers(0, 3),
    splits=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)),
    shapes=st.tuples(st.tuples(st.integers(1, 8), st.integers(1, 8))),
    dtype=st.sampled_from(("f32", "bf16")),
    payload_bytes=st.integers(0, 1 << 20),
    count=st.integers(1, 3),
)
products = st.builds(
    Entry,
    rank_class=st.just("stage"),
    op=st.just("matmul"),
    layer=st.integers(0, 2),
    phase=st.just("decode"),
    stream=st.just("compute"),
    shapes=st.sampled_from((((1, 8), (8, 4)), ((1, 4), (4, 8)))),
    dtype=st.just("f32"),
    count=st.integers(1, 3),
)
runs = st.lists(communications | products, min_size=1, max_size=25)


def predicted_of(entries: list[Entry]) -> Ledger:
    """One class of two ranks, numbered within every group."""
    return Ledger(_numbered(entries), ranks=[Rank(0, {"tp": 0}, "stage", 2)])


def recorded_of(entries: list[Entry], rank: int) -> Ledger:
    """What a rank records when it does just this: one entry each, no fold."""
    name = f"rank{rank}"
    single = [replace(e, rank_class=name, count=1, source="record") for e in entries for _ in range(e.count)]
    return Ledger(_numbered(single), ranks=[Rank(rank, {}, name)])


def _numbered(entries: list[Entry]) -> list[Entry]:
    seq: dict[str | None, int] = {}
    out = []
    for e in entries:
        out.append(replace(e, seq=seq.get(e.group, 0)))
        seq[e.group] = seq.get(e.group, 0) + 1
    return out


def both(entries: list[Entry]) -> Ledger:
    return merged([recorded_of(entries, 0), recorded_of(entries, 1)])


@settings(max_examples=30, deadline=None)
@given(runs)
def test_what_ran_as_predicted_is_equal(entries: list[Entry]) -> None:
    result = compare(predicted_of(entries), both(entries))
    assert result.equal, result.differences
    assert result.ranks == 2
    assert result.entries == 2 * sum(e.count for e in entries if e.group)
    assert result.products == 2 * sum(e.count for e in entries if not e.group)


CHANGES: dict[str, Any] = {
    "op": lambda v: "broadcast",
    "peer": lambda v: v + 1,
    "splits": lambda v: (1, 2, 3),
    "shapes": lambda v: ((77, 7),),
    "dtype": lambda v: "i64",
    "payload_bytes": lambda v: v + 1,
    "layer": lambda v: 9,
    "phase": lambda v: "forward",
    "step": lambda v: v + 1,
    "microbatch": lambda v: v + 1,
}


@settings(max_examples=30, deadline=None)
@given(runs, st.data())
@pytest.mark.parametrize("name", [n for n in FIELDS if n != "group"])
def test_every_planted_difference_is_found(name: str, entries: list[Entry], data: st.DataObject) -> None:
    places = [i for i, e in enumerate(entries) if e.group and getattr(e, name) is not None]
    if not places:
        return
    at = data.draw(st.sampled_from(places))
    wrong = list(entries)
    wrong[at] = replace(entries[at], **{name: CHANGES[name](getattr(entries[at], name))})
    result = compare(predicted_of(entries), merged([recorded_of(entries, 0), recorded_of(wrong, 1)]))
    assert not result.equal
    assert {d.rank for d in result.differences} == {1}
    assert result.first is not None
    assert result.first.stream == entries[at].group


@settings(max_examples=40, deadline=None)
@given(runs, st.data())
def test_another_group_is_found(entries: list[Entry], data: st.DataObject) -> None:
    places = [i for i, e in enumerate(entries) if e.group]
    if not places:
        return
    at = data.draw(st.sampled_from(places))
    wrong = list(entries)
    wrong[at] = replace(entries[at], group="dp")
    result = compare(predicted_of(entries), merged([recorded_of(entries, 0), recorded_of(wrong, 1)]))
    kinds = {(d.what, d.stream) for d in result.differences}
    assert ("extra", "dp") in kinds
    assert not result.equal


@settings(max_examples=30, deadline=None)
@given(runs, st.data(), st.sampled_from(("drop", "double", "swap")))
def test_lost_doubled_and_reordered_entries_are_found(entries: list[Entry], data: st.DataObject, how: str) -> None:
    at = data.draw(st.integers(0, len(entries) - 1))
    wrong = list(entries)
    if how == "drop":
        del wrong[at]
    elif how == "double":
        wrong.insert(at, entries[at])
    else:
        pairs = [i for i in range(len(entries) - 1) if _swaps(entries[i], entries[i + 1])]
        if not pairs:
            return
        i = data.draw(st.sampled_from(pairs))
        wrong[i], wrong[i + 1] = wrong[i + 1], wrong[i]
    assert not compare(predicted_of(entries), merged([recorded_of(entries, 0), recorded_of(wrong, 1)])).equal


def _swaps(a: Entry, b: Entry) -> bool:
    """Whether the order of two neighbours can be seen: same group, and not the same by what is always known."""
    return a.group is not None and a.group == b.group and (a.op, a.shapes) != (b.op, b.shapes)


STEPS = [
    Entry("stage", "all_reduce", 0, 0, layer, "decode", group="tp", name=name, shapes=((1, 8),), dtype="f32")
    for layer in range(4)
    for name in ("mixer output", "mlp output")
]


def test_the_first_difference_is_named() -> None:
    wrong = [replace(e) for e in STEPS]
    wrong[5].shapes, wrong[5].call_site = ((1, 4),), "decoder.py:7"
    wrong[6].dtype = "bf16"
    result = compare(predicted_of(STEPS), merged([recorded_of(STEPS, 0), recorded_of(wrong, 1)]))
    assert result.total == 2
    assert str(result.first) == (
        "rank 1, layer 2, decode step 0, tp entry 5, all_reduce (mlp output): shapes: predicted 1x8, recorded 1x4, "
        "at decoder.py:7"
    )


@pytest.mark.parametrize(("drop", "layer"), [(0, 0), (4, 2), (7, 3)])
def test_a_lost_collective_is_one_difference_at_its_layer(drop: int, layer: int) -> None:
    """Not a cascade: what comes behind it is compared with what was predicted behind it."""
    short = [e for i, e in enumerate(STEPS) if i != drop]
    result = compare(predicted_of(STEPS), merged([recorded_of(STEPS, 0), recorded_of(short, 1)]))
    assert result.total == 1
    assert result.first is not None
    assert (result.first.what, result.first.rank, result.first.layer) == ("missing", 1, layer)
    assert result.first.name == STEPS[drop].name


def test_an_extra_collective_says_where_it_was_issued() -> None:
    long = [*STEPS[:4], Entry("stage", "barrier", group="tp", call_site="train.py:12"), *STEPS[4:]]
    result = compare(predicted_of(STEPS), merged([recorded_of(STEPS, 0), recorded_of(long, 1)]))
    assert result.total == 1
    assert (
        str(result.first) == "rank 1, tp entry 4, barrier: extra: predicted nothing, recorded barrier, at train.py:12"
    )


def test_unknown_values_are_said_and_not_taken_for_equal() -> None:
    gather = Entry("stage", "gather", group="tp", shapes=((1, 4),), dtype="f32")
    result = compare(predicted_of([gather]), both([replace(gather, peer=0)]))
    assert result.equal
    assert "peer of 2" in result.scope
    send = replace(gather, op="send", peer=None)
    assert compare(predicted_of([send]), both([replace(send, peer=1)])).total == 2


def test_products_are_counted_by_layer_phase_shape_and_dtype() -> None:
    one = Entry("stage", "matmul", layer=1, phase="decode", stream="compute", shapes=((1, 8), (8, 4)), dtype="f32")
    for wrong in (
        replace(one, layer=2),
        replace(one, phase="prefill"),
        replace(one, shapes=((1, 8), (8, 5))),
        replace(one, dtype="bf16"),
        replace(one, count=2),
    ):
        result = compare(predicted_of([one]), merged([recorded_of([one], 0), recorded_of([wrong], 1)]))
        assert not result.equal
        assert result.first is not None
        assert result.first.rank == 1
        assert compare(predicted_of([one]), merged([recorded_of([wrong], 0)]), products=False, every_rank=False).equal


def test_ranks_that_are_missing_or_not_predicted_are_differences() -> None:
    alone = compare(predicted_of(STEPS), recorded_of(STEPS, 0))
    assert [str(d) for d in alone.differences] == ["rank 1, rank: missing: predicted stage, recorded no ledger"]
    assert compare(predicted_of(STEPS), recorded_of(STEPS, 0), every_rank=False).equal
    other = compare(predicted_of(STEPS), merged([both(STEPS), recorded_of(STEPS, 7)]))
    assert [(d.rank, d.what) for d in other.differences] == [(7, "extra")]


def test_the_class_of_a_rank_may_be_given() -> None:
    predicted = Ledger(
        [*STEPS, replace(STEPS[0], rank_class="other")], ranks=[Rank(0, {}, "stage"), Rank(1, {}, "other")]
    )
    recorded = merged([recorded_of(STEPS, 0), recorded_of(STEPS[:1], 1)])
    assert compare(predicted, recorded).equal
    assert not compare(predicted, recorded, classes={0: "other", 1: "stage"}).equal


def test_ledgers_of_one_rank_do_not_merge_with_themselves() -> None:
    with pytest.raises(InputError, match="rank 0 is in two"):
        merged([recorded_of(STEPS, 0), recorded_of(STEPS, 0)])


def test_holdings_are_summed_by_term() -> None:
    predicted = Ledger(
        holdings=[Holding("s", "weights", "mlp", 5, "exact"), Holding("s", "weights", "head", 3, "exact")],
        ranks=[Rank(0, {}, "s", 2)],
    )
    recorded = Ledger(
        holdings=[Holding("rank0", "weights", None, 8, "exact"), Holding("rank1", "weights", None, 9, "exact")],
        ranks=[Rank(0, {}, "rank0"), Rank(1, {}, "rank1")],
    )
    result = compare_holdings(predicted, recorded, ("weights",))
    assert [str(d) for d in result.differences] == ["rank 1, weights: bytes held: predicted 8, recorded 9"]
    assert compare_holdings(predicted, recorded, ()).equal


def test_a_hostile_count_is_refused() -> None:
    bad = [replace(STEPS[0], count=1 << 60)]
    with pytest.raises(InputError, match="at most"):
        compare(predicted_of(bad), recorded_of(STEPS[:1], 0))
    assert compare(predicted_of([replace(STEPS[0], count=-5)]), both([])).equal


def test_long_lists_that_differ_everywhere_stay_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [replace(STEPS[0], layer=i) for i in range(3000)]
    other = [replace(e, dtype="bf16") for e in many]
    result = compare(predicted_of(many), merged([recorded_of(many, 0), recorded_of(other, 1)]))
    assert result.total == 3000
    assert len(result.differences) == module.MAX_KEPT

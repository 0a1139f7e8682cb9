"""The view by layer folds equal layers and loses nothing; totals are the sums of the entries."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.ledger.schema import Entry, Ledger, Rank
from meshwright.ledger.views import by_layer, layer_label, rank_classes, shape_text, totals


def entry(layer: int | None, op: str = "matmul", **more: object) -> Entry:
    e = Entry("a", op, layer=layer, phase="decode", flops=10, payload_bytes=4, wire_bytes=0)
    for key, value in more.items():
        setattr(e, key, value)
    return e


def test_labels() -> None:
    assert layer_label([0]) == "layer 0"
    assert layer_label([3, 4, 5]) == "layers 3-5 (3x)"
    assert layer_label([0, 2, 3]) == "layers 0, 2-3 (3x)"
    assert (
        layer_label([*range(5), *range(6, 11), *range(12, 17), *range(18, 23)]) == "layers 0-4, 6-10, 12-16, ... (20x)"
    )
    assert shape_text(((4, 8), (), (2,))) == "4x8 . 1 . 2"
    assert shape_text(None) == ""


def test_equal_layers_are_one_row_and_ends_stay_apart() -> None:
    rows = by_layer(
        Ledger(
            [
                entry(None, "embedding"),
                *(entry(i, flops=10 if i else 7) for i in range(4)),
                *(entry(i, "all_reduce", group="tp") for i in (1, 2, 3)),
                entry(None, "send", group="pp"),
            ]
        )
    )
    assert [(r.layers, r.op, r.group, r.count) for r in rows] == [
        ("begin", "embedding", None, 1),
        ("layer 0", "matmul", None, 1),
        ("layers 1-3 (3x)", "matmul", None, 3),
        ("layers 1-3 (3x)", "all_reduce", "tp", 3),
        ("end", "send", "pp", 1),
    ]


def test_classes_and_phases_are_chosen() -> None:
    ledger = Ledger(
        [entry(0), entry(0, phase="prefill"), entry(0, rank_class="b", count=3)],
        ranks=[Rank(4, {}, "b"), Rank(0, {}, "a")],
    )
    assert rank_classes(ledger) == ["a", "b"]
    assert [r.phase for r in by_layer(ledger)] == ["prefill", "decode"]
    assert [r.count for r in by_layer(ledger, "b")] == [3]
    assert by_layer(ledger, phase="forward") == []
    assert by_layer(Ledger()) == []


def test_microbatches_one_by_one_fold_like_counts() -> None:
    ones = Ledger([entry(0, microbatch=i) for i in range(5)])
    many = Ledger([entry(0, count=5)])
    assert by_layer(ones) == by_layer(many)


rows = st.builds(
    entry,
    st.one_of(st.none(), st.integers(0, 5)),
    st.sampled_from(["matmul", "all_reduce"]),
    phase=st.sampled_from(["prefill", "decode", None]),
    group=st.sampled_from([None, "tp"]),
    flops=st.one_of(st.none(), st.integers(0, 3)),
    count=st.integers(1, 3),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(rows, max_size=30))
def test_nothing_is_lost(entries: list[Entry]) -> None:
    ledger = Ledger(entries)
    flops = sum((e.flops or 0) * e.count for e in entries)
    assert sum((r.flops or 0) * r.count for r in by_layer(ledger)) == flops
    assert sum(t.flops for t in totals(ledger)) == flops
    assert (
        sum(r.count for r in by_layer(ledger)) == sum(t.count for t in totals(ledger)) == sum(e.count for e in entries)
    )

"""Every sample once an epoch, in an order that no layout changes, over any change of the number of replicas."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.moves.batches import Order, permuted, rows


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(0, 1 << 32), st.integers(0, 1 << 20))
def test_an_epoch_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    assert sorted(permuted(n, count, seed, epoch) for n in range(count)) == list(range(count))


def test_epochs_and_seeds_differ_and_neighbours_part() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [permuted(n, 1000, seed, epoch) for n in range(1000)]

    first = order(0, 0)
    assert first == order(0, 0)
    for other in (order(1, 0), order(0, 1)):
        assert sum(a == b for a, b in zip(first, other, strict=True)) < 20
    assert sum(abs(a - b) == 1 for a, b in pairwise(first)) < 20


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_sample_twice_or_never_over_any_change_of_replicas(data: st.DataObject) -> None:
    """Steps of changing dp and global batch: what all replicas read, joined, is the order from its beginning."""
    order = Order(data.draw(st.integers(5, 40)), seed=3)
    position, read = 0, []
    for _ in range(data.draw(st.integers(1, 8))):
        dp = data.draw(st.sampled_from([1, 2, 3, 4]))
        batch = dp * data.draw(st.integers(1, 4))
        parts = [rows(position, batch, dp, index) for index in range(dp)]
        assert len({len(part) for part in parts}) == 1
        read += [order.sample(n) for part in parts for n in part]
        position += batch
    assert read == list(order.samples(0, position))
    epochs = [read[n : n + order.count] for n in range(0, len(read), order.count)]
    assert all(len(set(epoch)) == len(epoch) for epoch in epochs)


def test_a_batch_that_cannot_be_dealt_is_refused() -> None:
    with pytest.raises(InputError, match="global batch 10 is not divisible by dp 4"):
        rows(0, 10, 4, 0)


def test_without_shuffling_samples_come_as_they_lie() -> None:
    assert list(Order(3, shuffle=False).samples(0, 7)) == [0, 1, 2, 0, 1, 2, 0]

"""Continuous batching without tensors: a model that computes its next token from what the blocks it is given hold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.runtime.job import Sampling
from meshwright.runtime.serve.blocks import ROOT, BlockPool, digest
from meshwright.runtime.serve.scheduler import Limits, Line, Pass, QueueFull, Scheduler

VOCAB = 11


def after(tokens: Sequence[int]) -> int:
    """The next token of a text: depends on every token before it."""
    value = 1
    for token in tokens:
        value = (value * 31 + token + 7) % 1_000_003
    return value % VOCAB


def alone(prompt: Sequence[int], most: int, eos: frozenset[int] = frozenset()) -> list[int]:
    """What one request says when nobody else is served."""
    text, new = list(prompt), list[int]()
    while len(new) < most:
        new.append(after(text))
        text.append(new[-1])
        if new[-1] in eos:
            break
    return new


@dataclass
class Memory:
    """Slots of a rank: what was written where. A pass reads its text from there and from nowhere else."""

    block_size: int
    slots: dict[int, int] = field(default_factory=dict)

    def run(self, made: Pass) -> list[int]:
        chosen = []
        for line, start, length, wanted in made.rows:
            for i, token in enumerate(line.slice(start, start + length), start):
                self.slots[self.at(line, i)] = token
            text = [self.slots[self.at(line, i)] for i in range(start + length)]
            if wanted:
                chosen.append(after(text))
        return chosen

    def at(self, line: Line, position: int) -> int:
        return line.table[position // self.block_size] * self.block_size + position % self.block_size


def line(number: int, prompt: Sequence[int], most: int, eos: frozenset[int] = frozenset()) -> Line:
    return Line(number, tuple(prompt), Sampling(), most, eos)


def serve(
    scheduler: Scheduler, lines: Sequence[Line], rng: random.Random | None = None, memory: Memory | None = None
) -> dict[int, list[int]]:
    """Run all to their end, with passes under way as the limits allow; arrivals in between where there is chance."""
    memory, coming = memory or Memory(scheduler.pool.block_size), list(lines)
    under_way: list[tuple[int, list[int]]] = []
    steps = 0
    while coming or scheduler.waiting or scheduler.running:
        steps += 1
        assert steps < 20_000, "no progress"
        while coming and (rng is None or rng.random() < 0.5):
            scheduler.add(coming.pop(0))
        made = scheduler.next_pass()
        if made is not None:
            assert made.tokens <= scheduler.limits.tokens
            lengths = [row.length for row in made.rows]
            assert lengths == sorted(lengths, key=lambda n: n > 1), "rows of one token come first"
            under_way.append((made.number, memory.run(made)))
        if under_way and (made is None or rng is None or rng.random() < 0.5):
            list(scheduler.done(*under_way.pop(0)))
    return {o.number: o.new for o in lines}


TEXTS = st.lists(st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=17), st.integers(1, 9)), max_size=9)


@given(TEXTS, st.integers(1, 5), st.integers(1, 12), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.randoms())
@settings(max_examples=200, deadline=None)
def test_every_text_is_what_it_is_alone(
    texts: list[tuple[list[int], int]],
    block_size: int,
    tokens: int,
    sequences: int,
    depth: int,
    prefix: bool,
    chance: random.Random,
) -> None:
    needed = max((-(-(len(p) + n) // block_size) for p, n in texts), default=1)
    pool = BlockPool(needed + chance.randrange(4), block_size, prefix=prefix)
    scheduler = Scheduler(pool, Limits(sequences, tokens, 64, 100, depth))
    got = serve(scheduler, [line(i, p, n) for i, (p, n) in enumerate(texts)], chance)
    assert got == {i: alone(p, n) for i, (p, n) in enumerate(texts)}
    assert pool.owned == 0, "a block leaked"


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
def test_lengths_around_a_block(length: int) -> None:
    prompt = [i % VOCAB for i in range(length)]
    scheduler = Scheduler(BlockPool(16, 4), Limits(tokens=3))
    assert serve(scheduler, [line(0, prompt, 6), line(1, prompt, 6)]) == {0: alone(prompt, 6), 1: alone(prompt, 6)}


def test_an_equal_prefix_is_computed_once_and_its_last_token_again() -> None:
    scheduler, memory = Scheduler(BlockPool(16, 4), Limits()), Memory(4)
    prompt = list(range(8))
    serve(scheduler, [line(0, prompt, 2)], memory=memory)
    serve(scheduler, [line(1, prompt, 2), line(2, [*prompt, 9], 2)], memory=memory)
    assert scheduler.counts.prefix_tokens == 4 + 8


def test_another_beginning_shares_nothing() -> None:
    pool = BlockPool(8, 2)
    (first,) = pool.take(1) or []
    pool.name(first, digest(ROOT, [1, 2]), [3, 4])
    pool.release([first])
    assert pool.match([3, 4, 5]) == []


def test_where_blocks_run_out_the_last_one_admitted_is_computed_again() -> None:
    scheduler = Scheduler(BlockPool(6, 2, prefix=False), Limits(tokens=8))
    texts = {0: [1, 2, 3], 1: [4, 5, 6]}
    got = serve(scheduler, [line(i, p, 6) for i, p in texts.items()])
    assert got == {i: alone(p, 6) for i, p in texts.items()}
    assert scheduler.counts.preemptions > 0


def test_an_end_token_ends_it() -> None:
    prompt, whole = [1, 2], alone([1, 2], 9)
    eos = frozenset({whole[3]})
    assert serve(Scheduler(BlockPool(8, 4), Limits()), [line(0, prompt, 9, eos)])[0] == alone(prompt, 9, eos)


def test_a_client_that_leaves_gives_its_blocks_back_once_no_pass_reads_them() -> None:
    pool = BlockPool(8, 4)
    scheduler = Scheduler(pool, Limits())
    leaving = line(0, [1, 2, 3], 5)
    scheduler.add(leaving)
    made = scheduler.next_pass()
    assert made is not None
    scheduler.drop(leaving)
    assert pool.owned == 1, "the pass under way still reads it"
    assert list(scheduler.done(made.number, [3])) == [(leaving, None)]
    assert (pool.owned, leaving.ended) == (0, "abort")


@given(TEXTS, st.integers(1, 3), st.randoms())
@settings(max_examples=60, deadline=None)
def test_after_the_ranks_died_nothing_is_lost(
    texts: list[tuple[list[int], int]], depth: int, chance: random.Random
) -> None:
    scheduler = Scheduler(BlockPool(30, 3), Limits(tokens=7, length=64, depth=depth))
    lines = [line(i, p, n) for i, (p, n) in enumerate(texts)]
    for o in lines:
        scheduler.add(o)
    memory = Memory(3)
    for _ in range(chance.randrange(6)):
        made = scheduler.next_pass()
        if made is not None and chance.random() < 0.8:
            list(scheduler.done(made.number, memory.run(made)))
    scheduler.restart()
    serve(scheduler, [])
    assert {o.number: o.new for o in lines} == {i: alone(p, n) for i, (p, n) in enumerate(texts)}
    assert scheduler.pool.owned == 0


def test_what_can_never_run_is_refused() -> None:
    scheduler = Scheduler(BlockPool(2, 4), Limits(queue=1))
    with pytest.raises(InputError, match="7 prompt tokens and 2 new ones exceed the 8 tokens"):
        scheduler.add(line(0, range(7), 2))
    with pytest.raises(InputError, match="at least one"):
        scheduler.add(line(0, [], 2))
    scheduler.add(line(0, [1], 2))
    with pytest.raises(QueueFull, match="1 requests wait"):
        scheduler.add(line(1, [1], 2))


def test_a_scheduler_that_gave_a_block_to_two_sequences_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "take", lambda self, count: [0] * count)
    scheduler = Scheduler(BlockPool(16, 4, prefix=False), Limits())
    got = serve(scheduler, [line(0, [1, 2], 4), line(1, [3, 4], 4)])
    assert got != {0: alone([1, 2], 4), 1: alone([3, 4], 4)}

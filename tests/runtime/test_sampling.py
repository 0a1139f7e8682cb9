"""Sampling: a seed gives the same text under every layout and in every company; bounds on what is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshwright.errors import InputError
from meshwright.runtime.job import Sampling
from meshwright.runtime.sampling import Sampler
from tests.runtime import tiny

Folder = Callable[[str], Path]
LOGITS = torch.tensor([[0.0, 1.0, 2.0, 3.0]])


def test_a_seed_gives_the_same_text_under_every_layout(checkpoint: Folder) -> None:
    folder, sampling = checkpoint("llama"), Sampling(temperature=1.0, top_p=0.9, seed=5)
    alone = tiny.alone(tiny.job(folder, "tp=1", sampling=sampling)).tokens
    assert tiny.on_ranks(tiny.job(folder, "tp=2,pp=2", sampling=sampling))[0] == alone
    assert list(alone.values()) != tiny.oracle(folder)[0]
    other = tiny.alone(tiny.job(folder, "tp=1", sampling=Sampling(temperature=1.0, top_p=0.9, seed=6))).tokens
    assert other != alone


def test_neighbours_do_not_change_a_text(checkpoint: Folder) -> None:
    folder, sampling = checkpoint("llama"), Sampling(temperature=1.0, seed=5)
    together = tiny.alone(tiny.job(folder, "tp=1", sampling=sampling)).tokens
    assert tiny.alone(tiny.job(folder, "tp=1", tiny.PROMPTS[:2], sampling=sampling)).tokens[1] == together[1]


def test_one_likeliest_token_is_greedy() -> None:
    for sampling in (Sampling(), Sampling(temperature=2.0, top_k=1), Sampling(temperature=1.0, top_p=1e-6)):
        assert [Sampler(sampling).choose(LOGITS, [i])[0] for i in range(20)] == [3] * 20


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(temperature=1.0), {0, 1, 2, 3}),
        (Sampling(temperature=1.0, top_k=2), {2, 3}),
        (Sampling(temperature=1.0, top_k=9), {0, 1, 2, 3}),
        (Sampling(temperature=1.0, top_p=0.7), {2, 3}),
    ],
)
def test_only_allowed_tokens_are_drawn_as_often_as_their_chance(sampling: Sampling, allowed: set[int]) -> None:
    sampler = Sampler(sampling)
    drawn = Counter(sampler.choose(LOGITS, [0])[0] for _ in range(4000))
    assert set(drawn) == allowed
    chances = torch.where(torch.tensor([t in allowed for t in range(4)]), LOGITS[0], -torch.inf).softmax(0)
    for token in allowed:
        assert abs(drawn[token] / 4000 - float(chances[token])) < 0.04


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"seed": -1}])
def test_bad_numbers_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(InputError, match="needed: temperature 0 to 100"):
        Sampling(**bad)  # type: ignore[arg-type]

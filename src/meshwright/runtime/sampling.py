"""From logits to token ids: greedy, or sampled with a seed so that a text does not depend on its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.runtime.job import Sampling


class Choice(NamedTuple):
    """How the next token of one text is chosen.

    Attributes:
        sampling: temperature and the like. place: tokens that the text has already.
        logprobs: likeliest tokens to tell beside the chosen one; None: not even its own probability.
        bias: added to logits, by token id.
    """

    sampling: Sampling
    place: int
    logprobs: int | None = None
    bias: tuple[tuple[int, float], ...] = ()


class Chosen(NamedTuple):
    """A token, the logarithm of its probability, and the likeliest ones with theirs, where these were asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def choose_rows(logits_SV: Tensor, choices: Sequence[Choice]) -> list[Chosen]:
    """One token for every row.

    A draw depends on the seed of its text and on how many tokens that has, and on nothing that was drawn before: a text
    that is computed again from its middle goes on as it would have. Probabilities told are those of the model, before
    temperature and cuts, after the bias.
    """
    if all(c.sampling.temperature == 0 and c.logprobs is None and not c.bias for c in choices):
        return [Chosen(int(token)) for token in logits_SV.argmax(dim=-1).tolist()]
    return [_choose(row, choice) for row, choice in zip(logits_SV.float().cpu(), choices, strict=True)]


def _choose(row_V: Tensor, choice: Choice) -> Chosen:
    if choice.bias:
        row_V = row_V.clone()
        for token, plus in choice.bias:
            row_V[token] += plus
    if choice.sampling.temperature == 0:
        token = int(row_V.argmax())
    else:
        generator = torch.Generator().manual_seed((choice.sampling.seed * 1_000_003 + choice.place) % (1 << 63))
        token = draw(row_V / choice.sampling.temperature, choice.sampling, generator)
    if choice.logprobs is None:
        return Chosen(token)
    known_V = row_V.log_softmax(-1)
    best = known_V.topk(min(choice.logprobs, known_V.numel()))
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Chosen(token, float(known_V[token]), top)


def draw(scaled_V: Tensor, s: Sampling, generator: torch.Generator) -> int:
    """A token by its probability, within the bounds of ``top_k`` and ``top_p``."""
    if s.top_k:
        least = scaled_V.topk(min(s.top_k, scaled_V.numel())).values[-1]
        scaled_V = scaled_V.masked_fill(scaled_V < least, -torch.inf)
    chances, order = scaled_V.softmax(-1).sort(descending=True)
    if s.top_p < 1:
        chances = torch.where(chances.cumsum(-1) - chances < s.top_p, chances, 0)
    return int(order[torch.multinomial(chances, 1, generator=generator)])


class Sampler:
    """Chooses tokens of numbered prompts."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._streams: dict[int, torch.Generator] = {}

    def choose(self, logits_SV: Tensor, prompts: list[int]) -> list[int]:
        """One token for every row; ``prompts``: the number of the prompt of each row."""
        s = self.sampling
        if s.temperature == 0:
            return [int(token) for token in logits_SV.argmax(dim=-1).tolist()]
        scaled = logits_SV.float().cpu() / s.temperature
        return [draw(row, s, self._stream(prompt)) for row, prompt in zip(scaled, prompts, strict=True)]

    def _stream(self, prompt: int) -> torch.Generator:
        if prompt not in self._streams:
            self._streams[prompt] = torch.Generator().manual_seed(self.sampling.seed * 1_000_003 + prompt)
        return self._streams[prompt]

"""From logits to token ids: greedy, or sampled with a seed so that a text does not depend on its neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.runtime.job import Sampling


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
        return [self._draw(row, prompt) for row, prompt in zip(scaled, prompts, strict=True)]

    def _draw(self, row_V: Tensor, prompt: int) -> int:
        s = self.sampling
        if s.top_k:
            least = row_V.topk(min(s.top_k, row_V.numel())).values[-1]
            row_V = row_V.masked_fill(row_V < least, -torch.inf)
        chances, order = row_V.softmax(-1).sort(descending=True)
        if s.top_p < 1:
            chances = torch.where(chances.cumsum(-1) - chances < s.top_p, chances, 0)
        return int(order[torch.multinomial(chances, 1, generator=self._stream(prompt))])

    def _stream(self, prompt: int) -> torch.Generator:
        if prompt not in self._streams:
            self._streams[prompt] = torch.Generator().manual_seed(self.sampling.seed * 1_000_003 + prompt)
        return self._streams[prompt]

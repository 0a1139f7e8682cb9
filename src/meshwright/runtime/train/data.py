"""Batches of a rank: samples of the stream by number, so that any layout reads the same ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.moves.batches import Order, rows
from meshwright.runtime.train.corpus import Corpus


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one replica for one optimizer step.

    Attributes:
        ids: ``(B, S)``: token ids, int64.
        labels: ``(B, S)``: the token behind each, the one behind the last included; -100 counts for nothing.
    """

    ids: Tensor
    labels: Tensor

    def to(self, device: str | torch.device) -> Batch:
        """The same on a device."""
        return Batch(self.ids.to(device), self.labels.to(device))


class Samples:
    """The samples of a corpus: number ``n`` is tokens ``n * seq`` to ``(n + 1) * seq``, and the token behind them.

    Args:
        corpus: stream of ids. seq: tokens of a sample. seed: of the order.

    Raises:
        InputError: the corpus is shorter than one sample.
    """

    def __init__(self, corpus: Corpus, seq: int, seed: int) -> None:
        count = corpus.samples(seq)
        if not count:
            raise InputError(f"{corpus.tokens} tokens of data; one sequence of {seq} needs {seq + 1}: lower --seq")
        self.seq, self.order = seq, Order(count, seed)
        self.stream = corpus.open()

    def take(self, numbers: Iterable[int]) -> Batch:
        """The samples of these numbers, as rows."""
        rows_BS = [self.stream[n * self.seq : (n + 1) * self.seq + 1].astype("int64") for n in numbers]
        tokens = torch.stack([torch.from_numpy(row) for row in rows_BS])
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def batch(self, position: int, global_batch: int, dp: int, index: int) -> Batch:
        """Rows of replica ``index`` of ``dp`` for the step that begins at sample ``position``."""
        return self.take(map(self.order.sample, rows(position, global_batch, dp, index)))

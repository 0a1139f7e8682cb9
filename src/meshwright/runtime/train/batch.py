"""One micro-batch as a rank of the model sees it: its rows of every sequence, and where they stand.

Sequences lie one behind the other. Under context parallelism a rank holds two chunks of each
(``moves.context.dealt``), filled up to equal length. Labels are shifted before anything is cut, so that the last token
of a chunk knows its successor.

Legend: B sequences of a micro-batch, S tokens of one, T rows of this rank, P places on cp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.moves.context import Piece, dealt
from meshwright.runtime.mesh import Mesh

#: Label of a token that does not count.
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Dealt:
    """How a sequence lies over cp.

    Attributes:
        at_PR: for every place the positions of its R rows, in order. whole_S: rows of all places, place by place, in
            order of positions.
        documents_BS: number of the document of every position, rows behind the last token included; None: one a
            sequence.
    """

    at_PR: tuple[Tensor, ...]
    whole_S: Tensor
    documents_BS: Tensor | None


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One micro-batch on one rank.

    Attributes:
        ids_T, labels_T, positions_T: of the rows of this rank; positions restart with every document.
        sequences: B. lengths: tokens of the documents, one behind the other, without cp (with it: of whole sequences
            filled up for cp).
        dealt: how sequences lie over cp; None: a rank has all of them.
        real: ``(T,)``, whether a row holds a token; None: all do.
        valid: labels of this rank's rows that count.
        aux_scale: what a balancing loss is multiplied with: 1 / micro-batches of the step.
        phase: what blocks ask of a pass.
    """

    ids_T: Tensor
    labels_T: Tensor
    positions_T: Tensor
    sequences: int
    lengths: tuple[int, ...]
    dealt: Dealt | None
    real: Tensor | None
    valid: int
    aux_scale: float = 1.0
    phase: str = "forward"

    @property
    def tokens(self) -> int:
        """T."""
        return self.ids_T.shape[0]


def shifted(ids_BS: Tensor, documents: Sequence[Sequence[int]] | None = None) -> Tensor:
    """Labels of whole sequences: every token's successor; the last token of a document has none."""
    labels = torch.full_like(ids_BS, IGNORED)
    labels[:, :-1] = ids_BS[:, 1:]
    for row, lengths in enumerate(documents or ()):
        labels[row, torch.tensor(lengths).cumsum(0) - 1] = IGNORED
    return labels


def train_batch(
    mesh: Mesh,
    ids_BS: Tensor,
    labels_BS: Tensor,
    *,
    documents: Sequence[Sequence[int]] | None = None,
    aux_scale: float = 1.0,
) -> TrainBatch:
    """This rank's rows of a micro-batch of whole sequences.

    Args:
        ids_BS, labels_BS: ``(B, S)``; labels are shifted already, ``IGNORED`` does not count.
        documents: for every sequence the lengths of the documents packed in it, which do not see each other.
        aux_scale: see ``TrainBatch``.

    Raises:
        InputError: documents that do not fill their sequence.
    """
    (b, s), device = ids_BS.shape, mesh.device
    wrong = next((tuple(row) for row in documents or () if sum(row) != s or min(row) < 1), None)
    if wrong is not None or (documents is not None and len(documents) != b):
        raise InputError(f"documents of {wrong or len(documents or ())} do not fill {b} sequences of {s} tokens")
    lengths = tuple(n for row in documents for n in row) if documents is not None else (s,) * b
    positions_BS = torch.cat([torch.arange(n) for n in lengths]).view(b, s)
    cp = mesh.group("cp")
    if cp.size == 1:
        ids_T, labels_T, positions_T = (x.reshape(-1).to(device) for x in (ids_BS, labels_BS, positions_BS))
        return TrainBatch(ids_T, labels_T, positions_T, b, lengths, None, None, _counted(labels_BS), aux_scale)
    at = [torch.tensor(dealt(Piece(0, s), cp.size, place)) for place in range(cp.size)]
    whole = torch.cat(at).argsort()
    padded = whole.shape[0]
    numbers = None
    if documents is not None:
        rows = [torch.repeat_interleave(torch.tensor([*row, padded - s])) for row in documents]
        numbers = torch.stack(rows).to(device)
        lengths = tuple(n for row in documents for n in (*row, padded - s) if n)
    else:
        lengths = (padded,) * b
    mine = at[cp.index]
    inside = mine < s
    ids_T, labels_T, positions_T = (
        rows_at(x, mine, fill).to(device) for x, fill in ((ids_BS, 0), (labels_BS, IGNORED), (positions_BS, 0))
    )
    real = None if bool(inside.all()) else inside.repeat(b).to(device)
    table = Dealt(tuple(x.to(device) for x in at), whole.to(device), numbers)
    return TrainBatch(ids_T, labels_T, positions_T, b, lengths, table, real, _counted(labels_T), aux_scale)


def rows_at(x_BS: Tensor, at_R: Tensor, fill: int) -> Tensor:
    """What stands at some positions of every sequence, one behind the other; ``fill`` behind the end."""
    s = x_BS.shape[1]
    return torch.where(at_R < s, x_BS.cpu()[:, at_R.clamp(max=s - 1)], fill).reshape(-1)


def _counted(labels: Tensor) -> int:
    return int((labels != IGNORED).sum())

"""The cache of one rank under context parallelism: of every sequence it keeps the rows that ``moves.context`` deals it.

All ranks of cp take equally many rows of a prompt, so that blocks of keys and values have one shape everywhere; rows
behind the last token are stored and seen by nobody. A decoded token is cached by one rank; all compute it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.moves.context import NOWHERE, Piece, dealt, decoded_at, holder, keys
from meshwright.runtime.mesh import Group
from meshwright.runtime.serve.cache import Batch, BlockTables, CacheShape, PagedCache


@dataclass(frozen=True, slots=True)
class DealtBatch(Batch):
    """A pass whose tokens, or whose cache, are dealt over cp.

    Attributes:
        pieces: of every sequence, those that the cache holds after the pass.
        keys: prefill: by place and sequence the positions of the keys that a place holds.
        queries: prefill: by place and sequence the positions of its rows in this pass.
        keys_BS: decode: positions of the keys held here, padded with ``NOWHERE``.
    """

    pieces: tuple[tuple[Piece, ...], ...] = ()
    keys: tuple[tuple[Tensor, ...], ...] = ()
    queries: tuple[tuple[Tensor, ...], ...] = ()
    keys_BS: Tensor | None = None


class DealtTables(BlockTables):
    """Block tables, and what the slots of every sequence hold."""

    def __init__(self, blocks: int, block_size: int) -> None:
        super().__init__(blocks, block_size)
        self.pieces: dict[int, list[Piece]] = {}
        self.keys: dict[int, list[int]] = {}
        self.total: dict[int, int] = {}

    def release(self, sequence: int) -> None:
        """Give all blocks of a finished sequence back."""
        super().release(sequence)
        for held in (self.pieces, self.keys, self.total):
            held.pop(sequence, None)


class DealtCache(PagedCache):
    """Keys and values of one place of ``cp``; arguments as of ``PagedCache``."""

    tables: DealtTables

    def __init__(
        self,
        shapes: Mapping[int, CacheShape],
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        cp: Group,
    ) -> None:
        super().__init__(shapes, blocks, block_size, dtype, device)
        self.cp = cp
        self.tables = DealtTables(blocks, block_size)

    def filled(self, sequence: int) -> slice | list[int]:
        """Rows of a sequence's cache that hold a token."""
        return [row for row, at in enumerate(self.tables.keys[sequence]) if at != NOWHERE]

    def batch(self, parts: Sequence[tuple[int, Sequence[int]]], wanted: Sequence[bool], phase: str) -> DealtBatch:
        """Lay out this rank's rows of one pass and take the blocks they need; see ``PagedCache.batch``."""
        return self._decode(parts) if phase == "decode" else self._prefill(parts, wanted)

    def _prefill(self, parts: Sequence[tuple[int, Sequence[int]]], wanted: Sequence[bool]) -> DealtBatch:
        """The rows of this place of a piece of every sequence."""
        t, cp, place = self.tables, self.cp.size, self.cp.index
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        sampled: list[int] = []
        here: list[bool] = []
        lengths: list[int] = []
        real: list[bool] = []
        for (sequence, tokens), want in zip(parts, wanted, strict=True):
            piece = Piece(t.total.get(sequence, 0), len(tokens))
            end = piece.start + piece.length
            mine = dealt(piece, cp, place)
            if want:
                at, row = holder(piece, cp, end - 1)
                here.append(at == place)
                sampled.append(len(ids) + row if at == place else 0)
            slots += t.extend(sequence, len(mine))
            ids += [tokens[p - piece.start] if p < end else 0 for p in mine]
            positions += mine
            real += [p < end for p in mine]
            lengths.append(len(mine))
            t.pieces.setdefault(sequence, []).append(piece)
            t.keys.setdefault(sequence, []).extend(keys((piece,), cp, place))
            t.total[sequence] = end
        sequences = [sequence for sequence, _ in parts]
        pieces = tuple(tuple(t.pieces[s]) for s in sequences)
        return DealtBatch(
            self.tensor(ids),
            self.tensor(positions),
            self.tensor(slots),
            tuple(lengths),
            tuple(t.lengths[s] for s in sequences),
            self.table(sequences),
            self.tensor(sampled),
            "prefill",
            tuple(sequences),
            here=torch.tensor(here, dtype=torch.bool, device=self.device)[:, None],
            real=torch.tensor(real, dtype=torch.bool, device=self.device),
            pieces=pieces,
            keys=tuple(tuple(self.tensor(keys(p, cp, other)) for p in pieces) for other in range(cp)),
            queries=tuple(tuple(self.tensor(dealt(p[-1], cp, other)) for p in pieces) for other in range(cp)),
        )

    def _decode(self, parts: Sequence[tuple[int, Sequence[int]]]) -> DealtBatch:
        """One token of every sequence on every place; slots only for those that this place caches."""
        t = self.tables
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        for row, (sequence, _) in enumerate(parts):
            at = t.total[sequence]
            if decoded_at(at, self.cp.size) == self.cp.index:
                slots += t.extend(sequence, 1)
                rows.append(row)
                t.keys[sequence].append(at)
            positions.append(at)
            t.total[sequence] = at + 1
        sequences = [sequence for sequence, _ in parts]
        held = [t.keys[s] for s in sequences]
        wide = max(map(len, held))
        return DealtBatch(
            self.tensor([tokens[0] for _, tokens in parts]),
            self.tensor(positions),
            self.tensor(slots),
            (1,) * len(parts),
            tuple(map(len, held)),
            self.table(sequences),
            self.tensor(list(range(len(parts)))),
            "decode",
            tuple(sequences),
            rows=self.tensor(rows),
            keys_BS=self.tensor([row + [NOWHERE] * (wide - len(row)) for row in held]),
        )

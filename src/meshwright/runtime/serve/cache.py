"""Paged KV cache: fixed blocks of token slots, and for every sequence the table of the blocks it owns.

Each rank caches the layers of its stage and the KV heads of its place on tp; all ranks of a replica hand out the same
blocks in the same order, so tables need not travel. Legend: T tokens of a pass, B sequences of a pass, H heads, d head
width.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.runtime.memory import check_fits


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of one pass through the model, sequences one behind the other.

    Attributes:
        ids_T, positions_T: token ids and absolute positions.
        slots_T: where each token's key and value are written: block x block size + offset.
        lengths: tokens of each sequence in this pass.
        contexts: tokens of each sequence that the cache holds after the pass.
        table_BM: block table of each sequence, padded with block 0.
        sampled: rows of T whose logits are wanted.
        phase: ``prefill`` or ``decode``.
        sequences: their numbers.
        rows: rows of T whose keys and values this rank caches, None: all.
        real: ``(T,)``, whether a row holds a token; None: all do.
        here: ``(S, 1)``, whether this rank has the sampled row; None: it has all.
        kept: what layers work out from the pass alone and others can use again, by what it is of.
    """

    ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    table_BM: Tensor
    sampled: Tensor
    phase: str
    sequences: tuple[int, ...] = ()
    rows: Tensor | None = None
    here: Tensor | None = None
    real: Tensor | None = None
    kept: dict[Hashable, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def stored(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Of values for every row those that this rank caches."""
        return values if self.rows is None else tuple(x[self.rows] for x in values)

    def first(self, count: int) -> Batch:
        """The first sequences alone, each of one token."""
        return replace(
            self,
            positions_T=self.positions_T[:count],
            lengths=self.lengths[:count],
            contexts=self.contexts[:count],
            table_BM=self.table_BM[:count],
        )

    @property
    def tokens(self) -> int:
        """T."""
        return self.ids_T.shape[0]


class BlockTables:
    """Which blocks belong to which sequence, and how many tokens each has. Pure bookkeeping, no tensor."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = list(range(blocks - 1, -1, -1))
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def extend(self, sequence: int, tokens: int) -> list[int]:
        """Slots of ``tokens`` more tokens of a sequence, taking blocks as they fill.

        Raises:
            InputError: no free block is left; nothing was taken.
        """
        table, start = self.tables.setdefault(sequence, []), self.lengths.get(sequence, 0)
        missing = blocks_for(start + tokens, self.block_size) - len(table)
        if missing > len(self.free):
            raise InputError(
                f"KV cache: {missing} blocks of {self.block_size} tokens are needed, {len(self.free)} are free; "
                "give it more blocks or run fewer sequences"
            )
        table.extend(self.free.pop() for _ in range(missing))
        self.lengths[sequence] = start + tokens
        size = self.block_size
        return [table[p // size] * size + p % size for p in range(start, start + tokens)]

    def release(self, sequence: int) -> None:
        """Give all blocks of a finished sequence back."""
        self.free.extend(reversed(self.tables.pop(sequence, [])))
        self.lengths.pop(sequence, None)


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` tokens."""
    return -(-tokens // block_size)


class CacheShape(NamedTuple):
    """What one token takes in the cache of a layer: heads held, width of a key and of a value head."""

    heads: int
    key: int
    value: int


class Planned(NamedTuple):
    """Tokens of one sequence in a planned pass; ``start``: position of the first; ``wanted``: choose the next."""

    sequence: int
    start: int
    tokens: Sequence[int]
    table: Sequence[int]
    wanted: bool


class PagedCache:
    """Keys and values of one rank: for every layer of its stage ``(blocks, block size, H, d)`` each.

    Args:
        shapes: of every layer of the stage. blocks, block_size: slots of the pool.

    Raises:
        InputError: the machine has not so much memory.
    """

    def __init__(
        self,
        shapes: Mapping[int, CacheShape],
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def pool(heads: int, width: int) -> Tensor:
            return torch.zeros((blocks, block_size, heads, width), dtype=dtype, device=device)

        width = sum(shape.heads * (shape.key + shape.value) for shape in shapes.values())
        needed = blocks * block_size * width * dtype.itemsize
        check_fits("KV cache", needed, device, "ask for fewer or shorter prompts, or for fewer new tokens")
        self.block_size = block_size
        self.tables = BlockTables(blocks, block_size)
        self.device = device
        self.k = {i: pool(shape.heads, shape.key) for i, shape in shapes.items()}
        self.v = {i: pool(shape.heads, shape.value) for i, shape in shapes.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool on this rank."""
        return sum(t.numel() * t.element_size() for t in (*self.k.values(), *self.v.values()))

    def filled(self, sequence: int) -> slice | list[int]:
        """Rows of a sequence's cache that hold a token."""
        return slice(None)

    def write(self, layer: int, slots_T: Tensor, k_THd: Tensor, v_THd: Tensor) -> None:
        """Store the keys and values of a pass."""
        self.k[layer].flatten(0, 1).index_copy_(0, slots_T, k_THd)
        self.v[layer].flatten(0, 1).index_copy_(0, slots_T, v_THd)

    def read(self, layer: int, table: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first ``tokens`` tokens: ``(..., tokens, H, d)`` for a table ``(..., M)``."""
        used = table[..., : blocks_for(tokens, self.block_size)]
        shape, flat = (*used.shape[:-1], used.shape[-1] * self.block_size), used.reshape(-1)
        at = used.dim() - 1

        def of(pool: Tensor) -> Tensor:
            return pool.index_select(0, flat).view(*shape, *pool.shape[2:]).narrow(at, 0, tokens)

        return of(self.k[layer]), of(self.v[layer])

    def batch(self, parts: Sequence[tuple[int, Sequence[int]]], wanted: Sequence[bool], phase: str) -> Batch:
        """Lay out one pass and take the blocks it needs.

        Args:
            parts: ``(sequence, next token ids)``, one row a sequence.
            wanted: for every row whether the logits of its last token are.
            phase: ``prefill`` or ``decode``.
        """
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        ends: list[int] = []
        for sequence, tokens in parts:
            start = self.tables.lengths.get(sequence, 0)
            slots += self.tables.extend(sequence, len(tokens))
            ids += tokens
            positions += range(start, start + len(tokens))
            ends.append(len(ids) - 1)
        return Batch(
            self.tensor(ids),
            self.tensor(positions),
            self.tensor(slots),
            tuple(len(tokens) for _, tokens in parts),
            tuple(self.tables.lengths[sequence] for sequence, _ in parts),
            self.table([sequence for sequence, _ in parts]),
            self.tensor([end for end, want in zip(ends, wanted, strict=True) if want]),
            phase,
            tuple(sequence for sequence, _ in parts),
        )

    def planned(self, rows: Sequence[Planned]) -> Batch:
        """Lay out one pass whose blocks a scheduler has dealt; rows of one token first.

        The cache's own tables stay as they are: who plans keeps them.
        """
        size = self.block_size
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        ends: list[int] = []
        for row in rows:
            stop = row.start + len(row.tokens)
            ids += row.tokens
            positions += range(row.start, stop)
            slots += [row.table[p // size] * size + p % size for p in range(row.start, stop)]
            ends.append(len(ids) - 1)
        wide = max(len(row.table) for row in rows)
        return Batch(
            self.tensor(ids),
            self.tensor(positions),
            self.tensor(slots),
            tuple(len(row.tokens) for row in rows),
            tuple(row.start + len(row.tokens) for row in rows),
            self.tensor([[*row.table, *[0] * (wide - len(row.table))] for row in rows]),
            self.tensor([end for row, end in zip(rows, ends, strict=True) if row.wanted]),
            "decode" if all(len(row.tokens) == 1 for row in rows) else "prefill",
            tuple(row.sequence for row in rows),
        )

    def tensor(self, values: object) -> Tensor:
        """Integers on the device of the cache."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def table(self, sequences: Sequence[int]) -> Tensor:
        """Block tables of sequences, one a row, padded with block 0."""
        tables = [self.tables.tables[sequence] for sequence in sequences]
        wide = max(map(len, tables), default=0)
        return self.tensor([table + [0] * (wide - len(table)) for table in tables])

"""Blocks of a paged cache as the scheduler counts them: owned, shared by equal prefixes, or kept for the next request.

A full block is known by what it holds and by all that lies before it: the digest of the block before it and of its own
tokens. A sequence whose prompt begins alike takes such blocks instead of computing them. A block without an owner keeps
its digest until it is needed for something else, the one unused for longest first. No tensor and no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

#: Digest before the first block of a sequence.
ROOT = b""


def digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """Name of a full block: 16 bytes over the block before it and its tokens, so that equal names mean equal text."""
    return blake2b(before + b"".join(t.to_bytes(4, "little") for t in tokens), digest_size=16).digest()


class BlockPool:
    """All blocks of one replica.

    Args:
        blocks: how many. block_size: tokens of one. prefix: equal beginnings share blocks.
    """

    def __init__(self, blocks: int, block_size: int, *, prefix: bool = True) -> None:
        self.blocks, self.block_size, self.prefix = blocks, block_size, prefix
        self._free = list(range(blocks - 1, -1, -1))
        self._owners = [0] * blocks
        self._name: dict[int, bytes] = {}
        self._known: dict[bytes, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that can be taken: never used, or kept only for their content."""
        return len(self._free) + len(self._kept)

    @property
    def owned(self) -> int:
        """Blocks that sequences hold."""
        return self.blocks - self.available

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Blocks that hold the beginning of ``tokens``, taken for one more owner.

        At least one token is left over, because the last one must be computed to choose the next.
        """
        found: list[int] = []
        before, size = ROOT, self.block_size
        for start in range(0, len(tokens) - size if self.prefix else 0, size):
            before = digest(before, tokens[start : start + size])
            block = self._known.get(before)
            if block is None:
                break
            found.append(block)
        for block in found:
            self._kept.pop(block, None)
            self._owners[block] += 1
        return found

    def take(self, count: int) -> list[int] | None:
        """So many blocks with one owner each, or None where there are not so many."""
        if count > self.available:
            return None
        return [self._next() for _ in range(count)]

    def _next(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._kept.popitem(last=False)
            self._forget(block)
        self._owners[block] = 1
        return block

    def _forget(self, block: int) -> None:
        name = self._name.pop(block, None)
        if name is not None and self._known.get(name) == block:
            del self._known[name]

    def name(self, block: int, before: bytes, tokens: Sequence[int]) -> bytes:
        """Note what a full block holds; its digest, which the next block of the sequence needs."""
        name = digest(before, tokens)
        if self.prefix and name not in self._known:
            self._forget(block)
            self._known[name], self._name[block] = block, name
        return name

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less; the last blocks of a sequence are given away before its first ones."""
        for block in reversed(blocks):
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if block in self._name:
                self._kept[block] = None
            else:
                self._free.append(block)

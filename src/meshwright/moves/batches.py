"""Which sample is read when, and by which replica: pure functions of the seed and the position.

The order depends on the seed and the epoch alone, never on the layout, and the position is one number: samples consumed
since the start. So a run that goes on with another number of replicas reads on where it stopped, no sample twice and
none left out. Nothing here draws from a random generator, so none that the model uses is touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.errors import InputError

_MASK = (1 << 64) - 1
#: Rounds of the network below: four make it as good as random (Luby and Rackoff, SIAM J. Comput. 17, 1988).
ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Order:
    """The order of ``count`` samples: every epoch a permutation of its own.

    Attributes:
        count: samples of an epoch. seed: of the permutations. shuffle: False reads them as they lie.
    """

    count: int
    seed: int = 0
    shuffle: bool = True

    def sample(self, position: int) -> int:
        """The sample that is read as number ``position`` since the start of training."""
        epoch, index = divmod(position, self.count)
        return permuted(index, self.count, self.seed, epoch) if self.shuffle else index

    def samples(self, start: int, stop: int) -> Iterator[int]:
        """The samples of positions ``start`` to ``stop``."""
        return (self.sample(position) for position in range(start, stop))


def permuted(index: int, count: int, seed: int, epoch: int) -> int:
    """Place of ``index`` in the permutation of ``range(count)`` that ``(seed, epoch)`` name.

    A Feistel network over the smallest even number of bits that holds ``count``; places beyond ``count`` are sent
    through it again until they are inside (cycle walking: Black and Rogaway, CT-RSA 2002, section 3), which at most
    quadruples the work. No table is kept, so a position is found at once.
    """
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    keys = [_mixed(seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03 + n) for n in range(ROUNDS)]
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        index = left << half | right
        if index < count:
            return index


def _mixed(x: int) -> int:
    """A number of 64 bits well mixed (the finaliser of SplitMix64: Steele et al., OOPSLA 2014, figure 16)."""
    x &= _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def rows(position: int, global_batch: int, dp: int, index: int) -> range:
    """Positions of the samples that replica ``index`` of ``dp`` reads for the step which begins at ``position``.

    Raises:
        InputError: the global batch cannot be dealt evenly.
    """
    if global_batch % dp:
        raise InputError(f"global batch {global_batch} is not divisible by dp {dp}; take a multiple of {dp}")
    each = global_batch // dp
    return range(position + index * each, position + (index + 1) * each)

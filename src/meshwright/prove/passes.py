"""Which passes the ranks of a replica walk: a mirror of ``runtime.generate`` made of numbers only.

Every micro-batch first takes its prompts in, all at once or chunk by chunk, then decodes one token of every sequence a
pass. Micro-batches take turns, one pass each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from meshwright.plan.cores import Batch
from meshwright.specs.shares import part


def passes(
    lengths: Sequence[int], new_tokens: int, micro_batches: int, chunk: int | None = None
) -> Iterator[tuple[int, int, Batch]]:
    """``(step, micro-batch, batch)`` of every pass of a replica, in the order in which its ranks walk them.

    Args:
        lengths: tokens of every prompt of the replica. new_tokens: generated for each.
        micro_batches: groups in flight; with fewer prompts than that, one a prompt.
        chunk: most prompt tokens of one sequence in a pass; None: the whole prompt.
    """
    count = max(1, min(micro_batches, len(lengths)))
    groups = [lengths[slice(*part(len(lengths), count, index))] for index in range(count)]
    turns = zip_longest(*(_own_passes(group, new_tokens, chunk) for group in groups))
    for step, turn in enumerate(turns):
        for microbatch, batch in enumerate(turn):
            if batch is not None:
                yield step, microbatch, batch


def _own_passes(lengths: Sequence[int], new_tokens: int, chunk: int | None) -> Iterator[Batch]:
    """The passes of one micro-batch: prefill while any prompt has tokens left, then decode."""
    most = chunk or max(lengths, default=0)
    start = 0
    while any(length > start for length in lengths):
        taken = [(min(most, length - start), start) for length in lengths if length > start]
        done = sum(start < length <= start + most for length in lengths)
        yield batch_of("prefill", taken, done, chunk)
        start += most
    for number in range(new_tokens - 1 if lengths else 0):
        yield batch_of("decode", [(1, length + number) for length in lengths], len(lengths), chunk)


def batch_of(phase: str, each: Sequence[tuple[int, int]], sampled: int, chunk: int | None) -> Batch:
    """A batch of sequences with ``(new tokens, past)`` each; equal ones as a number of them, none as no tokens."""
    (new, past), count = each[0] if each else (1, 0), len(each)
    unequal = () if all(row == each[0] for row in each) else tuple(each)
    assert phase in {"prefill", "decode"}
    return Batch("prefill" if phase == "prefill" else "decode", count, new, past, unequal, sampled, chunk)

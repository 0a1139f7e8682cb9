"""How many micro-batches a pipeline stage holds at once, by schedule.

Sources: GPipe (arXiv 1811.06965), 1F1B (PipeDream-flush, arXiv 2006.09503), interleaved 1F1B (arXiv 2104.04473 and
Megatron-LM ``schedules.py``: warm-up of ``2 (p - s - 1) + (v - 1) G`` chunk forwards), zero bubble (arXiv
2401.10241: ZB-H1 keeps the peak of 1F1B, ZBV holds two half-stage chunks for each of p micro-batches on every
stage), DualPipeV (DeepSeek DualPipe README: p + 1 of the 2p-stage pipeline).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from meshwright.specs.layout import Schedule


def forward_chunks(micro_batches: int, chunks: int, group: int) -> Iterator[int]:
    """Model chunk of every forward of the interleaved schedule in order: groups of ``group`` micro-batches, the last
    one smaller where they do not divide (Megatron ``get_schedule_table``)."""  # fmt: skip
    for start in range(0, micro_batches, group):
        for chunk in range(chunks):
            for _ in range(start, min(start + group, micro_batches)):
                yield chunk


def warmup(schedule: Schedule, stage: int, stages: int, micro_batches: int, chunks: int, group: int) -> int:
    """Chunk forwards of a stage before its first backward."""
    total = micro_batches * chunks
    if schedule == "gpipe":
        return total
    if schedule == "interleaved":
        return min(total, 2 * (stages - stage - 1) + (chunks - 1) * group)
    return min(total, stages - stage - 1)


def held_chunks(
    schedule: Schedule, stage: int, stages: int, micro_batches: int, chunks: int, group: int
) -> Iterator[tuple[int, ...]]:
    """Micro-batches held of every chunk, at each local maximum of the schedule (after a forward).

    Args:
        chunks: model chunks of the stage (1 without virtual stages; 2 for ``zbv`` and ``dualpipev``).
        group: micro-batches of one group of the interleaved schedule (normally the number of stages).
    """
    m, p = micro_batches, stages
    if schedule == "gpipe":
        yield (m,) * chunks
    elif schedule in {"1f1b", "zb-h1"}:
        yield (min(m, p - stage),) * chunks
    elif schedule == "zbv":
        # Before the first backward reaches stage s it has run 2p - 1 - s forwards of its first chunk and s + 1 of its
        # second; from then on one chunk's backward makes room for the other's forward.
        yield (min(m, 2 * p - 1 - stage), min(m, stage + 1))
        yield (min(m, p), min(m, p))
    elif schedule == "dualpipev":
        # The same, and one forward overlaps the backward that frees its place.
        yield (min(m, 2 * p - stage), min(m, stage + 1))
        yield (min(m, p + 1), min(m, p))
    else:
        yield from _interleaved(stage, p, m, chunks, group)


def _interleaved(stage: int, p: int, m: int, chunks: int, group: int) -> Iterator[tuple[int, ...]]:
    total = m * chunks
    first = warmup("interleaved", stage, p, m, chunks, group)
    # Beyond two rounds of all groups the steady state repeats itself.
    horizon = min(total, first + 2 * group * chunks + 1)
    order = list(islice(forward_chunks(m, chunks, group), horizon))
    held = [0] * chunks
    backward = 0
    for done, chunk in enumerate(order, start=1):
        held[chunk] += 1
        if done > first:
            yield tuple(held)
            held[chunks - 1 - order[backward]] -= 1
            backward += 1
    yield tuple(held)


def peak_held(
    sizes: Sequence[int], schedule: Schedule, stage: int, stages: int, micro_batches: int, group: int
) -> tuple[int, ...]:
    """Micro-batches held of every chunk when their activations are largest.

    Args:
        sizes: activation bytes of one micro-batch for every chunk of the stage.
    """
    options = held_chunks(schedule, stage, stages, micro_batches, len(sizes), group)
    return max(options, key=lambda held: sum(h * s for h, s in zip(held, sizes, strict=True)))

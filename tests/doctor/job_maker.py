"""Makes the table of a pipelined training job (1F1B) in the columns of ByteDance's profiler, from told durations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

#: (copy, stage, step, micro-batch, kind) -> seconds of computation.
Seconds = Callable[[int, int, int, int, str], float]
TRANSFER_S, REDUCE_S, OPTIMIZER_S = 0.001, 0.05, 0.02
#: (copy, lower of two neighbouring stages) -> how many times longer a hand-off between them takes.
SLOW_LINKS: dict[tuple[int, int], float] = {}


Pass = tuple[str, int, int]


def order(stage: int, stages: int, batches: int, chunks: int) -> list[Pass]:
    """Forward and backward passes of a stage as (kind, chunk, micro-batch): 1F1B, or all forwards first with chunks."""
    if chunks > 1:
        found = [("forward", c, n) for c in range(chunks) for n in range(batches)]
        return found + [("backward", c, n) for c in reversed(range(chunks)) for n in range(batches)]
    warm = min(batches, stages - stage)
    found = [("forward", 0, n) for n in range(warm)]
    for n in range(batches):
        found.append(("backward", 0, n))
        if warm + n < batches:
            found.append(("forward", 0, warm + n))
    return found


def rows(copies: int, stages: int, batches: int, steps: int, seconds: Seconds, chunks: int = 1) -> list[dict[str, Any]]:
    """All rows."""
    out: list[dict[str, Any]] = []
    for step in range(steps):
        ends = []
        for copy in range(copies):
            ends.append(_copy(out, copy, stages, batches, step, seconds, chunks))
        last = max(max(e) for e in ends)
        for copy in range(copies):
            for stage in range(stages):
                begun = max(e[stage] for e in ends)
                _row(out, copy, stage, step, "gc", 0, ends[copy][stage], 0.0)
                took = begun + REDUCE_S - ends[copy][stage]
                _row(out, copy, stage, step, "grads-reduce-scatter", 0, ends[copy][stage], took, mc=0)
                clip = begun + REDUCE_S
                _row(out, copy, stage, step, "optimizer-clip-main-grad", 0, clip, last + REDUCE_S + 0.001 - clip)
                _row(out, copy, stage, step, "optimizer", 0, last + REDUCE_S + 0.001, OPTIMIZER_S)
    return out


def _copy(
    out: list[dict[str, Any]], copy: int, stages: int, batches: int, step: int, seconds: Seconds, chunks: int
) -> list[float]:
    """One copy of the pipeline in one step; when each stage's last pass ends. Chunk c of stage s is c * stages + s."""
    queues = [order(s, stages, batches, chunks) for s in range(stages)]
    free = [0.0] * stages
    done: dict[Pass, float] = {}
    seqs: dict[tuple[int, str], int] = {}

    def number(stage: int, kind: str) -> int:
        seqs[stage, kind] = seqs.get((stage, kind), -1) + 1
        return seqs[stage, kind]

    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                kind, chunk, batch = queue[0]
                place = chunk * stages + stage
                source = place - 1 if kind == "forward" else place + 1
                gets = 0 <= source < stages * chunks
                if gets and (kind, source, batch) not in done:
                    break
                queue.pop(0)
                start = free[stage]
                if gets:
                    sent = done[kind, source, batch]
                    slower = SLOW_LINKS.get((copy, min(stage, source % stages)), 1.0)
                    start = max(free[stage], sent) + TRANSFER_S * slower
                    _row(
                        out,
                        copy,
                        stage,
                        step,
                        f"{kind}-recv",
                        number(stage, f"{kind}-recv"),
                        free[stage],
                        start - free[stage],
                    )
                    other = source % stages
                    _row(out, copy, other, step, f"{kind}-send", number(other, f"{kind}-send"), sent, start - sent)
                took = seconds(copy, stage, step, batch, kind)
                facts = {"mc": chunk, "mb_id": batch, "gmc": place}
                _row(out, copy, stage, step, f"{kind}-compute", number(stage, kind), start, took, **facts)
                free[stage] = done[kind, place, batch] = start + took
    return free


def _row(
    out: list[dict[str, Any]],
    copy: int,
    stage: int,
    step: int,
    kind: str,
    seq: int,
    start: float,
    took: float,
    **more: int,
) -> None:
    row = {"dp_rank": copy, "stage": stage, "rank": 4 * (stage * 2 + copy), "step": 10 + step, "optype": kind}
    row |= {"start_ts": 100.0 * step + start, "duration": took, "seq_id": seq, "mc": -1, "mb_id": -1, "gmc": -1}
    out.append(row | more)


def write(path: Path, table: list[dict[str, Any]]) -> Path:
    """The table as parquet."""
    import polars as pl

    path.parent.mkdir(parents=True, exist_ok=True)
    pl.DataFrame(table).write_parquet(path)
    return path

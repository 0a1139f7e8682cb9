"""Makes the table of a pipelined training job (1F1B) in the columns of ByteDance's profiler, from told durations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

#: (copy, stage, step, micro-batch, kind) -> seconds of computation.
Seconds = Callable[[int, int, int, int, str], float]
TRANSFER_S, REDUCE_S, OPTIMIZER_S = 0.001, 0.05, 0.02


def order(stage: int, stages: int, batches: int) -> list[tuple[str, int]]:
    """Forward and backward passes of a stage: 1F1B."""
    warm = min(batches, stages - stage)
    found = [("forward", n) for n in range(warm)]
    for n in range(batches):
        found.append(("backward", n))
        if warm + n < batches:
            found.append(("forward", warm + n))
    return found


def rows(copies: int, stages: int, batches: int, steps: int, seconds: Seconds) -> list[dict[str, Any]]:
    """All rows."""
    out: list[dict[str, Any]] = []
    for step in range(steps):
        ends = []
        for copy in range(copies):
            ends.append(_copy(out, copy, stages, batches, step, seconds))
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


def _copy(out: list[dict[str, Any]], copy: int, stages: int, batches: int, step: int, seconds: Seconds) -> list[float]:
    """One copy of the pipeline in one step; when each stage's last pass ends."""
    queues = [order(s, stages, batches) for s in range(stages)]
    free = [0.0] * stages
    done: dict[tuple[str, int, int], float] = {}
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                kind, batch = queue[0]
                source = stage - 1 if kind == "forward" else stage + 1
                gets = 0 <= source < stages
                if gets and (kind, source, batch) not in done:
                    break
                queue.pop(0)
                sent = done[kind, source, batch] if gets else 0.0
                start = max(free[stage], sent + TRANSFER_S) if gets else free[stage]
                if gets:
                    arrived = max(free[stage], sent) + TRANSFER_S
                    _row(out, copy, stage, step, f"{kind}-recv", batch, free[stage], arrived - free[stage])
                    _row(out, copy, source, step, f"{kind}-send", batch, sent, arrived - sent)
                    start = arrived
                took = seconds(copy, stage, step, batch, kind)
                _row(out, copy, stage, step, f"{kind}-compute", batch, start, took, mc=0, mb_id=batch, gmc=stage)
                free[stage] = done[kind, stage, batch] = start + took
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

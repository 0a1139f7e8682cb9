"""Operations of a training job per rank and step, as ByteDance's StragglerAnalysis publishes them (parquet).

Columns: ``dp_rank, stage, rank, step, optype, start_ts, duration, seq_id, mc, mb_id, gmc``; seconds. ``mc`` is a model
chunk within a stage, ``gmc`` its place in the model. One rank stands for its tensor parallel group.
"""

from __future__ import annotations

from typing import Any

from meshwright.doctor.incident import Incident
from meshwright.doctor.readers import Source
from meshwright.errors import InputError
from meshwright.ledger.process import silenced

NAME = "straggler"

MAX_BYTES = 1 << 30
MAX_ROWS = 20_000_000
#: Operations of one step and copy of the pipeline.
MAX_OPS = 100_000
_NEEDED = ("dp_rank", "stage", "step", "optype", "start_ts", "duration", "seq_id")
_OPTIONAL = ("rank", "mc", "mb_id", "gmc")


def sniff(head: bytes, name: str) -> bool:
    """A parquet file; whether it is of this kind is known only from its end."""
    return head[:4] == b"PAR1"


def read(source: Source, incident: Incident) -> None:
    """Add the job.

    Raises:
        InputError: unreadable, or a table of something else.
    """
    with source.open() as stream:
        data = stream.read(MAX_BYTES + 1)
        while len(data) <= MAX_BYTES and (more := stream.read(1 << 20)):
            data += more
    if len(data) > MAX_BYTES:
        raise InputError(f"{source.name}: parquet of more than {MAX_BYTES} bytes is not read")
    try:
        with silenced():  # a panic of the Rust reader would print its own backtrace
            frame = _frame(data, source.name)
    except (InputError, KeyboardInterrupt, SystemExit, MemoryError, GeneratorExit):
        raise
    except BaseException as error:  # a panic of the Rust reader is no Exception
        raise InputError(f"{source.name}: not a readable parquet table ({type(error).__name__})") from None
    incident.jobs.append(_job(frame, source.name, incident))


def _frame(data: bytes, name: str) -> Any:
    """The columns with one type each."""
    import io

    import polars as pl

    schema = pl.read_parquet_schema(io.BytesIO(data))
    absent = [c for c in _NEEDED if c not in schema]
    if absent:
        raise InputError(f"{name}: a parquet table without {', '.join(absent[:4])}: no operations of a training job")
    columns = [c for c in (*_NEEDED, *_OPTIONAL) if c in schema]
    lazy = pl.scan_parquet(io.BytesIO(data))
    if int(lazy.select(pl.len()).collect().item()) > MAX_ROWS:
        raise InputError(f"{name}: more than {MAX_ROWS} rows are not read")
    frame = lazy.select(columns).collect()
    kinds = {"optype": pl.String, "start_ts": pl.Float64, "duration": pl.Float64}
    frame = frame.with_columns(pl.col(c).cast(kinds.get(c, pl.Int64), strict=False) for c in columns)
    for column, value in (("mc", -1), ("mb_id", -1), ("gmc", -1), ("rank", -1)):
        frame = frame.with_columns(
            (pl.col(column) if column in columns else pl.lit(value)).fill_null(value).alias(column)
        )
    frame = frame.drop_nulls(list(_NEEDED))
    finite = pl.col("start_ts").is_finite() & pl.col("duration").is_finite() & (pl.col("duration") >= 0)
    frame = frame.filter(finite & (pl.col("stage").is_between(0, 1023)) & (pl.col("dp_rank").is_between(0, 65535)))
    return frame.with_columns(pl.col("start_ts") - pl.col("start_ts").min().over("step"))


def _job(frame: Any, name: str, incident: Incident) -> Any:
    """Operations as arrays (copies x steps); what is not there in all copies and steps is left out."""
    import numpy as np

    from meshwright.doctor.job import Job
    from meshwright.ledger.pipeline_graph import COMMUNICATES
    from meshwright.ledger.replay import Op

    copies, steps = sorted(frame["dp_rank"].unique()), sorted(frame["step"].unique())
    if not copies or not steps:
        raise InputError(f"{name}: no row with a time")
    shape = (len(copies), len(steps))
    row_of, column_of = {v: n for n, v in enumerate(copies)}, {v: n for n, v in enumerate(steps)}
    ops, partial = [], 0
    groups = frame.partition_by(["optype", "stage", "seq_id"], maintain_order=True)
    if len(groups) > MAX_OPS:
        raise InputError(f"{name}: {len(groups)} operations a step; at most {MAX_OPS} are read")
    for part in groups:
        start, took = np.full(shape, np.nan), np.zeros(shape)
        rows = [row_of[v] for v in part["dp_rank"]]
        columns = [column_of[v] for v in part["step"]]
        start[rows, columns], took[rows, columns] = part["start_ts"].to_numpy(), part["duration"].to_numpy()
        if np.isnan(start).any():
            partial += 1
            continue
        kind, stage, seq, mc, batch, gmc = part.select("optype", "stage", "seq_id", "mc", "mb_id", "gmc").row(0)
        chunk = gmc if gmc >= 0 else mc if mc >= 0 else None
        ops.append(Op(kind, stage, seq, start, took, chunk, batch if batch >= 0 else None, kind in COMMUNICATES))
    if partial:
        incident.lack(f"{name}: {partial} operations are not recorded in every copy and step, and are left out")
    if not ops:
        raise InputError(f"{name}: no operation is recorded in every copy and step")
    ranks = {(d, s): r for d, s, r in frame.select("dp_rank", "stage", "rank").unique().iter_rows() if r >= 0}
    return Job(name, tuple(ops), tuple(copies), tuple(steps), ranks)

"""The three tables of a ledger (DESIGN section 1), as plain column lists. None means unknown.

Version 1. A table is a list of rows of one slotted dataclass; ``ledger.store`` writes and reads them as parquet
(polars, imported only there) and as JSON lines.
"""

from __future__ import annotations

from dataclasses import dataclass, field

VERSION = 1


@dataclass(slots=True)
class Entry:
    """One thing a rank does: a matrix product, a collective, a hand-off, a stretch of waiting.

    Attributes:
        rank_class: name of the class of ranks that does it.
        step: training step or engine step, from 0.
        microbatch: index of the micro-batch.
        layer: decoder layer, None outside layers.
        phase: ``prefill``, ``decode``, ``forward``, ``backward``, ``optimizer``.
        stream: ``compute`` or the name of the communication stream.
        group: axis of the group (``tp``, ``pp``, ``dp``, ``ep``, ``dp+cp``); None for compute.
        seq: order within (rank_class, stream), from 0.
        op: ``matmul``, ``attention``, ``norm``, ``all_reduce``, ``all_gather``, ``reduce_scatter``,
            ``all_to_all``, ``send``, ``recv``, ``broadcast``, ...
        name: what it belongs to (``q_proj``, ``mlp.down``), for people.
        peer: coordinate on the group's axis of the other side of a hand-off, else None.
        splits: elements to every member of an uneven all_to_all, or None.
        shapes: shapes of the operands, as tuples.
        dtype: element type of the payload or of the operands.
        payload_bytes: bytes of the tensor that enters the collective on this rank; for compute, bytes read and
            written.
        wire_bytes: bytes that this rank sends for it (ring all_reduce: 2 (n-1)/n x payload).
        flops: floating point operations (a multiply-add is 2).
        count: how often this entry repeats in a row (identical entries are folded), usually 1.
        enqueued_ns, started_ns, ended_ns: times; None while unknown.
        state: ``predicted``, ``scheduled``, ``started``, ``completed``.
        call_site: file:line where it was issued.
        source: ``predict``, ``dry-run``, ``record``, ``import``.
    """

    rank_class: str
    op: str
    step: int | None = None
    microbatch: int | None = None
    layer: int | None = None
    phase: str | None = None
    stream: str | None = None
    group: str | None = None
    seq: int | None = None
    name: str | None = None
    peer: int | None = None
    splits: tuple[int, ...] | None = None
    shapes: tuple[tuple[int, ...], ...] | None = None
    dtype: str | None = None
    payload_bytes: int | None = None
    wire_bytes: int | None = None
    flops: int | None = None
    count: int = 1
    enqueued_ns: int | None = None
    started_ns: int | None = None
    ended_ns: int | None = None
    state: str | None = None
    call_site: str | None = None
    source: str | None = None


@dataclass(slots=True)
class Holding:
    """Bytes that one rank of the class holds.

    Attributes:
        rank_class: name of the class of ranks.
        term: ``weights``, ``kv_cache``, ``gradients``, ``optimizer``, ``activations``, ``runtime``.
        tensor: what it is within the term (a role, a tensor name, ``cuda_graphs``).
        bytes: how many.
        source: ``exact`` (counted), ``calibrated`` (measured constant) or ``modelled``.
    """

    rank_class: str
    term: str
    tensor: str | None
    bytes: int
    source: str


@dataclass(slots=True)
class Rank:
    """A run of ranks of one class: ``ranks`` of them, the first is ``rank``.

    Attributes:
        rank: global rank (the first of the run).
        coordinate: axis -> place.
        rank_class: name of its class.
        ranks: how many consecutive class members this row stands for (1: this rank only).
        host: host name, None in a prediction.
        clock_offset_ns: to add to its times, None when unknown.
    """

    rank: int
    coordinate: dict[str, int]
    rank_class: str
    ranks: int = 1
    host: str | None = None
    clock_offset_ns: int | None = None


@dataclass(slots=True)
class Ledger:
    """Entries, holdings and ranks, with a few facts about the whole (model, layout, cluster) in ``meta``."""

    entries: list[Entry] = field(default_factory=list)
    holdings: list[Holding] = field(default_factory=list)
    ranks: list[Rank] = field(default_factory=list)
    meta: dict[str, str] = field(default_factory=dict)
    version: int = VERSION

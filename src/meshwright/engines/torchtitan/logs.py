"""What torchtitan prints about memory (0.3.0).

``torchtitan/trainer.py``: ``Model llama3 8B size: N total parameters``, ``CUDA memory usage for model: 3.77GiB``.
``components/metrics.py``: ``step: 1 ... memory: 30.10GiB(38.00%)``, the most the allocator reserved since the last one.
``distributed/parallel_dims.py``: the degrees. A rank is known where the launcher writes ``[rank0]:`` in front.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from meshwright.engines.base import BootLog
from meshwright.ledger.schema import Holding
from meshwright.specs.layout import Fsdp, Layout

MAX_LINE = 4_000
MAX_RANKS = 1 << 16
GIB = 1 << 30

_COLOR = re.compile(r"\x1b\[[0-9;]{0,20}m")
_RANK = re.compile(r"^\[?(?:rank|default)(\d{1,7})\]?:")
_VERSION = re.compile(r"torchtitan version: (\d+\.\d+)")
_MODEL = re.compile(r"Model ([\w./-]{1,60} [\w./-]{1,60}) size: ([\d,]{1,20}) total parameters")
_LOADED = re.compile(r"(?:CUDA|XPU|HIP) memory usage for model: (\d{1,6}\.\d{1,3})GiB")
_STEP = re.compile(r"step: *(\d{1,9}) .{0,300}memory: *(\d{1,6}\.\d{1,3})GiB\(")
_MESH = re.compile(r"Building device mesh with parallelism: (.{1,200})")
_BATCH = re.compile(r"local batch size (\d{1,9})(?: \(.{0,40}\))?, global batch size (\d{1,9})")


@dataclass(slots=True)
class _State:
    loaded: dict[int, float] = field(default_factory=dict)
    peak: dict[int, float] = field(default_factory=dict)
    version: str = ""
    model: str | None = None
    mesh: dict[str, int] = field(default_factory=dict)
    local: int = 1
    cut: bool = False
    ours: bool = False


def read_log(lines: Iterable[str]) -> BootLog | None:
    """Read a log; None when no line is torchtitan's."""
    s = _State()
    for line in lines:
        s.cut |= len(line) > MAX_LINE
        _read(_COLOR.sub("", line[:MAX_LINE]), s)
    if not s.ours:
        return None
    holdings = []
    for rank in sorted({*s.loaded, *s.peak}):
        if rank in s.loaded:
            holdings.append(
                Holding(f"rank {rank}", "weights", "reserved after loading", round(s.loaded[rank] * GIB), "measured")
            )
        if rank in s.peak:
            holdings.append(Holding(f"rank {rank}", "total", "max reserved", round(s.peak[rank] * GIB), "measured"))
    notes = ["lines over 4,000 characters were cut"] if s.cut else []
    if not s.peak:
        notes.append("no 'step: ... memory:' line: it is printed after the first logged step (metrics.log_freq)")
    misleading: tuple[tuple[str, str], ...] = ()
    if s.peak:
        misleading = (
            (
                "memory: N GiB(P%)",
                "the most that the allocator reserved since the line before, fragments included; driver context and "
                "communicators are outside it",
            ),
        )
    return BootLog(
        "torchtitan",
        s.version,
        tuple(holdings),
        layout=_layout(s),
        model=s.model,
        misleading=misleading,
        notes=tuple(notes),
    )


def _read(line: str, s: _State) -> None:
    where = _RANK.match(line)
    rank = int(where[1]) if where else 0
    if (m := _STEP.search(line)) is not None:
        if len(s.peak) < MAX_RANKS or rank in s.peak:
            s.ours = True
            s.peak[rank] = max(s.peak.get(rank, 0.0), float(m[2]))
    elif (m := _LOADED.search(line)) is not None:
        if len(s.loaded) < MAX_RANKS:
            s.ours = True
            s.loaded.setdefault(rank, float(m[1]))
    elif (m := _MODEL.search(line)) is not None:
        s.ours, s.model = True, m[1]
    elif (m := _MESH.search(line)) is not None:
        s.ours = True
        s.mesh = {k: int(v) for k, v in re.findall(r"(pp|dp_replicate|dp_shard|cp|tp|ep)=(\d{1,7})", m[1])}
    elif (m := _VERSION.search(line)) is not None:
        s.ours, s.version = True, m[1]
    elif (m := _BATCH.search(line)) is not None:
        s.local = int(m[1])


def _layout(s: _State) -> Layout | None:
    """Degrees of the mesh line; the size of a pipeline's micro-batches is not printed."""
    if not {"pp", "dp_replicate", "dp_shard", "cp", "tp"} <= set(s.mesh) or 0 in s.mesh.values():
        return None
    m, ep = s.mesh, s.mesh.get("ep", 1)
    sharded = m["dp_shard"] * m["cp"] > 1
    knobs = Fsdp(reshard_after_forward=m["pp"] == 1, replicas=m["dp_replicate"])
    return Layout(
        tp=m["tp"],
        pp=m["pp"],
        cp=m["cp"],
        dp=m["dp_replicate"] * m["dp_shard"],
        ep=ep,
        etp=1 if ep > 1 else None,
        sp=m["tp"] > 1,
        zero=3 if sharded else 0,
        fsdp=knobs if sharded and m["dp_replicate"] > 1 else None,
        micro_batch=max(1, s.local) if m["pp"] == 1 else 1,
    )

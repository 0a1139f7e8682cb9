"""Output of nccl-tests (``all_reduce_perf`` and its kin, all versions) as timed transfers.

A row gives the size of the full buffer, the time out of place and in place, and two bandwidths whose ratio tells the
operation: bus over algorithm bandwidth is 2 (n - 1) / n of an all_reduce, (n - 1) / n where pieces travel, 1 else
(nccl-tests, ``doc/PERFORMANCE.md``). What a ledger counts is the payload that enters on a rank: of a gather its piece.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite

from meshwright.errors import InputError
from meshwright.ledger.schema import Entry, Ledger

#: Programs of nccl-tests and the ops of a ledger.
PROGRAMS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "sendrecv": "send",
    "broadcast": "broadcast",
    "gather": "gather",
    "scatter": "scatter",
    "hypercube": "hypercube",
    "reduce": "reduce",
}
DTYPES = {"float": "f32", "half": "f16", "bfloat16": "bf16", "double": "f64", "int8": "i8", "uint8": "i8"}
#: Ops whose size column is the gathered whole.
GATHERED = ("all_gather", "gather")
MAX_LINES, MAX_LINE, MAX_BYTES = 1 << 20, 4096, 1 << 50

_PREFIX = re.compile(r"^\s*\[[^\]]{1,40}\]<std(?:out|err)>:\s?")
_RANK = re.compile(r"^#\s+Rank\s+(\d{1,7})\s.*?\bon\s+(\S{1,200})\s+device\s+\S+(?:\s+\[[^\]]{1,40}\])?\s*(.{0,200})$")
_STARTING = re.compile(r"Collective test starting:\s*(\w{1,60})|\b(\w{1,60})_perf\b")
_HEADER = re.compile(r"^#\s+(?:nThread\b|nccl-tests version|Collective test starting|Using devices)")


@dataclass(slots=True)
class _Run:
    """One program's output as far as it was read."""

    op: str | None = None
    hosts: dict[int, str] = field(default_factory=dict)
    device: str = ""
    rows: list[tuple[int, str, str, float, float, float]] = field(default_factory=list)


def looks_so(text: str) -> bool:
    """Whether a text is nccl-tests output."""
    return "algbw" in text and "busbw" in text


def read(text: str, name: str = "nccl-tests") -> Ledger:
    """Transfers with times; ``meta``: ``machine``, ``ranks``, ``nodes``, ``device`` and the sizes of groups.

    Args:
        text: output of one or more programs, also behind the prefixes of mpirun. name: of the file: it names the
            operation where no line does.

    Raises:
        InputError: no row with a time, or an operation or a number of ranks that nothing tells.
    """
    runs = [run for run in _runs(text) if run.rows]
    if not runs:
        raise InputError(f"{name}: no row with a time; the output of a program of nccl-tests is needed")
    entries: list[Entry] = []
    meta = {"machine": "", "ranks": "1", "nodes": "1", "device": ""}
    for run in runs:
        ranks = _ranks(run, name)
        nodes = len(set(run.hosts.values())) or 1
        op = run.op or _named(name) or _told(run, ranks, name)
        group = f"{ranks}x{nodes}"
        meta[f"group.{group}"] = str(ranks)
        if ranks >= int(meta["ranks"]):
            meta |= {"ranks": str(ranks), "nodes": str(nodes), "device": run.device}
        entries += [_entry(op, group, ranks, row) for row in run.rows]
    meta["machine"] = f"nccl-tests, {meta['ranks']} ranks on {meta['nodes']} node{'s' * (meta['nodes'] != '1')}"
    return Ledger(entries, meta=meta)


def _runs(text: str) -> Iterator[_Run]:
    """Split at the headers; a header behind rows begins another run."""
    run = _Run()
    for line in text.splitlines()[:MAX_LINES]:
        line = _PREFIX.sub("", line[:MAX_LINE])
        if _HEADER.match(line) and run.rows:
            yield run
            run = _Run()
        if line.lstrip().startswith("#"):
            _comment(run, line)
        elif (row := _row(line)) is not None:
            run.rows.append(row)
        elif (found := _STARTING.search(line)) and not run.rows:
            run.op = _named(found[1] or found[2]) or run.op
    yield run


def _comment(run: _Run, line: str) -> None:
    if match := _RANK.match(line):
        run.hosts[int(match[1])] = match[2]
        run.device = run.device or match[3].strip()
    elif (found := _STARTING.search(line)) is not None:
        run.op = _named(found[1] or found[2]) or run.op


def _row(line: str) -> tuple[int, str, str, float, float, float] | None:
    """Size, dtype, reduction, seconds, algorithm and bus bandwidth of a row; None for another line.

    Twelve columns before the root came in (2.0), thirteen since.
    """
    words = line.split()
    if len(words) not in {12, 13} or not words[0].isdecimal() or not words[1].isdecimal():
        return None
    first = len(words) - 8
    try:
        out, inside = ([float(w) for w in words[at : at + 3]] for at in (first, first + 4))
    except ValueError:
        return None
    time, alg, bus = out if out[0] > 0 else inside
    size = int(words[0])
    if not all(map(isfinite, (time, alg, bus))) or time <= 0 or not 0 < size < MAX_BYTES:
        return None
    return size, words[2], words[3], time * 1e-6, alg, bus


def _named(text: str) -> str | None:
    """The operation that a program or a file is named by."""
    low = text.lower().replace("-", "_")
    return next((op for word, op in PROGRAMS.items() if word in low), None)


def _ratio(run: _Run) -> float | None:
    """Bus over algorithm bandwidth of the fastest row, whose rounding matters least."""
    *_, alg, bus = max(run.rows, key=lambda row: row[4])
    return bus / alg if alg > 0.1 else None


def _ranks(run: _Run, name: str) -> int:
    if len(run.hosts) > 1:
        return len(run.hosts)
    ratio, op = _ratio(run), run.op or _named(name)
    if ratio is not None and op is not None:
        share = ratio / 2 if op == "all_reduce" else ratio
        if 0.4 < share < 0.9999 and op not in {"send", "broadcast", "reduce"}:
            return max(2, round(1 / (1 - share)))
    raise InputError(f"{name}: the lines `#  Rank  0 ... on HOST device ...` are missing, so the ranks are not known")


def _told(run: _Run, ranks: int, name: str) -> str:
    """The operation by reduction, root and ratio of bandwidths."""
    ratio, reduces = _ratio(run), run.rows[0][2] not in {"none", "n/a"}
    if ratio is not None and reduces:
        if abs(ratio - 2 * (ranks - 1) / ranks) < 0.05 and ranks > 2:
            return "all_reduce"
        if abs(ratio - (ranks - 1) / ranks) < 0.05:
            return "reduce_scatter"
    said = "a reduction" if reduces else "no reduction"
    raise InputError(
        f"{name}: no line names the operation, and {said} with bus/algorithm bandwidth "
        f"{ratio or 0:.2f} of {ranks} ranks can be several; name the file after it, as all_gather.txt"
    )


def _entry(op: str, group: str, ranks: int, row: tuple[int, str, str, float, float, float]) -> Entry:
    size, dtype, _, seconds, _, _ = row
    payload = max(1, size // ranks) if op in GATHERED else size
    entry = Entry("", op, stream=group, group=group, dtype=DTYPES.get(dtype, dtype), payload_bytes=payload)
    entry.started_ns, entry.ended_ns, entry.source, entry.state = 0, max(1, round(seconds * 1e9)), "import", "completed"
    return entry

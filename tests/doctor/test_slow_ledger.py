"""Our own ledgers with steps: the rank that comes late is named; ledgers without steps say nothing of slowness."""

from __future__ import annotations

from pathlib import Path

from meshwright.doctor.judge import judge
from meshwright.doctor.readers.walk import read_incident
from meshwright.ledger.schema import Entry, Ledger, Rank
from meshwright.ledger.store import write_jsonl

MS = 1_000_000


def write(folder: Path, *, steps: bool) -> Path:
    """Two ranks, three steps of a product and an all_reduce; rank 1 multiplies three times as long."""
    for rank in (0, 1):
        rows = []
        for n in range(3):
            start = n * 40 * MS
            own = (30 if rank else 10) * MS
            facts = {"step": n if steps else None, "phase": "forward", "state": "completed", "source": "record"}
            times = {"enqueued_ns": start, "started_ns": start, "ended_ns": start + own}
            rows.append(Entry(f"rank{rank}", "matmul", **times, **facts))
            entry = Entry(
                f"rank{rank}", "all_reduce", group="0,1", seq=n, payload_bytes=1 << 20, dtype="float32", **facts
            )
            entry.enqueued_ns, entry.ended_ns = start + own, start + 31 * MS
            rows.append(entry)
        ledger = Ledger(rows, [], [Rank(rank, {"dp": rank}, f"rank{rank}", clock_offset_ns=5)], {"world": "2"})
        write_jsonl(ledger, folder / f"rank{rank}.jsonl")
    return folder


def test_a_late_rank(tmp_path: Path) -> None:
    finding = judge(read_incident(write(tmp_path, steps=True)))[0]
    assert (finding.kind, finding.guilty_ranks, finding.waiting_ranks) == ("compute_straggler", (1,), (0,))
    assert abs(dict(finding.numbers)["excess_s"] - 0.020) < 0.002


def test_without_steps_nothing_is_slow(tmp_path: Path) -> None:
    incident = read_incident(write(tmp_path, steps=False))
    assert not incident.tracks
    assert judge(incident)[0].kind == "healthy"

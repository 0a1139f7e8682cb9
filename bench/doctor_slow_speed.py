"""How fast profiler traces are read and judged, and how much memory a huge one takes.

    python bench/doctor_slow_speed.py [GIB]      default 4; 0 leaves the huge trace out

Eight ranks of 216 thousand events each (1.73 million): copies of ``incidents/kineto_hta/df_index_resolver`` of the
shared folder, gzip as published. The huge trace is that one again and again with later times, as it would come from a
decompressor; nothing of it is written to disk. Prints seconds of the clock and of all cores, and the largest memory of
any process; where other work runs on the machine, only the latter two mean something.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from meshwright.doctor.incident import Incident
from meshwright.doctor.judge import judge
from meshwright.doctor.readers import Source, kineto
from meshwright.doctor.readers.walk import read_incident

SHARED = Path(os.environ.get("MESHWRIGHT_SHARED", Path(__file__).resolve().parent.parent.parent / "shared"))
TRACE = SHARED / "incidents" / "kineto_hta" / "df_index_resolver_df_index_resolver.json.gz"
RANKS = 8
#: First digits of all times in the trace (microseconds); the next higher number is ten seconds later.
DIGITS = 166978368


class Repeated(io.RawIOBase):
    """A trace whose events come again and again, each time later, up to a size."""

    def __init__(self, data: bytes, size: int) -> None:
        self._chunks = self._parts(data, size)
        self._rest = b""

    @staticmethod
    def _parts(data: bytes, size: int) -> Iterator[bytes]:
        begin = data.index(b"[", data.index(b'"traceEvents"')) + 1
        end = data.rindex(b"]")
        head, events, tail = data[:begin], data[begin:end].rstrip(), data[end:]
        yield head
        sent, number = len(head), 0
        while sent < size:
            later = events.replace(b'"ts": %d' % DIGITS, b'"ts": %d' % (DIGITS + number))
            yield later if not number else b",\n" + later
            sent, number = sent + len(later), number + 1
        yield tail

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill a buffer."""
        if not self._rest:
            self._rest = next(self._chunks, b"")
        data, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)


def measured(work: Callable[[], Incident]) -> dict[str, Any]:
    """Run in a forked process, so that its memory is its own."""
    out, into = os.pipe()
    pid = os.fork()
    if not pid:
        begun = time.perf_counter()
        incident = work()
        verdict = judge(incident)[0].headline
        took = time.perf_counter() - begun
        use = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        row = {
            "wall_s": round(took, 2),
            "cpu_s": round(sum(u.ru_utime + u.ru_stime for u in use), 2),
            "largest_process_bytes": max(u.ru_maxrss for u in use) * 1024,
            "events": sum(t.counts.get("events", 0) for t in incident.tracks),
            "verdict": verdict,
            "lacks": incident.lacks,
        }
        os.write(into, json.dumps(row).encode())
        os._exit(0)
    os.close(into)
    os.waitpid(pid, 0)
    with os.fdopen(out, "rb") as stream:
        return cast("dict[str, Any]", json.loads(stream.read() or b"{}"))


def eight() -> dict[str, Any]:
    """Eight ranks."""
    with tempfile.TemporaryDirectory() as name:
        for rank in range(RANKS):
            (Path(name) / f"rank{rank}.json.gz").write_bytes(TRACE.read_bytes())
        return measured(lambda: read_incident(name))


def huge(gib: float) -> dict[str, Any]:
    """One trace of some GiB."""
    data = gzip.decompress(TRACE.read_bytes())

    def work() -> Incident:
        incident = Incident()
        size = int(gib * (1 << 30))
        stream = lambda: cast(BinaryIO, io.BufferedReader(Repeated(data, size), 1 << 20))  # noqa: E731
        kineto.read_many([Source("huge.json", data[:4096], stream, size)], incident)
        return incident

    return measured(work) | {"gib": gib, "held_by_the_bench_bytes": len(data)}


def main() -> int:
    """Measure and print."""
    gib = float(sys.argv[1]) if len(sys.argv) > 1 else 4.0
    if not TRACE.exists():
        print(f"no shared folder with {TRACE.name}")
        return 2
    row = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0], "eight_ranks": eight()}
    if gib:
        row["huge"] = huge(gib)
    print(json.dumps(row, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

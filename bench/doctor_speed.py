"""How fast the doctor reads and judges Flight Recorder dumps of many ranks.

    python bench/doctor_speed.py [RANKS] [ENTRIES]      default 128 2000; the large case is 16384 2000

Dumps are made from one template by replacing digits while they are read, so that thousands of ranks need no disk.
One rank skips a call, so that the check has something to find. Prints seconds and bytes as JSON.
"""

from __future__ import annotations

import io
import json
import pickle
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from meshwright.doctor.hang import diagnose
from meshwright.doctor.incident import Incident
from meshwright.doctor.readers import Source, flight_recorder

TP = 8
START_NS = 1_758_610_505_000_000_000
_OWN = [f"9{place:06d}" for place in range(TP)]
_DATA = "9700000"


def _frames() -> list[list[dict[str, Any]]]:
    torch = {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/distributed_c10d.py", "line": 2501}
    loop = {"name": "train", "filename": "/job/train.py", "line": 88}
    return [[torch, {"name": f"layer_{i}", "filename": "/job/model.py", "line": 100 + i}, loop] for i in range(8)]


def template(ranks: int, entries: int, skip: bool) -> bytes:
    """A dump whose tensor parallel group (``_OWN``) and data parallel group (``_DATA``) are to be replaced."""
    rows: list[dict[str, Any]] = []
    frames, seqs, done = _frames(), [0, 0, 0], entries - 8
    shift = 1 if skip else 0
    for i in range(entries + shift):
        group = 2 if i % 50 == 49 else 0 if i % 25 == 24 else 1
        if skip and i == entries - 40:
            continue
        seqs[group] += 1
        rows.append(
            {
                "record_id": len(rows) + 5000,
                "pg_id": group,
                "process_group": (("0", "default_pg"), ("tp" + _OWN[0], "TP"), ("dp" + _DATA, "DP"))[group],
                "thread_name": "pt_main",
                "thread_id": "1",
                "collective_seq_id": seqs[group] + 2500,
                "p2p_seq_id": 0,
                "op_id": seqs[group] + 2500,
                "profiling_name": "nccl:all_reduce",
                "time_created_ns": START_NS + i * 1_000_000,
                "input_sizes": [[1024 + i % 48]],
                "input_dtypes": ["BFloat16"],
                "output_sizes": [[1024 + i % 48]],
                "output_dtypes": ["BFloat16"],
                "state": "completed" if i < done and not (i >= entries - 40) else "scheduled",
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": START_NS + i * 1_000_000 + 77,
                "retired": i < done,
                "timeout_ms": 600_000,
                "is_p2p": False,
                "frames": list(frames[i % 8]),
            }
        )
    members = ", ".join(_OWN)
    config = {
        "0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))},
        "tp" + _OWN[0]: {"name": "tp" + _OWN[0], "desc": "TP", "ranks": f"[{members}]"},
        "dp" + _DATA: {"name": "dp" + _DATA, "desc": "DP", "ranks": f"[{_DATA}]"},
    }
    dump = {"version": "2.10", "comm_lib_version": "2.27.3", "pg_config": config, "pg_status": {}, "entries": rows}
    return pickle.dumps(dump, protocol=2)


def fill(data: bytes, rank: int) -> bytes:
    """The template as the dump of one rank."""
    base = rank - rank % TP
    for place, mark in enumerate(_OWN):
        data = data.replace(mark.encode(), f"{base + place:07d}".encode())
    return data.replace(_DATA.encode(), f"{rank:07d}".encode())


def sources(ranks: int, entries: int) -> list[Source]:
    """One source a rank; the rank in the middle skips a call."""
    right, odd, guilty = template(ranks, entries, False), template(ranks, entries, True), ranks // 2 + 1
    out = []
    for rank in range(ranks):
        whole = odd if rank == guilty else right

        def opened(whole: bytes = whole, rank: int = rank) -> io.BytesIO:
            return io.BytesIO(fill(whole, rank))

        out.append(Source(f"dump_{rank}", whole[:4096], opened, len(whole)))
    return out


def _watch(peak: list[int], stop: threading.Event) -> None:
    """Largest sum of resident memory of this process and its workers; shared pages count twice."""
    while not stop.wait(0.2):
        total = 0
        children = Path("/proc/self/task").glob("*/children")
        pids = ["self", *" ".join(c.read_text() for c in children).split()]
        for pid in pids:
            try:
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
            except (OSError, IndexError):
                continue
        peak[0] = max(peak[0], total)


def _bare(given: list[Source]) -> float:
    """CPU seconds of nothing but unpickling, on up to 128 dumps."""
    data = [source.open().read() for source in given[:128]]
    start = time.process_time()
    for one in data:
        pickle.loads(one)
    return (time.process_time() - start) * len(given) / len(data)


def _making(given: list[Source]) -> float:
    """CPU seconds of making the dumps, which the measured reading holds as well; real files cost next to none."""
    start = time.process_time()
    for source in given[:64]:
        source.open().read()
    return (time.process_time() - start) * len(given) / min(64, len(given))


def measure(ranks: int, entries: int) -> dict[str, Any]:
    """Seconds, CPU seconds and memory of reading and judging."""
    given, incident = sources(ranks, entries), Incident()
    bare_s, making_s = _bare(given), _making(given)
    peak, stop = [0], threading.Event()
    watcher = threading.Thread(target=_watch, args=(peak, stop), daemon=True)
    watcher.start()

    def progress(done: int, whole: int) -> None:
        if done % 1024 == 0 and done:
            sys.stderr.write(f"{done} of {whole} dumps, {time.perf_counter() - start:.0f} s\n")

    start, cpu = time.perf_counter(), time.process_time()
    flight_recorder.read_many(given, incident, progress)
    read_s = time.perf_counter() - start
    findings = diagnose(incident)
    wall_s = time.perf_counter() - start
    stop.set()
    watcher.join()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "ranks": ranks,
        "entries": entries,
        "wall_s": round(wall_s, 2),
        "read_s": round(read_s, 2),
        "judge_s": round(wall_s - read_s, 2),
        "cpu_s": round(time.process_time() - cpu + children.ru_utime + children.ru_stime, 2),
        "bare_unpickling_cpu_s": round(bare_s, 2),
        "making_dumps_cpu_s": round(making_s, 2),
        "peak_resident_bytes": peak[0],
        "finding": findings[0].kind,
        "guilty_ranks": list(findings[0].guilty_ranks),
        "right": (findings[0].kind, findings[0].guilty_ranks) == ("skipped_call", (ranks // 2 + 1,)),
    }


if __name__ == "__main__":
    words = [int(word) for word in sys.argv[1:]]
    print(json.dumps(measure(words[0] if words else 128, words[1] if len(words) > 1 else 2000), indent=1))

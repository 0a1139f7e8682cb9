"""How fast the doctor streams a log, and how much memory it needs: ``python -m bench.doctor_log_speed [--mib N]``.

The log is made here, of lines as jobs write them, from ``RANKS`` ranks interleaved: progress lines of several
frameworks, now and then a warning; at its start NCCL's INFO lines of every rank, at its end a time-out of all ranks but
one, whose traceback stands between. It is read in a fresh process, whose peak memory counts. The bytes come from the
page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

RANKS = 32
SILENT_RANK = 21
ROOT = Path(__file__).parents[1]
BLOCK_BYTES = 16 << 20
#: Share of the lines between start and end that have a word the doctor looks for ("error", "exit", ...).
SUSPICIOUS = 0.002


def progress_lines(rng: random.Random) -> Iterator[str]:
    """Lines without a finding, for ever."""
    step = 0
    while True:
        step += 1
        rank, now = (
            rng.randrange(RANKS),
            f"2026-03-04 05:{step // 60 % 60:02d}:{step % 60:02d}.{rng.randrange(1000):03d}",
        )
        loss, speed = rng.random() * 3, rng.randrange(99999)
        if rng.random() < SUSPICIOUS:
            yield f"[rank{rank}]: {now} WARNING retry {step % 7}: read error: timed out, worker {rank}\n"
        elif step % 3 == 0:
            yield (
                f"[default{rank % 8}]:[{now}] iteration {step:8d}/ 500000 | consumed samples: {step * 512} | elapsed "
                f"time per iteration (ms): {rng.random() * 900:.1f} | learning rate: 3.000E-04 | lm loss: {loss:.6E} | "
                f"grad norm: {rng.random():.3f} | number of skipped iterations: 0 | number of nan iterations: 0 |\n"
            )
        elif step % 3 == 1:
            yield f"[rank{rank}]: {now} INFO train.py:{step % 900}] step {step} loss {loss:.4f} tokens/s {speed}\n"
        else:
            actor = f"(Worker_TP{rank % 8} pid={4000 + rank})"
            yield f"{actor} INFO 03-04 05:06:07 [loggers.py:123] Avg prompt throughput: {loss:.1f} tokens/s\n"


def start_lines() -> Iterator[str]:
    """NCCL's lines of every rank."""
    for rank in range(RANKS):
        head = f"node{rank // 8}:{9000 + rank}:{9100 + rank} [{rank % 8}] NCCL INFO "
        yield f"{head}NCCL version 2.27.3+cuda12.8\n"
        yield f"{head}Using network IB\n"
        who = f"comm 0x55{rank:04x} rank {rank} nranks {RANKS} cudaDev {rank % 8} busId {rank}000 commId 0xabc"
        yield f"{head}ncclCommInitRankConfig {who} - Init START\n"
        for channel in range(16):
            peer = (rank + 1) % RANKS
            yield f"{head}Channel {channel:02d}/0 : {rank}[{rank % 8}] -> {peer}[{peer % 8}] via P2P/CUMEM\n"
        yield f"{head}ncclCommInitRankConfig {who} - Init COMPLETE\n"


def end_lines() -> Iterator[str]:
    """The time-out of all ranks but the silent one, and what that one says."""
    yield f"[rank{SILENT_RANK}]: Traceback (most recent call last):\n"
    for rank in range(RANKS):
        if rank == SILENT_RANK:
            continue
        tag = f"[rank{rank}]:[E304 05:59:59.{rank:09d} ProcessGroupNCCL.cpp"
        yield (
            f"{tag}:632] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=59958, "
            "OpType=ALLREDUCE, NumelIn=8388608, NumelOut=8388608, Timeout(ms)=600000) ran for 600077 milliseconds "
            "before timing out.\n"
        )
        yield (
            f"{tag}:2271] [PG ID 0 PG GUID 0(default_pg) Rank {rank}]  failure detected by watchdog at work "
            "sequence id: 59958 PG status: last enqueued work: 59998, last completed work: 59957\n"
        )
        if rank == 3:
            yield f'[rank{SILENT_RANK}]:   File "/job/loader.py", line 35, in load_batch\n'
    yield f"[rank{SILENT_RANK}]: ValueError: empty shard\n"


def write_log(path: Path, size_bytes: int, seed: int = 0) -> None:
    """Write a log of about ``size_bytes``."""
    rng = random.Random(seed)
    lines, made = [], 0
    for line in progress_lines(rng):
        lines.append(line)
        made += len(line)
        if made >= min(BLOCK_BYTES, size_bytes):
            break
    block = "".join(lines).encode()
    with path.open("wb") as out:
        out.write("".join(start_lines()).encode())
        while whole := block[: block.rfind(b"\n", 0, max(0, size_bytes - out.tell())) + 1]:
            out.write(whole)
        out.write("".join(end_lines()).encode())


def peak_bytes() -> int:
    """Peak memory of this program; ``ru_maxrss`` would count what the process held before it became this program."""
    status = Path("/proc/self/status").read_text() if Path("/proc/self/status").exists() else ""
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)


def read_once(path: Path) -> dict[str, float | int | bool]:
    """Read it in this process: seconds, CPU seconds, MB/s, peak memory and whether the silent rank was found."""
    from meshwright.doctor.readers.walk import read_incident

    wall, cpu = time.perf_counter(), time.process_time()
    incident = read_incident(path)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    size = path.stat().st_size
    timed_out = {f.rank for f in incident.facts if f.kind == "watchdog_timeout"}
    return {
        "bytes": size,
        "wall_s": round(wall, 2),
        "cpu_s": round(cpu, 2),
        "mb_per_s": round(size / 1e6 / wall, 1),
        "mb_per_cpu_s": round(size / 1e6 / cpu, 1),
        "peak_memory_bytes": peak_bytes(),
        "facts": len(incident.facts),
        "right": timed_out == set(range(RANKS)) - {SILENT_RANK}
        and any(f.kind == "exception" and f.rank == SILENT_RANK for f in incident.facts),
    }


def main() -> int:
    """Make the log, read it in a fresh process, print one line of JSON. Exit 1: a finding was missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of the log")
    parser.add_argument("--file", type=Path, help="read this file instead of making one")
    options = parser.parse_args()
    if options.file:
        print(json.dumps(read_once(options.file)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.log")
        write_log(path, options.mib << 20)
        words = [sys.executable, "-m", "bench.doctor_log_speed", "--file", str(path)]
        done = subprocess.run(words, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=True)
    print(done.stdout.strip())
    return 0 if json.loads(done.stdout)["right"] else 1


if __name__ == "__main__":
    sys.exit(main())

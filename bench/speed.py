"""How long ``meshwright plan`` takes from a cold start: ``make bench``, or ``bench/speed.py [--runs N] [--json FILE]``.

Every run is a fresh process. CPU time (user and system, of the child alone) says what the planner costs on any machine,
the median of the wall clock what a user waits on this one while it is as busy as it is. Byte code is cached before the
first run that counts, as ``pip install`` does it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "speed.json"

#: What is timed: a name and the words after ``meshwright``.
COMMANDS = {
    "help": "--version",
    "dense 70B, search on 2x4": (
        "plan serve llama-3.1-70b --on 2x4xA100-80G@ib-200g --isl 8000 --osl 500 --concurrency 32"
    ),
    "Qwen3-235B FP8, search on 8": (
        "plan serve Qwen/Qwen3-235B-A22B-FP8 --on 1x8xH100-SXM --isl 2000 --osl 300 --concurrency 64"
    ),
    "DeepSeek-V3, search on 4x8": (
        "plan serve deepseek-v3 --on 4x8xH100-SXM@ib-400g --isl 2000 --osl 300 --concurrency 64"
    ),
    "405B training, search on 2048x8": (
        "plan train llama-3.1-405b --on 2048x8xH100-SXM@ib-400g --seq 8192 --global-batch 2048"
    ),
    "70B training, one layout on 8x8": (
        "plan train llama-3.1-70b --on 8x8xH100-SXM@ib-400g --seq 8192 --global-batch 512 "
        "--layout tp=8,pp=4,dp=2,zero=1"
    ),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One command over all runs."""

    name: str
    command: str
    runs: int
    cpu_s_min: float
    cpu_s_median: float
    wall_s_median: float
    peak_memory_bytes: int


def run_once(words: list[str], env: dict[str, str]) -> tuple[float, float, int]:
    """``(CPU seconds, wall seconds, peak resident bytes)`` of one fresh process.

    Raises:
        RuntimeError: it ended neither with yes (0) nor with no (1).
    """
    start = time.perf_counter()
    child = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(words)} ended with {child.returncode}")
    unit = 1 if sys.platform == "darwin" else 1024
    return usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss * unit


def measure(name: str, arguments: str, runs: int, env: dict[str, str]) -> Row:
    """Time one command; the first run only fills the byte-code cache."""
    words = [sys.executable, "-m", "meshwright.cli.main", *arguments.split()]
    run_once(words, env)
    found = [run_once(words, env) for _ in range(runs)]
    cpu, wall, memory = zip(*found, strict=True)
    return Row(name, f"meshwright {arguments}", runs, min(cpu), median(cpu), median(wall), max(memory))


def commit() -> str:
    """Commit that was measured, marked where the source differs from it."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "src"], cwd=ROOT, check=False).returncode
    return head.stdout.strip() + ("+changes" if changed else "")


def machine() -> dict[str, str | int]:
    """What the figures belong to."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 0,
        "system": platform.system(),
        "python": platform.python_version(),
    }


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as cache:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPYCACHEPREFIX": cache}
        rows = [measure(name, arguments, options.runs, env) for name, arguments in COMMANDS.items()]
    print(f"{'cold start':<34} {'CPU min':>9} {'median':>9} {'wall':>9} {'memory':>10}")
    for row in rows:
        times = (row.cpu_s_min, row.cpu_s_median, row.wall_s_median)
        cells = " ".join(f"{t * 1e3:>6.0f} ms" for t in times)
        print(f"{row.name:<34} {cells} {row.peak_memory_bytes / 2**20:>6.1f} MiB")
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "load_before": round(before, 2),
        "rows": [asdict(row) for row in rows],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

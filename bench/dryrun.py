"""Dry-runs of atlas models under published layouts, with time and memory: ``python -m bench.dryrun [NAME ...]``.

Every row is ``meshwright prove MODEL --layout ... --dry`` in a fresh process: what it says, the wall clock, and the
most memory that it and all its children held at once (proportional set size: what forked processes share counts once).
The rows go to ``bench/results/dryrun.json``; rows of names that were not asked for stay as they were.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench.speed import commit, machine

RESULTS = Path(__file__).with_name("results") / "dryrun.json"
TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Case:
    """One model under one layout, and where the layout is published."""

    model: str
    layout: str
    source: str


#: One node of 8 or less as its users start it; no publication is claimed.
NODE = "one node"
CAMPAIGN = "llm-d-planner accuracy campaign (vLLM 0.19), accuracy/accuracy_report.md"
BRIDGE = "NVIDIA Megatron-Bridge performance summary"
TRTLLM = "TensorRT-LLM perf-overview.md"

CASES = (
    Case("llama-3.1-8b", "tp=2", CAMPAIGN),
    Case("llama-3.1-70b", "tp=8,dp=32", "torchtitan benchmarks/llama3_h100_202412_torchtitan.md: 256 GPUs"),
    Case("llama-3.3-70b", "pp=4", TRTLLM),
    Case("llama-3.1-405b", "tp=8,pp=16,dp=128", "The Llama 3 Herd of Models, arXiv:2407.21783, table 4: 16,384 GPUs"),
    Case("llama-3.1-405b", "tp=4,pp=16,dp=4", f"{BRIDGE}: 256 GPUs"),
    Case("qwen2.5-7b", "tp=2", CAMPAIGN),
    Case("qwen2.5-72b", "tp=8", NODE),
    Case("qwen3-14b", "tp=1", f"{CAMPAIGN} of vLLM 0.15"),
    Case("qwen3-32b", "tp=4,dp=2", NODE),
    Case("mistral-7b", "tp=2,dp=4", NODE),
    Case("mistral-large-123b", "tp=8", NODE),
    Case("gemma-3-27b", "tp=2,dp=4", NODE),
    Case("mixtral-8x7b", "tp=2", CAMPAIGN),
    Case("qwen3-30b-a3b", "tp=2,pp=2,dp=4,ep=4", "Megatron-Bridge skills/nemo-mbridge-perf-cpu-offloading: 16 GPUs"),
    Case("qwen3-235b-a22b", "tp=2,pp=8,dp=16,ep=32", f"{BRIDGE}: 256 GPUs"),
    Case("gpt-oss-120b", "dp=4,ep=4", TRTLLM),
    Case("deepseek-v3", "pp=16,dp=16,ep=8", f"{BRIDGE}: 256 GPUs"),
    Case("deepseek-v3", "tp=8,pp=16,ep=64,dp=8", "1,024 ranks with pp 16 and ep 64 of arXiv:2412.19437, section 3.2"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """What came out of one case.

    Attributes:
        wall_s: of the command. cpu_s: of all its processes, which says what it costs on a busy machine too.
        load: processes that wanted the machine's processors when it began.
        peak_bytes: of the command with all its processes.
    """

    model: str
    layout: str
    source: str
    equal: bool
    verdict: str
    first: str | None
    ranks: int
    classes: int
    seconds: dict[str, float]
    wall_s: float
    cpu_s: float
    load: float
    peak_bytes: int
    date: str
    commit: str


def family(pid: int) -> Iterator[int]:
    """A process and all below it; who ends meanwhile is left out."""
    yield pid
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return
    for task in tasks:
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in children:
            yield from family(int(child))


def held_bytes(pid: int) -> int:
    """Memory of a process and all below it; pages that several share count once."""
    total = 0
    for member in family(pid):
        try:
            rows = Path(f"/proc/{member}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(row.split()[1]) * 1024 for row in rows if row.startswith("Pss:"))
    return total


def spent(pid: int) -> dict[int, float]:
    """CPU seconds of a process and all below it, by process."""
    out = {}
    for member in family(pid):
        try:
            words = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        out[member] = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    return out


def run(case: Case) -> Row | str:
    """One case; a refusal comes back as its line."""
    words = ["prove", case.model, "--layout", case.layout, "--dry", "--json", "--timeout", f"{TIMEOUT_S}s"]
    began, peak, cpu, load = time.perf_counter(), 0, dict[int, float](), os.getloadavg()[0]
    child = subprocess.Popen(
        [sys.executable, "-m", "meshwright.cli.main", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while True:
        try:
            out, err = child.communicate(timeout=0.2)
            break
        except subprocess.TimeoutExpired:
            peak = max(peak, held_bytes(child.pid))
            cpu |= spent(child.pid)
    wall = time.perf_counter() - began
    if child.returncode not in (0, 1) or not out:
        return (err.strip().splitlines() or ["no message"])[-1]
    said = json.loads(out)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Row(
        case.model,
        case.layout,
        case.source,
        said["proven"],
        said["verdict"],
        said["first"],
        said["world"],
        said["classes"],
        said["seconds"],
        round(wall, 1),
        round(sum(cpu.values()), 1),
        round(load, 1),
        peak,
        now,
        commit(),
    )


def main() -> int:
    """Run the cases; 1 when a dry-run differs from its prediction."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("names", nargs="*", help="models to run; all when none is given")
    names = parser.parse_args().names
    wrong = 0
    for case in CASES:
        if names and case.model not in names:
            continue
        row = run(case)
        if isinstance(row, str):
            print(f"{case.model} under {case.layout}: {row}", flush=True)
            continue
        wrong += not row.equal
        if not row.equal:
            print(f"{row.first}", flush=True)
        print(f"{row.verdict}: {row.wall_s} s, {row.cpu_s} s of CPU, {row.peak_bytes / 2**20:.0f} MiB", flush=True)
        write(row)
    return int(wrong > 0)


def write(row: Row) -> None:
    """Put a row into the file, in the order of the cases."""
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {"rows": []}
    rows = {(known["model"], known["layout"]): known for known in found["rows"]}
    rows[row.model, row.layout] = asdict(row)
    order = [(case.model, case.layout) for case in CASES]
    kept = [rows[key] for key in order if key in rows]
    RESULTS.write_text(json.dumps({"machine": machine(), "rows": kept}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

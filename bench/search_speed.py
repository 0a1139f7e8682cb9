"""How fast the search over arrays is, and whether it predicts as the row ledger does (``--rows`` of them compared).

Each question runs in a process of its own on one thread: CPU and wall seconds of the whole search (imports of numpy
apart), peak memory, the size of the space, and how many legal layouts were fully costed (the predicted step, and memory
under three modes of recompute) a second: with what has to be tabulated first, and once it is. ``--rows`` layouts drawn
from all questions are predicted again row by row, and the largest relative difference of step and memory is written.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "bench" / "results" / "search_speed.json"

#: Model, cluster, engine, sequence, global batch.
QUESTIONS = {
    "DeepSeek-V3 on 2,048": ("deepseek-v3", "256x8xH100-SXM@ib-400g", "meshwright", 4096, 15360),
    "Llama 3.1 405B on 16,384": ("llama-3.1-405b", "2048x8xH100-SXM@ib-400g", "meshwright", 8192, 2048),
    "DeepSeek-V3 on 131,072": ("deepseek-v3", "16384x8xH100-SXM@ib-400g", "meshwright", 4096, 131072),
    "Qwen3-30B-A3B on 512, Megatron": ("qwen3-30b-a3b", "64x8xH100-SXM@ib-400g", "megatron", 4096, 1024),
    "Mixtral 8x7B on 256, torchtitan": ("mixtral-8x7b", "32x8xH100-SXM@ib-400g", "torchtitan", 8192, 512),
}


def ask(name: str, rows: int) -> dict[str, Any]:
    """Run one question in this process."""
    import numpy as np

    from meshwright import engines
    from meshwright.api import TRAINERS
    from meshwright.plan.search.columns import MODES
    from meshwright.plan.search.evaluate import Coster
    from meshwright.plan.search.space import space
    from meshwright.plan.search.train import search_training
    from meshwright.plan.train_engine import engine_preset
    from meshwright.specs.cluster import parse_cluster
    from meshwright.specs.hf.read import read_model
    from meshwright.specs.workload import Train

    model, on, engine, seq, batch = QUESTIONS[name]
    spec, cluster, profile = read_model(model), parse_cluster(on), engines.profile(engine)
    work, preset = Train(seq=seq, global_batch=batch), engine_preset(TRAINERS.get(profile.engine, "torch"))
    found, search = timed(lambda: search_training(spec, cluster, work, profile, preset))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    whole = space(spec, cluster, work, profile).legal
    coster = Coster(spec, profile, cluster, work, preset)
    x = whole.take(coster.scheduled(whole))
    x = x.take(coster.even(x))
    mode = np.arange(len(x)) % len(MODES)
    cost, first = timed(lambda: coster.cost(x, mode))
    memory, first_memory = timed(lambda: coster.memory(x))
    again, again_memory = timed(lambda: coster.cost(x, mode))[1], timed(lambda: coster.memory(x))[1]
    picked = random.Random(5).sample(range(len(x)), min(rows, len(x)))
    return {
        "question": name,
        "engine": profile.name,
        "devices": cluster.devices,
        "space": found.size,
        "illegal": found.illegal,
        "unfit": found.unfit,
        "costed": found.costed,
        "tight": found.tight,
        "search_cpu_s": round(search[0], 3),
        "search_wall_s": round(search[1], 3),
        "peak_memory_bytes": peak,
        "legal": len(x),
        "step_cpu_s": round(first[0], 3),
        "memory_cpu_s": round(first_memory[0], 3),
        "costed_a_second": round(len(x) / (first[0] + first_memory[0])),
        "costed_a_second_tabulated": round(len(x) / (again[0] + again_memory[0])),
        "best": str(found.best[0].layout) if found.best else "",
        "compared": len(picked),
        "largest_difference": max((_difference(coster, x, cost, memory, mode, i) for i in picked), default=0.0),
    }


def timed(run: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    """The result, and CPU and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    found = run()
    return found, (time.process_time() - cpu, time.perf_counter() - wall)


def _difference(coster: Any, x: Any, cost: Any, memory: Any, mode: Any, row: int) -> float:
    """Largest relative difference of a layout's step and memory from those predicted row by row."""
    from meshwright.plan.search.columns import MODES
    from meshwright.plan.train_memory import train_memory
    from meshwright.plan.training_time import training_time
    from meshwright.specs.placement import place

    layout, work = x.layout(row), replace(coster.work, recompute=MODES[mode[row]])
    placement = place(coster.spec, layout, coster.profile, sections=("decoder", "vision"))
    want = training_time(placement, coster.cluster, work, coster.engine).step.value
    ranks = train_memory(coster.spec, layout, coster.cluster, work, coster.engine, few=True).ranks
    most = max(r.total_bytes for r in ranks)
    return float(max(abs(cost["step_s"][row] / want - 1), abs(memory[mode[row], row] / most - 1)))


def main() -> None:
    """Ask every question, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000, help="layouts counted again row by row, over all questions")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    each = -(-options.rows // len(QUESTIONS))
    if options.one:
        print(json.dumps(ask(options.one, each)))
        return
    from bench.speed import commit, machine

    alone = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    before, rows = os.getloadavg()[0], []
    for name in QUESTIONS:
        words = [sys.executable, __file__, "--rows", str(options.rows), "--one", name]
        done = subprocess.run(words, env=alone, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout))
        row = rows[-1]
        print(
            f"{name:<32} {row['space']:>9,} layouts, {row['costed']:>8,} costed  {row['search_cpu_s']:>6.2f} s CPU  "
            f"{row['search_wall_s']:>6.2f} s  {row['peak_memory_bytes'] / 2**20:>5.0f} MiB  "
            f"{row['costed_a_second']:>8,} /s, tabulated {row['costed_a_second_tabulated']:>8,} /s; "
            f"{row['compared']:,} compared: {row['largest_difference']:.0e}"
        )
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "load_before": round(before, 2),
        "compared": sum(row["compared"] for row in rows),
        "largest_difference": max(row["largest_difference"] for row in rows),
        "rows": rows,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

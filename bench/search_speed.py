"""How fast the search over arrays is, and whether it counts as the row ledger does (``--rows`` of them compared).

Each question runs in a process of its own on one thread: CPU seconds of the whole search (imports of numpy apart), peak
memory, the size of the space, and how many legal layouts were fully costed (memory under three modes of recompute, and
the step) a second. ``--rows`` layouts drawn from all questions are counted again row by row, and the largest relative
difference of any total is written.
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
FIELDS = ("step_s", "tokens_per_s", "bytes_read", "flops", "wire_bytes", "messages")


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
    start = time.process_time()
    found = search_training(spec, cluster, work, profile, preset)
    search_s = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    whole = space(spec, cluster, work, profile).legal
    coster = Coster(spec, profile, cluster, work, preset)
    x = whole.take(coster.scheduled(whole))
    x = x.take(coster.even(x))
    mode = np.arange(len(x)) % len(MODES)
    start = time.process_time()
    cost = coster.cost(x, mode)
    cost_s = time.process_time() - start
    start = time.process_time()
    memory = coster.memory(x)
    memory_s = time.process_time() - start
    picked = random.Random(5).sample(range(len(x)), min(rows, len(x)))
    return {
        "question": name,
        "engine": profile.name,
        "devices": cluster.devices,
        "space": found.size,
        "illegal": found.illegal,
        "unfit": found.unfit,
        "costed": found.costed,
        "search_cpu_s": round(search_s, 3),
        "peak_memory_bytes": peak,
        "legal": len(x),
        "cost_cpu_s": round(cost_s, 3),
        "memory_cpu_s": round(memory_s, 3),
        "costed_a_second": round(len(x) / cost_s),
        "costed_with_memory_a_second": round(len(x) / (cost_s + memory_s)),
        "best": str(found.best[0].layout) if found.best else "",
        "compared": len(picked),
        "largest_difference": max((_difference(coster, x, cost, memory, mode, i) for i in picked), default=0.0),
    }


def _difference(coster: Any, x: Any, cost: Any, memory: Any, mode: Any, row: int) -> float:
    """Largest relative difference of a layout's totals from those of the row ledger and the row memory."""
    from meshwright.plan.search.columns import MODES
    from meshwright.plan.train_cost import train_cost
    from meshwright.plan.train_memory import train_memory
    from meshwright.specs.placement import place

    layout, work = x.layout(row), replace(coster.work, recompute=MODES[mode[row]])
    want = train_cost(place(coster.spec, layout, coster.profile), coster.cluster, work)
    differences = [abs(cost[f][row] - getattr(want, f)) / (abs(getattr(want, f)) or 1.0) for f in FIELDS]
    ranks = train_memory(coster.spec, layout, coster.cluster, work, coster.engine, few=True).ranks
    most = max(r.total_bytes for r in ranks)
    return float(max(*differences, abs(memory[mode[row], row] - most) / most))


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
            f"{row['peak_memory_bytes'] / 2**20:>5.0f} MiB  {row['costed_a_second']:>8,} /s, with memory "
            f"{row['costed_with_memory_a_second']:>8,} /s; {row['compared']:,} compared: "
            f"{row['largest_difference']:.0e}"
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

"""Trained tokens per CPU second of all ranks, side by side: ``python -m bench.training.run [--rounds N] [--steps N]``.

Contenders take turns, each in fresh processes, for some rounds; a speed is that of the median step of all rounds. CPU
seconds of all ranks together bear the load of others better than seconds do, which are noted beside them. DeepSpeed
takes part where ``MESHWRIGHT_DEEPSPEED_PYTHON`` names the Python of an environment that has it. Writes
``bench/results/training.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from bench import processes
from bench.generation.run import SMALL
from bench.speed import commit, machine
from bench.training.contenders import BATCH, LENGTH

RESULTS = processes.ROOT / "bench" / "results" / "training.json"
TIMEOUT_S = 400
#: Losses and norms of contenders that do the same agree so far, relative; all are sums in fp32.
SAME = 1e-4


@dataclass(frozen=True, slots=True)
class Contender:
    """A program, how it is laid out, what it does, and its ranks."""

    name: str
    kind: str
    how: str
    work: str
    ranks: int


def _own(layout: str, work: str, ranks: int, micro: int = BATCH) -> Contender:
    return Contender(f"own {layout}, {work}", "own", f"{layout},mbs={micro}", work, ranks)


CONTENDERS = (
    _own("tp=1", "gradients", 1),
    Contender("transformers", "transformers", "1", "gradients", 1),
    _own("tp=2", "gradients", 2),
    Contender("transformers tp=2", "transformers", "tp=2", "gradients", 2),
    *(_own(f"dp=2,zero={zero}", "gradients", 2, BATCH // 2) for zero in (0, 1, 2)),
    _own("dp=2,zero=3,param_dtype=f32", "gradients", 2, BATCH // 2),
    Contender("transformers FSDP2", "transformers", "fsdp=2", "gradients", 2),
    *(_own(f"dp=2,zero={zero}", "step", 2, BATCH // 2) for zero in (1, 2)),
    _own("dp=2,zero=3,param_dtype=f32", "step", 2, BATCH // 2),
    *(Contender(f"DeepSpeed ZeRO-{zero}", "deepspeed", str(zero), "step", 2) for zero in (1, 2, 3)),
    _own("pp=2", "gradients", 2, 1),
    Contender("torch pipelining 1F1B", "pipelining", "1F1B", "gradients", 2),
)
#: What is held against what, and the ratio aimed at.
AIMS = (
    ("own tp=1, gradients", "transformers", 1.5),
    ("own tp=2, gradients", "transformers tp=2", 1.9),
    *((f"own dp=2,zero={zero}, gradients", "transformers FSDP2", 1.4) for zero in (0, 1, 2)),
    ("own dp=2,zero=3,param_dtype=f32, gradients", "transformers FSDP2", 1.4),
    ("own dp=2,zero=1, step", "DeepSpeed ZeRO-1", 1.4),
    ("own dp=2,zero=2, step", "DeepSpeed ZeRO-2", 1.4),
    ("own dp=2,zero=3,param_dtype=f32, step", "DeepSpeed ZeRO-3", 1.4),
    ("own pp=2, gradients", "torch pipelining 1F1B", 1.3),
)


@dataclass(slots=True)
class Found:
    """What the runs of a contender gave."""

    seconds: list[float]
    cpu_seconds: list[float]
    loss: float = 0.0
    norm: float = 0.0


def command(c: Contender, model: Path, steps: int) -> list[str] | None:
    """Words of a contender's process; None where it is not installed."""
    python = os.environ.get("MESHWRIGHT_DEEPSPEED_PYTHON") if c.kind == "deepspeed" else sys.executable
    if not python:
        return None
    words = ["-m", "bench.training.contenders", c.kind, str(model), c.how, c.work, str(steps)]
    if c.kind != "own" and c.ranks > 1:
        return [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={c.ranks}", *words]
    return [python, *words]


def run(c: Contender, model: Path, steps: int) -> dict[str, Any] | None:
    """The line of one process; None when it is not installed or failed (said on the standard error)."""
    words = command(c, model, steps)
    if words is None:
        print(f"{c.name}: MESHWRIGHT_DEEPSPEED_PYTHON is not set; left out", file=sys.stderr)
        return None
    ended = processes.run(words, {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}, TIMEOUT_S)
    if ended.code is None:
        processes.complain(c.name, f"not done in {TIMEOUT_S} s")
    for line in ended.lines:
        if line.startswith('{"seconds"'):
            found: dict[str, Any] = json.loads(line)
            return found
    processes.complain(c.name, ended.last_error)
    return None


def rows(found: dict[str, Found]) -> list[dict[str, object]]:
    """A row for every aim of which both sides ran."""
    out: list[dict[str, object]] = []
    for own, other, aim in AIMS:
        if own not in found or other not in found:
            continue
        a, b = found[own], found[other]
        ratio = median(b.cpu_seconds) / median(a.cpu_seconds)
        near = abs(a.loss - b.loss) <= SAME * b.loss and abs(a.norm - b.norm) <= SAME * b.norm
        out.append({"own": own, "other": other, "ratio": ratio, "aim": aim, "same_numbers": near or b.norm == 0.0})
    return out


def main() -> None:
    """Run the rounds, print a table of ratios, write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default="", help="part of the names of the contenders to run")
    options = parser.parse_args()
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as scratch:
        from meshwright.runtime.checkpoint import write_random

        model = Path(scratch) / "llama-12m"
        write_random(SMALL, model, seed=0)
        for number in range(options.rounds):
            for c in CONTENDERS:
                if options.only not in c.name:
                    continue
                print(f"round {number + 1} of {options.rounds}: {c.name}", file=sys.stderr)
                line = run(c, model, options.steps)
                if line is not None:
                    kept = found.setdefault(c.name, Found([], []))
                    kept.seconds += line["seconds"]
                    kept.cpu_seconds += line["cpu_seconds"]
                    kept.loss, kept.norm = line["loss"], line["norm"]
    tokens = BATCH * LENGTH
    speeds = {
        name: {
            "tokens_per_cpu_s": round(tokens / median(f.cpu_seconds), 1),
            "tokens_per_s": round(tokens / median(f.seconds), 1),
            "fastest_tokens_per_cpu_s": round(tokens / min(f.cpu_seconds), 1),
            "loss": f.loss,
            "norm": f.norm,
        }
        for name, f in found.items()
    }
    for name, speed in speeds.items():
        print(f"{name:45} {speed['tokens_per_cpu_s']:8.0f} tokens per CPU second")
    table = rows(found)
    for row in table:
        print(f"{row['own']:45} / {row['other']:22} {row['ratio']:.2f} (aim {row['aim']})")
    if options.only:
        return
    result = {
        "made_by": "python -m bench.training.run",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "load_average": os.getloadavg(),
        "batch": [BATCH, LENGTH],
        "rounds": options.rounds,
        "steps": options.steps,
        "speeds": speeds,
        "ratios": table,
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

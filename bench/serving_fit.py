"""The serving formulas over arrays of counted runs, with the constants as a dictionary.

The same formulas as ``plan.serving_time`` (a test holds them equal); constants are named ``a.b.c`` as in
``plan/constants/timing.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bench.serving_work import GENERATIONS, KINDS, Array, Counts
from meshwright.plan.serving_time_pools import FULL_LANES
from meshwright.plan.timing.closed_loop import Host, Load, Steps, closed_loop, pools
from meshwright.plan.timing.step_time import batched

ENGINES = ("trtllm", "vllm", "sglang")
#: Prompts a user sends in one benchmark: a tenth of them meets the burst of the start.
PROMPTS = 10.0
#: Tokens of one step that prompts may fill.
BUDGET = 8192.0
Constants = Mapping[str, float]
TIMING = Path(__file__).resolve().parent.parent / "src" / "meshwright" / "plan" / "constants" / "timing.json"


def _by(names: tuple[str, ...], c: Constants, form: str) -> Array:
    return np.array([c[form.format(n)] for n in names])


def step_seconds(c: Constants, counts: Counts) -> tuple[Array, Array, Array]:
    """Seconds of every step without the host's launches, the launches, and the seconds of experts."""
    k = counts.kernels
    number, kind, gen = k[:, 0].astype(int), k[:, 1].astype(int), k[:, 2].astype(int)
    read, compute, width, experts, held, spread, count = (k[:, i] for i in range(3, 10))
    fp4, unpacked, fp8 = k[:, 10], k[:, 11], k[:, 12]
    memory = np.array([[c[f"memory.{g}.{n}"] for n in KINDS] for g in GENERATIONS])[gen, kind]
    effort = np.array([[c[f"compute.{g}.{n}"] for n in KINDS] for g in GENERATIONS])[gen, kind]
    dense = kind == 0
    memory = memory * np.where(dense & (fp4 > 0), c["memory.fp4"], 1) * np.where(unpacked > 0, c["unpacked"], 1)
    effort = effort * np.where(fp4 > 0, c["compute.fp4"], 1.0) * np.where(fp8 > 0, c["compute.fp8"], 1.0)
    touched = held * (1 - (1 - 0.9999 * experts / np.maximum(held, 1)) ** c["skew"])
    busiest = np.where(spread > 0, np.minimum(touched + c["imbalance"] * np.sqrt(touched), held), touched)
    read = read * np.where(experts > 0, busiest / np.maximum(experts, 1), 1.0)
    ramp = np.where(kind == KINDS.index("experts"), c["ramp.experts"], c["ramp"])
    compute = compute * np.where(width > 0, 1 + ramp / np.maximum(width, 1), 1.0)
    rows = k[:, 13]
    compute = compute * np.where(rows > 0, 1 + c["tile"] / np.maximum(rows, 1e-3), 1.0)
    p = c["sharpness"]
    seconds = ((read / memory) ** p + (compute / effort) ** p) ** (1 / p) * count
    total = np.bincount(number, seconds, len(counts.steps))
    of_experts = np.bincount(number[kind == 1], seconds[kind == 1], len(counts.steps))
    m = counts.messages
    if len(m):
        at, mgen = m[:, 0].astype(int), m[:, 1].astype(int)
        nccl, alpha, top, own, times = (m[:, i] for i in range(2, 7))
        share = _by(GENERATIONS, c, "small.{}")[mgen]
        wire = np.where(own > 0, np.minimum(nccl, share * alpha + top), nccl) * times
        total = total + np.bincount(at, wire, len(counts.steps))
    s = counts.steps
    moe = _by(GENERATIONS, c, "expert_launches.{}")[s[:, 0].astype(int)]
    return total + s[:, 2] * c["passes"], s[:, 1] + s[:, 6] * moe + s[:, 7] * c["quantizing"], of_experts


def predict(c: Constants, counts: Counts) -> tuple[Array, Array]:
    """TTFT and TPOT in seconds of every run."""
    work, launches, experts = step_seconds(c, counts)
    runs, i = counts.runs, counts.info
    engine = np.array([ENGINES.index(r.engine) if r.engine in ENGINES else 1 for r in runs])
    launch, eager, request, sequence, idle = (
        _by(ENGINES, c, f"{n}.{{}}")[engine] for n in ("launch", "eager", "request", "sequence", "eager_decode")
    )
    seqs = i["batch"]
    undeclared = np.array([r.eager for r in runs])
    gain = np.where([r.speculative for r in runs], c["accepted"], 1.0)
    fixed, alone = ~np.array([r.uniform for r in runs]), engine == ENGINES.index("sglang")
    pooled = np.array([r.prefill is not None for r in runs])

    def graph(at: Array, n: Array) -> Array:
        seconds: Array = work[at] + launches[at] * launch + c["step"] + batched(n, c["sequences"]) * sequence
        return seconds

    def decoded(at: Array, n: Array) -> Array:
        return np.where(undeclared, np.maximum(graph(at, n), launches[at] * idle), graph(at, n)) / gain

    plain, prompt = graph(counts.dec, seqs), graph(counts.pre, seqs * 0)
    each = np.maximum(graph(counts.mix, seqs) - plain, 0.1 * prompt)
    floor = launches[counts.mix] * eager * np.ceil(i["isl"] / BUDGET)
    dec, low = decoded(counts.dec, seqs), decoded(counts.low, np.maximum(1, seqs // 4))
    wait = np.where([r.polled for r in runs], np.where(i["users"] < 16, 5.0, 15.0), 0.5)
    wait = wait + np.where([r.dp_waits for r in runs], c["dp_wait"], 0.0)
    host = Host(request, wait, c["queue"])
    load = Load(
        seqs, i["users"] / (i["dp"] * i["workers"]), i["isl"], i["osl"], BUDGET, alone * 1.0,
        np.where(fixed & alone, 1.0, 1.0 / PROMPTS), np.where(fixed & ~alone, c["cluster"], 0.0),
    )  # fmt: skip
    t = closed_loop(Steps(dec, low, prompt, each, floor), load, host, np.maximum, np.minimum)
    solo = prompt - experts[counts.pre] * (1 - 1 / i["each_dp"])
    lanes = Steps(dec, low, solo + (prompt - solo) * np.minimum(i["users"] / i["lanes"] / FULL_LANES, 1.0), each, floor)
    move = _by(ENGINES, c, "transfer.{}")[engine] + i["kv_bytes"] / c["transfer_gb_s"] / 1e9
    p = pools(
        lanes, i["users"], i["lanes"], i["dp"] * i["workers"], i["osl"], move, Host(request, 0.5, c["queue"]),
        1.0 / PROMPTS, np.maximum, np.minimum,
    )  # fmt: skip
    return np.asarray(np.where(pooled, p.ttft, t.ttft)), np.asarray(np.where(pooled, p.tpot, t.tpot))


def residuals(c: Constants, counts: Counts) -> tuple[Array, Array]:
    """Log of predicted over measured TTFT and TPOT."""
    ttft, tpot = predict(c, counts)
    return np.log(ttft / np.array([r.ttft_s for r in counts.runs])), np.log(
        tpot / np.array([r.tpot_s for r in counts.runs])
    )


#: Constant -> (prior value, log spread of the prior). A spread of 0: not fitted. The reasons stand in the file.
PRIORS: dict[str, tuple[float, float]] = {
    name: (entry["prior"], entry["spread"]) for name, entry in json.loads(TIMING.read_text())["constants"].items()
}


def loss(c: Constants, counts: Counts, weights: Array, strength: float = 1.0) -> float:
    """Mean capped |log error| of TPOT and TTFT, and what the constants lie off their priors."""
    first, each = residuals(c, counts)
    data = np.minimum(np.abs(each), 0.6) + 0.4 * np.minimum(np.abs(first), 1.0)
    penalty = sum((np.log(c[n] / p) / s) ** 2 for n, (p, s) in PRIORS.items() if s)
    return float((data * weights).sum() / weights.sum() + strength * 0.001 * penalty)


def fit(counts: Counts, weights: Array, start: Constants | None = None, rounds: int = 4) -> dict[str, float]:
    """Coordinate descent in logarithms."""
    c = {n: p for n, (p, _) in PRIORS.items()} | dict(start or {})
    best = loss(c, counts, weights)
    size = 0.2
    for _ in range(rounds):
        for name, (_, spread) in PRIORS.items():
            if not spread:
                continue
            for sign in (1, -1):
                moved = False
                while True:
                    trial = {**c, name: c[name] * float(np.exp(sign * size))}
                    found = loss(trial, counts, weights)
                    if found >= best - 1e-6:
                        break
                    c, best, moved = trial, found, True
                if moved:
                    break
        size *= 0.6
    return c

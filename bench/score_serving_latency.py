"""Score TTFT and TPOT of measured serving runs, and TensorRT-LLM's offline throughput, against the predictions.

Rows: ``serving_latency.csv`` cleaned by ``serving_rows`` and ``ground_truth.csv``. The path scored is the one that
``plan serve`` takes (``plan.serving_time``). Peer: ``peer_aiconfigurator_0.12.csv`` on the same ids.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.scoring import ScoreRow, summarize
from bench.serving_rows import Pool, Run, family, read_runs
from bench.serving_specs import cluster_for, cluster_of, place_pool, spec_of
from bench.serving_work import capacity, lengths, worker
from meshwright.errors import MeshwrightError
from meshwright.plan.serve_memory import serve_memory
from meshwright.plan.serving_time import ServingTime, log_width, serving_time
from meshwright.plan.serving_time_pools import Pool as Side
from meshwright.plan.serving_time_pools import pool_time
from meshwright.plan.serving_time_steps import Conditions
from meshwright.plan.timing.compute import constants
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve

FILE = "serving_latency.csv"
PEER = "peer_aiconfigurator_0.12.csv"


def conditions_of(run: Run) -> Conditions:
    """What the run's launch script and benchmark set."""
    polled = (10.0 if run.users < 16 else 30.0) if run.polled else 1.0
    return Conditions(
        equal_lengths=not run.uniform,
        poll_steps=polled,
        dp_wait_steps=constants()["dp_wait"] if run.dp_waits else 0.0,
    )


def predicted(run: Run, known: dict[object, int]) -> ServingTime:
    """Prediction for one run.

    Raises:
        MeshwrightError: the model is not known, or no engine can be asked for these degrees.
    """
    isl, osl = lengths(run)
    settings = ServeSettings(speculative=run.speculative, speculative_tokens=2, enforce_eager=run.eager)
    pool = run.decode
    placement, cluster = place_pool(run.model, run.precision, run.engine, worker(pool)), cluster_for(run, pool)
    users = max(1, -(-run.users // pool.workers))
    if run.prefill is not None:
        before = run.prefill
        source = place_pool(run.model, run.precision, run.engine, worker(before))
        sides = Side(source, cluster_for(run, before), before.workers), Side(placement, cluster, pool.workers)
        return pool_time(*sides, Serve(isl=isl, osl=osl, concurrency=run.users), settings)
    held = capacity(placement, cluster, isl, osl, known)
    work = Serve(isl=isl, osl=osl, concurrency=users)
    return serving_time(placement, cluster, work, held, settings, conditions_of(run))


def label(run: Run) -> str:
    """Undeclared condition of a run; empty for a plain one."""
    return "speculative" if run.speculative else "eager" if run.eager else "cold start" if run.cold else ""


def name_of(run: Run) -> str:
    """Enough to find a run again."""
    tail = f" {label(run)}" if label(run) else ""
    return f"{run.id} C={run.users} {run.isl}+{run.osl}{tail}"


def rows(truth: Path) -> list[ScoreRow]:
    """TTFT and TPOT of every usable run of the folder.

    Raises:
        FileNotFoundError: the folder has no ``serving_latency.csv``.
    """
    runs, _ = read_runs(truth / FILE)
    known: dict[object, int] = {}
    found: list[ScoreRow] = []
    for run in runs:
        try:
            time, reason = predicted(run, known), label(run)
        except MeshwrightError as error:
            time, reason = None, str(error)[:100]
        for metric, measured in (("TTFT", run.ttft_s), ("TPOT", run.tpot_s)):
            value = None if time is None else (time.ttft if metric == "TTFT" else time.tpot).value
            source = f"serving {run.mode}: {metric}"
            found.append(ScoreRow(source, run.family, name_of(run), metric, value, measured, "s", reason))
    return found


def rows_with_peer(truth: Path) -> list[ScoreRow]:
    """``rows``, and the peer beside them on the ids that it was asked where its answers are there."""
    own = rows(truth)
    return own + (peer_rows(truth, own) if (truth / PEER).is_file() else [])


# -- TensorRT-LLM's offline throughput ------------------------------------------------------------------------------

THROUGHPUT = "TensorRT-LLM perf-overview"
GPUS = {
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "B200": "b200_sxm",
    "GB200": "gb200",
    "RTX6000Pro": "rtx_pro_6000_server",
}
#: Largest batch of trtllm-bench (``--max_batch_size`` of its heuristics).
MAX_BATCH = 2048
ALIASES = {"Llama-4-Scout": "Llama-4-Scout-17B-16E-Instruct", "Llama-4-Maverick": "Llama-4-Maverick-17B-128E-Instruct",
           "DeepSeek-R1-0528": "DeepSeek-R1", "GPT-OSS-120B": "gpt-oss-120b", "GPT-OSS-20B": "gpt-oss-20b"}  # fmt: skip


#: How these rows were run, from the pages that they cite (perf-overview.md of TensorRT-LLM, "Reproducing Benchmarked
#: Results", commits 00f3768 and 03e27c7): requests of a run by lengths; a KV cache of 95 % of the memory that is free;
#: attention data parallelism for every mixture of experts (its "TP8" is what the later page calls "DEP8": the same
#: measurements within 1 %). Requests of one length are only admitted with room for all of it (the scheduler's
#: default, GUARANTEED_NO_EVICT).
REQUESTS = {
    (128, 128): 30000, (128, 2048): 3000, (128, 4096): 1500, (500, 2000): 3000, (1000, 1000): 3000,
    (1000, 2000): 1500, (2048, 128): 3000, (2048, 2048): 1500, (5000, 500): 1500, (20000, 2000): 1000,
    (1024, 1024): 3000, (8192, 1024): 1500, (1024, 8192): 1500, (32768, 1024): 1000, (1024, 32768): 1000,
}  # fmt: skip
CACHE_SHARE = 0.95


def throughput_pool(row: Mapping[str, str], mixture: bool) -> Pool:
    """Degrees of a row; a mixture of experts with one stage spreads attention as replicas (see ``REQUESTS``)."""
    tp, pp, dp, ep = (int(row.get(axis) or 1) for axis in ("tp", "pp", "dp", "ep"))
    return Pool(1, 1, tp, 1, tp) if mixture and pp == dp == 1 and tp > 1 else Pool(tp, pp, dp, 1, ep)


def throughput_rows(truth: Path) -> list[ScoreRow]:
    """Output tokens a second of ``trtllm-bench`` with all requests sent at once.

    Raises:
        FileNotFoundError: the folder has no ``ground_truth.csv``.
    """
    with (truth / "ground_truth.csv").open(newline="") as file:
        return [_throughput(row) for row in csv.DictReader(file) if row["source"] == THROUGHPUT]


def _throughput(row: Mapping[str, str]) -> ScoreRow:
    measured = float(row["value"]) * (int(row["n_gpus"]) if row["unit"].endswith("GPU") else 1)
    name = f"{row['model']} {row['gpu']}x{row['n_gpus']} {row['isl']}+{row['osl']} tp={row['tp']} pp={row['pp']}"
    model = ALIASES.get(row["model"], row["model"])
    value, reason = None, ""
    try:
        pool = throughput_pool(row, spec_of(model, row["dtype"]).moe is not None)
        placement = place_pool(model, row["dtype"], "trtllm", worker(pool))
        cluster = cluster_of(GPUS[row["gpu"]], pool.devices)
        isl, osl = int(row["isl"]), int(row["osl"])
        memory = serve_memory(placement, cluster, Serve(isl=isl, osl=osl), ServeSettings(utilization=CACHE_SHARE))
        held = min(memory.max_requests, MAX_BATCH * pool.dp, REQUESTS.get((isl, osl), memory.max_requests))
        if held < 1:
            reason = "the caches hold no request of this length"
        else:
            work = Serve(isl=isl, osl=osl, concurrency=held)
            time = serving_time(placement, cluster, work, held, ServeSettings(), Conditions(prompts_per_user=1000))
            value = time.tokens_per_s.value
    except MeshwrightError as error:
        reason = str(error)[:100]
    return ScoreRow(
        "serving throughput: TensorRT-LLM", family(model), name, "tokens/s", value, measured, "tokens/s", reason
    )


# -- the peer ---------------------------------------------------------------------------------------------------------


def peer_rows(truth: Path, ours: Sequence[ScoreRow]) -> list[ScoreRow]:
    """The peer's answers, and ours, on the ids that it was asked; its unanswered ids stay unanswered.

    Raises:
        FileNotFoundError: the folder has no file of the peer.
    """
    with (truth / PEER).open(newline="") as file:
        asked = {row["id"]: row for row in csv.DictReader(file)}
    found = []
    for row in ours:
        identity = row.name.partition(" ")[0]
        if identity not in asked:
            continue
        text = asked[identity][f"predicted_{row.metric.lower()}_ms"]
        value = float(text) / 1e3 if text else None
        kind = row.source.partition(":")[0]
        shared = f"{kind}, ids the peer was asked: {row.metric}"
        found.append(replace(row, source=f"{shared}: aiconfigurator 0.12", predicted=value))
        found.append(
            replace(row, source=f"{shared}: ours on the answered ones", predicted=row.predicted if text else None)
        )
    return found


# -- left out, and intervals -----------------------------------------------------------------------------------------

#: Fewer runs than this (the committed sample) are scored but not refitted.
ENOUGH_RUNS = 400


def by_system(truth: Path, scored: Sequence[ScoreRow]) -> list[str]:
    """One line a model family, engine and system: median and 90th percentile of the absolute errors, in percent."""
    runs, _ = read_runs(truth / FILE)
    where = {name_of(r): f"{r.mode[:3]} {r.family} {r.engine} {r.system}" for r in runs}
    groups: dict[str, dict[str, list[ScoreRow]]] = {}
    for row in scored:
        if row.name in where and ", ids" not in row.source:
            groups.setdefault(where[row.name], {}).setdefault(row.metric, []).append(row)
    lines = [f"{'mode, family, engine, system':44} {'runs':>5}  TPOT median    p90   TTFT median    p90"]
    for group, metrics in sorted(groups.items()):
        cells = []
        for metric in ("TPOT", "TTFT"):
            s = summarize(metrics[metric])
            cells.append(f"{100 * (s.median or 0):11.1f} {100 * (s.p90 or 0):6.1f}")
        lines.append(f"{group:44} {len(metrics['TPOT']):5d}  {cells[0]}   {cells[1]}")
    return lines


def held_out(truth: Path) -> list[str]:
    """Errors with every family and every system left out of a refit, and how many of these rows the stated intervals
    cover (``fit_serving --quick``)."""
    from bench.fit_serving import left_out, table
    from bench.serving_work import collect

    runs, _ = read_runs(truth / FILE)
    if len(runs) < ENOUGH_RUNS:
        return [f"{len(runs)} runs are too few to refit; at least {ENOUGH_RUNS} are needed"]
    counts = collect(runs)
    lines = []
    for what in ("family", "system"):
        ttft, tpot = left_out(counts, lambda r, what=what: getattr(r, what), 6, 2)  # type: ignore[misc]
        lines.append(table(f"serving, {what} left out of the fit", counts, ttft, tpot, lambda r: r.family))
        lines += coverage(runs, {"ttft": ttft, "tpot": tpot})
    return lines


def coverage(runs: Sequence[Run], logs: Mapping[str, Any]) -> list[str]:
    """Share of rows whose measurement lies inside the interval around the left-out prediction, by family."""
    groups: dict[str, dict[str, list[bool]]] = {}
    for i, run in enumerate(runs):
        moe = place_pool(run.model, run.precision, run.engine, worker(run.decode)).spec.moe is not None
        for metric, residual in logs.items():
            width = log_width(metric, run.mode, moe, "calibrated")
            for group in (run.mode, f"{run.mode} {run.family}"):
                groups.setdefault(group, {}).setdefault(metric, []).append(abs(residual[i]) <= width)
    lines = ["share of these rows inside the stated 80 % intervals"]
    for group, metrics in sorted(groups.items()):
        shares = "  ".join(f"{m.upper()} {100 * sum(v) / len(v):5.1f} %" for m, v in sorted(metrics.items()))
        lines.append(f"  {group:34} {len(metrics['tpot']):5d}  {shares}")
    return lines

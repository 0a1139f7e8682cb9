"""Counted work of measured serving rows as arrays, so that many constants can be tried on the same counts.

Every run has steps (a decode step, the step that has a prompt beside it, the prompt alone); every step has kernels and
messages (``plan.timing.step.Work``). They are laid out flat, with the step they belong to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.serving_rows import Pool, Run
from bench.serving_specs import cluster_for, place_pool
from meshwright.plan.cores import Batch
from meshwright.plan.products import held
from meshwright.plan.serve_memory import serve_memory
from meshwright.plan.timing.collective import curve, joined, table
from meshwright.plan.timing.compute import generation, peak_flops, unit_dtype
from meshwright.plan.timing.step import Work, contexts, step_work, together
from meshwright.specs.cluster import Cluster
from meshwright.specs.placement import Placement
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve

#: Mean share of the nominal length where lengths are uniform on [0.8, 1] of it.
UNIFORM = 0.9
#: Share of the device that published SGLang scripts give the engine (``--mem-fraction-static`` 0.9 and more).
SGLANG_SHARE = 0.92
KINDS = ("dense", "experts", "attention", "light")
GENERATIONS = ("hopper", "blackwell")
Array = np.ndarray[Any, Any]
#: Steps of a run: decoding, decoding a quarter of the requests, a prompt beside them, a prompt alone.
STEPS = ("dec", "low", "mix", "pre")


@dataclass
class Flat:
    """Columns of kernels, messages and steps while they are collected."""

    kernels: list[tuple[float, ...]] = field(default_factory=list)
    messages: list[tuple[float, ...]] = field(default_factory=list)
    steps: list[tuple[float, ...]] = field(default_factory=list)

    def add(self, work: Work, cluster: Cluster, prompt: bool) -> int:
        """Append one step; returns its number."""
        number, device = len(self.steps), cluster.device
        gen = GENERATIONS.index(generation(device))
        for k in work.kernels:
            unit = unit_dtype(device, k.dtype)
            unpacked = k.dtype == "fp4" and unit != "fp4"
            self.kernels.append((
                number, KINDS.index(k.kind), gen, k.moved_bytes / device.bandwidth_bytes_s,
                k.flops / peak_flops(device, k.dtype), k.width, k.experts, k.held, k.spread, k.repeats,
                k.dtype == "fp4" and not unpacked, unpacked, k.dtype == "f8_e4m3", k.rows,
            ))  # fmt: skip
        for m in work.messages:
            c = curve(m.op, m.wiring, cluster)
            own = m.op == "all_reduce" and joined(m.wiring, cluster.inter) and cluster.intra.kind == "nvswitch"
            own = own and m.payload_bytes <= table()["small"]["limit_bytes"]
            top = 536870912.0
            self.messages.append((
                number, gen, c.seconds(m.payload_bytes), c.seconds(512.0),
                m.payload_bytes / top * c.seconds(top) / table()["small"]["bandwidth"], own, m.repeats,
                m.op == "all_to_all",
            ))  # fmt: skip
        self.steps.append((
            gen, work.launches, work.passes_bytes / device.bandwidth_bytes_s, work.requests, float(prompt),
            float(len(work.messages) > 0), work.expert_launches, work.quantizing,
        ))  # fmt: skip
        return number


@dataclass(frozen=True)
class Counts:
    """All runs as arrays (see ``collect``); ``dec``, ``mix``, ``pre``: numbers of their steps."""

    runs: list[Run]
    kernels: Array
    messages: Array
    steps: Array
    dec: Array
    low: Array
    mix: Array
    pre: Array
    info: dict[str, Array]


def lengths(run: Run) -> tuple[int, int]:
    """Mean input and output tokens of a run."""
    share = UNIFORM if run.uniform else 1.0
    return round(run.isl * share), max(1, round(run.osl * share))


def capacity(placement: Placement, cluster: Cluster, isl: int, osl: int, known: dict[Any, int]) -> int:
    """Requests that the caches of one worker hold in the mean over their lives: half the output is written."""
    key = (id(placement), cluster.device.name, isl, osl)
    if key not in known:
        settings = ServeSettings(utilization=SGLANG_SHARE if placement.profile.engine == "sglang" else None)
        known[key] = serve_memory(placement, cluster, Serve(isl=isl, osl=max(1, osl // 2)), settings).max_requests
    return known[key]


def _count(flat: Flat, placement: Placement, cluster: Cluster, decode: Batch | None, prompt: Batch | None) -> int:
    first = placement.classes[0].coordinate
    own = held(placement, first, {})
    steps = [contexts(placement, ServeSettings(), batch) for batch in (decode, prompt) if batch is not None]
    step = together(*steps) if len(steps) > 1 else steps[0]
    work = step_work(placement, cluster.devices_per_node, own, first.pp, first, step)
    return flat.add(work, cluster, prompt is not None)


def collect(runs: Sequence[Run]) -> Counts:
    """Count the steps of all runs."""
    flat = Flat()
    known: dict[Any, int] = {}
    names = ("users", "batch", "isl", "osl", "dp", "workers", "lanes", "each_dp", "cap", "kv_bytes")
    info: dict[str, list[float]] = {name: [] for name in names}
    at: dict[str, list[int]] = {"dec": [], "low": [], "mix": [], "pre": []}
    for run in runs:
        isl, osl = lengths(run)
        pool = run.decode
        placement, cluster = place_pool(run.model, run.precision, run.engine, worker(pool)), cluster_for(run, pool)
        replicas = pool.dp * pool.workers
        asked = max(1, -(-run.users // replicas))
        cap = max(1, capacity(placement, cluster, isl, osl, known) // pool.dp)
        batch = asked if run.prefill else min(asked, cap)
        new = 3 if run.speculative else 1
        past = isl + osl // 2
        at["dec"].append(_count(flat, placement, cluster, Batch("decode", batch, new, past), None))
        small = max(1, batch // 4)
        at["low"].append(_count(flat, placement, cluster, Batch("decode", small, new, past), None))
        before = run.prefill or pool
        source, sender = place_pool(run.model, run.precision, run.engine, worker(before)), cluster_for(run, before)
        prompt = Batch("prefill", 1, isl)
        at["pre"].append(_count(flat, source, sender, None, prompt))
        at["mix"].append(
            _count(flat, placement, cluster, Batch("decode", batch, new, past), prompt)
            if run.prefill is None
            else at["pre"][-1]
        )
        row = {
            "users": run.users, "batch": batch, "isl": isl, "osl": osl, "dp": pool.dp, "workers": pool.workers,
            "lanes": before.dp * before.workers, "each_dp": before.dp, "cap": cap,
            "kv_bytes": isl * sum(
                a.cached_values_per_token for layer in placement.spec.layers if (a := layer.attention)
            ) * 2.0,
        }  # fmt: skip
        for name in names:
            info[name].append(float(row[name]))
    return Counts(
        runs=list(runs),
        kernels=np.array(flat.kernels, float),
        messages=np.array(flat.messages, float),
        steps=np.array(flat.steps, float),
        **{name: np.array(at[name]) for name in STEPS},
        info={name: np.array(values) for name, values in info.items()},
    )


def subset(counts: Counts, chosen: Sequence[int]) -> Counts:
    """Only some runs, with only their steps."""
    picked = np.array(list(chosen), int)
    at = {name: getattr(counts, name)[picked] for name in STEPS}
    used = np.unique(np.concatenate(list(at.values())))
    place = np.full(len(counts.steps), -1)
    place[used] = np.arange(len(used))

    def rows(table: Array) -> Array:
        kept: Array = table[place[table[:, 0].astype(int)] >= 0].copy()
        kept[:, 0] = place[kept[:, 0].astype(int)]
        return kept

    return Counts(
        runs=[counts.runs[i] for i in picked],
        kernels=rows(counts.kernels),
        messages=rows(counts.messages),
        steps=counts.steps[used],
        **{name: place[numbers] for name, numbers in at.items()},
        info={name: values[picked] for name, values in counts.info.items()},
    )


def worker(pool: Pool) -> Pool:
    """The pool without what does not change its placement, so that placements are shared."""
    return Pool(pool.tp, pool.pp, pool.dp, pool.moe_tp, pool.moe_ep)

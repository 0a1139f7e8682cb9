"""The first line of the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.plan.candidates import bound_of
from meshwright.plan.memory import ServeMemory
from meshwright.plan.plan import Candidate, Motive
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout, product
from meshwright.specs.model import ModelSpec
from meshwright.specs.rules import Rule
from meshwright.specs.units import gib
from meshwright.specs.workload import Serve, Train

if TYPE_CHECKING:
    from meshwright.plan.search.serve_pools import SplitFound

MOTIVES = {
    "capacity": "capacity (it does not fit on fewer)",
    "throughput": "throughput (it fits one device; replicas make it faster)",
    "latency": "latency (it fits one device; the split makes a token faster)",
}


def asked(workload: Serve) -> str:
    """``"32 requests of 8,000 + 500 tokens"``."""
    n = workload.concurrency
    count = "requests" if n is None else "one request" if n == 1 else f"{n:,} requests"
    return f"{count} of {workload.isl:,} + {workload.osl:,} tokens"


def serve_verdict(spec: ModelSpec, cluster: Cluster, workload: Serve, chosen: Candidate, motive: Motive) -> str:
    """Use this layout, how much it serves within the targets, and the reason in a word."""
    devices, copies = chosen.layout.world * chosen.copies, chosen.copies
    of_all = f" of {cluster.devices}" if devices != cluster.devices else ""
    judged = workload.tpot_s is not None or workload.ttft_s is not None
    what, within = asked(workload), ""
    if judged and chosen.cost.predicted is not None and isinstance(chosen.workload, Serve):
        if workload.concurrency is None and workload.rate is None:
            what = asked(replace(workload, concurrency=(chosen.workload.concurrency or 1) * copies))
        good = chosen.cost.predicted.goodput(workload.ttft_s, workload.tpot_s) * workload.osl / chosen.layout.world
        within = f", {good:,.0f} tokens/s/GPU within the targets"
    name = product(chosen.layout) if copies == 1 else f"{copies} copies of {product(chosen.layout)}"
    return (
        f"fits: {name} serve{'s' if copies == 1 else ''} {what} of {spec.name} on {devices}{of_all} x "
        f"{cluster.device.name}{within}; reason: {MOTIVES.get(motive, motive)}"
    )


def split_verdict(spec: ModelSpec, cluster: Cluster, workload: Serve, found: SplitFound) -> str:
    """Use these pools, in this ratio, and what they serve."""
    split = found.best
    of_all = f" of {cluster.devices}" if split.devices != cluster.devices else ""
    judged = workload.tpot_s is not None or workload.ttft_s is not None
    within = " within the targets" if judged else ""
    return (
        f"fits: {split.name} (ratio {split.prefill_workers}:{split.decode_workers}) serve "
        f"{asked(replace(workload, concurrency=split.users))} of {spec.name} on {split.devices}{of_all} x "
        f"{cluster.device.name}, {split.goodput / split.devices:,.0f} tokens/s/GPU{within}"
    )


def given_verdict(
    spec: ModelSpec,
    cluster: Cluster,
    workload: Serve,
    layout: Layout,
    broken: Sequence[Rule],
    chosen: Candidate | None,
) -> str:
    """Verdict on a layout that the user stated."""
    if broken:
        where = f" ({broken[0].where})" if broken[0].where else ""
        return f"illegal: {broken[0].message}{where}"
    assert chosen is not None
    worst = chosen.memory.worst
    left = worst.capacity_bytes - worst.total_bytes
    if chosen.fits:
        return (
            f"fits: {product(layout)} holds {asked(workload)} of {spec.name}, {gib(left)} left on the fullest rank of "
            f"{gib(worst.capacity_bytes)}"
        )
    return f"does not fit: {product(layout)}, {shortage(workload, chosen)}"


def shortage(workload: Serve, candidate: Candidate) -> str:
    """What is missing on the fullest rank, and how much of the workload fits."""
    worst = candidate.memory.worst
    text = f"rank {worst.rank} needs {gib(worst.total_bytes)} of the {gib(worst.capacity_bytes)} the engine may use"
    if isinstance(candidate.memory, ServeMemory) and candidate.memory.max_requests > 0:
        text += f"; {candidate.memory.max_requests:,} of {workload.concurrency or 1:,} requests fit at a time"
    elif isinstance(candidate.memory, ServeMemory) and candidate.memory.longest_context > 0:
        text += f"; the longest request that fits has {candidate.memory.longest_context:,} tokens"
    return text


def nothing_works(
    spec: ModelSpec, cluster: Cluster, workload: Serve, best: Candidate | None, budget_bytes: float
) -> str:
    """No layout holds the workload; the best one if one holds a part of it, else the smallest cluster."""
    if best is not None:
        return f"does not fit in full: best is {product(best.layout)}, {shortage(workload, best)}"
    bound = bound_of(spec)
    total = bound.dense_bytes + bound.expert_bytes
    least = -(-total // max(1, int(budget_bytes)))
    if least <= cluster.devices:
        return (
            f"no layout works: {gib(total)} of weights of {spec.name} would lie on {least} of {cluster.devices} x "
            f"{cluster.device.name}, but every layout is refused or leaves no room for a request; see the reasons"
        )
    return (
        f"does not fit: {gib(total)} of weights of {spec.name} need at least {least} x {cluster.device.name} "
        f"({gib(budget_bytes)} each for the engine), the cluster has {cluster.devices}; add devices, or a quantized "
        "checkpoint"
    )


def train_verdict(spec: ModelSpec, cluster: Cluster, work: Train, chosen: Candidate) -> str:
    """Use this layout for training."""
    worst = chosen.memory.worst
    recompute = "" if work.recompute == "none" else f", {work.recompute} recompute"
    return (
        f"fits: {product(chosen.layout)}{recompute} trains {spec.name} on {cluster.devices} x {cluster.device.name}; "
        f"the fullest rank takes {gib(worst.total_bytes)} of {gib(worst.capacity_bytes)}"
    )


def given_training(
    spec: ModelSpec, work: Train, layout: Layout, broken: Sequence[Rule], chosen: Candidate | None
) -> str:
    """Verdict on a training layout that the user stated."""
    if broken:
        where = f" ({broken[0].where})" if broken[0].where else ""
        return f"illegal: {broken[0].message}{where}"
    assert chosen is not None
    worst = chosen.memory.worst
    word = "fits" if chosen.fits else "does not fit"
    recompute = "" if work.recompute == "none" else f" with {work.recompute} recompute"
    return (
        f"{word}: {product(layout)}{recompute} training {spec.name}, rank {worst.rank} takes "
        f"{gib(worst.total_bytes)} of {gib(worst.capacity_bytes)}"
    )


def no_training(spec: ModelSpec, cluster: Cluster, state_bytes: int) -> str:
    """No layout of the whole cluster fits."""
    total = spec.parameters("decoder") * state_bytes
    return (
        f"does not fit: {gib(total)} of weights, gradients and optimizer state of {spec.name}, or its activations, "
        f"exceed {cluster.devices} x {gib(cluster.device.memory_bytes)} under every legal layout; add devices, shorten "
        "the sequence, or offload"
    )

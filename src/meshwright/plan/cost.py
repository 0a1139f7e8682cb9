"""Lower bounds from the counted ledger, by which layouts are compared; the prediction beside them (serving).

Every product and core takes at least ``max(FLOPs / peak, bytes / memory bandwidth)`` (the roofline of Williams,
Waterman, Patterson 2009) and one launch, every collective its launch, its steps of latency and its wire bytes over
its link. No efficiency and no overlap: good to compare layouts. ``serve_cost`` adds the times that ``serving_time``
predicts.

The seam: ``serve_cost`` and ``train_cost`` are the only functions that the search calls for a ``Cost``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, log2

from meshwright.plan.cores import Batch
from meshwright.plan.forward import embedding_ops, head_ops, serve_batch, serving_context, stage_hand_off
from meshwright.plan.layer_ops import layer_ops
from meshwright.plan.plan import Cost, Prediction
from meshwright.plan.products import Held, Kind, held
from meshwright.plan.serving_time import ServingTime, serving_time
from meshwright.plan.serving_time_steps import StageRank
from meshwright.plan.timing.compute import peak_flops as peak_flops
from meshwright.plan.wire import Op
from meshwright.specs.cluster import Cluster, Device, Link
from meshwright.specs.placement import Coordinate, Placement
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve

#: Seconds of one kernel of a captured CUDA graph: 4.3 us for vLLM, 3.4 us for TensorRT-LLM, fitted on 1,290 serving
#: rows of aiconfigurator-core 0.12.0 (several versions); the smaller one keeps this a lower bound.
KERNEL_S = 3.4e-6
#: Seconds before a collective sends: intercept over ring steps of NCCL all_reduces of 512 bytes on 2, 4 and 8 devices:
#: 4.6 us (H100, H200), 5.3 (L40S), 7.9 (A100, B200); table of aiconfigurator-core 0.12.0.
LAUNCH_S = 4.6e-6


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over the ops of one rank; seconds are lower bounds."""

    bytes_moved: float = 0.0
    flops: float = 0.0
    wire_bytes: float = 0.0
    messages: int = 0
    compute_s: float = 0.0
    wire_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Compute and communication one after the other."""
        return self.compute_s + self.wire_s

    def plus(self, other: Tally, times: int = 1) -> Tally:
        """Sum of this and ``times`` the other."""
        return Tally(
            self.bytes_moved + other.bytes_moved * times,
            self.flops + other.flops * times,
            self.wire_bytes + other.wire_bytes * times,
            self.messages + other.messages * times,
            self.compute_s + other.compute_s * times,
            self.wire_s + other.wire_s * times,
        )


@dataclass(frozen=True, slots=True)
class Way:
    """How a group is wired: link, members, members on the node of the rank, whether it spans nodes."""

    link: Link
    members: int
    near: int
    across: bool


class Links:
    """Which link a group uses: the one between nodes as soon as its ranks lie on more than one."""

    def __init__(self, placement: Placement, cluster: Cluster, coordinate: Coordinate) -> None:
        self.placement, self.cluster, self.coordinate = placement, cluster, coordinate
        self._known: dict[str, Way] = {}

    def of(self, group: str) -> Way:
        """Wiring of the group of an axis (``dp_shard`` counts as ``dp``)."""
        if group == "world":
            world, node = self.placement.layout.world, self.cluster.devices_per_node
            link = self.cluster.inter if world > node else self.cluster.intra
            return Way(link, world, min(world, node), world > node)
        if group not in self._known:
            ranks = self.placement.group(group.removesuffix("_shard").removesuffix("_replicate"), self.coordinate)
            node = self.cluster.node_of(self.placement.rank(self.coordinate))
            near = sum(self.cluster.node_of(r) == node for r in ranks)
            across = near < len(ranks)
            self._known[group] = Way(self.cluster.inter if across else self.cluster.intra, len(ranks), near, across)
        return self._known[group]

    def bandwidth(self, op: str, way: Way) -> float:
        """Bytes a second that one rank of the group can send.

        A ring that visits a node's ranks one after the other leaves the node once a turn, so the group has the
        network ports of all its ranks on the node: ``near x port``, capped by the link inside (measured:
        MosaicML and H100 weak scaling, see bench/score.py). Direct sends have the rank's own port.
        """
        link = way.link
        port = link.bandwidth_bytes_s / (self.cluster.devices_per_node if link.per == "node" else 1)
        if not way.across or op in {"send", "recv"}:
            return port
        if op == "all_to_all":
            return port * (way.members - 1) / (way.members - way.near)
        return min(port * way.near, self.cluster.intra.bandwidth_bytes_s) if way.near > 1 else port

    def latency(self, op: str, way: Way) -> float:
        """Seconds of an empty collective: a ring inside the node, a tree over the nodes, one step for a hand-off."""
        if op in {"send", "recv"}:
            return way.link.latency_s
        rounds = 2 if op == "all_reduce" else 1
        inside = rounds * (way.near - 1) * self.cluster.intra.latency_s
        nodes = -(-way.members // way.near)
        return LAUNCH_S + inside + rounds * ceil(log2(nodes)) * way.link.latency_s

    def seconds(self, op: Op) -> float:
        """Least time of a collective or hand-off."""
        assert op.group is not None
        way = self.of(op.group)
        return op.wire / self.bandwidth(op.op, way) + self.latency(op.op, way)


def tally(ops: Iterable[Op], device: Device, links: Links) -> Tally:
    """Add up the ops of one rank."""
    moved = flops = wire = compute_s = wire_s = 0.0
    messages = 0
    peaks: dict[str, float] = {}
    for op in ops:
        if op.op == "mark":
            continue
        n = op.repeats
        if op.group is not None:
            wire += op.wire * n
            wire_s += links.seconds(op) * n
            messages += n
        else:
            moved += op.payload * n
            flops += op.flops * n
            if op.dtype not in peaks:
                peaks[op.dtype] = peak_flops(device, op.dtype)
            compute_s += n * max(KERNEL_S, op.payload / device.bandwidth_bytes_s, op.flops / peaks[op.dtype])
    return Tally(moved, flops, wire, messages, compute_s, wire_s)


#: Stage, what its first rank class multiplies, its links.
StageRanks = list[tuple[int, Held, Links]]


def distinct_kinds(own: Held) -> list[tuple[Kind, int]]:
    """Kinds of layers that a rank has, with how many of each."""
    counts = Counter(id(kind) for kind in own.kinds.values())
    kinds = {id(kind): kind for kind in own.kinds.values()}
    return [(kinds[key], count) for key, count in counts.items()]


def stage_ranks(placement: Placement, cluster: Cluster) -> StageRanks:
    """What the first rank class of every stage multiplies, and its links."""
    kinds: dict[object, Kind] = {}
    found: dict[int, tuple[int, Held, Links]] = {}
    for rank_class in placement.classes:
        at = rank_class.coordinate
        if at.pp not in found:
            found[at.pp] = (at.pp, held(placement, at, kinds), Links(placement, cluster, at))
    return [found[stage] for stage in sorted(found)]


def stage_tallies(
    placement: Placement, cluster: Cluster, batch: Batch, settings: ServeSettings, sampled: int, ranks: StageRanks
) -> list[Tally]:
    """One forward of ``batch`` on the first rank class of every stage (``ranks``: see ``stage_ranks``)."""
    last = len(placement.stages) - 1
    context = serving_context(placement, batch, settings)
    out = []
    for stage, own, links in ranks:
        total = Tally()
        ends = embedding_ops(context, own.ends) if stage == 0 else stage_hand_off(context, "recv", stage - 1)
        total = total.plus(tally(ends, cluster.device, links))
        for kind, count in distinct_kinds(own):
            total = total.plus(tally(layer_ops(context, kind), cluster.device, links), count)
        tail = (
            head_ops(placement, context, own.ends, sampled) if stage == last else stage_hand_off(context, "send", stage)
        )
        out.append(total.plus(tally(tail, cluster.device, links)))
    return out


def serve_cost(
    placement: Placement,
    cluster: Cluster,
    workload: Serve,
    max_requests: int,
    settings: ServeSettings,
) -> Cost:
    """Lower bounds of a decode step and of a prefill, the throughput they allow, and the predicted times.

    Without a stated concurrency the batch is what the caches hold, ``max_requests`` in all (at most
    ``max_num_seqs`` a replica). A pipeline of p stages decodes p batches in turn, each a p-th of the requests, so that
    a token takes p passes of the slowest stage and one request a batch would leave the others idle. A step is these p
    passes: every request is one token further.
    """
    layout, stated = placement.layout, workload
    if workload.concurrency is None:
        workload = replace(workload, concurrency=max(layout.dp, max_requests))
    batch = serve_batch(workload, "decode", layout, settings)
    requests = batch.sequences
    each = replace(batch, sequences=-(-requests // layout.pp))
    ranks = stage_ranks(placement, cluster)
    decode = stage_tallies(placement, cluster, each, settings, each.sequences, ranks)
    prefill = stage_tallies(placement, cluster, serve_batch(workload, "prefill", layout), settings, 1, ranks)
    slowest = max(t.seconds for t in decode)
    step_s = layout.pp * slowest
    prefill_s = sum(t.seconds for t in prefill)
    busy_s = max(t.seconds for t in prefill) + workload.osl * step_s / requests
    busy_s = max(busy_s, (prefill_s + workload.osl * step_s) / requests)  # fewer requests than stages leave some idle
    worst = max(decode, key=lambda t: t.seconds)
    step = Tally().plus(worst, layout.pp)

    def predict() -> ServingTime:
        at = [StageRank(stage, own, links.coordinate) for stage, own, links in ranks]
        return serving_time(placement, cluster, stated, max_requests, settings, ranks=at)

    return Cost(
        bytes_read=step.bytes_moved,
        flops=step.flops,
        wire_bytes=step.wire_bytes,
        messages=step.messages,
        step_s=step_s,
        prefill_s=prefill_s,
        tokens_per_s=layout.dp * workload.osl / busy_s,
        wire_share=worst.wire_s / worst.seconds if worst.seconds else 0.0,
        requests=requests,
        later=Prediction(predict) if max_requests > 0 else None,
    )

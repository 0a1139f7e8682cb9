"""Why this layout: sentences with their numbers, from what was counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.plan.bounds import bound_reason
from meshwright.plan.kv import CacheRules, cache_plan
from meshwright.plan.plan import Candidate, Reason
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import product
from meshwright.specs.units import GIB, binary, gib
from meshwright.specs.workload import Serve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.plan.search.serve import Limit, Probe
    from meshwright.plan.serve_context import ServeContext


@dataclass(frozen=True, slots=True)
class ServeFacts:
    """Numbers of the whole model and workload, before any split, and the least that works.

    Attributes:
        weights_bytes: of one whole copy.
        cache_bytes: of all requests in flight, one copy.
        requests: requests in flight (1 when the workload names none).
        smallest_tp: smallest tensor-parallel degree with one stage that works, None when none does.
        smallest_world: fewest ranks that share out one copy of the model and work; 0 when none does.
    """

    weights_bytes: int
    cache_bytes: int
    requests: int
    smallest_tp: int | None
    smallest_world: int


def joint_ranks(candidate: Candidate | Probe) -> int:
    """Ranks that share out one copy of the weights: tp x pp x cp, and dp too where experts lie over it."""
    layout = candidate.layout
    ranks = layout.tp * layout.pp * layout.cp
    experts_shared = candidate.placement.spec.moe is not None and candidate.placement.cuts.grid.replicas == 1
    return ranks * layout.dp if experts_shared else ranks


def serve_facts(ctx: ServeContext, works: Sequence[Probe], chosen: Candidate) -> ServeFacts:
    """Count the whole at the load of the chosen layout; look up the least split that works."""
    spec, settings, workload = ctx.spec, ctx.settings, ctx.workload
    inside = chosen.workload.concurrency if isinstance(chosen.workload, Serve) else None
    requests = workload.concurrency or (inside or 1) * chosen.copies
    rules = CacheRules(
        block_size=settings.block_size or 16,
        kv_dtype=settings.kv_dtype,
        dtype=settings.dtype or spec.dtype,
        in_flight=settings.max_num_batched_tokens or 8192,
    )
    plan = cache_plan(spec, 1, 1, rules)
    cache = plan.pool_for(frozenset(range(len(spec.layers))), workload.context, requests)
    flat = [c.layout.tp for c in works if c.layout.pp == 1]
    worlds = [joint_ranks(c) for c in works]
    return ServeFacts(
        spec.weight_bytes(*ctx.sections), cache, requests, min(flat, default=None), min(worlds, default=0)
    )


def explain_serve(
    ctx: ServeContext, chosen: Candidate, facts: ServeFacts, limit: Limit | None = None
) -> tuple[Reason, ...]:
    """Reasons of the chosen (or given) layout, most important first; ``limit``: what keeps it from serving more."""
    layout = chosen.layout
    out = [_split_reason(ctx, chosen, facts)]
    if chosen.copies > 1:
        out.append(_copies_reason(chosen))
    if layout.tp > 1:
        out.append(_tp_reason(ctx, chosen, facts))
    if layout.pp > 1:
        out.append(_pp_reason(ctx, chosen))
    if layout.dp > 1:
        out.append(_dp_reason(ctx, chosen))
    if ctx.spec.moe is not None:
        out.append(_experts_reason(ctx, chosen))
    return (*out, *bound_reason(ctx, chosen, limit), _peaks_reason(ctx, chosen))


def _split_reason(ctx: ServeContext, chosen: Candidate, facts: ServeFacts) -> Reason:
    """Capacity or throughput: the answer to the first question."""
    cluster, workload = ctx.cluster, ctx.workload
    device, node = cluster.device.memory_bytes, cluster.node_memory_bytes
    numbers = {
        "weights_gib": facts.weights_bytes / GIB,
        "kv_cache_gib": facts.cache_bytes / GIB,
        "device_gib": device / GIB,
        "node_gib": node / GIB,
    }
    digits = 0 if facts.cache_bytes >= GIB else 2
    count = "one request" if facts.requests == 1 else f"{facts.requests:,} requests"
    weights = f"{gib(facts.weights_bytes, 0 if facts.weights_bytes >= 10 * GIB else 1)} of weights"
    cache = f"{gib(facts.cache_bytes, digits)} of KV cache for {count} of {workload.context:,} tokens"
    whole = f"{weights} and {cache}"
    together = facts.weights_bytes + facts.cache_bytes <= device
    ranks = joint_ranks(chosen)
    if ranks > cluster.devices_per_node and facts.weights_bytes + facts.cache_bytes > node:
        text = f"capacity: {whole} do not fit one node's {gib(node, 0)}, so the model spans nodes"
        return Reason("capacity", text, numbers)
    if ranks > 1:
        if facts.smallest_world > 1 or (facts.smallest_world == 0 and not together):
            text = (
                f"capacity: {whole} do not fit one device's {gib(device)}, so the model is split over {ranks} devices"
            )
            return Reason("capacity", text, numbers)
        text = (
            f"latency: {whole} would fit on single devices of {gib(device)}; the model is split over {ranks} so that a "
            "token reads fewer bytes on each"
        )
        return Reason("latency", text, numbers)
    if facts.weights_bytes > device:
        return Reason(
            "capacity", f"capacity: {whole} do not fit one device's {gib(device)}, and nothing is split", numbers
        )
    return Reason("throughput", f"throughput: {_replicas(chosen, weights, cache, device, together)}", numbers)


def _replicas(chosen: Candidate, weights: str, cache: str, device: int, together: bool) -> str:
    """Why nothing is split: all of it fits one device, or the weights do and replicas share out the requests."""
    dp = chosen.layout.dp
    if together:
        hold = " and the devices hold replicas" if dp > 1 else ""
        return f"{weights} and {cache} fit one device's {gib(device)}, so nothing is split{hold}"
    shared = f"is shared out over {dp} replicas" if dp > 1 else "does not fit beside them"
    return f"{weights} fit one device's {gib(device)}, so nothing is split; {cache} {shared}"


def _copies_reason(chosen: Candidate) -> Reason:
    """Why there are several deployments."""
    ranks, every = chosen.layout.world, chosen.layout.world * chosen.copies
    text = (
        f"{chosen.copies} copies of {product(chosen.layout)} side by side, requests dealt out between them: experts "
        f"shared by {ranks} ranks and not by all {every} keep their exchange small; each copy is started by itself"
    )
    return Reason("copies", text, {"copies": float(chosen.copies), "world": float(chosen.layout.world)})


def _tp_reason(ctx: ServeContext, chosen: Candidate, facts: ServeFacts) -> Reason:
    layout, cluster, spec = chosen.layout, ctx.cluster, ctx.spec
    per_token = 2 * len(spec.layers) * spec.hidden * 2
    base = (
        f"TP {layout.tp} sums activations twice a layer: {binary(per_token)} of all-reduce payload a token at 2 bytes"
    )
    numbers = {"all_reduce_payload_bytes_per_token": float(per_token), "tp": float(layout.tp)}
    if layout.tp > cluster.devices_per_node:
        text = f"{base}, and here it crosses nodes over {cluster.inter.name}, which is what pipeline stages avoid"
        return Reason("tp_across_nodes", text, numbers)
    text = f"{base}, so it stays inside the node ({cluster.intra.name})"
    least = facts.smallest_tp
    if least is not None and layout.pp == 1 and layout.tp > least:
        way = "" if ctx.spec.moe is None else " with the experts over more replicas"
        text += f"; TP {least}{way} would fit, the larger degree reads fewer bytes a token"
    elif least == layout.tp and layout.pp == 1:
        text += f"; {layout.tp} is the smallest degree whose shards fit"
    return Reason("tp_inside_node", text, numbers)


def _pp_reason(ctx: ServeContext, chosen: Candidate) -> Reason:
    layout, spec = chosen.layout, ctx.spec
    handed = spec.hidden * 2
    sizes = "+".join(str(len(s.layers)) for s in chosen.placement.stages)
    crosses = layout.tp * layout.pp > ctx.cluster.devices_per_node
    place = "between nodes " if crosses else ""
    text = (
        f"PP {layout.pp} hands one activation a token over each boundary ({binary(handed)} at 2 bytes) {place}"
        f"instead of summing twice a layer; stages of {sizes} layers"
    )
    return Reason("pp_across_nodes" if crosses else "pp_inside_node", text, {"pp": float(layout.pp)})


def _dp_reason(ctx: ServeContext, chosen: Candidate) -> Reason:
    layout = chosen.layout
    if ctx.spec.moe is not None:
        text = (
            f"DP {layout.dp} replicates attention and its cache, the experts are shared by all {layout.dp * layout.tp} "
            "ranks; every step is entered by all replicas together"
        )
        return Reason("attention_dp", text, {"dp": float(layout.dp)})
    text = (
        f"DP {layout.dp} is for throughput: whole replicas with no traffic between them; it saves no memory, each "
        f"holds {gib(chosen.placement.weight_bytes(chosen.placement.coordinate(0)) * layout.tp * layout.pp)} of weights"
        if layout.pp == 1
        else f"DP {layout.dp} is for throughput: whole replicas with no traffic between them; it saves no memory"
    )
    return Reason("throughput", text, {"dp": float(layout.dp)})


def over_nodes(cluster: Cluster, span: int) -> str:
    """What to say of an exchange between ``span`` ranks that lie in a row; empty where it stays inside the node."""
    return f", and here across nodes over {cluster.inter.name}" if span > cluster.devices_per_node else ""


def _experts_reason(ctx: ServeContext, chosen: Candidate) -> Reason:
    moe, layout = ctx.spec.moe, chosen.layout
    assert moe is not None
    numbers = {"experts": float(moe.experts), "topk": float(moe.topk), "ep": float(layout.ep)}
    if layout.ep > 1:
        held = -(-moe.experts // layout.ep)
        where = over_nodes(ctx.cluster, layout.ep * (layout.etp or 1))
        way = f"so tokens travel to their experts and back in every layer{where}"
        if layout.dp * layout.cp == 1:
            way = "and as every rank has all tokens, it runs them through its own experts and the results are summed"
        text = f"EP {layout.ep}: {moe.experts} experts, {held} whole ones a rank; a token visits {moe.topk}, {way}"
        return Reason("experts_parallel", text, numbers)
    text = f"{moe.experts} experts, {moe.topk} a token: without EP every expert is cut over the ranks like a dense MLP"
    return Reason("experts_cut", text, numbers)


def _peaks_reason(ctx: ServeContext, chosen: Candidate) -> Reason:
    """What a decode step moves, and how fast it could be at the peaks of device and links."""
    cost, device = chosen.cost, ctx.cluster.device
    memory_s = cost.bytes_read / device.bandwidth_bytes_s
    count = "one request" if cost.requests == 1 else f"{cost.requests:,} requests"
    replica = " a replica" if chosen.layout.dp > 1 else ""
    text = (
        f"a decode step of {count}{replica} moves {binary(cost.bytes_read)} through the busiest rank's memory, "
        f"{binary(cost.wire_bytes)} over its links in {cost.messages:,} messages: no faster than "
        f"{cost.step_s * 1e3:,.2f} ms at the peaks ({cost.wire_share:.0%} of it on links)"
    )
    numbers = {"step_lower_bound_s": cost.step_s, "memory_s": memory_s, "wire_bytes": cost.wire_bytes}
    return Reason("bound", text, numbers)


def lost_by(chosen: Candidate, other: Candidate) -> str:
    """One clause: how the other layout compares with the chosen (or given) one."""
    a, b = chosen.cost, other.cost
    parts = []
    if any(r.code == "tp_crosses_node" for r in other.rules):
        parts.append("TP crosses nodes")
    ratio = b.tokens_per_s / a.tokens_per_s if a.tokens_per_s else 1.0
    if ratio <= 0.995:
        parts.append(f"{1 - ratio:.0%} fewer tokens/s at the peaks")
        if b.wire_bytes > a.wire_bytes * 1.2:
            parts.append(f"{binary(b.wire_bytes)} on the links a step instead of {binary(a.wire_bytes)}")
        elif b.bytes_read > a.bytes_read * 1.1:
            parts.append(f"{binary(b.bytes_read)} of memory traffic a step instead of {binary(a.bytes_read)}")
    elif ratio >= 1.005:
        parts.append(f"{ratio - 1:.0%} more tokens/s at the peaks")
    if other.layout.world > chosen.layout.world:
        parts.append(f"{other.layout.world} devices instead of {chosen.layout.world}")
    if b.bubble > a.bubble + 0.01:
        parts.append(f"bubble {b.bubble:.0%} instead of {a.bubble:.0%}")
    if not parts:
        further = joint_ranks(other) > joint_ranks(chosen)
        parts.append("the same tokens/s at the peaks" + (" from a deeper split" if further else ""))
    return ", ".join(parts)

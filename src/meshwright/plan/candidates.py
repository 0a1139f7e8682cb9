"""Which layouts a search looks at, and the cheap bound that spares most of them a full count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshwright.plan.plan import Rejected
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import Attention, ModelSpec
from meshwright.specs.profile import EngineProfile
from meshwright.specs.units import gib
from meshwright.specs.workload import Serve, Workload

#: Layouts of one search that are counted in full, most promising first.
MAX_EVALUATED = 48
#: Prompts from which on context parallel prefill is tried.
LONG_PROMPT = 16384
#: Pipeline depths tried for one tensor-parallel degree: this many from the smallest that may fit.
DEPTHS = 3
#: Rejected layouts with pipeline stages that are shown.
MAX_STAGED = 2


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound of the weights on the fullest rank: shares are at best equal."""

    dense_bytes: int
    expert_bytes: int

    def rank_bytes(self, layout: Layout) -> float:
        """Bytes a rank cannot go below: experts are cut over every rank of a stage, the rest over tp."""
        everyone = layout.tp * layout.dp * layout.cp if layout.ep > 1 or layout.dp > 1 else layout.tp
        return (self.dense_bytes / layout.tp + self.expert_bytes / everyone) / layout.pp


def bound_of(spec: ModelSpec) -> Bound:
    """Bytes of the decoder that every rank of a group shares out."""
    expert = sum(f.total_bytes for f in spec.select("decoder") if f.role == "expert")
    return Bound(spec.weight_bytes("decoder") - expert, expert)


def cache_bound(spec: ModelSpec, workload: Workload, requests: int) -> float:
    """Bytes that the caches of ``requests`` requests take at least, one copy over all ranks, at one byte a value."""
    if not isinstance(workload, Serve):
        return 0.0
    values = 0
    for layer in spec.layers:
        a = layer.attention
        if a is not None:
            values += a.cached_values_per_token * min(workload.context, a.reach or workload.context) // a.compress_ratio
    return float(values * requests)


def smallest_tp(weight_bytes: float, device_bytes: float, kept_bytes: float) -> int:
    """Smallest power of two whose share of the weights fits ``device_bytes - kept_bytes``.

    Raises:
        ValueError: nothing is left of the device.
    """
    room = device_bytes - kept_bytes
    if room <= 0:
        raise ValueError(f"{kept_bytes} bytes kept of {device_bytes} leave no room for weights")
    tp = 1
    while weight_bytes / tp > room:
        tp *= 2
    return tp


def tensor_degrees(cluster: Cluster) -> list[int]:
    """Every degree inside a node, then the powers of two of whole nodes (TP across nodes, shown and judged)."""
    inside = list(range(1, cluster.devices_per_node + 1))
    across = []
    nodes = 2
    while nodes <= cluster.nodes and nodes * cluster.devices_per_node <= 128:
        across.append(nodes * cluster.devices_per_node)
        nodes *= 2
    return inside + across


def replicas(cluster: Cluster, tp: int, pp: int) -> int:
    """Replicas of tp x pp ranks that the cluster holds without a tensor-parallel group crossing a node."""
    node = cluster.devices_per_node
    groups = cluster.nodes * (node // tp) if tp <= node else cluster.devices // tp
    return groups // pp


def depths(limit: int, layers: int) -> list[int]:
    """Pipeline depths worth trying: every small one, then coarser steps."""
    top = min(limit, layers)
    steps = [*range(1, 9), *range(10, 17, 2), *range(20, 65, 4), *range(72, 2049, 8)]
    return [p for p in steps if p <= top]


def data_degrees(spec: ModelSpec, most: int, requests: int | None) -> list[int]:
    """Replicas to try: as many as there is room (and work) for, and one. Replicas of a mixture of experts share the
    experts, so that every power of two between is a layout of its own."""
    top = min(most, requests or most)
    between = [1 << k for k in range(1, top.bit_length())] if spec.moe is not None else []
    return sorted({top, 1, *(d for d in between if d <= top)}, reverse=True)


def context_degrees(spec: ModelSpec, workload: Workload, tp: int, per_node: int) -> list[tuple[int, int]]:
    """(cp, dcp) to try: none; a decode group over the copies of the cache that tp makes; for long prompts also context
    parallel prefill inside a node."""
    heads = min((a.kv_heads if a.kind == "gqa" else 1 for a in _attentions(spec)), default=tp)
    found = [(1, 1)]
    if heads < tp and tp % heads == 0:
        found.append((1, tp // heads))
    if isinstance(workload, Serve) and workload.isl >= LONG_PROMPT:
        found += [(cp, 1) for cp in (2, 4, 8) if cp * tp <= per_node]
    return found


def _attentions(spec: ModelSpec) -> list[Attention]:
    return list(dict.fromkeys(layer.attention for layer in spec.layers if layer.attention is not None))


def expert_degrees(spec: ModelSpec, profile: EngineProfile, layout: Layout) -> list[int]:
    """Expert-parallel degrees to try beside the layout's other degrees; 1 for a dense model."""
    if spec.moe is None:
        return [1]
    whole = 1
    for axis in profile.ep_over:
        whole *= getattr(layout, axis)
    return [1, whole] if whole > 1 else [1]


@dataclass(frozen=True, slots=True)
class Pool:
    """What the enumeration left: layouts to count, and layouts already out with the number that killed them.

    ``size``: layouts that were looked at; ``illegal``: of them refused by the engine.
    """

    layouts: tuple[Layout, ...]
    rejected: tuple[Rejected, ...]
    size: int = 0
    illegal: int = 0


def enumerate_serving(
    spec: ModelSpec,
    cluster: Cluster,
    workload: Workload,
    profile: EngineProfile,
    budget_bytes: float,
    requests: int | None,
) -> Pool:
    """Legal layouts whose weights may fit, most promising first, and those that the engine or the bound refuses.

    Args:
        budget_bytes: what the engine may take of one device.
        requests: requests in flight; more replicas than requests stand idle.
    """
    bound = bound_of(spec)
    layouts: list[Layout] = []
    rejected: list[Rejected] = []
    size = illegal = 0
    for tp in tensor_degrees(cluster):
        deep_enough = 0
        for pp in depths(cluster.devices // tp, len(spec.layers)):
            if replicas(cluster, tp, pp) < 1 or deep_enough >= DEPTHS:
                break
            found = False
            for option in _options(spec, cluster, workload, profile, tp, pp, requests):
                verdict = _judge(option, spec, cluster, workload, profile, bound, budget_bytes)
                size += 1
                if isinstance(verdict, Layout):
                    layouts.append(verdict)
                    cache = cache_bound(spec, workload, requests or 1) / option.world
                    found |= bound.rank_bytes(verdict) + cache <= budget_bytes
                else:
                    illegal += verdict.code != "weights_do_not_fit"
                    if worth_showing(verdict, cluster):
                        rejected.append(verdict)
            deep_enough += found
    layouts.sort(key=lambda x: promise(x, cluster))
    return Pool(tuple(layouts[:MAX_EVALUATED]), tuple(rejected), size, illegal)


def _options(
    spec: ModelSpec,
    cluster: Cluster,
    workload: Workload,
    profile: EngineProfile,
    tp: int,
    pp: int,
    requests: int | None,
) -> Iterator[Layout]:
    """Layouts of one tensor-parallel degree and one pipeline depth."""
    for cp, dcp in context_degrees(spec, workload, tp, cluster.devices_per_node):
        most = replicas(cluster, tp * cp, pp)
        degrees = data_degrees(spec, most, requests) if most else []
        for dp in degrees if cp * dcp == 1 else sorted({*degrees[:1], *degrees[-1:]}, reverse=True):
            base = Layout(tp=tp, pp=pp, dp=dp, cp=cp, dcp=dcp)
            for ep in expert_degrees(spec, profile, base):
                yield base.with_(ep=ep)


def _judge(
    layout: Layout,
    spec: ModelSpec,
    cluster: Cluster,
    workload: Workload,
    profile: EngineProfile,
    bound: Bound,
    budget_bytes: float,
) -> Layout | Rejected:
    """The layout itself when it is legal and its weights may fit, else why not."""
    for rule in profile.check(spec, layout, cluster, workload):
        if rule.severity == "illegal":
            return Rejected(layout, rule.code, rule.message)
    least = bound.rank_bytes(layout)
    if least > budget_bytes:
        return Rejected(
            layout,
            "weights_do_not_fit",
            f"weights alone take {gib(least)} a rank of the {gib(budget_bytes)} the engine may use",
        )
    return layout


def promise(layout: Layout, cluster: Cluster) -> tuple[int, ...]:
    """Order of the full count: shallow pipelines, TP inside a node, no context parallelism, many replicas, small TP."""
    crossing = layout.tp > cluster.devices_per_node
    return (layout.pp, int(crossing), layout.cp * layout.dcp, -layout.dp, layout.tp, layout.ep)


def worth_showing(rejected: Rejected, cluster: Cluster) -> bool:
    """The rejections a reader would ask about: no pipeline yet, a power of two or the whole node, no odd mixtures."""
    layout = rejected.layout
    natural = layout.tp & (layout.tp - 1) == 0 or layout.tp == cluster.devices_per_node
    return natural and layout.pp == 1


def thin(rejected: Iterable[Rejected], limit: int) -> Iterator[Rejected]:
    """At most ``limit`` rejections: one for every (degrees, cause), the fewest degrees first, few with stages."""
    seen: set[tuple[str, str]] = set()
    kept = staged = 0
    for item in sorted(rejected, key=lambda r: (r.layout.pp, r.layout.tp, r.layout.dp, r.layout.ep)):
        key = (item.code, f"{item.layout.tp}/{item.layout.pp}")
        if key in seen or kept >= limit or (item.layout.pp > 1 and staged >= MAX_STAGED):
            continue
        staged += item.layout.pp > 1
        seen.add(key)
        kept += 1
        yield item

"""Serving memory of a layout: weights, activation peak, runtime and cache of every rank class.

``pool = utilization x device memory - weights - activation peak - contexts - CUDA graphs``; the pool with the fewest
blocks decides for all ranks of a replica (vLLM ``v1/worker/utils.py``, ``v1/core/kv_cache_utils.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from meshwright.ledger.schema import Holding
from meshwright.plan.calibration import measured_holdings
from meshwright.plan.constants.serving import EngineMemory, engine_memory, step_defaults
from meshwright.plan.engine_memory import activation_bytes, engine_holdings
from meshwright.plan.headroom import static_share
from meshwright.plan.kv import CachePlan, CacheRules, cache_plan, is_packed
from meshwright.plan.loading import compute_dtype, weight_holdings
from meshwright.plan.memory import RankMemory, ServeMemory
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import Placement, RankClass
from meshwright.specs.profile import EngineProfile, ServeSettings
from meshwright.specs.units import gib
from meshwright.specs.workload import Serve


@dataclass(frozen=True, slots=True)
class _Pool:
    """One rank class with what is left for its cache, and the numbers of its layers (draft layers behind the rest)."""

    rank_class: RankClass
    layers: frozenset[int]
    capacity: int
    pool: int
    holdings: tuple[Holding, ...]


def resolve_settings(
    settings: ServeSettings,
    profile: EngineProfile,
    cluster: Cluster,
    workload: Serve | None = None,
    layout: Layout | None = None,
    spec: ModelSpec | None = None,
) -> ServeSettings:
    """``settings`` with every field that was left open set to the engine's own choice on this device.

    ``layout`` and ``spec`` matter where the engine's share of the device depends on them (see ``plan.headroom``).
    """
    found = step_defaults(profile.engine, profile.version, cluster.device)
    share = profile.constants.get("gpu_memory_utilization", found.utilization)
    if settings.utilization is None:
        share = static_share(profile, cluster, settings, layout, spec) or share
    block = profile.constants.get("block_size", found.block_size)
    return replace(
        settings,
        utilization=float(share) if settings.utilization is None else settings.utilization,
        max_num_batched_tokens=settings.max_num_batched_tokens or found.batched_tokens,
        max_num_seqs=settings.max_num_seqs or found.sequences,
        block_size=settings.block_size or int(block),
    )


def cache_rules(placement: Placement, settings: ServeSettings, constants: EngineMemory) -> CacheRules:
    """How the engine keeps its cache under resolved ``settings``."""
    assert settings.block_size is not None
    assert settings.max_num_batched_tokens is not None
    block = settings.block_size
    if placement.spec.mla:
        block = max(block, constants.mla_block_size)
    if is_packed(placement.spec):
        block = max(block, constants.packed_block_size)
    return CacheRules(
        block_size=block,
        kv_dtype=settings.kv_dtype,
        dtype=compute_dtype(placement, settings),
        in_flight=settings.max_num_batched_tokens,
        groups=constants.groups,
        windows=constants.windows,
        window_share=constants.window_share,
        state_pages=constants.state_pages,
        speculative=settings.speculative_tokens if settings.speculative else 0,
    )


def serve_memory(
    placement: Placement,
    cluster: Cluster,
    workload: Serve,
    settings: ServeSettings | None = None,
    constants: EngineMemory | None = None,
    measured: Mapping[str, int] | None = None,
) -> ServeMemory:
    """What every rank holds while serving ``workload``, and how many tokens and requests fit.

    Args:
        placement: where the weights live.
        cluster: devices and links.
        workload: lengths and concurrency; without a concurrency the needed cache is that of one request a replica.
        settings: engine settings; open fields take the engine's defaults on this device.
        constants: memory constants; None: those of the profile's engine and version.
        measured: terms that an earlier start printed, in bytes; they replace the counted and modelled ones.
    """
    layout = placement.layout
    settings = resolve_settings(
        settings or ServeSettings(), placement.profile, cluster, workload, layout, placement.spec
    )
    constants = constants or engine_memory(placement.profile.engine, placement.profile.version)
    plan = cache_plan(placement.spec, layout.tp, layout.dcp, cache_rules(placement, settings, constants))
    pools = [_pool(placement, c, cluster, workload, settings, constants, measured or {}) for c in placement.classes]
    sizes = [(p.layers, p.pool) for p in pools]
    context = workload.context
    asked = 1 if workload.concurrency is None else -(-workload.concurrency // layout.dp)
    ranks = tuple(_rank(p, plan, context, asked) for p in pools)
    worst = min(pools, key=lambda p: p.pool - plan.pool_for(p.layers, context, asked))
    limit = max(placement.spec.max_positions, context)
    return ServeMemory(
        ranks=ranks,
        kv_cache_tokens=plan.tokens(sizes, context),
        kv_pool_bytes=max(0, worst.pool),
        kv_bytes_per_token=plan.growth_bytes(worst.layers, context),
        max_requests=plan.whole_requests(sizes, context) * layout.dp,
        longest_context=plan.longest(sizes, limit),
        needed_bytes=plan.pool_for(worst.layers, context, asked),
        notes=(
            *_notes(placement, plan, pools, context),
            *_queue_note(asked, settings),
            *_headroom_note(placement, cluster, settings, context, constants),
        ),
    )


def _pool(
    placement: Placement,
    rank_class: RankClass,
    cluster: Cluster,
    workload: Serve,
    settings: ServeSettings,
    constants: EngineMemory,
    measured: Mapping[str, int],
) -> _Pool:
    assert settings.utilization is not None
    device, stage = cluster.device, placement.stages[rank_class.coordinate.pp]
    holdings = [
        *weight_holdings(placement, rank_class, settings, device, constants),
        *engine_holdings(placement, rank_class, cluster, settings, workload.context, constants),
    ]
    holdings = measured_holdings(holdings, measured, rank_class.name) if measured else holdings
    held = sum(h.bytes for h in holdings)
    capacity = ceil(device.memory_bytes * settings.utilization)
    if constants.share_of_free and held < device.memory_bytes:
        capacity = held + int((device.memory_bytes - held) * settings.utilization)
    layers = frozenset(stage.layers)
    if stage.head:
        first = len(placement.spec.layers)
        layers |= frozenset(range(first, first + len(placement.spec.mtp_layers)))
    return _Pool(rank_class, layers, capacity, capacity - held, tuple(holdings))


def _rank(p: _Pool, plan: CachePlan, context: int, asked: int) -> RankMemory:
    needed = plan.pool_for(p.layers, context, asked)
    cache = Holding(p.rank_class.name, "kv_cache", "blocks", needed, "exact")
    return RankMemory(
        rank=p.rank_class.first_rank,
        ranks=p.rank_class.ranks,
        rank_class=p.rank_class.name,
        coordinate=p.rank_class.coordinate,
        capacity_bytes=p.capacity,
        holdings=(*p.holdings, *((cache,) if needed else ())),
    )


def _queue_note(asked: int, settings: ServeSettings) -> tuple[str, ...]:
    """A sentence where more requests are asked of a replica than the engine runs in one step."""
    limit = settings.max_num_seqs or asked
    if asked <= limit:
        return ()
    return (f"{asked:,} requests a replica are asked for, the engine runs at most {limit:,} at once: the others wait",)


def _headroom_note(
    placement: Placement, cluster: Cluster, settings: ServeSettings, context: int, constants: EngineMemory
) -> tuple[str, ...]:
    """A sentence where what an engine leaves for activations by formula is less than they are likely to take."""
    if constants.profiled:
        return ()
    assert settings.utilization is not None
    left = int(cluster.device.memory_bytes * (1 - settings.utilization))
    if settings.as_typed and settings.utilization < 0.5 and placement.layout.dp > 1:
        return (
            f"{placement.profile.engine} keeps {gib(left)} of {gib(cluster.device.memory_bytes)} free by default, most "
            f"of it for decode graphs of {placement.layout.dp} attention replicas: state the share "
            "(--mem-fraction-static 0.8) and fewer graph sequences (--cuda-graph-max-bs-decode 128)",
        )
    need = max(activation_bytes(placement, stage, settings, context, constants) for stage in placement.stages)
    if need <= left:
        return ()
    return (
        f"{placement.profile.engine} sizes its cache without a trial step: a share of {settings.utilization:g} leaves "
        f"{gib(left)} for activations and graphs, a step is likely to take {gib(need)}; lower the share or the tokens "
        "of a step",
    )


def _notes(placement: Placement, plan: CachePlan, pools: list[_Pool], context: int) -> tuple[str, ...]:
    """Sentences on replicated caches, the stage that decides, block sizes, and where a rank has no room at all."""
    spec, layout = placement.spec, placement.layout
    notes: list[str] = []
    copies = layout.tp // layout.dcp
    if spec.mla and copies > 1:
        notes.append(
            f"MLA caches one latent vector a token: every one of {layout.tp} tensor-parallel ranks holds it"
            f" ({copies} copies); attention data parallelism or DCP removes the copies"
        )
    elif spec.kv_heads and layout.tp > spec.kv_heads:
        notes.append(
            f"{spec.kv_heads} KV heads on {layout.tp} tensor-parallel ranks: every head is held more than once"
        )
    shares = {p.rank_class.coordinate.pp: plan.concurrency([(p.layers, p.pool)], context) for p in pools}
    if len(shares) > 1 and min(shares.values()) > 0 and max(shares.values()) > min(shares.values()) * 1.05:
        stage = min(shares, key=lambda s: shares[s])
        most = int(max(shares.values()) * context)
        notes.append(
            f"stage {stage} decides the number of cache blocks: {int(shares[stage] * context):,} tokens,"
            f" another stage has room for {most:,}"
        )
    if plan.block_size != plan.rules.block_size:
        notes.append(f"attention blocks are raised to {plan.block_size} tokens to match the recurrent state's page")
    short = min(pools, key=lambda p: p.pool)
    if short.pool <= 0:
        notes.append(
            f"no room for a cache on rank {short.rank_class.first_rank}: weights, activations and runtime take"
            f" {gib(short.capacity - short.pool)} of {gib(short.capacity)}"
        )
    return tuple(notes)

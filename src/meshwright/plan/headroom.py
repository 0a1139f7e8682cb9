"""Share of a device that an engine gives to weights and cache when it reserves a headroom by formula.

SGLang measures no activation peak. It reserves (``arg_groups/memory_hook.py:35-360``), in MiB: 512, 1.5 a token of a
prefill chunk, 128 a rank, 2 a sequence of the largest decode graph (with attention data parallelism 3 a sequence and
replica more, half as much again above 300 sequences), and prefill graphs (8 for every captured size, 1,536 with MLA);
at least 10 GiB on devices above 60 GiB. ``--mem-fraction-static`` is what is left, over the device's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.plan.constants.serving import MIB, headroom, step_defaults
from meshwright.specs.cluster import Cluster, Device
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import EngineProfile, ServeSettings
from meshwright.specs.units import GIB


def prefill_sizes(tokens: int) -> int:
    """Token counts up to ``tokens`` for which a prefill graph is captured (``arg_groups/cuda_graph_hook.py:480``)."""
    sizes = [*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64)]
    sizes += [*range(1280, 4097, 256), *range(4608, tokens + 1, 512)]
    return sum(size <= tokens for size in sizes)


def graph_sequences(rows: Mapping[str, list[int]], device: Device, ranks: int) -> int:
    """Sequences of the largest decode graph, by device memory; more from 4 ranks of a stage on."""
    memory = device.memory_bytes / GIB
    below = [int(limit) for limit in rows if int(limit) and memory < int(limit)]
    few, many = rows[str(min(below))] if below and memory < 90 else rows["90"] if memory < 160 else rows["0"]
    return few if ranks < 4 else many


def reserved_mib(
    c: Mapping[str, Any],
    device: Device,
    tokens: int,
    layout: Layout,
    mla: bool,
    attention_replicas: int = 1,
    requests: int | None = None,
) -> float:
    """MiB that the engine keeps free of weights and cache.

    Args:
        c: constants of the engine.
        device: kind of device.
        tokens: tokens of a prefill chunk over the whole server.
        layout: degrees.
        mla: whether the model caches latents.
        attention_replicas: attention data parallel degree, 1 without.
        requests: most requests of the whole server, where stated: no larger decode graph is captured.
    """
    stage = layout.tp * layout.cp * layout.dp
    sequences = min(graph_sequences(c["graph_sequences"], device, stage), requests or stage << 20)
    out = c["base_mib"] + max(tokens, c["least_tokens"]) * c["token_mib"] + stage * layout.pp / 8 * c["eight_ranks_mib"]
    out += sequences * c["graph_sequence_mib"]
    if attention_replicas > 1:
        many = c["attention_replica_many_mib"] if sequences > c["many_sequences"] else 0.0
        out += sequences * attention_replicas * (c["attention_replica_mib"] + many)
    out += c["mla_prefill_graphs_mib"] if mla else prefill_sizes(tokens) * c["prefill_graph_mib"]
    if device.memory_bytes > c["floor_above_gib"] * GIB:
        out = max(out, c["floor_mib"])
    return float(out)


def static_share(
    profile: EngineProfile,
    cluster: Cluster,
    settings: ServeSettings,
    layout: Layout | None = None,
    spec: ModelSpec | None = None,
) -> float | None:
    """The engine's own ``mem_fraction_static``; None for an engine that has no such formula.

    What it adds for attention replicas (74 GiB for 32 of them) is meant for its own defaults only: it counts where a
    command is judged as it was typed, and a planned command states its share.

    Args:
        profile: engine.
        cluster: devices.
        settings: gives the tokens of a step when stated.
        layout: degrees; None: tensor parallel over a node.
        spec: model; None: no MLA and no experts.
    """
    constants = headroom(profile.engine)
    if constants is None:
        return None
    device = cluster.device
    tokens = settings.max_num_batched_tokens
    if tokens is None:
        tokens = step_defaults(profile.engine, profile.version, device).batched_tokens
    layout = layout or Layout(tp=cluster.devices_per_node)
    mla = spec is not None and spec.mla
    replicas = layout.dp if settings.as_typed and spec is not None and spec.moe is not None else 1
    requests = settings.max_num_seqs * layout.dp if settings.max_num_seqs is not None else None
    kept = reserved_mib(constants, device, tokens, layout, mla, replicas, requests) * MIB
    return max(0.01, round(1 - kept / device.memory_bytes, 3))

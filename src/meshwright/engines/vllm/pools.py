"""Prefill and decode apart: two vLLM deployments that hand the cache over, a proxy in front, and what must agree.

Sources (0.33.0): config/kv_transfer.py; nixl/base_worker.py:2690-2840 and :860-890 (NIXL hand-shake and pipeline
stages); mooncake/mooncake_connector.py:153-171, :591-605; kv_connector/v1/utils (TP ratios).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.engines.vllm.deploy import WAYS, Instance, usual
from meshwright.engines.vllm.words import API_PORT, Env, join
from meshwright.errors import InputError
from meshwright.specs.checks import broken
from meshwright.specs.cluster import Cluster
from meshwright.specs.command import Command
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import ServeSettings
from meshwright.specs.rules import Rule
from meshwright.specs.splits import splits
from meshwright.specs.workload import Serve

_NIXL = "vLLM nixl/base_worker.py:2690-2840"
_MOONCAKE = "vLLM mooncake/mooncake_connector.py:153"

#: First ports of the pools: API server, NIXL side channel (replicas take the following ones), Mooncake bootstrap.
PREFILL_PORT, DECODE_PORT = API_PORT + 100, API_PORT + 200
SIDE_CHANNEL = {"prefill": 5600, "decode": 6600}
BOOTSTRAP_PORT = 8998

#: Option ``connector`` -> the connector's name.
CONNECTORS = {"nixl": "NixlConnector", "nixl-push": "NixlPushConnector", "mooncake": "MooncakeConnector"}


def pool_rules(
    prefill: Layout,
    decode: Layout,
    connector: str = "nixl",
    spec: ModelSpec | None = None,
    block_sizes: tuple[int | None, int | None] = (None, None),
) -> list[Rule]:
    """What the connector asks of the two layouts.

    Args:
        prefill, decode: degrees of the two sides.
        connector: ``nixl`` (the decode side pulls), ``nixl-push`` or ``mooncake``.
        spec: the model; without it the rules that need it are left out.
        block_sizes: tokens of a cache block on either side, None for the engine's own.
    """
    where = _MOONCAKE if connector == "mooncake" else _NIXL
    found = [*_tensor_ratio(prefill, decode, where)]
    if connector == "mooncake":
        return found
    found += [*_context(prefill, decode)]
    if None not in block_sizes and block_sizes[0] != block_sizes[1] and prefill.tp > decode.tp:
        found.append(
            broken(
                "pool_blocks",
                "illegal",
                f"blocks of {block_sizes[0]} and {block_sizes[1]} tokens with prefill tp {prefill.tp} above decode tp "
                f"{decode.tp}",
                "use one block size on both sides",
                "vLLM nixl/base_worker.py:324",
            )
        )
    if connector == "nixl-push" and decode.pp > 1:
        found.append(_stages(f"decode pp {decode.pp} with NixlPushConnector", "use pp 1 on the decode side"))
    if spec is not None:
        found += [*_of_model(prefill, decode, connector, spec)]
    return found


def _tensor_ratio(prefill: Layout, decode: Layout, where: str) -> Iterator[Rule]:
    high, low = max(prefill.tp, decode.tp), min(prefill.tp, decode.tp)
    if high % low:
        yield broken(
            "pool_tp_ratio",
            "illegal",
            f"tensor parallel {prefill.tp} for prefill and {decode.tp} for decode: {high} is not a multiple of {low}",
            f"choose sizes of which one is a multiple of the other: {low} and {low * max(1, round(high / low))}",
            where,
            prefill_tp=prefill.tp,
            decode_tp=decode.tp,
        )


def _context(prefill: Layout, decode: Layout) -> Iterator[Rule]:
    high, low = max(prefill.dcp, decode.dcp), min(prefill.dcp, decode.dcp)
    if high % low:
        yield broken(
            "pool_dcp_ratio",
            "illegal",
            f"decode context parallel {prefill.dcp} and {decode.dcp} do not divide one another",
            "use the same on both sides",
            _NIXL,
            prefill_dcp=prefill.dcp,
            decode_dcp=decode.dcp,
        )


def _of_model(prefill: Layout, decode: Layout, connector: str, spec: ModelSpec) -> Iterator[Rule]:
    """Copies of KV heads, hybrid caches."""
    blocks = splits(spec)
    latent = any(a.kind == "mla" for a in blocks.attentions)
    hybrid = bool(blocks.recurrents)
    heads = min((a.kv_heads for a in blocks.attentions if a.kind != "mla"), default=0)
    if not latent and not hybrid and heads and prefill.tp > decode.tp and prefill.tp > heads:
        yield broken(
            "pool_copies",
            "illegal",
            f"prefill tp {prefill.tp} holds copies of {heads} KV heads and is above decode tp {decode.tp}",
            f"use prefill tp of at most {max(heads, decode.tp)}, or decode tp {prefill.tp}",
            _NIXL,
            prefill_tp=prefill.tp,
            kv_heads=heads,
        )
    if hybrid and prefill.dcp != decode.dcp:
        message = f"a hybrid model with decode context parallel {prefill.dcp} and {decode.dcp}"
        yield broken("pool_hybrid_dcp", "illegal", message, "use the same on both sides", _NIXL)
    windowed = any(layer.attention and layer.attention.reach is not None for layer in spec.layers)
    if max(prefill.pp, decode.pp) > 1 and (hybrid or (windowed and connector == "nixl")):
        what = "state-space layers" if hybrid else "caches of several kinds"
        instead = "use pp 1" if hybrid else "use connector nixl-push, or pp 1"
        yield _stages(f"pp {max(prefill.pp, decode.pp)} of a model with {what}", instead)


def _stages(message: str, way_out: str) -> Rule:
    return broken("pool_stages", "illegal", message, way_out, "vLLM nixl/base_worker.py:860-890")


@dataclass(frozen=True, slots=True)
class Pools:
    """The two sides as instances."""

    prefill: Instance
    decode: Instance
    connector: str


def pools(
    name: str,
    prefill: Layout,
    decode: Layout,
    cluster: Cluster,
    workload: Serve,
    settings: ServeSettings,
    connector: str = "nixl",
    spec: ModelSpec | None = None,
    extra: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
) -> Pools:
    """Lay the two sides on the cluster: prefill on the first nodes, decode on the next, or both on one node.

    Args:
        name: the model as vLLM is given it.
        prefill, decode: degrees of the two sides.
        cluster, workload, settings: as in a request.
        connector: ``nixl``, ``nixl-push`` or ``mooncake``.
        spec: the model, if known.
        extra: further words of the prefill and the decode side.

    Raises:
        InputError: an unknown connector, a broken rule of the connector, or too few devices.
    """
    if connector not in CONNECTORS:
        raise InputError(f"connector {connector[:20]!r} is not one of {', '.join(CONNECTORS)}")
    for rule in pool_rules(prefill, decode, connector, spec):
        raise InputError(f"{rule.message} ({rule.where}); {rule.way_out}")
    each = cluster.devices_per_node
    together = cluster.nodes == 1 or prefill.world + decode.world <= each
    counts = [-(-layout.world // each) for layout in (prefill, decode)]
    needed = prefill.world + decode.world if together else sum(counts) * each
    if needed > cluster.devices:
        raise InputError(
            f"prefill {prefill} and decode {decode} need {prefill.world} + {decode.world} devices"
            + ("" if together else f" on {counts[0]} + {counts[1]} nodes")
            + f", {cluster} has {cluster.devices}"
        )
    sides = []
    for place, (side, layout) in enumerate((("prefill", prefill), ("decode", decode))):
        env = _environment(side, connector, prefill, decode, spec)
        if together:
            first = place * prefill.world
            devices = ",".join(map(str, range(first, first + layout.world)))
            env = (*env, ("CUDA_VISIBLE_DEVICES", devices))
        sides.append(
            Instance(
                name,
                layout,
                cluster if together else replace(cluster, nodes=counts[place]),
                workload,
                settings,
                (*extra[place], "--port", str(_port(side)), "--kv-transfer-config", transfer(side, connector)),
                env,
                f"${side.upper()}_IP",
                0 if together or not place else counts[0],
                side,
                cluster.nodes > 1,
            )
        )
    return Pools(sides[0], sides[1], connector)


def _port(side: str) -> int:
    return PREFILL_PORT if side == "prefill" else DECODE_PORT


def transfer(side: str, connector: str) -> str:
    """``--kv-transfer-config`` of one side; NixlConnector pulls and takes both roles, the others ask by role."""
    role = "kv_both" if connector == "nixl" else "kv_producer" if side == "prefill" else "kv_consumer"
    return json.dumps({"kv_connector": CONNECTORS[connector], "kv_role": role})


def _environment(side: str, connector: str, prefill: Layout, decode: Layout, spec: ModelSpec | None) -> Env:
    env: Env = ()
    if connector == "mooncake":
        env += (("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(BOOTSTRAP_PORT)),) if side == "prefill" else ()
    else:
        env += (
            ("VLLM_NIXL_SIDE_CHANNEL_HOST", "$NODE_IP"),
            ("VLLM_NIXL_SIDE_CHANNEL_PORT", str(SIDE_CHANNEL[side])),
        )
    latent = spec is not None and any(a.kind == "mla" for a in splits(spec).attentions)
    if prefill.tp != decode.tp and not latent:
        env += (("VLLM_KV_CACHE_LAYOUT", "HND"),)
    if spec is not None and splits(spec).recurrents:
        env += (("VLLM_SSM_CONV_STATE_LAYOUT", "DS"),)
    return env


def pool_commands(both: Pools) -> list[Command]:
    """Commands of the two sides, then the proxy."""
    out: list[Command] = []
    for side in (both.prefill, both.decode):
        written = WAYS[usual(side)](side)
        own = any(value == "$NODE_IP" for _, value in side.env)
        out += [replace(c, note="set NODE_IP to this node's address") if own and not c.note else c for c in written]
    return [*out, proxy(both)]


def proxy(both: Pools) -> Command:
    """The proxy that sends a request to a prefill instance and then to a decode instance; vLLM's own examples."""
    note = "a script of the vLLM repository; for production a router that knows both pools (vllm-router, llm-d)"
    if both.connector == "mooncake":
        words = [
            "python",
            "examples/disaggregated/disaggregated_serving/mooncake_connector/mooncake_connector_proxy.py",
        ]
        text = (
            f'{join(words)} --prefill "http://$PREFILL_IP:{PREFILL_PORT}" --decode "http://$DECODE_IP:{DECODE_PORT}" '
            f"--port {API_PORT}"
        )
    else:
        words = ["python", "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py", "--port", str(API_PORT)]
        words += ["--prefiller-hosts", "$PREFILL_IP", "--prefiller-ports", str(PREFILL_PORT)]
        words += ["--decoder-hosts", "$DECODE_IP", "--decoder-ports", str(DECODE_PORT)]
        text = join(words)
    return Command(both.decode.first, "proxy", text, (), f"set PREFILL_IP and DECODE_IP; {note}")

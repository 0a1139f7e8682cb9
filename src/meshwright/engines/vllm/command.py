"""The ``vllm serve`` commands of a layout: one node, several nodes (mp), several nodes (Ray), data parallel.

A command is the scored point: lengths, batch limits, utilization and dtypes are written out, so that a later default
cannot move it. Everything that comes from the user is quoted for a POSIX shell. ``$HEAD_IP`` is the address of node
0, and ``$NODE_IP`` that of the node where the command is typed.
"""

from __future__ import annotations

import shlex

from meshwright.errors import InputError
from meshwright.specs.cluster import Cluster
from meshwright.specs.command import Command
from meshwright.specs.layout import Layout
from meshwright.specs.profile import EngineProfile, ServeSettings
from meshwright.specs.workload import Serve, Workload

#: Port of Ray's head (``ray start`` default) and of vLLM's data parallel coordinator (engine/arg_utils.py: 29550).
RAY_PORT = 6379
DP_PORT = 29550

#: Our cache dtypes -> what ``--kv-cache-dtype`` takes.
_KV_DTYPES = {"f8_e4m3": "fp8_e4m3", "f8_e5m2": "fp8_e5m2", "bf16": "bfloat16", "f16": "float16"}
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}

_HEAD = "set HEAD_IP to the address of node 0"


def commands(
    spec_name: str,
    layout: Layout,
    cluster: Cluster,
    workload: Workload,
    settings: ServeSettings,
    profile: EngineProfile,
) -> tuple[Command, ...]:
    """What to type, node by node; first without Ray, then (on several nodes) with it.

    Args:
        spec_name: what vLLM is given: a hub id or a path, as the user wrote it.
        layout: a layout that the profile allows.
        cluster: where it runs; ranks fill the nodes in order.
        workload: gives ``--max-model-len``; training gives no command, vLLM does not train.
        settings: what is set on the engine; None leaves a flag out.
        profile: vLLM's profile (its version decides the flags).

    Raises:
        InputError: the profile is not vLLM's, or the layout needs more devices than the cluster has.
    """
    if profile.engine != "vllm":
        raise InputError(f"no vLLM command for engine {profile.engine}")
    if not isinstance(workload, Serve):
        return ()
    if layout.world > cluster.devices:
        raise InputError(f"{layout} needs {layout.world} devices, {cluster} has {cluster.devices}")
    base = _serve(spec_name) + _degrees(layout) + _limits(workload, settings)
    env = _environment(layout)
    if layout.world <= cluster.devices_per_node:
        text = _join(base + _replicas(layout))
        return (Command(0 if cluster.nodes > 1 else None, "serve", text, env),)
    replica = layout.world // layout.dp
    if layout.dp > 1 and replica <= cluster.devices_per_node:
        return (*_data_parallel(base, layout, cluster, env), *_ray(base, layout, cluster, env))
    return (*_multi_node(base, layout, cluster, env), *_ray(base, layout, cluster, env))


def _serve(name: str) -> list[str]:
    return ["vllm", "serve", f"./{name}" if name.startswith("-") else name]


def _degrees(layout: Layout) -> list[str]:
    words = ["--tensor-parallel-size", str(layout.tp)]
    for flag, degree in (
        ("--pipeline-parallel-size", layout.pp),
        ("--prefill-context-parallel-size", layout.cp),
        ("--decode-context-parallel-size", layout.dcp),
    ):
        if degree > 1:
            words += [flag, str(degree)]
    return words + (["--enable-expert-parallel"] if layout.ep > 1 else [])


def _replicas(layout: Layout) -> list[str]:
    return ["--data-parallel-size", str(layout.dp)] if layout.dp > 1 else []


def _limits(workload: Serve, settings: ServeSettings) -> list[str]:
    words = ["--max-model-len", str(workload.context)]
    for flag, value in (
        ("--max-num-seqs", settings.max_num_seqs),
        ("--max-num-batched-tokens", settings.max_num_batched_tokens),
        ("--gpu-memory-utilization", settings.utilization),
        ("--block-size", settings.block_size),
        ("--quantization", settings.quantization),
        ("--dtype", _DTYPES.get(settings.dtype, settings.dtype) if settings.dtype else None),
    ):
        if value is not None:
            words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    if settings.kv_dtype != "auto":
        words += ["--kv-cache-dtype", _KV_DTYPES.get(settings.kv_dtype, settings.kv_dtype)]
    if settings.enforce_eager:
        words.append("--enforce-eager")
    if settings.speculative:
        words += ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}']
    if settings.text_only:
        words += ["--limit-mm-per-prompt", '{"image": 0, "video": 0}']
    return words


def _environment(layout: Layout) -> tuple[tuple[str, str], ...]:
    if not layout.stage_layers or layout.pp == 1:
        return ()
    return (("VLLM_PP_LAYER_PARTITION", ",".join(map(str, layout.stage_layers))),)


def _join(words: list[str]) -> str:
    """Words quoted for a shell; the two address variables stay variables."""
    return " ".join(f'"{w}"' if w in {"$HEAD_IP", "$NODE_IP"} else shlex.quote(w) for w in words)


def _nodes_used(layout: Layout, cluster: Cluster) -> int:
    return -(-layout.world // cluster.devices_per_node)


def _multi_node(base: list[str], layout: Layout, cluster: Cluster, env: tuple[tuple[str, str], ...]) -> list[Command]:
    """The mp executor over several nodes; every node holds equally many ranks (engine/arg_utils.py:2380-2560)."""
    nodes = _nodes_used(layout, cluster)
    if layout.world % nodes:
        return []
    out = []
    for node in range(nodes):
        words = [*base, *_replicas(layout), "--nnodes", str(nodes), "--node-rank", str(node)]
        words += ["--master-addr", "$HEAD_IP"] + (["--headless"] if node else [])
        note = _HEAD if node == 0 else "no API server here; start it together with node 0"
        out.append(Command(node, "serve (mp)", _join(words), env, note))
    return out


def _data_parallel(
    base: list[str], layout: Layout, cluster: Cluster, env: tuple[tuple[str, str], ...]
) -> list[Command]:
    """Replicas inside nodes: node 0 serves and balances, the others run their replicas headless."""
    local = cluster.devices_per_node // (layout.world // layout.dp)
    out = []
    for node, start in enumerate(range(0, layout.dp, local)):
        words = [*base, *_replicas(layout), "--data-parallel-size-local", str(min(local, layout.dp - start))]
        if node:
            words += ["--data-parallel-start-rank", str(start), "--headless"]
        words += ["--data-parallel-address", "$HEAD_IP", "--data-parallel-rpc-port", str(DP_PORT)]
        note = _HEAD if node == 0 else "no API server here"
        out.append(Command(node, "serve (data parallel)", _join(words), env, note))
    return out


def _ray(base: list[str], layout: Layout, cluster: Cluster, env: tuple[tuple[str, str], ...]) -> list[Command]:
    """A Ray cluster over the nodes, and one serve command on the head. Ray is not picked unless it is asked for."""
    nodes = _nodes_used(layout, cluster)
    address = (("VLLM_HOST_IP", '"$NODE_IP"'),)
    here = "set NODE_IP to this node's own address"
    head = ["ray", "start", "--head", f"--port={RAY_PORT}", "--node-ip-address", "$NODE_IP"]
    out = [Command(0, "ray head", _join(head), address, here)]
    for node in range(1, nodes):
        text = f'ray start --address="$HEAD_IP:{RAY_PORT}" --node-ip-address "$NODE_IP"'
        out.append(Command(node, "ray worker", text, address, f"{_HEAD}, {here.removeprefix('set ')}"))
    backend = ["--distributed-executor-backend", "ray"]
    if layout.dp > 1:
        local = max(1, cluster.devices_per_node // (layout.world // layout.dp))
        backend = ["--data-parallel-backend", "ray", "--data-parallel-size-local", str(min(local, layout.dp))]
    text = _join([*base, *_replicas(layout), *backend])
    out.append(Command(0, "serve (ray)", text, (*env, *address), "once every node has joined"))
    return out

"""The ``vllm serve`` commands of a layout: one node, several nodes (mp), several nodes (Ray), data parallel.

A command is the scored point: lengths, batch limits, utilization and dtypes are written out, so that a later default
cannot move it. Everything that comes from the user is quoted for a POSIX shell. ``$HEAD_IP`` is the address of node
0, ``$NODE_IP`` and ``$NODE_RANK`` address and number of the node where the command is typed.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, replace

from meshwright.errors import InputError
from meshwright.specs.atlas import models
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

#: Nodes whose commands are written one by one; beyond that one command stands for all but the first.
MAX_WRITTEN = 8

#: Words that the shell is to expand: our own variables, and the first replica of a node.
_OURS = re.compile(r"\$(HEAD_IP|NODE_IP|NODE_RANK)|\$\(\(\$NODE_RANK \* \d+\)\)")

_Env = tuple[tuple[str, str], ...]

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
        spec_name: the model as the user wrote it: a hub id, a path, or an atlas name (see ``model_argument``).
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
    name, wanted = model_argument(spec_name)
    written = _written(name, layout, cluster, workload, settings)
    if not wanted:
        return written
    return tuple(
        replace(c, note="; ".join(filter(None, (c.note, wanted)))) if c.text.startswith("vllm") else c for c in written
    )


def model_argument(name: str) -> tuple[str, str]:
    """What ``vllm serve`` is given for a model, and what the user must replace in it (empty: nothing).

    vLLM loads weights, so a ``config.json`` becomes its folder and an atlas name the hub id it was read from.
    """
    if name.endswith(".json") and os.path.isfile(name):
        folder, file = os.path.split(name)
        if file == "config.json":
            return folder or ".", ""
        return name, "replace the file by the folder or hub id that holds the weights"
    entry = None if os.path.exists(name) else models.find(name)
    if entry is None or "/" in name:
        return name, ""
    known = models.aliases(entry)
    hub = next((alias for alias in known if "/" in alias), "")
    return (hub, "") if hub else (name, "no hub id is known: replace the name by the folder that holds the weights")


def _written(
    name: str, layout: Layout, cluster: Cluster, workload: Serve, settings: ServeSettings
) -> tuple[Command, ...]:
    base = _serve(name) + _degrees(layout) + _limits(workload, settings)
    env = _environment(layout)
    if layout.world <= cluster.devices_per_node:
        text = _join(base + _replicas(layout))
        return (Command(0 if cluster.nodes > 1 else None, "serve", text, env),)
    replica = layout.world // layout.dp
    if layout.dp > 1 and replica <= cluster.devices_per_node:
        return (*_data_parallel(base, layout, cluster, env), *_ray(base, layout, cluster, env))
    return (*_multi_node(base, layout, cluster, env), *_ray(base, layout, cluster, env))


def _serve(name: str) -> list[str]:
    if _OURS.fullmatch(name) or name.startswith("-"):
        name = f"./{name}"
    return ["vllm", "serve", name]


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


def _environment(layout: Layout) -> _Env:
    if not layout.stage_layers or layout.pp == 1:
        return ()
    return (("VLLM_PP_LAYER_PARTITION", ",".join(map(str, layout.stage_layers))),)


def _join(words: list[str]) -> str:
    """Words quoted for a shell; the few variables of our own stay variables."""
    return " ".join(f'"{w}"' if _OURS.fullmatch(w) else shlex.quote(w) for w in words)


def _nodes_used(layout: Layout, cluster: Cluster) -> int:
    return -(-layout.world // cluster.devices_per_node)


@dataclass(frozen=True, slots=True)
class _Node:
    """A node to write a command for, or all nodes but the first at once where there are many."""

    number: int | None
    where: str
    rank: str
    note: str

    def start(self, local: int) -> str:
        """First replica of the node when every node holds ``local`` of them."""
        return f"$(({self.rank} * {local}))" if self.number is None else str(self.number * local)


def _nodes(count: int, headless: str) -> list[_Node]:
    head = _Node(0, "", "0", _HEAD)
    if count > MAX_WRITTEN:
        every = f"on each of nodes 1 to {count - 1} set HEAD_IP and NODE_RANK (its number); {headless}"
        return [head, _Node(None, f", nodes 1 to {count - 1}", "$NODE_RANK", every)]
    return [head, *(_Node(number, "", str(number), f"set HEAD_IP; {headless}") for number in range(1, count))]


def _multi_node(base: list[str], layout: Layout, cluster: Cluster, env: _Env) -> list[Command]:
    """The mp executor over several nodes; every node holds equally many ranks (engine/arg_utils.py:2380-2560)."""
    count = _nodes_used(layout, cluster)
    if layout.world % count:
        return []
    out = []
    for node in _nodes(count, "no API server here; start it together with node 0"):
        words = [*base, *_replicas(layout), "--nnodes", str(count), "--node-rank", node.rank]
        words += ["--master-addr", "$HEAD_IP"] + ([] if node.number == 0 else ["--headless"])
        out.append(Command(node.number, f"serve (mp){node.where}", _join(words), env, node.note))
    return out


def _data_parallel(base: list[str], layout: Layout, cluster: Cluster, env: _Env) -> list[Command]:
    """Replicas inside nodes: node 0 serves and balances, the others run their replicas headless."""
    most = cluster.devices_per_node // (layout.world // layout.dp)
    count = -(-layout.dp // most)
    if count > MAX_WRITTEN and layout.dp % most:
        return []
    out = []
    for node in _nodes(count, "no API server here"):
        local = most if node.number is None else min(most, layout.dp - node.number * most)
        words = [*base, *_replicas(layout), "--data-parallel-size-local", str(local)]
        if node.number != 0:
            words += ["--data-parallel-start-rank", node.start(most), "--headless"]
        words += ["--data-parallel-address", "$HEAD_IP", "--data-parallel-rpc-port", str(DP_PORT)]
        out.append(Command(node.number, f"serve (data parallel){node.where}", _join(words), env, node.note))
    return out


def _ray(base: list[str], layout: Layout, cluster: Cluster, env: _Env) -> list[Command]:
    """A Ray cluster over the nodes, and one serve command on the head. Ray is not picked unless it is asked for."""
    replica = layout.world // layout.dp
    count = _nodes_used(layout, cluster)
    address: _Env = (("VLLM_HOST_IP", "$NODE_IP"),)
    own = "set NODE_IP to this node's own address"
    head = ["ray", "start", "--head", f"--port={RAY_PORT}", "--node-ip-address", "$NODE_IP"]
    join = f'ray start --address="$HEAD_IP:{RAY_PORT}" --node-ip-address "$NODE_IP"'
    out = [Command(0, "ray head", _join(head), address, own)]
    if count > MAX_WRITTEN:
        out.append(Command(None, f"ray worker, nodes 1 to {count - 1}", join, address, f"set HEAD_IP; {own}"))
    else:
        out += [Command(node, "ray worker", join, address, f"set HEAD_IP; {own}") for node in range(1, count)]
    backend = ["--distributed-executor-backend", "ray"]
    if layout.dp > 1:
        local = max(1, cluster.devices_per_node // replica)
        backend = ["--data-parallel-backend", "ray", "--data-parallel-size-local", str(min(local, layout.dp))]
        if replica > cluster.devices_per_node:
            address = (*address, ("VLLM_RAY_DP_PACK_STRATEGY", "span"))
    text = _join([*base, *_replicas(layout), *backend])
    out.append(Command(0, "serve (ray)", text, (*env, *address), "once every node has joined"))
    return out

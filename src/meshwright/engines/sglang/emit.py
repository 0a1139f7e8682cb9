"""What to type to start an SGLang deployment: one node, several nodes, replicas behind a router, prefill and decode
pools, and the files of LeaderWorkerSet and Slurm.

``$HEAD_IP`` is the address of a server's first node, ``$NODE_RANK`` the number of the node inside that server.
Sources: launch forms of ``sglang serve`` 0.5.23 (fields/parallel.py, fields/disagg.py); ``sglang_router`` command line
(``--pd-disaggregation --prefill URL PORT --decode URL``, ``--worker-urls``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.engines import manifests
from meshwright.engines.base import Deployment, Emission, OutFile, Request
from meshwright.engines.sglang import words as w
from meshwright.engines.sglang.parse import is_blackwell, is_sparse
from meshwright.engines.sglang.pools import pool_rules
from meshwright.errors import InputError
from meshwright.specs.atlas import models
from meshwright.specs.cluster import Cluster
from meshwright.specs.command import Command
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve

#: Nodes of one server whose commands are written one by one; beyond that one command stands for all but the first.
MAX_WRITTEN = 8
#: Port on which a prefill server introduces itself (fields/disagg.py).
BOOTSTRAP_PORT = 8998
IMAGE = "lmsysorg/sglang:v0.5.23"
OPTIONS = ("connector", "ib_device", "image", "name", "interface", "experts")
CONNECTORS = ("mooncake", "nixl", "mori", "mooncake_tcp")

_Env = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Server:
    """One server to be started.

    Attributes:
        base: its words without those of nodes.
        layout: degrees.
        ranks: devices it takes.
        first: number of its first node.
        per_node: devices of a node.
        purpose: what it is for.
        env: environment of every node.
    """

    base: tuple[str, ...]
    layout: Layout
    ranks: int
    first: int
    per_node: int
    purpose: str
    env: _Env

    @property
    def nodes(self) -> int:
        """Nodes that it spans."""
        return -(-self.ranks // self.per_node)


def emit(request: Request) -> Emission:
    """Commands and files of a request.

    Raises:
        InputError: SGLang cannot be started that way; the line says which way it can.
    """
    if not isinstance(request.workload, Serve):
        raise InputError("SGLang serves and does not train; use --engine megatron or torchtitan")
    unknown = sorted(set(request.options) - set(OPTIONS))
    if unknown:
        raise InputError(f"unknown option {unknown[0][:30]!r} for SGLang; known: {', '.join(OPTIONS)}")
    settings = request.settings or ServeSettings()
    moe = is_mixture(request)
    if request.prefill is not None:
        return _pools(request, request.prefill, request.workload, settings, moe)
    how = request.deployment or usual(request.layout, request.cluster, moe)
    if how in {"headless", "hybrid", "kuberay"}:
        raise InputError(f"SGLang has no {how} deployment; it has single, mp, ray, external, pools, lws and slurm")
    if how == "pools":
        raise InputError("pools need the layout of the prefill side; give --prefill and --decode")
    if how == "external":
        return _replicas(request, request.workload, settings, moe)
    server = _server(request, request.layout, request.workload, settings, moe, 0, "serve")
    if how == "single" and server.nodes > 1:
        raise InputError(
            f"{request.layout} needs {server.ranks} devices, a node has {server.per_node}; use a deployment over "
            f"{server.nodes} nodes (mp)"
        )
    if server.nodes > 1 and request.layout.dp > 1 and not w.is_attention_dp(request.layout, moe):
        return _replicas(request, request.workload, settings, moe)
    if how == "ray":
        text = w.join([*server.base, "--use-ray", *(_multi(server, "0")[2:] if server.nodes > 1 else [])])
        note = "inside a Ray cluster that holds every device (ray start on each node first)"
        return Emission((Command(0, "serve (ray)", text, server.env, note),), notes=_notes(server, request))
    files = _files(request, server) if how in {"lws", "slurm"} else ()
    return Emission(tuple(_commands(server)), files, _notes(server, request))


def usual(layout: Layout, cluster: Cluster, moe: bool) -> Deployment:
    """How a layout is started on a cluster when nothing is said."""
    if layout.world <= cluster.devices_per_node:
        return "single"
    return "mp" if w.is_attention_dp(layout, moe) or layout.dp == 1 else "external"


def is_mixture(request: Request) -> bool:
    """Whether the model has experts: as the request says, as the layout implies, or as the name tells."""
    told = request.options.get("experts")
    if told is not None:
        return told.lower() in {"1", "true", "yes", "on"}
    spec = known_spec(request)
    if spec is not None:
        return spec.moe is not None
    return request.layout.ep > 1 or request.layout.etp is not None


def known_spec(request: Request) -> ModelSpec | None:
    """The model, where the request brings it or the atlas knows its name."""
    if request.spec is not None:
        return request.spec
    return read_model(request.model) if models.find(request.model) is not None else None


def model_argument(name: str) -> str:
    """What the engine is given: an atlas name becomes the hub id it was read from."""
    entry = models.find(name)
    if entry is None or "/" in name:
        return name
    return next((alias for alias in models.aliases(entry) if "/" in alias), name)


def _server(
    request: Request, layout: Layout, workload: Serve, settings: ServeSettings, moe: bool, first: int, purpose: str
) -> Server:
    cluster = request.cluster
    base = w.server(model_argument(request.model), layout, moe, workload, settings)
    server = Server(
        tuple(base), layout, layout.world, first, cluster.devices_per_node, purpose, _environment(request, layout, moe)
    )
    if first + server.nodes > cluster.nodes:
        raise InputError(
            f"{layout} needs {server.ranks} devices from node {first} on, {cluster} has {cluster.devices} in all"
        )
    if server.ranks % server.nodes:
        raise InputError(
            f"{server.ranks} ranks over {server.nodes} nodes are not equally many a node, as SGLang needs; choose "
            f"degrees whose product is a multiple of {server.nodes}"
        )
    return server


def _environment(request: Request, layout: Layout, moe: bool) -> _Env:
    env: list[tuple[str, str]] = []
    if layout.stage_layers and layout.pp > 1:
        env.append(("SGLANG_PP_LAYER_PARTITION", ",".join(map(str, layout.stage_layers))))
    if layout.world > request.cluster.devices_per_node and "interface" in request.options:
        env += [(name, request.options["interface"]) for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")]
    if request.options.get("connector") == "mooncake_tcp" and request.prefill is not None:
        env.append(("MC_FORCE_TCP", "1"))
    return tuple(env)


def _multi(server: Server, rank: str) -> list[str]:
    """Words of one node of a server over several nodes; the same on each but for the rank."""
    if server.nodes == 1:
        return []
    words = ["--nnodes", str(server.nodes), "--node-rank", rank]
    return [*words, "--dist-init-addr", f"$HEAD_IP:{w.RENDEZVOUS_PORT}"]


def _commands(server: Server) -> list[Command]:
    """One command a node, or one for all nodes but the first where there are many."""
    head = "set HEAD_IP to the address of node 0 of this server"
    if server.nodes == 1:
        return [Command(server.first, server.purpose, w.join(server.base), server.env)]
    if server.nodes > MAX_WRITTEN:
        first = Command(server.first, server.purpose, w.join([*server.base, *_multi(server, "0")]), server.env, head)
        note = f"on each of the nodes 1 to {server.nodes - 1} of this server set NODE_RANK (its number) and HEAD_IP"
        rest = w.join([*server.base, *_multi(server, "$NODE_RANK")])
        return [first, Command(None, f"{server.purpose}, other nodes", rest, server.env, note)]
    return [
        Command(
            server.first + node, server.purpose, w.join([*server.base, *_multi(server, str(node))]), server.env, head
        )
        for node in range(server.nodes)
    ]


def _replicas(request: Request, workload: Serve, settings: ServeSettings, moe: bool) -> Emission:
    """Independent servers, as many as replicas fit a node in each, behind a router (replicas do not span nodes)."""
    layout, cluster = request.layout, request.cluster
    one = layout.world // layout.dp
    if one > cluster.devices_per_node:
        servers = [
            _server(
                request,
                _single(layout),
                workload,
                settings,
                moe,
                n * -(-one // cluster.devices_per_node),
                f"replica {n}",
            )
            for n in range(layout.dp)
        ]
    else:
        most = cluster.devices_per_node // one
        counts = [min(most, layout.dp - at) for at in range(0, layout.dp, most)]
        servers = [
            _server(request, replace(layout, dp=n), workload, settings, moe, node, f"replicas of node {node}")
            for node, n in enumerate(counts)
        ]
    commands = [
        replace(c, text=f"{c.text} --host 0.0.0.0 --port {w.PORT}", note=c.note or "reached by the router")
        for server in servers
        for c in _commands(server)
    ]
    urls = " ".join(f"http://NODE{server.first}:{w.PORT}" for server in servers)
    router = f"python -m sglang_router.launch_router --worker-urls {urls} --host 0.0.0.0 --port {w.ROUTER_PORT}"
    note = "put the address of each node in place of NODE0, NODE1, ..."
    commands.append(Command(0, "router", router, (), note))
    notes = ("replicas of one server do not span nodes in SGLang: a server a node, a router in front",)
    return Emission(tuple(commands), notes=(*notes, *_notes(servers[0], request)))


def _single(layout: Layout) -> Layout:
    """One replica of a layout."""
    return replace(layout, dp=1)


def _pools(request: Request, prefill: Layout, workload: Serve, settings: ServeSettings, moe: bool) -> Emission:
    """Prefill and decode servers and the router that joins them."""
    connector = request.options.get("connector", "mooncake")
    if connector not in CONNECTORS:
        raise InputError(f"SGLang has no transfer backend {connector[:20]!r}; it has {', '.join(CONNECTORS)}")
    spec = known_spec(request)
    if spec is not None:
        for rule in pool_rules(spec, prefill, request.layout):
            if rule.severity == "illegal":
                raise InputError(f"{rule.message}; {rule.way_out}")
    first = _server(request, prefill, workload, settings, moe, 0, "prefill")
    shared = first.ranks + request.layout.world <= first.per_node
    start = 0 if shared else first.nodes
    second = _server(request, request.layout, workload, settings, moe, start, "decode")
    transfer = ["--disaggregation-transfer-backend", connector]
    if "ib_device" in request.options:
        transfer += ["--disaggregation-ib-device", request.options["ib_device"]]
    ports = (w.PORT, w.PORT + 1 if shared else w.PORT)
    sides = []
    for server, mode, port in ((first, "prefill", ports[0]), (second, "decode", ports[1])):
        own = ["--disaggregation-mode", mode, *transfer, "--host", "0.0.0.0", "--port", str(port)]
        if mode == "prefill":
            own += ["--disaggregation-bootstrap-port", str(BOOTSTRAP_PORT)]
        elif shared:
            own += ["--base-gpu-id", str(first.ranks)]
        sides.append(replace(server, base=(*server.base, *own)))
    router = [
        *("python", "-m", "sglang_router.launch_router", "--pd-disaggregation"),
        *("--prefill", f"http://$PREFILL_IP:{ports[0]}", str(BOOTSTRAP_PORT)),
        *("--decode", f"http://$DECODE_IP:{ports[1]}", "--host", "0.0.0.0", "--port", str(w.ROUTER_PORT)),
    ]
    note = "set PREFILL_IP and DECODE_IP to the first node of each side; start it once both answer"
    commands = [*(c for side in sides for c in _commands(side)), Command(0, "router", w.join(router), (), note)]
    notes = list(_notes(sides[1], request))
    notes.append("page size, cache dtype and layout must be equal on both sides; the decode side checks it")
    if spec is not None:
        notes += [f"{r.message}; {r.way_out}" for r in pool_rules(spec, prefill, request.layout)]
    if connector == "mooncake" and "ib_device" not in request.options:
        notes.append("name the RDMA devices with --disaggregation-ib-device where a node has several networks")
    return Emission(tuple(commands), notes=tuple(notes))


def _files(request: Request, server: Server) -> tuple[OutFile, ...]:
    """Files of LeaderWorkerSet or Slurm around the server."""
    name = manifests.deployment_name(request.options.get("name", request.model))
    reach = ["--host", "0.0.0.0", "--port", str(w.PORT)]
    text = w.join([*server.base, *reach, *_multi(server, "$NODE_RANK")])
    if request.deployment == "slurm":
        made = manifests.slurm_script(name, server.nodes, server.per_node, server.env, text)
        return (OutFile(f"{name}.sbatch", made, "sbatch it; one task a node starts its part of the server"),)
    image = request.options.get("image", IMAGE)
    pod = manifests.Pod(name, image, min(server.ranks, server.per_node), dict(server.env), w.PORT)
    made = manifests.leader_worker_set(pod, server.nodes, text, text)
    return (OutFile(f"{name}.yaml", made, "kubectl apply -f it; needs the LeaderWorkerSet controller"),)


def _notes(server: Server, request: Request) -> tuple[str, ...]:
    notes = []
    if server.nodes > 1:
        if "interface" not in request.options:
            notes.append(
                "where a node has several networks set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface of "
                "HEAD_IP, or the ranks look for each other on the wrong one"
            )
        notes.append(
            f"port {w.RENDEZVOUS_PORT} and the ports above it must be open between the nodes: ranks meet there"
        )
    if server.ranks > 1:
        notes.append("in a container give 32 GiB of /dev/shm (--shm-size 32g): ranks of a node exchange through it")
    spec = known_spec(request)
    if spec is not None and is_sparse(spec) and is_blackwell(request.cluster) and "--kv-cache-dtype" not in server.base:
        notes.append("on this device SGLang caches sparse attention in fp8 unless told otherwise; bf16 is counted")
    if "deepep" in server.base and server.nodes > 1:
        notes.append(
            "DeepEP between nodes needs NVSHMEM over InfiniBand (IBGDA); without it use --moe-a2a-backend none"
        )
    return tuple(notes)

"""The commands of one vLLM instance on a cluster, node by node: one node, mp, Ray, headless replicas, load balancing.

Sources: engine/arg_utils.py:2380-2560 and config/parallel.py of 0.33.0 (which flags go together), vLLM docs
"Parallelism and Scaling" and "Data Parallel Deployment".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.engines.base import Deployment
from meshwright.engines.vllm.words import (
    API_PORT,
    DP_PORT,
    Env,
    degree_words,
    join,
    limit_words,
    partition,
    replica_words,
    serve_words,
)
from meshwright.errors import InputError
from meshwright.specs.cluster import Cluster
from meshwright.specs.command import Command
from meshwright.specs.layout import Layout
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve

#: Port of Ray's head (``ray start`` default).
RAY_PORT = 6379

#: Nodes (or replicas of their own) whose commands are written one by one; beyond that one command stands for many.
MAX_WRITTEN = 8

#: What several nodes need beside the command, with the reason.
ADDRESSES: Env = (
    ("VLLM_HOST_IP", "$NODE_IP"),
    ("NCCL_SOCKET_IFNAME", "$IFNAME"),
    ("GLOO_SOCKET_IFNAME", "$IFNAME"),
)
WHY = {
    "VLLM_HOST_IP": "the address under which other nodes reach this one; with several networks vLLM may pick another",
    "NCCL_SOCKET_IFNAME": "the interface over which NCCL's ranks first meet; it may otherwise pick docker0",
    "GLOO_SOCKET_IFNAME": "the same for Gloo, which carries the CPU groups",
    "VLLM_RAY_DP_PACK_STRATEGY": "a replica is larger than a node, so Ray may spread it over nodes",
    "VLLM_PP_LAYER_PARTITION": "layers of each pipeline stage, made by hand",
    "CUDA_VISIBLE_DEVICES": "devices of this process; its neighbours on the node use the others",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "the address at which the other pool asks for cache addresses",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "its port; replicas take the next ones, so pools on one node need a distance",
    "VLLM_MOONCAKE_BOOTSTRAP_PORT": "where decode instances find the prefill workers",
    "VLLM_KV_CACHE_LAYOUT": "with unequal tensor parallel sizes heads are cut out of blocks, which needs heads outside",
    "VLLM_SSM_CONV_STATE_LAYOUT": "convolution states are handed over by dimension (hybrid models)",
}
SHARED_MEMORY = "in a container add --ipc=host or --shm-size 16g: ranks of a node exchange through /dev/shm (64 MiB)"


@dataclass(frozen=True, slots=True)
class Instance:
    """One vLLM deployment to write commands for.

    Attributes:
        name: the model as vLLM is given it.
        layout, cluster, workload, settings: as in a request.
        extra: further words (connector, all-to-all backend, port).
        env: further environment.
        head: variable that holds the address of its first node.
        first: number of its first node in the whole cluster.
        purpose: what every command's purpose begins with.
        shared: the whole cluster has several nodes, also where the instance has one.
    """

    name: str
    layout: Layout
    cluster: Cluster
    workload: Serve
    settings: ServeSettings
    extra: tuple[str, ...] = ()
    env: Env = ()
    head: str = "$HEAD_IP"
    first: int = 0
    purpose: str = "serve"
    shared: bool = False

    @property
    def base(self) -> list[str]:
        """Words that every node's command begins with, replicas left out."""
        limits = limit_words(self.workload, self.settings)
        return [*serve_words(self.name), *degree_words(self.layout), *limits, *self.extra]

    @property
    def replica(self) -> int:
        """Devices of one replica."""
        return self.layout.world // self.layout.dp

    @property
    def per_node(self) -> int:
        """Whole replicas that a node holds (0: a replica is larger than a node)."""
        return self.cluster.devices_per_node // self.replica

    @property
    def nodes(self) -> int:
        """Nodes that it occupies."""
        if self.layout.dp > 1 and self.per_node:
            return -(-self.layout.dp // self.per_node)
        return -(-self.layout.world // self.cluster.devices_per_node)

    def command(self, node: int | None, purpose: str, words: Sequence[str], env: Env = (), note: str = "") -> Command:
        """One command with the instance's environment."""
        place = None if node is None else node + self.first
        return Command(place, f"{self.purpose} {purpose}".strip(), join(words), (*self.env, *env), note)


@dataclass(frozen=True, slots=True)
class Node:
    """A node to write a command for, or (``number`` None) all nodes but the first at once."""

    number: int | None
    where: str
    rank: str
    note: str

    def start(self, local: int) -> str:
        """First replica of the node when every node holds ``local`` of them."""
        return f"$(($NODE_RANK * {local}))" if self.number is None else str(self.number * local)


def nodes(i: Instance, count: int, headless: str, *, all_at_once: bool = False) -> list[Node]:
    """The nodes of an instance; beyond ``MAX_WRITTEN`` (or when asked) one row stands for all but the first."""
    head = i.head.removeprefix("$")
    set_own = "set NODE_IP and IFNAME to this node's address and interface"
    first = Node(0, "", "0", f"set {head} to the address of node {i.first}; {set_own}")
    if count > MAX_WRITTEN or all_at_once:
        every = (
            f"on each of nodes {i.first + 1} to {i.first + count - 1} set {head} and NODE_RANK (1, 2, ...); {set_own}"
        )
        return [
            first,
            Node(None, f", nodes {i.first + 1} to {i.first + count - 1}", "$NODE_RANK", f"{every}; {headless}"),
        ]
    rest = (Node(n, "", str(n), f"set {head}; {set_own}; {headless}") for n in range(1, count))
    return [first, *rest]


def single(i: Instance) -> list[Command]:
    """Everything on one node.

    Raises:
        InputError: it does not fit on one.
    """
    if i.layout.world > i.cluster.devices_per_node:
        raise InputError(
            f"{i.layout} needs {i.layout.world} devices, a node has {i.cluster.devices_per_node}; "
            "use mp, ray or headless"
        )
    words = [*i.base, *replica_words(i.layout)]
    return [i.command(0 if i.shared or i.cluster.nodes > 1 else None, "", words, partition(i.layout))]


def mp(i: Instance, *, all_at_once: bool = False) -> list[Command]:
    """The mp executor over several nodes; every node holds equally many ranks (engine/arg_utils.py:2380-2560).

    Raises:
        InputError: one node is enough, or the ranks are not equally many a node.
    """
    count = -(-i.layout.world // i.cluster.devices_per_node)
    if count == 1:
        raise InputError(
            f"{i.layout} fits on one node; mp over several nodes is for more than {i.layout.world} devices"
        )
    if i.layout.world % count:
        raise InputError(f"{i.layout.world} ranks are not equally many on {count} nodes; use ray, or other degrees")
    out = []
    for node in nodes(i, count, "no API server here; start it together with the first node", all_at_once=all_at_once):
        words = [*i.base, *replica_words(i.layout), "--nnodes", str(count), "--node-rank", node.rank]
        words += ["--master-addr", i.head] + ([] if node.number == 0 else ["--headless"])
        env = (*partition(i.layout), *ADDRESSES)
        out.append(i.command(node.number, f"(mp){node.where}", words, env, node.note))
    return out


def headless(i: Instance, *, all_at_once: bool = False) -> list[Command]:
    """Replicas inside nodes: the first node serves and balances, the others run their replicas headless.

    Raises:
        InputError: there is one replica, a replica is larger than a node, or one node is enough.
    """
    most = _replicas_a_node(i, "headless")
    count = -(-i.layout.dp // most)
    if (count > MAX_WRITTEN or all_at_once) and i.layout.dp % most:
        raise InputError(f"{i.layout.dp} replicas are not equally many on {count} nodes of {most}; choose a multiple")
    out = []
    for node in nodes(i, count, "no API server here", all_at_once=all_at_once):
        local = most if node.number is None else min(most, i.layout.dp - node.number * most)
        words = [*i.base, *replica_words(i.layout), "--data-parallel-size-local", str(local)]
        if node.number != 0:
            words += ["--data-parallel-start-rank", node.start(most), "--headless"]
        words += ["--data-parallel-address", i.head, "--data-parallel-rpc-port", str(DP_PORT)]
        env = (*partition(i.layout), *ADDRESSES)
        out.append(i.command(node.number, f"(data parallel){node.where}", words, env, node.note))
    return out


def hybrid(i: Instance) -> list[Command]:
    """One API server a node for its own replicas; a load balancer stands in front of the nodes.

    Raises:
        InputError: nodes would hold unequal numbers of replicas, or one each (which is external load balancing).
    """
    most = _replicas_a_node(i, "hybrid")
    count = -(-i.layout.dp // most)
    if i.layout.dp % most:
        raise InputError(f"{i.layout.dp} replicas are not equally many on {count} nodes of {most}; choose a multiple")
    if most == 1:
        raise InputError("hybrid load balancing with 1 replica a node is external load balancing; use external")
    out = []
    for node in nodes(i, count, "put this node's API server behind the load balancer"):
        words = [
            *i.base,
            *replica_words(i.layout),
            "--data-parallel-hybrid-lb",
            "--data-parallel-size-local",
            str(most),
        ]
        words += ["--data-parallel-start-rank", node.start(most)]
        words += ["--data-parallel-address", i.head, "--data-parallel-rpc-port", str(DP_PORT)]
        env = (*partition(i.layout), *ADDRESSES)
        out.append(i.command(node.number, f"(hybrid load balancing){node.where}", words, env, node.note))
    return out


def external(i: Instance) -> list[Command]:
    """One process a replica, each with an API server of its own behind a load balancer (mixtures of experts only).

    Raises:
        InputError: there is one replica, or a replica is larger than a node.
    """
    if i.layout.dp == 1 or not i.per_node:
        raise InputError(f"external load balancing needs several replicas that fit on a node; {i.layout} has not")
    if i.layout.dp > MAX_WRITTEN * MAX_WRITTEN:
        words = [*_external_words(i, "$DP_RANK"), "--port", str(API_PORT)]
        every: Env = (*partition(i.layout), *ADDRESSES, ("CUDA_VISIBLE_DEVICES", "$DEVICES"))
        note = f"{i.layout.dp} times, DP_RANK 0 to {i.layout.dp - 1}, each with its DEVICES and a port of its own"
        return [i.command(None, "(external load balancing)", words, every, f"{note}; set HEAD_IP, NODE_IP and IFNAME")]
    out = []
    for rank in range(i.layout.dp):
        node, place = divmod(rank, i.per_node)
        devices = ",".join(map(str, range(place * i.replica, (place + 1) * i.replica)))
        env: Env = (("CUDA_VISIBLE_DEVICES", devices),) if i.replica < i.cluster.devices_per_node else ()
        env = (*partition(i.layout), *(ADDRESSES if i.nodes > 1 else ()), *env)
        words = [*_external_words(i, str(rank)), "--port", str(API_PORT + place)]
        note = "set HEAD_IP, NODE_IP and IFNAME; " if i.nodes > 1 else ""
        where = node if i.cluster.nodes > 1 else None
        out.append(i.command(where, f"(replica {rank})", words, env, f"{note}put it behind the load balancer"))
    return out


def _external_words(i: Instance, rank: str) -> list[str]:
    words = [*i.base, *replica_words(i.layout), "--data-parallel-rank", rank]
    if i.nodes > 1:
        words += ["--data-parallel-address", i.head, "--data-parallel-rpc-port", str(DP_PORT)]
    return words


def _replicas_a_node(i: Instance, way: str) -> int:
    if i.layout.dp == 1 or not i.per_node:
        raise InputError(f"{way} needs several replicas that fit on a node; {i.layout} has not; use mp or ray")
    if i.nodes == 1:
        raise InputError(f"{i.layout.dp} replicas fit on one node; {way} is for several; use single")
    return i.per_node


def ray(i: Instance) -> list[Command]:
    """A Ray cluster over the nodes, and one serve command on the head. Ray is not picked unless it is asked for."""
    count = -(-i.layout.world // i.cluster.devices_per_node)
    env = ADDRESSES
    own = "set NODE_IP and IFNAME to this node's own address and interface"
    head = ["ray", "start", "--head", f"--port={RAY_PORT}", "--node-ip-address", "$NODE_IP"]
    pool = "" if i.purpose == "serve" else f"{i.purpose} "
    out = [Command(i.first, f"{pool}ray head", join(head), (*i.env, *env), own)]
    note = f"set {i.head.removeprefix('$')}; {own}"
    join_text = f'ray start --address="{i.head}:{RAY_PORT}" --node-ip-address "$NODE_IP"'
    if count > MAX_WRITTEN:
        where = f"{pool}ray worker, nodes {i.first + 1} to {i.first + count - 1}"
        out.append(Command(None, where, join_text, (*i.env, *env), note))
    else:
        rest = range(i.first + 1, i.first + count)
        out += [Command(n, f"{pool}ray worker", join_text, (*i.env, *env), note) for n in rest]
    words, more = ray_words(i)
    serve_env = (*i.env, *partition(i.layout), *env, *more)
    out.append(Command(i.first, f"{i.purpose} (ray)", join(words), serve_env, "once every node has joined"))
    return out


def ray_words(i: Instance) -> tuple[list[str], Env]:
    """The serve command on a Ray cluster, and the environment that it alone needs."""
    if i.layout.dp == 1:
        return [*i.base, "--distributed-executor-backend", "ray"], ()
    local = str(min(max(1, i.per_node), i.layout.dp))
    words = [*i.base, *replica_words(i.layout), "--data-parallel-backend", "ray", "--data-parallel-size-local", local]
    return words, () if i.per_node else (("VLLM_RAY_DP_PACK_STRATEGY", "span"),)


WAYS: Mapping[str, Callable[[Instance], list[Command]]] = {
    "single": single,
    "mp": mp,
    "ray": ray,
    "headless": headless,
    "external": external,
    "hybrid": hybrid,
}


def usual(i: Instance) -> Deployment:
    """How an instance is started unless asked otherwise: one node, headless replicas, mp, or Ray for uneven nodes."""
    if i.layout.world <= i.cluster.devices_per_node:
        return "single"
    if i.layout.dp > 1 and i.per_node:
        return "headless" if i.nodes <= MAX_WRITTEN or i.layout.dp % i.per_node == 0 else "ray"
    count = -(-i.layout.world // i.cluster.devices_per_node)
    return "mp" if i.layout.world % count == 0 else "ray"


def reasons(commands: Sequence[Command]) -> tuple[str, ...]:
    """A line on every variable of the environment that is not plain from its name, in the order of use."""
    used = dict.fromkeys(name for c in commands for name, _ in c.env)
    return tuple(f"{name}: {WHY[name]}" for name in used if name in WHY)

"""``torchrun`` commands, node by node: shared by every engine that trains from a script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from meshwright.errors import InputError
from meshwright.specs.cluster import Cluster
from meshwright.specs.command import Command

#: Port of the static rendezvous (torch/distributed/run.py, ``--master-port``).
PORT = 29500
#: Nodes whose commands are written one by one; beyond that one command stands for all but the first.
MAX_WRITTEN = 8

_OURS = re.compile(r"\$(HEAD_IP|NODE_RANK)")


def spread(world: int, cluster: Cluster) -> tuple[int, int]:
    """``(nodes, processes a node)`` of a world; ranks fill the nodes in order.

    Raises:
        InputError: more devices than the cluster has, or nodes that would take unequally many.
    """
    inside = cluster.devices_per_node
    if world > cluster.devices:
        raise InputError(f"{world} processes are needed, {cluster} has {cluster.devices} devices")
    if world <= inside:
        return 1, world
    if world % inside:
        raise InputError(
            f"{world} processes do not fill whole nodes of {inside} devices; choose a multiple of {inside}"
        )
    return world // inside, inside


def quoted(words: Sequence[str]) -> str:
    """Words quoted for a POSIX shell; our own variables stay variables."""
    return " ".join(f'"{w}"' if _OURS.fullmatch(w) else shlex.quote(w) for w in words)


def torchrun_commands(
    script: Sequence[str],
    world: int,
    cluster: Cluster,
    env: tuple[tuple[str, str], ...] = (),
    note: str = "",
) -> tuple[Command, ...]:
    """What to type on every node.

    Args:
        script: script with its words, or ``-m`` and a module with its words.
        world: processes in all.
        cluster: where it runs.
        env: environment the script needs.
        note: one line about the script.

    Raises:
        InputError: see ``spread``.
    """
    nodes, per_node = spread(world, cluster)
    first = ["torchrun", "--nproc-per-node", str(per_node)]
    if nodes == 1:
        return (Command(None, "train", quoted([*first, "--standalone", *script]), env, note),)
    meet = ["--nnodes", str(nodes), "--master-addr", "$HEAD_IP", "--master-port", str(PORT)]
    told = "; ".join(filter(None, (note, "set HEAD_IP to the address of node 0")))

    def command(node: int | None, rank: str, more: str = "") -> Command:
        words = [*first, *meet, "--node-rank", rank, *script]
        return Command(node, "train", quoted(words), env, told + more)

    if nodes <= MAX_WRITTEN:
        return tuple(command(n, str(n)) for n in range(nodes))
    return (
        command(0, "0"),
        command(None, "$NODE_RANK", f" and NODE_RANK to the number of the node, 1 to {nodes - 1}"),
    )

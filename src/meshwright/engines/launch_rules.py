"""Where the processes of a launch meet, and launchers inside launchers: what would wait for ever or start apart."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.specs.checks import broken
from meshwright.specs.rules import Rule


def rendezvous(
    nodes: int, node_rank: int | None, backend: str, endpoint: str | None, master: str | None
) -> Iterator[Rule]:
    """Rules of torchrun's rendezvous: without an address every node waits for itself.

    Source: torch/distributed/run.py get_rdzv_endpoint (static: ``--master-addr``, 127.0.0.1 unless set) and
    elastic/rendezvous/c10d_rendezvous_backend.py (no endpoint: localhost).
    """
    if node_rank is not None and node_rank >= nodes:
        yield broken(
            "node_rank_range",
            "illegal",
            f"--node-rank {node_rank} of {nodes} nodes; they are numbered 0 to {nodes - 1}",
            f"use 0 to {nodes - 1}, another number on every node",
            "torch/distributed/run.py",
            node_rank=node_rank,
            nodes=nodes,
        )
    if nodes == 1:
        return
    place = endpoint if backend != "static" else endpoint or master
    if not place:
        flag = "--master-addr" if backend == "static" else "--rdzv-endpoint"
        yield broken(
            "no_meeting_place",
            "unwise" if backend == "static" and not node_rank else "illegal",
            f"{nodes} nodes and no {flag}: every node looks for the others on itself and waits",
            f"add {flag} HOST_OF_NODE_0" + ("" if backend == "static" else ":29500") + " on every node",
            "torch/distributed/run.py get_rdzv_endpoint",
            nodes=nodes,
        )
    if backend == "static" and node_rank is None:
        yield broken(
            "node_rank_missing",
            "unwise",
            f"{nodes} nodes with static rendezvous and no --node-rank: typed like this on every node, all are node 0",
            "add --node-rank with the node's number, or --rdzv-backend c10d with --rdzv-endpoint",
            "torch/distributed/run.py --node-rank",
            nodes=nodes,
        )


def disagree(outer: tuple[str, int | None, int | None], inner: str, nodes: int | None) -> Iterator[Rule]:
    """A launcher that starts another one.

    Args:
        outer: name, nodes and processes a node of the outer launcher.
        inner: name of the inner one.
        nodes: nodes the inner one waits for.
    """
    name, outer_nodes, per_node = outer
    if per_node is not None and per_node > 1 and inner == "torchrun":
        yield broken(
            "launchers_multiply",
            "illegal",
            f"{name} starts {per_node} torchrun a node, each with all processes of the node",
            "start one torchrun a node (--ntasks-per-node 1)",
            per_node=per_node,
        )
    if outer_nodes and outer_nodes > 1 and nodes == 1:
        yield broken(
            "separate_worlds",
            "unwise",
            f"{name} starts {outer_nodes} nodes, {inner} on each waits for 1: these are {outer_nodes} runs that do not "
            "know of each other",
            f"add --nnodes {outer_nodes} and a rendezvous address",
            outer=outer_nodes,
            inner=1,
        )
    elif outer_nodes and nodes is not None and nodes != outer_nodes:
        yield broken(
            "nodes_disagree",
            "illegal",
            f"{name} starts {outer_nodes} nodes, {inner} waits for {nodes}",
            "give both the same number",
            outer=outer_nodes,
            inner=nodes,
        )

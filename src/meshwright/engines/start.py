"""The same torchrun line on every node, or a Slurm script that starts one on each. For engines whose job is a script.

``$HEAD_IP`` is the address of node 0, ``$NODE_RANK`` the number of the node where the line is typed; everything else is
quoted for a POSIX shell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.engines.base import Deployment, Emission, OutFile
from meshwright.errors import InputError
from meshwright.specs.cluster import Cluster
from meshwright.specs.command import Command

#: torchrun's usual port (torch/distributed/run.py ``--master-port``).
PORT = 29500

#: Nodes whose lines are written one by one; beyond that one line stands for all but the first.
MAX_WRITTEN = 8

#: Said with every command that runs on several nodes.
INTERFACE = "where a host has several networks set NCCL_SOCKET_IFNAME to the one that reaches the others"

_OURS = re.compile(r"\$(HEAD_IP(:\d+)?|NODE_IP|NODE_RANK|SLURM_PROCID|SLURM_JOB_ID)")


@dataclass(frozen=True, slots=True)
class Script:
    """What torchrun starts.

    Attributes:
        words: file or module, and its arguments.
        module: the first word is a module.
        env: environment it needs: name, value, one line on why.
        name: name of the job.
        notes: what the user has to replace.
    """

    words: tuple[str, ...]
    module: bool = False
    env: tuple[tuple[str, str, str], ...] = ()
    name: str = "train"
    notes: tuple[str, ...] = ()


def quoted(words: Sequence[str]) -> str:
    """Words quoted for a POSIX shell; our own variables stay variables."""
    return " ".join(f'"{w}"' if _OURS.fullmatch(w) else shlex.quote(w) for w in words)


def nodes_of(world: int, cluster: Cluster) -> tuple[int, int]:
    """Nodes and processes a node for a world: as few nodes as can be, equally many processes on each.

    Raises:
        InputError: more processes than devices, or no equal division over the nodes.
    """
    if world > cluster.devices:
        raise InputError(f"{world} devices are needed, {cluster} has {cluster.devices}")
    for nodes in range(-(-world // cluster.devices_per_node), cluster.nodes + 1):
        if world % nodes == 0:
            return nodes, world // nodes
    raise InputError(
        f"{world} processes cannot be dealt equally over {cluster.nodes} nodes of {cluster.devices_per_node}; torchrun "
        "starts as many on every node"
    )


def emission(script: Script, world: int, cluster: Cluster, deployment: Deployment | None) -> Emission:
    """Lines for every node, and with ``slurm`` a batch script.

    Raises:
        InputError: another deployment than ``single``, ``mp`` or ``slurm``, or a world that cannot be dealt.
    """
    nodes, per_node = nodes_of(world, cluster)
    if deployment not in {None, "single", "mp", "slurm"}:
        raise InputError(f"deployment {deployment}: a training job is started with torchrun (mp) or slurm")
    if deployment == "single" and nodes > 1:
        raise InputError(f"deployment single: {world} devices are on {nodes} nodes; leave it out")
    env = tuple((name, value) for name, value, _ in script.env)
    why = "; ".join(f"{name}={value}: {reason}" for name, value, reason in script.env)
    if deployment == "slurm":
        path = f"{script.name}.sbatch"
        command = Command(None, "submit", f"sbatch {shlex.quote(path)}", note="from a login node, once")
        text = _sbatch(script, nodes, per_node)
        return Emission((command,), (OutFile(path, text, "one torchrun on each node"),), script.notes)
    if nodes == 1:
        line = _line(["--standalone", f"--nproc-per-node={per_node}"], script)
        return Emission((Command(0, "train", line, env, why),), (), script.notes)
    commands = []
    for node in range(nodes if nodes <= MAX_WRITTEN else 1):
        head = f"--nproc-per-node={per_node} --nnodes={nodes} --node-rank={node} --master-addr=$HEAD_IP"
        note = "; ".join(filter(None, ("set HEAD_IP to the address of node 0", why if node == 0 else "")))
        commands.append(Command(node, "train", f"torchrun {head} --master-port={PORT} {_script(script)}", env, note))
    if nodes > MAX_WRITTEN:
        head = f"--nproc-per-node={per_node} --nnodes={nodes} --node-rank=$NODE_RANK --master-addr=$HEAD_IP"
        note = f"on every other node, NODE_RANK from 1 to {nodes - 1}"
        commands.append(Command(None, "train", f"torchrun {head} --master-port={PORT} {_script(script)}", env, note))
    return Emission(tuple(commands), (), script.notes)


def _script(script: Script) -> str:
    return shlex.join((*(("-m",) if script.module else ()), *script.words))


def _line(flags: Sequence[str], script: Script) -> str:
    return f"torchrun {' '.join(flags)} {_script(script)}"


def _sbatch(script: Script, nodes: int, per_node: int) -> str:
    """One torchrun a node; nodes meet at the first of the allocation."""
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={script.name}",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={per_node}",
        "#SBATCH --exclusive",
        "set -euo pipefail",
        "# Address of the first node of the allocation: where all nodes meet.",
        'HEAD_IP=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "export HEAD_IP",
    ]
    for name, value, reason in script.env:
        lines += [f"# {reason}", f"export {name}={shlex.quote(value)}"]
    meet = f'--rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$HEAD_IP:{PORT}"'
    lines.append(f"srun torchrun --nnodes={nodes} --nproc-per-node={per_node} {meet} {_script(script)}")
    return "\n".join(lines) + "\n"

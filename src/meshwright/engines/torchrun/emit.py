"""``torchrun`` commands, node by node: shared by every engine that trains from a script."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.engines.base import Deployment, Emission, OutFile
from meshwright.engines.start import INTERFACE, MAX_WRITTEN, PORT, quoted
from meshwright.errors import InputError
from meshwright.specs.cluster import Cluster
from meshwright.specs.command import Command

#: File of a Slurm job.
SCRIPT = "train.sbatch"


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


def slurm(inner: str, nodes: int, per_node: int) -> tuple[Command, OutFile]:
    """What to submit to Slurm, and the script: ``inner`` runs once on every node.

    ``inner`` may use ``$HEAD_IP`` (first host of the job), ``$SLURM_PROCID`` (number of the node) and
    ``$SLURM_JOB_ID``.
    """
    text = f"""#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={per_node}
#SBATCH --exclusive
# The first host of the job is where all processes meet.
export HEAD_IP=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
{inner}
"""
    command = Command(None, "submit", f"sbatch {SCRIPT}", (), INTERFACE if nodes > 1 else "")
    return command, OutFile(SCRIPT, text, "the job, submitted from the folder that holds these files")


def slurm_torchrun(script: Sequence[str], world: int, cluster: Cluster) -> tuple[Command, OutFile]:
    """A Slurm job that starts one torchrun a node; the nodes find each other by the job's first host.

    Raises:
        InputError: see ``spread``.
    """
    nodes, per_node = spread(world, cluster)
    words = ["srun", "torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(per_node)]
    words += ["--rdzv-id", "$SLURM_JOB_ID", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"$HEAD_IP:{PORT}"]
    return slurm(quoted([*words, *script]), nodes, per_node)


def under(deployment: Deployment | None, nodes: int) -> bool:
    """Whether a Slurm job is asked for; training knows no other special deployment.

    Raises:
        InputError: a deployment of serving engines, or one node asked for and several needed.
    """
    if deployment not in {None, "single", "mp", "slurm"}:
        raise InputError(f"training is not deployed as {deployment}; use single, mp or slurm")
    if deployment == "single" and nodes > 1:
        raise InputError(f"the layout needs {nodes} nodes; deploy it as mp or slurm")
    return deployment == "slurm"


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
    told = "; ".join(filter(None, (note, "set HEAD_IP to the address of node 0", INTERFACE)))

    def command(node: int | None, rank: str, more: str = "") -> Command:
        words = [*first, *meet, "--node-rank", rank, *script]
        return Command(node, "train", quoted(words), env, told + more)

    if nodes <= MAX_WRITTEN:
        return tuple(command(n, str(n)) for n in range(nodes))
    return (
        command(0, "0"),
        command(None, "$NODE_RANK", f" and NODE_RANK to the number of the node, 1 to {nodes - 1}"),
    )


def torchrun_emission(
    script: Sequence[str],
    world: int,
    cluster: Cluster,
    deployment: Deployment | None,
    files: tuple[OutFile, ...] = (),
    note: str = "",
) -> Emission:
    """Commands node by node, or a Slurm job, with the files that go with them.

    Raises:
        InputError: see ``spread`` and ``under``.
    """
    nodes, _ = spread(world, cluster)
    if under(deployment, nodes):
        command, job = slurm_torchrun(script, world, cluster)
        return Emission((command,), (*files, job), (note,) if note else ())
    return Emission(torchrun_commands(script, world, cluster, (), note), files)

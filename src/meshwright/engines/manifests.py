"""Files for cluster managers around a server command: a Slurm script, LeaderWorkerSet, KubeRay, a plain Service.

Commands come in as shell text with ``$HEAD_IP`` and ``$NODE_RANK`` in them; each manager says what these are. Sources:
LeaderWorkerSet v1 API (``LWS_LEADER_ADDRESS``, ``LWS_GROUP_SIZE``, ``LWS_WORKER_INDEX`` in every container), KubeRay
``ray.io/v1`` RayService and RayCluster, Slurm sbatch and srun manual pages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.engines.plainyaml import dump, dump_all

#: Shared memory of a container: NCCL and the engines exchange between ranks of a node through /dev/shm, of which a
#: container has 64 MiB by default.
SHARED_MEMORY = "32Gi"


@dataclass(frozen=True, slots=True)
class Pod:
    """A container of a deployment.

    Attributes:
        name: of the deployment: lower-case letters, digits and dashes.
        image: container image.
        devices: GPUs of one container.
        env: environment, name to value.
        port: that the server listens on.
        ready: path that answers once the server is up, empty for containers that do not serve.
    """

    name: str
    image: str
    devices: int
    env: Mapping[str, str]
    port: int
    ready: str = "/health"


def deployment_name(text: str) -> str:
    """A name that Kubernetes and Slurm take, from a model's or a user's name; ``server`` where nothing is left."""
    name = re.sub(r"[^a-z0-9]+", "-", text.rpartition("/")[2].lower()).strip("-")[:40].strip("-") or "server"
    return name if name[0].isalpha() else f"m-{name}"


def container(pod: Pod, script: str, serves: bool = True) -> dict[str, object]:
    """One container that runs ``script`` in a shell, with GPUs, shared memory and a readiness probe."""
    out: dict[str, object] = {
        "name": "server",
        "image": pod.image,
        "command": ["/bin/sh", "-c", script],
        "env": [{"name": key, "value": value} for key, value in pod.env.items()],
        "resources": {"limits": {"nvidia.com/gpu": str(pod.devices)}},
        "volumeMounts": [{"mountPath": "/dev/shm", "name": "shared-memory"}],
    }
    if serves:
        out["ports"] = [{"containerPort": pod.port}]
        if pod.ready:
            probe = {"httpGet": {"path": pod.ready, "port": pod.port}, "periodSeconds": 10, "failureThreshold": 360}
            out["readinessProbe"] = probe
    return out


def pod_spec(pod: Pod, script: str, serves: bool = True) -> dict[str, object]:
    """Pod specification around ``container``; memory-backed /dev/shm."""
    shared = {"medium": "Memory", "sizeLimit": SHARED_MEMORY}
    return {
        "containers": [container(pod, script, serves)],
        "volumes": [{"name": "shared-memory", "emptyDir": shared}],
    }


def leader_worker_set(pod: Pod, size: int, leader: str, worker: str, replicas: int = 1) -> str:
    """A LeaderWorkerSet of ``replicas`` groups of ``size`` pods, and a Service in front of the leaders.

    Args:
        pod: what every pod has.
        size: nodes of a group.
        leader, worker: shell text; ``$HEAD_IP`` becomes the leader's address, ``$NODE_RANK`` the pod's number.
        replicas: groups.
    """
    head = 'export HEAD_IP="$LWS_LEADER_ADDRESS" NODE_RANK="$LWS_WORKER_INDEX"\n'
    own = {"name": "NODE_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    specs = [pod_spec(pod, head + leader), pod_spec(pod, head + worker, serves=False)]
    for spec in specs:
        first = spec["containers"][0]  # type: ignore[index]
        first["env"] = [own, *first["env"]]
    labels = {"role": "leader", "app": pod.name}
    template = {
        "size": size,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": {"metadata": {"labels": labels}, "spec": specs[0]},
        "workerTemplate": {"spec": specs[1]},
    }
    return dump_all(
        [
            {
                "apiVersion": "leaderworkerset.x-k8s.io/v1",
                "kind": "LeaderWorkerSet",
                "metadata": {"name": pod.name},
                "spec": {"replicas": replicas, "leaderWorkerTemplate": template},
            },
            service(pod, labels),
        ]
    )


def service(pod: Pod, labels: Mapping[str, str]) -> dict[str, object]:
    """A Service in front of the pods with some labels."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": pod.name},
        "spec": {"selector": dict(labels), "ports": [{"name": "http", "port": pod.port, "targetPort": pod.port}]},
    }


def ray_cluster(pod: Pod, workers: int, serve: str, kind: str = "RayCluster") -> str:
    """A KubeRay cluster of a head and ``workers`` workers, and the command to run on the head once all have joined.

    Args:
        pod: what every pod has.
        workers: nodes beside the head.
        serve: shell text that starts the server on the head.
        kind: ``RayCluster``.
    """
    shared = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}}

    def template(role: str) -> dict[str, object]:
        one = container(pod, "", serves=role == "head")
        one["name"] = f"ray-{role}"
        del one["command"]  # KubeRay writes ``ray start`` itself
        return {"spec": {"containers": [one], "volumes": [shared]}}

    spec = {
        "headGroupSpec": {"rayStartParams": {"num-gpus": str(pod.devices)}, "template": template("head")},
        "workerGroupSpecs": [
            {
                "groupName": "workers",
                "replicas": workers,
                "minReplicas": workers,
                "maxReplicas": workers,
                "rayStartParams": {"num-gpus": str(pod.devices)},
                "template": template("worker"),
            }
        ],
    }
    cluster = {"apiVersion": "ray.io/v1", "kind": kind, "metadata": {"name": pod.name}, "spec": spec}
    hint = f"# once every pod runs: kubectl exec -it $(kubectl get pod -o name -l ray.io/cluster={pod.name},"
    told = "".join(f"# {line}\n" for line in serve.splitlines())
    return f"{hint}ray.io/node-type=head) -- sh -c '...' with\n{told}" + dump(cluster)


def slurm_script(name: str, nodes: int, devices: int, env: Sequence[tuple[str, str]], script: str) -> str:
    """An sbatch script: one task a node runs ``script`` with ``HEAD_IP``, ``NODE_IP`` and ``NODE_RANK`` set.

    Args:
        name: job name.
        nodes: nodes of the job.
        devices: GPUs of a node.
        env: environment, name and value.
        script: shell text that every node runs; it branches on ``$NODE_RANK`` where nodes differ.
    """
    exports = "".join(f"export {key}={value}\n" for key, value in env)
    body = script.rstrip("\n").replace("'", "'\\''")
    return f"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={devices}
#SBATCH --exclusive
set -eu
HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
HEAD_IP=$(srun --nodes=1 --ntasks=1 --nodelist="$HEAD_NODE" hostname --ip-address | tr ' ' '\\n' | head -n 1)
export HEAD_IP
{exports}srun --kill-on-bad-exit=1 bash -c '
export NODE_RANK=$SLURM_NODEID NODE_IP=$(hostname --ip-address | tr " " "\\n" | head -n 1)
{body}
'
"""

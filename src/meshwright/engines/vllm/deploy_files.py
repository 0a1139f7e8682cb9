"""Files that start a vLLM deployment under a cluster manager: KubeRay, LeaderWorkerSet, Slurm.

Manifests are data turned into YAML, scripts are quoted word by word; what comes from the user cannot leave its place.
Sources: KubeRay ``ray.io/v1`` RayJob, ``leaderworkerset.x-k8s.io/v1`` (its variables LWS_LEADER_ADDRESS,
LWS_WORKER_INDEX), Kubernetes' expansion of ``$(NAME)`` in container commands (``$$`` is one dollar), Slurm ``sbatch``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.engines.base import OutFile
from meshwright.engines.plainyaml import dump_all
from meshwright.engines.vllm.deploy import ADDRESSES, RAY_PORT, Instance, headless, mp, ray_words, single, usual
from meshwright.engines.vllm.words import API_PORT, Env, assignments, join, partition
from meshwright.errors import InputError
from meshwright.specs.command import Command

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}")
_INTERFACE = re.compile(r"[A-Za-z0-9_.,:=^-]{1,60}")

#: Shared memory of a pod; ranks of a node exchange through /dev/shm.
SHARED_MEMORY = "16Gi"
_LOCAL = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}}


@dataclass(frozen=True, slots=True)
class Place:
    """Names of a deployment under a cluster manager.

    Attributes:
        name: of its objects.
        image: container image.
        interface: network interface of a pod or node.
    """

    name: str
    image: str
    interface: str

    @staticmethod
    def of(options: Mapping[str, str], version: str, interface: str) -> Place:
        """From the options of a request.

        Raises:
            InputError: a name or an image that Kubernetes would refuse.
        """
        name = options.get("name", "vllm")
        image = options.get("image", f"vllm/vllm-openai:v{version}")
        interface = options.get("interface", interface)
        if not _LABEL.fullmatch(name):
            raise InputError(f"name {name[:40]!a} is not made of a-z, 0-9 and -, at most 52 characters")
        if not _IMAGE.fullmatch(image):
            raise InputError(f"image {image[:40]!a} is no container image")
        if not _INTERFACE.fullmatch(interface):
            raise InputError(f"interface {interface[:40]!a} is no network interface")
        return Place(name, image, interface)


def kuberay(i: Instance, place: Place) -> tuple[list[Command], list[OutFile]]:
    """A RayJob whose cluster has one pod a node and whose entry point is the serve command, and a Service."""
    words, more = ray_words(i)
    count = i.nodes
    head = _pod(i, place, "ray", [], (*i.env, *partition(i.layout), *more), {"app": place.name, "role": "head"})
    worker = _pod(i, place, "ray", [], i.env, {"app": place.name, "role": "worker"})
    cluster: dict[str, object] = {
        "headGroupSpec": {"rayStartParams": {"dashboard-host": "0.0.0.0", "port": str(RAY_PORT)}, "template": head}
    }
    if count > 1:
        group = {"groupName": "workers", "replicas": count - 1, "minReplicas": count - 1, "maxReplicas": count - 1}
        cluster["workerGroupSpecs"] = [{**group, "rayStartParams": {}, "template": worker}]
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": place.name},
        "spec": {"entrypoint": join(words), "rayClusterSpec": cluster},
    }
    file = OutFile("rayjob.yaml", dump_all([job, _service(place, "head")]), "RayJob and Service for kubectl apply")
    return [_apply("rayjob.yaml", "needs the KubeRay operator")], [file]


def leader_worker_set(i: Instance, place: Place) -> tuple[list[Command], list[OutFile]]:
    """A LeaderWorkerSet of one group, one pod a node, and a Service on the leader.

    Raises:
        InputError: nodes would differ in more than their number.
    """
    head, rest = _two_texts(i)
    names = 'export HEAD_IP="$LWS_LEADER_ADDRESS" NODE_RANK="$LWS_WORKER_INDEX"'
    spec: dict[str, object] = {"size": i.nodes, "restartPolicy": "RecreateGroupOnPodRestart"}
    for role, text in (("leader", head), ("worker", rest)):
        if text is not None:
            script = f"{names} && exec {text.text}"
            labels = {"app": place.name, "role": role}
            spec[f"{role}Template"] = _pod(i, place, "vllm", ["sh", "-c", script.replace("$", "$$")], text.env, labels)
    if "workerTemplate" not in spec:
        spec["workerTemplate"] = spec["leaderTemplate"]
    lws = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": place.name},
        "spec": {"replicas": 1, "leaderWorkerTemplate": spec},
    }
    file = OutFile("lws.yaml", dump_all([lws, _service(place, "leader")]), "LeaderWorkerSet and Service")
    return [_apply("lws.yaml", "needs the LeaderWorkerSet controller")], [file]


def slurm(i: Instance, place: Place) -> tuple[list[Command], list[OutFile]]:
    """A batch script and the script that every node runs.

    Raises:
        InputError: nodes would differ in more than their number.
    """
    head, rest = _two_texts(i)
    lines = [
        "#!/bin/bash",
        "# Run on every node by job.sbatch, which sets HEAD_IP.",
        "set -euo pipefail",
        'NODE_RANK="$SLURM_NODEID"',
        "NODE_IP=\"$(hostname -I | cut -d ' ' -f 1)\"",
        f"IFNAME={join([place.interface])}",
        "export HEAD_IP NODE_RANK NODE_IP IFNAME",
    ]
    if rest is None:
        lines.append(_exported(head))
    else:
        lines += ['if [ "$NODE_RANK" = 0 ]; then', f"  {_exported(head)}", "else", f"  {_exported(rest)}", "fi"]
    batch = [
        "#!/bin/bash",
        f"#SBATCH --job-name={place.name}",
        f"#SBATCH --nodes={i.nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={min(i.cluster.devices_per_node, i.layout.world)}",
        "#SBATCH --exclusive",
        "set -euo pipefail",
        "# The address of the first node, which all others join.",
        'FIRST="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        'HEAD_IP="$(srun --nodes=1 --ntasks=1 -w "$FIRST" hostname -I | cut -d \' \' -f 1)"',
        "export HEAD_IP",
        'srun --kill-on-bad-exit=1 bash "$SLURM_SUBMIT_DIR/node.sh"',
    ]
    files = [
        OutFile("job.sbatch", "\n".join(batch) + "\n", "batch script: one task a node"),
        OutFile("node.sh", "\n".join(lines) + "\n", "what every node runs"),
    ]
    return [Command(None, "submit", "sbatch job.sbatch", (), "in the folder that holds job.sbatch and node.sh")], files


def _exported(command: Command) -> str:
    """``exec`` of a command with its environment."""
    return " ".join(["exec", *(["env", *assignments(command.env)] if command.env else []), command.text])


def _two_texts(i: Instance) -> tuple[Command, Command | None]:
    """The command of the first node, and the one that holds for every other node (None when there is none)."""
    way = usual(i)
    if way == "single":
        return single(i)[0], None
    if way == "ray":
        raise InputError(f"{i.layout}: nodes would hold unequal numbers of ranks; use kuberay, or other degrees")
    head, rest = (headless if way == "headless" else mp)(i, all_at_once=True)
    return head, rest


def _pod(
    i: Instance, place: Place, container: str, command: list[str], env: Env, labels: Mapping[str, str]
) -> dict[str, object]:
    """A pod with one container that has the devices of a node and enough shared memory."""
    vendor = "amd.com/gpu" if i.cluster.device.vendor == "amd" else "nvidia.com/gpu"
    devices = {vendor: str(min(i.cluster.devices_per_node, i.layout.world))}
    own = {"name": "NODE_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    around = dict(env) if i.cluster.devices_per_node >= i.layout.world else {**dict(ADDRESSES), **dict(env)}
    values = {"$NODE_IP": "$(NODE_IP)", "$IFNAME": place.interface}
    rows = [{"name": k, "value": values.get(v, v.replace("$", "$$"))} for k, v in around.items()]
    body: dict[str, object] = {
        "name": container,
        "image": place.image,
        "env": [own, *rows],
        "resources": {"limits": devices, "requests": devices},
        "ports": [{"containerPort": API_PORT, "name": "api"}],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if command:
        body["command"] = command
    if labels["role"] == "leader":  # not on Ray's head: its job starts vLLM only once the pods are ready
        probe = {"httpGet": {"path": "/health", "port": API_PORT}, "periodSeconds": 10, "failureThreshold": 360}
        body["readinessProbe"] = probe
    return {"metadata": {"labels": dict(labels)}, "spec": {"containers": [body], "volumes": [_LOCAL]}}


def _service(place: Place, role: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{place.name}-api"},
        "spec": {
            "selector": {"app": place.name, "role": role},
            "ports": [{"name": "api", "port": API_PORT, "targetPort": API_PORT}],
        },
    }


def _apply(file: str, note: str) -> Command:
    return Command(None, "apply", f"kubectl apply -f {file}", (), note)

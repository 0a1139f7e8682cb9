"""Files for cluster managers: valid YAML, the right sizes, scripts a shell accepts."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from meshwright.engines import manifests
from meshwright.engines.plainyaml import load

POD = manifests.Pod("demo", "registry/image:1", 8, {"NCCL_SOCKET_IFNAME": "eth0"}, 30000)


def test_leader_worker_set_has_a_leader_and_workers_with_gpus_and_shared_memory() -> None:
    text = manifests.leader_worker_set(POD, 4, "serve --head $HEAD_IP", "serve --rank $NODE_RANK", replicas=2)
    first, second = text.split("---\n")
    made, front = load(first), load(second)
    assert isinstance(made, dict)
    assert isinstance(front, dict)
    template = made["spec"]["leaderWorkerTemplate"]
    assert (made["spec"]["replicas"], template["size"]) == (2, 4)
    for role, word in (("leaderTemplate", "--head"), ("workerTemplate", "--rank")):
        pod = template[role]["spec"]["containers"][0]
        assert word in pod["command"][2]
        assert "LWS_LEADER_ADDRESS" in pod["command"][2]
        assert pod["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert template[role]["spec"]["volumes"][0]["emptyDir"]["medium"] == "Memory"
    assert front["spec"]["ports"][0]["port"] == 30000
    assert "readinessProbe" not in template["workerTemplate"]["spec"]["containers"][0]


def test_ray_cluster_counts_workers() -> None:
    made = load(manifests.ray_cluster(POD, 3, "vllm serve m"))
    assert isinstance(made, dict)
    group = made["spec"]["workerGroupSpecs"][0]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (3, 3, 3)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize("script", ["serve --a 'b c' --rank $NODE_RANK", 'echo "$HEAD_IP"; echo it\\\'s'])
def test_slurm_script_is_accepted_by_bash_and_keeps_quotes(script: str) -> None:
    text = manifests.slurm_script("job", 2, 8, (("A", "1"),), script)
    assert "#SBATCH --nodes=2" in text
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, timeout=20, check=False)
    assert done.returncode == 0, done.stderr
    stub = (
        'scontrol() { echo n0; }\nsrun() { while [ "$1" != bash ]; do [ $# = 0 ] && return; shift; done; echo "$3"; }\n'
    )
    ran = subprocess.run(
        ["bash", "-c", stub + text.replace("set -eu", "export SLURM_JOB_NODELIST=n0")],
        text=True,
        capture_output=True,
        timeout=20,
        check=False,
    )
    assert script in ran.stdout


@pytest.mark.parametrize(
    ("text", "name"),
    [("deepseek-ai/DeepSeek-V3.2", "deepseek-v3-2"), ("7b", "m-7b"), ("a" * 90, "a" * 40), ("///", "server")],
)
def test_names(text: str, name: str) -> None:
    assert manifests.deployment_name(text) == name

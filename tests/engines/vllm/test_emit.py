"""What to type for every way of starting vLLM: roles, ranks and addresses; files that shells and parsers accept."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from meshwright.engines.base import Emission, Request
from meshwright.engines.plainyaml import load
from meshwright.engines.vllm import ENGINE
from meshwright.engines.vllm.pools import pool_rules
from meshwright.errors import InputError
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import Layout, parse_layout
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve, Train
from tests.specs.clusters import cluster


def emit(
    layout: str,
    nodes: int,
    way: str | None = None,
    prefill: str | None = None,
    model: str = "org/m",
    spec: str | None = None,
    devices: int = 8,
    **options: str,
) -> Emission:
    return ENGINE.emit(
        Request(
            model=model,
            layout=parse_layout(layout),
            cluster=cluster(nodes, devices),
            workload=Serve(),
            settings=ServeSettings(utilization=0.9),
            deployment=way,  # type: ignore[arg-type]
            prefill=parse_layout(prefill) if prefill else None,
            options=options,
            spec=read_model(spec) if spec else None,
        )
    )


def value(text: str, flag: str) -> str | None:
    words = shlex.split(text)
    return words[words.index(flag) + 1] if flag in words else None


def test_the_usual_way_follows_the_layout() -> None:
    for layout, nodes, purpose in (
        ("tp=8", 1, "serve"),
        ("tp=8,pp=2", 2, "serve (mp)"),
        ("dp=16,ep=16", 2, "serve (data parallel)"),
        ("tp=3,pp=3", 2, "ray head"),
    ):
        assert emit(layout, nodes).commands[0].purpose == purpose


def test_several_nodes_get_addresses_with_reasons() -> None:
    found = emit("tp=8,pp=2", 2)
    for command in found.commands:
        assert [name for name, _ in command.env] == ["VLLM_HOST_IP", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"]
        assert "NODE_IP" in command.note
        assert "IFNAME" in command.note
    for name in ("VLLM_HOST_IP:", "NCCL_SOCKET_IFNAME:", "GLOO_SOCKET_IFNAME:", "--shm-size"):
        assert any(name in note for note in found.notes)
    assert emit("tp=8", 1).commands[0].env == ()


def test_external_load_balancing_gives_every_replica_its_devices_port_and_rank() -> None:
    found = emit("tp=4,dp=4,ep=16", 2, "external").commands
    assert [c.node for c in found] == [0, 0, 1, 1]
    assert [dict(c.env)["CUDA_VISIBLE_DEVICES"] for c in found] == ["0,1,2,3", "4,5,6,7"] * 2
    assert [value(c.text, "--data-parallel-rank") for c in found] == ["0", "1", "2", "3"]
    assert [value(c.text, "--port") for c in found] == ["8000", "8001"] * 2
    assert len(emit("dp=128,ep=128", 16, "external").commands) == 1
    with pytest.raises(InputError, match="dense model"):
        emit("tp=4,dp=4", 2, "external", spec="llama-3.1-8b")
    assert emit("tp=4,dp=4", 2, "external", spec="qwen3-30b-a3b").commands


def test_hybrid_load_balancing_starts_ranks_where_the_last_node_ended() -> None:
    found = emit("dp=16,ep=16", 2, "hybrid").commands
    assert [value(c.text, "--data-parallel-start-rank") for c in found] == ["0", "8"]
    assert all("--data-parallel-hybrid-lb" in c.text and "--headless" not in c.text for c in found)


@pytest.mark.parametrize(
    ("layout", "nodes", "way", "line"),
    [
        ("tp=16", 1, None, "needs 16 devices"),
        ("tp=16", 2, "single", "a node has 8"),
        ("tp=8", 2, "mp", "fits on one node"),
        ("tp=3,pp=3", 2, "mp", "not equally many"),
        ("tp=8", 2, "headless", "several replicas"),
        ("dp=8", 2, "headless", "fit on one node"),
        ("tp=2,dp=7", 2, "hybrid", "not equally many"),
        ("tp=8,dp=2", 2, "hybrid", "use external"),
        ("tp=8", 2, "external", "several replicas"),
        ("tp=3,pp=3", 2, "lws", "use kuberay"),
        ("tp=8", 1, "pools", "two layouts"),
    ],
)
def test_a_way_that_does_not_work_says_which_does(layout: str, nodes: int, way: str | None, line: str) -> None:
    with pytest.raises(InputError) as caught:
        emit(layout, nodes, way)
    assert line in str(caught.value)


def test_the_all_to_all_backend_is_chosen_by_phase_and_version() -> None:
    assert "--all2all-backend" not in emit("dp=16,ep=16", 2).commands[0].text
    assert any("DeepEP" in note for note in emit("dp=16,ep=16", 2).notes)
    assert value(emit("dp=16,ep=16", 2, all2all="deepep").commands[0].text, "--all2all-backend") == "deepep_low_latency"
    found = emit("dp=8,ep=8", 2, None, "dp=8,ep=8", all2all="deepep", spec="deepseek-v3").commands
    assert [value(c.text, "--all2all-backend") for c in found[:2]] == ["deepep_high_throughput", "deepep_low_latency"]
    with pytest.raises(InputError, match="is not one of vLLM"):
        emit("dp=16,ep=16", 2, all2all="magic")
    with pytest.raises(InputError, match="no option"):
        emit("tp=8", 1, color="red")


def test_pools_share_a_connector_and_come_with_a_proxy() -> None:
    first, second, *_, proxy = emit("dp=16,ep=16", 4, None, "tp=8", spec="deepseek-v3").commands
    assert (first.purpose, first.node) == ("prefill", 0)
    assert (second.purpose, second.node) == ("decode (data parallel)", 1)
    assert dict(first.env)["VLLM_NIXL_SIDE_CHANNEL_PORT"] != dict(second.env)["VLLM_NIXL_SIDE_CHANNEL_PORT"]
    assert "VLLM_KV_CACHE_LAYOUT" not in dict(first.env)  # a latent cache has no heads to cut
    assert "HND" in dict(emit("tp=2", 2, None, "tp=4", spec="llama-3.1-8b").commands[0].env).values()
    assert proxy.purpose == "proxy"
    assert "$PREFILL_IP" in proxy.text
    one = emit("tp=4", 1, None, "tp=4", connector="mooncake").commands
    assert [dict(c.env)["CUDA_VISIBLE_DEVICES"] for c in one[:2]] == ["0,1,2,3", "4,5,6,7"]
    assert ["kv_producer" in one[0].text, "kv_consumer" in one[1].text] == [True, True]
    assert "VLLM_MOONCAKE_BOOTSTRAP_PORT" in dict(one[0].env)
    for options, line in (({"connector": "pigeon"}, "is not one of"), ({}, "need 8 \\+ 8 devices")):
        with pytest.raises(InputError, match=line):
            emit("tp=8", 1, None, "tp=8", **options)


@pytest.mark.parametrize(
    ("prefill", "decode", "connector", "model", "code"),
    [
        ("tp=6", "tp=4", "nixl", None, "pool_tp_ratio"),
        ("tp=6", "tp=4", "mooncake", None, "pool_tp_ratio"),
        ("tp=8,dcp=4", "tp=8,dcp=8", "nixl", None, None),
        ("tp=12,dcp=4", "tp=12,dcp=6", "nixl", None, "pool_dcp_ratio"),
        ("tp=16", "tp=4", "nixl", "llama-3.1-8b", "pool_copies"),
        ("tp=8", "tp=4", "nixl", "llama-3.1-8b", None),
        ("tp=4", "tp=16", "nixl", "llama-3.1-8b", None),
        ("tp=16", "tp=4", "nixl", "deepseek-v3", None),
        ("tp=8", "tp=4,pp=2", "nixl-push", "llama-3.1-8b", "pool_stages"),
        ("tp=8", "tp=4,pp=2", "nixl", "llama-3.1-8b", None),
        ("tp=8,pp=2", "tp=8", "nixl", "gpt-oss-120b", "pool_stages"),
        ("tp=8,pp=2", "tp=8", "nixl-push", "gpt-oss-120b", None),
        ("tp=8,pp=2", "tp=8", "nixl-push", "nemotron-h-56b", "pool_stages"),
    ],
)
def test_what_connectors_ask(prefill: str, decode: str, connector: str, model: str | None, code: str | None) -> None:
    spec = read_model(model) if model else None
    found = pool_rules(parse_layout(prefill), parse_layout(decode), connector, spec)
    assert [rule.code for rule in found] == ([code] if code else [])


def test_block_sizes_of_pools() -> None:
    two, four = Layout(tp=2), Layout(tp=4)
    assert [r.code for r in pool_rules(four, two, "nixl", None, (16, 64))] == ["pool_blocks"]
    assert pool_rules(two, four, "nixl", None, (16, 64)) == []


def manifest(found: Emission, path: str) -> dict[str, Any]:
    text = next(f.text for f in found.files if f.path == path)
    value = load(text.split("---\n")[0])
    assert isinstance(value, dict)
    load(text.split("---\n")[1])
    return value


def test_manifests_have_a_pod_a_node_with_devices_and_shared_memory() -> None:
    lws = manifest(emit("tp=8,pp=4", 4, "lws", name="demo", image="reg.io/v:1", interface="bond0"), "lws.yaml")
    template = lws["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 4
    for role in ("leaderTemplate", "workerTemplate"):
        pod = template[role]["spec"]
        box = pod["containers"][0]
        assert box["image"] == "reg.io/v:1"
        assert box["resources"]["limits"] == {"nvidia.com/gpu": "8"}
        assert {"name": "NCCL_SOCKET_IFNAME", "value": "bond0"} in box["env"]
        assert pod["volumes"][0]["emptyDir"]["medium"] == "Memory"
        assert box["volumeMounts"][0]["mountPath"] == "/dev/shm"
        assert ("readinessProbe" in box) == (role == "leaderTemplate")
    ray = manifest(emit("tp=8,pp=4", 4, "kuberay"), "rayjob.yaml")
    head = ray["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert "readinessProbe" not in head  # the job, which starts vLLM, waits until the pods are ready
    assert ray["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 3
    alone = manifest(emit("tp=8", 1, "kuberay"), "rayjob.yaml")
    assert "workerGroupSpecs" not in alone["spec"]["rayClusterSpec"]


@pytest.mark.parametrize(
    "options", [{"name": "a b"}, {"name": "x: y\nz"}, {"image": "a\nb"}, {"image": "$(id)"}, {"interface": "e;rm"}]
)
def test_names_cannot_leave_their_place(options: dict[str, str]) -> None:
    for way in ("lws", "kuberay", "slurm"):
        with pytest.raises(InputError):
            emit("tp=8,pp=2", 2, way, **options)


HOSTILE = "my/m'x\"; touch owned; $(touch owned) `touch owned` $(HEAD_IP) $HOME\n- a: b"


def test_hostile_names_stay_one_word_in_manifests() -> None:
    lws = manifest(emit("tp=8,pp=2", 2, "lws", model=HOSTILE), "lws.yaml")
    script = lws["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"][0]["command"][2]
    words = shlex.split(script.replace("$$", "$"))
    assert HOSTILE in words
    assert "$(" not in script.replace("$$", "")
    ray = manifest(emit("tp=8,pp=2", 2, "kuberay", model=HOSTILE), "rayjob.yaml")
    assert shlex.split(ray["spec"]["entrypoint"])[2] == HOSTILE


@pytest.mark.parametrize("model", ["org/m", HOSTILE])
def test_slurm_scripts_run_the_right_command_on_each_node(tmp_path: Path, model: str) -> None:
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    found = emit("dp=16,ep=16", 2, "slurm", model=model)
    for file in found.files:
        (tmp_path / file.path).write_text(file.text)
        assert subprocess.run(["bash", "-n", file.path], cwd=tmp_path, timeout=10).returncode == 0
    stub = tmp_path / "bin"
    stub.mkdir()
    for name, body in (("vllm", 'printf "%s\\0" "$@" "$VLLM_HOST_IP"'), ("hostname", "echo 10.0.0.7 other")):
        (stub / name).write_text(f"#!/bin/sh\n{body}\n")
        (stub / name).chmod(0o755)
    for rank in ("0", "1"):
        env = {"PATH": f"{stub}:{os.environ['PATH']}", "SLURM_NODEID": rank, "HEAD_IP": "10.0.0.1"}
        done = subprocess.run(["bash", "node.sh"], cwd=tmp_path, env=env, capture_output=True, timeout=10)
        words = done.stdout.decode().split("\0")
        assert words[:2] == ["serve", model]
        assert words[-2] == "10.0.0.7"
        assert words[words.index("--data-parallel-address") + 1] == "10.0.0.1"
        if rank == "1":
            assert words[words.index("--data-parallel-start-rank") + 1] == "8"
    assert not (tmp_path / "owned").exists()


def test_vllm_does_not_train() -> None:
    with pytest.raises(InputError, match="does not train"):
        ENGINE.emit(Request("m", Layout(), cluster(1, 8), Train()))


def test_versions_profiles_and_flags_agree() -> None:
    assert ENGINE.versions() == ("0.33.0", "0.32.0", "0.26.0")
    for version in ENGINE.versions():
        assert ENGINE.profile(version).version == ENGINE.flags(version).version == version
    assert ENGINE.profile().version == ENGINE.flags().version == "0.33.0"

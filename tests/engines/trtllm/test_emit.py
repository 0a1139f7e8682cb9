"""Commands and files of every deployment of TensorRT-LLM."""

from __future__ import annotations

import pytest

from meshwright.engines.base import Emission, Request
from meshwright.engines.plainyaml import load as read_yaml
from meshwright.engines.trtllm import ENGINE
from meshwright.errors import InputError
from meshwright.specs.layout import parse_layout
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve, Train
from tests.engines.accept import refused
from tests.engines.trtllm.commands import files_of, understood, words_of
from tests.specs.clusters import cluster

SETTINGS = ServeSettings(utilization=0.85, max_num_seqs=64, max_num_batched_tokens=8192)


def _emit(model: str, layout: str, nodes: int = 1, **changes: object) -> Emission:
    request = Request(model, parse_layout(layout), cluster(nodes, 8), Serve(max_model_len=8192), SETTINGS, **changes)  # type: ignore[arg-type]
    emission = ENGINE.emit(request)
    assert refused(emission.commands, ENGINE.flags(), words_of) == []
    return emission


def test_one_node_needs_no_file() -> None:
    emission = _emit("llama-3.1-8b", "tp=2")
    assert emission.files == ()
    assert emission.commands[0].text == (
        "trtllm-serve meta-llama/Meta-Llama-3.1-8B --backend pytorch --tp_size 2 --max_seq_len 8192 "
        "--max_batch_size 64 --max_num_tokens 8192 --kv_cache_free_gpu_memory_fraction 0.85 --host 0.0.0.0 --port 8000"
    )


def test_attention_replicas_go_into_the_file() -> None:
    emission = _emit("deepseek-v3", "dp=16,ep=16", 2)
    (command,) = emission.commands
    assert command.text.startswith("mpirun -np 16 --hostfile ./serve.hosts trtllm-llmapi-launch trtllm-serve")
    assert "--tp_size 16 --ep_size 16" in command.text
    files = files_of(emission)
    assert files["serve.hosts"] == b"NODE0 slots=8\nNODE1 slots=8\n"
    assert read_yaml(files["deepseek-v3-serve.yml"].decode()) == {"enable_attention_dp": True}


def test_slurm_starts_a_task_a_device() -> None:
    emission = _emit("deepseek-v3", "tp=16,ep=4", 2, deployment="slurm", options={"interface": "eth0"})
    script = files_of(emission)["deepseek-v3.sbatch"].decode()
    assert "#SBATCH --ntasks=16" in script
    assert "export NCCL_SOCKET_IFNAME=eth0" in script
    found = understood(script.strip().splitlines()[-1])
    assert (found.layout, found.devices) == (parse_layout("tp=16,ep=4"), 16)
    assert found.findings == ()


def test_instances_of_a_dense_model_have_devices_of_their_own() -> None:
    commands = _emit("llama-3.1-8b", "tp=2,dp=6", 2).commands
    assert [dict(c.env)["CUDA_VISIBLE_DEVICES"] for c in commands] == ["0,1", "2,3", "4,5", "6,7", "0,1", "2,3"]
    assert [c.node for c in commands] == [0, 0, 0, 0, 1, 1]
    assert len({c.text for c in commands}) == 4  # ports repeat on the second node only


def test_pools_and_the_server_that_joins_them() -> None:
    emission = _emit("deepseek-v3", "dp=8,ep=8", 2, prefill=parse_layout("tp=8"), options={"connector": "ucx"})
    context, generation, join = emission.commands
    assert (context.node, generation.node) == (0, 1)
    files = files_of(emission)
    one, two = (read_yaml(files[f"deepseek-v3-{side}.yml"].decode()) for side in ("context", "generation"))
    assert isinstance(one, dict)
    assert isinstance(two, dict)
    assert one["cache_transceiver_config"] == two["cache_transceiver_config"]
    assert one["cache_transceiver_config"] == {"backend": "UCX", "max_tokens_in_buffer": 8192}
    assert one["disable_overlap_scheduler"] is True
    assert "disable_overlap_scheduler" not in two
    assert join.text == "trtllm-serve disaggregated -c ./disagg.yaml"
    found = understood(join.text, files)
    assert found.deployment == "pools"
    assert found.findings == ()


def test_pools_on_one_node_share_its_devices() -> None:
    context, generation, _ = _emit("qwen3-8b", "tp=4", prefill=parse_layout("tp=2")).commands
    assert dict(context.env) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert dict(generation.env) == {"CUDA_VISIBLE_DEVICES": "2,3,4,5"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"deployment": "lws"}, "not started as lws"),
        ({"deployment": "pools"}, "--prefill and --decode"),
        ({"options": {"colour": "red"}}, "unknown option"),
        ({"options": {"connector": "mooncake"}, "prefill": parse_layout("tp=1")}, "no cache backend 'mooncake'"),
        ({"workload": Train()}, "does not train"),
        ({"layout": parse_layout("tp=16")}, "needs 16 devices"),
        ({"layout": parse_layout("tp=8,dp=2")}, "do not fit"),
        ({"settings": ServeSettings(kv_dtype="f8_e5m2")}, "no cache dtype"),
    ],
)
def test_what_cannot_be_started(changes: dict[str, object], said: str) -> None:
    base: dict[str, object] = {
        "model": "qwen3-8b",
        "layout": parse_layout("tp=2"),
        "cluster": cluster(1, 8),
        "workload": Serve(),
    }
    with pytest.raises(InputError) as caught:
        ENGINE.emit(Request(**{**base, **changes}))  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)

"""Commands and files of every deployment; each command is one that SGLang's parser takes."""

from __future__ import annotations

import shlex

import pytest

from meshwright.engines.base import Emission, Request
from meshwright.engines.plainyaml import load as read_yaml
from meshwright.engines.sglang import ENGINE
from meshwright.errors import InputError
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import parse_layout
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve, Train
from tests.engines.accept import refused
from tests.engines.sglang.commands import nothing, words_of
from tests.specs.clusters import cluster

SETTINGS = ServeSettings(utilization=0.85, max_num_seqs=64, max_num_batched_tokens=8192)


def _emit(model: str, layout: str, nodes: int = 1, **changes: object) -> Emission:
    request = Request(model, parse_layout(layout), cluster(nodes, 8), Serve(max_model_len=8192), SETTINGS, **changes)  # type: ignore[arg-type]
    emission = ENGINE.emit(request)
    assert refused(emission.commands, ENGINE.flags(), words_of, positionals=0) == []
    return emission


def test_one_node() -> None:
    (command,) = _emit("llama-3.1-8b", "tp=2").commands
    assert command.text == (
        "sglang serve --model-path meta-llama/Meta-Llama-3.1-8B --tp-size 2 --context-length 8192 "
        "--max-running-requests 64 --chunked-prefill-size 8192 --mem-fraction-static 0.85"
    )


def test_several_nodes_differ_in_their_rank_only() -> None:
    commands = _emit("llama-3.1-70b", "tp=8,pp=2", 2).commands
    words = [shlex.split(c.text) for c in commands]
    assert [c.node for c in commands] == [0, 1]
    assert [(a, b) for a, b in zip(*words, strict=True) if a != b] == [("0", "1")]
    assert "$HEAD_IP:20000" in words[0]


def test_many_nodes_take_one_command_for_all_but_the_first() -> None:
    commands = _emit("deepseek-v3", "tp=8,pp=16", 16).commands
    assert len(commands) == 2
    assert '--node-rank "$NODE_RANK"' in commands[1].text
    assert "1 to 15" in commands[1].note


def test_wide_experts_use_an_all_to_all_and_whole_dense_blocks() -> None:
    (first, *_) = _emit("deepseek-v3", "dp=16,ep=16", 2).commands
    text = first.text
    for piece in ("--tp-size 16", "--attn-dp-size 16", "--ep-size 16", "--moe-a2a-backend deepep"):
        assert piece in text
    assert "--moe-dense-tp-size 1" in text
    assert "--max-running-requests 1024" in text  # 64 a replica


def test_replicas_of_a_dense_model_do_not_span_nodes() -> None:
    emission = _emit("llama-3.1-8b", "tp=2,dp=6", 2)
    servers = [shlex.split(c.text) for c in emission.commands if words_of(shlex.split(c.text))]
    assert [s[s.index("--dp-size") + 1] for s in servers] == ["4", "2"]
    assert "--worker-urls http://NODE0:30000 http://NODE1:30000" in emission.commands[-1].text
    assert "--dp-size 4" in _emit("llama-3.1-8b", "tp=2,dp=4").commands[0].text


def test_pools_and_their_router() -> None:
    options = {"connector": "nixl", "ib_device": "mlx5_0,mlx5_1"}
    emission = _emit("deepseek-v3", "dp=16,ep=16", 4, prefill=parse_layout("tp=8"), options=options)
    prefill, *decode, router = emission.commands
    assert [c.node for c in (prefill, *decode)] == [0, 1, 2]
    for command, mode in ((prefill, "prefill"), (decode[0], "decode")):
        assert f"--disaggregation-mode {mode} --disaggregation-transfer-backend nixl" in command.text
        assert "--disaggregation-ib-device mlx5_0,mlx5_1" in command.text
    found = ENGINE.parse(shlex.split(prefill.text), {}, nothing)
    assert (found.deployment, str(found.layout)) == ("pools", "tp=8")
    assert router.text.endswith(
        '--pd-disaggregation --prefill "http://$PREFILL_IP:30000" 8998 --decode "http://$DECODE_IP:30000" '
        "--host 0.0.0.0 --port 8000"
    )


def test_pools_on_one_node_share_its_devices() -> None:
    emission = _emit("qwen3-8b", "tp=2", prefill=parse_layout("tp=2"))
    assert "--base-gpu-id 2" in emission.commands[1].text
    assert "--port 30001" in emission.commands[1].text
    assert any("--disaggregation-ib-device" in note for note in emission.notes)


@pytest.mark.parametrize("deployment", ["lws", "slurm"])
def test_files_hold_the_command(deployment: str) -> None:
    emission = _emit("deepseek-v3", "tp=16", 2, deployment=deployment, options={"interface": "eth0", "name": "My DS"})
    (file,) = emission.files
    assert "--nnodes 2" in file.text
    assert "NCCL_SOCKET_IFNAME" in file.text
    if deployment == "lws":
        made = read_yaml(file.text.split("---\n")[0])
        assert isinstance(made, dict)
        assert made["metadata"]["name"] == "my-ds"
        assert made["spec"]["leaderWorkerTemplate"]["size"] == 2


def test_unequal_stages_go_into_the_environment() -> None:
    (command,) = _emit("llama-3.1-8b", "tp=2,pp=2,stage_layers=17+15").commands
    assert command.env == (("SGLANG_PP_LAYER_PARTITION", "17,15"),)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"deployment": "kuberay"}, "no kuberay"),
        ({"deployment": "pools"}, "--prefill and --decode"),
        ({"options": {"colour": "red"}}, "unknown option 'colour'"),
        ({"options": {"connector": "pigeon"}, "prefill": parse_layout("tp=1")}, "no transfer backend 'pigeon'"),
        ({"workload": Train()}, "does not train"),
        ({"layout": parse_layout("tp=16")}, "needs 16 devices"),
        ({"layout": parse_layout("tp=4,dcp=2"), "prefill": parse_layout("tp=4")}, "without MLA"),
    ],
)
def test_what_cannot_be_started(changes: dict[str, object], said: str) -> None:
    base: dict[str, object] = {
        "model": "qwen3-8b",
        "layout": parse_layout("tp=2"),
        "cluster": cluster(1, 8),
        "workload": Serve(),
        "spec": read_model("qwen3-8b"),
    }
    with pytest.raises(InputError) as caught:
        ENGINE.emit(Request(**{**base, **changes}))  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_that_look_like_words_of_the_shell_stay_data() -> None:
    name = "$(touch x); echo 'a b'"
    (command,) = _emit(name, "tp=2").commands
    words = shlex.split(command.text)
    assert words[words.index("--model-path") + 1] == f"./{name}"

"""The commands of a layout say exactly that layout, quote what strangers wrote, and know each version's flags."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.engines import profile
from meshwright.engines.vllm.command import commands, model_argument
from meshwright.engines.vllm.parse import table
from meshwright.engines.vllm.program import find_program
from meshwright.errors import InputError
from meshwright.specs.command import Command
from meshwright.specs.layout import Layout, parse_layout
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve, Train
from tests.engines.accept import refused
from tests.specs.clusters import cluster

FULL = ServeSettings(utilization=0.92, max_num_batched_tokens=8192, max_num_seqs=256, kv_dtype="f8_e4m3", block_size=16)
LOAD = Serve(isl=2000, osl=300)


def written(
    layout: str, nodes: int, devices: int, asked: ServeSettings = FULL, name: str = "org/model"
) -> tuple[Command, ...]:
    return commands(name, parse_layout(layout), cluster(nodes, devices), LOAD, asked, profile("vllm"))


def flags(command: Command) -> dict[str, str]:
    words = shlex.split(command.text)[3:]
    out = {}
    for index, word in enumerate(words):
        if word.startswith("--"):
            following = words[index + 1] if index + 1 < len(words) else "--"
            out[word] = "" if following.startswith("--") else following
    return out


def test_one_node_is_one_command_with_the_scored_point() -> None:
    (only,) = written("tp=4,pp=2", 1, 8)
    assert only.text.startswith("vllm serve org/model ")
    assert flags(only) == {
        "--tensor-parallel-size": "4",
        "--pipeline-parallel-size": "2",
        "--max-model-len": "2300",
        "--max-num-seqs": "256",
        "--max-num-batched-tokens": "8192",
        "--gpu-memory-utilization": "0.92",
        "--block-size": "16",
        "--kv-cache-dtype": "fp8_e4m3",
    }
    assert (only.node, only.env) == (None, ())


def test_what_is_not_set_is_not_written() -> None:
    (only,) = written("tp=1", 1, 1, ServeSettings())
    assert set(flags(only)) == {"--tensor-parallel-size", "--max-model-len"}


def test_two_nodes_without_ray_and_with_it() -> None:
    found = written("tp=8,pp=2", 2, 8)
    mp = [c for c in found if c.purpose == "serve (mp)"]
    assert [c.node for c in mp] == [0, 1]
    for node, command in enumerate(mp):
        given = flags(command)
        assert (given["--nnodes"], given["--node-rank"], given["--master-addr"]) == ("2", str(node), "$HEAD_IP")
        assert ("--headless" in given) == (node > 0)
    ray = [c for c in found if "ray" in c.purpose]
    assert [(c.node, c.purpose) for c in ray] == [(0, "ray head"), (1, "ray worker"), (0, "serve (ray)")]
    assert all(("VLLM_HOST_IP", "$NODE_IP") in c.env for c in ray)
    assert flags(ray[-1])["--distributed-executor-backend"] == "ray"


def test_replicas_over_nodes_start_where_the_last_node_ended() -> None:
    head, *others = [c for c in written("tp=2,dp=7", 4, 4) if "data parallel" in c.purpose]
    assert "--headless" not in flags(head)
    assert [flags(c)["--data-parallel-size-local"] for c in (head, *others)] == ["2", "2", "2", "1"]
    assert [flags(c)["--data-parallel-start-rank"] for c in others] == ["2", "4", "6"]
    assert {flags(c)["--data-parallel-size"] for c in (head, *others)} == {"7"}


def test_replicas_larger_than_a_node_share_one_multi_node_launch() -> None:
    found = written("tp=8,pp=2,dp=2", 4, 8)
    assert [flags(c)["--data-parallel-size"] for c in found if c.purpose == "serve (mp)"] == ["2"] * 4
    assert ("VLLM_RAY_DP_PACK_STRATEGY", "span") in found[-1].env


def test_expert_parallelism_is_a_switch_and_a_hand_made_split_goes_to_the_environment() -> None:
    (wide,) = written("tp=2,dp=4,ep=8", 1, 8)
    assert flags(wide)["--enable-expert-parallel"] == ""
    (cut,) = written("pp=3,stage_layers=13+14+13", 1, 4)
    assert cut.env == (("VLLM_PP_LAYER_PARTITION", "13,14,13"),)


def test_context_parallel_and_the_rest_of_the_settings() -> None:
    asked = ServeSettings(enforce_eager=True, quantization="fp8", dtype="bf16", speculative=True, text_only=True)
    (only,) = written("tp=4,cp=2,dcp=2", 1, 8, asked)
    given = flags(only)
    assert (given["--decode-context-parallel-size"], given["--prefill-context-parallel-size"]) == ("2", "2")
    assert (given["--quantization"], given["--dtype"], given["--enforce-eager"]) == ("fp8", "bfloat16", "")
    assert "--speculative-config" in given
    assert "--limit-mm-per-prompt" in given


def test_hundreds_of_nodes_are_one_command_each_kind() -> None:
    for layout in ("tp=8,pp=128", "dp=1024,ep=1024"):
        found = written(layout, 128, 8)
        assert len(found) == 5
        rest = next(c for c in found if c.node is None and "serve" in c.purpose)
        assert "$NODE_RANK" in rest.text


HOSTILE = "my models/a'b\"; rm -rf $HOME `id` $(id)\n&& x"


@pytest.mark.parametrize("name", [HOSTILE, "$HEAD_IP", "-rf", "a b"])
def test_names_reach_vllm_as_one_word(name: str) -> None:
    for layout, nodes in (("tp=8", 1), ("tp=8,pp=2", 2), ("tp=8,dp=2", 2)):
        for command in written(layout, nodes, 8, name=name):
            if command.text.startswith("vllm"):
                assert shlex.split(command.text)[2] in {name, f"./{name}"}
                assert not shlex.split(command.text)[2].startswith("-")


@settings(max_examples=40, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=30))
def test_a_shell_sees_one_word_whatever_the_name(name: str) -> None:
    if shutil.which("sh") is None:
        pytest.skip("no sh")
    (only,) = written("tp=1", 1, 1, name=name)
    script = 'vllm() { printf "%s\\0" "$@"; }\n' + only.text
    done = subprocess.run(["sh", "-c", script], capture_output=True, timeout=10)
    words = done.stdout.split(b"\0")
    assert words[0] == b"serve"
    assert words[1] in {name.encode(), b"./" + name.encode()}
    assert words[2] == b"--tensor-parallel-size"


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.33.0"])
def test_every_flag_is_known_to_the_version(version: str) -> None:
    everything = ServeSettings(0.9, 1, 1, "f8_e5m2", 16, True, "fp8", "bf16", True, 1, True)
    for layout, nodes in (("tp=8,dcp=2", 1), ("tp=8,pp=2,cp=2", 4), ("tp=4,dp=4,ep=16", 2), ("tp=8,pp=2,dp=2", 4)):
        found = commands("m", parse_layout(layout), cluster(nodes, 8), LOAD, everything, profile(f"vllm-{version}"))
        assert refused(found, table(version), server_words) == []
    extra = [Command(None, "serve", f"vllm serve m {flag}") for flag in ("--nope", "--dcp-q-replicate", "-tp x")]
    assert len(refused(extra, table(version), server_words)) == (3 if version == "0.26.0" else 2)


def server_words(argv: Sequence[str]) -> Sequence[str] | None:
    program = find_program(argv)
    return None if program is None else program.words


def test_nothing_is_made_up_for_training_or_our_own_runtime() -> None:
    asked = ServeSettings()
    assert commands("m", Layout(), cluster(1, 1), Train(), asked, profile("vllm")) == ()
    with pytest.raises(InputError, match="no vLLM command for engine meshwright"):
        commands("m", Layout(), cluster(1, 1), LOAD, asked, profile("meshwright"))


def test_a_layout_larger_than_the_cluster_has_no_command() -> None:
    with pytest.raises(InputError, match="needs 16 devices"):
        written("tp=16", 1, 8)


def test_vllm_is_given_what_holds_the_weights(tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    for file in ("config.json", "other.json"):
        (folder / file).write_text("{}")
    assert model_argument(str(folder / "config.json")) == (str(folder), "")
    assert "replace the file" in model_argument(str(folder / "other.json"))[1]
    assert model_argument(str(folder)) == (str(folder), "")
    assert model_argument("llama-3.1-70b")[0].startswith("meta-llama/")
    assert model_argument("org/not-in-the-atlas") == ("org/not-in-the-atlas", "")
    name, wanted = model_argument("gpt3-175b")
    assert (name, "folder" in wanted) == ("gpt3-175b", True)
    assert all(wanted in c.note for c in written("tp=8,pp=2", 2, 8, name=name) if c.text.startswith("vllm"))


def test_a_name_too_long_for_a_path_is_no_crash() -> None:
    assert written("tp=1", 1, 1, name="x" * 5000)[0].text.startswith("vllm serve xxx")

"""Command lines, containers and files as people paste them, read back into layout, settings and findings."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import pytest

from meshwright.engines.base import Invocation
from meshwright.engines.vllm import ENGINE
from meshwright.engines.vllm.findings import with_model
from meshwright.errors import InputError
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import Layout
from meshwright.specs.workload import Serve
from tests.specs.clusters import cluster


def read(text: str, version: str | None = None, files: dict[str, str] | None = None, **env: str) -> Invocation:
    have = {name: data.encode() for name, data in (files or {}).items()}
    return ENGINE.parse(shlex.split(text), env, have.get, version)


def codes(found: Invocation) -> set[str]:
    return {rule.code for rule in found.findings}


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("vllm serve m -tp 8", Layout(tp=8)),
        ("vllm serve m -tp=8 -pp 2", Layout(tp=8, pp=2)),
        ("vllm serve m --tensor_parallel_size 4 --data-parallel-size=2", Layout(tp=4, dp=2)),
        ("vllm serve m --tensor-p 4", Layout(tp=4)),
        ("vllm serve m -tp 2 -dp 4 -ep", Layout(tp=2, dp=4, ep=8)),
        ("vllm serve m -tp 2 -dp 4 -ep --no-enable-expert-parallel", Layout(tp=2, dp=4)),
        ("vllm serve m -tp 8 -dcp 2 -pcp 2", Layout(tp=8, dcp=2, cp=2)),
        ("python -m vllm.entrypoints.openai.api_server --model m -tp 2", Layout(tp=2)),
        ("python3.11 /opt/vllm/entrypoints/openai/api_server.py --model m -tp 2", Layout(tp=2)),
        ("/opt/venv/bin/vllm serve m -tp 2", Layout(tp=2)),
        ("CUDA_VISIBLE_DEVICES=0,1 numactl -N 0 vllm serve m -tp 2", Layout(tp=2)),
        ("srun -N 2 --ntasks-per-node=1 vllm serve m -tp 8 -pp 2 --nnodes 2", Layout(tp=8, pp=2)),
        ("uv run vllm serve m -tp 2", Layout(tp=2)),
        ("bash -lc 'exec vllm serve m -tp 4'", Layout(tp=4)),
        ("docker run --gpus all --ipc=host vllm/vllm-openai:v0.33.0 --model m -tp 2", Layout(tp=2)),
        ("sudo docker run -d -p 80:80 -v /a:/b --ipc host vllm/vllm-openai m -tp 2", Layout(tp=2)),
        ("docker run --rm --ipc=host --entrypoint bash vllm/vllm-openai:v0.33.0 -c 'vllm serve m -tp 2'", Layout(tp=2)),
        ("podman run --shm-size 8g --name vllm registry:5000/x/vllm:v0.33.0 vllm serve m -tp 2", Layout(tp=2)),
    ],
)
def test_forms(text: str, layout: Layout) -> None:
    assert ENGINE.recognises(shlex.split(text))
    found = read(text)
    assert (found.layout, found.model, found.unknown) == (layout, "m", ())
    assert not [f for f in found.findings if f.severity == "illegal"]


@pytest.mark.parametrize(
    "text",
    [
        "vllm bench serve m",
        "vllm",
        "python train.py",
        "docker run nginx",
        "docker run --name vllm nginx -tp 2",
        "echo vllm",
        "python -m sglang.launch_server --model-path m",
        "bash -c 'echo hi'",
        "bash -c 'open \"quote'",
    ],
)
def test_other_commands_are_not_claimed(text: str) -> None:
    argv = shlex.split(text)
    assert not ENGINE.recognises(argv)
    with pytest.raises(InputError, match="no vllm serve"):
        ENGINE.parse(argv, {}, lambda name: None)


@pytest.mark.parametrize(
    ("flags", "way"),
    [
        ("", "single"),
        ("-tp 8 -pp 2 --nnodes 2 --node-rank 1 --headless", "mp"),
        ("-tp 16 --distributed-executor-backend ray", "ray"),
        ("-dp 4 --data-parallel-backend=ray", "ray"),
        ("-dp 16 -dpl 8 -dpa host", "headless"),
        ("-dp 16 -dpl 8 -dpr 8 -dpa host --headless", "headless"),
        ("-dp 16 -dpn 3", "external"),
        ("-dp 16 -dpe --nnodes 16 --node-rank 3 --headless", "external"),
        ("-dp 16 -dph -dpl 8 -dpr 8", "hybrid"),
        ("-dp 16 -dpl 8 -dpr 8", "hybrid"),
        ("""--kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'""", "pools"),
        ("""--kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'""", "single"),
        ("--kv-transfer-config.kv_connector=MooncakeConnector --kv-transfer-config.kv_role kv_producer", "pools"),
    ],
)
def test_how_it_is_started(flags: str, way: str) -> None:
    assert read(f"vllm serve m {flags}").deployment == way


def test_settings_and_lengths() -> None:
    found = read(
        "vllm serve m --max-model-len 128k --gpu-memory-utilization .85 --max-num-seqs 64 --max-num-batched-tokens 8K "
        "--kv-cache-dtype fp8 --block-size 64 --enforce-eager -q fp8 --dtype half -sc.method deepseek_mtp "
        "-sc.num_speculative_tokens 2 --language-model-only"
    )
    s = found.settings
    assert s is not None
    assert (s.utilization, s.max_num_seqs, s.max_num_batched_tokens, s.block_size) == (0.85, 64, 8192, 64)
    assert (s.kv_dtype, s.quantization, s.dtype, s.enforce_eager) == ("f8_e4m3", "fp8", "f16", True)
    assert (s.speculative, s.speculative_tokens, s.text_only) == (True, 2, True)
    assert found.workload == Serve(max_model_len=128_000)
    short = read("vllm serve m --max-model-len 512").workload
    assert isinstance(short, Serve)
    assert (short.isl + short.osl, short.context) == (512, 512)
    auto = read("vllm serve m --max-model-len auto")
    assert isinstance(auto.workload, Serve)
    assert auto.workload.max_model_len is None
    assert any("auto" in note for note in auto.notes)


@pytest.mark.parametrize("flags", ["-O0", "-O 0", "-O=0", """-cc '{"cudagraph_mode": "NONE"}'"""])
def test_no_graphs(flags: str) -> None:
    settings = read(f"vllm serve m {flags}").settings
    assert settings is not None
    assert settings.enforce_eager


def test_hand_made_stages() -> None:
    assert read("vllm serve m -pp 3", VLLM_PP_LAYER_PARTITION="13,14,13").layout.stage_layers == (13, 14, 13)
    assert codes(read("vllm serve m -pp 2", VLLM_PP_LAYER_PARTITION="13,14,13")) == {"partition_entries"}
    with pytest.raises(InputError, match="VLLM_PP_LAYER_PARTITION"):
        read("vllm serve m -pp 2", VLLM_PP_LAYER_PARTITION="a,b")


def test_a_yaml_file_comes_before_the_words() -> None:
    text = "tensor-parallel-size: 4\npipeline_parallel_size: 2\nenforce-eager: true\nenable-prefix-caching: false\n"
    text += "speculative-config:\n  method: mtp\n  num_speculative_tokens: 3\nserved-model-name: [a, b]\n"
    found = read("vllm serve m --config c.yaml -tp 2", files={"c.yaml": text})
    assert found.layout == Layout(tp=2, pp=2)
    assert found.settings is not None
    assert (found.settings.enforce_eager, found.settings.speculative_tokens) == (True, 3)
    assert ("--enable-prefix-caching", "false") in found.given
    assert read("vllm serve --config c.yaml", files={"c.yaml": "model: org/x\n" + text}).model == "org/x"
    alone = ENGINE.parse_file("c.yaml", b"model: org/x\ntensor-parallel-size: 8\n")
    assert alone is not None
    assert (alone.model, alone.layout.tp) == ("org/x", 8)
    for name, data in (("c.yaml", b"apiVersion: v1\nkind: Pod\n"), ("c.json", b"{}"), ("c.yaml", b"\xff\xfe")):
        assert ENGINE.parse_file(name, data) is None
    assert codes(read("vllm serve m --config=c.yaml", files={"c.yaml": text})) == {"config_not_read"}


@pytest.mark.parametrize(
    ("words", "files", "line"),
    [
        ("--config gone.yaml", {}, "no such file"),
        ("--config c.txt", {"c.txt": "a: 1"}, ".yaml and .yml only"),
        ("--config c.yaml", {"c.yaml": "- 1\n- 2\n"}, "a mapping"),
        ("--config c.yaml", {"c.yaml": "a: &x 1\n"}, "anchor"),
        ("--config c.yaml --config c.yaml", {"c.yaml": "a: 1"}, "twice"),
        ("--config", {}, "needs a file"),
        ("-tp $TP", {}, "not expanded"),
        ("-tp x", {}, "not a whole number"),
        ("-tp 0", {}, "below 1"),
        ("-dp 99999999", {}, "above"),
        ("--max-model-len lots", {}, "not a whole number"),
        ("--gpu-memory-utilization 90", {}, "at most 1"),
        ("--gpu-memory-utilization nan", {}, "not a number"),
        ("--kv-transfer-config {kv", {}, "not JSON"),
    ],
)
def test_what_cannot_be_read_is_one_line(words: str, files: dict[str, str], line: str) -> None:
    with pytest.raises(InputError) as caught:
        read(f"vllm serve m {words}", files=files)
    assert line in str(caught.value)
    assert len(str(caught.value)) < 250
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "code", "severity"),
    [
        ("--swap-space 4", "flag_removed", "unwise"),
        ("--foo 3", "flag_unknown", "unwise"),
        ("--mem-fraction-static 0.8", "flags_mixed", "illegal"),
        ("--dtype int3", "flag_value", "illegal"),
        ("--data-parallel-s 3", "flag_value", "illegal"),
        ("-dp 4 -dpn 4", "load_balancing", "illegal"),
        ("-dp 4 -dpn 1 -dph -dpl 2", "load_balancing", "illegal"),
        ("-dp 4 -dph", "load_balancing", "illegal"),
        ("-dp 4 -dpe", "load_balancing", "illegal"),
        ("-dp 4 -dpl 8", "load_balancing", "illegal"),
        ("-dpn 0", "load_balancing", "illegal"),
        ("-dp 4 -dph -dpl 2 --headless", "load_balancing", "illegal"),
        ("-tp 8 --nnodes 3", "world_over_nodes", "illegal"),
        ("-tp 8 --nnodes 2 --node-rank 2 --headless", "node_rank", "illegal"),
        ("-tp 8 --nnodes 2 --node-rank 1", "node_without_headless", "unwise"),
        ("-tp 8 --nnodes 2 --distributed-executor-backend ray", "nodes_with_ray", "illegal"),
        ("-tp 8 --enable-eplb", "eplb_needs_ep", "illegal"),
        ("-ep --enable-eplb", "eplb_on_one_rank", "illegal"),
        ("-tp 8 -ep --eplb-config.num_redundant_experts 8", "redundant_without_eplb", "illegal"),
        ("-dp 4 --all2all-backend pplx", "all2all_removed", "unwise"),
        ("--kv-transfer-config.kv_connector NixlConnector", "transfer_role", "illegal"),
        ("--kv-transfer-config.kv_connector X --kv-transfer-config.kv_role kv_both", "transfer_connector", "illegal"),
        ("--kv-transfer-config.kv_rank 0 --kv-transfer-config.kv_role kv_both", "transfer_field", "illegal"),
        (
            "--block-size 16 --kv-transfer-config.kv_connector NixlConnector --kv-transfer-config.kv_role kv_both",
            "transfer_blocks_small",
            "unwise",
        ),
        (
            "-dp 2 --kv-transfer-config.kv_connector NixlConnector --kv-transfer-config.kv_role kv_both",
            "connector_in_one_process",
            "unwise",
        ),
    ],
)
def test_findings(flags: str, code: str, severity: str) -> None:
    found = read(f"vllm serve m {flags}")
    assert {r.severity for r in found.findings if r.code == code} == {severity}
    assert all(r.way_out and "\n" not in r.message for r in found.findings)


def test_a_stated_version_decides() -> None:
    assert codes(read("vllm serve m --calculate-kv-scales", "0.26")) == set()
    (gone,) = read("vllm serve m --calculate-kv-scales", "0.33.0").findings
    assert (gone.code, gone.severity) == ("flag_removed", "illegal")
    tagged = read("docker run --ipc=host vllm/vllm-openai:v0.26.0 m --calculate-kv-scales")
    assert (tagged.version, codes(tagged)) == ("0.26.0", set())
    other = read("docker run --ipc=host vllm/vllm-openai:v0.29.1 m")
    assert other.version == "0.26.0" or other.version == "0.32.0"
    assert any("0.29.1" in note for note in other.notes)
    with pytest.raises(InputError, match="no profile of vLLM"):
        read("vllm serve m", "0.1")


def test_engine_v0_and_containers() -> None:
    assert {r.code: r.severity for r in read("vllm serve m -dp 8", VLLM_USE_V1="0").findings} == {
        "engine_v0": "illegal"
    }
    assert {r.code: r.severity for r in read("vllm serve m", VLLM_USE_V1="0").findings} == {"engine_v0": "unwise"}
    assert codes(read("docker run vllm/vllm-openai:v0.33.0 m")) == {"container_shared_memory"}
    assert codes(read("docker run --ipc=host --gpus '\"device=0,1\"' vllm/vllm-openai:v0.33.0 m -tp 4")) == {
        "ranks_exceed_visible"
    }
    assert codes(read("docker run --ipc=host --gpus 4 vllm/vllm-openai:v0.33.0 m -tp 4")) == set()
    assert codes(read("vllm serve m -tp 4", CUDA_VISIBLE_DEVICES="0,1")) == {"ranks_exceed_visible"}
    assert codes(read("vllm serve m -dp 8 -dpl 2 -dpa h", CUDA_VISIBLE_DEVICES="0,1")) == set()


def test_environment_that_nothing_reads() -> None:
    (gone,) = read("vllm serve m", VLLM_ATTENTION_BACKEND="FLASH_ATTN").findings
    assert (gone.code, gone.severity, gone.way_out) == ("environment_unread", "unwise", "use --attention-backend")
    assert [r.code for r in read("vllm serve m", VLLM_TYPO="1").findings] == ["environment_unread"]
    assert read("vllm serve m", VLLM_HOST_IP="10.0.0.1", NCCL_DEBUG="INFO", HOME="/x").findings == ()


def test_findings_that_need_the_model_or_the_cluster() -> None:
    dense, experts = read_model("llama-3.1-8b"), read_model("qwen3-30b-a3b")
    external = read("vllm serve m -dp 4 -dpn 1")
    assert [r.code for r in with_model(external, dense, None)] == ["offline_dp_dense"]
    assert with_model(external, experts, None) == []
    (wide,) = with_model(read("vllm serve m -tp 8 -pp 2 -dp 2 -dpl 1"), dense, cluster(4, 8))
    assert (wide.code, dict(wide.numbers)) == ("world_exceeds_node", {"world": 16, "devices": 8})
    for flags in ("--nnodes 2", "--distributed-executor-backend ray"):
        assert with_model(read(f"vllm serve m -tp 8 -pp 2 {flags}"), dense, cluster(2, 8)) == []
    for flags, expected in (
        ("-tp 3", ["eplb_experts_even"]),
        ("-tp 3 --eplb-config.num_redundant_experts=1", []),
        ("""-tp 4 --eplb-config '{"num_redundant_experts": 2}'""", ["eplb_experts_even"]),
        ("""-tp 4 --eplb-config '{"num_redundant_experts": 4}'""", []),
    ):
        assert [r.code for r in with_model(read(f"vllm serve m -ep --enable-eplb {flags}"), experts, None)] == expected


def test_hostile_words_stay_words(tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    name = "org/m'; touch owned; $(touch owned) `id` && rm -rf ~ | x > y"
    found = ENGINE.parse(["vllm", "serve", name, "-tp", "2", "--served-model-name", "$HOME"], {}, lambda n: None)
    assert found.model == name
    assert set(tmp_path.iterdir()) == before
    start = time.monotonic()
    huge = "x" * (1 << 20)
    for argv in (
        ["vllm", "serve", huge, "--" + huge, "--kv-transfer-config", "[" * (1 << 20)],
        ["bash", "-c", "vllm serve m " + "-tp 2 " * 1000],
        ["docker", "run", *["-e", f"A={huge}"], "vllm/vllm-openai:" + huge, huge],
        ["docker", "run", "-" + huge],
        ["vllm", "serve", "m", *["--foo"] * 5000],
    ):
        assert all(len(line) < 400 for line in lines_of(argv))
    assert time.monotonic() - start < 8


def lines_of(argv: list[str]) -> list[str]:
    """Lines that a user would see."""
    try:
        return [rule.message for rule in ENGINE.parse(argv, {}, lambda name: None).findings]
    except InputError as error:
        return [str(error)]

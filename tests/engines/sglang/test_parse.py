"""SGLang command lines of every form, right and wrong; nothing is executed and wrong words take one line."""

from __future__ import annotations

import shlex

import pytest

from meshwright.engines import load, profile
from meshwright.engines.sglang import ENGINE
from meshwright.errors import InputError
from meshwright.specs.cluster import parse_cluster
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import parse_layout
from tests.engines.sglang.commands import nothing, understood
from tests.specs.clusters import cluster

LAUNCH = "python -m sglang.launch_server --model-path m"
HEAD = "--dist-init-addr h:1"


def test_it_is_found_by_name() -> None:
    assert load("sglang") is ENGINE
    assert profile("sglang-0.5.23").name == "sglang 0.5.23"
    assert ENGINE.versions() == ("0.5.23",)


@pytest.mark.parametrize(
    ("command", "layout"),
    [
        (f"{LAUNCH} --tp-size 8", "tp=8"),
        (f"{LAUNCH} --tp 8", "tp=8"),
        (f"{LAUNCH} --tensor-parallel-size=8 --pipeline-parallel-size 2", "tp=8,pp=2"),
        ("sglang serve org/m --tp 4 --ep 4", "tp=4,ep=4"),
        ("sglang serve --model org/m --tp-size 16 --attn-dp-size 4 --moe-a2a-backend deepep", "tp=4,dp=4,ep=16"),
        ("A=1 /opt/venv/bin/python3 -m sglang.launch_server --model m --dp 4", "dp=4"),
        ("python sglang/launch_server.py --model m --tp-size 8 --dcp-size 4", "tp=8,dcp=4"),
        (f"{LAUNCH} --tp-size 8 --attn-cp-size 2 --enable-prefill-cp --cp-strategy zigzag", "tp=4,cp=2"),
        ("bash -c 'sglang serve m --tp 2'", "tp=2"),
        (
            "docker run --gpus all -e X=1 lmsysorg/sglang:v0.5.23 python3 -m sglang.launch_server --model m --tp 2",
            "tp=2",
        ),
        (f"{LAUNCH} --tp-size 8 --dwdp-size 8", "dp=8,ep=8"),
    ],
)
def test_forms(command: str, layout: str) -> None:
    argv = shlex.split(command)
    assert ENGINE.recognises(argv)
    found = ENGINE.parse(argv, {}, nothing)
    assert found.layout == parse_layout(layout)
    assert found.model in {"m", "org/m"}
    assert not [f for f in found.findings if f.severity == "illegal"]


@pytest.mark.parametrize("command", ["vllm serve m", "python train.py", "python -m sglang_router.launch_router", ""])
def test_other_commands_are_not_its_own(command: str) -> None:
    assert not ENGINE.recognises(shlex.split(command))
    with pytest.raises(InputError):
        ENGINE.parse(shlex.split(command), {}, nothing)


def test_settings_and_environment() -> None:
    found = understood(
        f"{LAUNCH} --tp-size 8 --attn-dp-size 8 --pp-size 3 --mem-fraction-static 0.8 --max-running-requests 512 "
        "--chunked-prefill-size 32768 --kv-cache-dtype fp8_e5m2 --page-size 64 --context-length 32k --dtype bfloat16 "
        "--disable-cuda-graph --speculative-algorithm NEXTN --speculative-num-steps 2",
        env={"SGLANG_PP_LAYER_PARTITION": "20,20,21", "CUDA_VISIBLE_DEVICES": "0,1"},
    )
    s = found.settings
    assert s is not None
    assert (s.utilization, s.max_num_seqs, s.max_num_batched_tokens, s.block_size) == (0.8, 64, 32768, 64)
    assert (s.kv_dtype, s.dtype, s.enforce_eager, s.speculative, s.speculative_tokens) == (
        "f8_e5m2",
        "bf16",
        True,
        True,
        2,
    )
    assert found.layout.stage_layers == (20, 20, 21)
    assert found.workload.max_model_len == 32000  # type: ignore[union-attr]
    assert found.devices == 2


def test_replicas_of_experts_hold_a_set_each_and_attention_replicas_share_one() -> None:
    moe, dense = read_model("qwen3-30b-a3b"), read_model("qwen3-8b")
    assert understood(f"{LAUNCH} --tp-size 4 --dp-size 2", moe).layout == parse_layout("tp=4,dp=2,etp=4")
    assert understood(f"{LAUNCH} --tp-size 4 --dp-size 2 --ep-size 4", moe).layout == parse_layout(
        "tp=4,dp=2,ep=4,etp=1"
    )
    assert understood(f"{LAUNCH} --tp-size 4 --dp-size 2", dense).layout == parse_layout("tp=4,dp=2")
    assert understood(f"{LAUNCH} --tp-size 8 --attn-dp-size 2", moe).layout == parse_layout("tp=4,dp=2")
    whole = ENGINE.profile()
    from meshwright.specs.placement import place

    held = [
        place(moe, parse_layout(text), whole).weight_bytes_by_role(
            place(moe, parse_layout(text), whole).classes[0].coordinate
        )
        for text in ("tp=4,dp=2,etp=4", "tp=4,dp=2", "tp=4")
    ]
    assert held[0]["expert"] == held[2]["expert"] == 2 * held[1]["expert"]


@pytest.mark.parametrize(
    ("flags", "code", "severity"),
    [
        ("--tp-size 8 --dp-size 2 --attn-dp-size 2", "replicas_with_attention_dp", "illegal"),
        (f"--dp-size 2 --nnodes 2 {HEAD} --tp-size 2", "replicas_over_nodes", "illegal"),
        (f"--tp-size 3 --nnodes 2 {HEAD}", "ranks_over_nnodes", "illegal"),
        ("--tp-size 2 --nnodes 2", "no_rendezvous", "illegal"),
        (f"--tp-size 2 --nnodes 2 --node-rank 2 {HEAD}", "node_rank", "illegal"),
        ("--tp-size 8 --attn-dp-size 3", "attention_inside_tp_size", "illegal"),
        ("--tp-size 8 --moe-dense-tp-size 4", "moe_dense_tp_size", "illegal"),
        ("--tp-size 8 --enable-dp-lm-head", "lm_head_without_attention_dp", "illegal"),
        ("--tp-size 8 --ep-size 4 --moe-a2a-backend deepep", "ep_size_adjusted", "unwise"),
        ("--tp-size 8 --moe-a2a-backend flashinfer", "backend_needs_attention_dp", "illegal"),
        ("--tp-size 8 --moe-a2a-backend pplx", "backend_needs_attention_dp", "illegal"),
        ("--tp-size 8 --enable-eplb", "eplb_needs_ep", "illegal"),
        ("--tp-size 8 --ep-size 8 --ep-dispatch-algorithm static", "dispatch_per_rank", "illegal"),
        ("--tp-size 8 --enable-prefill-cp", "cp_strategy", "illegal"),
        ("--tp-size 8 --dcp-comm-backend a2a", "dcp_backend_without_dcp", "illegal"),
        ("--chunked-prefill-size 1000 --page-size 64", "chunk_over_pages", "illegal"),
        ("--tp-size 32 --attn-dp-size 32 --chunked-prefill-size 8192", "chunk_divided", "unwise"),
        ("--pp-size 2 --speculative-algorithm EAGLE", "speculative_with_pp", "illegal"),
        ("--tp-size 8 --dp-size 8 --enable-dp-attention", "dp_attention_renamed", "unwise"),
        ("--disable-cuda-graph", "cuda_graph_renamed", "unwise"),
        ("--gpu-memory-utilization 0.9", "flags_mixed", "illegal"),
        ("--enable-ep-moe", "flag_removed", "unwise"),
        ("--no-such-flag 3", "flag_unknown", "unwise"),
        ("--tp_size 2", "flag_underscores", "illegal"),
        ("--moe-a2a-backend deep", "flag_value", "illegal"),
        ("--pp 2 --p 3", "flag_value", "illegal"),
        ("loose", "stray_word", "illegal"),
        ("--disaggregation-mode prefill --disaggregation-transfer-backend fake", "fake_transfer", "illegal"),
        ("--disaggregation-mode decode --enable-pd-role-switch --pp-size 2", "role_switch", "illegal"),
    ],
)
def test_what_the_command_itself_gets_wrong(flags: str, code: str, severity: str) -> None:
    found = understood(f"{LAUNCH} {flags}")
    rules = {f.code: f for f in found.findings}
    assert code in rules, sorted(rules)
    rule = rules[code]
    assert rule.severity == severity
    assert rule.message
    assert rule.way_out
    assert rule.where or code in {"fake_transfer"}
    assert "\n" not in rule.message
    assert len(rule.message) < 300


def test_a_removed_flag_stops_a_stated_version() -> None:
    found = ENGINE.parse(shlex.split(f"{LAUNCH} --enable-deepep-moe"), {}, nothing, "0.5.23")
    assert [(f.code, f.severity) for f in found.findings] == [("flag_removed", "illegal")]
    assert "--moe-a2a-backend deepep" in found.findings[0].way_out


def test_configuration_file_comes_first() -> None:
    files = {"c.yaml": b"tp-size: 4\nmem-fraction-static: 0.7\nenable-eplb: false\ncontext_length: 4096\n"}
    found = ENGINE.parse(shlex.split(f"{LAUNCH} --config c.yaml --tp-size 8"), {}, files.get)
    assert found.layout == parse_layout("tp=8")
    assert found.settings is not None
    assert found.settings.utilization == 0.7
    assert found.workload.max_model_len == 4096  # type: ignore[union-attr]
    alone = ENGINE.parse_file("c.yaml", files["c.yaml"])
    assert alone is not None
    assert alone.layout == parse_layout("tp=4")
    assert ENGINE.parse_file("c.json", b"{}") is None
    assert ENGINE.parse_file("c.yaml", b"apiVersion: v1\nkind: Pod\n") is None
    assert ENGINE.parse_file("c.yaml", b"\xff\xfe: &a [") is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--tp-size $TP", "shell variable"),
        ("--tp-size 0", "below 1"),
        ("--tp-size eight", "whole number"),
        ("--tp-size 99999999999", "above"),
        ("--mem-fraction-static 1.5", "between 0 and 1"),
        ("--mem-fraction-static nan", "not a number"),
        ("--config", "--config needs"),
        ("--config nothing.yaml", "no such file"),
        ("--config x.json", ".yaml"),
    ],
)
def test_malformed_values_take_one_line(flags: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        understood(f"{LAUNCH} {flags}")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "word", ["x" * 1_000_000, "$(rm -rf /)", "`id`", "a'b\"c", "\x00\x1b[31m", "--" + "y" * 1_000_000, "-", "--", "--="]
)
def test_hostile_words_are_data(word: str) -> None:
    argv = [*shlex.split(LAUNCH), "--served-model-name", word, word, "--tp-size", "2"]
    try:
        found = ENGINE.parse(argv, {"SGLANG_PP_LAYER_PARTITION": ""}, nothing)
        lines = [f.message for f in found.findings]
    except InputError as error:
        lines = [str(error)]
    assert all(len(line) < 400 and "\n" not in line for line in lines)


def test_partition_that_is_none() -> None:
    with pytest.raises(InputError, match="SGLANG_PP_LAYER_PARTITION"):
        understood(LAUNCH, env={"SGLANG_PP_LAYER_PARTITION": "1;2"})
    found = understood(f"{LAUNCH} --pp-size 3", env={"SGLANG_PP_LAYER_PARTITION": "1,2"})
    assert [f.code for f in found.findings] == ["partition_entries"]


def test_complete_without_experts_says_what_is_counted() -> None:
    found = understood(f"{LAUNCH} --tp-size 8 --attn-dp-size 2", read_model("qwen3-8b"))
    assert any("feed-forward blocks stay cut" in note for note in found.notes)
    assert ENGINE.complete(found, read_model("qwen3-8b"), cluster(1, 8)).layout == parse_layout("tp=4,dp=2")


def test_sparse_attention_is_cached_in_fp8_on_blackwell_only() -> None:
    spec, found = read_model("deepseek-v3.2"), understood(f"{LAUNCH} --tp-size 8")
    for name, kept in (("B200", "f8_e4m3"), ("H200-SXM", "bf16")):
        done = ENGINE.complete(found, spec, parse_cluster(f"1x8x{name}"))
        assert done.settings is not None
        assert done.settings.kv_dtype == kept
    stated = understood(f"{LAUNCH} --tp-size 8 --kv-cache-dtype bf16")
    assert ENGINE.complete(stated, spec, parse_cluster("1x8xB200")).settings == stated.settings


@pytest.mark.parametrize(
    "backend",
    [
        "deepep",
        "deepep_v2",
        "mooncake",
        "nixl",
        "mori",
        "flashinfer",
        "megamoe",
        "flashinfer_megamoe",
        "pplx",
        "ascend_fuseep",
    ],
)
def test_all_to_all_backends_span_every_rank(backend: str) -> None:
    assert understood(f"{LAUNCH} --tp-size 8 --attn-dp-size 8 --moe-a2a-backend {backend}").layout.ep == 8
    assert understood(f"{LAUNCH} --tp-size 8 --attn-dp-size 8 --moe-a2a-backend none").layout.ep == 1

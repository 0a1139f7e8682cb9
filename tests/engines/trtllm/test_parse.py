"""TensorRT-LLM commands and files, right and wrong, and public reports about them."""

from __future__ import annotations

import shlex

import pytest
from bench.flags import trtllm as written

from meshwright.api import plan_serve
from meshwright.engines import load, profile
from meshwright.engines.trtllm import ENGINE
from meshwright.errors import InputError
from meshwright.plan.memory import ServeMemory
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import parse_layout
from meshwright.specs.nearest import explain
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve
from tests.engines.trtllm.commands import broken_rules, reader, understood

SERVE = "trtllm-serve m"


def test_it_is_found_by_name_and_deals_layers_to_the_first_stages() -> None:
    assert load("trtllm") is ENGINE
    assert profile("trtllm-1.2").name == "trtllm 1.2.0"
    assert ENGINE.profile().split_layers(61, 4) == (16, 15, 15, 15)


def test_tables_are_what_the_script_writes() -> None:
    from meshwright.engines.trtllm.config import FOLDER

    for name, text in written.tables().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("command", "layout"),
    [
        (f"{SERVE} --tp_size 8 --pp_size 2", "tp=8,pp=2"),
        (f"{SERVE} --tensor_parallel_size=8 --moe_expert_parallel_size 4", "tp=8,ep=4"),
        ("trtllm-serve serve m --tp_size 2", "tp=2"),
        ("mpirun -np 16 --hostfile h trtllm-llmapi-launch trtllm-serve m --tp_size 16 --ep_size 8", "tp=16,ep=8"),
        ("srun -N 2 --ntasks 16 --mpi=pmix bash -c 'trtllm-llmapi-launch trtllm-serve m --tp_size 16'", "tp=16"),
        ("trtllm-bench --model m throughput --dataset d --tp 8 --pp 2 --ep 8", "tp=8,pp=2,ep=8"),
        (f"{SERVE} --tp_size 8 --config spread.yml", "dp=8,ep=4"),
        (f"{SERVE} --extra_llm_api_options sized.yml", "tp=4,pp=2,stage_layers=20+12"),
        (f"{SERVE} --tp_size 8 --config grid.yml", "tp=8,ep=2"),
    ],
)
def test_forms(command: str, layout: str) -> None:
    files = {
        "spread.yml": b"enable_attention_dp: true\nmoe_expert_parallel_size: 4\n",
        "sized.yml": b"tensor_parallel_size: 4\npipeline_parallel_size: 2\npp_partition: [20, 12]\n",
        "grid.yml": b"moe_tensor_parallel_size: 4\n",
    }
    found = understood(command, files)
    assert found.layout == parse_layout(layout)
    assert found.model == "m"
    assert found.findings == ()


def test_the_file_overrides_the_flags() -> None:
    files = {
        "c.yml": b"max_batch_size: 16\nkv_cache_config:\n  free_gpu_memory_fraction: 0.7\n  dtype: fp8\n"
        b"  tokens_per_block: 64\ncuda_graph_config: null\nspeculative_config:\n  decoding_type: MTP\n"
        b"  num_nextn_predict_layers: 3\n"
    }
    found = understood(
        f"{SERVE} --max_batch_size 512 --max_num_tokens 4096 --kv_cache_free_gpu_memory_fraction 0.9 "
        "--max_seq_len 8192 --config c.yml",
        files,
    )
    s = found.settings
    assert s is not None
    assert (s.max_num_seqs, s.max_num_batched_tokens, s.utilization, s.kv_dtype) == (16, 4096, 0.7, "f8_e4m3")
    assert (s.block_size, s.enforce_eager, s.speculative, s.speculative_tokens) == (64, True, True, 3)
    assert found.workload.max_model_len == 8192  # type: ignore[union-attr]


def test_two_pools() -> None:
    data = (
        b"hostname: localhost\nport: 8000\nmodel: org/m\nbackend: pytorch\n"
        b"cache_transceiver_config:\n  backend: NIXL\n"
        b"context_servers:\n  num_instances: 2\n  tensor_parallel_size: 4\n  urls: ['a:1', 'b:1']\n"
        b"generation_servers:\n  num_instances: 1\n  tensor_parallel_size: 8\n  enable_attention_dp: true\n"
        b"  moe_expert_parallel_size: 8\n  urls: ['c:1']\n"
    )
    for found in (
        understood("trtllm-serve disaggregated -c d.yaml", {"d.yaml": data}),
        ENGINE.parse_file("d.yaml", data),
    ):
        assert found is not None
        assert (found.deployment, found.model) == ("pools", "org/m")
        assert found.prefill == parse_layout("tp=4")
        assert found.layout == parse_layout("dp=8,ep=8")
        assert found.findings == ()
    wrong = ENGINE.parse_file(
        "d.yaml", data.replace(b"num_instances: 2", b"num_instances: 3").replace(b"cache_", b"x_")
    )
    assert wrong is not None
    assert {f.code for f in wrong.findings} == {"pool_urls", "no_cache_transceiver"}


@pytest.mark.parametrize(
    ("command", "code", "severity"),
    [
        ("mpirun -n 8 trtllm-llmapi-launch trtllm-serve m --tp_size 1", "mpi_ranks", "illegal"),
        ("srun -N 2 trtllm-llmapi-launch trtllm-serve m --tp_size 16", "mpi_ranks_open", "unwise"),
        ("trtllm-build --checkpoint_dir c --tp_size 4 --pp_size 4", "build_does_not_cut", "illegal"),
        (f"{SERVE} --tp-size 2", "flag_dashes", "illegal"),
        (f"{SERVE} --tp 2", "flag_removed", "unwise"),
        (f"{SERVE} --enable_attention_dp", "flag_removed", "unwise"),
        (f"{SERVE} --gpu-memory-utilization 0.9", "flags_mixed", "illegal"),
        (f"{SERVE} --mem-fraction-static 0.9", "flags_mixed", "illegal"),
        (f"{SERVE} --no_such 1", "flag_unknown", "unwise"),
        (f"{SERVE} --backend onnx", "flag_value", "illegal"),
        (f"{SERVE} --config odd.yml", "key_unknown", "unwise"),
    ],
)
def test_what_the_command_itself_gets_wrong(command: str, code: str, severity: str) -> None:
    rules = {f.code: f for f in understood(command, {"odd.yml": b"kv_cach_config: {}\n"}).findings}
    assert code in rules, sorted(rules)
    assert rules[code].severity == severity
    assert rules[code].way_out
    assert rules[code].where


def test_mpi_ranks_are_tensor_times_pipeline_ranks() -> None:
    """TensorRT-LLM issues 440, 1047 and 2021: engine world size 1 against 8 ranks; tp 4 x pp 4 needs 16."""
    launch = "trtllm-llmapi-launch trtllm-serve m"
    assert understood(f"mpirun -n 16 {launch} --tp_size 4 --pp_size 4").findings == ()
    (rule,) = understood(f"mpirun -n 1 {launch} --tp_size 4 --pp_size 4").findings
    assert dict(rule.numbers) == {"ranks": 1, "world": 16}


def test_expert_parallel_of_any_divisor() -> None:
    """vLLM issue 28889: TensorRT-LLM takes expert parallel 1, 2, 4 and 8 of tensor parallel 8."""
    spec = read_model("deepseek-v3")
    for ep in (1, 2, 4, 8):
        assert broken_rules(f"trtllm-serve deepseek-ai/DeepSeek-V3 --tp_size 8 --ep_size {ep}", spec) == []
    said = broken_rules("trtllm-serve deepseek-ai/DeepSeek-V3 --tp_size 8 --ep_size 3", spec)
    assert any("ep 3" in line or "parallel 3" in line for line in said)
    both = {"c.yml": b"moe_tensor_parallel_size: 4\nmoe_expert_parallel_size: 4\n"}
    said = broken_rules("trtllm-serve deepseek-ai/DeepSeek-V3 --tp_size 8 --config c.yml", spec, both)
    assert any("4 x MoE expert parallel 4 = 16 is not tensor_parallel_size 8" in line for line in said)


@pytest.mark.parametrize(
    ("model", "layout", "code"),
    [
        ("llama-2-13b", "tp=3", "heads_divide_tp"),
        ("deepseek-v3", "tp=4,dp=2", "attention_dp_is_whole"),
        ("deepseek-v3", "tp=8,dcp=2", "no_decode_context_parallel"),
        ("deepseek-v3", "tp=4,cp=2,ep=2", "cp_with_experts"),
        ("deepseek-v3", "tp=32", "quant_block"),
        ("qwen3-8b", "tp=2,ep=2", "ep_without_experts"),
        ("qwen3-8b", "pp=2,stage_layers=20+20", "stage_sum"),
    ],
)
def test_rules(model: str, layout: str, code: str) -> None:
    rules = explain(read_model(model), parse_layout(layout), ENGINE.profile())
    first = [r for r in rules if r.severity == "illegal"]
    assert code in {r.code for r in first}
    assert first[0].nearest


def test_cache_is_a_share_of_what_is_free() -> None:
    """C137: a 7B engine of 6,683 MiB on one A100 leaves 64.75 GiB of cache at 0.9; 524,288 bytes a token."""
    settings = ServeSettings(utilization=0.9, quantization="fp8")  # eight bits a weight, as that engine's
    plan = plan_serve("llama-2-7b", "1x1xA100-80G", Serve(), layout="tp=1", engine="trtllm", settings=settings)
    assert plan.chosen is not None
    memory = plan.chosen.memory
    assert isinstance(memory, ServeMemory)
    assert memory.kv_bytes_per_token == 524288
    assert memory.kv_cache_tokens == pytest.approx(132608, rel=0.02)
    half = ServeSettings(utilization=0.45, quantization="fp8")
    less = plan_serve("llama-2-7b", "1x1xA100-80G", Serve(), layout="tp=1", engine="trtllm", settings=half).chosen
    assert less is not None
    assert less.memory.worst.capacity_bytes < memory.worst.capacity_bytes
    assert less.memory.kv_pool_bytes == pytest.approx(memory.kv_pool_bytes / 2, rel=0.01)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f"{SERVE} --tp_size $TP", "shell variable"),
        (f"{SERVE} --tp_size 0", "not between 1"),
        (f"{SERVE} --config none.yml", "no such file"),
        (f"{SERVE} --config bad.yml", "bad.yml"),
        (f"{SERVE} --config list.yml", "a mapping"),
        (f"{SERVE} --config text.yml", "not a whole number"),
        (f"{SERVE} --config parts.yml", "pp_partition"),
        (f"{SERVE} --kv_cache_free_gpu_memory_fraction 2", "at most 1"),
        ("trtllm-serve disaggregated", "-c FILE"),
        ("vllm serve m", "no trtllm-serve"),
    ],
)
def test_malformed_values_take_one_line(command: str, said: str) -> None:
    files = {
        "bad.yml": b"a: &x [",
        "list.yml": b"- 1\n",
        "text.yml": b"tensor_parallel_size: ${TP}\n",
        "parts.yml": b"pp_partition: 20\n",
    }
    with pytest.raises(InputError) as caught:
        understood(command, files)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("word", ["x" * 1_000_000, "$(id)", "a'b", "\x1b[31m", "--" + "y" * 1_000_000, "-", "--="])
def test_hostile_words_are_data(word: str) -> None:
    try:
        lines = [f.message for f in ENGINE.parse([*shlex.split(SERVE), word, word], {}, reader({})).findings]
    except InputError as error:
        lines = [str(error)]
    assert all(len(line) < 400 and "\n" not in line for line in lines)
    assert ENGINE.parse_file("x.yml", word.encode()) is None

"""Flag table of ``trtllm-serve`` of TensorRT-LLM 1.2: ``python -m bench.flags.trtllm``.

There is no wheel of it on the index, so the table is written down from the public repository and its documentation:
the click options of ``tensorrt_llm/commands/serve.py`` (commit 00209af149e7, of the time of 1.2) and
``tensorrt_llm/bench/benchmark/throughput.py`` with ``docs/source/commands/trtllm-bench.rst``. Keys of the
configuration file: ``tensorrt_llm/llmapi/llm_args.py`` by ``tests/unittest/api_stability/references/llm.yaml`` and
``references_committed/llm.yaml``; written from memory of that file: ``attention_dp_config``, ``pp_partition``,
``batched_logits_processor``, ``perf_metrics_max_requests``, ``sampler_type``, ``max_stats_len``,
``return_perf_metrics``, ``orchestrator_type``, ``ray_worker_extension_cls``, ``env_overrides``, ``disagg_cluster``,
``mm_encoder_only``, ``sparse_attention_config``, ``nvfp4_gemm_config``, ``quant_config``, ``custom_tokenizer``.
Options of click take no prefixes, and their names have underscores.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from meshwright.engines.base import Flag, FlagTable
from meshwright.engines.flagtable import table_to

TARGET = Path(__file__).parents[2] / "src/meshwright/engines/trtllm"
VERSION = "1.2.0"
SOURCE = "tensorrt_llm/commands/serve.py at 00209af149e7, documentation (no wheel)"
BENCH_SOURCE = "tensorrt_llm/bench/benchmark/throughput.py, docs/source/commands/trtllm-bench.rst (no wheel)"

_LEVELS = ("internal_error", "error", "warning", "info", "verbose", "debug", "trace")
_BACKENDS = ("pytorch", "tensorrt", "_autodeploy", "trt")


def _value(name: str, *aliases: str, type: str = "str", default: str | None = None) -> Flag:
    return Flag(name, aliases, type=type, default=default)  # type: ignore[arg-type]


def _choice(name: str, *choices: str, default: str | None = None) -> Flag:
    return Flag(name, type="choice", choices=choices, default=default)


def _switch(name: str) -> Flag:
    return Flag(name, takes="switch", type="bool", default="false")


#: ``trtllm-serve [serve] MODEL``.
SERVE = (
    _value("--tokenizer"),
    _value("--custom_tokenizer"),
    _value("--host", default="localhost"),
    _value("--port", type="int", default="8000"),
    _choice("--backend", *_BACKENDS, default="pytorch"),
    _value("--custom_module_dirs"),
    _choice("--log_level", *_LEVELS, default="info"),
    _value("--max_beam_width", type="int", default="1"),
    _value("--max_batch_size", type="int", default="2048"),
    _value("--max_num_tokens", type="int", default="8192"),
    _value("--max_seq_len", type="int"),
    _value("--tensor_parallel_size", "--tp_size", type="int", default="1"),
    _value("--pipeline_parallel_size", "--pp_size", type="int", default="1"),
    _value("--context_parallel_size", "--cp_size", type="int", default="1"),
    _value("--moe_expert_parallel_size", "--ep_size", type="int"),
    _value("--moe_cluster_parallel_size", "--cluster_size", type="int"),
    _value("--gpus_per_node", type="int"),
    _value("--free_gpu_memory_fraction", "--kv_cache_free_gpu_memory_fraction", type="float", default="0.9"),
    _value("--num_postprocess_workers", type="int", default="0"),
    _switch("--trust_remote_code"),
    _value("--revision"),
    _value("--config", "--extra_llm_api_options"),
    _value("--reasoning_parser"),
    _value("--tool_parser"),
    _value("--metadata_server_config_file"),
    _value("--server_role"),
    _switch("--fail_fast_on_attention_window_too_large"),
    _value("--otlp_traces_endpoint"),
    _value("--disagg_cluster_uri"),
    _switch("--enable_chunked_prefill"),
    _value("--media_io_kwargs", type="json"),
    _value("--chat_template"),
)

#: ``trtllm-serve disaggregated`` and ``disaggregated_mpi_worker``.
DISAGGREGATED = (
    _value("--config_file", "-c"),
    _value("--metadata_server_config_file", "-m"),
    _value("--server_start_timeout", "-t", type="int", default="180"),
    _value("--request_timeout", "-r", type="int", default="180"),
    replace(_choice("--log_level", *_LEVELS, default="info"), aliases=("-l",)),
    _value("--metrics-log-interval", type="int", default="0"),
)

#: ``trtllm-bench --model M throughput``.
BENCH = (
    _value("--model", "-m"),
    _value("--model_path"),
    _value("--workspace", "-w"),
    _value("--engine_dir"),
    _choice("--backend", *_BACKENDS, default="pytorch"),
    _value("--config", "--extra_llm_api_options"),
    _value("--max_batch_size", type="int"),
    _value("--max_num_tokens", type="int"),
    _value("--max_seq_len", type="int"),
    _value("--beam_width", type="int", default="1"),
    _value("--kv_cache_free_gpu_mem_fraction", type="float", default="0.9"),
    _value("--dataset"),
    _value("--eos_id", type="int", default="-1"),
    _choice("--modality", "image", "video"),
    _value("--max_input_len", type="int", default="4096"),
    _value("--num_requests", type="int", default="0"),
    _value("--warmup", type="int", default="2"),
    _value("--target_input_len", type="int"),
    _value("--target_output_len", type="int"),
    _value("--tp", type="int", default="1"),
    _value("--pp", type="int", default="1"),
    _value("--ep", type="int"),
    _value("--cluster_size", type="int"),
    _value("--concurrency", type="int", default="-1"),
    _switch("--streaming"),
    _value("--report_json"),
    _value("--iteration_log"),
    _value("--output_json"),
    _value("--request_json"),
    _switch("--enable_chunked_context"),
    _choice("--scheduler_policy", "guaranteed_no_evict", "max_utilization"),
)

#: Flags of earlier versions -> what to use.
REMOVED = {
    "--kv_cache_free_gpu_mem_fraction": "--kv_cache_free_gpu_memory_fraction (trtllm-bench keeps the short form)",
    "--tp": "--tp_size",
    "--pp": "--pp_size",
    "--ep": "--ep_size",
    "--enable_attention_dp": "enable_attention_dp: true in the file of --config",
    "--moe_tensor_parallel_size": "moe_tensor_parallel_size in the file of --config, or --ep_size alone",
    "--kv_cache_dtype": "kv_cache_config: {dtype: fp8} in the file of --config",
    "--pytorch_backend_config": "its keys at the top of the file of --config",
    "--world_size": "--tp_size and --pp_size",
}

_KEYS = """
model tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code tensor_parallel_size dtype revision
tokenizer_revision pipeline_parallel_size context_parallel_size moe_tensor_parallel_size moe_expert_parallel_size
moe_cluster_parallel_size enable_lora lora_config batched_logits_processor guided_decoding_backend speculative_config
max_batch_size max_input_len max_seq_len max_beam_width max_num_tokens load_format enable_chunked_prefill
kv_cache_config stream_interval gpus_per_node enable_attention_dp attention_dp_config enable_lm_head_tp_in_adp
pp_partition cp_config iter_stats_max_iterations request_stats_max_iterations peft_cache_config scheduler_config
cache_transceiver_config batching_type normalize_log_probs gather_generation_logits num_postprocess_workers
postprocess_tokenizer_dir reasoning_parser garbage_collection_gen0_threshold backend build_config cuda_graph_config
checkpoint_loader checkpoint_format disable_overlap_scheduler moe_config nvfp4_gemm_config attn_backend sampler_type
enable_iter_perf_stats enable_iter_req_stats print_iter_log torch_compile_config enable_autotuner
enable_layerwise_nvtx_marker enable_min_latency force_dynamic_quantization allreduce_strategy quant_config
fail_fast_on_attention_window_too_large otlp_traces_endpoint return_perf_metrics perf_metrics_max_requests
orchestrator_type ray_worker_extension_cls env_overrides disagg_cluster mm_encoder_only sparse_attention_config
max_stats_len custom_tokenizer
"""


def tables() -> dict[str, str]:
    """File name -> text of everything that is written."""
    serve = FlagTable("trtllm", VERSION, SOURCE, SERVE, prefixes=False, removed=REMOVED)
    split = FlagTable("trtllm", VERSION, SOURCE, DISAGGREGATED, prefixes=False)
    bench = FlagTable("trtllm", VERSION, BENCH_SOURCE, BENCH, prefixes=False)
    keys = {"source": __doc__.split("\n\n")[1].replace("\n", " "), "keys": sorted(_KEYS.split())} if __doc__ else {}
    return {
        f"flags_{VERSION}.json": table_to(serve),
        f"disaggregated_{VERSION}.json": table_to(split),
        f"bench_{VERSION}.json": table_to(bench),
        f"keys_{VERSION}.json": json.dumps(keys, indent=1) + "\n",
    }


if __name__ == "__main__":
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, text in tables().items():
        (TARGET / name).write_text(text, encoding="utf-8")
        print(name)

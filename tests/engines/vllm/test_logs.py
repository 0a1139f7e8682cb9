"""Boot logs of several versions become holdings; cut, mixed and noisy lines do no harm; misleading lines are named."""

from __future__ import annotations

import random
import time

import pytest

from meshwright.engines.base import BootLog
from meshwright.engines.vllm import ENGINE
from meshwright.specs.layout import Layout

GIB = 1 << 30

V033 = """\
\x1b[1;36m(APIServer pid=1)\x1b[0;0m INFO 08-01 10:00:00 [utils.py:233] vLLM API server version 0.33.0
(APIServer pid=1) INFO 08-01 10:00:00 [utils.py:233] non-default args: {'model_tag': 'org/m', 'enable_expert_parallel': True}
(EngineCore_DP0 pid=9) INFO 08-01 10:00:09 [core.py:140] Initializing a V1 LLM engine (v0.33.0) with config: model='org/m', \
speculative_config=None, tokenizer='org/m', dtype=torch.bfloat16, max_seq_len=131072, tensor_parallel_size=2, \
pipeline_parallel_size=1, data_parallel_size=2, decode_context_parallel_size=1, enforce_eager=False
(Worker_DP0_TP0_EP0 pid=11) INFO 08-01 10:01:00 [gpu_model_runner.py:5089] Model loading took 15.27 GiB memory and 12.3 seconds
(Worker_DP0_TP1_EP1 pid=12) INFO 08-01 10:01:01 [gpu_model_runner.py:5089] Model loading took 15.5 GiB memory and 12.9 seconds
(Worker_DP0_TP0_EP0 pid=11) INFO 08-01 10:02:00 [gpu_worker.py:773] Available KV cache memory: 50.25 GiB
(EngineCore_DP0 pid=9) INFO 08-01 10:02:01 [kv_cache_utils.py:1147] GPU KV cache size: 411,648 tokens, Maximum concurrency \
for 131,072 tokens per request: 3.14x
(EngineCore_DP1 pid=10) INFO 08-01 10:02:01 [kv_cache_utils.py:1147] GPU KV cache size: 411,600 tokens, Maximum concurrency \
for 131,072 tokens per request: 3.14x
(Worker_DP0_TP0_EP0 pid=11) INFO 08-01 10:03:00 [gpu_model_runner.py:6517] Graph capturing finished in 21 secs, took 0.52 GiB
(Worker_DP0_TP0_EP0 pid=11) INFO 08-01 10:03:00 [gpu_worker.py:1004] CUDA graph pool memory: 0.5 GiB (actual), 0.6 GiB \
(estimated), difference: 0.1 GiB (20.0%).
(Worker_DP0_TP0_EP0 pid=11) DEBUG 08-01 10:03:01 [gpu_worker.py:1060] Free memory on device (78.6/79.19 GiB) on startup. \
Desired GPU memory utilization is (0.92, 72.86 GiB). Actual usage is 16.0 GiB for consumed memory (weights + non-torch), 2.6 \
GiB for peak activation, and 0.5 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=1`.
(Worker_DP1_TP1_EP3 pid=14) INFO 08-01 10:01:01 [gpu_model_runner.py:5089] Model loading took 15.6 GiB memory and 12.9 seconds
"""  # noqa: E501

V010 = """\
INFO 07-15 10:12:33 [api_server.py:1755] vLLM API server version 0.10.1
(VllmWorker rank=0 pid=301) INFO 07-15 10:13:01 [gpu_model_runner.py:1955] Model loading took 7.5000 GiB and 4.2 seconds
(VllmWorker rank=1 pid=302) INFO 07-15 10:13:01 [gpu_model_runner.py:1955] Model loading took 7.5100 GiB and 4.2 seconds
(VllmWorker rank=1 pid=302) INFO 07-15 10:13:20 [gpu_worker.py:276] Available KV cache memory: 61.80 GiB
INFO 07-15 10:13:21 [kv_cache_utils.py:849] GPU KV cache size: 1,012,000 tokens
INFO 07-15 10:13:21 [kv_cache_utils.py:853] Maximum concurrency for 40,960 tokens per request: 24.71x
"""

V06 = """\
INFO 11-01 08:00:00 config.py:905] Defaulting to use mp for distributed inference
INFO 11-01 08:00:00 llm_engine.py:237] Initializing an LLM engine (v0.6.3.post1) with config: model='org/old', \
tensor_parallel_size=2, pipeline_parallel_size=1, max_seq_len=8192
INFO 11-01 08:00:30 model_runner.py:1067] Loading model weights took 14.9888 GB
(VllmWorkerProcess pid=77) INFO 11-01 08:00:30 model_runner.py:1067] Loading model weights took 14.9900 GB
INFO 11-01 08:00:40 worker.py:232] Memory profiling takes 5.12 seconds
INFO 11-01 08:00:40 worker.py:232] the current vLLM instance can use total_gpu_memory (79.11GiB) x gpu_memory_utilization \
(0.90) = 71.20GiB
INFO 11-01 08:00:40 worker.py:232] model weights take 14.99GiB; non_torch_memory takes 0.15GiB; PyTorch activation peak memory \
takes 1.26GiB; the rest of the memory reserved for KV Cache is 54.80GiB.
INFO 11-01 08:00:41 distributed_gpu_executor.py:57] # GPU blocks: 28057, # CPU blocks: 2048
INFO 11-01 08:00:41 distributed_gpu_executor.py:61] Maximum concurrency for 8192 tokens per request: 54.80x
"""  # noqa: E501

RAY = """\
WARNING 02-02 [config.py:1] Tensor parallel size (16) exceeds available GPUs (8). This will result in Ray placement group \
allocation failures. Consider reducing tensor_parallel_size to 8 or less
INFO 02-02 [llm_engine.py:237] Initializing a V1 LLM engine (v0.9.2) with config: model='org/big', max_seq_len=32768, \
tensor_parallel_size=8, pipeline_parallel_size=2, data_parallel_size=1
(RayWorkerWrapper pid=169, ip=10.20.0.197) INFO 02-02 [gpu_model_runner.py:1] Model loading took 40.1 GiB and 99.0 seconds
(RayWorkerWrapper pid=170, ip=10.20.0.197) INFO 02-02 [gpu_model_runner.py:1] Model loading took 40.2 GiB and 99.0 seconds
(EngineCore_0 pid=5) INFO 02-02 [kv_cache_utils.py:1] GPU KV cache size: 100,000 tokens
(RayWorkerWrapper pid=169, ip=10.20.0.197) INFO [interface.py] Setting attention block size to 544 tokens to ensure that \
attention page size is >= mamba page size.
"""  # noqa: E501


def read(text: str) -> BootLog:
    found = ENGINE.read_log(text.splitlines())
    assert found is not None
    return found


def gib(log: BootLog) -> dict[tuple[str, str, str | None], float]:
    return {(h.rank_class, h.term, h.tensor): round(h.bytes / GIB, 2) for h in log.holdings}


def test_version_033_with_replicas_and_experts() -> None:
    log = read(V033)
    assert (log.version, log.model, log.context) == ("0.33.0", "org/m", 131_072)
    assert log.layout == Layout(tp=2, dp=2, ep=4)
    assert (log.kv_cache_tokens, log.max_concurrency) == (411_600, 3.14)
    held = gib(log)
    assert held[("rank 0", "weights", "model")] == 15.27
    assert held[("rank 1", "weights", "model")] == 15.5
    assert held[("rank 3", "weights", "model")] == 15.6
    assert held[("rank 0", "kv_cache", "pool")] == 50.25
    assert held[("rank 0", "runtime", "cuda_graphs")] == 0.52
    assert held[("rank 0", "runtime", "non_torch")] == pytest.approx(0.73)
    assert held[("rank 0", "activations", "peak")] == 2.0  # 2.6 less the estimate of 0.6 for graphs
    assert all(h.source == "measured" for h in log.holdings)
    assert any("one replica's pool" in meaning for _, meaning in log.misleading)


def test_version_010_prefixes() -> None:
    log = read(V010)
    assert gib(log) == {
        ("rank 0", "weights", "model"): 7.5,
        ("rank 1", "weights", "model"): 7.51,
        ("rank 1", "kv_cache", "pool"): 61.8,
    }
    assert (log.kv_cache_tokens, log.max_concurrency, log.context) == (1_012_000, 24.71, 40_960)


def test_version_06_prints_gb_and_means_gib() -> None:
    log = read(V06)
    held = gib(log)
    assert (log.version, log.model) == ("0.6.3.post1", "org/old")
    assert held[("rank 0", "weights", "model")] == 14.99
    assert held[("rank 1", "weights", "model")] == 14.99
    assert held[("rank 0", "runtime", "non_torch")] == 0.15
    assert held[("rank 0", "activations", "peak")] == 1.26
    assert held[("rank 0", "kv_cache", "pool")] == 54.8
    assert log.kv_cache_tokens == 28057 * 16
    assert any("usual size" in note for note in log.notes)
    assert any("GiB" in meaning for line, meaning in log.misleading if "GB" in line)


def test_ray_s_warning_is_about_the_world_size() -> None:
    log = read(RAY)
    said = dict(log.misleading)
    line = next(line for line in said if line.startswith("Tensor parallel size (16)"))
    assert "TP 8 x PP 2" in said[line]
    assert any("stage" in meaning and "several kinds" in meaning for meaning in said.values())
    assert {h.rank_class for h in log.holdings} == {"rank 0", "rank 1"}
    assert any("order of appearance" in note for note in log.notes)


def test_ranks_come_from_places() -> None:
    line = "(Worker_DP1_PP1_TP3 pid=5) INFO x Model loading took 1.0 GiB memory and 1.0 seconds"
    start = "Initializing a V1 LLM engine (v0.33.0) with config: model='m', tensor_parallel_size=4"
    assert read(f"{start}, pipeline_parallel_size=2, data_parallel_size=2\n{line}").holdings[0].rank_class == "rank 15"


def test_two_lines_written_into_one_another() -> None:
    text = (
        "(Worker_TP0 pid=1) INFO a] Model loading took 1.5 GiB memory and (Worker_TP1 pid=2) INFO a] Model loading "
        "took 2.5 GiB memory and 3 seconds\n"
    )
    assert gib(read(text)) == {("rank 0", "weights", "model"): 1.5, ("rank 1", "weights", "model"): 2.5}


def test_cut_lines_are_named_and_not_guessed() -> None:
    log = read(V010 + "(VllmWorker rank=0 pid=301) INFO [gpu_worker.py:276] Available KV cache memory: 61.")
    assert ("rank 0", "kv_cache", "pool") not in gib(log)
    assert any("Available KV cache memory" in note for note in log.notes)


@pytest.mark.parametrize("text", ["", "hello", "INFO Model of the world", "max_total_num_tokens=1234, mem usage=1 GB"])
def test_other_logs_are_not_claimed(text: str) -> None:
    assert ENGINE.read_log(text.splitlines()) is None


def test_noise_does_no_harm() -> None:
    r = random.Random(1)
    lines = V033.splitlines()
    noise = ["".join(chr(r.randrange(0x250)) for _ in range(300)) for _ in range(500)]
    mixed = [x for pair in zip(noise, (lines * 60)[:500], strict=True) for x in pair]
    assert gib(read("\n".join(lines))) == gib(ENGINE.read_log(mixed))  # type: ignore[arg-type]
    start = time.monotonic()
    for hostile in ("(" * (1 << 20), "Available KV cache memory: " * 40_000, "1," * (1 << 19), "\x1b[" * (1 << 19)):
        ENGINE.read_log([hostile] * 20)
    assert time.monotonic() - start < 5


def test_every_prefix_of_a_log_is_read() -> None:
    for end in range(0, len(V033), 97):
        ENGINE.read_log(V033[:end].splitlines())


def test_the_cpu_build_states_its_pool_and_the_only_worker_has_no_number() -> None:
    log = read(
        "(EngineCore pid=5) INFO [core.py] Initializing a V1 LLM engine (v0.32.0) with config: model='m', "
        "max_seq_len=256, "
        "tensor_parallel_size=1, pipeline_parallel_size=1\n"
        "(Worker pid=7) INFO [cpu_worker.py:260] Explicitly set (1.0/11.71) GiB for KV cache on node 0.\n"
        "(EngineCore pid=5) INFO [kv_cache_utils.py] CPU KV cache size: 524,288 tokens, Maximum concurrency "
        "for 256 tokens "
        "per request: 2048.00x\n"
    )
    assert gib(log) == {("rank 0", "kv_cache", "pool"): 1.0}
    assert (log.kv_cache_tokens, log.notes) == (524_288, ())

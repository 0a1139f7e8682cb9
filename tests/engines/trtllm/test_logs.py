"""TensorRT-LLM's boot logs, of the PyTorch backend and of an engine; cut and noisy ones."""

from __future__ import annotations

import random

import pytest

from meshwright.engines.trtllm import ENGINE
from meshwright.specs.layout import parse_layout
from meshwright.specs.units import GIB

NEW = """\
[01/16/2026-06:19:00] [TRT-LLM] [I] LLM Args: tensor_parallel_size=8 pipeline_parallel_size=1 \
moe_expert_parallel_size=8 enable_attention_dp=True
[01/16/2026-06:20:00] [TRT-LLM] [RANK 0] [I] [MemUsageChange] Allocated 1.00 GiB \
for max tokens in paged KV cache (9000).
[01/16/2026-06:20:15] [TRT-LLM] [RANK 0] [I] Memory used after loading model weights (inside torch) in memory usage \
profiling: 80.50 GiB
[01/16/2026-06:20:15] [TRT-LLM] [RANK 0] [I] Memory dynamically allocated during inference (inside torch) in memory \
usage profiling: 4.25 GiB
[01/16/2026-06:20:15] [TRT-LLM] [RANK 0] [I] Memory used outside torch (e.g., NCCL and CUDA graphs) in memory usage \
profiling: 6.71 GiB
[01/16/2026-06:20:17] [TRT-LLM] [RANK 0] [I] Peak memory during memory usage profiling (torch + non-torch): 91.46 GiB, \
available KV cache memory when calculating max tokens: 41.11 GiB, fraction is set 0.85, kv size is 35136. device total \
memory 139.81 GiB
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 41.11 GiB for max tokens in paged KV cache (1256320).
[01/16/2026-06:20:18] [TRT-LLM] [RANK 0] [I] max_seq_len=131072, max_num_requests=2048, max_num_tokens=8192
"""

OLD = """\
[TensorRT-LLM][INFO] Loaded engine size: 6214 MiB
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 928.77 MiB for execution context memory.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 1.28 GiB for max tokens in paged KV cache (5248).
"""


def test_new_form() -> None:
    log = ENGINE.read_log(NEW.splitlines())
    assert log is not None
    sizes = {(h.rank_class, h.term): round(h.bytes / GIB, 2) for h in log.holdings}
    assert sizes == {
        ("rank 0", "kv_cache"): 41.11,
        ("rank 0", "weights"): 80.5,
        ("rank 0", "activations"): 4.25,
        ("rank 0", "runtime"): 6.71,
    }
    assert (log.kv_cache_tokens, log.context) == (1256320, 131072)
    assert log.layout == parse_layout("dp=8,ep=8")
    assert pytest.approx(1256320, rel=0.001) == 41.11 * GIB / 35136
    assert any("fraction of what it leaves" in meaning for _, meaning in log.misleading)


def test_engine_form() -> None:
    log = ENGINE.read_log(OLD.splitlines())
    assert log is not None
    assert {h.term: h.bytes for h in log.holdings} == {
        "weights": int(6214 / 1024 * GIB),
        "activations": int(928.77 / 1024 * GIB),
        "kv_cache": int(1.28 * GIB),
    }
    assert log.kv_cache_tokens == 5248


@pytest.mark.parametrize("text", ["", "INFO vllm: model loading took 3.1 GiB", "[2025-01-01 00:00:00 TP0] Load weight"])
def test_other_logs_are_not_its_own(text: str) -> None:
    assert ENGINE.read_log(text.splitlines()) is None


@pytest.mark.timeout(20)
def test_cut_and_noisy_logs() -> None:
    rng = random.Random(7)
    for _ in range(200):
        text = (NEW + OLD)[: rng.randrange(len(NEW + OLD))]
        at = rng.randrange(len(text) + 1)
        noise = "".join(chr(rng.randrange(1, 300)) for _ in range(40))
        log = ENGINE.read_log((text[:at] + noise + text[at:]).splitlines())
        assert log is None or all(h.bytes > 0 for h in log.holdings)
    ENGINE.read_log(["[MemUsageChange] Allocated " * 50_000] * 50)

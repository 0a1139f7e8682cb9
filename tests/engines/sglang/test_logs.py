"""Boot logs of several versions: terms, tokens, and logs that are cut or noise."""

from __future__ import annotations

import random

import pytest

from meshwright.engines.base import BootLog
from meshwright.engines.sglang import ENGINE
from meshwright.specs.layout import parse_layout
from meshwright.specs.units import GIB

#: 0.4: sizes of keys and values, no elapsed time.
OLD = """\
[2025-07-22 09:00:00] server_args=ServerArgs(model_path='Qwen/Qwen3-235B-A22B-FP8', tp_size=4, dp_size=1, ep_size=1)
[2025-07-22 09:00:01 TP0] Init torch distributed ends. mem usage=1.10 GB
[2025-07-22 09:00:02 TP0] Load weight begin. avail mem=76.90 GB
[2025-07-22 09:00:02 TP1] Load weight begin. avail mem=76.80 GB
[2025-07-22 09:00:40 TP0] Load weight end. type=Qwen3MoeForCausalLM, dtype=torch.bfloat16, avail mem=21.70 GB, \
mem usage=55.20 GB.
[2025-07-22 09:00:41 TP1] Load weight end. type=Qwen3MoeForCausalLM, dtype=torch.bfloat16, avail mem=21.60 GB, \
mem usage=55.20 GB.
[2025-07-22 09:00:42 TP0] KV Cache is allocated. #tokens: 367404, K size: 8.23 GB, V size: 8.23 GB
[2025-07-22 09:00:42 TP1] KV Cache is allocated. #tokens: 367404, K size: 8.23 GB, V size: 8.23 GB
[2025-07-22 09:00:42 TP0] Memory pool end. avail mem=5.20 GB
[2025-07-22 09:00:50 TP0] Capture cuda graph end. Time elapsed: 8.10 s. mem usage=1.04 GB. avail mem=4.10 GB.
[2025-07-22 09:00:51 TP0] max_total_num_tokens=367404, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests=2048, context_len=40960, available_gpu_mem=4.10 GB
"""

#: 0.5: data type of the cache, latent cache of one size, attention replicas in the prefix, named graphs.
NEW = """\
[2026-06-08 07:20:00] server_args=ServerArgs(model_path='deepseek-ai/DeepSeek-V3', tp_size=16, pp_size=1, \
dp_size=1, attn_dp_size=8, ep_size=16)
[2026-06-08 07:20:53 DP1 TP2 EP2] Init torch distributed ends. elapsed=0.53 s, mem usage=2.01 GB
[2026-06-08 07:20:53 DP1 TP2 EP2] Load weight end. elapsed=90.10 s, type=DeepseekV3ForCausalLM, quant=fp8, fmt=e4m3, \
avail mem=80.25 GB, mem usage=48.65 GB.
[2026-06-08 07:21:00 DP1 TP2 EP2] Load weight end. elapsed=9.10 s, type=DeepseekV3ForCausalLMNextN, \
avail mem=78.20 GB, mem usage=2.05 GB.
[2026-06-08 07:21:01 DP1 TP2 EP2] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 500000, KV size: 32.72 GB
[2026-06-08 07:21:02 DP1 TP2 EP2] Mamba Cache is allocated. max_mamba_cache_size: 82, conv_state size: 0.13GB, \
ssm_state size: 7.29GB
[2026-06-08 07:21:03 DP1 TP2 EP2] Memory pool end. avail mem=40.05 GB
[2026-06-08 07:21:09 DP1 TP2 EP2] Capture decode CUDA graph end. bs=[1, 2, 4], elapsed=5.10 s, mem usage=1.50 GB, \
avail mem=38.00 GB.
[2026-06-08 07:21:19 DP1 TP2 EP2] Capture target prefill CUDA graph end. elapsed=5.10 s, mem usage=0.50 GB, \
avail mem=37.50 GB.
"""


def _read(text: str) -> BootLog:
    found = ENGINE.read_log(text.splitlines())
    assert found is not None
    return found


def _sizes(log: BootLog, rank: str, term: str) -> dict[str | None, float]:
    return {h.tensor: round(h.bytes / GIB, 2) for h in log.holdings if h.rank_class == rank and h.term == term}


def test_old_form() -> None:
    log = _read(OLD)
    assert (log.engine, log.model, log.context) == ("sglang", "Qwen/Qwen3-235B-A22B-FP8", 40960)
    assert log.layout == parse_layout("tp=4")
    assert log.kv_cache_tokens == 367404
    assert log.max_concurrency == pytest.approx(367404 / 40960)
    assert _sizes(log, "rank 0", "weights") == {"Qwen3MoeForCausalLM": 55.2}
    assert _sizes(log, "rank 1", "kv_cache") == {"pool 0": 16.46}
    assert _sizes(log, "rank 0", "runtime") == {"communicators": 1.1, "decode graphs": 1.04}
    assert {h.source for h in log.holdings} == {"measured"}


def test_its_gb_is_gib() -> None:
    """367,404 tokens of 94 layers x 1 head x 128 x 2 bytes are 8.23 of 2^30 bytes, and 8.84 of 10^9."""
    keys = 367404 * 94 * 128 * 2
    assert round(keys / GIB, 2) == 8.23
    assert round(keys / 1e9, 2) != 8.23
    pool = next(h for h in _read(OLD).holdings if h.term == "kv_cache")
    assert pool.bytes == pytest.approx(2 * keys, rel=0.001)


def test_new_form_with_attention_replicas_draft_and_states() -> None:
    log = _read(NEW)
    assert log.layout == parse_layout("tp=2,dp=8,ep=16")
    assert log.kv_cache_tokens == 500000
    assert _sizes(log, "rank 2", "weights") == {
        "DeepseekV3ForCausalLM": 48.65,
        "draft DeepseekV3ForCausalLMNextN": 2.05,
    }
    assert _sizes(log, "rank 2", "kv_cache") == {"pool 0": 32.72, "recurrent states": 7.42}
    assert _sizes(log, "rank 2", "runtime") == {"communicators": 2.01, "decode graphs": 1.5, "target graphs": 0.5}
    assert any("attention is cut over 2" in meaning for _, meaning in log.misleading)


def test_weights_without_usage_come_from_what_was_free() -> None:
    log = _read(
        "[09:00:00 TP0] Load weight begin. avail mem=78.50 GB\n"
        "[09:00:09 TP0] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=63.40 GB\n"
    )
    assert _sizes(log, "rank 0", "weights") == {"LlamaForCausalLM": 15.1}
    assert any("cut before the cache" in note for note in log.notes)


def test_pieces_of_two_ranks_in_one_line() -> None:
    one, two = OLD.splitlines()[4:6]
    log = _read(one + two)
    assert {h.rank_class for h in log.holdings} == {"rank 0", "rank 1"}


@pytest.mark.parametrize("text", ["", "INFO vllm: model loading took 3.1 GiB", "\x00\xff" * 100, "Load weight"])
def test_other_logs_are_not_its_own(text: str) -> None:
    assert ENGINE.read_log(text.splitlines()) is None


@pytest.mark.timeout(20)
def test_cut_and_noisy_logs() -> None:
    rng = random.Random(5)
    for _ in range(200):
        text = (OLD + NEW)[: rng.randrange(len(OLD + NEW))]
        noise = "".join(chr(rng.randrange(1, 300)) for _ in range(40))
        at = rng.randrange(len(text) + 1)
        log = ENGINE.read_log((text[:at] + noise + text[at:]).splitlines())
        assert log is None or all(h.bytes > 0 for h in log.holdings)
    long = "Load weight end. " * 100_000 + "[09:00:00 TP0] " * 100_000
    ENGINE.read_log([long] * 200)
    many = (f"[09:00:00 TP{n}] Load weight begin. avail mem=1.00 GB" for n in range(20_000))
    assert ENGINE.read_log(many) is not None

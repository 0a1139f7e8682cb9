"""Lines that vLLM prints about memory while it starts, version by version, and whose they are.

Sources: 0.33.0 and 0.26.0 v1/worker/gpu_worker.py, v1/worker/gpu_model_runner.py, v1/core/kv_cache_utils.py,
utils/mem_utils.py, v1/executor/multiproc_executor.py (rank prefixes); 0.6 worker/worker.py and
executor/distributed_gpu_executor.py as in published logs. Every number is in GiB: "GB" of old versions is bytes / 2^30.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

#: Longest part of a line that is searched, and of the line that prints the configuration.
MAX_LINE, MAX_CONFIG_LINE = 4096, 1 << 16

_N = r"(\d{1,7}(?:\.\d{1,9})?)"
_COUNT = r"(\d{1,3}(?:,\d{3}){1,5}|\d{1,15})"

#: Terminal colours and other control sequences.
ESCAPES = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")

#: Who prints: ``(Worker_DP0_PP1_TP3_EP7 pid=12)``, ``(VllmWorker rank=3 pid=12)``, ``(RayWorkerWrapper pid=1, ip=..)``.
PREFIX = re.compile(
    r"\((?P<who>Worker|VllmWorker|VllmWorkerProcess|RayWorker\w{0,20}|EngineCore|APIServer|ApiServer)"
    r"(?P<places>(?:_[A-Z]{0,4}\d{1,6}){0,8})(?: (?:rank=|TP)(?P<rank>\d{1,6}))? pid=(?P<pid>\d{1,10})"
    r"(?:, ip=(?P<ip>[0-9a-fA-F.:]{3,45}))?\)"
)
PLACE = re.compile(r"_(DP|PP|PCP|TP|DCP|EP)(\d{1,6})")
ASSIGNED = re.compile(
    r"rank (\d{1,6}) in world size (\d{1,6}) is assigned as DP rank (\d{1,6}), PP rank (\d{1,6}),"
    r"(?: PCP rank \d{1,6},)? TP rank (\d{1,6})"
)
STARTED = re.compile(r"Initializing (?:a V\d|an) LLM engine \(v([0-9][\w.+]{0,30})\)")
API = re.compile(r"(?:vLLM API server |API server )version v?([0-9][\w.+]{0,30})")
MODEL = re.compile(r"model='([^']{1,400})'")
DEGREE = re.compile(
    r"\b(tensor_parallel_size|pipeline_parallel_size|data_parallel_size|decode_context_parallel_size|"
    r"prefill_context_parallel_size|max_seq_len|block_size)'?[=:] ?(\d{1,9})\b"
)
EXPERT = re.compile(r"\benable_expert_parallel'?[=:] ?True\b")


@dataclass(frozen=True, slots=True)
class Fact:
    """One number of a line: ``key`` names it, bytes for memory, a count or a factor otherwise."""

    key: str
    value: float


@dataclass(frozen=True, slots=True)
class Pattern:
    """A line: how it begins (what marks a cut line), the whole of it, and what its groups are."""

    stem: str
    whole: re.Pattern[str]
    keys: tuple[str, ...]


def _gib(stem: str, rest: str, *keys: str) -> Pattern:
    return Pattern(stem, re.compile(re.escape(stem) + rest), keys)


PATTERNS: tuple[Pattern, ...] = (
    _gib("Model loading took ", rf"{_N} Gi?B", "weights"),
    _gib("Loading model weights took ", rf"{_N} Gi?B", "weights"),
    _gib("model weights take ", rf"{_N} ?Gi?B", "weights"),
    _gib("weights memory: ", rf"{_N} ?GiB", "weights"),
    _gib("non_torch_memory takes ", rf"{_N} ?Gi?B", "non_torch"),
    _gib("non-torch forward increase memory: ", rf"{_N} ?GiB", "non_torch"),
    _gib("PyTorch activation peak memory takes ", rf"{_N} ?Gi?B", "activations"),
    _gib("torch peak memory increase: ", rf"{_N} ?GiB", "activations"),
    _gib("reserved for KV Cache is ", rf"{_N} ?Gi?B", "kv_cache"),
    _gib("Available KV cache memory: ", rf"{_N} GiB", "kv_cache"),
    _gib("Explicitly set (", rf"{_N}/{_N}\) GiB for KV cache", "kv_cache", "host"),
    _gib("Graph capturing finished in ", rf"\d{{1,6}} secs?, took {_N} GiB", "cuda_graphs"),
    _gib("CUDA graph pool memory: ", rf"{_N} GiB \(actual\), {_N} GiB \(estimated\)", "cuda_graphs", "estimated"),
    _gib(
        "Actual usage is ",
        rf"{_N} GiB for weight, {_N} GiB for peak activation, {_N} GiB for non-torch memory",
        *("weights", "activations", "non_torch"),
    ),
    _gib(
        "Actual usage is ",
        rf"{_N} GiB for consumed memory \(weights \+ non-torch\), {_N} GiB for peak activation",
        *("consumed", "activations"),
    ),
    _gib("Free memory on device (", rf"(?:cuda:\d{{1,3}}, )?{_N}/{_N} GiB\)", "free", "total"),
    _gib("total_gpu_memory (", rf"{_N} ?GiB\) x gpu_memory_utilization \({_N}\)", "total", "utilization"),
    _gib("KV cache size: ", rf"{_COUNT} tokens", "tokens"),
    _gib("Maximum concurrency for ", rf"{_COUNT} tokens per request: {_N}x", "context", "concurrency"),
    _gib("# GPU blocks: ", rf"{_COUNT}, ", "blocks"),
    _gib("# cuda blocks: ", rf"{_COUNT}, ", "blocks"),
    _gib("# CUDA blocks: ", rf"{_COUNT}, ", "blocks"),
    _gib("Setting attention block size to ", rf"{_COUNT} tokens", "hybrid_block"),
    _gib("Tensor parallel size (", rf"{_COUNT}\) exceeds available GPUs \({_COUNT}\)", "world", "devices"),
)

#: Facts that are memory.
MEMORY = frozenset(
    {"weights", "non_torch", "activations", "kv_cache", "cuda_graphs", "consumed", "estimated", "free", "total"}
)


def facts(text: str) -> Iterator[tuple[int, Fact]]:
    """Numbers of a line with their place in it; a line may be several that were written into one another."""
    for pattern in PATTERNS:
        if pattern.stem in text:
            for match in pattern.whole.finditer(text):
                for key, number in zip(pattern.keys, match.groups(), strict=True):
                    value = float(number.replace(",", ""))
                    yield match.start(), Fact(key, value * (1 << 30) if key in MEMORY else value)


def cut(text: str) -> str | None:
    """The beginning of a memory line whose number is missing, or None."""
    for pattern in PATTERNS:
        at = text.find(pattern.stem)
        if at >= 0 and not any(p.whole.match(text, at) for p in PATTERNS if p.stem == pattern.stem):
            return pattern.stem.strip(" :(")
    return None


def prefixes(text: str) -> list[tuple[int, re.Match[str]]]:
    """Rank prefixes of a line with their place."""
    return [(m.start(), m) for m in PREFIX.finditer(text)]


def clean(line: str, limit: int = MAX_LINE) -> str:
    """A line without colours and control characters, cut to what is searched."""
    return ESCAPES.sub("", line[: 4 * limit])[:limit]

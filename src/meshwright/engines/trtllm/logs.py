"""TensorRT-LLM's boot log (PyTorch backend and the older engine): weights, peak, cache, tokens.

Forms: ``_torch/pyexecutor/_util.py`` ("Peak memory during memory usage profiling (torch + non-torch): X GiB, ...
fraction is set F, kv size is N"), "Memory used after loading model weights (inside torch)", "Memory dynamically
allocated during inference", and of the C++ runtime ``[MemUsageChange] Allocated X GiB for max tokens in paged KV
cache (N)``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from meshwright.engines.base import BootLog
from meshwright.ledger.schema import Holding
from meshwright.specs.layout import MAX_DEGREE, Layout
from meshwright.specs.units import GIB

#: Lines, ranks, and characters of a line that are read.
MAX_LINES = 2_000_000
MAX_RANKS = 4096
MAX_LINE = 4000

_SIZE = r"(-?\d{1,7}(?:\.\d+)?) ?(MiB|GiB)"
_RANK = re.compile(r"\[RANK (\d{1,5})\]")
_FORMS = {
    ("weights", "model"): re.compile(
        r"Memory used after loading model weights \(inside torch\) in memory usage profiling: " + _SIZE
    ),
    ("activations", "peak"): re.compile(
        r"Memory dynamically allocated during inference \(inside torch\) in memory usage profiling: " + _SIZE
    ),
    ("runtime", "outside torch"): re.compile(
        r"Memory used outside torch \(e\.g\., NCCL and CUDA graphs\) in memory usage profiling: " + _SIZE
    ),
    ("kv_cache", "pool"): re.compile(r"\[MemUsageChange\] Allocated " + _SIZE + r" for max tokens"),
}
_ENGINE = re.compile(r"Loaded engine size: " + _SIZE)
_CONTEXT_MEMORY = re.compile(r"\[MemUsageChange\] Allocated " + _SIZE + r" for execution context memory")
_TOKENS = re.compile(r"for max tokens(?: in paged KV cache)? \((\d{1,12})\)")
_LENGTH = re.compile(r"max_seq_len=(\d{1,10})")
_PEAK = re.compile(r"Peak memory during memory usage profiling \(torch \+ non-torch\): " + _SIZE)
_SIZES = re.compile(
    r"['\"]?\b(tensor_parallel_size|pipeline_parallel_size|moe_expert_parallel_size)['\"]?\s*[=:]\s*(\d{1,7})"
)
_SPREAD = re.compile(r"enable_attention_dp['\"]?\s*[=:]\s*True")
_VERSION = re.compile(r"TensorRT[- ]LLM version: (\d+\.\d+\.\d+\S{0,10})")


@dataclass(slots=True)
class _Log:
    """What the whole log says."""

    terms: dict[int, dict[tuple[str, str], float]] = field(default_factory=dict)
    tokens: int | None = None
    context: int | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    spread: bool = False
    version: str = ""
    own: bool = False


def read_log(lines: Iterable[str]) -> BootLog | None:
    """Read a boot log; None when no line of it is TensorRT-LLM's."""
    log, cut = _Log(), False
    for number, line in enumerate(lines):
        if number >= MAX_LINES:
            cut = True
            break
        _read_line(log, line[:MAX_LINE])
    return _finished(log, cut) if log.own and (log.terms or log.tokens) else None


def _read_line(log: _Log, line: str) -> None:
    if "TRT-LLM" in line or "TensorRT-LLM" in line or "[MemUsageChange]" in line:
        log.own = True
    match = _RANK.search(line)
    rank = int(match[1]) if match else 0
    for key, pattern in _FORMS.items():
        if found := pattern.search(line):
            _keep(log, rank, key, _gib(found))
    if found := _ENGINE.search(line):
        _keep(log, rank, ("weights", "engine"), _gib(found))
    if found := _CONTEXT_MEMORY.search(line):
        _keep(log, rank, ("activations", "execution context"), _gib(found))
    if found := _PEAK.search(line):
        _keep(log, rank, ("", "peak of the trial step"), _gib(found))
    if found := _TOKENS.search(line):
        log.tokens = int(found[1])
    if found := _LENGTH.search(line):
        log.context = int(found[1])
    if found := _VERSION.search(line):
        log.version = found[1]
    for name, value in _SIZES.findall(line):
        log.sizes[name] = int(value)
    log.spread |= _SPREAD.search(line) is not None


def _gib(match: re.Match[str]) -> float:
    return float(match[1]) / (1024 if match[2] == "MiB" else 1)


def _keep(log: _Log, rank: int, key: tuple[str, str], size: float) -> None:
    """The last value counts: a trial cache is allocated and freed before the real one."""
    if rank in log.terms or len(log.terms) < MAX_RANKS:
        log.terms.setdefault(rank, {})[key] = size


def _finished(log: _Log, cut: bool) -> BootLog:
    holdings = [
        Holding(f"rank {rank}", term, tensor, int(size * GIB), "measured")
        for rank, terms in sorted(log.terms.items())
        for (term, tensor), size in terms.items()
        if term and size > 0
    ]
    notes = [f"the log has over {MAX_LINES:,} lines; the rest is not read"] if cut else []
    if not any(h.term == "weights" for h in holdings):
        notes.append("no line on model weights: they are printed at log level info only")
    if log.tokens is None:
        notes.append(
            "no '[MemUsageChange] Allocated ... for max tokens' line: the log is cut before the cache was made"
        )
    return BootLog(
        engine="trtllm",
        version=log.version,
        holdings=tuple(holdings),
        kv_cache_tokens=log.tokens,
        max_concurrency=log.tokens / log.context if log.tokens and log.context else None,
        context=log.context,
        layout=_layout(log),
        misleading=(
            (
                "Peak memory during memory usage profiling",
                "includes weights and a trial cache; the pool is the fraction of what it leaves, not of the device",
            ),
        )
        if any(("", "peak of the trial step") in terms for terms in log.terms.values())
        else (),
        notes=tuple(notes),
    )


def _layout(log: _Log) -> Layout | None:
    sizes = {key: value for key, value in log.sizes.items() if 1 <= value <= MAX_DEGREE}
    ranks = sizes.get("tensor_parallel_size")
    if ranks is None:
        return None
    pp, ep = sizes.get("pipeline_parallel_size", 1), sizes.get("moe_expert_parallel_size", 1)
    return Layout(tp=1 if log.spread else ranks, dp=ranks if log.spread else 1, pp=pp, ep=ep)

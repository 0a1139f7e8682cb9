"""The words of ``vllm serve`` that say a layout, limits and settings, and how they become shell text.

Everything that comes from the user is quoted for a POSIX shell; only variables of our own stay variables:
``$HEAD_IP`` (address of the first node), ``$NODE_IP`` and ``$NODE_RANK`` (address and number of the node where the
command is typed), ``$IFNAME`` (its network interface), ``$PREFILL_IP`` and ``$DECODE_IP`` (first node of a pool),
``$DP_RANK`` and ``$DEVICES`` (number and devices of a replica).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from meshwright.specs.layout import Layout
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve

#: Port of vLLM's data parallel coordinator (engine/arg_utils.py: 29550) and of the API server.
DP_PORT, API_PORT = 29550, 8000

#: Our cache dtypes -> what ``--kv-cache-dtype`` takes.
_KV_DTYPES = {"f8_e4m3": "fp8_e4m3", "f8_e5m2": "fp8_e5m2", "bf16": "bfloat16", "f16": "float16"}
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}

#: Words that the shell is to expand.
_NAMES = "HEAD_IP|NODE_IP|NODE_RANK|IFNAME|PREFILL_IP|DECODE_IP|DP_RANK|DEVICES"
OURS = re.compile(rf"\$({_NAMES})|\$\(\(\$NODE_RANK \* \d+\)\)")

Env = tuple[tuple[str, str], ...]


def serve_words(name: str) -> list[str]:
    """``vllm serve NAME``; a name that looks like a flag or a variable of ours becomes a path."""
    if OURS.fullmatch(name) or name.startswith("-"):
        name = f"./{name}"
    return ["vllm", "serve", name]


def degree_words(layout: Layout) -> list[str]:
    """Degrees inside one replica."""
    words = ["--tensor-parallel-size", str(layout.tp)]
    for flag, degree in (
        ("--pipeline-parallel-size", layout.pp),
        ("--prefill-context-parallel-size", layout.cp),
        ("--decode-context-parallel-size", layout.dcp),
    ):
        if degree > 1:
            words += [flag, str(degree)]
    return words + (["--enable-expert-parallel"] if layout.ep > 1 else [])


def replica_words(layout: Layout) -> list[str]:
    """``--data-parallel-size``."""
    return ["--data-parallel-size", str(layout.dp)] if layout.dp > 1 else []


def limit_words(workload: Serve, settings: ServeSettings) -> list[str]:
    """Lengths, batch limits, dtypes; what is None is left out."""
    words = ["--max-model-len", str(workload.context)]
    for flag, value in (
        ("--max-num-seqs", settings.max_num_seqs),
        ("--max-num-batched-tokens", settings.max_num_batched_tokens),
        ("--gpu-memory-utilization", settings.utilization),
        ("--block-size", settings.block_size),
        ("--quantization", settings.quantization),
        ("--dtype", _DTYPES.get(settings.dtype, settings.dtype) if settings.dtype else None),
    ):
        if value is not None:
            words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    if settings.kv_dtype != "auto":
        words += ["--kv-cache-dtype", _KV_DTYPES.get(settings.kv_dtype, settings.kv_dtype)]
    if settings.enforce_eager:
        words.append("--enforce-eager")
    if settings.speculative:
        draft = f'{{"method": "mtp", "num_speculative_tokens": {settings.speculative_tokens}}}'
        words += ["--speculative-config", draft]
    if settings.text_only:
        words += ["--limit-mm-per-prompt", '{"image": 0, "video": 0}']
    return words


def partition(layout: Layout) -> Env:
    """``VLLM_PP_LAYER_PARTITION`` of a hand-made split."""
    if not layout.stage_layers or layout.pp == 1:
        return ()
    return (("VLLM_PP_LAYER_PARTITION", ",".join(map(str, layout.stage_layers))),)


def join(words: Sequence[str]) -> str:
    """Words quoted for a shell; the few variables of our own stay variables."""
    return " ".join(quote(word) for word in words)


def quote(word: str) -> str:
    """One word; a variable of our own in double quotes, so that it stays one word when it is expanded."""
    return f'"{word}"' if OURS.fullmatch(word) else shlex.quote(word)


def assignments(env: Env) -> list[str]:
    """``NAME=value`` of an environment, values quoted."""
    return [f"{name}={quote(value)}" for name, value in env]

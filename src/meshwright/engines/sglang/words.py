"""Words of the command that starts exactly one SGLang server."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from meshwright.engines.sglang.sizes import is_wide_ep, replica_ranks
from meshwright.errors import InputError
from meshwright.specs.layout import Layout
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve

#: Port of the rendezvous between nodes, of a server, and of a router.
RENDEZVOUS_PORT, PORT, ROUTER_PORT = 20000, 30000, 8000

_KV_DTYPES = {"f8_e4m3": "fp8_e4m3", "fp8": "fp8_e4m3", "f8_e5m2": "fp8_e5m2", "bf16": "bfloat16", "nvfp4": "nvfp4"}
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}

#: Words that the shell is to expand: our own variables, alone or with a port or a scheme.
OURS = ("$HEAD_IP", "$NODE_RANK", "$NODE_IP", "$PREFILL_IP", "$DECODE_IP")


def is_attention_dp(layout: Layout, moe: bool) -> bool:
    """Whether ``dp`` is attention data parallelism inside --tp-size; else independent replicas."""
    return layout.dp > 1 and moe and not replica_ranks(layout)


def tp_size(layout: Layout, moe: bool) -> int:
    """``--tp-size``: ranks of a pipeline stage of one server replica."""
    inside = layout.tp * layout.cp
    return inside * layout.dp if is_attention_dp(layout, moe) else inside


def degrees(layout: Layout, moe: bool) -> list[str]:
    """Flags of the parallel sizes.

    Raises:
        InputError: a layout that no flags of SGLang stand for.
    """
    ranks = tp_size(layout, moe)
    words = ["--tp-size", str(ranks)]
    attention = is_attention_dp(layout, moe)
    for flag, degree in (
        ("--pp-size", layout.pp),
        ("--attn-dp-size" if attention else "--dp-size", layout.dp),
        ("--dcp-size", layout.dcp),
    ):
        if degree > 1:
            words += [flag, str(degree)]
    if layout.cp > 1:
        words += ["--attn-cp-size", str(layout.cp), "--enable-prefill-cp", "--cp-strategy", "interleave"]
    if layout.ep > 1:
        words += ["--ep-size", str(layout.ep)]
        if attention and layout.ep == ranks:
            words += ["--moe-a2a-backend", "deepep", "--enable-dp-lm-head"]
        if attention and is_wide_ep(layout):
            words += ["--moe-dense-tp-size", "1"]
    if moe and layout.etp is not None:
        held = layout.ep * layout.etp
        if ranks % held:
            raise InputError(f"ep {layout.ep} x etp {layout.etp} does not divide --tp-size {ranks}; leave etp unset")
        if ranks // held > 1:
            words += ["--moe-dp-size", str(ranks // held)]
    return words


def limits(layout: Layout, moe: bool, workload: Serve, settings: ServeSettings) -> list[str]:
    """Flags of lengths, batch, memory and dtypes: everything written out, so that a later default cannot move it."""
    requests = settings.max_num_seqs
    if requests is not None and is_attention_dp(layout, moe):
        requests *= layout.dp
    words: list[str] = ["--context-length", str(workload.context)]
    for flag, value in (
        ("--max-running-requests", requests),
        ("--chunked-prefill-size", settings.max_num_batched_tokens),
        ("--mem-fraction-static", settings.utilization),
        ("--page-size", settings.block_size if (settings.block_size or 1) > 1 else None),
        ("--quantization", settings.quantization),
        ("--dtype", _DTYPES.get(settings.dtype, settings.dtype) if settings.dtype else None),
    ):
        if value is not None:
            words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    if settings.kv_dtype != "auto":
        words += ["--kv-cache-dtype", _KV_DTYPES.get(settings.kv_dtype, settings.kv_dtype)]
    if settings.enforce_eager:
        words += ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
    if settings.speculative:
        steps = settings.speculative_tokens
        words += ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(steps)]
        words += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(steps + 1)]
    if settings.text_only:
        words.append("--language-model-only")
    return words


def server(model: str, layout: Layout, moe: bool, workload: Serve, settings: ServeSettings) -> list[str]:
    """``sglang serve`` with model, sizes and limits; nodes and pools add theirs."""
    if model.startswith(("-", "$")):
        model = f"./{model}"
    return ["sglang", "serve", "--model-path", model, *degrees(layout, moe), *limits(layout, moe, workload, settings)]


def join(words: Sequence[str]) -> str:
    """Words quoted for a shell; the few variables of our own stay variables."""
    return " ".join(f'"{w}"' if _ours(w) else shlex.quote(w) for w in words)


def _ours(word: str) -> bool:
    bare = word.removeprefix("http://")
    head, colon, port = bare.partition(":")
    return head in OURS and (not colon or port.isdecimal())

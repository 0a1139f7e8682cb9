"""Flags of ``vllm serve`` that this project writes, by version, so that no version is handed a flag it lacks.

Source: engine/arg_utils.py:1157-1380, config/parallel.py and entrypoints/common/cli_args.py of the wheels 0.33.0 and
0.26.0; the parallel flags of 0.32 (the CPU build on PyPI) are those of 0.33.
"""

from __future__ import annotations

import shlex

_ALL = frozenset({"0.26", "0.32", "0.33"})

#: Long name -> versions that know it.
FLAGS: dict[str, frozenset[str]] = {
    "--tensor-parallel-size": _ALL,
    "--pipeline-parallel-size": _ALL,
    "--data-parallel-size": _ALL,
    "--data-parallel-size-local": _ALL,
    "--data-parallel-start-rank": _ALL,
    "--data-parallel-address": _ALL,
    "--data-parallel-rpc-port": _ALL,
    "--data-parallel-backend": _ALL,
    "--headless": _ALL,
    "--enable-expert-parallel": _ALL,
    "--all2all-backend": _ALL,
    "--decode-context-parallel-size": _ALL,
    "--prefill-context-parallel-size": _ALL,
    "--distributed-executor-backend": _ALL,
    "--nnodes": _ALL,
    "--node-rank": _ALL,
    "--master-addr": _ALL,
    "--master-port": _ALL,
    "--gpu-memory-utilization": _ALL,
    "--kv-cache-dtype": _ALL,
    "--block-size": _ALL,
    "--max-model-len": _ALL,
    "--max-num-seqs": _ALL,
    "--max-num-batched-tokens": _ALL,
    "--enforce-eager": _ALL,
    "--quantization": _ALL,
    "--dtype": _ALL,
    "--speculative-config": _ALL,
    "--limit-mm-per-prompt": _ALL,
    "--dcp-q-replicate": frozenset({"0.32", "0.33"}),
    "--enable-hc-sp": frozenset({"0.32", "0.33"}),
    "--max-num-partial-prefills": frozenset({"0.26"}),
    "--calculate-kv-scales": frozenset({"0.26"}),
}


def unknown_flags(command: str, version: str) -> tuple[str, ...]:
    """Flags of a ``vllm serve`` command that the version does not have (or that this table does not list)."""
    short = ".".join(version.split(".")[:2])
    words = [word.partition("=")[0] for word in shlex.split(command) if word.startswith("--")]
    return tuple(word for word in words if short not in FLAGS.get(word, frozenset()))

"""Options of TensorRT-LLM as its configuration file and its flags give them: sizes, limits, cache.

The file (``--config``, also ``--extra_llm_api_options``) overrides the flags (``commands/serve.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from meshwright.engines.flagwords import Words, shown, unexpanded
from meshwright.engines.plainyaml import load
from meshwright.errors import InputError
from meshwright.specs.checks import broken
from meshwright.specs.dtypes import canonical
from meshwright.specs.layout import MAX_DEGREE, Layout
from meshwright.specs.profile import ServeSettings
from meshwright.specs.rules import Rule

Options = dict[str, object]

FOLDER = Path(__file__).parent
MAX_KEYS = 500

#: Flags of ``trtllm-serve`` and ``trtllm-bench`` -> keys of the file.
_KEYS = {
    "--tp": "tensor_parallel_size",
    "--pp": "pipeline_parallel_size",
    "--ep": "moe_expert_parallel_size",
    "--cluster_size": "moe_cluster_parallel_size",
    "--beam_width": "max_beam_width",
}
_FRACTIONS = ("--free_gpu_memory_fraction", "--kv_cache_free_gpu_mem_fraction")
_KV_DTYPES = {"auto": "auto", "fp8": "f8_e4m3", "nvfp4": "nvfp4", "float16": "f16", "bfloat16": "bf16", "int8": "auto"}


@cache
def known_keys(version: str) -> frozenset[str]:
    """Keys of the configuration file."""
    return frozenset(json.loads((FOLDER / f"keys_{version}.json").read_text(encoding="utf-8"))["keys"])


def read_yaml(name: str, data: bytes) -> Options:
    """A configuration file as a mapping.

    Raises:
        InputError: no mapping, or YAML that is not read.
    """
    try:
        value = load(data.decode("utf-8"), name)
    except UnicodeDecodeError:
        raise InputError(f"{name[:60]}: not text in UTF-8") from None
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_KEYS:
        raise InputError(f"{name[:60]}: a mapping of option: value is needed (tensor_parallel_size: 8)")
    return value


def from_words(words: Words) -> Options:
    """Options that the flags give, under the names of the file.

    Raises:
        InputError: a number that is none.
    """
    out: Options = {}
    cache_config: Options = {}
    for given in words.given:
        name = given.flag.name
        if name in _FRACTIONS:
            cache_config["free_gpu_memory_fraction"] = words.number(name)
        elif given.flag.type == "int" and not given.sub:
            out[_KEYS.get(name, name.removeprefix("--"))] = words.whole(name)
        elif name in {"--backend", "--model", "--revision"}:
            out[name.removeprefix("--")] = given.value
    if cache_config:
        out["kv_cache_config"] = cache_config
    return out


def merged(first: Options, over: Options) -> Options:
    """``first`` with the options of the file over it; mappings are joined key by key."""
    out = dict(first)
    for key, value in over.items():
        held = out.get(key)
        out[key] = {**held, **value} if isinstance(held, dict) and isinstance(value, dict) else value
    return out


def whole(options: Mapping[str, object], key: str) -> int | None:
    """A positive number of the options, None where it is not given.

    Raises:
        InputError: no whole number of at least 1.
    """
    value = options.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        hint = "; a shell variable is not expanded here" if unexpanded(str(value)[:200]) else ""
        raise InputError(f"{key}: {shown(str(value))} is not a whole number{hint}")
    if not 1 <= value <= 1 << 40:
        raise InputError(f"{key}: {value} is not between 1 and {1 << 40}")
    return value


def _degree(options: Mapping[str, object], key: str) -> int:
    value = whole(options, key) or 1
    if value > MAX_DEGREE:
        raise InputError(f"{key}: {value} is above {MAX_DEGREE}")
    return value


def layout_of(options: Mapping[str, object]) -> Layout:
    """Layout of one server.

    Raises:
        InputError: a size that is no number, or a partition that is none.
    """
    ranks, cp = _degree(options, "tensor_parallel_size"), _degree(options, "context_parallel_size")
    moe_tp = whole(options, "moe_tensor_parallel_size")
    ep = whole(options, "moe_expert_parallel_size")
    etp = None
    if ep is None:
        ep = max(1, ranks // moe_tp) if moe_tp else 1
    if moe_tp is not None and moe_tp * ep != ranks * cp:
        etp = moe_tp
    spread = options.get("enable_attention_dp") is True
    stages = options.get("pp_partition")
    if stages is not None and not (
        isinstance(stages, list) and len(stages) <= 4096 and all(isinstance(n, int) and 0 < n < 1 << 20 for n in stages)
    ):
        raise InputError("pp_partition is not a list of layers of each stage ([20, 20, 20, 20])")
    pp = _degree(options, "pipeline_parallel_size")
    return Layout(
        tp=1 if spread else ranks,
        dp=ranks if spread else 1,
        pp=pp,
        cp=cp,
        ep=min(ep, MAX_DEGREE),
        etp=etp,
        stage_layers=tuple(stages) if isinstance(stages, list) and len(stages) == pp > 1 else (),
    )


def settings_of(options: Mapping[str, object]) -> tuple[ServeSettings, list[str]]:
    """Settings of one server, and what of them is not counted.

    Raises:
        InputError: a limit that is no number, or out of range.
    """
    notes: list[str] = []
    kv = options.get("kv_cache_config")
    kv = kv if isinstance(kv, dict) else {}
    fraction = kv.get("free_gpu_memory_fraction")
    if fraction is not None and not (isinstance(fraction, (int, float)) and 0 < fraction <= 1):
        raise InputError(f"free_gpu_memory_fraction: {shown(str(fraction))} is not above 0 and at most 1")
    if "max_tokens" in kv:
        notes.append("kv_cache_config.max_tokens caps the cache; the pool is counted from the fraction")
    for key, what in (("enable_lora", "adds adapters"), ("peft_cache_config", "adds a cache of adapters")):
        if options.get(key):
            notes.append(f"{key} {what}, which is not counted")
    draft, tokens = _speculative(options, notes)
    kv_dtype = str(kv.get("dtype", "auto"))
    return (
        ServeSettings(
            utilization=float(fraction) if fraction is not None else None,
            max_num_batched_tokens=whole(options, "max_num_tokens"),
            max_num_seqs=whole(options, "max_batch_size"),
            kv_dtype=_KV_DTYPES.get(kv_dtype, "auto"),
            block_size=whole(kv, "tokens_per_block"),
            enforce_eager="cuda_graph_config" in options and options["cuda_graph_config"] is None,
            dtype=_dtype(options.get("dtype")),
            speculative=draft,
            speculative_tokens=tokens,
            as_typed=True,
        ),
        notes,
    )


def _dtype(value: object) -> str | None:
    try:
        return None if value in {None, "auto"} else canonical(str(value)[:20])
    except InputError:
        return None


def _speculative(options: Mapping[str, object], notes: list[str]) -> tuple[bool, int]:
    config = options.get("speculative_config")
    if not isinstance(config, dict):
        return False, 1
    kind = str(config.get("decoding_type", ""))
    if kind.upper() == "MTP":
        count = config.get("num_nextn_predict_layers", config.get("max_draft_len", 1))
        return True, count if isinstance(count, int) and 0 < count < 100 else 1
    notes.append(f"speculative decoding by {shown(kind or 'a draft model')}: its weights and cache are not counted")
    return False, 1


def key_findings(options: Iterable[str], version: str, name: str) -> list[Rule]:
    """Keys that the configuration file of this version does not have: it is refused with them."""
    known = known_keys(version)
    return [
        broken(
            "key_unknown",
            "unwise",
            f"{name[:40]}: {shown(key)} is none of the options of TensorRT-LLM {version} that its documents name",
            f"write {key.replace('-', '_')}" if key.replace("-", "_") in known else "leave it out",
            "TensorRT-LLM llmapi/llm_args.py",
        )
        for key in list(options)[:MAX_KEYS]
        if key not in known
    ][:20]

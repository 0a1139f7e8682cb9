"""Engine settings of an SGLang command: limits, dtypes, cache, speculative decoding."""

from __future__ import annotations

from meshwright.engines.flagwords import Words, shown
from meshwright.errors import InputError
from meshwright.specs.profile import ServeSettings

#: ``--kv-cache-dtype`` -> our cache dtype, and back (fields/memory.py).
KV_DTYPES = {
    "auto": "auto",
    "fp8_e4m3": "f8_e4m3",
    "fp8_e5m2": "f8_e5m2",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "nvfp4": "nvfp4",
}
#: ``--dtype`` -> our dtype.
DTYPES = {"half": "f16", "float16": "f16", "bfloat16": "bf16", "float": "f32", "float32": "f32"}

#: Speculative algorithms that use the model's own draft layers.
OWN_DRAFT = frozenset({"NEXTN", "EAGLE"})


def read_settings(words: Words, attention_replicas: int) -> tuple[ServeSettings, list[str]]:
    """Settings, and what of them is not counted.

    ``--max-running-requests`` counts the whole server and is divided over attention replicas
    (mem_cache/kv_cache_configurator.py:3128); ``--chunked-prefill-size`` stays as typed.

    Raises:
        InputError: a limit that is no number, or out of range.
    """
    notes: list[str] = []
    share = words.number("--mem-fraction-static")
    if share is not None and not 0 < share < 1:
        raise InputError(f"--mem-fraction-static {share:g} is not between 0 and 1")
    kv = words.text("--kv-cache-dtype") or "auto"
    if kv not in KV_DTYPES:
        notes.append(f"--kv-cache-dtype {shown(kv)} is not counted; the cache is counted in the model's dtype")
    requests = words.whole("--max-running-requests", 1)
    chunk = words.whole("--chunked-prefill-size")
    draft, tokens = _speculative(words, notes)
    if words.find("--max-total-tokens") is not None:
        notes.append("--max-total-tokens caps the cache; the pool is counted from the static share")
    for flag, what in (
        ("--cpu-offload-gb", "moves weights to host memory; all weights are counted on the device"),
        ("--enable-lora", "adds adapters, which are not counted"),
        ("--lora-paths", "adds adapters, which are not counted"),
        ("--ep-num-redundant-experts", "adds copies of experts, which are not counted"),
    ):
        given = words.find(flag)
        if given is not None and given.value not in {"false", "0"}:
            notes.append(f"{flag} {what}")
    return (
        ServeSettings(
            utilization=share,
            max_num_batched_tokens=chunk if chunk is not None and chunk > 0 else None,
            max_num_seqs=None if requests is None else max(1, requests // attention_replicas),
            kv_dtype=KV_DTYPES.get(kv, "auto"),
            block_size=words.whole("--page-size", 1),
            enforce_eager=_eager(words),
            quantization=words.text("--quantization"),
            dtype=DTYPES.get(words.text("--dtype") or "auto"),
            speculative=draft,
            speculative_tokens=tokens,
            text_only=bool(words.on("--language-model-only") or words.on("--language-only")),
            as_typed=True,
        ),
        notes,
    )


def _eager(words: Words) -> bool:
    """Whether no decode graph is captured."""
    off = words.on("--disable-cuda-graph") or words.on("--disable-decode-cuda-graph")
    return bool(off) or words.text("--cuda-graph-backend-decode") == "disabled"


def _speculative(words: Words, notes: list[str]) -> tuple[bool, int]:
    """Whether the model's own draft layers are loaded, and draft tokens a step."""
    algorithm = (words.text("--speculative-algorithm") or "").upper()
    if not algorithm:
        return False, 1
    if algorithm in OWN_DRAFT and words.find("--speculative-draft-model-path") is None:
        return True, words.whole("--speculative-num-steps", 1) or 1
    notes.append(f"speculative decoding by {shown(algorithm)}: the draft's weights and cache are not counted")
    return False, 1

"""Engine settings of a vLLM command: batch limits, dtypes, cache, speculative decoding, connectors."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.engines.flagwords import Words, shown
from meshwright.errors import InputError
from meshwright.specs.profile import ServeSettings

#: ``--kv-cache-dtype`` -> our cache dtype (config/cache.py CacheDType; ``fp8`` is e4m3 on CUDA).
KV_DTYPES = {
    "auto": "auto",
    "fp8": "f8_e4m3",
    "fp8_e4m3": "f8_e4m3",
    "fp8_inc": "f8_e4m3",
    "fp8_ds_mla": "f8_e4m3",
    "fp8_e5m2": "f8_e5m2",
    "bfloat16": "bf16",
    "float16": "f16",
}

#: ``--dtype`` -> our dtype; ``auto`` leaves the configuration's (config/model.py ModelDType).
DTYPES = {"half": "f16", "float16": "f16", "bfloat16": "bf16", "float": "f32", "float32": "f32"}

#: Connectors that hand a request's cache from one instance to another (kv_connector/factory.py).
DISAGGREGATING = frozenset(
    {"NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector"}
    | {"P2pNcclConnector", "MultiConnector"}
)


def read_settings(words: Words) -> tuple[ServeSettings, list[str]]:
    """Settings, and what of them is not counted.

    Raises:
        InputError: a limit that is no number, or JSON that is none.
    """
    notes: list[str] = []
    kv = words.text("--kv-cache-dtype") or "auto"
    if kv not in KV_DTYPES:
        notes.append(f"--kv-cache-dtype {shown(kv)} is not counted; the cache is counted in the model's dtype")
    draft, tokens = _speculative(words, notes)
    utilization = words.number("--gpu-memory-utilization")
    if utilization is not None and not 0 < utilization <= 1:
        raise InputError(f"--gpu-memory-utilization {utilization:g} is not above 0 and at most 1")
    for flag, what in (
        ("--kv-cache-memory-bytes", "sets the KV pool by itself; the pool is counted from the utilization"),
        ("--num-gpu-blocks-override", "sets the KV pool by itself; the pool is counted from the utilization"),
        ("--cpu-offload-gb", "moves weights to host memory; all weights are counted on the device"),
        ("--enable-lora", "adds adapters, which are not counted"),
    ):
        given = words.find(flag)
        if given is not None and given.value not in {"false", "0"}:
            notes.append(f"{flag} {what}")
    return (
        ServeSettings(
            utilization=utilization,
            max_num_batched_tokens=words.whole("--max-num-batched-tokens", 1),
            max_num_seqs=words.whole("--max-num-seqs", 1),
            kv_dtype=KV_DTYPES.get(kv, "auto"),
            block_size=words.whole("--block-size", 1),
            enforce_eager=bool(words.on("--enforce-eager")) or _no_graphs(words),
            quantization=words.text("--quantization"),
            dtype=DTYPES.get(words.text("--dtype") or "auto"),
            speculative=draft,
            speculative_tokens=tokens,
            text_only=_text_only(words),
        ),
        notes,
    )


def transfer_config(words: Words) -> Mapping[str, object]:
    """``--kv-transfer-config`` as an object; empty when it is not given or no object.

    Raises:
        InputError: not JSON.
    """
    return as_object(words, "--kv-transfer-config")


def as_object(words: Words, flag: str) -> Mapping[str, object]:
    """A JSON flag as an object, empty when it is not given or ``null``.

    Raises:
        InputError: not JSON, or no object.
    """
    value = words.json(flag) if any(g.flag.name == flag for g in words.given) else None
    if value is not None and not isinstance(value, dict):
        raise InputError(f"{flag} {shown(words.text(flag) or '')} is no JSON object")
    return value or {}


def _speculative(words: Words, notes: list[str]) -> tuple[bool, int]:
    """Whether the model's own draft layers are loaded, and draft tokens a step."""
    config = dict(as_object(words, "--speculative-config"))
    for flag, key in (
        ("--spec-method", "method"),
        ("--spec-model", "model"),
        ("--spec-tokens", "num_speculative_tokens"),
    ):
        if (given := words.text(flag)) is not None:
            config[key] = given
    if not config:
        return False, 1
    method = str(config.get("method", ""))
    count = config.get("num_speculative_tokens", 1)
    tokens = int(str(count)) if str(count).isdecimal() and len(str(count)) < 5 else 1
    if method == "mtp" or method.endswith("_mtp"):
        return True, max(1, tokens)
    notes.append(f"speculative decoding by {shown(method or 'a draft model')}: its weights and cache are not counted")
    return False, 1


def _no_graphs(words: Words) -> bool:
    mode = str(as_object(words, "--compilation-config").get("cudagraph_mode", "")).upper()
    return mode == "NONE" or words.text("--optimization-level") == "0"


def _text_only(words: Words) -> bool:
    """Whether the encoder is left out: ``--language-model-only``, or no image and no video allowed."""
    if words.on("--language-model-only"):
        return True
    text = words.text("--limit-mm-per-prompt") or ""
    if not text.lstrip().startswith("{"):
        pieces = {g.sub: g.value for g in words.given if g.flag.name == "--limit-mm-per-prompt" and g.sub}
        return pieces.get("image") == "0" and pieces.get("video") == "0"
    limits = as_object(words, "--limit-mm-per-prompt")
    return limits.get("image") == 0 and limits.get("video") == 0

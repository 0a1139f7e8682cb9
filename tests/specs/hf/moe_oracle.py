"""Helpers of the mixture-of-experts oracle tests: small sizes, and what is known to differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.specs.hf.read import model_from_config
from meshwright.specs.model import ModelSpec
from meshwright.specs.tensors import expand
from tests.specs.hf.oracle import Shapes, assert_same, save_small

#: Sizes that differ from one another where the model allows it, so that a swapped one shows.
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "vocab_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}


def matches(
    model_type: str,
    *,
    auto: str = "AutoModelForCausalLM",
    router_dtype: bool = False,
    text_prefix: str | None = None,
    extra: Mapping[str, Any] | None = None,
    **config: Any,
) -> ModelSpec:
    """Names, shapes and dtypes of the decoder against ``save_pretrained``; returns the spec.

    Args:
        model_type: of the class.
        auto: the auto class that picks the model class.
        router_dtype: whether routers too must have the dtype that transformers writes.
        text_prefix: compare the text part of a wrapper only; its tensors begin with this.
        extra: keys laid over the saved configuration.
        config: small sizes.
    """
    raw, saved = save_small(model_type, auto=auto, **config)
    raw |= extra or {}
    if text_prefix is not None:
        raw = raw["text_config"] | {"architectures": []} | (extra or {})
        saved = {
            name.removeprefix(text_prefix): row
            for name, row in saved.items()
            if name.startswith(text_prefix) and not any(w in name for w in ("vision", "vit_", "projector", "merge"))
        }
    spec = model_from_config(raw, model_type, "test")
    ours = decoder_of(spec)
    if not router_dtype:
        saved = {name: _as_published(name, row, ours) for name, row in saved.items()}
    assert_same(ours, saved)
    assert spec.assumptions == ()
    return spec


def decoder_of(spec: ModelSpec) -> Shapes:
    """The tensors that the class knows: all but the prediction layers."""
    return expand(tuple(spec.select("decoder")))


def _as_published(name: str, row: tuple[tuple[int, ...], str], ours: Shapes) -> tuple[tuple[int, ...], str]:
    """Routers and their bias: transformers casts or keeps them by class, checkpoints hold either."""
    router = name.endswith((".gate.weight", "correction_bias")) and name in ours
    return (row[0], ours[name][1]) if router else row

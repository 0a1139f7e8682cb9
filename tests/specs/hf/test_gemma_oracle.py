"""Gemma 3, 3n and 4 readers against what transformers saves; shared caches and windows by hand."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.specs.hf.read import model_from_config
from meshwright.specs.model import Attention, Mlp, ModelSpec, Moe
from tests.specs.hf.oracle import assert_matches_transformers

BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "sliding_window": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
TURNS = ["sliding_attention", "full_attention"]
GEMMA3N: dict[str, Any] = BASE | {
    "num_hidden_layers": 6,
    "layer_types": TURNS * 3,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 11,
    "vocab_size_per_layer_input": 90,
    "laurel_rank": 3,
}
GEMMA4: dict[str, Any] = BASE | {"layer_types": TURNS * 2, "num_hidden_layers": 4, "global_head_dim": 14}
GEMMA4_MOE: dict[str, Any] = GEMMA4 | {
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "num_experts": 3,
    "top_k_experts": 2,
    "moe_intermediate_size": 14,
    "hidden_size_per_layer_input": 0,
}
GEMMA4_SMALL: dict[str, Any] = GEMMA4 | {
    "layer_types": TURNS * 3,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 11,
    "vocab_size_per_layer_input": 90,
    "use_double_wide_mlp": True,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", BASE | {"num_hidden_layers": 2}),
    "gemma3 bias": (
        "gemma3_text",
        BASE | {"num_hidden_layers": 1, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "gemma3n": ("gemma3n_text", GEMMA3N),
    "gemma3n widths": (
        "gemma3n_text",
        GEMMA3N | {"intermediate_size": [80, 80, 72, 72, 80, 80], "altup_num_inputs": 2},
    ),
    "gemma4 experts": ("gemma4_text", GEMMA4_MOE),
    "gemma4 small": ("gemma4_text", GEMMA4_SMALL),
    "gemma4 unified": ("gemma4_unified_text", GEMMA4 | {"hidden_size_per_layer_input": 0}),
}


@pytest.mark.parametrize("name", CASES)
def test_names_and_shapes_are_what_transformers_saves(name: str) -> None:
    model_type, config = CASES[name]
    spec = assert_matches_transformers(model_type, **config)
    assert len(spec.layers) == config["num_hidden_layers"]


def _read(model_type: str, config: dict[str, Any]) -> ModelSpec:
    return model_from_config(config | {"model_type": model_type, "dtype": "bfloat16"}, "small", "test")


def _attentions(spec: ModelSpec) -> list[Attention]:
    return [a for layer in spec.layers if (a := layer.attention)]


def test_gemma3_slides_five_layers_of_six() -> None:
    spec = _read("gemma3_text", BASE | {"num_hidden_layers": 12})
    assert [a.window for a in _attentions(spec)] == [64] * 5 + [None] + [64] * 5 + [None]
    older = _read("gemma3_text", BASE | {"num_hidden_layers": 4, "sliding_window_pattern": 2})
    assert [a.window for a in _attentions(older)] == [64, None, 64, None]


@pytest.mark.parametrize(("model_type", "config"), [("gemma3n_text", GEMMA3N), ("gemma4_text", GEMMA4_SMALL)])
def test_last_layers_read_the_cache_of_the_last_layer_of_their_kind(model_type: str, config: dict[str, Any]) -> None:
    spec = _read(model_type, config)
    assert [a.shares_kv_with for a in _attentions(spec)] == [None, None, None, None, 2, 3]
    assert [a.cached_values_per_token > 0 for a in _attentions(spec)] == [True] * 4 + [False] * 2


def test_gemma4_has_wide_full_layers_and_experts_beside_the_mlp() -> None:
    spec = _read("gemma4_text", GEMMA4_MOE)
    sliding, full = _attentions(spec)[:2]
    assert (sliding.kv_heads, sliding.head_dim, sliding.window) == (2, 10, 64)
    assert (full.kv_heads, full.head_dim, full.v_head_dim, full.window) == (1, 14, 14, None)
    assert spec.layers[0].ffns == (Mlp(80), Moe(3, 2, 14))
    # The full layers store no value projection, yet keys and values are cached apart.
    assert full.cached_values_per_token == 2 * 14


def test_gemma4_26b_has_its_published_size() -> None:
    """google/gemma-4-26B-A4B: 25.2 billion in the text part, 3.8 of them for a token."""
    spec = _read(
        "gemma4_text",
        {
            "vocab_size": 262144,
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "head_dim": 256,
            "global_head_dim": 512,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
            "hidden_size_per_layer_input": 0,
        },
    )
    total = spec.parameters()
    idle = 30 * (128 - 8) * 3 * 2816 * 704
    assert total / 1e9 == pytest.approx(25.2, abs=0.1)
    assert (total - idle) / 1e9 == pytest.approx(3.8, abs=0.1)

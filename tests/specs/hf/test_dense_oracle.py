"""Dense architectures: names, shapes and dtypes against what transformers saves."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.specs.atlas import models
from meshwright.specs.hf.read import model_from_config, read_model
from meshwright.specs.tensors import expand
from tests.specs.hf.oracle import assert_matches_transformers, assert_same, full_size, save_small

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "vocab_size": 64,
    "n_positions": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MHA = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
OPT = {**MHA, "ffn_dim": 48, "max_position_embeddings": 40}
NEO = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 40,
    "attention_types": [[["global", "local"], 1]],
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"new_decoder_architecture": True, "num_kv_heads": 2}
UNTIED = {"tie_word_embeddings": False}
TIED = {"tie_word_embeddings": True}

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "llama", SMALL),
    ("llama biases, tied", "llama", {**SMALL, "attention_bias": True, "mlp_bias": True, **TIED}),
    ("llama wide heads", "llama", {**SMALL, "head_dim": 16}),
    ("mistral", "mistral", SMALL),
    ("ministral", "ministral", {**SMALL, "head_dim": 8}),
    ("ministral3", "ministral3", SMALL),
    ("qwen2", "qwen2", SMALL),
    ("qwen2 tied", "qwen2", {**SMALL, **TIED}),
    ("qwen3", "qwen3", SMALL),
    ("qwen3 biases", "qwen3", {**SMALL, "attention_bias": True, **TIED}),
    ("gemma", "gemma", SMALL),
    ("gemma2", "gemma2", SMALL),
    ("vaultgemma", "vaultgemma", SMALL),
    ("phi", "phi", SMALL),
    ("phi norms", "phi", {**SMALL, "qk_layernorm": True}),
    ("phi3", "phi3", SMALL),
    ("starcoder2", "starcoder2", SMALL),
    ("starcoder2 no bias", "starcoder2", {**SMALL, "use_bias": False, **UNTIED}),
    ("stablelm", "stablelm", SMALL),
    ("stablelm 12b", "stablelm", {**SMALL, "qk_layernorm": True, "use_qkv_bias": True, "use_parallel_residual": True}),
    ("olmo", "olmo", SMALL),
    ("olmo2", "olmo2", SMALL),
    ("olmo3", "olmo3", SMALL),
    ("cohere", "cohere", SMALL),
    ("cohere norms", "cohere", {**SMALL, "use_qk_norm": True, "attention_bias": True}),
    ("cohere2", "cohere2", SMALL),
    ("granite", "granite", {**SMALL, "mlp_bias": True}),
    ("granite_swa", "granite_swa", SMALL),
    ("glm", "glm", SMALL),
    ("glm4", "glm4", SMALL),
    ("exaone4", "exaone4", SMALL),
    ("smollm3", "smollm3", SMALL),
    ("nemotron", "nemotron", SMALL),
    ("seed_oss", "seed_oss", SMALL),
    ("helium", "helium", SMALL),
    ("helium square", "helium", {**SMALL, "head_dim": 8}),
    ("arcee", "arcee", SMALL),
    ("apertus", "apertus", SMALL),
    ("persimmon", "persimmon", MHA),
    ("jais2", "jais2", SMALL),
    ("ernie4_5", "ernie4_5", SMALL),
    ("hunyuan dense", "hunyuan_v1_dense", {**SMALL, "head_dim": 8}),
    ("hyperclovax", "hyperclovax", SMALL),
    ("bitnet", "bitnet", SMALL),
    ("diffllama", "diffllama", SMALL),
    ("nanochat", "nanochat", SMALL),
    ("falcon 7b", "falcon", MHA),
    ("falcon 40b", "falcon", {**MHA, **GROUPED}),
    ("falcon 11b", "falcon", {**MHA, **GROUPED, "num_ln_in_parallel_attn": 1}),
    ("falcon rw", "falcon", {**MHA, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    ("gpt2", "gpt2", GPT),
    ("gpt2 untied", "gpt2", {**GPT, "n_inner": 80, **UNTIED}),
    ("gpt_neo", "gpt_neo", NEO),
    ("gpt_neox", "gpt_neox", MHA),
    ("gpt_neox no bias", "gpt_neox", {**MHA, "attention_bias": False, **TIED}),
    ("gptj", "gptj", {**GPT, "rotary_dim": 4}),
    ("codegen", "codegen", {**GPT, "rotary_dim": 4}),
    ("opt", "opt", OPT),
    ("opt 350m", "opt", {**OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    ("opt untied", "opt", {**OPT, **UNTIED}),
    ("bloom", "bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}),
    ("mpt", "mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 64, "expansion_ratio": 4}),
    ("gpt_bigcode", "gpt_bigcode", GPT),
    ("gpt_bigcode mha", "gpt_bigcode", {**GPT, "multi_query": False, **UNTIED}),
    ("biogpt", "biogpt", SMALL),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "config"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_table_is_what_save_pretrained_writes(model_type: str, config: dict[str, Any]) -> None:
    spec = assert_matches_transformers(model_type, **config)
    assert not spec.assumptions
    assert len(spec.layers) in (2, 3)
    assert all(layer.mixers and layer.ffns for layer in spec.layers)


def test_enough_architectures() -> None:
    assert len({model_type for _, model_type, _ in CASES}) >= 24


def test_the_comparison_sees_a_missing_bias_and_a_wrong_width() -> None:
    raw, saved = save_small("qwen2", **SMALL)
    table = expand(model_from_config(raw, "qwen2", "test").families)
    assert_same(table, saved)
    with pytest.raises(AssertionError, match=r"q_proj\.bias"):
        assert_same({n: v for n, v in table.items() if not n.endswith("q_proj.bias")}, saved)
    wrong = model_from_config({**raw, "num_key_value_heads": 1}, "qwen2", "test")
    with pytest.raises(AssertionError, match="k_proj"):
        assert_same(expand(wrong.families), saved)


@pytest.mark.parametrize(
    "model_type", ["gemma2", "olmo3", "cohere2", "exaone4", "vaultgemma", "ministral", "granite_swa"]
)
def test_sliding_layers_follow_from_the_defaults_where_layer_types_are_absent(model_type: str) -> None:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**{**SMALL, "num_hidden_layers": 9, "head_dim": 8, "sliding_window": 20})
    raw = {**config.to_dict(), "dtype": "bfloat16", "architectures": None}
    types = raw.pop("layer_types")
    expected = [20 if kind == "sliding_attention" else None for kind in types]
    assert any(expected)
    for given in (raw, {**raw, "layer_types": types}):
        spec = model_from_config(given, model_type, "test")
        assert [layer.mixers[0].window for layer in spec.layers] == expected  # type: ignore[union-attr]


def test_qwen_slides_only_when_told_to() -> None:
    from transformers import CONFIG_MAPPING

    sizes = {**SMALL, "num_hidden_layers": 5, "max_window_layers": 3, "sliding_window": 20}
    for use in (False, True):
        config = CONFIG_MAPPING["qwen2"](**sizes, use_sliding_window=use)
        raw = {**config.to_dict(), "dtype": "bfloat16"}
        types = raw.pop("layer_types")
        spec = model_from_config(raw, "qwen2", "test")
        expected = [20 if kind == "sliding_attention" else None for kind in types]
        assert [layer.mixers[0].window for layer in spec.layers] == expected  # type: ignore[union-attr]


#: Atlas entries of each class; the configuration leaves out what the class defaults, as published files do.
FULL_SIZE = [
    "llama-3.1-405b", "llama-3.2-1b", "llama-2-70b", "codellama-34b", "yi-34b", "smollm2-135m", "smollm3-3b",
    "qwen2.5-7b", "qwen2.5-0.5b", "qwen3-8b", "qwen3-4b", "gemma-7b", "gemma-2-27b", "mistral-7b-v0.1",
    "mistral-nemo-12b", "mistral-large-123b", "phi-2", "phi-3-medium-4k", "phi-4", "phi-4-mini", "gpt2-xl",
    "gpt3-175b", "megatron-1t", "opt-350m", "opt-66b", "bloom-176b", "falcon-7b", "falcon-180b", "falcon-rw-1b",
    "gpt-j-6b", "gpt-neo-2.7b", "mpt-30b", "starcoder", "starcoder2-15b", "stablelm-2-1.6b", "stablelm-2-12b",
    "olmo-7b", "olmo-2-32b", "command-r", "command-r-plus", "command-a", "granite-3.1-8b", "exaone-4.0-32b",
    "seed-oss-36b", "nemotron-4-340b", "minitron-8b", "glm-4-9b-0414", "glm-4-32b-0414",
]  # fmt: skip


@pytest.mark.parametrize("name", FULL_SIZE)
def test_atlas_at_full_size(name: str) -> None:
    config, _, _ = models.entry(name)
    ours = {tensor: shape for tensor, (shape, _) in expand(read_model(name).families).items()}
    assert ours == full_size(config)

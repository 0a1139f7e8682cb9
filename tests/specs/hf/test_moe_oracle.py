"""Mixture-of-experts readers write the names and shapes that transformers writes."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.specs.hf.read import model_from_config
from meshwright.specs.tensors import expand
from tests.specs.hf.moe_oracle import EXPERTS, SIZES, decoder_of, matches
from tests.specs.hf.oracle import assert_same, save_small

FOUR = {"num_experts": 4}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 8}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", LOCAL),
    ("mixtral", {**LOCAL, "head_dim": 12, "tie_word_embeddings": True, "sliding_window": 16}),
    ("qwen2_moe", {**EXPERTS, **FOUR, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}),
    ("qwen2_moe", {**EXPERTS, **FOUR, "shared_expert_intermediate_size": 40, "qkv_bias": False}),
    ("qwen3_moe", {**EXPERTS, **FOUR, "head_dim": 16, "decoder_sparse_step": 2}),
    ("qwen3_moe", {**EXPERTS, **FOUR, "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    ("olmoe", {**FOUR, "num_experts_per_tok": 2, "attention_bias": True}),
    ("flex_olmo", {**FOUR, "num_experts_per_tok": 2}),
    ("phimoe", {**LOCAL, "attention_bias": True, "lm_head_bias": True}),
    ("phimoe", LOCAL),
    ("granitemoe", {**LOCAL, "attention_bias": True}),
    ("granitemoeshared", {**LOCAL, "shared_intermediate_size": 20}),
    ("jetmoe", {**LOCAL, "kv_channels": 8}),
    ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2}),
    (
        "ernie4_5_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
            "use_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    ("hunyuan_v1_moe", {**FOUR, "moe_topk": 2, "head_dim": 8, "attention_bias": True}),
    ("dots1", {**EXPERTS, **ROUTED, "attention_bias": True}),
    ("glm4_moe", {**EXPERTS, **ROUTED, "head_dim": 12, "use_qk_norm": True, "attention_bias": True}),
    ("glm4_moe", {**EXPERTS, **ROUTED, "head_dim": 12, "use_qk_norm": False}),
    ("solar_open", {**EXPERTS, **ROUTED, "head_dim": 12}),
    ("exaone_moe", {**EXPERTS, **FOUR, "num_shared_experts": 2, "head_dim": 12, **WINDOWS}),
    ("hy_v3", {**EXPERTS, **FOUR, "num_shared_experts": 2, "head_dim": 12}),
    ("afmoe", {**EXPERTS, **FOUR, "num_shared_experts": 2, "num_dense_layers": 1, "head_dim": 12, **WINDOWS}),
    ("cohere2_moe", {**LOCAL, **FOUR, "head_dim": 12, "num_shared_experts": 2, **WINDOWS}),
    (
        "cohere2_moe",
        {**LOCAL, **FOUR, "head_dim": 12, "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 56},
    ),
    ("mellum", {**EXPERTS, **FOUR, "head_dim": 12, **WINDOWS}),
    ("gpt_oss", {**LOCAL, "head_dim": 12, **WINDOWS}),
    (
        "llama4_text",
        {**LOCAL, "intermediate_size_mlp": 56, "interleave_moe_layer_step": 2, "head_dim": 12, "num_hidden_layers": 4},
    ),
    ("llama4_text", {**LOCAL, "intermediate_size_mlp": 56, "head_dim": 12, "attention_bias": True}),
    ("sarvam_moe", {**EXPERTS, **ROUTED, "head_dim": 12}),
    ("sarvam_moe", {**EXPERTS, **ROUTED, "head_dim": 12, "use_qk_norm": False, "attention_bias": True}),
    ("laguna", {**EXPERTS, **FOUR, "head_dim": 12, "shared_expert_intermediate_size": 20, **WINDOWS}),
    (
        "laguna",
        {
            **EXPERTS,
            **FOUR,
            "head_dim": 12,
            "shared_expert_intermediate_size": 20,
            "num_attention_heads_per_layer": [4, 6, 4],
            "gating": "per-element",
        },
    ),
    ("granitemoe_swa", {**LOCAL, **WINDOWS}),
    ("minimax_m2", {**LOCAL, "head_dim": 12, "rotary_dim": 4}),
    ("mimo_v2_flash", {**EXPERTS, "n_routed_experts": 4, "head_dim": 12, "v_head_dim": 10}),
]


@pytest.mark.parametrize(("model_type", "config"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)])
def test_equals_transformers(model_type: str, config: dict[str, Any]) -> None:
    matches(model_type, **{**SIZES, **config})


def test_dbrx_equals_transformers() -> None:
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 96}
    # The class reads rope_theta of the attention part, which its own configuration does not declare.
    attn = {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0}
    ffn = {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}
    matches("dbrx", **sizes, attn_config=attn, ffn_config=ffn)


def test_minimax_m3_text_equals_transformers() -> None:
    sparse = {"sparse_attention_freq": [0, 0, 1], "sparse_num_index_heads": 2, "sparse_index_dim": 12}
    text = {
        **SIZES,
        **LOCAL,
        "head_dim": 8,
        "dense_intermediate_size": 56,
        "shared_intermediate_size": 20,
        "moe_layer_freq": [0, 1, 1],
        "sparse_attention_config": sparse,
    }
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    spec = matches(
        "minimax_m3_vl",
        auto="AutoModelForImageTextToText",
        text_prefix="language_model.",
        text_config=text,
        vision_config={**vision, "image_size": 56},
        projector_hidden_size=32,
    )
    assert [layer.attention.indexer is not None for layer in spec.layers if layer.attention] == [False, False, True]


def test_step_text_equals_transformers() -> None:
    text = {
        **SIZES,
        **EXPERTS,
        "n_routed_experts": 4,
        "head_dim": 12,
        "share_expert_dim": 20,
        "moe_layers_enum": "1,2",
        "num_sliding_attention_heads": 6,
        **WINDOWS,
    }
    spec = matches(
        "step3p7",
        auto="AutoModelForImageTextToText",
        text_prefix="",
        text_config=text,
        vision_config={"width": 16, "layers": 1, "heads": 2, "image_size": 56},
    )
    assert [layer.attention.heads for layer in spec.layers if layer.attention] == [6, 4, 6]


def test_a_planted_mistake_is_found() -> None:
    raw, saved = save_small("mixtral", **SIZES, **LOCAL)
    right = decoder_of(model_from_config(raw, "mixtral", "test"))
    assert_same(right, saved)
    wrong = decoder_of(model_from_config({**raw, "num_local_experts": 3, "intermediate_size": 47}, "mixtral", "test"))
    with pytest.raises(AssertionError, match=r"experts\.3\.w1"):
        assert_same(wrong, saved)
    with pytest.raises(AssertionError, match="w2"):
        assert_same({**right, "model.layers.0.block_sparse_moe.experts.0.w2.weight": ((1,), "bf16")}, saved)


def attentions(config: dict[str, Any]) -> list[tuple[int | None, int | None]]:
    spec = model_from_config({**SIZES, "dtype": "bfloat16", **config}, "test", "test")
    return [(a.window, a.chunk) for layer in spec.layers if (a := layer.attention)]


def test_windows_and_chunks_of_each_layer() -> None:
    oss = {"model_type": "gpt_oss", **LOCAL, "sliding_window": 128}
    assert attentions(oss) == [(128, None), (None, None), (128, None)]
    llama4 = {"model_type": "llama4_text", **LOCAL, "num_hidden_layers": 5, "attention_chunk_size": 16}
    assert attentions(llama4) == [(None, 16)] * 3 + [(None, None), (None, 16)]
    trinity = {"model_type": "afmoe", **EXPERTS, **FOUR, "num_hidden_layers": 4, "sliding_window": 9}
    assert attentions(trinity) == [(9, None)] * 3 + [(None, None)]
    assert attentions({"model_type": "mixtral", **LOCAL, "sliding_window": None}) == [(None, None)] * 3


def test_sinks_gates_and_values_of_mimo() -> None:
    mimo = {
        "model_type": "mimo_v2_flash",
        **SIZES,
        **EXPERTS,
        "dtype": "bfloat16",
        "n_routed_experts": 4,
        "head_dim": 12,
        "v_head_dim": 10,
        "hybrid_layer_pattern": [0, 1, 1],
        "swa_num_key_value_heads": 4,
        "sliding_window_size": 7,
        "moe_layer_freq": [0, 1, 1],
    }
    spec = model_from_config(mimo, "mimo", "test")
    whole, local = (layer.attention for layer in spec.layers[:2])
    assert whole is not None
    assert local is not None
    assert (whole.kv_heads, whole.window, whole.sinks) == (2, None, False)
    assert (local.kv_heads, local.window, local.sinks, local.v_head_dim) == (4, 7, True, 10)
    assert local.cached_values_per_token == 4 * (12 + 10)


def test_prediction_layers_of_glm_follow_the_last_layer() -> None:
    raw, _ = save_small("glm4_moe", **SIZES, **EXPERTS, **ROUTED, head_dim=12)
    spec = model_from_config(raw | {"num_nextn_predict_layers": 1}, "glm", "test")
    extra = expand(tuple(spec.select("mtp")))
    assert {name.split(".")[2] for name in extra} == {"3"}
    assert extra["model.layers.3.eh_proj.weight"][0] == (32, 64)
    assert extra["model.layers.3.shared_head.head.weight"][0] == (96, 32)
    assert "model.layers.3.mlp.experts.3.up_proj.weight" in extra
    assert len(spec.mtp_layers) == 1
    assert spec.mtp_layers[0].moe is not None


@pytest.mark.parametrize(
    "bad",
    [
        {"num_local_experts": 4, "num_experts_per_tok": 5},
        {"num_local_experts": 10**9, "num_experts_per_tok": 2},
        {"num_local_experts": -1, "num_experts_per_tok": 2},
        {"num_local_experts": "many", "num_experts_per_tok": 2},
        {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention"], "sliding_window": 4},
        {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention"] * 3},
    ],
)
def test_bad_mixtures_are_refused_in_one_line(bad: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        model_from_config({**SIZES, "model_type": "mixtral", "dtype": "bfloat16", **bad}, "bad", "bad.json")
    assert "bad.json" in str(caught.value)
    assert "\n" not in str(caught.value)

"""Hybrid, state-space and linear-attention readers against what transformers saves; states by hand."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.specs.hf.read import model_from_config
from meshwright.specs.model import ModelSpec, Recurrent
from meshwright.specs.tensors import expand
from tests.specs.hf.oracle import assert_matches_transformers, assert_same, save_small

BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
PLAIN: dict[str, Any] = {"vocab_size": 100, "hidden_size": 48, "state_size": 6, "num_hidden_layers": 2}
MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 6}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 9,
}
MOE: dict[str, Any] = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 14,
    "shared_expert_intermediate_size": 22,
}
NEMOTRON: dict[str, Any] = BASE | {
    "head_dim": 10,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "ssm_state_size": 6,
    "mamba_num_heads": 8,
    "mamba_head_dim": 5,
    "n_groups": 2,
    "n_routed_experts": 3,
    "moe_intermediate_size": 14,
    "moe_shared_expert_intermediate_size": 22,
}
ZAMBA: dict[str, Any] = BASE | {
    "num_hidden_layers": 6,
    "layers_block_type": ["mamba", "hybrid"] * 3,
    "mamba_d_state": 6,
    "n_mamba_heads": 8,
    "mamba_ngroups": 2,
    "num_mem_blocks": 2,
    "adapter_rank": 5,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron_h": ("nemotron_h", NEMOTRON),
    "nemotron_h latent": ("nemotron_h", NEMOTRON | {"moe_latent_size": 12}),
    "nemotron_h biases": ("nemotron_h", NEMOTRON | {"moe_latent_size": 12, "mlp_bias": True, "use_bias": True}),
    "bamba": ("bamba", BASE | MAMBA2 | {"num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "jamba": (
        "jamba",
        BASE
        | {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 3,
            "mamba_d_state": 6,
        },
    ),
    "zamba2": ("zamba2", ZAMBA),
    "zamba2 attention adapters": ("zamba2", ZAMBA | {"use_shared_attention_adapter": True, "num_mem_blocks": 1}),
    "falcon_h1": ("falcon_h1", BASE | MAMBA2 | {"num_hidden_layers": 2, "mamba_d_ssm": 40, "mamba_d_head": 5}),
    "falcon_h1 norm and biases": (
        "falcon_h1",
        BASE
        | MAMBA2
        | {
            "num_hidden_layers": 1,
            "mamba_d_ssm": 40,
            "mamba_d_head": 5,
            "mamba_rms_norm": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
        },
    ),
    "mamba": ("mamba", PLAIN),
    "mamba2": ("mamba2", PLAIN | {"num_heads": 8, "head_dim": 12, "n_groups": 2}),
    "falcon_mamba": ("falcon_mamba", PLAIN | {"use_bias": True}),
    "recurrent_gemma": ("recurrent_gemma", BASE | {"num_hidden_layers": 3, "lru_width": 56}),
    "lfm2": ("lfm2", BASE | {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]}),
    "lfm2 bias": (
        "lfm2",
        BASE
        | {
            "num_hidden_layers": 2,
            "layer_types": ["conv", "full_attention"],
            "conv_bias": True,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.3,
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        BASE
        | {
            "num_hidden_layers": 3,
            "moe_intermediate_size": 14,
            "num_dense_layers": 1,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "layer_types": ["conv", "conv", "full_attention"],
        },
    ),
    "lfm3": (
        "lfm3",
        BASE
        | {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "sliding_attention", "full_attention"],
            "head_dim": 10,
            "conv_bias": True,
        },
    ),
    "lfm3 plain": (
        "lfm3",
        BASE
        | {
            "num_hidden_layers": 1,
            "layer_types": ["full_attention"],
            "head_dim": 10,
            "use_attention_gate": False,
            "use_sandwich_norm": False,
        },
    ),
    "qwen3_next": ("qwen3_next", BASE | LINEAR | MOE | {"num_hidden_layers": 4, "head_dim": 10}),
    "qwen3_5": ("qwen3_5_text", BASE | LINEAR | {"num_hidden_layers": 4, "head_dim": 10}),
    "qwen3_5_moe": ("qwen3_5_moe_text", BASE | LINEAR | MOE | {"num_hidden_layers": 4, "head_dim": 10}),
    "minimax": ("minimax", BASE | {"num_hidden_layers": 2, "head_dim": 10, "num_local_experts": 3}),
    "granitemoehybrid": (
        "granitemoehybrid",
        BASE
        | MAMBA2
        | {
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 3,
            "shared_intermediate_size": 22,
        },
    ),
    "granitemoehybrid dense": (
        "granitemoehybrid",
        BASE | MAMBA2 | {"num_hidden_layers": 1, "num_local_experts": 0, "shared_intermediate_size": 22},
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        # Equal widths of keys and values: the class splits its fused convolution into equal thirds when it saves.
        BASE | LINEAR | {"num_hidden_layers": 4, "linear_key_head_dim": 21, "linear_value_head_dim": 7},
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        BASE
        | {
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 6,
            "v_head_dim": 10,
            "head_dim": 12,
            "moe_intermediate_size": 14,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "rwkv": (
        "rwkv",
        {
            "vocab_size": 100,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "attention_hidden_size": 56,
            "intermediate_size": 80,
            "context_length": 64,
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_names_and_shapes_are_what_transformers_saves(name: str) -> None:
    model_type, config = CASES[name]
    spec = assert_matches_transformers(model_type, **config)
    assert len(spec.layers) == config.get("num_hidden_layers", len(config.get("layers_block_type", [])))


KIMI: dict[str, Any] = BASE | {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 14,
    "n_shared_experts": 2,
    "linear_head_dim": 7,
    "linear_num_heads": 5,
}


def test_kimi_linear_is_what_transformers_saves_but_for_the_dense_layer() -> None:
    """Saving renames ``.mlp.`` of dense layers too; the published checkpoint keeps it (its quantization names it)."""
    raw, saved = save_small("kimi_linear", **KIMI)
    spec = model_from_config(raw, "kimi", "test")
    saved = {k.replace(".0.block_sparse_moe.", ".0.mlp."): v for k, v in saved.items()}
    assert_same(expand(spec.families), saved)


def _recurrent(spec: ModelSpec) -> Recurrent:
    return next(r for layer in spec.layers if (r := layer.recurrent) is not None)


def _read(config: dict[str, Any], **more: Any) -> ModelSpec:
    return model_from_config(config | more, "small", "test")


NANO: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hidden_size": 2688,
    "vocab_size": 131072,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "mamba_ssm_cache_dtype": "float32",
    "torch_dtype": "bfloat16",
}


def test_nemotron_3_nano_has_31_6_billion_parameters_and_its_published_state() -> None:
    spec = _read(NANO)
    assert spec.parameters("decoder") / 1e9 == pytest.approx(31.6, abs=0.05)
    kinds = [("m" if layer.recurrent else "a" if layer.attention else "e") for layer in spec.layers]
    assert (kinds.count("m"), kinds.count("a"), kinds.count("e")) == (23, 6, 23)
    r = _recurrent(spec)
    # x, B and C: 64 x 64 + 2 x 8 x 128 channels of 3 columns; 64 heads of 64 x 128.
    assert (r.conv_channels, r.conv_values, r.state_values) == (6144, 3 * 6144, 64 * 64 * 128)
    assert r.state_dtype == "f32"


def test_nemotron_pattern_and_list_say_the_same() -> None:
    words = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
    pattern = NANO["hybrid_override_pattern"]
    listed = {k: v for k, v in NANO.items() if k != "hybrid_override_pattern"}
    assert _read(listed, layers_block_type=[words[c] for c in pattern]).families == _read(NANO).families


def test_nemotron_multi_token_prediction_by_hand() -> None:
    spec = _read(NANO, num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E", moe_latent_size=1024)
    h, e = 2688, 128
    attention = 2 * h * 32 * 128 + 2 * h * 2 * 128
    experts = e * 2 * 1024 * 1856 + 2 * h * 1024 + 2 * h * 3712 + e * h + e
    norms = 2 * h + 2 * h + h
    assert spec.parameters("mtp") == attention + experts + norms + 2 * h * h
    assert len(spec.mtp_layers) == 2
    assert "mtp.layers.0.eh_proj.weight" in expand(tuple(spec.select("mtp")))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hybrid_override_pattern": "ME?"}, "'?'"),
        ({"num_hidden_layers": 53}, "53"),
        ({"hybrid_override_pattern": None}, "hybrid_override_pattern is missing"),
        ({"hybrid_override_pattern": "M" * 100_000}, "100000"),
        ({"mamba_num_heads": -4}, "mamba_num_heads"),
    ],
)
def test_nemotron_refuses_bad_patterns_in_one_line(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        _read(NANO, **change)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


QWEN35: dict[str, Any] = BASE | LINEAR | {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "head_dim": 10}


def test_gated_delta_net_state_and_layers() -> None:
    spec = _read(QWEN35, mamba_ssm_dtype="float32")
    assert [bool(layer.attention) for layer in spec.layers] == [False, False, False, True]
    assert _recurrent(spec) == Recurrent("gated_delta_net", 6, 9, 7, 2, 4, 2 * 2 * 7 + 6 * 9, "f32")
    assert _recurrent(_read(QWEN35, torch_dtype="bfloat16")).state_dtype == "bf16"


def test_qwen_multi_token_prediction_by_hand() -> None:
    spec = _read(QWEN35 | MOE, model_type="qwen3_5_moe_text", mtp_num_hidden_layers=1)
    h = 48
    attention = h * 2 * 40 + 2 * h * 20 + 40 * h + 2 * 10
    experts = 3 * 3 * h * 14 + 3 * h * 22 + 3 * h + h
    assert spec.parameters("mtp") == attention + experts + 2 * h * h + 3 * h + 2 * h
    names = expand(tuple(spec.select("mtp")))
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.experts.2.up_proj.weight"} <= names.keys()


def test_states_of_the_other_mixers() -> None:
    states = {
        "mamba": Recurrent("mamba1", 96, 1, 6, 1, 4, 96, "bf16"),
        "mamba2": Recurrent("mamba2", 8, 12, 6, 2, 4, 96 + 24, "bf16"),
        "recurrent_gemma": Recurrent("rg_lru", 4, 14, 1, 1, 4, 56, "f32"),
        "lfm2": Recurrent("short_conv", 48, 0, 0, 1, 3, 48, "bf16"),
        "minimax": Recurrent("lightning", 4, 10, 10, 4, 0, 0, "bf16"),
        "rwkv": Recurrent("rwkv", 56, 1, 3, 1, 2, 96, "f32"),
    }
    for name, expected in states.items():
        model_type, config = CASES[name]
        assert _recurrent(_read(config, model_type=model_type, dtype="bfloat16")) == expected, name
    kimi = _read(KIMI, model_type="kimi_linear", dtype="bfloat16")
    assert _recurrent(kimi) == Recurrent("kda", 5, 7, 7, 5, 4, 3 * 35, "f32")


K3: dict[str, Any] = KIMI | {
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "layer_types": None,
    "linear_attn_config": {
        "full_attn_layers": [3],
        "kda_layers": [1, 2],
        "head_dim": 7,
        "num_heads": 5,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    },
    "mla_use_output_gate": True,
    "latent_moe_use_norm": True,
    "routed_expert_hidden_size": 24,
    "attn_res_block_size": 2,
}


def test_kimi_k3_by_hand() -> None:
    """Full-rank gates, gated latent attention, latent experts and attention residuals."""
    spec = _read(K3)
    names = expand(spec.families)
    layer = "model.layers.1."
    assert names[layer + "self_attn.g_proj.weight"][0] == (35, 48)
    assert layer + "self_attn.g_a_proj.weight" not in names
    assert names["model.layers.2.self_attn.g_proj.weight"][0] == (40, 48)
    assert names[layer + "block_sparse_moe.experts.2.w1.weight"][0] == (14, 24)
    assert names[layer + "block_sparse_moe.routed_expert_down_proj.weight"][0] == (24, 48)
    assert names[layer + "block_sparse_moe.shared_experts.up_proj.weight"][0] == (28, 48)
    assert names["model.output_attn_res_proj.weight"][0] == (1, 48)
    assert any("Kimi K3" in sentence for sentence in spec.assumptions)
    with pytest.raises(InputError, match="are not layers 1 to 3"):
        _read(K3, linear_attn_config={"full_attn_layers": [3], "kda_layers": [1]})

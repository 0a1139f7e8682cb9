"""Hybrid, multimodal and Gemma models count what their cards say; without torch."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshwright.specs.hf.read import model_from_config
from meshwright.specs.model import ModelSpec
from meshwright.specs.tensors import expand
from tests.shared import shared_dir

#: Published totals in billions, everything that the checkpoint stores but draft layers; (config, total).
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "state-spaces/mamba-2.8b-hf": (
        {"model_type": "mamba", "vocab_size": 50280, "hidden_size": 2560, "num_hidden_layers": 64},
        2.77,
    ),
    "ai21labs/Jamba-v0.1": (
        {
            "model_type": "jamba",
            "vocab_size": 65536,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_experts": 16,
        },
        51.57,
    ),
    "moonshotai/Kimi-Linear-48B-A3B": (
        {
            "model_type": "kimi_linear",
            "vocab_size": 163840,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "moe_intermediate_size": 1024,
            "num_hidden_layers": 27,
            "num_attention_heads": 32,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "kda_layers": [i for i in range(1, 27) if i % 4],
                "head_dim": 128,
                "num_heads": 32,
                "short_conv_kernel_size": 4,
            },
        },
        49.12,
    ),
    "Qwen/Qwen3-Next-80B-A3B": (
        {
            "model_type": "qwen3_next",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "num_experts": 512,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        79.67,
    ),
    "MiniMaxAI/MiniMax-Text-01": (
        {
            "architectures": ["MiniMaxText01ForCausalLM"],
            "vocab_size": 200064,
            "hidden_size": 6144,
            "intermediate_size": 9216,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 32,
            "attn_type_list": ([0] * 7 + [1]) * 10,
        },
        456.09,
    ),
    "google/recurrentgemma-2b": (
        {
            "model_type": "recurrent_gemma",
            "vocab_size": 256000,
            "hidden_size": 2560,
            "intermediate_size": 15360,
            "num_hidden_layers": 26,
            "num_attention_heads": 10,
            "num_key_value_heads": 1,
        },
        2.68,
    ),
    "ibm-granite/granite-4.0-h-small": (
        {
            "model_type": "granitemoehybrid",
            "vocab_size": 100352,
            "hidden_size": 4096,
            "intermediate_size": 768,
            "shared_intermediate_size": 1536,
            "num_hidden_layers": 40,
            "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 72,
            "mamba_d_state": 128,
            "tie_word_embeddings": True,
        },
        32.2,
    ),
    "LiquidAI/LFM2-8B-A1B": (
        {
            "model_type": "lfm2_moe",
            "vocab_size": 65536,
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
        },
        8.34,
    ),
    "google/gemma-3-27b-it": (
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 5376,
                "intermediate_size": 21504,
                "num_hidden_layers": 62,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "head_dim": 128,
            },
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "image_size": 896,
                "patch_size": 14,
                "vision_use_head": False,
            },
        },
        27.43,
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": (
        {
            "model_type": "qwen2_5_vl",
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vision_config": {"hidden_size": 1280, "intermediate_size": 3420, "depth": 32, "out_hidden_size": 3584},
        },
        8.29,
    ),
    "meta-llama/Llama-3.2-11B-Vision": (
        {
            "model_type": "mllama",
            "text_config": {
                "vocab_size": 128256,
                "hidden_size": 4096,
                "num_hidden_layers": 40,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
            },
            "vision_config": {"image_size": 560},
        },
        10.67,
    ),
    "mistralai/Mistral-Small-3.1-24B": (
        {
            "model_type": "mistral3",
            "text_config": {
                "model_type": "mistral",
                "vocab_size": 131072,
                "hidden_size": 5120,
                "intermediate_size": 32768,
                "num_hidden_layers": 40,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
            },
            "vision_config": {"hidden_size": 1024, "intermediate_size": 4096, "image_size": 1540, "patch_size": 14},
        },
        24.01,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_total_is_the_published_one(name: str) -> None:
    config, billions = PUBLISHED[name]
    spec = model_from_config(config | {"dtype": "bfloat16"}, name, "test")
    assert spec.parameters("decoder", "vision") / 1e9 == pytest.approx(billions, rel=0.002)


#: Configurations of the shared folder: published total in billions without draft layers, and the layers.
SHARED = {
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31.6, 52),
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": (31.6, 52),
    "nvidia--NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": (31.6, 52),
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8": (120.6, 88),
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4": (120.6, 88),
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": (550, 108),
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8": (550, 108),
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4": (550, 108),
    "nvidia--Nemotron-H-56B-Base-8K": (56.3, 118),
    "Qwen--Qwen3.5-397B-A17B": (397, 60),
    "nvidia--Qwen3.5-397B-A17B-NVFP4": (397, 60),
    "Qwen--Qwen3.5-122B-A10B": (122.5, 48),
    "nvidia--Qwen3.5-122B-A10B-NVFP4": (122.5, 48),
    "Qwen--Qwen3.5-35B-A3B": (35.1, 40),
    "nvidia--Qwen3.6-35B-A3B-NVFP4": (35.1, 40),
    "Qwen--Qwen3.5-27B": (27.4, 64),
    "nvidia--Qwen3.6-27B-NVFP4": (27.4, 64),
    "Qwen--Qwen3-VL-2B-Instruct": (2.13, 28),
    "Qwen--Qwen3-VL-4B-Instruct": (4.44, 36),
    "Qwen--Qwen3-VL-8B-Instruct": (8.77, 36),
    "Qwen--Qwen3-VL-32B-Instruct": (33.4, 64),
    "Qwen--Qwen3-VL-30B-A3B-Instruct": (31.1, 48),
    "Qwen--Qwen3-VL-235B-A22B-Instruct": (235.7, 94),
    "google--gemma-4-26B-A4B": (25.8, 30),
    "nvidia--Gemma-4-26B-A4B-NVFP4": (25.8, 30),
    "nvidia--Gemma-4-31B-IT-NVFP4": (31.3, 60),
    "moonshotai--Kimi-K3": (2780, 93),
    "moonshotai--Kimi-K2.5": (1027, 61),
    "nvidia--Kimi-K2.6-NVFP4": (1027, 61),
    "nvidia--MiniMax-M3-NVFP4": (427, 60),
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": (108.6, 48),
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct": (401.6, 48),
}


def _shared(name: str) -> ModelSpec:
    config = shared_dir("configs", f"{name}_config.json")
    quant = config.with_name(f"{name}_hf_quant_config.json")
    hf_quant = json.loads(quant.read_text()) if quant.exists() else None
    return model_from_config(json.loads(config.read_text()), name, name, hf_quant)


@pytest.mark.parametrize("name", SHARED)
def test_shared_configuration_counts_what_its_card_says(name: str) -> None:
    spec = _shared(name)
    billions, layers = SHARED[name]
    assert spec.parameters("decoder", "vision") / 1e9 == pytest.approx(billions, rel=0.004)
    assert len(spec.layers) == layers


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4", (4.5, 5.2)),
        ("nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8", (8.0, 8.3)),
        ("nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4", (4.5, 4.7)),
        ("nvidia--Qwen3.5-397B-A17B-NVFP4", (4.5, 5.0)),
        ("nvidia--Qwen3.6-27B-NVFP4", (5.0, 6.5)),
        ("nvidia--Gemma-4-26B-A4B-NVFP4", (4.5, 6.0)),
        ("moonshotai--Kimi-K3", (4.25, 4.6)),
    ],
)
def test_quantized_checkpoints_have_plausible_bits_a_parameter(name: str, bits: tuple[float, float]) -> None:
    spec = _shared(name)
    mean = 8 * spec.weight_bytes("decoder") / spec.parameters("decoder")
    assert bits[0] < mean < bits[1]


def test_kimi_k3_experts_need_180_8_gb_on_each_of_eight_gpus() -> None:
    """vLLM issue 51124: the mxfp4 experts alone, 92 layers of 896, at TP 8."""
    width, latent, experts, layers = 3072, 3584, 896, 92
    values = 3 * width * latent * experts * layers
    assert values * (4 + 8 / 32) / 8 / 8 / 1e9 == pytest.approx(180.8, abs=0.05)
    spec = _shared("moonshotai--Kimi-K3")
    routed = sum(f.total_bytes for f in spec.select("decoder") if f.role == "expert")
    assert routed == values * (4 + 8 / 32) / 8
    names = expand(tuple(f for f in spec.families if not f.experts))
    assert "language_model.model.layers.1.block_sparse_moe.routed_expert_down_proj.weight" in names

"""Parameters of well-known mixtures, whole and per token, against published figures.

Sources: model cards and papers of the vendors (DeepSeek-V3: arXiv:2412.19437, 671 B main and 14 B prediction
weights, 37 B active; gpt-oss: arXiv:2508.10925, table 1, whose active figure leaves the embedding out).
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from meshwright.specs.hf.read import model_from_config
from meshwright.specs.model import ModelSpec, active_parameters
from tests.shared import shared_dir
from tests.specs.hf.oracle import count_on_meta

Config = dict[str, Any]


def gqa(hidden: int, layers: int, heads: int, kv_heads: int, vocab: int, inner: int, head_dim: int = 128) -> Config:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "intermediate_size": inner,
    }


def latent(hidden: int, layers: int, heads: int, vocab: int, inner: int, q_rank: int | None = 1536) -> Config:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "intermediate_size": inner,
        "q_lora_rank": q_rank,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }


def routed(experts: int, topk: int, inner: int, shared: int = 0, dense: int = 0) -> Config:
    return {
        "n_routed_experts": experts,
        "num_experts_per_tok": topk,
        "moe_intermediate_size": inner,
        "n_shared_experts": shared,
        "first_k_dense_replace": dense,
    }


def local(experts: int, topk: int) -> Config:
    return {"num_local_experts": experts, "num_experts_per_tok": topk}


def named(experts: int, topk: int, inner: int) -> Config:
    return {"num_experts": experts, "num_experts_per_tok": topk, "moe_intermediate_size": inner}


LLAMA4 = {"intermediate_size_mlp": 16384, "attention_chunk_size": 8192}
MTP = {"num_nextn_predict_layers": 1}
LING = {"use_qk_norm": True, "moe_router_enable_expert_bias": True}
SHARED_QWEN = {"shared_expert_intermediate_size": 20480}

#: model -> (model type, configuration, published parameters in 1e9, published active ones in 1e9 or None)
PUBLISHED: dict[str, tuple[str, Config, float, float | None]] = {
    "Mixtral-8x7B": ("mixtral", gqa(4096, 32, 32, 8, 32000, 14336) | local(8, 2), 46.70, 12.88),
    "Mixtral-8x22B": ("mixtral", gqa(6144, 56, 48, 8, 32768, 16384) | local(8, 2), 140.63, 39.2),
    "Qwen3-30B-A3B": ("qwen3_moe", gqa(2048, 48, 32, 4, 151936, 6144) | named(128, 8, 768), 30.53, 3.35),
    "Qwen3-235B-A22B": ("qwen3_moe", gqa(4096, 94, 64, 4, 151936, 12288) | named(128, 8, 1536), 235.09, 22.19),
    "Qwen3-Coder-480B": ("qwen3_moe", gqa(6144, 62, 96, 8, 151936, 8192) | named(160, 8, 2560), 480.15, 35.5),
    "Qwen2-57B-A14B": (
        "qwen2_moe",
        gqa(3584, 28, 28, 4, 151936, 18944) | named(64, 8, 2560) | SHARED_QWEN,
        57.41,
        14.2,
    ),
    "DeepSeek-V2": ("deepseek_v2", latent(5120, 60, 128, 102400, 12288) | routed(160, 6, 1536, 2, 1), 235.74, 21.4),
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        latent(2048, 27, 16, 102400, 10944, None) | routed(64, 6, 1408, 2, 1),
        15.71,
        2.66,
    ),
    "DeepSeek-V3": ("deepseek_v3", latent(7168, 61, 128, 129280, 18432) | routed(256, 8, 2048, 1, 3), 671.03, 37.55),
    "Kimi-K2": ("kimi_k2", latent(7168, 61, 64, 163840, 18432) | routed(384, 8, 2048, 1, 1), 1026.4, 32.86),
    "GLM-4.5": (
        "glm4_moe",
        gqa(5120, 92, 96, 8, 151552, 12288)
        | routed(160, 8, 1536, 1, 3)
        | {"use_qk_norm": True, "attention_bias": True},
        352.8,
        33.6,
    ),
    "GLM-4.5-Air": (
        "glm4_moe",
        gqa(4096, 46, 96, 8, 151552, 10944) | routed(128, 8, 1408, 1, 1) | {"attention_bias": True},
        106.85,
        13.4,
    ),
    "gpt-oss-20b": ("gpt_oss", gqa(2880, 24, 64, 8, 201088, 2880, 64) | local(32, 4), 20.91, 3.61 + 0.579),
    "gpt-oss-120b": ("gpt_oss", gqa(2880, 36, 64, 8, 201088, 2880, 64) | local(128, 4), 116.83, 5.13 + 0.579),
    "Llama-4-Scout": ("llama4_text", gqa(5120, 48, 40, 8, 202048, 8192) | local(16, 1) | LLAMA4, 107.77, 17.17),
    "Llama-4-Maverick": (
        "llama4_text",
        gqa(5120, 48, 40, 8, 202048, 8192) | local(128, 1) | LLAMA4 | {"interleave_moe_layer_step": 2},
        400.71,
        17.17,
    ),
    "MiniMax-M2": ("minimax_m2", gqa(3072, 62, 48, 8, 200064, 1536) | local(256, 8), 228.7, 11.0),
    "OLMoE-1B-7B": (
        "olmoe",
        gqa(2048, 16, 16, 16, 50304, 1024) | named(64, 8, 0) | {"moe_intermediate_size": None},
        6.92,
        1.28,
    ),
    "Phi-3.5-MoE": (
        "phimoe",
        gqa(4096, 32, 32, 8, 32064, 6400) | local(16, 2) | {"attention_bias": True, "lm_head_bias": True},
        41.87,
        6.64,
    ),
    "Hunyuan-A13B": (
        "hunyuan_v1_moe",
        gqa(4096, 32, 32, 8, 128167, 3072) | {"num_experts": 64, "moe_topk": [8] * 32, "tie_word_embeddings": True},
        80.39,
        None,
    ),
    "dots.llm1": ("dots1", gqa(4096, 62, 32, 32, 152064, 10944) | routed(128, 6, 1408, 2, 1), 142.77, 14.0),
    "DeepSeek-MoE-16B": ("deepseek", gqa(2048, 28, 16, 16, 102400, 10944) | routed(64, 6, 1408, 2, 1), 16.38, 2.83),
    "Ling-flash-2.0": (
        "bailing_moe_v2",
        gqa(4096, 32, 32, 4, 157184, 9216) | routed(256, 8, 1024, 1, 1) | LING,
        102.9,
        6.15,
    ),
    "Ling-1T": (
        "bailing_moe_v2",
        gqa(8192, 80, 64, 8, 157184, 18432) | routed(256, 8, 2048, 1, 4) | LING,
        999.7,
        None,
    ),
    "DBRX": (
        "dbrx",
        {
            "d_model": 6144,
            "n_heads": 48,
            "n_layers": 40,
            "vocab_size": 100352,
            "attn_config": {"kv_n_heads": 8},
            "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
        },
        131.6,
        36.5,
    ),
}


@cache
def read(name: str) -> ModelSpec:
    kind, config, _, _ = PUBLISHED[name]
    return model_from_config({**config, "model_type": kind, "dtype": "bfloat16"}, name, name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameters(name: str) -> None:
    spec = read(name)
    assert spec.parameters() / 1e9 == pytest.approx(PUBLISHED[name][2], rel=1e-3)
    assert spec.assumptions == ()


@pytest.mark.parametrize("name", [n for n, row in PUBLISHED.items() if row[3] is not None])
def test_published_active_parameters(name: str) -> None:
    assert active_parameters(read(name)) / 1e9 == pytest.approx(PUBLISHED[name][3], rel=5e-3)


def test_active_parameters_by_hand() -> None:
    spec = read("Mixtral-8x7B")
    experts = 32 * 8 * 3 * 4096 * 14336
    assert active_parameters(spec) == spec.parameters() - experts + experts * 2 // 8
    dense = replace(spec, families=tuple(f for f in spec.families if f.role != "expert"))
    assert active_parameters(dense) == dense.parameters()


def test_prediction_layer_of_deepseek_v3() -> None:
    kind, config, _, _ = PUBLISHED["DeepSeek-V3"]
    spec = model_from_config({**config, **MTP, "model_type": kind, "dtype": "bfloat16"}, "v3", "v3")
    copies = 2 * 129280 * 7168
    assert spec.parameters("mtp") / 1e9 == pytest.approx(13.46, rel=1e-3)
    assert (spec.parameters("mtp") - copies) / 1e9 == pytest.approx(11.61, rel=1e-3)
    assert spec.parameters("decoder") == read("DeepSeek-V3").parameters()
    assert spec.parameters() / 1e9 == pytest.approx(684.5, rel=1e-3)
    assert active_parameters(spec) == active_parameters(read("DeepSeek-V3"))


FP8 = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
MXFP4 = {
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
}

#: model -> (its quantization, bytes published, bytes of file headers included in them for each tensor).
#: Sources: ``total_size`` of the indexes of openai/gpt-oss-20b and 120b; file sizes of deepseek-ai/DeepSeek-V3.
BYTES: dict[str, tuple[Config, int, int]] = {
    "gpt-oss-20b": (MXFP4, 13_761_264_768, 0),
    "gpt-oss-120b": (MXFP4, 65_248_815_744, 0),
    "DeepSeek-V3": (FP8 | MTP, 688_586_727_753, 130),
}


@pytest.mark.parametrize("name", BYTES)
def test_published_bytes(name: str) -> None:
    kind, config, _, _ = PUBLISHED[name]
    quantization, published, header = BYTES[name]
    spec = model_from_config({**config, **quantization, "model_type": kind, "dtype": "bfloat16"}, name, name)
    headers = header * sum(f.count for f in spec.families)
    assert abs(spec.weight_bytes() + headers - published) <= headers // 10
    assert spec.parameters("decoder") == read(name).parameters()


#: shared configuration -> parameters of the decoder, of the prediction layers, per token (all in 1e9)
SHARED: dict[str, tuple[float, float, float]] = {
    "deepseek-ai--DeepSeek-R1": (671.03, 13.46, 37.55),
    "deepseek-ai--DeepSeek-V3.2": (671.88, 13.48, 38.40),
    # 1.6 T and 49 B; 284 B and 13 B. The attention, experts, shared experts and hyper-connections add up to
    # 19.465 + 1547.40 + 4.03 + 0.084 + 1.853 B, embedding and head included.
    "deepseek-ai--DeepSeek-V4-Pro": (1573.0, 25.84, 49.78),
    "deepseek-ai--DeepSeek-V4-Flash": (284.33, 6.61, 13.80),
    "sgl-project--DeepSeek-V4-Pro-FP8": (1573.0, 25.84, 49.78),
    "moonshotai--Kimi-K2-Instruct": (1026.4, 0.0, 32.86),
    # 744 B, 40 B active; with the prediction layer 754 B.
    "zai-org--GLM-5": (743.91, 9.95, 41.79),
    "zai-org--GLM-5.2": (743.38, 9.95, 41.25),
    "zai-org--GLM-5.3-FP8": (743.38, 9.95, 41.25),
    "openai--gpt-oss-20b": (20.91, 0.0, 4.19),
    "openai--gpt-oss-120b": (116.83, 0.0, 5.71),
    "MiniMaxAI--MiniMax-M2.5": (228.69, 0.0, 11.03),
    "MiniMaxAI--MiniMax-M3": (426.18, 7.49, 25.96),
    # 309 B, 15 B active.
    "XiaomiMiMo--MiMo-V2-Flash": (308.78, 0.0, 15.45),
    # 196 B, 11 B active.
    "stepfun-ai--Step-3.7-Flash": (195.84, 2.33, 10.88),
    "mistralai--Mixtral-8x22B-v0.1": (140.62, 0.0, 39.15),
    "Qwen--Qwen3-Coder-480B-A35B-Instruct": (480.16, 0.0, 35.48),
    "Qwen--Qwen3-235B-A22B-FP8": (235.09, 0.0, 22.19),
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_configurations(name: str) -> None:
    raw = json.loads(shared_dir("configs", f"{name}_config.json").read_text())
    spec = model_from_config(raw, name, name)
    found = [spec.parameters("decoder") / 1e9, spec.parameters("mtp") / 1e9, active_parameters(spec) / 1e9]
    assert found == pytest.approx(list(SHARED[name]), rel=2e-3)
    assert all("dtype" in a for a in spec.assumptions)


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("Mixtral-8x7B", "mixtral"),
        ("Qwen3-235B-A22B", "qwen3_moe"),
        ("DeepSeek-V2-Lite", "deepseek_v2"),
        ("DeepSeek-V3", "deepseek_v3"),
        ("GLM-4.5-Air", "glm4_moe"),
        ("gpt-oss-120b", "gpt_oss"),
        ("Llama-4-Maverick", "llama4_text"),
        ("MiniMax-M2", "minimax_m2"),
    ],
)
def test_full_size_equals_the_class_on_the_meta_device(name: str, model_type: str) -> None:
    config = {
        k: v for k, v in PUBLISHED[name][1].items() if k != "head_dim" or "kv_lora_rank" not in PUBLISHED[name][1]
    }
    # The bias of the choice is a buffer of the class, not a parameter.
    spec = read(name)
    bias = sum(f.parameters for f in spec.families if f.template.endswith("e_score_correction_bias"))
    assert count_on_meta(model_type, **{**config, "pad_token_id": 0}) == spec.parameters() - bias

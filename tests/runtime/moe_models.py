"""Small mixtures of experts of every family that the runtime runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.runtime.checkpoint import write_random
from tests.runtime.tiny import BASE

#: Latent attention: 9 heads of 6 + 4 (turned), values of 5.
LATENT: dict[str, Any] = {
    "num_key_value_heads": 9,
    "head_dim": 4,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 22,
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 0,
}

#: Expert widths and numbers do not divide evenly; one layer is dense where the family allows it.
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 37,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 22,
        "shared_expert_intermediate_size": 29,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 22,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "deepseek_v2": {
        **LATENT,
        "architectures": ["DeepseekV2ForCausalLM"],
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {**LATENT, "architectures": ["DeepseekV3ForCausalLM"], "n_shared_experts": 1},
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 22,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def config(name: str, **changes: Any) -> dict[str, Any]:
    """Configuration of a small mixture of experts."""
    return {**BASE, "num_hidden_layers": 3, "model_type": name, **MIXTURES[name], **changes}


def write(folder: Path, name: str, **changes: Any) -> Path:
    """Write a random checkpoint; returns its folder."""
    write_random(config(name, **changes), folder, seed=3)
    return folder

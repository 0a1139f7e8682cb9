"""Multimodal models of start-up logs that the atlas does not hold: text dimensions and vision encoder.

Public configurations of the same names (Mistral-Small-3.1/3.2: Pixtral encoder of 24 layers; MiMo-VL-7B: the encoder
of Qwen2.5-VL, 32 layers).
"""

from __future__ import annotations

from typing import Any

_MISTRAL_SMALL: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "torch_dtype": "bfloat16",
    "spatial_merge_size": 2,
    "text_config": {
        "model_type": "mistral",
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 32768,
        "vocab_size": 131072,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "head_dim": 64,
        "intermediate_size": 4096,
        "patch_size": 14,
        "image_size": 1540,
        "num_channels": 3,
    },
}
_MIMO_VL: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 11008,
    "vocab_size": 151680,
    "max_position_embeddings": 128000,
    "tie_word_embeddings": False,
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3456,
        "num_heads": 16,
        "out_hidden_size": 4096,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
    },
}

#: Name without its ending -> configuration.
EXTRA: dict[str, dict[str, Any]] = {
    "mistral-small-3.1-24b": _MISTRAL_SMALL,
    "mistral-small-3.2-24b": _MISTRAL_SMALL,
    "mimo-vl-7b": _MIMO_VL,
    "mimo-vl-7b-rl": _MIMO_VL,
}

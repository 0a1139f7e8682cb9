"""Multimodal wrappers against what transformers saves: text renamed, encoders exact."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.specs.hf.read import model_from_config
from meshwright.specs.tensors import expand
from tests.specs.hf.oracle import Shapes, assert_same, config_class, read_header

TEXT: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
HEADS = TEXT | {"head_dim": 10}
MOE: dict[str, Any] = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 14}
LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 9,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "image_size": 28,
    "patch_size": 7,
}
CLIP = TOWER | {"model_type": "clip_vision_model"}
SIGLIP = TOWER | {"model_type": "siglip_vision_model"}
QWEN: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_heads": 4,
    "out_hidden_size": 48,
    "patch_size": 7,
}
QWEN3 = QWEN | {"num_position_embeddings": 16}
GEMMA4_TEXT = HEADS | {
    "global_head_dim": 14,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
}
GEMMA4_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "global_head_dim": 8,
    "num_hidden_layers": 2,
    "patch_size": 7,
    "position_embedding_size": 30,
}
WHISPER: dict[str, Any] = {"num_mel_bins": 10, "max_source_positions": 20}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": (
        "qwen2_vl",
        {
            "text_config": TEXT,
            "vision_config": {
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 48,
                "num_heads": 4,
                "mlp_ratio": 2,
                "patch_size": 7,
            },
        },
    ),
    "qwen2_5_vl": ("qwen2_5_vl", {"text_config": TEXT, "vision_config": QWEN}),
    "qwen3_vl": (
        "qwen3_vl",
        {"text_config": HEADS, "vision_config": QWEN3 | {"deepstack_visual_indexes": [0, 1]}},
    ),
    "qwen3_vl tied": (
        "qwen3_vl",
        {
            "text_config": HEADS,
            "vision_config": QWEN3 | {"deepstack_visual_indexes": [1]},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {"text_config": HEADS | MOE, "vision_config": QWEN3 | {"deepstack_visual_indexes": [1]}},
    ),
    "qwen3_5": ("qwen3_5", {"text_config": HEADS | LINEAR, "vision_config": QWEN3}),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {"text_config": HEADS | LINEAR | MOE | {"shared_expert_intermediate_size": 22}, "vision_config": QWEN3},
    ),
    "llava": ("llava", {"text_config": TEXT | {"model_type": "llama"}, "vision_config": CLIP}),
    "llava pixtral": (
        "llava",
        {
            "text_config": HEADS | {"model_type": "mistral"},
            "vision_config": TOWER | {"model_type": "pixtral", "head_dim": 8},
        },
    ),
    "llava_next": ("llava_next", {"text_config": TEXT | {"model_type": "mistral"}, "vision_config": CLIP}),
    "mllama": (
        "mllama",
        {
            "text_config": TEXT
            | {
                "num_hidden_layers": 3,
                "cross_attention_layers": [1],
                "pad_token_id": 0,
                "bos_token_id": 0,
                "eos_token_id": 0,
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 52,
                "attention_heads": 4,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "image_size": 28,
                "patch_size": 7,
                "vision_output_dim": 96,
                "intermediate_layers_indices": [0, 1],
                "supported_aspect_ratios": [[1, 1], [1, 2]],
                "max_num_tiles": 2,
            },
        },
    ),
    "internvl": (
        "internvl",
        {
            "text_config": TEXT | {"model_type": "qwen2"},
            "vision_config": TOWER | {"image_size": [28, 28], "patch_size": [7, 7]},
        },
    ),
    "internvl norms": (
        "internvl",
        {
            "text_config": TEXT | {"model_type": "qwen2"},
            "vision_config": TOWER
            | {"image_size": [28, 28], "patch_size": [7, 7], "use_qk_norm": True, "attention_bias": True},
        },
    ),
    "gemma3": ("gemma3", {"text_config": HEADS, "vision_config": TOWER, "mm_tokens_per_image": 4}),
    "gemma4": ("gemma4", {"text_config": GEMMA4_TEXT, "vision_config": GEMMA4_TOWER | {"standardize": True}}),
    "gemma4 audio": (
        "gemma4",
        {
            "text_config": GEMMA4_TEXT,
            "vision_config": GEMMA4_TOWER | {"use_clipped_linears": True},
            "audio_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "output_proj_dims": 44,
                "subsampling_conv_channels": [8, 6],
            },
        },
    ),
    "llama4": (
        "llama4",
        {
            "text_config": HEADS
            | {
                "intermediate_size_mlp": 90,
                "num_local_experts": 3,
                "interleave_moe_layer_step": 2,
                "pad_token_id": 0,
            },
            "vision_config": TOWER
            | {
                "intermediate_size": 128,
                "vision_output_dim": 36,
                "projector_input_dim": 36,
                "projector_output_dim": 36,
            },
        },
    ),
    "mistral3": (
        "mistral3",
        {
            "text_config": HEADS | {"model_type": "mistral"},
            "vision_config": TOWER | {"model_type": "pixtral", "head_dim": 8},
        },
    ),
    "idefics3": ("idefics3", {"text_config": TEXT | {"model_type": "llama"}, "vision_config": TOWER}),
    "smolvlm": ("smolvlm", {"text_config": TEXT | {"model_type": "llama"}, "vision_config": TOWER}),
    "glm4v": ("glm4v", {"text_config": TEXT, "vision_config": QWEN | {"image_size": 28}}),
    "glm4v_moe": (
        "glm4v_moe",
        {
            "text_config": HEADS
            | {
                "n_routed_experts": 3,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 14,
                "first_k_dense_replace": 1,
            },
            "vision_config": QWEN | {"image_size": 28},
        },
    ),
    "qwen2_audio": (
        "qwen2_audio",
        {
            "text_config": TEXT | {"model_type": "qwen2"},
            "audio_config": WHISPER
            | {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 52, "d_model": 32},
        },
    ),
    "voxtral": (
        "voxtral",
        {
            "text_config": HEADS | {"model_type": "llama"},
            "audio_config": WHISPER
            | {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_attention_heads": 4,
                "num_hidden_layers": 2,
                "head_dim": 8,
            },
        },
    ),
    "minimax_m3_vl": (
        "minimax_m3_vl",
        {
            "text_config": TEXT
            | {
                "head_dim": 16,
                "rotary_dim": 8,
                "num_local_experts": 3,
                "num_experts_per_tok": 2,
                "shared_intermediate_size": 14,
                "dense_intermediate_size": 90,
                "mlp_layer_types": ["dense", "sparse"],
            },
            "vision_config": TOWER,
            "projector_hidden_size": 44,
        },
    ),
    "step3p7": (
        "step3p7",
        {
            "text_config": HEADS
            | {
                "pad_token_id": 1,
                "n_routed_experts": 3,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 14,
                "share_expert_dim": 14,
                "mlp_layer_types": ["dense", "sparse"],
                "layer_types": ["full_attention", "sliding_attention"],
                "sliding_window": 16,
                "num_sliding_attention_heads": 6,
            },
            "vision_config": {
                "hidden_size": 32,
                "mlp_ratio": 1.5,
                "num_attention_heads": 4,
                "num_hidden_layers": 2,
                "image_size": 28,
                "patch_size": 7,
            },
        },
    ),
    "glm46v": (
        "glm46v",
        {
            "text_config": TEXT | {"model_type": "glm4v_text"},
            "vision_config": QWEN | {"image_size": 28, "model_type": "glm4v_vision"},
        },
    ),
    "paligemma": (
        "paligemma",
        {"text_config": HEADS | {"model_type": "gemma"}, "vision_config": SIGLIP, "projection_dim": 48},
    ),
    "aya_vision": ("aya_vision", {"text_config": HEADS | {"model_type": "cohere2"}, "vision_config": SIGLIP}),
    "cohere2_vision": ("cohere2_vision", {"text_config": HEADS | {"model_type": "cohere2"}, "vision_config": SIGLIP}),
    "llava_onevision": ("llava_onevision", {"text_config": TEXT | {"model_type": "qwen2"}, "vision_config": SIGLIP}),
    "lfm2_vl": (
        "lfm2_vl",
        {
            "text_config": TEXT | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
            "vision_config": SIGLIP
            | {"model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False},
        },
    ),
}

KIMI: dict[str, Any] = {
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 52,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "patch_size": 7,
        "pos_emb_height": 6,
        "pos_emb_width": 5,
        "pos_emb_time": 3,
    },
    "projection_hidden_size": 32,
    "text_config": TEXT
    | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 14,
        "n_routed_experts": 3,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 6,
        "v_head_dim": 10,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
    },
}

#: What saving a Kimi K2.5 renames by too wide patterns: names of the class's file -> names of the published one.
KIMI_NAMES = (
    (r"^language_model\.model\.blocks\.", "language_model.model.layers."),
    (r"^model\.mm_projector\.", "mm_projector."),
    (r"^vision_tower\.encoder\.patch_embed\.", "vision_tower.patch_embed."),
)


def _save(model_type: str, config: dict[str, Any], tmp: Any) -> tuple[dict[str, Any], Shapes]:
    """The wrapper's own class: no one auto class knows them all."""
    import torch
    import transformers
    from transformers.models.auto import modeling_auto

    built = config_class(model_type)(**config)
    for mapping in ("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"):
        name = getattr(modeling_auto, mapping, {}).get(model_type)
        if name:
            break
    assert name, f"no class for {model_type}"
    built.architectures = [name]
    getattr(transformers, name)._from_config(built, dtype=torch.bfloat16).save_pretrained(tmp)
    saved: Shapes = {}
    for file in tmp.glob("*.safetensors"):
        saved |= read_header(file)
    return json.loads((tmp / "config.json").read_text()), saved


@pytest.mark.parametrize("name", CASES)
def test_names_and_shapes_are_what_transformers_saves(name: str, tmp_path: Any) -> None:
    model_type, config = CASES[name]
    raw, saved = _save(model_type, config, tmp_path)
    spec = model_from_config(raw, name, "test")
    assert_same(expand(spec.families), saved, ignore_dtype=True)
    text = {
        k for k in saved if re.search(r"(^|\.)(layers\.\d+\.(self_attn|linear_attn|mlp|moe)|embed_tokens|norm)\.", k)
    }
    assert text & expand(tuple(spec.select("decoder"))).keys()
    assert spec.parameters("vision") > 0


def test_kimi_k25_is_what_transformers_saves_but_for_names_it_garbles(tmp_path: Any) -> None:
    raw, saved = _save("kimi_k25", KIMI, tmp_path)
    for old, new in KIMI_NAMES:
        saved = {re.sub(old, new, k): v for k, v in saved.items()}
    assert_same(expand(model_from_config(raw, "kimi", "test").families), saved, ignore_dtype=True)


def test_a_missing_encoder_tensor_is_seen(tmp_path: Any) -> None:
    """The comparison can fail: one encoder layer fewer than the class has."""
    raw, saved = _save(*CASES["llava"], tmp_path)
    raw["vision_config"]["num_hidden_layers"] = 1
    with pytest.raises(AssertionError, match=r"encoder\.layers\.1"):
        assert_same(expand(model_from_config(raw, "llava", "test").families), saved, ignore_dtype=True)


def test_text_at_the_top_of_older_files_is_read() -> None:
    """Qwen2-VL's published configuration has no text_config."""
    model_type, config = CASES["qwen2_vl"]
    new = {"model_type": model_type, "architectures": ["Qwen2VLForConditionalGeneration"], **config}
    old = {k: v for k, v in new.items() if k != "text_config"} | config["text_config"]
    assert model_from_config(old, "old", "test").families == model_from_config(new, "new", "test").families


def test_llava_takes_the_defaults_of_its_text_class() -> None:
    """llava-1.5-7b states only vocabulary and model type of its text part: 6.74 billion."""
    raw = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {"model_type": "llama", "vocab_size": 32064, "torch_dtype": "float16"},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "image_size": 336,
            "patch_size": 14,
        },
    }
    spec = model_from_config(raw, "llava-1.5-7b", "test")
    assert spec.parameters("decoder") / 1e9 == pytest.approx(6.74, abs=0.01)
    assert spec.parameters("vision") / 1e6 == pytest.approx(303.5 + 21, abs=1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "text_config is missing"),
        ({"model_type": "llava", "text_config": {"model_type": "llama"}}, "wrapper inside a wrapper"),
        ([1], "an object is needed"),
        ({"model_type": "llama", "vocab_size": "many"}, "vocab_size is 'many'"),
    ],
)
def test_a_wrapper_without_a_usable_text_part_is_refused_in_one_line(text: Any, said: str) -> None:
    with pytest.raises(InputError) as caught:
        model_from_config({"model_type": "llava", "text_config": text, "dtype": "bfloat16"}, "bad", "bad.json")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)

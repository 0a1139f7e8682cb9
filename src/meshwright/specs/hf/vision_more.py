"""More multimodal wrappers: Qwen-VL, GLM-4V, Llama 3.2 and 4, Kimi, MiniMax-M3, Step-3.7, audio encoders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.specs.hf import towers
from meshwright.specs.hf.blocks import mlp3_tensors, qkvo_tensors
from meshwright.specs.hf.dense import gqa
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.hf.towers import Sizes, fill, units
from meshwright.specs.hf.vision import (
    BESIDE,
    INSIDE,
    PLAIN,
    depth,
    side,
    text_fields,
    text_parts,
    vision_table,
    vit,
    wrap,
)
from meshwright.specs.model import Layer, Mlp
from meshwright.specs.tensors import TensorFamily


@architecture("Qwen2VLForConditionalGeneration", "qwen2_vl")
def qwen2_vl(f: Fields, dtype: str) -> Parts:
    """Qwen2-VL: the encoder's width is ``embed_dim``, its ``hidden_size`` is the text's."""
    parts, t, v = text_parts(f, dtype, "Qwen2ForCausalLM"), vision_table(dtype), f.sub("vision_config")
    h, heads = v.integer("embed_dim", default=1280), v.integer("num_heads", default=16)
    sizes = vit(v, h, heads, 0, 14)
    ratio, merge = v.integer("mlp_ratio", default=4), v.integer("spatial_merge_size", default=2)
    a = units(heads, max(1, h // heads))
    sizes |= {"h": h, "a": a, "a3": (a, a, a), "m": units(ratio * h), "merged": h * merge**2, "out": parts.hidden}
    sizes["frames"] = side(v, "temporal_patch_size", 2)
    fill(t, towers.QWEN2, sizes, "visual.", depth(v, 32))
    return wrap(parts, PLAIN, t)


def _qwen_sizes(v: Fields, out: int, hidden: int, intermediate: int, patch: int) -> dict[str, Any]:
    sizes = vit(v, hidden, 16, intermediate, patch)
    merge = v.integer("spatial_merge_size", default=2)
    sizes |= {"merged": sizes["h"] * merge**2, "out": v.integer("out_hidden_size", default=out)}
    sizes["frames"] = side(v, "temporal_patch_size", 2)
    return sizes


@architecture("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl")
def qwen2_5_vl(f: Fields, dtype: str) -> Parts:
    """Qwen2.5-VL."""
    parts, t, v = text_parts(f, dtype, "Qwen2ForCausalLM"), vision_table(dtype), f.sub("vision_config")
    fill(t, towers.QWEN2_5, _qwen_sizes(v, parts.hidden, 3584, 3420, 14), "visual.", depth(v, 32))
    return wrap(parts, PLAIN, t)


def _qwen3(f: Fields, dtype: str, parts: Parts) -> Parts:
    """Encoder of Qwen3-VL and Qwen3.5: learned positions; Qwen3-VL feeds some layers' output deep into the text."""
    t, v = vision_table(dtype), f.sub("vision_config")
    sizes = _qwen_sizes(v, parts.hidden, 1152, 4304, 16)
    sizes["tokens"] = v.integer("num_position_embeddings", default=2304)
    fill(t, towers.QWEN3, sizes, "model.visual.", depth(v, 27))
    fill(t, towers.QWEN3_DEEPSTACK, sizes, "model.visual.", len(v.integers("deepstack_visual_indexes")))
    return wrap(parts, INSIDE, t)


@architecture("Qwen3VLForConditionalGeneration", "qwen3_vl")
def qwen3_vl(f: Fields, dtype: str) -> Parts:
    """Qwen3-VL, dense."""
    return _qwen3(f, dtype, text_parts(f, dtype, "Qwen3ForCausalLM"))


@architecture("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe")
def qwen3_vl_moe(f: Fields, dtype: str) -> Parts:
    """Qwen3-VL with experts, all of a layer in two tensors."""
    parts = text_parts(f, dtype, "Qwen3MoeForCausalLM")
    return _qwen3(f, dtype, replace(parts, families=_fused(parts)))


def _fused(parts: Parts) -> tuple[TensorFamily, ...]:
    """Gate and up of all experts in ``experts.gate_up_proj``, down in ``experts.down_proj``, as this class saves."""
    fused: list[TensorFamily] = []
    for family in parts.families:
        if not family.experts:
            fused.append(family)
            continue
        base, _, leaf = family.template.removesuffix(".weight").partition(".{expert}.")
        dims, experts = family.dims, (seg("experts", family.experts),)
        if leaf == "gate_proj":
            dims = (experts, dims[0] * 2, dims[1])
            fused.append(replace(family, template=f"{base}.gate_up_proj", dims=dims, op="gate_up", experts=0))
        elif leaf == "down_proj":
            fused.append(replace(family, template=f"{base}.down_proj", dims=(experts, *dims), experts=0))
    return tuple(fused)


@architecture("Qwen3_5ForConditionalGeneration", "qwen3_5", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe")
def qwen3_5(f: Fields, dtype: str) -> Parts:
    """Qwen3.5 and 3.6, dense and with experts."""
    return _qwen3(f, dtype, text_parts(f, dtype, "Qwen3_5ForCausalLM"))


@architecture(
    "Glm4vForConditionalGeneration",
    "glm4v",
    "Glm4vMoeForConditionalGeneration",
    "glm4v_moe",
    "Glm46VForConditionalGeneration",
    "glm46v",
)
def glm4v(f: Fields, dtype: str) -> Parts:
    """GLM-4.1V, 4.5V and 4.6V."""
    text = f.sub("text_config")
    moe = text.has("n_routed_experts", "num_local_experts")
    if not text.has("head_dim"):
        width = max(1, text.integer("hidden_size", default=4096) // text.integer("num_attention_heads", default=32))
        f = Fields({**f.raw, "text_config": {**text.raw, "head_dim": width}}, f.where, f.assumed)
    parts = text_parts(f, dtype, "Glm4MoeForCausalLM" if moe else "Glm4ForCausalLM")
    t, v = vision_table(dtype), f.sub("vision_config")
    sizes = vit(v, 1536, 12, 13696, 14, 336)
    out = v.integer("out_hidden_size", default=4096)
    sizes |= {"out": out, "out_v": units(out), "merge": v.integer("spatial_merge_size", default=2)}
    sizes["frames"] = side(v, "temporal_patch_size", 2)
    fill(t, towers.GLM4V, sizes, "model.visual.", depth(v, 24))
    return wrap(parts, INSIDE, t)


@architecture("Llama4ForConditionalGeneration", "llama4")
def llama4(f: Fields, dtype: str) -> Parts:
    """Llama 4 with images."""
    parts, t, v = text_parts(f, dtype, "Llama4ForCausalLM"), vision_table(dtype), f.sub("vision_config")
    sizes = vit(v, 768, 16, 5632, 14, 448)
    sizes["tokens"] += 1
    out = v.integer("projector_output_dim", default=4096)
    sizes |= {"pixels": sizes["c"] * sizes["p"] ** 2, "mid": v.integer("projector_input_dim", default=4096), "out": out}
    fill(t, towers.LLAMA4, sizes, "vision_model.", depth(v, 34))
    projector: Sizes = {"seen": v.integer("vision_output_dim", default=7680), "text": parts.hidden}
    fill(t, "multi_modal_projector.linear_1 w text,seen", projector)
    return wrap(parts, BESIDE, t)


@architecture("MllamaForConditionalGeneration", "mllama")
def mllama(f: Fields, dtype: str) -> Parts:
    """Llama 3.2 with images: cross-attention layers between the text layers, two stacked encoders."""
    parts, t, v = _mllama_text(text_fields(f, False), dtype), vision_table(dtype), f.sub("vision_config")
    sizes = vit(v, 1280, 16, 5120, 14, 448)
    tokens, tiles = sizes["tokens"] + 1, v.integer("max_num_tiles", default=4, high=64)
    _, shapes = v.get("supported_aspect_ratios")
    ratios = len(shapes) if isinstance(shapes, list) else 8
    h = sizes["h"]
    sizes |= {"tokens": tokens, "ratios": ratios + 1, "tiles_h": tiles * h, "tiles_tokens_h": tiles * tokens * h}
    fill(t, towers.MLLAMA, sizes, "vision_model.")
    fill(t, towers.MLLAMA_LAYER, sizes, "vision_model.transformer.layers.", depth(v, 32))
    gates = towers.MLLAMA_LAYER + "\n{layer}.gate_attn - 1\n{layer}.gate_ffn - 1"
    above = v.integer("num_global_layers", default=8, high=2048)
    fill(t, gates, sizes, "vision_model.global_transformer.layers.", above)
    seen: Sizes = {"seen": v.integer("vision_output_dim", default=7680), "text": parts.hidden}
    fill(t, "multi_modal_projector wb text,seen", seen)
    return wrap(parts, BESIDE, t)


def _mllama_text(f: Fields, dtype: str) -> Parts:
    """Text layers like Llama's; cross-attention layers read the image, their cache does not grow with the text."""
    hidden, vocab, n = f.integer("hidden_size", default=4096), f.integer("vocab_size"), f.layers()
    a, inter = gqa(f), f.integer("intermediate_size", default=14336)
    cross = tuple(sorted(i for i in f.integers("cross_attention_layers") if i < n))
    own, every = tuple(i for i in range(n) if i not in cross), tuple(range(n))
    t = Table(dtype)
    rows = seg("vocab", vocab)
    t.add("model.embed_tokens.weight", seg("vocab", vocab + 8), hidden, role="embedding")
    t.norm("model.norm", hidden)
    t.add("lm_head.weight", rows, hidden, role="head", op="head")
    qkvo_tensors(t, hidden, a, own)
    qkvo_tensors(t, hidden, a, cross, name="cross_attn")
    if cross:
        for leaf in ("q_norm", "k_norm"):
            t.norm(f"cross_attn.{leaf}", seg("fixed", a.head_dim), layers=cross)
        for leaf in ("cross_attn_attn_gate", "cross_attn_mlp_gate"):
            t.add(f"{t.prefix}{leaf}", seg("fixed", 1), role="other", layers=cross)
    mlp3_tensors(t, hidden, inter, every, name="mlp")
    for leaf in ("input_layernorm", "post_attention_layernorm"):
        t.norm(leaf, hidden, layers=every)
    layer = Layer((a,), (Mlp(inter),))
    if cross:
        f.assume("cross-attention layers are counted as if their cache held the text's tokens")
    positions = f.integer("max_position_embeddings", default=131072)
    return Parts(hidden, vocab, (layer,) * n, tuple(t.families), False, positions)


def _moonvit_sizes(v: Fields) -> dict[str, Any]:
    h = v.integer("vt_hidden_size", "hidden_size", default=1152)
    heads = v.integer("vt_num_attention_heads", "num_attention_heads", default=16)
    wide = v.integer("qkv_hidden_size", default=h)
    a = units(heads, max(1, wide // heads))
    pair = v.integers("merge_kernel_size", length=2, low=1) or (2, 2)
    return {
        "h": h,
        "a": a,
        "a3": (a, a, a),
        "m": units(v.integer("vt_intermediate_size", "intermediate_size", default=4304)),
        "p": v.integer("patch_size", default=14),
        "c": 3,
        "height": v.integer("init_pos_emb_height", "pos_emb_height", default=64),
        "width": v.integer("init_pos_emb_width", "pos_emb_width", default=64),
        "merged": h * pair[0] * pair[1],
        "text": v.integer("text_hidden_size", default=7168),
    }


@architecture("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration", "kimi_k25")
def kimi_k25(f: Fields, dtype: str) -> Parts:
    """Kimi K2.5 and later: DeepSeek-V3 text, MoonViT tower; tower names are those of the published checkpoint."""
    parts, t, v = text_parts(f, dtype, "DeepseekV3ForCausalLM"), vision_table(dtype), f.sub("vision_config")
    sizes = _moonvit_sizes(v) | {"text": parts.hidden}
    layers = v.integer("vt_num_hidden_layers", "num_hidden_layers", default=27, high=2048)
    fill(t, towers.MOONVIT, sizes, "vision_tower.", layers)
    rows = "pre_norm wb h\nproj.0 wb merged,merged\nproj.2 wb text,merged"
    fill(t, rows, sizes, "mm_projector.")
    return wrap(parts, BESIDE, t)


@architecture("KimiK3ForConditionalGeneration", "kimi_k3")
def kimi_k3(f: Fields, dtype: str) -> Parts:
    """Kimi K3: its tower has no class in transformers; names are published, shapes follow from its fields."""
    parts, t, v = text_parts(f, dtype, "KimiLinearForCausalLM"), vision_table(dtype), f.sub("vision_config")
    f.assume("shapes of Kimi K3's vision tower and projector are counted from its fields")
    sizes = _moonvit_sizes(v) | {"text": parts.hidden}
    layers = v.integer("vt_num_hidden_layers", "num_hidden_layers", default=27, high=2048)
    fill(t, towers.MOONVIT_K3, sizes, "vision_tower.", layers)
    fill(t, "proj.0 w merged,merged\nproj.2 w text,merged\npost_norm w text", sizes, "mm_projector.")
    return wrap(parts, BESIDE, t)


@architecture("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLForConditionalGeneration", "minimax_m3_vl")
def minimax_m3_vl(f: Fields, dtype: str) -> Parts:
    """MiniMax-M3 with images."""
    parts, t, v = text_parts(f, dtype, "MiniMaxM3ForCausalLM"), vision_table(dtype), f.sub("vision_config")
    sizes = vit(v, 1280, 16, 5120, 14)
    folding = v.sub("img_token_compression_config")
    holder = folding if folding.raw else v
    merge = holder.integer("spatial_merge_size", default=2)
    sizes["frames"] = holder.integer("temporal_patch_size", default=2)
    fill(t, towers.MINIMAX_M3, sizes, "vision_tower.vision_model.", depth(v, 32))
    mid = f.integer("projector_hidden_size", default=parts.hidden)
    sizes |= {"mid": mid, "out": parts.hidden, "joined": parts.hidden * merge**2}
    rows = """
        multi_modal_projector.linear_1 wb mid,h
        multi_modal_projector.linear_2 wb out,mid
        patch_merge_mlp.linear_1 wb mid,joined
        patch_merge_mlp.linear_2 wb out,mid
    """
    fill(t, rows, sizes)
    return wrap(parts, BESIDE, t)


@architecture("Step3p7ForConditionalGeneration", "step3p7")
def step3p7(f: Fields, dtype: str) -> Parts:
    """Step-3.7 with images; a configuration without a vision part is read as text."""
    parts, t = text_parts(f, dtype, "Step3p7FlashForCausalLM"), vision_table(dtype)
    if not f.has("vision_config"):
        return parts
    v = f.sub("vision_config")
    h, heads = v.integer("hidden_size", "width", default=1536), v.integer("num_attention_heads", "heads", default=16)
    sizes = vit(v, h, heads, 1, 14, 728)
    _, ratio = v.get("mlp_ratio")
    ratio = ratio if isinstance(ratio, int | float) and 0 < ratio < 64 else 8960 / 1536
    a = units(heads, max(1, h // heads))
    sizes |= {"h": h, "a": a, "a3": (a, a, a), "m": units(int(h * ratio)), "h2": 2 * h, "h4": 4 * h}
    layers = v.integer("num_hidden_layers", "layers", default=47, high=2048)
    fill(t, towers.STEP3, sizes, "vision_model.", layers)
    bias = "wb" if f.flag("projector_bias") else "w"
    fill(t, f"vit_large_projector {bias} text,h4", sizes | {"text": parts.hidden})
    return wrap(parts, PLAIN, t)


def _whisper(t: Table, a: Fields) -> int:
    h = a.integer("hidden_size", "d_model", default=1280)
    heads = a.integer("num_attention_heads", "encoder_attention_heads", default=20)
    sizes: Sizes = {
        "h": h,
        "a": units(heads, max(1, h // heads)),
        "m": units(a.integer("intermediate_size", "encoder_ffn_dim", default=5120)),
        "mels": a.integer("num_mel_bins", default=128),
        "tokens": a.integer("max_source_positions", default=1500),
    }
    layers = a.integer("num_hidden_layers", "encoder_layers", default=32, high=2048)
    fill(t, towers.WHISPER, sizes, "audio_tower.", layers)
    return h


@architecture("Qwen2AudioForConditionalGeneration", "qwen2_audio")
def qwen2_audio(f: Fields, dtype: str) -> Parts:
    """Qwen2-Audio: Whisper encoder, one projection."""
    parts, t = text_parts(f, dtype, "Qwen2ForCausalLM"), vision_table(dtype)
    sizes: Sizes = {"h": _whisper(t, f.sub("audio_config")), "text": parts.hidden}
    fill(t, "multi_modal_projector.linear wb text,h", sizes)
    return wrap(parts, BESIDE, t)


@architecture("VoxtralForConditionalGeneration", "voxtral")
def voxtral(f: Fields, dtype: str) -> Parts:
    """Voxtral: Whisper encoder, four frames joined, two projections."""
    parts, t, a = text_parts(f, dtype, "LlamaForCausalLM"), vision_table(dtype), f.sub("audio_config")
    _whisper(t, a)
    sizes: Sizes = {"m": a.integer("intermediate_size", default=5120), "text": parts.hidden}
    fill(t, "multi_modal_projector.linear_1 w text,m\nmulti_modal_projector.linear_2 w text,text", sizes)
    return wrap(parts, BESIDE, t)

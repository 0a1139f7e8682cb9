"""Wrappers around a SigLIP tower: PaliGemma, LLaVA-OneVision, Aya Vision, Command A Vision, LFM2-VL."""

from __future__ import annotations

from meshwright.specs.hf import towers
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table
from meshwright.specs.hf.towers import Sizes, fill
from meshwright.specs.hf.vision import BESIDE, INSIDE, depth, siglip, text_parts, vision_table, vit, wrap


def _head(v: Fields) -> bool:
    return v.flag("vision_use_head", default=True)


@architecture("PaliGemmaForConditionalGeneration", "paligemma")
def paligemma(f: Fields, dtype: str) -> Parts:
    """PaliGemma 1 and 2: one projection."""
    parts, t, v = text_parts(f, dtype, tied=True), vision_table(dtype), f.sub("vision_config")
    out = f.integer("projection_dim", default=v.integer("projection_dim", default=parts.hidden))
    sizes: Sizes = {"h": siglip(t, v, "vision_tower.", head=_head(v)), "out": out}
    fill(t, "multi_modal_projector.linear wb out,h", sizes)
    return wrap(parts, BESIDE, t)


@architecture("LlavaOnevisionForConditionalGeneration", "llava_onevision")
def llava_onevision(f: Fields, dtype: str) -> Parts:
    """LLaVA-OneVision: two projections and the row separator of images in tiles."""
    parts, t, v = text_parts(f, dtype), vision_table(dtype), f.sub("vision_config")
    kind = "wb" if f.flag("multimodal_projector_bias", default=True) else "w"
    sizes: Sizes = {"h": siglip(t, v, "vision_tower.", head=_head(v)), "out": parts.hidden}
    fill(t, f"linear_1 {kind} out,h\nlinear_2 {kind} out,out", sizes, "multi_modal_projector.")
    fill(t, "image_newline - out", sizes)
    return wrap(parts, BESIDE, t)


def _shuffled(f: Fields, width: int) -> int:
    """Channels after neighbouring patches are joined."""
    return width * f.integer("downsample_factor", default=2, high=64) ** 2


@architecture("AyaVisionForConditionalGeneration", "aya_vision")
def aya_vision(f: Fields, dtype: str) -> Parts:
    """Aya Vision: patches joined, a norm, a gated pair of projections."""
    parts, t, v = text_parts(f, dtype, tied=True), vision_table(dtype), f.sub("vision_config")
    width = siglip(t, v, "vision_tower.", head=_head(v))
    mid = f.integer("alignment_intermediate_size", default=parts.hidden)
    sizes: Sizes = {"joined": _shuffled(f, width), "mid": mid, "half": max(1, mid // 2), "out": parts.hidden}
    rows = "layernorm wb joined\nlinear_1 wb mid,joined\nlinear_2 wb out,half"
    fill(t, rows, sizes, "multi_modal_projector.")
    return wrap(parts, BESIDE, t)


@architecture("Cohere2VisionForConditionalGeneration", "cohere2_vision")
def cohere2_vision(f: Fields, dtype: str) -> Parts:
    """Command A Vision: as Aya Vision without the norm."""
    parts, t, v = text_parts(f, dtype, tied=True), vision_table(dtype), f.sub("vision_config")
    width = siglip(t, v, "model.vision_tower.", head=_head(v))
    mid = f.integer("alignment_intermediate_size", default=36864)
    sizes: Sizes = {"joined": _shuffled(f, width), "mid": mid, "half": max(1, mid // 2), "out": parts.hidden}
    fill(t, "linear_1 wb mid,joined\nlinear_2 wb out,half", sizes, "model.multi_modal_projector.")
    return wrap(parts, INSIDE, t)


def _siglip2(t: Table, v: Fields, prefix: str) -> int:
    """SigLIP 2 of any aspect ratio: patches come flat, positions are resampled from ``num_patches``."""
    sizes = vit(v, 768, 12, 3072, 16)
    sizes |= {"tokens": v.integer("num_patches", default=256), "pixels": sizes["c"] * sizes["p"] ** 2}
    rows = towers.SIGLIP.replace("embeddings.patch_embedding wb h,c,p,p", "embeddings.patch_embedding wb h,pixels")
    fill(t, rows, sizes, prefix, depth(v, 12))
    if _head(v):
        fill(t, towers.SIGLIP_HEAD, sizes, prefix)
    return int(sizes["h"])


@architecture("Lfm2VlForConditionalGeneration", "lfm2_vl")
def lfm2_vl(f: Fields, dtype: str) -> Parts:
    """LFM2-VL."""
    parts, t, v = text_parts(f, dtype, "Lfm2ForCausalLM", tied=True), vision_table(dtype), f.sub("vision_config")
    width, mid = _siglip2(t, v, "model.vision_tower."), f.integer("projector_hidden_size", default=2560)
    kind = "wb" if f.flag("projector_bias", default=True) else "w"
    rows = f"linear_1 {kind} mid,joined\nlinear_2 {kind} out,mid"
    if f.flag("projector_use_layernorm", default=True):
        rows += "\nlayer_norm wb joined"
    sizes: Sizes = {"joined": _shuffled(f, width), "mid": mid, "out": parts.hidden}
    fill(t, rows, sizes, "model.multi_modal_projector.")
    return wrap(parts, INSIDE, t)

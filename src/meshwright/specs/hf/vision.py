"""Multimodal wrappers: the text part read by its own reader and renamed, the encoder and projector counted.

The wrapper renames the tensors of the text part, so that no text reader knows of wrappers. Encoder tensors are of
section ``vision``; what each wrapper stores is data in ``towers``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.errors import InputError
from meshwright.specs.hf import towers
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.registry import Parts, architecture, find_reader, names_of, read_parts
from meshwright.specs.hf.table import Table
from meshwright.specs.hf.towers import Sizes, fill, units
from meshwright.specs.tensors import Dim, Segment

TEXT_KEYS = ("text_config", "llm_config", "language_config")

#: Where the text part hangs: pairs of (name as the text reader writes it, name in the wrapper), first match wins.
INSIDE = (("model.", "model.language_model."),)
BESIDE = (("", "language_model."),)
TEXT_MODEL = (("model.", "model.text_model."),)
PLAIN: tuple[tuple[str, str], ...] = ()

#: Class defaults of text parts that published wrappers state only in part.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
}


def text_fields(f: Fields, tied: bool) -> Fields:
    """The configuration of the text part; it lies at the top in some older files.

    ``tie_word_embeddings`` is the wrapper's where it states one, else the text part's, else ``tied``.
    """
    text = f.sub(*TEXT_KEYS) if f.has(*TEXT_KEYS) else f
    defaults = _DEFAULTS.get(text.text("model_type"), {})
    raw = {**defaults, **{k: v for k, v in text.raw.items() if v is not None}}
    if f.has("tie_word_embeddings"):
        raw["tie_word_embeddings"] = f.raw["tie_word_embeddings"]
    raw.setdefault("tie_word_embeddings", tied)
    return Fields(raw, text.where, f.assumed)


def text_parts(f: Fields, dtype: str, *readers: str, tied: bool = False) -> Parts:
    """Read the text part with the first reader known of ``readers``, or by its own names.

    Raises:
        InputError: the wrapper takes any text model and names none, or names a wrapper.
    """
    text = text_fields(f, tied)
    own = names_of(text) if f.has(*TEXT_KEYS) else ()
    reader = find_reader(*readers, *own)
    if reader is None and not f.has(*TEXT_KEYS):
        raise InputError(f"{f.where}: text_config is missing; it must describe the language model")
    if not readers and text.has(*TEXT_KEYS):
        raise InputError(f"{text.where}: a wrapper inside a wrapper is not read; text_config must be a text model")
    return reader(text, dtype) if reader else read_parts(text, dtype)


def wrap(parts: Parts, names: tuple[tuple[str, str], ...], t: Table) -> Parts:
    """Rename the text part's tensors and add the encoder's."""
    families = tuple(replace(family, template=_renamed(family.template, names)) for family in parts.families)
    return replace(parts, families=(*families, *t.families))


def _renamed(name: str, names: tuple[tuple[str, str], ...]) -> str:
    for old, new in names:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def side(f: Fields, name: str, default: int) -> int:
    """A number, or the first of a pair (image and patch sizes)."""
    _, value = f.get(name)
    if isinstance(value, list | tuple):
        return (f.integers(name, low=1) or (default,))[0]
    return f.integer(name, default=default)


def vit(v: Fields, hidden: int, heads: int, intermediate: int, patch: int, image: int = 0) -> dict[str, Any]:
    """Sizes of a vision transformer by the usual keys, with the class defaults given."""
    h = v.integer("hidden_size", default=hidden)
    n = v.integer("num_attention_heads", "num_heads", "attention_heads", default=heads)
    width = v.integer("head_dim", default=max(1, h // n))
    p = side(v, "patch_size", patch)
    grid = side(v, "image_size", image or p) // p
    return {
        "h": h,
        "a": units(n, width),
        "a3": (units(n, width),) * 3,
        "m": units(v.integer("intermediate_size", default=intermediate)),
        "p": p,
        "c": v.integer("num_channels", "in_channels", default=3),
        "tokens": grid * grid,
        "grid": grid,
    }


def vision_table(dtype: str) -> Table:
    """An empty table of section ``vision``."""
    return Table(dtype, section="vision")


def depth(v: Fields, default: int) -> int:
    """Layers of an encoder."""
    return v.integer("num_hidden_layers", "depth", default=default, high=2048)


def _clip(t: Table, v: Fields, prefix: str) -> int:
    sizes = vit(v, 768, 12, 3072, 32, 224)
    sizes["tokens"] += 1
    fill(t, towers.CLIP, sizes, prefix, depth(v, 12))
    return int(sizes["h"])


def siglip(t: Table, v: Fields, prefix: str, *, head: bool = False, patch: int = 16) -> int:
    """A SigLIP tower under ``prefix``, with its pooling ``head`` where kept; returns its width."""
    sizes = vit(v, 768, 12, 3072, patch, 224)
    fill(t, towers.SIGLIP, sizes, prefix, depth(v, 12))
    if head:
        fill(t, towers.SIGLIP_HEAD, sizes, prefix)
    return int(sizes["h"])


def _pixtral(t: Table, v: Fields, prefix: str) -> int:
    sizes = vit(v, 1024, 16, 4096, 16)
    fill(t, towers.PIXTRAL, sizes, prefix, depth(v, 24))
    return int(sizes["h"])


def _tower(t: Table, v: Fields, prefix: str) -> int:
    """The tower of a LLaVA-like wrapper by its model type; returns its width."""
    kind = v.text("model_type", default="clip_vision_model")
    if kind == "pixtral":
        return _pixtral(t, v, prefix)
    if kind.startswith("siglip"):
        return siglip(t, v, prefix, head=v.flag("vision_use_head", default=True))
    if not kind.startswith("clip"):
        v.assume(f"vision tower of type {kind[:30]!r} is not known; it is counted as CLIP")
    return _clip(t, v, prefix)


def _feature_layers(f: Fields) -> int:
    _, value = f.get("vision_feature_layer")
    return max(1, len(value)) if isinstance(value, list | tuple) and len(value) < 64 else 1


@architecture(
    "LlavaForConditionalGeneration",
    "llava",
    "LlavaNextForConditionalGeneration",
    "llava_next",
    "LlavaNextVideoForConditionalGeneration",
    "llava_next_video",
    "VipLlavaForConditionalGeneration",
)
def llava(f: Fields, dtype: str) -> Parts:
    """LLaVA 1.5, LLaVA-NeXT and Pixtral in LLaVA's form: tower, two-layer projector."""
    parts, t = text_parts(f, dtype), vision_table(dtype)
    width = _tower(t, f.sub("vision_config"), "vision_tower.") * _feature_layers(f)
    kind = "wb" if f.flag("multimodal_projector_bias", default=True) else "w"
    sizes: Sizes = {"h": width, "out": parts.hidden}
    fill(t, f"linear_1 {kind} out,h\nlinear_2 {kind} out,out", sizes, "multi_modal_projector.")
    if "next" in f.text("model_type"):
        fill(t, "image_newline - out", sizes)
    return wrap(parts, BESIDE, t)


@architecture("Mistral3ForConditionalGeneration", "mistral3")
def mistral3(f: Fields, dtype: str) -> Parts:
    """Mistral Small 3.1 and later: Pixtral tower, patch merger, projector."""
    parts, t = text_parts(f, dtype), vision_table(dtype)
    width = _tower(t, _typed(f.sub("vision_config"), "pixtral"), "vision_tower.") * _feature_layers(f)
    merge = f.integer("spatial_merge_size", default=2, high=64)
    kind = "wb" if f.flag("multimodal_projector_bias") else "w"
    rows = f"""
        norm w h
        patch_merger.merging_layer w h,merged
        linear_1 {kind} out,h
        linear_2 {kind} out,out
    """
    sizes: Sizes = {"h": width, "merged": width * merge**2, "out": parts.hidden}
    fill(t, rows, sizes, "multi_modal_projector.")
    return wrap(parts, BESIDE, t)


def _typed(v: Fields, kind: str) -> Fields:
    return Fields({"model_type": kind, **v.raw}, v.where, v.assumed)


@architecture("Idefics3ForConditionalGeneration", "idefics3", "SmolVLMForConditionalGeneration", "smolvlm")
def idefics3(f: Fields, dtype: str) -> Parts:
    """Idefics3 and SmolVLM: SigLIP tower, pixel shuffle, one projection."""
    parts, t = text_parts(f, dtype), vision_table(dtype)
    width = siglip(t, f.sub("vision_config"), "model.vision_model.", patch=32)
    scale = f.integer("scale_factor", default=2, high=64)
    sizes: Sizes = {"merged": width * scale**2, "out": parts.hidden}
    fill(t, "model.connector.modality_projection.proj w out,merged", sizes)
    return wrap(parts, TEXT_MODEL, t)


@architecture("InternVLForConditionalGeneration", "internvl")
def internvl(f: Fields, dtype: str) -> Parts:
    """InternVL 3 in the transformers form."""
    parts, t, v = text_parts(f, dtype, tied=True), vision_table(dtype), f.sub("vision_config")
    sizes = vit(v, 1024, 16, 4096, 14, 448)
    sizes["tokens"] += 1
    rows, layers, bias = towers.INTERNVL, depth(v, 24), v.flag("attention_bias")
    norm = v.flag("use_qk_norm")
    for leaf in "qkv":
        rows += f"\nencoder.layer.{{layer}}.attention.{leaf}_proj {'wb' if bias else 'w'} a,h"
    if norm:
        rows += "\nencoder.layer.{layer}.attention.q_norm w h\nencoder.layer.{layer}.attention.k_norm w h"
    fill(t, rows, sizes, "vision_tower.", layers)
    _, ratio = f.get("downsample_ratio")
    shuffle = round(1 / ratio) if isinstance(ratio, int | float) and 0.01 < ratio <= 1 else 2
    joined: Sizes = {"merged": sizes["h"] * shuffle**2, "out": parts.hidden}
    projector = "layer_norm wb merged\nlinear_1 wb out,merged\nlinear_2 wb out,out"
    fill(t, projector, joined, "multi_modal_projector.")
    return wrap(parts, BESIDE, t)


@architecture("Gemma3ForConditionalGeneration", "gemma3")
def gemma3(f: Fields, dtype: str) -> Parts:
    """Gemma 3 with images: SigLIP tower, one projection."""
    parts, t = text_parts(f, dtype, "gemma3_text", tied=True), vision_table(dtype)
    v = f.sub("vision_config")
    width = siglip(t, v, "vision_tower.", head=v.flag("vision_use_head", default=True))
    sizes: Sizes = {"h": width, "out": parts.hidden}
    fill(t, "mm_input_projection_weight - h,out\nmm_soft_emb_norm w h", sizes, "multi_modal_projector.")
    return wrap(parts, BESIDE, t)


@architecture("Gemma3nForConditionalGeneration", "gemma3n")
def gemma3n(f: Fields, dtype: str) -> Parts:
    """Gemma 3n: the text part; its image encoder is a timm model and its encoders are not counted."""
    f.assume("the image and audio encoders of Gemma 3n (about 1 billion parameters) are not counted")
    return wrap(text_parts(f, dtype, "gemma3n_text", tied=True), INSIDE, vision_table(dtype))


def _clipped(rows: str) -> str:
    """Four scalars beside every ``.linear`` row."""
    names = [line.split()[0].removesuffix(".linear") for line in rows.splitlines() if ".linear " in line]
    return "\n".join(f"{name}.{leaf} - ()" for name in names for leaf in towers.CLIPPED)


def _gemma4_vision(t: Table, v: Fields, out: int) -> None:
    sizes = vit(v, 768, 12, 3072, 16)
    heads = v.integer("num_attention_heads", default=12)
    d = v.integer("head_dim", default=64)
    kv = units(v.integer("num_key_value_heads", default=heads), d)
    sizes |= {"a": units(heads, d), "d": d, "kv": kv, "out": out, "pixels": 3 * sizes["p"] ** 2}
    sizes["tokens"] = v.integer("position_embedding_size", default=10240)
    rows = towers.GEMMA4
    if v.flag("standardize"):
        rows += "\nstd_bias - h\nstd_scale - h"
    if v.flag("use_clipped_linears"):
        rows += "\n" + _clipped(towers.GEMMA4)
    fill(t, rows, sizes, "model.vision_tower.", depth(v, 16))
    fill(t, "model.embed_vision.embedding_projection w out,h", sizes)


def _gemma4_audio(t: Table, a: Fields, out: int) -> None:
    h, heads = a.integer("hidden_size", default=1024), a.integer("num_attention_heads", default=8)
    d = max(1, h // heads)
    c0, c1 = (a.integers("subsampling_conv_channels", length=2, low=1) or (128, 32))[:2]
    wide = a.integer("output_proj_dims", default=1536)
    sizes: dict[str, int | Segment | Dim] = {
        "h": h,
        "h2": 2 * h,
        "h4": 4 * h,
        "d": d,
        "a": units(heads, d),
        "c0": c0,
        "c1": c1,
        "folded": c1 * (c0 // 4),
        "kernel": a.integer("conv_kernel_size", default=5),
        "out": wide,
    }
    rows = towers.GEMMA4_AUDIO
    if a.flag("use_clipped_linears", default=True):
        rows += "\n" + _clipped(towers.GEMMA4_AUDIO)
    fill(t, rows, sizes, "model.audio_tower.", depth(a, 12))
    fill(t, "model.embed_audio.embedding_projection w text,out", {**sizes, "text": out})


@architecture("Gemma4ForConditionalGeneration", "gemma4")
def gemma4(f: Fields, dtype: str) -> Parts:
    """Gemma 4 with images, and audio where the configuration has an audio encoder."""
    parts, t = text_parts(f, dtype, "gemma4_text", tied=True), vision_table(dtype)
    if f.has("vision_config"):
        _gemma4_vision(t, f.sub("vision_config"), parts.hidden)
    if f.has("audio_config"):
        _gemma4_audio(t, f.sub("audio_config"), parts.hidden)
    return wrap(parts, INSIDE, t)

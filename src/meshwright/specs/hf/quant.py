"""Quantized checkpoints: turn the families of the plain model into what the checkpoint stores.

Every linear layer takes the scheme of the first rule that names it; a family whose layers differ is split.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from meshwright.errors import InputError
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.quant_config import read_recipe
from meshwright.specs.hf.quant_fields import Recipe, dominant
from meshwright.specs.hf.schemes import Scheme, apply, is_fused, unfused
from meshwright.specs.model import Quantization
from meshwright.specs.tensors import Segment, TensorFamily

#: Parts of the model whose matrices a rule covers without naming them.
_COVERED = frozenset({"attention", "recurrent", "indexer", "mlp", "expert", "shared_expert"})


#: Seconds that matching all module names may take; the longest known list (22,422 names) takes 0.1.
BUDGET_S = 10.0


def quantize(
    families: tuple[TensorFamily, ...], f: Fields, text: Fields, hf_quant: Mapping[str, Any] | None, dtype: str
) -> tuple[tuple[TensorFamily, ...], Quantization | None]:
    """Apply ``quantization_config`` (of the model or of its text part) or modelopt's ``hf_quant_config.json``.

    Args:
        families: tensor table of the plain model.
        f, text: configuration, and its text part (empty for a plain text model).
        hf_quant: the parsed ``hf_quant_config.json``, or None.
        dtype: compute dtype, in which some formats store their scales.

    Raises:
        InputError: the quantization configuration is malformed.
    """
    recipe = read_recipe(f, text, hf_quant, dtype)
    if recipe is None:
        return families, None
    deadline = time.monotonic() + BUDGET_S
    stored: list[TensorFamily] = []
    used: list[tuple[Scheme, int]] = []
    for family in families:
        if not _is_matrix(family):
            stored.append(family)
            continue
        for part, scheme in _assign(family, recipe, deadline):
            if scheme is None:
                stored.append(part)
                continue
            used.append((scheme, part.parameters))
            stored.extend(apply(part, scheme))
    stored.extend(_cache_scales(families, recipe))
    main = dominant(used)
    if main is None:
        f.assume("the quantization configuration covers no tensor of this model; sizes are unquantized")
        return families, Quantization(recipe.method, 16, kv_dtype=recipe.kv_dtype)
    return tuple(stored), Quantization(_method(recipe, main), main.bits, main.group, main.block, recipe.kv_dtype)


def _is_matrix(family: TensorFamily) -> bool:
    """Whether the tensor is the weight of a linear layer that could be quantized at all."""
    if family.part != "weight" or not family.op or family.section == "vision":
        return False
    return (len(family.dims) == 2 and family.template.endswith(".weight")) or is_fused(family)


def _assign(family: TensorFamily, recipe: Recipe, deadline: float) -> Iterator[tuple[TensorFamily, Scheme | None]]:
    """The family split by scheme; an expert stands for all experts of its layer."""
    if recipe.unfuse and is_fused(family):
        schemes = [_by_scheme(one, recipe, deadline) for one in unfused(family)]
        if any(set(s) != {None} for s in schemes):
            for one, split in zip(unfused(family), schemes, strict=True):
                yield from _parts(one, split)
            return
        yield family, None
        return
    yield from _parts(family, _by_scheme(family, recipe, deadline))


def _parts(
    family: TensorFamily, split: Mapping[Scheme | None, list[int]]
) -> Iterator[tuple[TensorFamily, Scheme | None]]:
    for scheme, layers in split.items():
        whole = len(layers) == len(family.layers)
        yield (family if whole else replace(family, layers=tuple(layers))), scheme


def _by_scheme(family: TensorFamily, recipe: Recipe, deadline: float) -> dict[Scheme | None, list[int]]:
    if not recipe.ignore and all(rule.targets is None for rule in recipe.rules):
        return {_scheme(family, "", recipe): list(family.layers)}
    module = family.template.removesuffix(".weight").replace("{expert}", "0")
    if not family.layers:
        return {_scheme(family, module, recipe): []}
    if not recipe.tells_layers:
        return {_scheme(family, module.replace("{layer}", str(family.layers[0])), recipe): list(family.layers)}
    split: dict[Scheme | None, list[int]] = {}
    for layer in family.layers:
        if time.monotonic() > deadline:
            raise InputError(f"{recipe.ignore.where}: its module lists take more than {BUDGET_S:.0f} s to match")
        split.setdefault(_scheme(family, module.replace("{layer}", str(layer)), recipe), []).append(layer)
    return split


def _scheme(family: TensorFamily, module: str, recipe: Recipe) -> Scheme | None:
    if module and recipe.ignore.match(module, family.template):
        return None
    for rule in recipe.rules:
        if rule.targets is None:
            if _covered(family, recipe):
                return rule.scheme
        elif rule.targets.match(module, family.template):
            return rule.scheme
    return None


def _covered(family: TensorFamily, recipe: Recipe) -> bool:
    if recipe.experts_only:
        return family.role == "expert"
    if family.role == "head":
        return recipe.head
    # The indexer's head weights (DeepSeek-V3.2) and the compressors of the cache (DeepSeek-V4) are not quantized.
    kept = family.template.endswith("weights_proj.weight") or family.op.startswith("compress_")
    return family.role in _COVERED and not kept


def _cache_scales(families: tuple[TensorFamily, ...], recipe: Recipe) -> Iterator[TensorFamily]:
    """Scales of an fp8 cache, beside the key and value projections."""
    if recipe.kv_scales is None:
        return
    names, shape = recipe.kv_scales
    for family in families:
        name = {"k": names[0], "v": names[1]}.get(family.op)
        if name is None or family.part != "weight" or family.role != "attention" or family.section == "vision":
            continue
        base = family.template.rsplit(".", 2)[0]
        dims = tuple((Segment("fixed", n),) for n in shape)
        yield replace(family, template=f"{base}.{name}", dims=dims, dtype="f32", part="scale", op="", elements=0)


def _method(recipe: Recipe, main: Scheme) -> str:
    """modelopt checkpoints are called by their format, the others by their method."""
    if recipe.method != "modelopt":
        return recipe.method
    if main.kind == "fp4_group":
        return "nvfp4" if main.group == 16 else "mxfp4"
    return "fp8" if main.kind.startswith("fp8") else "modelopt"

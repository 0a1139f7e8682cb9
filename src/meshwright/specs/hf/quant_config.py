"""What a quantization configuration says: which modules are stored in which scheme.

Methods: ``fp8`` and ``fbgemm_fp8`` (transformers), ``compressed-tensors``, ``modelopt``, ``gptq``, ``awq``,
``mxfp4`` (GPT-OSS), ``bitsandbytes``, ``quark``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshwright.errors import InputError
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.patterns import MAX_PATTERNS, NameList
from meshwright.specs.hf.quant_fields import (
    Recipe,
    Rule,
    bits_of,
    block_size,
    few,
    group_size,
    kv_dtype,
    name_list,
    named_rules,
    no_names,
)
from meshwright.specs.hf.schemes import Scheme


def read_recipe(f: Fields, text: Fields, hf_quant: Mapping[str, Any] | None, dtype: str) -> Recipe | None:
    """Read ``quantization_config``, or modelopt's ``hf_quant_config.json``; None when weights stay as they are.

    Raises:
        InputError: the configuration is malformed.
    """
    q = (f if f.has("quantization_config") else text).sub("quantization_config")
    if hf_quant is not None:
        beside = Fields(hf_quant, f"{f.where} (hf_quant_config.json)", f.assumed)
        return _modelopt(beside.sub("quantization"), q, f)
    method = q.text("quant_method").lower().replace("_", "-")
    if method.startswith("modelopt") or (not method and q.has("quant_algo", "quantization")):
        return _modelopt(q.sub("quantization") if q.has("quantization") else q, q, f)
    if method == "fp8" and q.has("moe_quant_algo", "quantized_layers"):
        return _modelopt(q, q, f)
    if method in _READERS:
        return _READERS[method](q, f, dtype)
    f.assume(f"quantization method {method[:40] or 'without a name'!r} is unknown; sizes are unquantized")
    return None


def _deepseek_v4(f: Fields) -> bool:
    return f.text("model_type") in ("deepseek_v4", "deepseek_ref") or "DeepseekV4ForCausalLM" in f.texts(
        "architectures"
    )


def _fp8_base(q: Fields, f: Fields) -> Scheme:
    """fp8 of transformers and DeepSeek: ``weight_scale_inv`` by block, or one scale a tensor."""
    static = q.text("activation_scheme", default="dynamic") == "static"
    block = block_size(q, "weight_block_size")
    if _deepseek_v4(f):
        # DeepSeek-V4 names its scales as its inference code does and stores powers of two.
        return Scheme("fp8_block", 8, block=block or (128, 128), scale="scale", scale_dtype="f8_e8m0")
    if block:
        return Scheme("fp8_block", 8, block=block, scale="weight_scale_inv", static=static)
    if "mistral" in f.text("model_type") or "mistral" in f.sub("text_config").text("model_type"):
        return Scheme("fp8_tensor", 8, scale="weight_scale_inv", input_scale="activation_scale", static=static)
    return Scheme("fp8_tensor", 8, static=static)


def _fp8(q: Fields, f: Fields, dtype: str) -> Recipe:
    ignore = name_list(q, "modules_to_not_convert", "ignored_layers", "ignore")
    base = Rule(None, _fp8_base(q, f))
    rules: tuple[Rule, ...] = (base,)
    if _deepseek_v4(f) and f.text("expert_dtype", default="fp4") == "fp4" and f.has("expert_dtype"):
        fp4 = Scheme("fp4_group", 4, group=32, scale="scale", scale_dtype="f8_e8m0")
        rules = (Rule(NameList(("ffn.experts", "mlp.experts"), q.where), fp4), base)
    return Recipe("fp8", rules, ignore)


def _fbgemm(q: Fields, f: Fields, dtype: str) -> Recipe:
    return Recipe("fp8", (Rule(None, Scheme("fp8_channel", 8)),), name_list(q, "modules_to_not_convert"))


#: modelopt's ``quant_algo`` -> scheme; ``group_size`` of the configuration replaces the group.
_NVFP4 = Scheme("fp4_group", 4, group=16, scale_dtype="f8_e4m3", global_scale="weight_scale_2", static=True)
MODELOPT: dict[str, Scheme] = {
    "FP8": Scheme("fp8_tensor", 8, static=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8_channel", 8),
    "FP8_PB_WO": Scheme("fp8_block", 8, block=(128, 128)),
    "FP8_PB_REAL": Scheme("fp8_block", 8, block=(128, 128)),
    "NVFP4": _NVFP4,
    "NVFP4_AWQ": _NVFP4,
    "W4A8_NVFP4_FP8": _NVFP4,
    "W4A16_NVFP4": _NVFP4._replace(static=False),
    "MXFP8": Scheme("fp8_group", 8, group=32, scale_dtype="u8"),
    "MXFP4": Scheme("fp4_group", 4, group=32, scale_dtype="u8"),
    "W4A8_MXFP4_FP8": Scheme("fp4_group", 4, group=32, scale_dtype="u8"),
    "W4A16_AWQ": Scheme("int_awq", 4, group=128),
    "INT4_AWQ": Scheme("int_awq", 4, group=128),
    "W4A8_AWQ": Scheme("int_awq", 4, group=128, static=True),
    "INT8_SQ": Scheme("int8", 8, static=True),
}


def _algorithm(q: Fields, default_group: int) -> Scheme | None:
    name = q.text("quant_algo").upper()
    if name in ("", "NONE", "MIXED_PRECISION"):
        return None
    if name not in MODELOPT:
        q.assume(f"quant_algo {name[:40]} is unknown; its modules are counted unquantized")
        return None
    scheme = MODELOPT[name]
    if not scheme.group:
        return scheme
    return scheme._replace(group=group_size(q, "group_size") or default_group or scheme.group)


def _modelopt(m: Fields, q: Fields, f: Fields) -> Recipe | None:
    """modelopt; ``m`` holds the algorithm, ``q`` the ``quantization_config`` (both may be one)."""
    group = group_size(m, "group_size")
    ignore = name_list(m, "exclude_modules", "ignore")
    rules = _layer_rules(m, group)
    scheme = _algorithm(m, group)
    if scheme is not None:
        rules.append(Rule(None, scheme))
    if q.text("quant_method") == "fp8" and not scheme:
        # DeepSeek-V4-NVFP4: experts re-quantized, everything else as in the fp8 checkpoint it came from.
        rules.append(Rule(None, _fp8_base(q, f)))
        ignore = no_names(q)
    kv = kv_dtype(m, "kv_cache_quant_algo", "kv_cache_scheme")
    if not rules:
        return None
    return Recipe(
        "modelopt",
        tuple(rules),
        ignore,
        unfuse=True,
        kv_dtype=kv,
        kv_scales=(("k_proj.k_scale", "v_proj.v_scale"), ()) if kv else None,
    )


def _layer_rules(m: Fields, group: int) -> list[Rule]:
    layers = m.sub("quantized_layers")
    if len(layers.raw) > MAX_PATTERNS:
        raise InputError(f"{m.where}: quantized_layers has {len(layers.raw)} entries; at most {MAX_PATTERNS}")
    known: dict[tuple[str, str], Scheme | None] = {}
    pairs: list[tuple[str, Scheme | None]] = []
    for name, value in layers.raw.items():
        if not isinstance(value, Mapping):
            raise InputError(f"{layers.where}: {str(name)[:60]} is not an object")
        key = (str(value.get("quant_algo")), str(value.get("group_size")))
        if key not in known:
            known[key] = _algorithm(Fields(value, layers.where, m.assumed), group)
        pairs.append((str(name), known[key]))
    return named_rules(pairs, layers.where)


def _compressed(q: Fields, f: Fields, dtype: str) -> Recipe | None:
    """compressed-tensors: groups of targets with a scheme for weights and activations."""
    rules: list[Rule] = []
    groups = q.sub("config_groups")
    few(groups)
    for name in groups.raw:
        group = groups.sub(name)
        if not group.has("weights"):
            continue
        scheme = _compressed_scheme(group, q.text("format"), dtype)
        if scheme is None:
            continue
        targets = group.texts("targets")
        by_class = not targets or any(t.isidentifier() and t[0].isupper() for t in targets)
        rules.append(Rule(None if by_class else name_list(group, "targets"), scheme))
    if not rules:
        f.assume("the compressed-tensors configuration has no group that is known; sizes are unquantized")
        return None
    kv = kv_dtype(q, "kv_cache_scheme")
    scales = (("k_scale", "v_scale"), (1,)) if kv else None
    ignore = name_list(q, "ignore")
    return Recipe("compressed-tensors", tuple(rules), ignore, head=True, unfuse=True, kv_dtype=kv, kv_scales=scales)


def _compressed_scheme(group: Fields, outer_format: str, dtype: str) -> Scheme | None:
    w, a = group.sub("weights"), group.sub("input_activations")
    form = group.text("format") or outer_format
    bits = bits_of(w, "num_bits")
    kind, size = w.text("type", default="int"), group_size(w, "group_size")
    strategy = w.text("strategy") or ("group" if size else "tensor")
    static = bool(a.raw) and not a.flag("dynamic") and a.text("strategy", default="tensor") == "tensor"
    if kind == "float" and bits == 4:
        return _compressed_fp4(size or 16, bool(a.raw))
    if kind == "float" and bits == 8:
        if strategy == "block":
            return Scheme("fp8_block", 8, block=block_size(w, "block_structure") or (128, 128), scale_dtype=dtype)
        if strategy == "group":
            mx = size == 32
            return Scheme("fp8_group", 8, group=size or 32, scale_dtype="u8" if mx else dtype)
        if strategy == "channel":
            return Scheme("fp8_channel", 8, scale_dtype=dtype, static=static, scalar=(1,))
        return Scheme("fp8_tensor", 8, scale_dtype=dtype, static=static, scalar=(1,))
    zeros = not w.flag("symmetric", default=True)
    if form == "pack-quantized" or bits < 8:
        _, order = w.get("actorder")
        reordered = order is True or order == "group"
        return Scheme("packed_int", bits, size, zeros=zeros, scale_dtype=dtype, g_idx=reordered, shape_tensor=True)
    return Scheme("int8", 8, size, zeros=zeros, scale_dtype=dtype, static=static, scalar=(1,))


def _compressed_fp4(size: int, activations: bool) -> Scheme:
    if size == 32:
        return Scheme("fp4_group", 4, group=32, weight="weight_packed", scale_dtype="u8")
    return Scheme(
        "fp4_group",
        4,
        group=size,
        weight="weight_packed",
        scale_dtype="f8_e4m3",
        global_scale="weight_global_scale",
        input_scale="input_global_scale",
        static=activations,
        scalar=(1,),
    )


def _half(dtype: str) -> str:
    return dtype if dtype in ("f16", "bf16") else "f16"


def _gptq(q: Fields, f: Fields, dtype: str) -> Recipe:
    scheme = Scheme("gptq", bits_of(q, "bits", "w_bit"), group_size(q, "group_size"), scale_dtype=_half(dtype))
    skipped: list[str] = []
    for pattern in q.sub("dynamic").raw:
        if str(pattern).startswith("-:"):
            skipped.append("re:" + str(pattern)[2:])
        else:
            q.assume("gptq: modules with bits of their own (dynamic) are counted like the others")
    ignore = NameList([*q.texts("modules_to_not_convert", "modules_in_block_to_skip"), *skipped], q.where)
    return Recipe("gptq", (Rule(None, scheme),), ignore, head=q.flag("lm_head"))


def _awq(q: Fields, f: Fields, dtype: str) -> Recipe:
    bits = bits_of(q, "bits", "w_bit", default=4)
    scheme = Scheme("awq", bits, group_size(q, "group_size", "q_group_size", default=128), scale_dtype=_half(dtype))
    return Recipe("awq", (Rule(None, scheme),), name_list(q, "modules_to_not_convert"))


def _auto_round(q: Fields, f: Fields, dtype: str) -> Recipe:
    reader = _awq if "awq" in q.text("packing_format") else _gptq
    return reader(q, f, dtype)


def _mxfp4(q: Fields, f: Fields, dtype: str) -> Recipe:
    ignore = name_list(q, "modules_to_not_convert")
    return Recipe("mxfp4", (Rule(None, Scheme("mxfp4_blocks", 4, group=32)),), ignore, experts_only=True)


def _bitsandbytes(q: Fields, f: Fields, dtype: str) -> Recipe | None:
    ignore = name_list(q, "llm_int8_skip_modules")
    if q.flag("load_in_8bit", "_load_in_8bit"):
        return Recipe("bitsandbytes", (Rule(None, Scheme("bnb8", 8)),), ignore)
    if q.flag("load_in_4bit", "_load_in_4bit"):
        scheme = Scheme("bnb4", 4, group=64, zeros=q.flag("bnb_4bit_use_double_quant"))
        return Recipe("bitsandbytes", (Rule(None, scheme),), ignore)
    return None


def _quark(q: Fields, f: Fields, dtype: str) -> Recipe | None:
    """AMD Quark: one global scheme, layers with their own, an exclude list."""
    layers = q.sub("layer_quant_config")
    if len(layers.raw) > MAX_PATTERNS:
        raise InputError(f"{layers.where} has {len(layers.raw)} entries; at most {MAX_PATTERNS} are read")
    rules = named_rules(((str(name), _quark_scheme(layers.sub(name))) for name in layers.raw), layers.where)
    if (scheme := _quark_scheme(q.sub("global_quant_config"))) is not None:
        rules.append(Rule(None, scheme))
    if not rules:
        f.assume("the quark configuration has no scheme that is known; sizes are unquantized")
        return None
    return Recipe("quark", tuple(rules), name_list(q, "exclude"), unfuse=True)


def _quark_scheme(layer: Fields) -> Scheme | None:
    w, a = layer.sub("weight"), layer.sub("input_tensors")
    kind, how = w.text("dtype"), w.text("qscheme", default="per_tensor")
    static = bool(a.raw) and not a.flag("is_dynamic") and how == "per_tensor"
    if kind.startswith("fp4"):
        return Scheme("fp4_group", 4, group=group_size(w, "group_size") or 32, scale_dtype="u8")
    if kind.startswith("fp8"):
        return Scheme("fp8_channel" if how == "per_channel" else "fp8_tensor", 8, static=static)
    return Scheme("int8", 8, static=static) if kind == "int8" else None


_READERS: dict[str, Callable[[Fields, Fields, str], Recipe | None]] = {
    "fp8": _fp8,
    "fbgemm-fp8": _fbgemm,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "quark": _quark,
}

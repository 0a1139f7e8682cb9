"""Quantized checkpoints: stored shapes by hand, lists of modules, and published sizes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.specs.hf.read import model_from_config, read_model
from meshwright.specs.hf.schemes import packed, unfused
from meshwright.specs.model import ModelSpec
from meshwright.specs.tensors import Segment, TensorFamily, expand
from tests.shared import shared_dir

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "torch_dtype": "bfloat16",
}
MOE: dict[str, Any] = BASE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
}
DOWN = "model.layers.1.mlp.down_proj"


def read(config: dict[str, Any], quant: dict[str, Any], hf_quant: dict[str, Any] | None = None) -> ModelSpec:
    full = config | ({"quantization_config": quant} if quant else {})
    return model_from_config(full, "m", "m", hf_quant)


def stored(spec: ModelSpec, module: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """The tensors of one module, by what follows its name."""
    table = expand(spec.families)
    return {n[len(module) + 1 :]: v for n, v in table.items() if n.startswith(module + ".")}


PLAIN = read(BASE, {})

#: method, quantization_config, tensors of a down projection [256, 320]
FORMATS: list[tuple[str, dict[str, Any], dict[str, tuple[tuple[int, ...], str]]]] = [
    (
        "fp8 by block",
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        {"weight": ((256, 320), "f8_e4m3"), "weight_scale_inv": ((2, 3), "f32")},
    ),
    (
        "fp8 by tensor, static",
        {"quant_method": "fp8", "activation_scheme": "static"},
        {"weight": ((256, 320), "f8_e4m3"), "weight_scale": ((), "f32"), "input_scale": ((), "f32")},
    ),
    (
        "fbgemm",
        {"quant_method": "fbgemm_fp8"},
        {"weight": ((256, 320), "f8_e4m3"), "weight_scale": ((256, 1), "f32")},
    ),
    (
        "gptq",
        {"quant_method": "gptq", "bits": 4, "group_size": 64},
        {
            "qweight": ((40, 256), "i32"),
            "qzeros": ((5, 32), "i32"),
            "scales": ((5, 256), "bf16"),
            "g_idx": ((320,), "i32"),
        },
    ),
    (
        "gptq by channel, 8 bits",
        {"quant_method": "gptq", "bits": 8, "group_size": -1},
        {
            "qweight": ((80, 256), "i32"),
            "qzeros": ((1, 64), "i32"),
            "scales": ((1, 256), "bf16"),
            "g_idx": ((320,), "i32"),
        },
    ),
    (
        "awq",
        {"quant_method": "awq", "bits": 4, "group_size": 64},
        {"qweight": ((320, 32), "i32"), "qzeros": ((5, 32), "i32"), "scales": ((5, 256), "bf16")},
    ),
    (
        "modelopt fp8",
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"weight": ((256, 320), "f8_e4m3"), "weight_scale": ((), "f32"), "input_scale": ((), "f32")},
    ),
    (
        "modelopt nvfp4",
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        {
            "weight": ((256, 160), "u8"),
            "weight_scale": ((256, 20), "f8_e4m3"),
            "weight_scale_2": ((), "f32"),
            "input_scale": ((), "f32"),
        },
    ),
    (
        "modelopt mxfp8",
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        {"weight": ((256, 320), "f8_e4m3"), "weight_scale": ((256, 10), "u8")},
    ),
    (
        "bitsandbytes nf4",
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        {
            "weight": ((256 * 160, 1), "u8"),
            "weight.absmax": ((1280,), "u8"),
            "weight.nested_absmax": ((5,), "f32"),
            "weight.nested_quant_map": ((256,), "f32"),
            "weight.quant_map": ((16,), "f32"),
        },
    ),
    (
        "bitsandbytes int8",
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"weight": ((256, 320), "i8"), "SCB": ((256,), "f32"), "weight_format": ((), "u8")},
    ),
    (
        "quark mxfp4",
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}},
        {"weight": ((256, 160), "u8"), "weight_scale": ((256, 10), "u8")},
    ),
]


@pytest.mark.parametrize(("quant", "expected"), [f[1:] for f in FORMATS], ids=[f[0] for f in FORMATS])
def test_stored_shapes(quant: dict[str, Any], expected: dict[str, tuple[tuple[int, ...], str]]) -> None:
    spec = read(BASE, quant)
    assert stored(spec, DOWN) == expected
    assert spec.parameters() == PLAIN.parameters()
    assert spec.quantization is not None
    # Norms, embedding and head stay.
    assert expand(spec.families)["lm_head.weight"] == ((64, 256), "bf16")
    assert expand(spec.families)["model.embed_tokens.weight"] == ((64, 256), "bf16")
    assert expand(spec.families)["model.layers.1.input_layernorm.weight"] == ((256,), "bf16")


def group(weights: dict[str, Any], activations: dict[str, Any] | None = None, form: str = "") -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}},
    }


DYNAMIC = {"dynamic": True, "num_bits": 8, "type": "float", "strategy": "token"}
COMPRESSED: list[tuple[str, dict[str, Any], dict[str, tuple[tuple[int, ...], str]]]] = [
    (
        "int4 groups",
        group({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, form="pack-quantized"),
        {"weight_packed": ((256, 40), "i32"), "weight_scale": ((256, 10), "bf16"), "weight_shape": ((2,), "i32")},
    ),
    (
        "int4 with zeros and order",
        group(
            {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 64,
                "symmetric": False,
                "actorder": "group",
            },
            form="pack-quantized",
        ),
        {
            "weight_packed": ((256, 40), "i32"),
            "weight_scale": ((256, 5), "bf16"),
            "weight_shape": ((2,), "i32"),
            "weight_zero_point": ((32, 5), "i32"),
            "weight_g_idx": ((320,), "i32"),
        },
    ),
    (
        "fp8 by channel, dynamic",
        group({"num_bits": 8, "type": "float", "strategy": "channel"}, DYNAMIC, "float-quantized"),
        {"weight": ((256, 320), "f8_e4m3"), "weight_scale": ((256, 1), "bf16")},
    ),
    (
        "fp8 by tensor, static",
        group(
            {"num_bits": 8, "type": "float", "strategy": "tensor"},
            {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
            "float-quantized",
        ),
        {"weight": ((256, 320), "f8_e4m3"), "weight_scale": ((1,), "bf16"), "input_scale": ((1,), "f32")},
    ),
    (
        "fp8 by block",
        group({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}, DYNAMIC),
        {"weight": ((256, 320), "f8_e4m3"), "weight_scale": ((2, 3), "bf16")},
    ),
    (
        "int8 by channel",
        group({"num_bits": 8, "type": "int", "strategy": "channel"}, DYNAMIC | {"type": "int"}, "int-quantized"),
        {"weight": ((256, 320), "i8"), "weight_scale": ((256, 1), "bf16")},
    ),
    (
        "nvfp4",
        group({"num_bits": 4, "type": "float", "group_size": 16}, {"num_bits": 4}, "nvfp4-pack-quantized"),
        {
            "weight_packed": ((256, 160), "u8"),
            "weight_scale": ((256, 20), "f8_e4m3"),
            "weight_global_scale": ((1,), "f32"),
            "input_global_scale": ((1,), "f32"),
        },
    ),
    (
        "mxfp4",
        group({"num_bits": 4, "type": "float", "group_size": 32}, None, "mxfp4-pack-quantized"),
        {"weight_packed": ((256, 160), "u8"), "weight_scale": ((256, 10), "u8")},
    ),
]


@pytest.mark.parametrize(("quant", "expected"), [f[1:] for f in COMPRESSED], ids=[f[0] for f in COMPRESSED])
def test_compressed_tensors(quant: dict[str, Any], expected: dict[str, tuple[tuple[int, ...], str]]) -> None:
    spec = read(BASE, quant)
    assert stored(spec, DOWN) == expected
    assert spec.parameters() == PLAIN.parameters()
    assert expand(spec.families)["lm_head.weight"] == ((64, 256), "bf16")


def test_compressed_tensors_covers_the_head_unless_it_is_ignored() -> None:
    quant = group({"num_bits": 8, "type": "float", "strategy": "channel"}) | {"ignore": []}
    assert expand(read(BASE, quant).families)["lm_head.weight"] == ((64, 256), "f8_e4m3")


def test_gpt_oss_blocks() -> None:
    spec = read_model("gpt-oss-20b")
    table = expand(spec.families)
    base = "model.layers.3.mlp.experts."
    assert table[base + "gate_up_proj_blocks"] == ((32, 5760, 90, 16), "u8")
    assert table[base + "gate_up_proj_scales"] == ((32, 5760, 90), "u8")
    assert table[base + "gate_up_proj_bias"] == ((32, 5760), "bf16")
    assert table[base + "down_proj_blocks"] == ((32, 2880, 90, 16), "u8")
    assert table["model.layers.3.self_attn.q_proj.weight"] == ((4096, 2880), "bf16")
    assert "model.layers.3.mlp.experts.gate_up_proj" not in table


def test_router_norms_and_head_are_never_covered_unless_named() -> None:
    spec = read(MOE, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    table = expand(spec.families)
    assert table["model.layers.0.mlp.gate.weight"][1] == "bf16"
    assert table["model.layers.2.mlp.experts.3.up_proj.weight"] == ((128, 256), "f8_e4m3")
    assert table["model.layers.2.mlp.experts.3.up_proj.weight_scale_inv"] == ((1, 2), "f32")


def test_mixed_precision_by_layer_lists() -> None:
    quant = {
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": "FP8",
            "quantized_layers": {
                "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
                "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
                "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
            },
        }
    }
    spec = read(MOE, {}, quant)
    table = expand(spec.families)
    assert table["model.layers.0.mlp.experts.1.up_proj.weight"] == ((128, 128), "u8")
    assert table["model.layers.1.mlp.experts.1.up_proj.weight"] == ((128, 256), "bf16")
    assert table["model.layers.0.self_attn.q_proj.weight"][1] == "f8_e4m3"
    assert table["model.layers.0.self_attn.k_proj.weight"][1] == "bf16"
    assert table["model.layers.0.self_attn.k_proj.k_scale"] == ((), "f32")
    assert table["lm_head.weight"] == ((64, 128), "u8")
    assert "lm_head.input_scale" not in table
    assert spec.quantization is not None
    assert (spec.quantization.method, spec.quantization.kv_dtype) == ("nvfp4", "f8_e4m3")


def test_labels_survive_packing_so_that_tensor_parallelism_can_still_cut() -> None:
    spec = read(BASE, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    o = next(f for f in spec.families if f.op == "o" and f.part == "weight")
    assert o.dims[1] == (Segment("heads", 4, 32),)
    scale = next(f for f in spec.families if f.op == "o" and f.part == "scale")
    assert scale.dims[1] == (Segment("heads", 4, 4),)
    block = read(BASE, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    scale = next(f for f in block.families if f.op == "o" and f.part == "scale")
    # Two heads of 64 share a block: the scale can be cut in two, not in four.
    assert scale.dims[1] == (Segment("heads", 2, 1),)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(1, 300)), min_size=1, max_size=3),
    st.sampled_from([2, 8, 16, 32, 128]),
    st.sampled_from([1, 3, 4]),
)
def test_packed_sizes_add_up(segments: list[tuple[int, int]], by: int, times: int) -> None:
    dim = tuple(Segment("mlp", units, width) for units, width in segments)
    total = sum(s.size for s in dim) * times
    assert sum(s.size for s in packed(dim, by, times)) == -(-total // by)


def test_unfused_experts() -> None:
    inner, model = (Segment("expert_mlp", 48), Segment("expert_mlp", 48)), (Segment("model", 32),)
    fused = TensorFamily(
        "x.experts.gate_up_proj", ((Segment("experts", 4),), inner, model), "bf16", "expert", "gate_up"
    )
    gate, up = unfused(fused)
    assert (gate.template, gate.shape, gate.experts) == ("x.experts.{expert}.gate_proj.weight", (48, 32), 4)
    assert (up.template, up.shape) == ("x.experts.{expert}.up_proj.weight", (48, 32))
    down = TensorFamily("x.experts.down_proj", ((Segment("experts", 4),), model, inner[:1]), "bf16", "expert", "down")
    assert [(d.template, d.shape) for d in unfused(down)] == [("x.experts.{expert}.down_proj.weight", (32, 48))]


@pytest.mark.parametrize(
    "quant",
    [
        {"quant_method": "gptq", "bits": 5},
        {"quant_method": "gptq"},
        {"quant_method": "gptq", "bits": "four"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "fp8", "modules_to_not_convert": [1, 2]},
        {"quant_method": "fp8", "modules_to_not_convert": "lm_head"},
        {"quant_method": "fp8", "modules_to_not_convert": ["re:["]},
        {"quant_method": "fp8", "modules_to_not_convert": ["x" * 1000]},
        {"quant_method": "modelopt", "quant_algo": 3},
        {"quant_method": "modelopt", "quantized_layers": {"a": 1}},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": -4}}}},
        {"quant_method": "compressed-tensors", "config_groups": []},
        {"quant_method": ["fp8"]},
    ],
)
def test_malformed_configurations_are_one_line(quant: dict[str, Any]) -> None:
    with pytest.raises(InputError) as error:
        read(BASE, quant)
    assert "\n" not in str(error.value)


def test_unknown_method_is_said() -> None:
    spec = read(BASE, {"quant_method": "aqlm"})
    assert spec.quantization is None
    assert any("aqlm" in sentence for sentence in spec.assumptions)
    assert spec.weight_bytes() == PLAIN.weight_bytes()


#: Bytes of whole published checkpoints (the index's total_size, or the sum of the files), relative tolerance.
PUBLISHED = [
    ("deepseek-v3", 688_586_727_753, 2e-5),
    ("gpt-oss-120b", 65_248_815_744, 0),
    ("gpt-oss-20b", 13_761_264_768, 0),
    ("qwen2.5-7b-instruct-awq", 5.57e9, 3e-3),
    ("qwen2.5-72b-instruct-awq", 41.6e9, 3e-3),
]


@pytest.mark.parametrize(("name", "total_bytes", "tolerance"), PUBLISHED)
def test_published_sizes(name: str, total_bytes: float, tolerance: float) -> None:
    assert read_model(name).weight_bytes() == pytest.approx(total_bytes, rel=tolerance)


@pytest.mark.parametrize("method", ["modelopt", "fp8"])
def test_shared_configurations_keep_their_parameters(method: str) -> None:
    from meshwright.specs.hf.resolve import parse

    folder = shared_dir("configs")
    stem = {"modelopt": "nvidia--Qwen3-235B-A22B-NVFP4", "fp8": "Qwen--Qwen3-235B-A22B-FP8"}[method]
    path = folder / f"{stem}_config.json"
    assert parse(path.read_bytes(), path.name)
    assert read_model(str(path)).parameters() == read_model("qwen3-235b-a22b").parameters()

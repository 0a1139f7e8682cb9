"""Latent-attention readers and DeepSeek-V4 write the names and shapes that transformers writes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.specs.hf.read import model_from_config
from meshwright.specs.model import Attention, ModelSpec
from meshwright.specs.tensors import expand
from tests.specs.hf.moe_oracle import EXPERTS, LATENT, SIZES, decoder_of, matches
from tests.specs.hf.oracle import assert_same, save_small

DEEP = {**SIZES, **EXPERTS, **LATENT, "n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1}
GROUPS = {"n_group": 1, "topk_group": 1}
SELECTOR = {"index_n_heads": 2, "index_head_dim": 12, "index_topk": 4}
DENSE = {**SIZES, **LATENT}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v2", DEEP),
    ("deepseek_v2", {**DEEP, "q_lora_rank": None, "attention_bias": True}),
    ("deepseek_v3", {**DEEP, **GROUPS}),
    ("deepseek_v3", {**DEEP, **GROUPS, "q_lora_rank": None, "tie_word_embeddings": True}),
    ("deepseek_v3", {**DEEP, **GROUPS, "attention_bias": True}),
    ("deepseek_v32", {**DEEP, **GROUPS, **SELECTOR}),
    ("glm_moe_dsa", {**DEEP, **GROUPS, **SELECTOR}),
    ("glm_moe_dsa", {**DEEP, **GROUPS, **SELECTOR, "indexer_types": ["full", "shared", "full"]}),
    ("glm4_moe_lite", {**DEEP, **GROUPS}),
    ("axk1", {**DEEP, **GROUPS}),
    ("hy_v4", {**DEEP, **GROUPS, **SELECTOR, "indexer_types": ["full", "shared", "full"]}),
    ("youtu", DENSE),
    ("minicpm3", {**DENSE, "tie_word_embeddings": False}),
]


@pytest.mark.parametrize(("model_type", "config"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)])
def test_equals_transformers(model_type: str, config: dict[str, Any]) -> None:
    matches(model_type, extra={"num_nextn_predict_layers": 0}, **config)


def test_longcat_equals_transformers() -> None:
    sizes = {k: v for k, v in {**SIZES, **LATENT}.items() if k not in ("num_hidden_layers", "intermediate_size")}
    moe = {"ffn_hidden_size": 40, "expert_ffn_hidden_size": 24, "n_routed_experts": 4, "moe_topk": 2}
    spec = matches("longcat_flash", **sizes, **moe, num_layers=2, zero_expert_num=0, head_dim=4)
    assert [len(layer.mixers) for layer in spec.layers] == [2, 2]
    assert [len(layer.ffns) for layer in spec.layers] == [3, 3]


def test_longcat_scores_experts_without_weights() -> None:
    config = {**SIZES, **LATENT, "model_type": "longcat_flash", "dtype": "bfloat16", "num_layers": 1}
    moe = {"ffn_hidden_size": 40, "expert_ffn_hidden_size": 24, "n_routed_experts": 4, "moe_topk": 2}
    names = expand(model_from_config({**config, **moe, "zero_expert_num": 2}, "longcat", "test").families)
    assert names["model.layers.0.mlp.router.classifier.weight"][0] == (6, 32)
    assert "model.layers.0.mlp.experts.4.up_proj.weight" not in names


def test_mistral4_equals_transformers() -> None:
    import torch
    from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING["mistral4"](**DEEP, **GROUPS, qk_head_dim=12, head_dim=12)
    model = Mistral4ForCausalLM._from_config(config, dtype=torch.bfloat16)
    ours = decoder_of(model_from_config(config.to_dict() | {"dtype": "bfloat16"}, "mistral4", "test"))
    assert_same(ours, {name: (tuple(p.shape), "bf16") for name, p in model.state_dict().items()})


V4 = {
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "vocab_size": 96,
    "num_attention_heads": 4,
    "moe_intermediate_size": 24,
    "head_dim": 16,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "o_groups": 2,
    "o_lora_rank": 12,
    "index_n_heads": 2,
    "index_head_dim": 6,
    "index_topk": 4,
    "compress_ratios": [0, 128, 4, 128, 4],
    "num_hash_layers": 2,
    "sliding_window": 8,
    "pad_token_id": 0,
}


def test_deepseek_v4_equals_transformers() -> None:
    spec = matches("deepseek_v4", **V4)
    attention = [a for layer in spec.layers if (a := layer.attention)]
    assert [a.compress_ratio for a in attention] == [1, 128, 4, 128, 4]
    assert [a.indexer.topk if a.indexer else 0 for a in attention] == [0, 0, 4, 0, 4]
    assert {(a.kv_heads, a.head_dim, a.v_head_dim, a.window, a.sinks) for a in attention} == {(1, 16, 0, 8, True)}


def test_deepseek_v4_reads_the_published_keys_alike() -> None:
    raw, saved = save_small("deepseek_v4", **V4)
    published = {**V4, "architectures": ["DeepseekV4ForCausalLM"], "dtype": "bfloat16", "num_nextn_predict_layers": 1}
    spec = model_from_config(published, "v4", "test")
    assert_same(decoder_of(spec), saved)
    assert spec.layers == model_from_config(raw, "v4", "test").layers
    extra = {name for name, _ in mtp_of(spec).items()}
    assert {"mtp.0.e_proj.weight", "mtp.0.h_proj.weight", "mtp.0.hc_head_fn", "mtp.0.attn.kv_norm.weight"} <= extra
    assert not any("compressor" in name or "embed" in name for name in extra)


def mtp_of(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, (shape, _) in expand(tuple(spec.select("mtp"))).items()}


def test_prediction_layer_of_deepseek_v3_by_hand() -> None:
    config = {**DEEP, **GROUPS, "model_type": "deepseek_v3", "dtype": "bfloat16", "num_nextn_predict_layers": 1}
    extra = mtp_of(model_from_config(config, "v3", "test"))
    own = {
        "embed_tokens.weight": (96, 32),
        "shared_head.head.weight": (96, 32),
        "shared_head.norm.weight": (32,),
        "eh_proj.weight": (32, 64),
        "enorm.weight": (32,),
        "hnorm.weight": (32,),
    }
    layer = {name[len("model.layers.3.") :]: shape for name, shape in extra.items()}
    assert own.items() <= layer.items()
    main = decoder_of(model_from_config({**config, "num_nextn_predict_layers": 0}, "v3", "test"))
    last = {re.sub(r"^model\.layers\.2\.", "", n): s for n, (s, _) in main.items() if n.startswith("model.layers.2.")}
    assert layer == {**own, **last}


def test_selectors_shared_between_layers() -> None:
    base = {**DEEP, **GROUPS, **SELECTOR, "model_type": "glm_moe_dsa", "dtype": "bfloat16", "num_hidden_layers": 8}
    by_rule = model_from_config({**base, "index_topk_freq": 4, "index_skip_topk_offset": 3}, "glm", "test")
    own = [a.indexer.heads > 0 for layer in by_rule.layers if (a := layer.attention) and a.indexer]
    assert own == [True, True, True, False, False, False, True, False]
    names = {n for n in decoder_of(by_rule) if "indexer.wk" in n}
    assert names == {f"model.layers.{i}.self_attn.indexer.wk.weight" for i in (0, 1, 2, 6)}
    by_pattern = model_from_config({**base, "index_topk_pattern": "FFFSSSFS"}, "glm", "test")
    assert by_pattern.families == by_rule.families
    with pytest.raises(InputError, match="8 layers"):
        model_from_config({**base, "index_topk_pattern": "FFF"}, "glm", "test")


def test_facts_of_latent_attention() -> None:
    groups = {"n_group": 2, "topk_group": 1}
    spec = model_from_config({**DEEP, **groups, "model_type": "deepseek_v3", "dtype": "bfloat16"}, "v3", "test")
    a = spec.layers[0].attention
    assert a == Attention("mla", 4, 1, 12, 6, q_lora_rank=20, kv_lora_rank=12, rope_head_dim=4)
    assert a.cached_values_per_token == 16
    moe = spec.layers[1].moe
    assert moe is not None
    assert (moe.experts, moe.topk, moe.intermediate, moe.shared_intermediate) == (4, 2, 24, 48)
    assert (moe.groups, moe.topk_groups) == (2, 1)
    assert spec.layers[0].moe is None
    labels = {(f.op, f.dims[0][0].label, f.dims[0][0].units, f.dims[0][0].width) for f in spec.families if f.op}
    assert {("q_b", "heads", 4, 12), ("kv_b", "heads", 4, 14), ("kv_a", "fixed", 16, 1)} <= labels
    bias = next(f for f in spec.families if f.template.endswith("e_score_correction_bias"))
    assert (bias.role, bias.part, bias.dtype) == ("router", "bias", "f32")


@pytest.mark.parametrize(
    "bad",
    [
        {"kv_lora_rank": None},
        {"q_lora_rank": -5},
        {"moe_layer_freq": [0, 1]},
        {"mlp_layer_types": ["dense"] * 2},
        {"num_nextn_predict_layers": 10**9},
        {"num_hidden_layers": 10**9},
        {"n_shared_experts": "two"},
    ],
)
def test_bad_configurations_are_refused_in_one_line(bad: dict[str, Any]) -> None:
    config = {**DEEP, **GROUPS, "model_type": "deepseek_v3", "dtype": "bfloat16", **bad}
    with pytest.raises(InputError) as caught:
        model_from_config(config, "bad", "bad.json")
    assert str(caught.value).startswith("bad.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ratios", [[0, 4], [0, 4, 8, 4, 4], [-1] * 5, "0,4"])
def test_bad_compression_is_refused(ratios: object) -> None:
    config = {**V4, "model_type": "deepseek_v4", "dtype": "bfloat16", "compress_ratios": ratios}
    with pytest.raises(InputError, match="compress_ratios"):
        model_from_config(config, "bad", "bad.json")


def test_dtypes_of_deepseek_v4_follow_the_published_checkpoint() -> None:
    config = {**V4, "model_type": "deepseek_v4", "dtype": "bfloat16", "num_nextn_predict_layers": 1}
    fp8 = {"quant_method": "fp8", "weight_block_size": [4, 4], "scale_fmt": "ue8m0"}
    spec = model_from_config({**config, "quantization_config": fp8, "expert_dtype": "fp4"}, "v4", "test")
    rows = {name.split(".", 3)[-1]: dtype for name, (_, dtype) in decoder_of(spec).items() if ".layers.2." in name}
    assert (
        rows["attn.wkv.weight"] == rows["attn.indexer.wq_b.weight"] == rows["ffn.shared_experts.w1.weight"] == "f8_e4m3"
    )
    assert rows["attn.compressor.wkv.weight"] == rows["attn.indexer.compressor.wgate.weight"] == "bf16"
    assert rows["attn.indexer.weights_proj.weight"] == rows["ffn.gate.weight"] == "bf16"
    assert rows["ffn.experts.3.w1.weight"] == "i8"
    assert rows["hc_attn_fn"] == rows["attn.attn_sink"] == rows["attn.compressor.ape"] == "f32"

"""Prediction layers: transformers' own loader finds every tensor it needs in our table, with the right shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.specs.hf.read import model_from_config
from meshwright.specs.model import ModelSpec
from meshwright.specs.tensors import expand
from tests.specs.hf.moe_oracle import EXPERTS, LATENT, SIZES
from tests.specs.hf.oracle import save_small

DEEP = {**SIZES, **EXPERTS, **LATENT, "n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1}
GLM = {**SIZES, **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1, "head_dim": 12}
GROUPS = {"n_group": 1, "topk_group": 1, "num_mtp_layers": 1}
STEP = {
    **SIZES,
    **EXPERTS,
    "n_routed_experts": 4,
    "head_dim": 12,
    "share_expert_dim": 20,
    "moe_layers_enum": "1,2",
    "num_sliding_attention_heads": 4,
    "num_nextn_predict_layers": 2,
    "layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 2,
    "sliding_window": 8,
}


def load_as_transformers_does(folder: Path, main: Any, spec: ModelSpec, *, left_out: str = "") -> Any:
    """Write our prediction tensors as zeros, and let ``MtpModel`` of transformers load them."""
    import torch
    from safetensors.torch import save_file

    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this transformers loads no prediction layers")
    extra = expand(tuple(spec.select("mtp")))
    tensors = {n: torch.zeros(shape, dtype=torch.bfloat16) for n, (shape, _) in extra.items() if n != left_out}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    main.config.name_or_path = str(folder)
    first = len(spec.layers)
    main._keys_to_ignore_on_load_unexpected = [rf"layers\.{i}\." for i in range(first, first + len(spec.mtp_layers))]
    return layers.MtpModel.from_pretrained(main)


def small_main(config: dict[str, Any], model_type: str) -> Any:
    import torch
    import transformers

    auto = "AutoModelForImageTextToText" if "text_config" in config else "AutoModelForCausalLM"
    built = transformers.CONFIG_MAPPING[model_type](**config)
    return getattr(transformers, auto).from_config(built, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("model_type", "config"), [("deepseek_v3", {**DEEP, **GROUPS}), ("glm4_moe", {**GLM, **GROUPS})]
)
def test_transformers_loads_our_prediction_layers(
    model_type: str, config: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    raw, _ = save_small(model_type, **config)
    spec = model_from_config(raw | {"num_nextn_predict_layers": 1}, model_type, "test")
    main = small_main(config, model_type)
    loaded = load_as_transformers_does(tmp_path, main, spec)
    zeros = [name for name, p in loaded.layers.named_parameters() if not p.any()]
    assert zeros == [name for name, _ in loaded.layers.named_parameters()]
    with pytest.raises(RuntimeError, match="eh_proj"):
        load_as_transformers_does(tmp_path, main, spec, left_out="model.layers.3.eh_proj.weight")


def test_step_prediction_layers_have_the_shapes_of_transformers() -> None:
    layers = pytest.importorskip("transformers.modeling_layers")
    vision = {"width": 16, "layers": 1, "heads": 2, "image_size": 56}
    main = small_main({"text_config": STEP, "vision_config": vision}, "step3p7")
    wanted = {
        name.replace("mtp_block.", "").replace("post_norm", "transformer.shared_head.norm"): tuple(p.shape)
        for name, p in layers.MtpModel(main, 2).layers.named_parameters()
    }
    spec = model_from_config({**STEP, "model_type": "step3p5", "dtype": "bfloat16"}, "step", "test")
    ours = {
        f"{int(name.split('.')[2]) - 3}.{name.split('.', 3)[3]}": shape
        for name, (shape, _) in expand(tuple(spec.select("mtp"))).items()
        if not name.endswith("shared_head.output.weight")
    }
    assert ours == wanted
    assert [layer.attention.window for layer in spec.mtp_layers if layer.attention] == [8, 8]


MTP = {"num_nextn_predict_layers": 1, "dtype": "bfloat16"}


def mtp_names(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    spec = model_from_config({**SIZES, **MTP, **config}, "test", "test")
    assert len(spec.mtp_layers) == 1
    return {name: shape for name, (shape, _) in expand(tuple(spec.select("mtp"))).items()}


def test_longcat_by_hand() -> None:
    config = {"model_type": "longcat_flash", **LATENT, "num_layers": 1, "ffn_hidden_size": 40, "moe_topk": 2}
    found = mtp_names({**config, "expert_ffn_hidden_size": 24, "n_routed_experts": 4})
    assert found["model.mtp.embed_tokens.weight"] == (96, 32)
    assert found["model.mtp.norm.weight"] == (32,)
    layer = {n.removeprefix("model.mtp.layers.0."): s for n, s in found.items() if "layers.0." in n}
    assert layer["enorm.m.weight"] == layer["hnorm.m.weight"] == layer["input_layernorm.weight"] == (32,)
    assert layer["eh_proj.weight"] == (32, 64)
    assert layer["self_attn.kv_b_proj.weight"] == (56, 12)
    assert layer["transformer_layer.mlp.up_proj.weight"] == (40, 32)
    assert len(found) == 2 + 5 + 7 + 3


def test_ernie_by_hand() -> None:
    config = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2}
    found = mtp_names({"model_type": "ernie4_5_moe", **config})
    assert found["model.mtp_linear_proj.0.weight"] == (32, 64)
    assert found["model.mtp_emb_norm.0.weight"] == found["model.mtp_hidden_norm.0.weight"] == (32,)
    assert found["model.mtp_block.0.mlp.gate_proj.weight"] == (48, 32)
    assert found["model.mtp_block.0.self_attn.k_proj.weight"] == (16, 32)
    assert len(found) == 3 + 2 + 4 + 3


def test_minimax_m3_by_hand() -> None:
    sparse = {"sparse_attention_freq": [0, 0, 1], "sparse_num_index_heads": 2, "sparse_index_dim": 12}
    config = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "dense_intermediate_size": 56}
    found = mtp_names({"model_type": "minimax_m3", **config, "sparse_attention_config": sparse})
    base = "model.mtp.layers.0."
    assert found[base + "eh_proj.weight"] == (32, 64)
    assert found[base + "final_layernorm.weight"] == (32,)
    assert found[base + "transformer_layer.block_sparse_moe.experts.3.w1.weight"] == (48, 32)
    assert found[base + "transformer_layer.self_attn.index_q_proj.weight"] == (24, 32)
    assert not any("embed" in name or "head" in name for name in found)

"""Dense architectures that transformers has no class for: tensors counted by hand from their modeling files."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.specs.hf.nas import width_of
from meshwright.specs.hf.read import model_from_config, read_model
from meshwright.specs.model import ModelSpec
from meshwright.specs.tensors import expand

H, V, N = 32, 64, 2


def read(**config: Any) -> ModelSpec:
    return model_from_config({"torch_dtype": "bfloat16", "hidden_size": H, "vocab_size": V, **config}, "m", "m")


def shapes(spec: ModelSpec, layer: int | None = None) -> dict[str, tuple[int, ...]]:
    """Shapes by name; of one layer only, without its prefix."""
    table = {n: shape for n, (shape, _) in expand(spec.families).items()}
    if layer is None:
        return {n: s for n, s in table.items() if "layers." not in n and ".h." not in n}
    marks = (f"layers.{layer}.", f".h.{layer}.")
    return {n.split(m, 1)[1]: s for n, s in table.items() for m in marks if m in n and "mtp" not in n}


def test_internlm2() -> None:
    spec = read(
        architectures=["InternLM2ForCausalLM"],
        model_type="internlm2",
        intermediate_size=48,
        num_hidden_layers=N,
        num_attention_heads=4,
        num_key_value_heads=2,
        bias=False,
    )
    assert shapes(spec, 1) == {
        "attention.wqkv.weight": (64, H),
        "attention.wo.weight": (H, H),
        "feed_forward.w1.weight": (48, H),
        "feed_forward.w3.weight": (48, H),
        "feed_forward.w2.weight": (H, 48),
        "attention_norm.weight": (H,),
        "ffn_norm.weight": (H,),
    }
    assert shapes(spec) == {"model.tok_embeddings.weight": (V, H), "model.norm.weight": (H,), "output.weight": (V, H)}
    # Cut by KV group, so that each rank's rows hold whole groups (two queries, a key, a value).
    wqkv = next(f for f in spec.families if f.op == "qkv")
    assert [(s.label, s.units, s.width) for s in wqkv.dims[0]] == [("kv_heads", 2, 32)]


def test_qwen_1() -> None:
    spec = read(
        architectures=["QWenLMHeadModel"],
        model_type="qwen",
        intermediate_size=96,
        num_hidden_layers=N,
        num_attention_heads=4,
        kv_channels=8,
        seq_length=128,
        no_bias=True,
        tie_word_embeddings=False,
    )
    assert shapes(spec, 0) == {
        "attn.c_attn.weight": (96, H),
        "attn.c_attn.bias": (96,),
        "attn.c_proj.weight": (H, H),
        "mlp.w1.weight": (48, H),
        "mlp.w2.weight": (48, H),
        "mlp.c_proj.weight": (H, 48),
        "ln_1.weight": (H,),
        "ln_2.weight": (H,),
    }
    assert shapes(spec) == {"transformer.wte.weight": (V, H), "transformer.ln_f.weight": (H,), "lm_head.weight": (V, H)}


def test_baichuan() -> None:
    spec = read(
        architectures=["BaichuanForCausalLM"],
        model_type="baichuan",
        intermediate_size=48,
        num_hidden_layers=N,
        num_attention_heads=4,
        model_max_length=4096,
    )
    assert shapes(spec, 1) == {
        "self_attn.W_pack.weight": (96, H),
        "self_attn.o_proj.weight": (H, H),
        "mlp.gate_proj.weight": (48, H),
        "mlp.up_proj.weight": (48, H),
        "mlp.down_proj.weight": (H, 48),
        "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
    }
    assert shapes(spec) == {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,), "lm_head.weight": (V, H)}
    assert spec.max_positions == 4096


def test_chatglm() -> None:
    spec = read(
        architectures=["ChatGLMModel"],
        model_type="chatglm",
        ffn_hidden_size=48,
        num_layers=N,
        num_attention_heads=4,
        kv_channels=8,
        multi_query_attention=True,
        multi_query_group_num=2,
        add_qkv_bias=True,
        add_bias_linear=False,
        padded_vocab_size=72,
        seq_length=100,
    )
    assert shapes(spec, 1) == {
        "self_attention.query_key_value.weight": (64, H),
        "self_attention.query_key_value.bias": (64,),
        "self_attention.dense.weight": (H, H),
        "mlp.dense_h_to_4h.weight": (96, H),
        "mlp.dense_4h_to_h.weight": (H, 48),
        "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
    }
    assert shapes(spec) == {
        "transformer.embedding.word_embeddings.weight": (72, H),
        "transformer.rotary_pos_emb.inv_freq": (2,),
        "transformer.encoder.final_layernorm.weight": (H,),
        "transformer.output_layer.weight": (72, H),
    }
    assert spec.kv_heads == 2


BLOCKS = [
    {"attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False}, "ffn": {"ffn_mult": 5.25}},
    {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"ffn_mult": 1.0, "no_op": False}},
    {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True, "ffn_mult": None}},
    {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
]


def decilm(blocks: object) -> ModelSpec:
    return read(
        architectures=["DeciLMForCausalLM"],
        model_type="nemotron-nas",
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=None,
        intermediate_size=None,
        block_configs=blocks,
    )


def test_decilm_layers_differ() -> None:
    spec = decilm(BLOCKS)
    norms = {"input_layernorm.weight": (H,), "post_attention_layernorm.weight": (H,)}
    mlp = {"mlp.gate_proj.weight": (256, H), "mlp.up_proj.weight": (256, H), "mlp.down_proj.weight": (H, 256)}
    qo = {"self_attn.q_proj.weight": (H, H), "self_attn.o_proj.weight": (H, H)}
    kv = {"self_attn.k_proj.weight": (16, H), "self_attn.v_proj.weight": (16, H)}
    kv1 = {"self_attn.k_proj.weight": (8, H), "self_attn.v_proj.weight": (8, H)}
    assert shapes(spec, 0) == norms | mlp | qo | kv
    assert shapes(spec, 1) == mlp | {"post_attention_layernorm.weight": (H,)}
    assert shapes(spec, 2) == {"self_attn.linear_attn.weight": (H, H), "input_layernorm.weight": (H,)}
    assert shapes(spec, 3) == norms | qo | kv1 | {"mlp.linear_mlp.weight": (H, H)}
    assert [layer.attention.kv_heads if layer.attention else 0 for layer in spec.layers] == [2, 0, 0, 1]
    assert [layer.mlp.intermediate if layer.mlp else 0 for layer in spec.layers] == [256, 256, 0, 0]


def test_decilm_widths_are_those_of_the_published_model() -> None:
    # Llama-3.3-Nemotron-Super: ffn_mult 5.25 of a width of 8192 is Llama's 28672.
    assert width_of(8192, 5.25) == 28672
    spec = read_model("llama-3.3-nemotron-super-49b")
    assert len(spec.layers) == 80
    assert spec.parameters() == pytest.approx(49.87e9, rel=1e-3)


@pytest.mark.parametrize(
    "blocks",
    [None, [], BLOCKS[:3], [1] * 4, "x", [{"attention": {"n_heads_in_group": 3}, "ffn": {}}, *BLOCKS[1:]]],
)
def test_decilm_contradictions(blocks: object) -> None:
    with pytest.raises(InputError):
        decilm(blocks)


def test_mimo_prediction_layers() -> None:
    spec = read(
        architectures=["MiMoForCausalLM"],
        model_type="mimo",
        intermediate_size=48,
        num_hidden_layers=N,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_nextn_predict_layers=1,
    )
    table = {n.removeprefix("model.mtp_layers.0."): s for n, (s, _) in expand(spec.families).items() if "mtp" in n}
    assert table == {
        "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
        "token_layernorm.weight": (H,),
        "hidden_layernorm.weight": (H,),
        "final_layernorm.weight": (H,),
        "input_proj.weight": (H, 2 * H),
        "self_attn.q_proj.weight": (H, H),
        "self_attn.q_proj.bias": (H,),
        "self_attn.k_proj.weight": (16, H),
        "self_attn.k_proj.bias": (16,),
        "self_attn.v_proj.weight": (16, H),
        "self_attn.v_proj.bias": (16,),
        "self_attn.o_proj.weight": (H, H),
        "mlp.gate_proj.weight": (48, H),
        "mlp.up_proj.weight": (48, H),
        "mlp.down_proj.weight": (H, 48),
    }
    assert len(spec.mtp_layers) == 1
    assert len(spec.layers) == N

"""Whatever a configuration of these families holds, it is read or refused in one line, in bounded time."""

from __future__ import annotations

import random
import time
from typing import Any

from meshwright.errors import InputError
from meshwright.specs.hf.read import model_from_config
from meshwright.specs.model import active_parameters
from tests.specs.hf.moe_oracle import EXPERTS, LATENT, SIZES
from tests.specs.hf.test_mla_oracle import V4

ROUTED = {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
BASES: list[dict[str, Any]] = [
    {**SIZES, **LOCAL, "model_type": "mixtral"},
    {**SIZES, **LOCAL, "model_type": "gpt_oss", "sliding_window": 8},
    {**SIZES, **LOCAL, "model_type": "llama4_text", "intermediate_size_mlp": 56, "attention_chunk_size": 8},
    {**SIZES, **LOCAL, "model_type": "minimax_m3", "dense_intermediate_size": 56, "moe_layer_freq": [0, 1, 1]},
    {**SIZES, **EXPERTS, "num_experts": 4, "model_type": "qwen3_moe"},
    {**SIZES, **EXPERTS, **ROUTED, "model_type": "glm4_moe"},
    {**SIZES, **EXPERTS, **ROUTED, "model_type": "mimo_v2_flash"},
    {**SIZES, **EXPERTS, **ROUTED, "model_type": "step3p5"},
    {**SIZES, **EXPERTS, **ROUTED, **LATENT, "model_type": "deepseek_v3"},
    {**SIZES, **EXPERTS, **ROUTED, **LATENT, "model_type": "glm_moe_dsa"},
    {**SIZES, **LATENT, "model_type": "longcat_flash", "num_layers": 2, "n_routed_experts": 4, "moe_topk": 2},
    {**V4, "model_type": "deepseek_v4"},
    {"model_type": "dbrx", "d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 96, "attn_config": {}},
]
LISTS = ("layer_types", "mlp_layer_types", "moe_layer_freq", "compress_ratios", "indexer_types", "index_topk_pattern")
OTHERS = ("attn_config", "sparse_attention_config", "attention_other_setting", "moe_layers_enum", "sliding_window")
NASTY: list[Any] = [
    None, 0, -1, 1, 3, 10**9, 10**40, 1.5, float("nan"), float("inf"), "x", "", True, [], [1], [0] * 3, ["a"], {},
    {"a": 1}, [None], [[1]], "4", [10**12], ["sliding_attention"] * 200, [1] * 5000, ["full_attention"] * 3,
]  # fmt: skip


def test_mutated_configurations_end_in_a_model_or_in_one_line() -> None:
    chance = random.Random(20)
    refused: list[str] = []
    for _ in range(4000):
        config = {**chance.choice(BASES), "dtype": "bfloat16"}
        for _ in range(chance.choice((1, 1, 2, 3))):
            config[chance.choice([*config, *LISTS, *OTHERS])] = chance.choice(NASTY)
        started = time.perf_counter()
        try:
            spec = model_from_config(config, "hostile", "hostile.json")
            assert spec.parameters() > 0
            assert 0 < active_parameters(spec) <= spec.parameters("decoder")
        except InputError as error:
            refused.append(str(error))
        assert time.perf_counter() - started < 2
    assert 500 < len(refused) < 3800
    assert [line for line in refused if "\n" in line or len(line) > 400] == []

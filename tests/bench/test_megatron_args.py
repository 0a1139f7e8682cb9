"""Megatron-LM arguments are read as Megatron reads them."""

from __future__ import annotations

import pytest
from bench.megatron_args import UndecidableError, read_case, world_size
from bench.megatron_memory import predict

ARGS = {
    "num-layers": 12,
    "hidden-size": 512,
    "num-attention-heads": 8,
    "seq-length": 1024,
    "max-position-embeddings": 1024,
    "micro-batch-size": 4,
    "global-batch-size": 32,
    "transformer-impl": "transformer_engine",
    "attention-backend": "unfused",
    "bf16": True,
}
ENV = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def _case(env: str = "dev_dgx_a100", test: str = "gpt/made_up", **args: object):  # type: ignore[no-untyped-def]
    return read_case(test, env, ARGS | {k.replace("_", "-"): v for k, v in args.items()}, ENV, {})


def test_defaults_of_megatron() -> None:
    case = _case()
    assert (case.spec.vocab, case.spec.tied, case.spec.learned_positions) == (50257, True, 1024)
    assert (case.layout.dp, case.layout.zero, case.work.dropout) == (8, 0, 0.1)
    mlp = case.spec.layers[0].mlp
    assert mlp is not None
    assert (mlp.intermediate, mlp.gated) == (2048, False)
    assert any(f.part == "bias" and f.op == "q" for f in case.spec.families)


def test_bytes_of_the_smallest_gpt_by_hand() -> None:
    """2 + 4 + 12 / 8 bytes of 64,109,568 parameters; workspaces of 2 x 32 + 4 MiB."""
    predicted = predict(_case(use_distributed_optimizer=True))
    h, tokens, vocab = 512, 4096, 50304
    parameters = 12 * (12 * h * h + 13 * h) + 2 * h + vocab * h + 1024 * h
    assert parameters == 64_109_568
    states = 6 * parameters + 12 * parameters // 8
    assert predicted.allocated == states + 68 * (1 << 20)
    layer = 34 * tokens * h + 5 * 4 * 8 * 1024**2 + 2 * 8 * tokens
    ends = 4 * tokens * h + 8 * tokens + tokens * h + 4 * 1024**2
    assert predicted.peak == predicted.allocated + 12 * layer + 6 * tokens * vocab + ends


@pytest.mark.parametrize(
    ("test", "env", "world"),
    [
        ("gpt/a", "dev_dgx_h100", 8),
        ("gpt/a_1node", "dev_dgx_gb200", 4),
        ("gpt/a_1node", "dev_dgx_h100", 8),
        ("nemotron/b_dgx_gb200_1N4G", "dev_dgx_gb200", 4),
        ("hybrid/b_dgx_h100_2N8G", "dev_dgx_h100", 16),
    ],
)
def test_world_size(test: str, env: str, world: int) -> None:
    assert world_size(test, env, False) == world


def test_world_is_no_larger_than_the_batch_allows() -> None:
    assert _case(global_batch_size=4).layout.dp == 1


def test_virtual_stages_have_two_meanings() -> None:
    a = _case(pipeline_model_parallel_size=4, num_layers_per_virtual_pipeline_stage=1)
    b = _case(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=3)
    assert (a.layout.virtual, b.layout.virtual) == (3, 3)
    assert a.layout.schedule == "interleaved"


def test_stages_by_first_and_last_and_by_layout() -> None:
    case = _case(
        pipeline_model_parallel_size=4, decoder_first_pipeline_num_layers=2, decoder_last_pipeline_num_layers=2
    )
    assert case.layout.stage_layers == (2, 4, 4, 2)
    laid = _case(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et*3|(tt|)*4tmL")
    assert (laid.layout.stage_layers, laid.layout.virtual) == ((3 + 2 + 2, 2 + 2 + 1), 3)


def test_mixture_frequency_and_latent_attention() -> None:
    case = _case(
        test="moe/x", num_experts=8, moe_layer_freq="([0]*3+[1]*9)", moe_ffn_hidden_size=1024,
        multi_latent_attention=True, q_lora_rank=192, kv_lora_rank=64, qk_head_dim=16, qk_pos_emb_head_dim=8,
        v_head_dim=16,
    )  # fmt: skip
    assert [bool(x.moe) for x in case.spec.layers] == [False] * 3 + [True] * 9
    a = case.spec.layers[0].attention
    assert a is not None
    assert (a.kind, a.head_dim, a.v_head_dim) == ("mla", 24, 16)
    assert case.group == "moe"


def test_hybrid_pattern_with_stages() -> None:
    case = _case(test="hybrid/x", hybrid_layer_pattern="M-M*-|M-M/*E", pipeline_model_parallel_size=2)
    assert case.layout.stage_layers == (5, 3)
    assert sum(x.recurrent is not None for x in case.spec.layers) == 4
    assert case.group == "hybrid"


@pytest.mark.parametrize(
    ("test", "args", "reason"),
    [
        ("gpt/x", {}, "no model_config"),
        ("mimo/x", ARGS, "multimodal"),
        ("gpt/gpt_grpo_x", ARGS, "reinforcement"),
        ("gpt/x", {k: v for k, v in ARGS.items() if k != "hidden-size"}, "hidden-size is not known"),
        ("gpt/x", ARGS | {"tensor-model-parallel-size": 3}, "not a multiple"),
    ],
)
def test_undecidable_rows_say_why(test: str, args: dict[str, object], reason: str) -> None:
    with pytest.raises(UndecidableError, match=reason):
        read_case(test, "dev_dgx_h100", args, ENV, {})

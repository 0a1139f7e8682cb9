"""Models from plain dimensions count the parameters that their papers state."""

from __future__ import annotations

import pytest

from meshwright.errors import InputError
from meshwright.specs.build import Mamba, decoder


def test_llama_8b() -> None:
    spec = decoder(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256)
    assert spec.parameters() == 8_030_261_248


def test_gpt3_shape_has_twelve_h_squared_a_layer() -> None:
    spec = decoder(hidden=1024, layers=3, heads=16, gated=False, vocab=0, bias=False)
    in_layers = sum(f.parameters for f in spec.families if f.role in {"attention", "mlp"})
    assert in_layers == 3 * 12 * 1024**2


def test_gpt2_small_with_biases() -> None:
    spec = decoder(
        hidden=768, layers=12, heads=12, gated=False, vocab=50257, tied=True, bias=True, norm_bias=True,
        learned_positions=1024,
    )  # fmt: skip
    assert spec.parameters() == 124_439_808


def test_mixtral_8x7b() -> None:
    spec = decoder(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=32000, experts=8, topk=2)
    assert spec.parameters() == 46_702_792_704


def test_deepseek_v3_without_mtp() -> None:
    spec = decoder(
        hidden=7168, layers=61, heads=128, head_dim=192, v_head_dim=128, q_lora_rank=1536, kv_lora_rank=512,
        rope_head_dim=64, ffn=18432, moe_ffn=2048, shared_ffn=2048, experts=256, topk=8, moe_layers=range(3, 61),
        vocab=129280, router_bias=True,
    )  # fmt: skip
    assert spec.parameters() == 671_026_419_200
    assert spec.mla
    assert [bool(x.moe) for x in spec.layers[:4]] == [False, False, False, True]


def test_hybrid_pattern() -> None:
    spec = decoder(hidden=64, layers=4, heads=4, vocab=100, pattern="M-M*", mamba=Mamba(heads=4, head_dim=16, groups=2))
    assert [bool(x.recurrent) for x in spec.layers] == [True, False, True, False]
    inner, bc = 64, 2 * 2 * 128
    one = (2 * inner + bc + 4) * 64 + (inner + bc) * 5 + 3 * 4 + inner + 64 * inner
    assert sum(f.parameters for f in spec.families if f.role == "recurrent") == 2 * one


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="layers"):
        decoder(hidden=64, layers=10**9, heads=4, vocab=100)
    with pytest.raises(InputError, match="pattern"):
        decoder(hidden=64, layers=3, heads=4, vocab=100, pattern="M-")

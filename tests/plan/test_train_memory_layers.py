"""Saved activations of a layer: the closed forms of Korthikanti et al. (arXiv 2205.05198), Table 2."""

from __future__ import annotations

import pytest

from meshwright.plan import train_layers
from meshwright.plan.train_activations import activations, chunk_bytes, kept_after, model_shape
from meshwright.plan.train_engine import TrainEngine
from meshwright.plan.train_layers import layer_saved, total
from meshwright.plan.train_shards import train_stages
from meshwright.specs.build import decoder
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.workload import Train

S, B, H, A, L = 512, 2, 768, 12, 4
ENGINE = TrainEngine(rope_copies=False, kernels="te")


def _gpt() -> ModelSpec:
    return decoder(
        hidden=H, layers=L, heads=A, gated=False, vocab=50304, tied=True, bias=True, norm_bias=True, learned_positions=S
    )


def _layer(layout: Layout, *, selective: bool = False) -> float:
    """Bytes of one layer in units of sbh, without the statistics of its two norms (8 bytes a row)."""
    spec, work = _gpt(), Train(seq=S, dropout=0.1, attention="unfused")
    s = model_shape(spec, layout, work, ENGINE)
    blocks = layer_saved(spec.layers[0], s, layout)
    size = total(kept_after(blocks, ("core_attn",)) if selective else blocks)
    return (size - 2 * 8 * s.rows) / (S * B * H)


def _closed_forms(t: int) -> None:
    scores = 5 * A * S / H
    plain, sp = Layout(tp=t, micro_batch=B), Layout(tp=t, micro_batch=B, sp=True)
    assert _layer(plain) == pytest.approx(10 + 24 / t + scores / t)
    assert _layer(sp) == pytest.approx((34 + scores) / t)
    assert _layer(sp, selective=True) == pytest.approx(34 / t)


@pytest.mark.parametrize("t", [1, 2, 4])
def test_korthikanti_table_2(t: int) -> None:
    _closed_forms(t)


def test_closed_forms_see_a_forgotten_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    real = train_layers.mlp_saved

    def without_mask(*args: object, **kwargs: object) -> dict[str, int]:
        saved = dict(real(*args, **kwargs))  # type: ignore[arg-type]
        saved.pop("dropout mask", None)
        return saved

    monkeypatch.setattr(train_layers, "mlp_saved", without_mask)
    with pytest.raises(AssertionError):
        _closed_forms(2)


def test_full_recompute_keeps_two_sbh_a_layer() -> None:
    spec, layout = _gpt(), Layout(micro_batch=B)
    s = model_shape(spec, layout, Train(seq=S), ENGINE)
    kept, again = chunk_bytes(spec, (0, 1, 2, 3), s, layout, Train(seq=S, recompute="full"))
    assert kept == 4 * 2 * S * B * H
    assert again > kept
    every_other, _ = chunk_bytes(spec, (0, 1, 2, 3), s, layout, Train(seq=S, recompute="full", recompute_layers=2))
    assert every_other == 2 * 2 * S * B * H


def test_block_recompute_leaves_the_rest_whole() -> None:
    spec, layout = _gpt(), Layout(micro_batch=B)
    engine = ENGINE.with_(recompute_method="block")
    work = Train(seq=S, recompute="full", recompute_layers=1)
    s = model_shape(spec, layout, work, engine)
    one = total(layer_saved(spec.layers[0], s, layout))
    kept, again = chunk_bytes(spec, (0, 1, 2, 3), s, layout, work)
    assert (kept, again) == (3 * one + 2 * S * B * H, one)


def test_loss_and_one_recomputed_layer_are_not_alive_together() -> None:
    spec, layout = _gpt(), Layout(micro_batch=B)
    work = Train(seq=S, recompute="full", fused_cross_entropy=False)
    (stage,) = train_stages(spec, layout)
    few = activations(spec, stage, layout, work, ENGINE.with_(logit_bytes=6.0))
    assert few.parts["logits and loss"] == 6 * S * B * 50304
    assert "layer in its backward" not in few.parts
    none = activations(spec, stage, layout, work, ENGINE.with_(logit_bytes=0.0))
    assert "logits and loss" not in none.parts
    assert none.parts["layer in its backward"] > 0


def test_context_parallel_divides_the_tokens_and_adds_the_ring() -> None:
    spec = decoder(hidden=H, layers=1, heads=A, kv_heads=4, vocab=1000, learned_positions=S)
    one, two = (model_shape(spec, Layout(cp=c), Train(seq=S), ENGINE) for c in (1, 2))
    whole, half = (layer_saved(spec.layers[0], s, Layout(cp=c)) for s, c in ((one, 1), (two, 2)))
    ring = half["attention"].pop("key, value of the ring")
    assert ring == 2 * (S // 2) * 2 * 4 * 64
    assert 2 * total(half) == total(whole)


def test_experts_see_tokens_times_topk() -> None:
    spec = decoder(hidden=H, layers=1, heads=A, vocab=1000, experts=8, topk=2, moe_ffn=256)
    layout = Layout(tp=2, dp=2, ep=2, etp=1, sp=True, micro_batch=B)
    s = model_shape(spec, layout, Train(seq=S), ENGINE)
    saved = layer_saved(spec.layers[0], s, layout)["moe"]
    assert saved["expert input"] == 2 * (S * B // 2) * 2 * H
    assert saved["expert hidden before activation"] == 2 * (S * B // 2) * 2 * 2 * 256
    wide = Layout(tp=2, dp=2, ep=2, sp=True, micro_batch=B)
    assert layer_saved(spec.layers[0], s, wide)["moe"]["expert input"] == 2 * S * B * 2 * H


def test_latent_attention_recompute_drops_the_up_projections() -> None:
    spec = decoder(
        hidden=H, layers=1, heads=A, head_dim=96, v_head_dim=64, q_lora_rank=128, kv_lora_rank=64, rope_head_dim=32,
        vocab=1000,
    )  # fmt: skip
    s = model_shape(spec, Layout(), Train(seq=S), ENGINE)
    blocks = layer_saved(spec.layers[0], s, Layout())
    gone = total(blocks) - total(kept_after(blocks, ("mla_up_proj",)))
    assert gone == 2 * S * A * (2 * 96 + 64) + 2 * S * A * 64

"""Parameters, gradients and optimizer state: figures of the ZeRO paper and counts by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshwright.errors import IllegalLayoutError, InputError
from meshwright.plan import train_states
from meshwright.plan.train_engine import TrainEngine, engine_names, engine_preset
from meshwright.plan.train_shards import Unit, padded_vocab, stage_units, train_stages
from meshwright.plan.train_states import shard_degrees, states
from meshwright.specs.build import decoder
from meshwright.specs.layout import Fsdp, Layout
from meshwright.specs.workload import Train

FP16 = Train(param_dtype="f16", grad_dtype="f16")
ENGINE = TrainEngine()


def _permanent(units: tuple[Unit, ...], layout: Layout, work: Train = FP16) -> int:
    held = states(units, layout, work, ENGINE)
    return held.weights + held.gradients + held.optimizer


def _paper() -> None:
    """Rajbhandari et al., Figure 1: 7.5 B parameters on 64 devices take 120, 31.4, 16.6 and 1.9 GB."""
    units = (Unit("layer 0", 7_500_000_000, 0),)
    found = [_permanent(units, Layout(dp=64, zero=z)) / 1e9 for z in range(4)]
    assert found == pytest.approx([120, 31.40625, 16.640625, 1.875], rel=1e-9)


def test_zero_paper_figure_1() -> None:
    _paper()


@pytest.mark.parametrize(
    "mistake",
    [
        lambda layout, engine: (1, 1),
        lambda layout, engine: (layout.dp + 1, 1),
    ],
)
def test_zero_check_sees_a_wrong_degree(monkeypatch: pytest.MonkeyPatch, mistake: Callable[..., object]) -> None:
    monkeypatch.setattr(train_states, "shard_degrees", mistake)
    with pytest.raises(AssertionError):
        _paper()


def test_zero_check_sees_a_forgotten_master_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_states, "_optimizer_bytes", lambda work, *, master: 8)
    with pytest.raises(AssertionError):
        _paper()


def test_gpt_1_3b_by_hand() -> None:
    """GPT-3 XL (24 layers of 2048): 12 h^2 + 13 h a layer, ends and norms; Megatron 2 + 4 + 12 / d."""
    h, layers, vocab, positions = 2048, 24, 50257, 2048
    spec = decoder(
        hidden=h, layers=layers, heads=16, gated=False, vocab=vocab, tied=True, bias=True, norm_bias=True,
        learned_positions=positions,
    )  # fmt: skip
    count = layers * (12 * h * h + 13 * h) + vocab * h + positions * h + 2 * h
    assert count == 1_315_723_264
    layout = Layout(dp=8, zero=1)
    stage = train_stages(spec, layout)[0]
    held = states(stage_units(spec, layout, stage, ENGINE), layout, Train(), ENGINE)
    assert held.weights == 2 * count
    assert held.gradients == 4 * count
    assert held.optimizer == pytest.approx(12 * count / 8, abs=8)
    whole = states(stage_units(spec, layout, stage, ENGINE), Layout(dp=8), Train(), ENGINE)
    assert whole.weights + whole.gradients + whole.optimizer == 18 * count


def test_tied_head_is_a_copy_on_the_last_stage() -> None:
    spec = decoder(hidden=64, layers=4, heads=4, gated=False, vocab=1000, tied=True)
    stages = train_stages(spec, Layout(pp=2))
    first, last = (sum(u.dense for u in stage_units(spec, Layout(pp=2), s, ENGINE)) for s in stages)
    per_layer = 12 * 64 * 64 + 2 * 64
    assert first == 2 * per_layer + 1000 * 64
    assert last == 2 * per_layer + 1000 * 64 + 64
    alone = sum(u.dense for u in stage_units(spec, Layout(), train_stages(spec, Layout())[0], ENGINE))
    assert alone == 4 * per_layer + 1000 * 64 + 64


def test_prediction_layers_bring_an_embedding_to_the_last_stage() -> None:
    plain = decoder(hidden=64, layers=4, heads=4, vocab=1000)
    more = decoder(hidden=64, layers=4, heads=4, vocab=1000, mtp=1)
    layout = Layout(pp=2)
    count = [
        sum(u.dense for u in stage_units(spec, layout, train_stages(spec, layout)[-1], ENGINE))
        for spec in (plain, more)
    ]
    layer = 4 * 64 * 64 + 3 * 64 * 256 + 2 * 64
    assert count[1] - count[0] == layer + 2 * 64 * 64 + 3 * 64 + 1000 * 64


@pytest.mark.parametrize(("vocab", "tp", "rows"), [(50257, 1, 50304), (50257, 8, 51200), (128256, 4, 128512)])
def test_vocabulary_padding(vocab: int, tp: int, rows: int) -> None:
    assert padded_vocab(vocab, tp, TrainEngine(vocab_multiple=128, vocab_times_tp=True)) == rows


def test_experts_have_their_own_degree() -> None:
    """tp 2, dp 4, ep 4: dense shards over 4; experts cut by etp 1 exist world / (etp x ep) = 2 times."""
    assert shard_degrees(Layout(tp=2, dp=4, ep=4, etp=1), ENGINE) == (4, 2)
    assert shard_degrees(Layout(tp=2, dp=4, ep=2), ENGINE) == (4, 2)
    assert shard_degrees(Layout(tp=2, dp=4, ep=4, etp=1), TrainEngine(optimizer_instances=2)) == (2, 1)
    spec = decoder(hidden=64, layers=2, heads=4, vocab=128, experts=8, moe_ffn=32)
    layout = Layout(tp=2, dp=4, ep=4, etp=1, zero=1)
    units = stage_units(spec, layout, train_stages(spec, layout)[0], ENGINE)
    assert sum(u.expert for u in units) == 2 * 2 * 3 * 64 * 32


def test_fsdp_holds_16_bytes_over_the_shards_and_the_working_set() -> None:
    units = (Unit("root", 1000, 0), *(Unit(f"layer {i}", 8000, 0) for i in range(4)))
    total = 33_000
    held = states(units, Layout(dp=8, zero=3), Train(), ENGINE)
    assert held.weights + held.gradients + held.optimizer == 16 * total // 8
    assert held.gathered_weights == 2 * (1000 + 2 * 8000)
    kept = states(units, Layout(dp=8, zero=3, fsdp=Fsdp(reshard_after_forward=False)), Train(), ENGINE)
    assert kept.gathered_weights == 2 * total
    further = states(units, Layout(dp=8, zero=3, fsdp=Fsdp(prefetch=3)), Train(), ENGINE)
    assert further.gathered_weights == 2 * total
    hybrid = states(units, Layout(dp=8, zero=3, fsdp=Fsdp(replicas=4)), Train(), ENGINE)
    assert hybrid.weights + hybrid.gradients + hybrid.optimizer == 16 * total // 2


def test_fsdp_with_a_pipeline_keeps_6_bytes_a_parameter_whole() -> None:
    units = (Unit("root", 0, 0), Unit("layer 0", 8000, 0))
    held = states(units, Layout(dp=4, pp=2, zero=3), Train(), ENGINE)
    assert held.gathered_weights + held.gathered_gradients == (2 + 4) * 8000


def test_optimizers() -> None:
    units = (Unit("layer 0", 1000, 0, plain=100),)
    by = {o: states(units, Layout(), Train(optimizer=o), ENGINE).optimizer for o in ("adamw", "sgd", "muon")}
    assert by == {"adamw": 12_000, "sgd": 8_000, "muon": 8 * 900 + 12 * 100}
    assert states(units, Layout(), Train(master_weights=False), ENGINE).optimizer == 8_000
    assert states(units, Layout(), Train(offload="optimizer"), ENGINE).optimizer == 0


def test_too_many_parts_names_both_numbers() -> None:
    spec = decoder(hidden=64, layers=3, heads=4, vocab=128)
    with pytest.raises(IllegalLayoutError, match=r"3 layers cannot fill 4"):
        train_stages(spec, Layout(pp=4))
    with pytest.raises(IllegalLayoutError, match="5 layers"):
        train_stages(spec, Layout(pp=2, stage_layers=(2, 3)))


def test_presets() -> None:
    for name in engine_names():
        assert engine_preset(name).name == name.partition(" ")[0]
    assert engine_preset("torchtitan", logit_bytes=1).logit_bytes == 1
    with pytest.raises(InputError, match="known: torch"):
        engine_preset("nope")

"""Seconds of an optimizer step: closed forms, what hides what, units, a case counted by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from meshwright.engines.own.profile import OWN
from meshwright.moves.pipeline import bubble, refusal, schedule, simulate
from meshwright.plan.pipeline_time import pipeline_seconds
from meshwright.plan.timing.collective import Wiring
from meshwright.plan.train_cost import train_cost
from meshwright.plan.train_engine import engine_preset
from meshwright.plan.training_time import (
    PARTS,
    Rates,
    Software,
    StageTime,
    constants,
    data_exposed,
    data_file,
    every_stage,
    rates,
    software_of,
    training_time,
    work_seconds,
)
from meshwright.plan.training_time_work import DataWork, Work, part_of, step_work
from meshwright.specs.build import decoder
from meshwright.specs.cluster import Cluster, parse_cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import Placement, place
from meshwright.specs.workload import Train

CLUSTER = parse_cluster("1x8xH100-SXM")
NODES = parse_cluster("8x8xH100-SXM@ib-400g")


def dense(layers: int = 8) -> ModelSpec:
    """A small Llama-like model."""
    return decoder(hidden=2048, layers=layers, heads=16, kv_heads=8, ffn=8192, vocab=32000)


def mixture() -> ModelSpec:
    """A small mixture of experts."""
    return decoder(hidden=2048, layers=4, heads=16, kv_heads=8, ffn=8192, vocab=32000, experts=16, topk=2, moe_ffn=2048)


def placed(layout: Layout, spec: ModelSpec | None = None) -> Placement:
    return place(spec or dense(), layout, OWN, sections=("decoder", "vision"))


def seconds(layout: Layout, cluster: Cluster = NODES, spec: ModelSpec | None = None, **work: object) -> float:
    train = Train(**({"seq": 2048, "global_batch": 64} | work))  # type: ignore[arg-type]
    return training_time(placed(layout, spec), cluster, train).step.value


# Pipeline


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 1), (4, 8, 1), (4, 16, 2), (8, 16, 4)])
def test_equal_stages_take_the_closed_form(p: int, m: int, v: int) -> None:
    layout = Layout(pp=p, virtual=v, schedule="interleaved" if v > 1 else "1f1b")
    whole = pipeline_seconds(layout, m, [(1.0, 2.0)] * p)
    assert whole == pytest.approx(3.0 * m / (1 - bubble(layout.schedule, p, m, v)))


def simulated(layout: Layout, m: int, stages: list[tuple[float, float]]) -> float:
    """The table of the schedule, run with these times (split backwards: those of the first stage)."""
    chunks = 2 if layout.schedule in {"zbv", "dualpipev"} else layout.virtual
    table = schedule(layout.schedule, layout.pp, m, chunks)
    if layout.schedule in {"zb-h1", "zbv", "dualpipev"}:
        return simulate(table, stages[0][0] / chunks, stages[0][1] / chunks).makespan
    return simulate(
        table, seconds_of=lambda a: stages[a.chunk % layout.pp]["FB".index(a.kind)] / layout.virtual
    ).makespan


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "dualpipev"])
@pytest.mark.parametrize("p", [2, 3, 4, 5, 8])
def test_equal_stages_take_what_the_table_takes(name: str, p: int) -> None:
    """Every number of micro-batches up to three times the stages, every ratio of backward to forward."""
    layout = Layout(pp=p, schedule=name, virtual=2 if name == "interleaved" else 1)  # type: ignore[arg-type]
    for m in range(1, 3 * p + 2):
        chunks = 1 if name in {"1f1b", "gpipe", "zb-h1"} else 2
        if refusal(name, p, m, chunks) or (name == "interleaved" and m % p):
            continue
        for backward in (1.0, 1.6, 2.0, 2.4, 3.5):
            stages = [(1.0, backward)] * p
            assert pipeline_seconds(layout, m, stages) == pytest.approx(simulated(layout, m, stages)), (m, backward)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved"])
def test_uneven_stages_take_about_what_the_table_takes(name: str) -> None:
    """Random stages: 1F1B never above the table and under 5 % below, interleaved within 9 %, GPipe exact; ends that
    differ from equal inner stages, as models have them, within 2 %."""
    rng = random.Random(4)
    low, high = {"1f1b": (0.95, 1.0), "gpipe": (1.0, 1.0), "interleaved": (0.92, 1.09)}[name]
    for _ in range(150):
        p = rng.choice([2, 3, 4, 8])
        m = p * rng.choice([2, 4])
        layout = Layout(pp=p, schedule=name, virtual=2 if name == "interleaved" else 1)  # type: ignore[arg-type]
        times = [rng.uniform(0.7, 1.5) for _ in range(p)]
        ends = [1.0] * (p - 1) + [rng.uniform(1.0, 1.5)]
        for lengths, down, up in ((times, low, high), (ends, 0.98, 1.02)):
            stages = [(t, 2.2 * t) for t in lengths]
            ratio = pipeline_seconds(layout, m, stages) / simulated(layout, m, stages)
            assert down - 1e-9 <= ratio <= up + 1e-9, (p, m, lengths)


def test_zero_bubble_with_chunks_is_simulated() -> None:
    layout = Layout(pp=4, schedule="zb-h1", virtual=2)
    plain = Layout(pp=4, schedule="interleaved", virtual=2)
    assert 48.0 < pipeline_seconds(layout, 16, [(1.0, 2.0)] * 4) < pipeline_seconds(plain, 16, [(1.0, 2.0)] * 4)


def test_one_slow_stage_paces_all() -> None:
    stages = [(1.0, 2.0), (1.0, 2.0), (1.0, 2.0), (1.5, 3.0)]
    assert pipeline_seconds(Layout(pp=4), 64, stages) == pytest.approx(64 * 4.5 + 9.0)


def test_a_stage_that_was_not_timed_is_as_an_inner_one() -> None:
    times = {0: stage(1.0, 2.0), 2: stage(3.0, 4.0), 4: stage(5.0, 6.0)}
    assert [s.forward for s in every_stage(times, 5)] == [1.0, 3.0, 3.0, 3.0, 5.0]


def test_shards_of_one_replica_a_node_stay_in_the_node() -> None:
    assert part_of(Wiring(32, 8), "dp_shard", 4) == Wiring(8, 8)
    assert part_of(Wiring(32, 8), "dp_replicate", 4) == Wiring(4, 1)
    assert part_of(Wiring(32, 8), "dp", 4) == Wiring(32, 8)


# What one rank does


def test_a_product_counted_by_hand() -> None:
    """One layer: the FLOPs of its products at the peak, forward and backward."""
    h, f, t = 1024, 4096, 4096
    spec = decoder(hidden=h, layers=1, heads=8, ffn=f, vocab=100, gated=False)
    work = step_work(placed(Layout(), spec), CLUSTER, Train(seq=t, global_batch=2))
    rank = work.ranks[0]
    peak = CLUSTER.device.peak("bf16") or 0.0
    products = 2 * t * (4 * h * h + 2 * h * f)
    assert rank.forward.dense == pytest.approx(products / peak)
    assert rank.backward.dense == pytest.approx(2 * products / peak)
    shape = 2 * t * (4 * h * h * (1 / t + 2 / h) + 2 * h * f * (1 / t + 1 / h + 1 / f)) / 1e15
    assert rank.forward.dense_shape == pytest.approx(shape)
    assert rank.forward.attention == pytest.approx(2 * (t * (t + 1) / 2) * h * 2 / peak)
    assert rank.backward.attention == pytest.approx(2.5 * rank.forward.attention)
    assert (work.microbatches, work.tokens, work.devices) == (2, 2 * t, 1)
    assert work.useful_flops == pytest.approx(2 * 3 * (products + 2 * t * h * 100 + 2 * t * (t + 1) * h))


def test_a_step_computed_by_hand() -> None:
    """The slowest stage times micro-batches, the optimizer, nothing else on one device."""
    train = Train(seq=4096, global_batch=4)
    at = placed(Layout(), decoder(hidden=4096, layers=2, heads=32, ffn=16384, vocab=32000))
    found = training_time(at, CLUSTER, train)
    r = rates(constants(), CLUSTER.device, Software(fused=False))
    rank = step_work(at, CLUSTER, train).ranks[0]
    one = sum(work_seconds(rank.forward, r).values()) + sum(work_seconds(rank.backward, r).values())
    assert found.step.value == pytest.approx(4 * one + rank.data.optimizer / 0.8 + constants()["step"])


def test_experts_are_shaped_by_their_own_tokens() -> None:
    work = step_work(placed(Layout(), mixture()), CLUSTER, Train(seq=4096, global_batch=1)).ranks[0]
    peak = CLUSTER.device.peak("bf16") or 0.0
    tokens, h, f = 4096 * 2 / 16, 2048, 2048  # of one expert
    flops = 4 * 2 * 4096 * 2 * 3 * h * f
    assert work.forward.experts == pytest.approx(flops / peak)
    assert work.forward.experts_shape == pytest.approx(flops / 1e15 * (1 / tokens + 1 / h + 1 / f))
    assert work.backward.experts_shape == pytest.approx(2 * work.forward.experts_shape)
    assert work.forward.mixtures == 4
    assert work.forward.groups == 4 * 3 * 16


def test_tensors_of_experts_are_told_by_width() -> None:
    """Of a routed token: in to gate and to up, out of down with the model's width; three times the experts' width."""
    spec = decoder(
        hidden=1024, layers=1, heads=8, ffn=4096, vocab=100, experts=8, topk=2, moe_ffn=256, moe_layers=range(1)
    )
    train = Train(seq=4096, global_batch=1, recompute="full")
    rank = step_work(placed(Layout(), spec), CLUSTER, train).ranks[0]
    routed = 2 * 4096 * 2 / CLUSTER.device.bandwidth_bytes_s
    for work in (rank.forward, rank.backward, rank.recompute):
        assert work.routed == pytest.approx(routed * 1024 * 3)  # gate and up read it each
        assert work.inner == pytest.approx(routed * 256 * 3)


def test_low_precision_leaves_head_and_router_in_16_bit() -> None:
    train = Train(seq=4096, global_batch=1)
    wide, low = (step_work(placed(Layout()), CLUSTER, train, dtype).ranks[0].forward for dtype in ("bf16", "f8_e4m3"))
    assert low.dense == pytest.approx(wide.dense / 2, rel=1e-3)
    assert low.head == wide.head
    assert low.attention == wide.attention


def test_full_recompute_runs_the_forward_again() -> None:
    train = Train(seq=4096, global_batch=1, recompute="full")
    rank = step_work(placed(Layout()), CLUSTER, train).ranks[0]
    assert rank.recompute.dense == pytest.approx(rank.forward.dense)
    assert rank.recompute.head == 0.0
    none = step_work(placed(Layout()), CLUSTER, replace(train, recompute="none"))
    assert none.useful_flops == step_work(placed(Layout()), CLUSTER, train).useful_flops


# Gradients and parameters


def stage(forward: float, backward: float, **data: float) -> StageTime:
    return StageTime(forward, backward, {}, DataWork(**data))


def test_gradients_behind_a_long_backward_cost_one_bucket() -> None:
    found = data_exposed(stage(1.0, 2.0, gradients=1.0, parameters=0.5, buckets=10.0), 4, True, 0.0)
    assert found == pytest.approx(0.1)


def test_what_the_compute_cannot_hide_is_exposed() -> None:
    found = data_exposed(stage(1.0, 2.0, gradients=5.0, parameters=3.0, buckets=10.0), 4, True, 0.0)
    assert found == pytest.approx(3.0 + 2.0)
    alone = data_exposed(stage(1.0, 2.0, gradients=5.0, parameters=3.0), 4, False, 0.0)
    assert alone == pytest.approx(8.0)


def test_fsdp_gathers_for_every_micro_batch() -> None:
    data = {"gather": 0.5, "gather_again": 0.5, "scatter": 1.0, "units": 10.0}
    hidden, short = (data_exposed(stage(f, 2 * f, **data), 4, True, 0.0) for f in (1.0, 0.25))
    assert hidden == pytest.approx(4 * 1.5 / 10)
    assert short == pytest.approx(4 * (0.25 + 1.0 + 0.15))


def test_one_device_sends_nothing() -> None:
    found = training_time(placed(Layout()), CLUSTER, Train(seq=2048, global_batch=8))
    assert found.exposed_s == 0.0
    assert found.bubble == 0.0


# The whole


def test_units_agree() -> None:
    train = Train(seq=2048, global_batch=64)
    found = training_time(placed(Layout(tp=2, pp=2, dp=4, sp=True, zero=1)), NODES, train)
    assert found.tokens_per_s == pytest.approx(64 * 2048 / found.step.value)
    assert found.tokens_per_s_device == pytest.approx(found.tokens_per_s / 16)
    assert sum(s for _, s in found.parts) == pytest.approx(found.step.value)
    assert tuple(name for name, _ in found.parts) == PARTS
    assert found.mfu == pytest.approx(found.flops_s_device / (NODES.device.peak("bf16") or 0.0))
    assert found.step.low < found.step.value < found.step.high
    assert 0 < found.mfu < 0.8


def test_the_prediction_is_never_below_the_bound() -> None:
    train = Train(seq=2048, global_batch=64)
    for layout in (Layout(dp=8, zero=1), Layout(tp=8, sp=True), Layout(pp=4, dp=2), Layout(dp=8, zero=3)):
        cost = train_cost(placed(layout), CLUSTER, train)
        assert cost.predicted_step is not None
        assert cost.predicted_step.step.value > cost.step_s


def test_more_work_takes_longer() -> None:
    base = seconds(Layout(dp=8, zero=1))
    assert seconds(Layout(dp=8, zero=1), global_batch=128) > base
    assert seconds(Layout(dp=8, zero=1), seq=4096) > base
    assert seconds(Layout(dp=8, zero=1), recompute="full") > base
    assert seconds(Layout(dp=8, zero=1), spec=dense(16)) > base
    assert seconds(Layout(dp=8, zero=1), spec=dense(4)) < base


def test_a_faster_network_never_hurts() -> None:
    layout = Layout(dp=32, zero=3)
    slow, fast = (parse_cluster(f"8x8xH100-SXM@{link}") for link in ("ib-100g", "ib-400g"))
    assert seconds(layout, slow) > seconds(layout, fast)


def test_more_micro_batches_shrink_the_bubble() -> None:
    at = placed(Layout(pp=4))
    few, many = (training_time(at, CLUSTER, Train(seq=2048, global_batch=n)).bubble for n in (4, 32))
    assert few > many > 0


def test_asynchronous_products_hide_tensor_parallel_traffic() -> None:
    at, train = placed(Layout(tp=8, sp=True)), Train(seq=2048, global_batch=8)
    alone, beside = (training_time(at, CLUSTER, train, software=Software(async_tp=x)).step.value for x in (False, True))
    assert beside < alone


def test_newer_software_is_faster() -> None:
    at, train = placed(Layout(), mixture()), Train(seq=2048, global_batch=8)
    old, new = (training_time(at, CLUSTER, train, software=Software(months=m)).step.value for m in (-6.0, 4.0))
    assert new < old


# Constants, words, intervals


def test_every_constant_has_its_reason_and_stays_near_its_prior() -> None:
    data = data_file()
    assert data["source"]
    assert data["versions"]
    for name, entry in data["constants"].items():
        assert len(entry["why"]) > 20, name
        assert entry["value"] > 0, name
        if entry["spread"] == 0:
            assert entry["value"] == entry["prior"], name


def test_words_and_widths() -> None:
    train = Train(seq=2048, global_batch=64)
    inside = training_time(placed(Layout(dp=8, zero=1)), CLUSTER, train).step
    across = training_time(placed(Layout(dp=64, zero=1)), NODES, train).step
    foreign = training_time(placed(Layout(dp=8, zero=1)), parse_cluster("1x8xMI300X"), train).step
    assert (inside.word, across.word, foreign.word) == ("calibrated", "modelled", "modelled")
    assert foreign.high / foreign.value > inside.high / inside.value
    experts = training_time(placed(Layout(dp=8, ep=8, etp=1, zero=1), mixture()), CLUSTER, train).step
    assert experts.high / experts.value > inside.high / inside.value


def test_software_of_an_engine() -> None:
    assert software_of(None) == Software(fused=False)
    titan = software_of(engine_preset("torchtitan"))
    assert not titan.fused
    assert software_of(engine_preset("megatron-core")).fused
    assert software_of(engine_preset("megatron-core", fp8=True)).compute == "f8_e4m3"


def test_a_planted_mistake_is_seen() -> None:
    """The sums are linear in the rates: slower products are seen in their part only."""
    r = rates(constants(), CLUSTER.device, Software())
    wrong = Rates(r.weights._replace(dense=2 * r.weights.dense), r.step_s, r.contention)
    w = Work(dense=1.0, experts=1.0, tp=1.0)
    right, doubled = work_seconds(w, r), work_seconds(w, wrong)
    assert doubled["products"] == pytest.approx(2 * right["products"])
    assert {n: s for n, s in doubled.items() if n != "products"} == pytest.approx(
        {n: s for n, s in right.items() if n != "products"}
    )

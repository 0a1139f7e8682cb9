"""Why a training layout: the search and the path row by row choose alike, and reasons follow from the step's parts."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright import engines
from meshwright.plan import train as module
from meshwright.plan.explain_train import KINDS, Rival, explain_train, rivals_of
from meshwright.plan.plan import Candidate, Plan
from meshwright.plan.search.columns import MODES, columns_of
from meshwright.plan.search.evaluate import Coster
from meshwright.plan.search.train import ranked, search_training
from meshwright.plan.train import TrainContext, plan_train, speed
from meshwright.plan.train_candidates import SPARE, TIE, simplicity
from meshwright.plan.train_engine import engine_preset
from meshwright.plan.train_memory import DEFAULT_ENGINE
from meshwright.plan.training_time import PARTS, WORDS
from meshwright.specs.cluster import parse_cluster
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.workload import Train
from tests.plan.search.spaces import DENSE, MIXTURE, TIED

CASES = [
    (DENSE, "1x8xH100-SXM", "meshwright", Train(seq=8192, global_batch=64)),
    (MIXTURE, "2x8xH100-SXM@ib-400g", "megatron", Train(seq=4096, global_batch=128)),
    (TIED, "1x4xA100-SXM-40GB", "torchtitan", Train(seq=4096, global_batch=32)),
    (DENSE, "4x8xA100-SXM-40GB@ib-200g", "meshwright", Train(seq=4096, global_batch=128)),
]


def context(spec: ModelSpec, on: str, engine: str, work: Train) -> TrainContext:
    return TrainContext(spec, parse_cluster(on), work, engines.profile(engine), DEFAULT_ENGINE, False)


def by_rows(monkeypatch: pytest.MonkeyPatch, ctx: TrainContext) -> list[Candidate]:
    """What the path without arrays finds, best first."""
    monkeypatch.setattr(module, "_full_search", lambda ctx: None)
    return module._search(ctx)[0]


def plan(spec: ModelSpec, on: str, engine: str, work: Train, layout: Layout | None = None) -> Plan:
    return plan_train(spec, parse_cluster(on), work, engines.profile(engine), DEFAULT_ENGINE, layout)


@pytest.mark.parametrize(("spec", "on", "engine", "work"), CASES, ids=lambda v: getattr(v, "name", None))
def test_both_paths_order_the_same_layouts_alike(
    monkeypatch: pytest.MonkeyPatch, spec: ModelSpec, on: str, engine: str, work: Train
) -> None:
    """What is found row by row, costed over arrays: the same recompute, the same seconds, the same order."""
    ctx = context(spec, on, engine, work)
    works = by_rows(monkeypatch, ctx)
    assert len(works) > 1
    coster = Coster(spec, ctx.profile, ctx.cluster, work, ctx.engine)
    x = columns_of([c.layout for c in works])
    memory = ctx.cluster.device.memory_bytes
    need = coster.memory(x)
    roomy = need <= (1 - SPARE) * memory
    mode = np.where(roomy.any(axis=0), roomy.argmax(axis=0), (need <= memory).argmax(axis=0))
    assert [MODES[m] for m in mode] == [c.workload.recompute for c in works if isinstance(c.workload, Train)]
    rates = coster.cost(x, mode)["tokens_per_s"]
    assert rates == pytest.approx([speed(c) for c in works], rel=1e-9)
    assert ranked(x, rates).tolist() == list(range(len(works)))


@pytest.mark.parametrize(("spec", "on", "engine", "work"), [CASES[1], CASES[3]], ids=lambda v: getattr(v, "name", None))
def test_the_plan_takes_the_best_of_the_search(
    monkeypatch: pytest.MonkeyPatch, spec: ModelSpec, on: str, engine: str, work: Train
) -> None:
    found = plan(spec, on, engine, work)
    assert found.chosen is not None
    assert found.searched is not None
    best = found.searched.best[0]
    assert found.layout == best.layout
    assert speed(found.chosen) == pytest.approx(best.tokens_per_s_device * found.cluster.devices, rel=1e-9)
    assert found.chosen.memory.fits
    rows = by_rows(monkeypatch, context(spec, on, engine, work))
    assert max(map(speed, rows)) <= speed(found.chosen) / (1 - TIE), "a layout that the search missed"


def test_published_practice() -> None:
    """Llama 3.1 405B on 2,048 H100: with Megatron NVIDIA's own layout (TP 8, PP 8, CP 2 with chunks; Megatron-Bridge
    performance recipes), with our own runtime the pipeline of 16 that Meta used (arXiv:2407.21783, table 4)."""
    spec, on, work = read_model("llama-3.1-405b"), "256x8xH100-SXM@ib-400g", Train(seq=8192, global_batch=2048)
    for engine, preset, wanted in (("megatron", "megatron-core", (8, 8, 2)), ("meshwright", "torch", (8, 16, 2))):
        profile = engines.profile(engine)
        found = search_training(spec, parse_cluster(on), work, profile, engine_preset(preset))
        layout = found.best[0].layout
        assert (layout.tp, layout.pp, layout.cp) == wanted


@pytest.fixture(scope="module")
def large() -> Plan:
    work = Train(seq=8192, global_batch=512)
    return plan(read_model("llama-3.1-70b"), "16x8xH100-SXM@ib-400g", "meshwright", work)


def test_the_bound_says_what_the_step_is_made_of(large: Plan) -> None:
    (told,) = (r for r in large.reasons if r.code == "bound")
    assert large.chosen is not None
    time = large.chosen.cost.predicted_step
    assert time is not None
    parts = dict(time.parts)
    assert sorted(name for names in KINDS.values() for name in names) == sorted(PARTS)
    for kind, names in KINDS.items():
        share = sum(parts[name] for name in names) / time.step.value
        assert told.numbers[kind.replace(" ", "_")] == pytest.approx(share)
    assert told.text.startswith("bound by FLOPs")
    assert told.numbers["step_s"] > told.numbers["step_lower_bound_s"] > 0


def test_every_axis_has_its_reason_with_the_numbers(large: Plan) -> None:
    reasons = {r.code: r for r in large.reasons}
    assert large.layout is not None
    assert large.searched is not None
    for axis, rival in large.searched.rivals.items():
        cut = getattr(large.layout, axis) > 1
        told = reasons[f"{'without' if cut else 'with'}_{axis}"]
        if rival is not None:
            assert (getattr(rival.layout, axis) > 1) != cut
            best = large.searched.best[0].tokens_per_s_device
            assert told.numbers["ratio"] == pytest.approx(rival.tokens_per_s_device / best)
            assert told.numbers["ratio"] < 1 / (1 - TIE)
    assert reasons["no_tp_across_nodes"].numbers["across_s"] > reasons["no_tp_across_nodes"].numbers["inside_s"]


def test_a_runner_up_says_which_part_it_loses_by(large: Plan) -> None:
    assert large.chosen is not None
    assert large.chosen.cost.predicted_step is not None
    own = dict(large.chosen.cost.predicted_step.parts)
    slower = 0
    for other in large.alternatives:
        time = other.candidate.cost.predicted_step
        assert time is not None
        most = max(PARTS, key=lambda name: dict(time.parts)[name] - own[name])
        if "fewer tokens/s" in other.lost_by:
            slower += 1
            assert WORDS[most] in other.lost_by
    assert slower


def test_what_is_left_out_is_told(large: Plan) -> None:
    assert large.searched is not None
    (told,) = (r for r in large.reasons if r.code == "left_out")
    assert all(what in told.text and why in told.text for what, why in large.searched.left_out)
    assert "tp across nodes" in told.text


def test_a_rival_that_does_not_fit_is_told(large: Plan) -> None:
    assert large.chosen is not None
    assert isinstance(large.workload, Train)
    rivals: dict[str, Rival | None] = {"pp": None}
    told = explain_train(large.spec, large.cluster, large.workload, large.chosen, False, rivals)
    assert told[-1].text.endswith("no layout of the space fits")


def test_rivals_among_rows_are_the_fastest_on_the_other_side(monkeypatch: pytest.MonkeyPatch) -> None:
    works = by_rows(monkeypatch, context(*CASES[0]))
    found = rivals_of(works[0], works)
    assert found
    for axis, rival in found.items():
        cut = getattr(works[0].layout, axis) > 1
        others = [c for c in works if (getattr(c.layout, axis) > 1) != cut]
        assert rival is not None
        assert rival.layout == max(others, key=speed).layout


def test_simpler_layouts_come_first() -> None:
    order = [
        Layout(dp=8, zero=1),
        Layout(dp=8, zero=3),
        Layout(tp=2, dp=4, zero=1),
        Layout(pp=2, dp=4, zero=1),
        Layout(pp=2, dp=4, zero=1, schedule="zbv"),
        Layout(pp=2, dp=4, zero=1, stage_layers=(17, 15)),
        Layout(pp=4, dp=2, zero=1),
    ]
    assert sorted(order, key=simplicity) == order
    x = columns_of(order)
    assert ranked(x, np.ones(len(order))).tolist() == list(range(len(order)))

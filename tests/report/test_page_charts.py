"""What the charts of the page show: fronts, schedules, idle time, layers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import Serve, Train, plan_serve, plan_train
from meshwright.api import timelines, train_engine
from meshwright.moves.pipeline import Action, schedule
from meshwright.plan.timeline_train import WORDS
from meshwright.report import page_schedule
from meshwright.report.page_pareto import Point, front, loads, serving_curves, training_points
from meshwright.report.page_schedule import Bar, idle_bars, idle_shares, serving_bars, thinned, training_bars
from meshwright.report.page_times import category, kinds

POINTS = st.lists(st.builds(Point, st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=30)


@given(POINTS)
def test_nothing_beats_the_front(points: list[Point]) -> None:
    best = front(points)
    for p in points:
        assert any(b.x <= p.x and b.y >= p.y for b in best)
    for b in best:
        assert not any(p.x <= b.x and p.y > b.y for p in points)


@given(st.integers(1, 100_000), st.integers(1, 64))
def test_loads_grow_to_what_the_caches_hold(most: int, least: int) -> None:
    found = loads(most, least)
    assert found[0] == least
    assert found[-1] == max(most, least)
    assert found == sorted(set(found))
    assert len(found) <= 14


def test_curves_name_the_chosen_the_others_and_what_does_not_fit() -> None:
    plan = plan_serve("llama-3.1-70b", "1x8xH100-SXM", Serve(isl=2000, osl=200))
    curves = serving_curves(plan)
    assert [c.role for c in curves].count("chosen") == 1
    assert curves[0].role == "chosen"
    assert {"runner-up", "does not fit"} <= {c.role for c in curves}
    for curve in curves:
        if curve.role in {"chosen", "runner-up"}:
            assert [p.load for p in curve.points] == sorted(p.load for p in curve.points)
            assert curve.points[0].x < curve.points[-1].x, "more requests, slower tokens"
            assert curve.points[0].y < curve.points[-1].y, "more requests, more tokens"
    assert plan.chosen is not None
    predicted = plan.chosen.cost.predicted
    assert predicted is not None
    assert curves[0].own.x == pytest.approx(predicted.tpot.value * 1e3)
    assert curves[0].own.y == pytest.approx(predicted.tokens_per_s.value / plan.chosen.layout.world)


def test_training_marks_stand_at_their_memory() -> None:
    plan = plan_train("llama-3.1-70b", "8x8xH100-SXM", Train(seq=8192, global_batch=256))
    found = training_points(plan, train_engine(plan))
    limit = plan.cluster.device.memory_bytes / 2**30
    assert {"chosen", "runner-up", "searched", "does not fit"} == {c.role for c in found}
    for curve in found:
        assert (curve.own.x > limit) == (curve.role == "does not fit")


def step(layout: str, batch: int = 64) -> list[Bar]:
    plan = plan_train("llama-3.1-8b", "2x8xH100-SXM@ib-400g", Train(global_batch=batch), layout=layout)
    return training_bars(timelines(plan)[0])


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_bars_are_the_table(name: str) -> None:
    bars = step(f"tp=2,pp=4,dp=2,schedule={name}")
    table = schedule(name, 4, 32)
    kinds_of = {word: kind for kind, word in WORDS.items()}
    for stage, actions in enumerate(table.actions):
        own = sorted((b for b in bars if b.stage == stage and b.kind in kinds_of), key=lambda b: b.start)
        drawn = [Action(kinds_of[b.kind], stage, int(b.name.rsplit(" ", 1)[1])) for b in own]  # type: ignore[arg-type]
        assert drawn == list(actions)
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(own))


def test_bars_and_gaps_fill_the_time_of_every_stage() -> None:
    bars = step("tp=2,pp=4,dp=2")
    end = max(b.end for b in bars)
    gaps = idle_bars(bars, None)
    shares = idle_shares(bars)
    for stage in range(4):
        idle = sum(g.end - g.start for g in gaps if g.stage == stage)
        assert idle / end == pytest.approx(shares[stage], abs=0.02)
    assert all(0 < share < 1 for share in shares)


def test_idle_time_of_a_hand_made_schedule() -> None:
    bars = [Bar(0, "forward", "a", 0.0, 4.0), Bar(1, "forward", "a", 1.0, 2.0), Bar(1, "backward", "a", 3.0, 4.0)]
    assert [(g.stage, g.start, g.end) for g in idle_bars(bars, None)] == [(1, 0.0, 1.0), (1, 2.0, 3.0)]
    assert idle_shares(bars) == [0.0, 0.5]


def test_long_steps_are_cut_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    bars = step("tp=2,pp=4,dp=2", batch=256)
    assert thinned(bars) == (bars, None)
    monkeypatch.setattr(page_schedule, "MAX_BARS", 200)
    shown, cut = thinned(bars)
    assert cut is not None
    assert 200 <= len(shown) <= 210
    assert min(b.start for b in shown) == 0.0
    assert max(b.end for b in shown) == max(b.end for b in bars)
    assert not [b for b in shown if cut[0] < b.start < cut[1]]
    assert not [g for g in idle_bars(shown, cut) if g.start < cut[1] and g.end > cut[0]]


def test_many_stages_are_thinned() -> None:
    bars = [Bar(stage, "pass", "b", stage, stage + 1.0) for stage in range(200)]
    shown, cut = thinned(bars)
    assert cut is None
    assert len({b.stage for b in shown}) == 32
    assert {0, 199} <= {b.stage for b in shown}


def test_decoding_stages_take_turns() -> None:
    work = Serve(isl=2000, osl=200, concurrency=16)
    plan = plan_serve("llama-3.1-70b", "2x4xA100-80G@ib-200g", work, layout="tp=2,pp=4")
    decode = timelines(plan)[1]
    bars = serving_bars(decode)
    for stage in range(4):
        own = sorted((b for b in bars if b.stage == stage), key=lambda b: b.start)
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(own))
    for batch in range(4):
        passes = sorted((b for b in bars if b.name == f"batch {batch}"), key=lambda b: b.start)
        assert [b.stage for b in passes] == [(turn - batch) % 4 for turn in range(8)]


def test_layers_that_differ_are_shown_apart() -> None:
    plan = plan_serve("deepseek-v3", "2x8xH200-SXM@ib-400g", Serve(concurrency=16), layout="tp=8,dp=2,ep=16")
    for timeline in timelines(plan):
        found = kinds(timeline.tracks[0], timeline.phase)
        assert [held for held, _ in found] == [list(range(3, 61)), [0, 1, 2]]
        colours = {category(e) for e in found[0][1]}
        assert colours == {"products", "experts", "attention", "elementwise", "communication", "launch"}
        assert "experts" not in {category(e) for e in found[1][1]}


def test_the_front_and_the_pools_of_a_search_are_drawn() -> None:
    plan = plan_serve("llama-3.1-70b", "2x8xH100-SXM@ib-400g", Serve(isl=2000, osl=300, ttft_s=2.0, tpot_s=0.03))
    curves = serving_curves(plan)
    assert plan.served is not None
    assert plan.served.split is not None
    assert [c.role for c in curves].count("pools") == len(plan.served.split.ratios)
    chosen = curves[0]
    assert plan.settings is not None
    assert plan.chosen is not None
    limit = (plan.settings.max_num_seqs or 0) * plan.chosen.layout.dp
    assert chosen.points[-1].load > limit, "the curve goes on beyond the load that is recommended"
    assert chosen.points[0].x < chosen.own.x < chosen.points[-1].x

"""The search: what it says of its space is so, its front is one, its best layout is the best, and it is quick."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import engines
from meshwright.plan.plan import Plan
from meshwright.plan.search.columns import MODES
from meshwright.plan.search.pareto import front
from meshwright.plan.search.space import (
    MICRO_BATCHES,
    RELIEVED,
    SCHEDULED,
    bases,
    expert_rows,
    lighter_ends,
    space,
)
from meshwright.plan.search.train import Found, available, search_training
from meshwright.plan.train import plan_train
from meshwright.plan.train_candidates import TIE
from meshwright.plan.train_engine import TrainEngine
from meshwright.plan.train_memory import train_memory
from meshwright.report.as_json import plan_json
from meshwright.specs.build import decoder
from meshwright.specs.cluster import parse_cluster
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import place
from meshwright.specs.workload import Train
from tests.plan.search.spaces import DENSE, MIXTURE, TIED

WORK = Train(seq=4096, global_batch=256)
NODES = parse_cluster("4x8xH100-SXM@ib-400g")


def search(spec: ModelSpec, work: Train = WORK, engine: str = "meshwright", **more: object) -> Found:
    return search_training(spec, NODES, work, engines.profile(engine), TrainEngine(), **more)  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=40))
def test_the_front_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    value, cost = (np.array(axis, dtype=float) for axis in zip(*points, strict=True))
    found = set(front(value, cost).tolist())
    for i, (v, c) in enumerate(points):
        beaten = any((w >= v and d <= c and (w, d) != (v, c)) for w, d in points)
        first = points.index((v, c)) == i
        assert (i in found) == (not beaten and first)


@pytest.mark.parametrize("engine", ["meshwright", "megatron", "torchtitan"])
@pytest.mark.parametrize("spec", [DENSE, TIED, MIXTURE], ids=lambda s: s.name)
def test_every_layout_of_the_space_is_legal_and_uses_the_cluster(spec: ModelSpec, engine: str) -> None:
    profile = engines.profile(engine)
    found = space(spec, NODES, WORK, profile)
    assert found.size == found.illegal + len(found.legal)
    layouts = [found.legal.layout(i) for i in range(0, len(found.legal), 1 + len(found.legal) // 40)]
    assert layouts
    for layout in layouts:
        assert layout.world == NODES.devices
        assert not [r for r in profile.check(spec, layout, NODES, WORK) if r.severity == "illegal"]
    every = {found.legal.layout(i) for i in range(len(found.legal))}
    assert len(every) == len(found.legal), "no layout twice"


@pytest.mark.parametrize("engine", ["meshwright", "megatron", "torchtitan"])
def test_no_legal_layout_of_the_space_is_lost(engine: str) -> None:
    """Layouts drawn from the axes at random: those that the engine takes are in the space."""
    spec = decoder(
        hidden=2048, layers=24, heads=16, kv_heads=4, ffn=8192, vocab=64000, tied=False,
        experts=16, topk=2, moe_ffn=1026, name="narrow experts",
    )  # fmt: skip
    profile, rng = engines.profile(engine), random.Random(11)
    legal = space(spec, NODES, WORK, profile).legal
    known, tried = {legal.layout(i) for i in range(len(legal))}, 0
    every = list(bases(spec, NODES, WORK))
    for _ in range(6000):
        at, (schedule, virtual) = rng.choice(every), rng.choice(SCHEDULED)
        ep, etp = rng.choice(expert_rows(spec))
        if at.pp == 1:
            schedule, virtual = "1f1b", 1
        sizes = lighter_ends(len(spec.layers), at.pp, rng.choice([1, 2])) if schedule in RELIEVED else ()
        sizes = () if rng.random() < 0.5 or sizes == tuple(profile.split_layers(24, at.pp)) else sizes
        layout = Layout(
            tp=at.tp, pp=at.pp, dp=at.dp, cp=at.cp, ep=ep, etp=etp or None if at.tp > 1 else None,
            sp=at.tp > 1 and rng.random() < 0.8, zero=rng.choice([0, 1, 2, 3]) if at.dp * at.cp > 1 else 0,
            schedule=schedule, virtual=virtual, micro_batch=rng.choice(MICRO_BATCHES), stage_layers=sizes,
        )  # type: ignore[arg-type] # fmt: skip
        if not [r for r in profile.check(spec, layout, NODES, WORK) if r.severity == "illegal"]:
            tried += 1
            assert layout in known, str(layout)
    assert tried > 50


def test_stages_and_nodes_are_aligned() -> None:
    cluster = parse_cluster("6x8xH100-SXM@ib-400g")
    for base in bases(DENSE, cluster, WORK):
        stage = base.tp * base.cp * base.dp
        assert stage * base.pp == 48
        assert stage % 8 == 0 or 8 % stage == 0


def test_counts_add_up_and_the_best_is_the_fastest_of_its_step() -> None:
    found = search(MIXTURE)
    assert found.size == found.illegal + found.uneven + found.unfit + found.tight + found.costed
    assert found.costed > 1000
    fastest = max(p.tokens_per_s_device for p in found.pareto)
    assert found.best[0].tokens_per_s_device > (1 - TIE) * fastest
    assert not found.best[0].lost_by
    slower = [p for p in found.best if p.tokens_per_s_device < 0.9 * fastest]
    assert all(p.lost_by and p.lost_s > 0 for p in slower)
    speeds = [p.tokens_per_s_device for p in found.pareto]
    free = [p.free_bytes for p in found.pareto]
    assert speeds == sorted(speeds, reverse=True)
    assert free == sorted(free)


def test_points_fit_as_they_say_with_the_least_recompute() -> None:
    cluster, work = parse_cluster("2x4xA100-SXM-40GB"), replace(WORK, seq=16384, global_batch=64)
    found = search_training(DENSE, cluster, work, engines.profile("meshwright"), TrainEngine())
    points = (*found.pareto, *found.best)
    assert len({p.recompute for p in points}) > 1
    for point in points[:: 1 + len(points) // 12]:
        modes = MODES[: MODES.index(point.recompute) + 1]
        free = [
            w.capacity_bytes - w.total_bytes
            for mode in modes
            for w in [train_memory(DENSE, point.layout, cluster, replace(work, recompute=mode), TrainEngine()).worst]
        ]
        assert free[-1] == pytest.approx(point.free_bytes, abs=1)
        assert all(left < 0 for left in free[:-1])


def test_a_mode_that_the_user_named_is_kept() -> None:
    found = search(DENSE, replace(WORK, recompute="full"), recompute_fixed=True)
    assert {p.recompute for p in found.best} == {"full"}


def test_uneven_shares_are_counted_apart() -> None:
    """A vocabulary that tp does not divide: our runtime deals it unevenly, the tables hold only equal ranks."""
    odd = decoder(hidden=1024, layers=8, heads=16, kv_heads=4, ffn=4096, vocab=50257, tied=False, name="odd")
    even = decoder(hidden=1024, layers=8, heads=16, kv_heads=4, ffn=4096, vocab=50304, tied=False, name="even")
    found = search(odd)
    assert found.uneven > 0
    assert {p.layout.tp for p in found.pareto} == {1}
    assert search(even).uneven == 0


def test_a_cluster_without_a_whole_split_has_no_space() -> None:
    """24 devices, one sequence, two layers, one head: nothing takes the factor 3 but replicas without a sequence."""
    tiny = decoder(hidden=64, layers=2, heads=1, kv_heads=1, ffn=64, vocab=64, tied=False, name="tiny")
    cluster, work = parse_cluster("3x8xH100-SXM@ib-400g"), Train(seq=4096, global_batch=1)
    found = search_training(tiny, cluster, work, engines.profile("meshwright"), TrainEngine())
    assert not found.best
    assert found.costed == 0


def test_what_cannot_be_asked_is_left_to_the_search_row_by_row() -> None:
    assert available(engines.profile("megatron"), WORK)
    assert not available(engines.profile("deepspeed"), WORK)
    assert not available(engines.profile("meshwright"), replace(WORK, recompute="full", recompute_layers=2))


@pytest.fixture(scope="module")
def large() -> Plan:
    """DeepSeek-V3 on 2,048 devices."""
    work = Train(seq=4096, global_batch=15360)
    cluster = parse_cluster("256x8xH100-SXM@ib-400g")
    return plan_train(read_model("deepseek-v3"), cluster, work, engines.profile("meshwright"), TrainEngine())


def test_a_large_plan_says_how_large_its_space_was(large: Plan) -> None:
    assert large.ok
    assert large.searched is not None
    told = next(r for r in large.reasons if r.code == "space")
    assert f"{large.searched.size:,} layouts" in told.text
    assert large.layout is not None
    assert large.layout.schedule in next(r.text for r in large.reasons if r.code == "pipeline")
    assert large.searched.size > 100_000
    assert large.layout is not None
    assert large.layout.pp > 1
    assert large.layout.ep > 1
    assert large.alternatives
    assert not [r for r in large.rules if r.severity == "illegal"]
    told_json = plan_json(large)["search"]
    assert told_json["size"] == large.searched.size
    assert told_json["best"][0]["layout"]["text"] == str(large.searched.best[0].layout)
    assert json.loads(json.dumps(told_json))["costed"] == large.searched.costed
    assert place(large.spec, large.layout, engines.profile("meshwright"))


def test_two_thousand_devices_take_seconds() -> None:
    """Twice the aim of 2 s of CPU, for a busy machine."""
    spec, cluster = read_model("deepseek-v3"), parse_cluster("256x8xH100-SXM@ib-400g")
    work = Train(seq=4096, global_batch=15360)
    start = time.process_time()
    found = search_training(spec, cluster, work, engines.profile("meshwright"), TrainEngine())
    assert found.costed > 40_000
    assert time.process_time() - start < 4.0


def test_importing_the_planner_leaves_numpy_alone() -> None:
    program = (
        "import sys\n"
        "import meshwright.plan.train, meshwright.plan.search.train, meshwright.plan.search.evaluate\n"
        "assert 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

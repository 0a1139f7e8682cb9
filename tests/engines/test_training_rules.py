"""What the rules of a training engine allow can be placed and counted; what they refuse names numbers and a way out."""

from __future__ import annotations

import random

import pytest

from meshwright.engines import profile
from meshwright.plan.train_engine import engine_preset
from meshwright.plan.train_memory import train_memory
from meshwright.specs.layout import Fsdp, Layout
from meshwright.specs.placement import place
from meshwright.specs.workload import Train
from tests.specs.builders import gqa, moe
from tests.specs.clusters import cluster

MODELS = (gqa(), gqa(heads=12, kv_heads=3, hidden=48, layers=6), moe(), moe(experts=6, shared=1), moe(mla=True))


def random_layout(rng: random.Random) -> Layout:
    """Any degrees, many of them illegal."""
    layout = Layout(
        tp=rng.choice((1, 1, 2, 3, 4, 5, 8)),
        pp=rng.choice((1, 1, 1, 2, 3)),
        dp=rng.choice((1, 2, 4, 8)),
        cp=rng.choice((1, 1, 1, 2, 4)),
        ep=rng.choice((1, 1, 1, 2, 4, 8)),
        zero=rng.choice((0, 1, 2, 3)),
        etp=rng.choice((None, None, 1, 2)),
        micro_batch=rng.choice((1, 2)),
    )
    if layout.zero == 3 and rng.random() < 0.5:
        knobs = Fsdp(replicas=rng.choice((1, 2)), prefetch=rng.choice((1, 3)), wrap=rng.choice(("layer", "model")))
        layout = layout.with_(fsdp=knobs)
    return layout


@pytest.mark.parametrize("name", ["deepspeed", "accelerate", "transformers", "torchrun"])
def test_legal_layouts_can_be_counted(name: str) -> None:
    rng = random.Random(8)
    judged = profile(name)
    engine = engine_preset("torch" if name == "torchrun" else name)
    legal = refused = 0
    for _ in range(400):
        spec, layout = rng.choice(MODELS), random_layout(rng)
        work = Train(seq=128, global_batch=layout.dp * layout.micro_batch * rng.choice((1, 2)))
        on = cluster(max(1, -(-layout.world // 8)), 8)
        rules = judged.check(spec, layout, on, work)
        illegal = [r for r in rules if r.severity == "illegal"]
        for rule in illegal:
            assert rule.way_out
            assert any(c.isdigit() for c in rule.message) or rule.code == "not_of_this_engine"
        refused += bool(illegal)
        if illegal:
            continue
        legal += 1
        placement = place(spec, layout, judged, sections=("decoder",))
        held = sum(c.ranks for c in placement.classes)
        assert held == layout.world
        assert train_memory(spec, layout, on, work, engine).worst.total_bytes > 0
    assert legal > 10
    assert refused > 15

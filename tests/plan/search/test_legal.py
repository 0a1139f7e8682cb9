"""The masks of the search say what the engines' own rules say, on layouts drawn at random and on their neighbours."""

from __future__ import annotations

import random

import numpy as np
import pytest

from meshwright import engines
from meshwright.plan.search import legal as masks
from meshwright.plan.search.columns import SCHEDULES, columns_of
from meshwright.specs.build import decoder
from meshwright.specs.cluster import parse_cluster
from meshwright.specs.layout import Fsdp, Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.workload import Serve, Train, Workload
from tests.plan.search.spaces import DENSE, MIXTURE, TIED

ODD = decoder(hidden=1536, layers=30, heads=12, kv_heads=3, ffn=8960, vocab=151936, tied=False, name="odd")
CLUSTER = parse_cluster("8x8xH100-SXM@ib-400g")
TRAIN = Train(seq=8192, global_batch=64)


def drawn(rng: random.Random, *, serving: bool) -> Layout:
    """A layout with a few of its axes set, now and then to what no engine takes."""
    pick = rng.choice
    changes: dict[str, object] = {
        "tp": pick([1, 2, 2, 3, 4, 8, 16]),
        "dp": pick([1, 2, 2, 3, 4, 8, 16]),
        "pp": pick([1, 2, 2, 3, 4, 5, 8, 40]),
        "cp": pick([1, 2, 4]),
        "ep": pick([1, 2, 4, 8, 16, 32]),
        "etp": pick([None, 1, 2, 4]),
        "micro_batch": pick([1, 2, 3, 4]),
        "zero": pick([0, 1, 2, 3, 3]),
        "schedule": pick(SCHEDULES),
        "virtual": pick([1, 2, 2, 4]),
    }
    of_server = {"tp", "dp", "pp", "cp", "ep"}
    likely = {name: 0.5 if name in of_server else 0.1 if serving else 0.3 for name in changes}
    layout = Layout(**{name: value for name, value in changes.items() if rng.random() < likely[name]})  # type: ignore[arg-type]
    if layout.ep > 1 and rng.random() < 0.5:
        layout = layout.with_(ep=layout.tp * layout.dp * layout.cp)
    if layout.pp > 1 and rng.random() < 0.2:
        sizes = [rng.randint(1, 12) for _ in range(layout.pp - (rng.random() < 0.1))]
        sizes[-1] = max(1, rng.choice([24, 30, 32]) - sum(sizes[:-1]))
        layout = layout.with_(stage_layers=tuple(sizes))
    if layout.zero == 3 and rng.random() < 0.5:
        knobs = Fsdp(reshard_after_forward=pick([True, False]), replicas=pick([1, 2, 3, 4]))
        layout = layout.with_(fsdp=knobs if knobs != Fsdp() else None)
    return layout.with_(sp=rng.random() < (0.1 if serving else 0.8 if layout.tp > 1 else 0.1))


def refused(spec: ModelSpec, layout: Layout, engine: str, work: Workload) -> list[str]:
    found = engines.profile(engine).check(spec, layout, CLUSTER, work)
    return [rule.code for rule in found if rule.severity == "illegal"]


@pytest.mark.parametrize("spec", [DENSE, TIED, MIXTURE, ODD], ids=lambda s: s.name)
@pytest.mark.parametrize(
    ("engine", "work"),
    [("meshwright", TRAIN), ("megatron", TRAIN), ("torchtitan", TRAIN), ("vllm", Serve()), ("meshwright", Serve())],
    ids=lambda v: v if isinstance(v, str) else type(v).__name__,
)
def test_masks_agree_with_the_rules(spec: ModelSpec, engine: str, work: Workload) -> None:
    rng = random.Random(7)
    layouts = [drawn(rng, serving=isinstance(work, Serve)) for _ in range(800)]
    said = masks.legal(spec, columns_of(layouts), engines.profile(engine), CLUSTER, work)
    wrong = [
        (str(layout), bool(ok), codes)
        for layout, ok in zip(layouts, said, strict=True)
        if bool(ok) == bool(codes := refused(spec, layout, engine, work))
    ]
    assert not wrong, wrong[:3]
    assert 10 < said.sum() < len(layouts) - 100, "both answers must come up often enough"


def test_a_forgotten_rule_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: without the rule on heads 16 heads pass with tp 32."""
    whole = masks.megatron
    monkeypatch.setattr(masks, "_divides", lambda sizes, by: np.ones(len(by), dtype=bool))
    layout = columns_of([Layout(tp=32, sp=True)])
    assert whole(MIXTURE, layout, TRAIN).all()
    assert "heads_divide_tp" in refused(MIXTURE, Layout(tp=32, sp=True), "megatron", TRAIN)


def test_columns_give_the_layouts_back() -> None:
    rng = random.Random(3)
    layouts = [drawn(rng, serving=False) for _ in range(200)]
    x = columns_of(layouts)
    assert [x.layout(i) for i in range(len(x))] == layouts

"""``plan train``: the search rejects nothing that fits, the bubble is that of the schedule's table."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import engines
from meshwright.moves.pipeline import schedule, simulate
from meshwright.plan.plan import Plan
from meshwright.plan.train import parameter_counts, plan_train, state_bound
from meshwright.plan.train_cost import bubble
from meshwright.plan.train_memory import DEFAULT_ENGINE, train_memory
from meshwright.report.as_json import plan_json
from meshwright.specs.build import decoder
from meshwright.specs.cluster import parse_cluster
from meshwright.specs.layout import Layout, parse_layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.workload import Train

DENSE = decoder(hidden=8192, layers=80, heads=64, kv_heads=8, ffn=28672, vocab=128256, tied=False, name="llama-70b")
SMALL = decoder(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256, tied=False, name="llama-8b")
MIXTURE = decoder(
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    ffn=14336,
    vocab=32000,
    tied=False,
    experts=8,
    topk=2,
    moe_ffn=14336,
    name="mixture",
)


def plan(spec: ModelSpec, on: str, work: Train, layout: str | None = None) -> Plan:
    chosen = parse_layout(layout) if layout else None
    return plan_train(spec, parse_cluster(on), work, engines.profile("meshwright"), DEFAULT_ENGINE, chosen)


@settings(max_examples=80, deadline=None)
@given(
    spec=st.sampled_from([SMALL, MIXTURE]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2, 4, 8]),
    ep=st.sampled_from([1, 2, 4]),
    zero=st.sampled_from([0, 1, 2, 3]),
    optimizer=st.sampled_from(["adamw", "sgd", "muon"]),
    grad=st.sampled_from(["bf16", "f32"]),
    param=st.sampled_from(["bf16", "f32"]),
    offload=st.sampled_from(["none", "optimizer"]),
)
def test_the_bound_of_the_search_is_one(  # type: ignore[no-untyped-def]
    spec, tp, pp, dp, ep, zero, optimizer, grad, param, offload
) -> None:
    """What the search rejects without counting must not be less than what a count gives."""
    ep = ep if spec is MIXTURE and dp % ep == 0 else 1
    layout = Layout(tp=tp, pp=pp, dp=dp, ep=ep, zero=zero)
    work = Train(optimizer=optimizer, grad_dtype=grad, param_dtype=param, offload=offload)
    worst = max(
        r.weights_bytes + r.gradients_bytes + r.optimizer_bytes
        for r in train_memory(spec, layout, parse_cluster("64x8xH100"), work).ranks
    )
    assert state_bound(work, DEFAULT_ENGINE, layout, parameter_counts(spec)) <= worst * 1.0001


def test_an_offloaded_optimizer_does_not_count_against_the_device() -> None:
    """70 B on 8 x 80 GB: 49 GiB of parameters and gradients a rank beside an optimizer in host memory."""
    work = Train(seq=4096, global_batch=64)
    assert not plan(DENSE, "8xH100", work).ok
    found = plan(DENSE, "8xH100", replace(work, offload="optimizer"))
    assert found.ok
    assert found.chosen is not None
    assert found.chosen.memory.worst.optimizer_bytes == 0


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zbv", "dualpipev"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (4, 32), (8, 24)])
def test_the_bubble_is_that_of_the_simulated_table(name: str, stages: int, microbatches: int) -> None:
    virtual = 2 if name in {"zbv", "dualpipev"} else 1
    table = schedule(name, stages, microbatches, virtual)
    layout = Layout(pp=stages, schedule=name)  # type: ignore[arg-type]
    assert bubble(layout, microbatches) == pytest.approx(simulate(table).bubble)


def test_a_short_folded_pipeline_is_simulated() -> None:
    layout = Layout(pp=8, schedule="zbv")
    wanted = simulate(schedule("zbv", 8, 4, 2)).bubble
    assert bubble(layout, 4) == pytest.approx(wanted)
    reasons = {r.code: r.text for r in plan(SMALL, "8xH100", Train(global_batch=4), "pp=8,schedule=zbv").reasons}
    assert "by its table" in reasons["pipeline"]


def test_a_schedule_that_has_no_table_is_illegal() -> None:
    found = plan(SMALL, "8xH100", Train(global_batch=4), "pp=8,schedule=dualpipev")
    assert not found.legal
    assert "16 micro-batches on 8 stages, not 4" in found.verdict
    (rule,) = (r for r in found.rules if r.severity == "illegal")
    assert "--global-batch to 16" in rule.way_out
    assert plan(SMALL, "8xH100", Train(global_batch=16), "pp=8,schedule=dualpipev").legal


def test_the_text_names_the_schedules_own_form() -> None:
    for layout, form in (
        ("pp=8", "(p-1)/(m+p-1)"),
        ("pp=8,schedule=interleaved,virtual=2", "(p-1)/(v m+p-1)"),
        ("pp=8,schedule=zb-h1", "(p-1)/(3m+p-1)"),
        ("pp=8,schedule=zbv", "(p-1)/(6m+p-1)"),
    ):
        reasons = {r.code: r.text for r in plan(SMALL, "8xH100", Train(global_batch=256), layout).reasons}
        assert form in reasons["pipeline"]


def test_ranks_of_an_uneven_cut_are_all_listed() -> None:
    """Our runtime cuts 32 heads over 3 ranks as 11 + 11 + 10: memory knows the classes of the placement."""
    found = plan(SMALL, "6xH100", Train(global_batch=64), "tp=3,dp=2,zero=1")
    rows = plan_json(found)["memory"]["ranks"]
    assert [r["rank"] for r in rows] == list(range(6))
    assert len({r["weights_bytes"] for r in rows}) > 1

"""What people ask of a serving layout is answered with the numbers of both layouts."""

from __future__ import annotations

import pytest

from meshwright.api import plan_serve
from meshwright.plan.plan import Plan, Reason
from meshwright.specs.build import decoder
from meshwright.specs.workload import Serve

DENSE = decoder(hidden=5120, layers=64, heads=64, kv_heads=8, ffn=25600, vocab=151936, tied=False, name="dense 32b")
MIXTURE = decoder(
    hidden=4096,
    layers=48,
    heads=64,
    kv_heads=4,
    ffn=12288,
    vocab=151936,
    tied=False,
    experts=128,
    topk=8,
    moe_ffn=1536,
    name="mixture",
)
WORK = Serve(isl=2000, osl=300, concurrency=64)


def answer(plan: Plan, code: str) -> Reason:
    found = [r for r in plan.reasons if r.code == code]
    assert len(found) == 1, [r.code for r in plan.reasons]
    return found[0]


def times(plan: Plan, text: str) -> tuple[float, float]:
    """Time of a token and throughput of the alternative that an answer names, predicted anew as a given layout."""
    other = plan_serve(DENSE, str(plan.cluster), WORK, layout=text).chosen
    assert other is not None
    assert other.cost.predicted is not None
    return other.cost.tpot_s, other.cost.predicted.tokens_per_s.value


@pytest.mark.parametrize(
    ("code", "other", "words"),
    [
        ("replicas_or_tp", "tp=4,dp=2", "TP 8 and TP 4 x DP 2"),
        ("stages_or_tp", "tp=4,pp=2", "TP 8 and TP 4 x PP 2"),
        ("fewer_devices", "tp=4", "TP 8 and TP 4"),
    ],
)
def test_one_tp_8_beside_what_else_the_devices_could_do(code: str, other: str, words: str) -> None:
    plan = plan_serve(DENSE, "1x8xH100-SXM", WORK, layout="tp=8")
    said = answer(plan, code)
    assert said.text.startswith(words)
    tpot_s, tokens_per_s = times(plan, other)
    assert said.numbers["other_tpot_s"] == pytest.approx(tpot_s)
    assert said.numbers["other_tokens_per_s"] == pytest.approx(tokens_per_s)
    assert said.numbers["tpot_s"] == pytest.approx(plan.chosen.cost.tpot_s)  # type: ignore[union-attr]
    assert f"{tpot_s * 1e3:,.2f} ms" in said.text


def test_tensor_parallelism_across_nodes_spends_its_time_on_links() -> None:
    plan = plan_serve(DENSE, "2x8xH100-SXM@ib-400g", WORK, layout="tp=8,dp=2")
    said = answer(plan, "tp_inside_or_across")
    assert "TP 16" in said.text
    assert said.numbers["other_wire_share"] > said.numbers["wire_share"] > 0
    assert said.numbers["other_tokens_per_s"] < said.numbers["tokens_per_s"]


def test_experts_and_attention_replicas_of_a_mixture() -> None:
    plan = plan_serve(MIXTURE, "1x8xH200-SXM", Serve(isl=2000, osl=300, concurrency=512), layout="tp=1,dp=8,ep=8")
    assert "EP 8" in answer(plan, "experts_whole_or_cut").text
    attention = answer(plan, "attention_dp_or_tp")
    assert "TP 8" in attention.text
    assert attention.numbers["tokens_per_s"] != attention.numbers["other_tokens_per_s"]


def test_a_dense_model_is_asked_nothing_about_experts() -> None:
    codes = {r.code for r in plan_serve(DENSE, "1x8xH100-SXM", WORK).reasons}
    assert not codes & {"experts_whole_or_cut", "attention_dp_or_tp"}

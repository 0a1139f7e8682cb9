"""Mixtures of experts: routing by hand, the ladder of dispatchers, every family against transformers, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from meshwright.errors import IllegalLayoutError, InputError
from meshwright.prove.proof import legal
from meshwright.runtime.loads import Load, load_table, summary, table_of
from meshwright.runtime.models.moe import Router, through, weighted
from meshwright.runtime.models.moe_settings import Routing
from meshwright.runtime.models.parts import Linear
from meshwright.runtime.models.settings import read_settings
from meshwright.runtime.parallel.expert import EvenChoice, LocalDispatch
from meshwright.specs.hf.read import model_from_config
from meshwright.specs.layout import parse_layout
from tests.runtime import moe_models, tiny

Mixture = Callable[[str], Path]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    """Folder of a small mixture of experts by its name."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = moe_models.write(tmp_path_factory.mktemp(name) / name, name)
        return made[name]

    return folder


@pytest.mark.parametrize("name", moe_models.MIXTURES)
def test_one_process_equals_transformers(mixture: Mixture, name: str) -> None:
    folder = mixture(name)
    result = tiny.alone(tiny.job(folder, "tp=1", tiny.PROMPTS[:2], 3))
    tiny.assert_same((result.tokens, result.logits), tiny.oracle(folder, tiny.PROMPTS[:2], 3))


def router(how: Routing, choices: int, correction: list[float] | None = None) -> Router:
    """A router whose logits are its input."""
    bias = None if correction is None else torch.tensor(correction)
    return Router(Linear(torch.eye(4)), bias, how, choices)


LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


@pytest.mark.parametrize(
    ("how", "want"),
    [
        (Routing(), [0.6439, 0.2369]),  # e^2 / (e^2 + e + 1 + 1/e)
        (Routing(renormalise=True), [0.7311, 0.2689]),
        (Routing(scale=2.5), [1.6098, 0.5922]),
        (Routing("sigmoid"), [0.8808, 0.7311]),
        (Routing("chosen"), [0.7311, 0.2689]),
    ],
)
def test_weights_by_hand(how: Routing, want: list[float]) -> None:
    weights, ids = router(how, 2)(LOGITS)
    assert ids.tolist() == [[0, 1]]
    assert weights[0].tolist() == pytest.approx(want, abs=1e-4)


def test_the_correction_chooses_and_does_not_weigh() -> None:
    weights, ids = router(Routing("sigmoid"), 2, [0.0, 0.0, 0.0, 1.0])(LOGITS)
    assert sorted(ids[0].tolist()) == [0, 3]
    assert dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True)) == pytest.approx(
        {0: 0.8808, 3: 0.2689}, abs=1e-4
    )


@pytest.mark.parametrize(("best", "want"), [(1, [2, 3]), (2, [0, 1])])
def test_groups_are_as_good_as_their_best_or_their_two_best(best: Any, want: list[int]) -> None:
    """Scores 3, 3 against 4, 0: the second group has the best expert, the first the better pair."""
    how = Routing("chosen", groups=2, kept_groups=1, group_best=best)
    _, ids = router(how, 2)(torch.tensor([[3.0, 3.0, 4.0, 0.0]]))
    assert sorted(ids[0].tolist()) == want


def test_local_dispatchers_that_share_out_the_experts_sum_to_one_that_has_all() -> None:
    torch.manual_seed(0)
    x, ids, weights = torch.randn(9, 3), torch.randint(0, 5, (9, 2)), torch.rand(9, 2)
    scaled = [lambda rows, e=e: rows * (e + 1) for e in range(5)]

    def run(ways: LocalDispatch, experts: list[Any]) -> torch.Tensor:
        rows, ticket = ways.dispatch(x, ids, 9)
        return weighted(ways.combine(through(experts, rows, ticket.moved.rows), ticket), weights)

    want = (x[:, None] * (ids + 1)[..., None] * weights[..., None]).sum(1)
    assert torch.allclose(run(LocalDispatch(5), scaled), want, atol=1e-6)
    pieces = [run(LocalDispatch(5, 2, 0), scaled[:3]), run(LocalDispatch(5, 2, 1), scaled[3:])]
    assert torch.allclose(pieces[0] + pieces[1], want, atol=1e-6)


def test_no_tokens_and_no_rows() -> None:
    ways = LocalDispatch(4, 2, 1)
    rows, ticket = ways.dispatch(torch.empty(0, 3), torch.empty(0, 2, dtype=torch.int64), 0)
    assert ways.combine(through([], rows, ()), ticket).shape == (0, 2, 3)
    assert ticket.moved.rows == (0, 0)


def test_the_even_choice_deals_one_after_the_other() -> None:
    assert EvenChoice().ids(3, 2, 5, 4, torch.device("cpu")).tolist() == [[3, 4], [0, 1], [2, 3]]


def test_the_load_table_counts_a_shared_expert_once() -> None:
    """Two ranks hold experts 0 and 1, 2; a third is the second half of the experts of the second."""
    loads = [
        (0, True, [Load(4, "prefill", 0, 0, 0, (3,)), Load(4, "decode", 1, 0, 0, (1,))]),
        (1, True, [Load(4, "prefill", 0, 0, 1, (5, 1))]),
        (2, False, [Load(4, "prefill", 0, 0, 1, (5, 1))]),
    ]
    (row,) = load_table(loads)
    assert (row.layer, row.experts, row.ranks) == (4, (4, 5, 1), {0: 4, 1: 6, 2: 6})
    assert row.passes == {("prefill", 0, 0): (3, 5, 1), ("decode", 1, 0): (1, 0, 0)}
    assert row.expert_skew == pytest.approx(1.5)
    assert row.rank_skew == pytest.approx(18 / 16)
    assert summary([row]) == "experts: the busiest took 1.50 x the mean (layer 4), the busiest rank 1.12 x (layer 4)"


def test_loads_of_a_generation_add_up(mixture: Mixture) -> None:
    """15 rows of 2 prompts (7 and 4 tokens, 2 decoded each), 3 experts each, in 2 sparse layers of 3."""
    job = tiny.job(mixture("qwen3_moe"), "tp=1", tiny.PROMPTS[:2], 3)
    table = table_of(job.placement, [tiny.alone(job).loads])
    assert [row.layer for row in table] == [0, 2]
    assert [sum(row.experts) for row in table] == [15 * 3] * 2
    assert [len(row.experts) for row in table] == [8, 8]


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        ("tp=4,ep=2", "ep 2 x etp 1 neither equals tp 4 nor spans whole tp groups"),
        ("tp=4,ep=2,etp=1", "choose ep = tp"),
        ("tp=2,ep=3", "choose ep from"),
        ("tp=2,ep=2,etp=4", "does not divide"),
        ("dp=16,ep=16", "16"),
    ],
)
def test_expert_layouts_that_cannot_run_are_refused_in_a_line(layout: str, line: str) -> None:
    spec = model_from_config(moe_models.config("qwen3_moe", num_key_value_heads=9), "m", "m")
    with pytest.raises((IllegalLayoutError, InputError), match=line) as refused:
        legal(spec, parse_layout(layout))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("layout", ["tp=4,ep=4", "tp=4,ep=2,etp=2", "dp=2,tp=2,ep=2", "dp=2,tp=2,ep=4", "dp=4,ep=2"])
def test_expert_layouts_that_can_run(layout: str) -> None:
    spec = model_from_config(moe_models.config("qwen3_moe", num_attention_heads=8, num_key_value_heads=4), "m", "m")
    assert legal(spec, parse_layout(layout)).layout == parse_layout(layout)


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        ("deepseek_v2", {"norm_topk_prob": True}, "not renormalised"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "group_limited_greedy"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "noaux_tc of sigmoid"),
        ("deepseek_v3", {"routed_scaling_factor": "big"}, "a number above 0"),
        ("gpt_oss", {"swiglu_limit": -7}, "a number above 0"),
    ],
)
def test_a_routing_that_is_not_computed_is_refused(name: str, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line):
        read_settings(moe_models.config(name, **changes), "config.json")

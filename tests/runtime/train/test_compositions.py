"""Compositions of strategies: every parameter's gradient, the loss, the norm and a step's weights as on one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.specs.layout import parse_layout
from tests import proving_train
from tests.runtime.train.models import folder_of
from tests.runtime.train.steps import Case, assert_same

#: Ranks share cores with whatever else runs.
pytestmark = pytest.mark.timeout(600)

#: Model, layout. Sizes are odd: 9 heads over 3 KV heads, 131 tokens, 5 layers ("even": 8 heads over 2).
DENSE = (
    ("tied", "tp=2"),
    ("tied", "tp=3,dp=2,zero=1"),
    ("llama", "tp=2,sp=on,dp=2"),
    ("even", "tp=4,dp=2,zero=1"),
    ("even", "tp=4,sp=on"),
    ("qwen3", "tp=2,dp=2,zero=2,sp=on"),
    ("biased", "tp=2,cp=2"),
    ("tied", "dp=4,zero=3,param_dtype=f32"),
    ("llama", "dp=4,zero=3,param_dtype=f32,replicas=2"),
    ("tied", "tp=2,dp=4,zero=3,param_dtype=f32,replicas=2,reshard_after_forward=off"),
    ("llama", "cp=2,dp=2,zero=1"),
    ("even", "cp=2,cp_kind=ulysses,tp=2,dp=2,zero=2"),
    ("tied", "cp=4,zero=3,param_dtype=f32"),
    ("tied", "pp=2,schedule=gpipe"),
    ("tied", "pp=2,dp=2,zero=1"),
    ("tied", "pp=3,tp=2"),
    ("llama", "pp=2,virtual=2,schedule=interleaved,dp=2,zero=2"),
    ("tied", "pp=2,schedule=zb-h1,tp=2,sp=on,dp=2,zero=1"),
    ("tied", "pp=2,schedule=zbv,dp=2,zero=1"),
    ("tied", "pp=2,schedule=zbv,tp=2,dp=2,zero=2"),
    ("llama", "pp=2,schedule=dualpipev,cp=2"),
    ("llama", "pp=2,dp=2,zero=3,param_dtype=f32"),
    ("tied", "pp=2,dp=2,cp=2,zero=3,param_dtype=f32,schedule=zb-h1"),
    ("tied", "pp=4,stage_layers=2+1+1+1"),
    ("tied", "pp=2,stage_layers=4+1,dp=2,zero=2,schedule=gpipe"),
    ("even", "pp=2,tp=2,cp=2,sp=on"),
    ("gemma3", "pp=2,tp=2,dp=2,zero=1"),
)
MIXTURES = (
    ("qwen3_moe", "dp=2,ep=2"),
    ("qwen3_moe", "tp=2,ep=2,sp=on"),
    ("qwen3_moe", "dp=2,tp=2,ep=4,zero=1"),
    ("qwen3_moe", "cp=2,dp=2,ep=4"),
    ("qwen3_moe", "pp=2,ep=2,tp=2,schedule=zbv"),
    ("qwen3_moe", "dp=4,ep=2,zero=3,param_dtype=f32"),
    ("qwen3_moe", "pp=2,dp=4,ep=2,schedule=interleaved,virtual=2,zero=2"),
    ("qwen2_moe", "pp=2,dp=2,ep=2,schedule=zb-h1,zero=1"),
    ("mixtral", "tp=2,dp=2,ep=2,zero=2"),
    ("mixtral", "tp=2,dp=2"),
    ("deepseek_v3", "pp=2,dp=2,ep=2,zero=1"),
    ("deepseek_v3", "tp=2,dp=2,ep=2"),
    ("deepseek_v2", "pp=2,tp=2,sp=on,schedule=dualpipev"),
)
#: Run in every `make test`: drawn once with this seed from each list.
SEED, DRAWN = 1558, (4, 2)


def _marked(cases: tuple[tuple[str, str], ...], count: int) -> list[object]:
    """All cases; those that are not drawn are slow."""
    drawn = random.Random(SEED).sample(cases, count)
    return [pytest.param(*c, marks=() if c in drawn else pytest.mark.slow, id="-".join(c)) for c in cases]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return folder_of(tmp_path_factory)


def test_there_are_thirty_compositions_at_least() -> None:
    cases = {layout for _, layout in (*DENSE, *MIXTURES)}
    assert len(cases) >= 30
    text = " ".join(cases)
    for schedule in ("gpipe", "zb-h1", "interleaved", "zbv", "dualpipev", "zero=1", "zero=2", "zero=3", "sp=on", "cp="):
        assert schedule in text


@pytest.mark.parametrize(("model", "layout"), [*_marked(DENSE, DRAWN[0]), *_marked(MIXTURES, DRAWN[1])])
def test_a_step_is_that_of_one_process(model: str, layout: str, folder: Callable[[str], Path]) -> None:
    assert_same(Case(folder(model), layout))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "options"),
    [
        ("tied", "pp=2,schedule=zbv,dp=2,zero=1", {"recompute": "full"}),
        ("even", "pp=2,tp=2,sp=on,schedule=zb-h1", {"recompute": "selective"}),
        ("tied", "pp=2,schedule=dualpipev", {"recompute": "full", "recompute_layers": 1}),
        ("qwen3_moe", "pp=2,ep=2,tp=2,schedule=zbv", {"aux": 0.05}),
        ("qwen3_moe", "tp=2,sp=on,ep=2", {"aux": 0.05, "recompute": "full"}),
        ("deepseek_v3", "pp=2,tp=2,ep=2", {"bias_rate": 0.01}),
    ],
)
def test_recompute_and_balance_compose(
    model: str, layout: str, options: dict[str, object], folder: Callable[[str], Path]
) -> None:
    assert_same(Case(folder(model), layout, options=tuple(options.items())))


def _by_model_and_world() -> list[object]:
    """Model and layouts of equally many ranks: proven in one launch."""
    groups: dict[tuple[str, int], list[str]] = {}
    for model, layout in (*DENSE, *MIXTURES):
        groups.setdefault((model, parse_layout(layout).world), []).append(layout)
    return [pytest.param(m, layouts, id=f"{m}-{world}") for (m, world), layouts in groups.items()]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layouts"), _by_model_and_world())
def test_compositions_send_what_was_foretold(
    model: str, layouts: list[str], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """The whole proof of each: against fp64, the ledger entry by entry, bytes of states by ZeRO stage."""
    cases = [proving_train.Case(layout) for layout in layouts]
    proofs = proving_train.train_proofs(folder(model), cases, numbers=tmp_path / "numbers", timeout_s=500)
    wrong = [f"{p.layout}: {p.first}" for p in proofs if not p.proven]
    assert not wrong, wrong

"""A whole training step: every schedule is GPipe, loss curves, odd batches, and planted mistakes that are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from meshwright.errors import IllegalLayoutError, InputError
from meshwright.moves.pipeline import schedule
from meshwright.runtime.launch.local import run_local
from meshwright.runtime.train import data_parallel, parameters, step
from meshwright.runtime.train.batch import IGNORED, TrainBatch
from meshwright.runtime.train.pipeline import Pipeline
from meshwright.runtime.train.stage import Stage
from meshwright.runtime.train.state import step_table
from tests.runtime.train.models import folder_of
from tests.runtime.train.steps import CLOSE, Case, Ran, Unequal, assert_same, distances, on_ranks, run, whole

#: Ranks share cores with whatever else runs.
pytestmark = pytest.mark.timeout(600)

SCHEDULES = (
    "pp=2,schedule=gpipe",
    "pp=2",
    "pp=2,schedule=interleaved,virtual=2",
    "pp=2,schedule=zb-h1",
    "pp=2,schedule=zbv",
    "pp=2,schedule=dualpipev",
    "pp=2,schedule=zb-h1,stage_layers=4+1",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return folder_of(tmp_path_factory)


@pytest.mark.parametrize(
    ("model", "stages"), [("tied", 2), pytest.param("qwen3_moe", 2, marks=pytest.mark.slow)], ids=["dense", "mixture"]
)
def test_every_schedule_is_gpipe(model: str, stages: int, folder: Callable[[str], Path]) -> None:
    """Gradients to fp32 rounding, loss and norm, and the executed actions are those of the table."""
    cases = [Case(folder(model), layout, seq=8) for layout in SCHEDULES]
    runs = on_ranks(cases)
    want = whole(cases[0], runs[0], "gradient")
    for case, ranks in zip(cases, runs, strict=True):
        assert max(distances(whole(case, ranks, "gradient"), want).values()) < 1e-6, case.layout
        assert ranks[0].results[0] == pytest.approx(runs[0][0].results[0], rel=1e-7)
        layout = case.placement.layout
        table = schedule(layout.schedule, stages, 8, layout.virtual)
        assert tuple(ran.actions[0] for ran in ranks) == table.actions


def test_micro_batches_of_unequal_size_are_one_batch(folder: Callable[[str], Path]) -> None:
    """Eight rows in micro-batches of three (the last has two), fewer micro-batches than twice the stages."""
    assert_same(Case(folder("llama"), "pp=2,micro_batch=3,schedule=zbv"))


@pytest.mark.parametrize(
    ("model", "layout", "steps", "close"),
    [
        ("tied", "pp=2,schedule=zb-h1", 6, 1e-5),
        pytest.param("tied", "pp=2,schedule=zbv,dp=2,zero=1", 50, 1e-5, marks=pytest.mark.slow),
        pytest.param("llama", "tp=2,sp=on,dp=2,zero=2", 50, 1e-5, marks=pytest.mark.slow),
        pytest.param("llama", "dp=2,cp=2,zero=3,param_dtype=f32", 50, 1e-5, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "dp=2,ep=2,zero=1", 50, 1e-4, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "pp=2,ep=2,tp=2,schedule=zbv", 50, 1e-4, marks=pytest.mark.slow),
    ],
)
def test_loss_curves(model: str, layout: str, steps: int, close: float, folder: Callable[[str], Path]) -> None:
    """The loss of every step is that of one process, and it falls."""
    alone = Case(folder(model), "tp=1", steps=steps, options=(("clip", 1.0),))
    want = [r[0] for r in on_ranks([alone])[0][0].results]
    found = [r[0] for r in on_ranks([replace(alone, layout=layout)])[0][0].results]
    assert found == pytest.approx(want, rel=close)
    assert want[-1] < 0.97 * want[1]


def test_what_cannot_run_is_refused(folder: Callable[[str], Path]) -> None:
    with pytest.raises(IllegalLayoutError, match="6 pipeline stages for 5 layers"):
        _ = Case(folder("llama"), "pp=6").placement
    with pytest.raises(InputError, match="needs 4 micro-batches on 2 stages, not 3"):
        step_table(Case(folder("llama"), "pp=2,schedule=dualpipev").placement.layout, 3)


@contextmanager
def _times_micro_batches() -> Iterator[None]:
    """The loss is divided by the tokens of one micro-batch (picotron)."""
    real = Pipeline.run
    with mock.patch.object(Pipeline, "run", lambda self, b, scale, watch: real(self, b, scale * len(b), watch)):
        yield


@contextmanager
def _tied_sum(times: int) -> Iterator[None]:
    """Copies of the embedding are summed so many times."""
    real = data_parallel.sum_copies

    def sums(gradient: torch.Tensor, group: Any) -> None:
        for _ in range(times if group.axis == "pp_tied" else 1):
            real(gradient, group)

    with mock.patch.object(data_parallel, "sum_copies", sums):
        yield


@contextmanager
def _weights_after_the_optimizer() -> Iterator[None]:
    """Weight gradients are made when the step is over."""
    real, due = Stage.weights, []
    with (
        mock.patch.object(Stage, "weights", lambda self, number: due.append((self, number))),
        mock.patch.object(Stage, "under_way", 0),
    ):
        yield
    for stage, number in due:
        real(stage, number)


@contextmanager
def _shift_after_the_cut() -> Iterator[None]:
    """Every rank of cp shifts the labels of its own rows (the last of each has none)."""
    real = step.train_batch

    def shifted(*args: Any, **options: Any) -> TrainBatch:
        made = real(*args, **options)
        rows = made.ids_T.view(made.sequences, -1)
        labels = torch.cat([rows[:, 1:], torch.full_like(rows[:, :1], IGNORED)], 1).reshape(-1)
        labels = torch.where(made.labels_T == IGNORED, IGNORED, labels)
        return replace(made, labels_T=labels, valid=int((labels != IGNORED).sum()))

    with mock.patch.object(step, "train_batch", shifted):
        yield


@contextmanager
def _own_tokens() -> Iterator[None]:
    """Every rank divides by its own tokens."""
    with mock.patch.object(step, "count_tokens", lambda _, batches: sum(b.valid for b in batches)):
        yield


@contextmanager
def _norm_counts_copies() -> Iterator[None]:
    """Every rank counts what it holds, copies too."""
    with mock.patch.object(parameters, "counted", return_value=True):
        yield


#: Layout, mistake, what it must change beyond rounding: gradients, the norm, or both.
MISTAKES: tuple[tuple[str, Callable[[], Any], str], ...] = (
    ("pp=2", _times_micro_batches, "gradient"),
    ("pp=2", lambda: _tied_sum(0), "gradient"),
    ("pp=2", lambda: _tied_sum(2), "gradient"),
    ("pp=2,schedule=zb-h1", _weights_after_the_optimizer, "gradient"),
    ("cp=2", _shift_after_the_cut, "gradient"),
    ("dp=2", _own_tokens, "gradient"),
    ("tp=2", _norm_counts_copies, "norm"),
    ("pp=2", _norm_counts_copies, "norm"),
)


def _with_mistakes(rank: int, folder: Path) -> list[Ran]:
    out = []
    for layout, mistake, _ in MISTAKES:
        with mistake():
            out.append(run(rank, Case(folder, layout)))
    return out


def test_planted_mistakes_are_found(folder: Callable[[str], Path]) -> None:
    """Each changes what ``assert_same`` compares by far more than it allows."""
    alone = Case(folder("tied"), "tp=1")
    (want,) = on_ranks([alone])
    gradients = whole(alone, want, "gradient")
    ranks = run_local(_with_mistakes, 2, (folder("tied"),), 500)
    for (layout, _, what), found in zip(MISTAKES, zip(*ranks, strict=True), strict=True):
        if what == "norm":
            assert found[0].results[0][1] != pytest.approx(want[0].results[0][1], rel=1e-3), layout
            continue
        assert _worst(replace(alone, layout=layout), found, gradients) > 100 * CLOSE, layout


def _worst(case: Case, found: Sequence[Ran], want: dict[str, torch.Tensor]) -> float:
    """Largest distance of a gradient; infinite where copies differ."""
    try:
        return max(distances(whole(case, found, "gradient"), want).values())
    except Unequal:
        return inf

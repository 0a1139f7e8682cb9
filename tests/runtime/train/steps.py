"""Runs training steps of small models under a layout and puts the parts of all ranks together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.runtime.checkpoint import TORCH_DTYPES, load, own
from meshwright.runtime.folder import read_folder
from meshwright.runtime.launch.local import run_local
from meshwright.runtime.mesh import build_mesh
from meshwright.runtime.train.data import Batch
from meshwright.runtime.train.lr import Cosine
from meshwright.runtime.train.optimizer import Settings
from meshwright.runtime.train.options import TrainOptions
from meshwright.runtime.train.state import TrainState, build_state
from meshwright.runtime.train.step import StepResult, train_step
from meshwright.specs.placement import Placement, Shard
from tests.runtime import tiny

#: Largest distance of a gradient or weight, by parameter: norm of the difference over the norm.
CLOSE = 1e-5
#: What the loss and the norm may differ by, relatively.
LOSS = 1e-6
#: Rate at which one step moves weights visibly, and 50 steps learn.
RATE = 5e-4
#: Batches that a run goes through again and again, so that there is something to learn.
BATCHES = 4
#: Large enough that gradients which are nothing but rounding do not become whole steps of AdamW.
EPS = 1e-4


class Unequal(AssertionError):
    """Ranks hold different copies."""


@dataclass(frozen=True, slots=True)
class Case:
    """A run: a checkpoint's folder, a layout, sequences of a step over all ranks and their length."""

    folder: Path
    layout: str
    sequences: int = 8
    seq: int = 16
    steps: int = 1
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def placement(self) -> Placement:
        return tiny.placement(self.folder, self.layout)


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank holds of one tensor: a run of its cut, as in ``train.pieces``."""

    name: str
    kind: str
    values: Tensor
    start: int


@dataclass(frozen=True, slots=True)
class Ran:
    """One rank's run: results and actions by step, its parts of the last gradients and of the values after it."""

    results: list[tuple[float, float, int]]
    parts: list[Part]
    actions: list[Any]


def batch(vocab: int, sequences: int, seq: int, seed: int = 7) -> Batch:
    """Sequences whose labels are masked unevenly: some rows lose half of them, one all."""
    random = torch.Generator().manual_seed(seed)
    stream = torch.randint(vocab, (sequences, seq + 1), generator=random)
    labels = stream[:, 1:].clone()
    for row in range(sequences):
        masked = torch.rand(seq, generator=random) < (row % 3) / 4
        labels[row, masked] = -100
    labels[min(2, sequences - 1) :: 8] = -100
    return Batch(stream[:, :-1].contiguous(), labels)


def options_of(case: Case) -> TrainOptions:
    given = dict(case.options)
    return TrainOptions(Settings(given.pop("optimizer", "adamw"), eps=EPS), Cosine(RATE), **{"clip": None, **given})


def state_of(rank: int, case: Case) -> TrainState:
    """A rank's state at the start of a run."""
    model, placement = read_folder(case.folder), case.placement
    told = options_of(case)
    weights = load(model, placement, placement.coordinate(rank), TORCH_DTYPES[told.dtype])
    return build_state(build_mesh(placement, rank), weights, model.settings, told)


def run(rank: int, case: Case) -> Ran:
    """Body of a rank."""
    state = state_of(rank, case)
    layout, at = case.placement.layout, state.mesh.coordinate
    parts: list[Part] = []

    def take() -> None:
        parts[:] = [Part(p.name, p.kind, p.tensor.clone(), p.start) for p in state.data.gradients()]

    state.on_gradients = take
    results: list[StepResult] = []
    for step in range(case.steps):
        whole = batch(case.placement.spec.vocab, case.sequences, case.seq, 7 + step % BATCHES)
        each = case.sequences // layout.dp
        rows = slice(at.dp * each, (at.dp + 1) * each)
        results.append(train_step(state, Batch(whole.ids[rows], whole.labels[rows])))
    parts += [Part(p.name, p.kind, p.tensor.clone(), p.start) for p in state.pieces() if p.kind == "weight"]
    told = [(r.loss, r.grad_norm, r.tokens) for r in results]
    return Ran(told, parts, [r.outcome.actions for r in results])


def run_all(rank: int, cases: Sequence[Case]) -> list[Ran]:
    """Several runs in the same processes."""
    return [run(rank, case) for case in cases]


def on_ranks(cases: Sequence[Case], timeout_s: float = 500.0) -> list[list[Ran]]:
    """By case, what every rank ran; all cases have the same number of ranks."""
    worlds = {case.placement.layout.world for case in cases}
    assert len(worlds) == 1
    (world,) = worlds
    if world == 1:
        torch.set_num_threads(1)
        return [[run(0, case)] for case in cases]
    return [list(ranks) for ranks in zip(*run_local(run_all, world, (cases,), timeout_s), strict=True)]


def whole(case: Case, ranks: Sequence[Ran], kind: str) -> dict[str, Tensor]:
    """Whole tensors of all ranks' parts.

    Every element must be there.

    Raises:
        Unequal: copies on several ranks differ by more than 1e-6 of their norm.
    """
    placement, out = case.placement, {}
    for rank, ran in enumerate(ranks):
        shards = dict(own(placement, placement.coordinate(rank)))
        for part in ran.parts:
            if part.kind != kind:
                continue
            shard = shards[part.name]
            full = out.setdefault(part.name, torch.full(shard.family.shape, torch.nan, dtype=torch.float64))
            at = _indices(shard)[part.start : part.start + part.values.numel()]
            before, now = full.view(-1)[at], part.values.reshape(-1).double()
            seen = ~before.isnan()
            far = (before - now)[seen].norm()
            if far > 1e-6 * max(float(now.norm()), 1e-9):
                raise Unequal(f"copies of {part.name} differ by {far:.2g}")
            full.view(-1)[at] = now
    for name, full in out.items():
        assert not full.isnan().any(), f"{kind} of {name} is not whole"
    return out


def _indices(shard: Shard) -> Tensor:
    """Row-major numbers in the whole tensor of a shard's elements."""
    kept = torch.arange(_numel(shard.family.shape)).view(shard.family.shape)
    for dim, cuts in enumerate(shard.intervals):
        kept = torch.cat([kept.narrow(dim, low, high - low) for low, high in cuts], dim)
    return kept.reshape(-1)


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def distances(found: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Norm of the difference over the norm, by name; names must be the same."""
    assert found.keys() == want.keys(), found.keys() ^ want.keys()
    return {n: float((found[n] - x).norm() / max(float(x.norm()), 1e-30)) for n, x in want.items()}


def assert_same(case: Case) -> None:
    alone = Case(case.folder, "tp=1", case.sequences, case.seq, case.steps, case.options)
    (want,), (found,) = on_ranks([alone]), on_ranks([case])
    loss, norm, tokens = want[0].results[-1]
    for ran in found:
        assert ran.results == found[0].results, "ranks tell different losses"
        assert ran.results[-1][2] == tokens
        assert ran.results[-1][0] == pytest.approx(loss, rel=LOSS)
        assert ran.results[-1][1] == pytest.approx(norm, rel=LOSS)
    for kind in ("gradient", "weight"):
        far = distances(whole(case, found, kind), whole(alone, want, kind))
        worst = max(far, key=lambda name: far[name])
        assert far[worst] < CLOSE, f"{kind} of {worst} is {far[worst]:.2g} away"

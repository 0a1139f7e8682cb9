"""One training step on one rank: micro-batches through the pipeline, sums of gradients, clipping, the optimizer.

Everything is a sum until the end: losses are summed over tokens, gradients over micro-batches and data ranks, and the
loss is divided once, by the number of valid tokens of the whole batch. So nothing depends on how tokens are dealt.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from meshwright.errors import InputError
from meshwright.moves.pipeline import Action
from meshwright.runtime.collectives import all_reduce
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.scope import scope
from meshwright.runtime.train.batch import TrainBatch, train_batch
from meshwright.runtime.train.data import Batch
from meshwright.runtime.train.pipeline import Outcome
from meshwright.runtime.train.state import TrainState


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step tells; the first three are the same on every rank.

    Attributes:
        loss: mean over the valid tokens of the whole batch.
        grad_norm: of the whole gradient, before clipping.
        tokens: valid tokens of the whole batch.
        seconds: of this rank by phase: ``forward``, ``backward``, ``waiting`` (for neighbours in the pipeline),
            ``gradients`` (sums after the last backward), ``optimizer``.
        outcome: the pipeline's actions and their times.
    """

    loss: float
    grad_norm: float
    tokens: int
    seconds: Mapping[str, float]
    outcome: Outcome


def micro_batches(state: TrainState, batch: Batch) -> list[TrainBatch]:
    """This rank's rows, micro-batch by micro-batch; the last has what is left."""
    rows, each = len(batch.ids), state.mesh.placement.layout.micro_batch
    if not rows:
        raise InputError("a batch without sequences; every rank needs at least one a step")
    count = -(-rows // each)
    return [
        train_batch(state.mesh, ids, labels, aux_scale=1 / count)
        for ids, labels in zip(batch.ids.split(each), batch.labels.split(each), strict=True)
    ]


def train_step(state: TrainState, batch: Batch) -> StepResult:
    """One optimizer step. Collective: every rank calls it.

    Args:
        batch: this data rank's whole sequences; the same on all its ranks of tp, pp and cp.

    Raises:
        InputError: no sequences, or a number of micro-batches for which the schedule has no table.
        NonFiniteGradient: the norm of the gradient is not finite; nothing was updated.
    """
    batches = micro_batches(state, batch)
    pipeline = state.pipeline(len(batches))
    tokens = count_tokens(state.mesh, batches)
    for chunk in state.chunks:
        chunk.reset_counts()
    outcome = pipeline.run(batches, loss_scale(tokens), _Reductions(state))
    began = time.monotonic()
    state.data.finish_gradients()
    reduced = time.monotonic()
    if state.on_gradients is not None:
        state.on_gradients()
    resumed = time.monotonic()
    norm = state.data.update(state.options.rate.rate(state.step), state.options.clip)
    state.step += 1
    move_biases(state)
    loss = whole_loss(state.mesh, outcome.loss, tokens)
    seconds = {
        "forward": outcome.seconds("F"),
        "backward": outcome.seconds("BIW"),
        "waiting": outcome.waited_s,
        "gradients": reduced - began,
        "optimizer": time.monotonic() - resumed,
    }
    return StepResult(loss, norm, tokens, seconds, outcome)


def count_tokens(mesh: Mesh, batches: Sequence[TrainBatch]) -> int:
    """Valid tokens of all ranks. Collective over ``dp+cp``."""
    count = torch.tensor([sum(b.valid for b in batches)], dtype=torch.int64, device=mesh.device)
    with scope(phase="forward", name="token count", fresh=True):
        all_reduce(count, mesh.group("dp+cp"))
    return int(count)


def loss_scale(tokens: int) -> float:
    """Gradient of the reported loss by every summed one; a batch without valid tokens has none."""
    return 1 / tokens if tokens else 0.0


def whole_loss(mesh: Mesh, own: float, tokens: int) -> float:
    """The loss of the whole batch from what the last chunk of every rank summed. Collective over all ranks.

    Ranks of one tp group hold the same losses; the first of them counts.
    """
    total = torch.tensor([own if mesh.coordinate.tp == 0 else 0.0], dtype=torch.float64, device=mesh.device)
    with scope(phase="optimizer", name="loss", fresh=True):
        all_reduce(total, mesh.group("world"))
    return float(total) * loss_scale(tokens)


def move_biases(state: TrainState) -> None:
    """Move what keeps the experts of routers with a bias evenly busy. Collective over the ranks of the tokens."""
    if state.options.bias_rate:
        with scope(phase="optimizer", fresh=True):
            for chunk in state.chunks:
                chunk.move_biases(state.options.bias_rate)


class _Reductions:
    """Tells data parallelism when gradients of a chunk are there."""

    def __init__(self, state: TrainState) -> None:
        self.data = state.data
        self.chunk = {place: number for number, place in enumerate(state.places)}

    def before(self, action: Action, final: bool) -> None:
        """See ``pipeline.Watch``; halves of a backward are reduced when both are over."""
        if action.kind == "B":
            self.data.before_backward(self.chunk[action.chunk], final)

    def after(self, action: Action, final: bool) -> None:
        """See ``pipeline.Watch``."""
        if action.kind in {"B", "W"}:
            self.data.microbatch_done(self.chunk[action.chunk], final)

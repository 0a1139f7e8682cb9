"""What a rank does for a training proof: recorded optimizer steps; its gradients and weights against one process.

The reference of one process lies in a file of whole tensors in fp64: ``gradient/NAME`` of the first step, before
clipping, and ``weight/NAME`` after it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Literal, Protocol
from unittest import mock

from meshwright.ledger.schema import Ledger
from meshwright.runtime.loads import write_choices
from meshwright.runtime.proof import routing_of
from meshwright.runtime.scope import scope, where
from meshwright.specs.placement import Coordinate, Placement
from meshwright.specs.workload import Recompute

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.runtime.record import Recorder
    from meshwright.runtime.train.data import Batch
    from meshwright.runtime.train.options import TrainOptions
    from meshwright.runtime.train.pieces import LocalPiece
    from meshwright.runtime.train.state import TrainState

#: Label of a token that is not learned from.
IGNORED = -100
#: Learning rate, bound of the gradient's norm, and what AdamW adds to a divisor: enough that an element whose gradient
#: is all rounding does not move by its sign.
RATE, CLIP, EPSILON = 5e-4, 0.5, 1e-6
#: Weight of the balancing loss of mixtures of experts.
AUX = 0.01


@dataclass(frozen=True, slots=True)
class TrainJob:
    """What every rank is told.

    Attributes:
        folder: checkpoint. placement: of its model.
        ids: ``seq + 1`` token ids of every sequence of the global batch, the same in all steps.
        order: sequences of every data replica one behind the other, micro-batch by micro-batch.
        recompute, optimizer: as in ``train.options.TrainOptions``. steps: how many.
        numbers: file of the reference. A run with ``reference`` writes it, the others hold theirs against it; beside it
            (``proof.routing_of``) the experts that every token chose.
        dtype: of parameters and activations.
        mutation: name of a planted mistake.
        drawn: seed of random first weights (``train.init``); None: those of the checkpoint.
    """

    folder: str
    placement: Placement
    ids: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    numbers: str
    recompute: Recompute = "none"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    steps: int = 1
    dtype: Literal["f32", "f64"] = "f32"
    reference: bool = False
    mutation: str | None = None
    drawn: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A run of elements of one tensor, held against the reference.

    Attributes:
        kind: ``gradient`` or ``weight``. name: in the checkpoint.
        region: where the rank's slice lies in the whole tensor. start, count: the run within the flattened slice.
        far: sum of squared distances; infinite where shapes differ or a value is no number.
    """

    kind: str
    name: str
    region: tuple[tuple[tuple[int, int], ...], ...]
    start: int
    count: int
    far: float


@dataclass(slots=True)
class RankTrain:
    """What one rank brings back.

    Attributes:
        losses, norms: of every step, as the rank reports them. norms before clipping.
        lengths: of the reference only: Euclidean length and number of elements of every tensor, by ``kind/name``.
        runs: what it holds of gradients and weights against the reference.
        peak_bytes: most bytes of activations and other passing tensors in one more step.
    """

    rank: int
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tokens: int = 0
    lengths: dict[str, tuple[float, int]] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    ledger: Ledger | None = None
    peak_bytes: int = 0
    seconds: float = 0.0


def labels_of(ids: Sequence[int], number: int) -> list[int]:
    """Labels of sequence ``number``: the next token; some at its end are not learned from, another number of them in
    every sequence, so that no two ranks need have equally many."""
    labels = list(ids[1:])
    ignored = (3 + 5 * number) % max(1, len(labels) // 2)
    return labels[: len(labels) - ignored] + [IGNORED] * ignored


def batch_of(job: TrainJob, at: Coordinate) -> Batch:
    """The rows of a data replica."""
    import torch

    from meshwright.runtime.train.data import Batch

    each = len(job.ids) // job.placement.layout.dp
    rows = job.order[at.dp * each : (at.dp + 1) * each]
    ids = torch.tensor([job.ids[n][:-1] for n in rows])
    return Batch(ids, torch.tensor([labels_of(job.ids[n], n) for n in rows]))


def options_of(job: TrainJob) -> TrainOptions:
    """Numbers of the trainer: a rate that moves weights far enough to show a wrong update, and a clip that clips."""
    from meshwright.runtime.train.lr import Cosine
    from meshwright.runtime.train.optimizer import Settings
    from meshwright.runtime.train.options import TrainOptions

    optimizer = Settings(job.optimizer, eps=EPSILON)
    return TrainOptions(optimizer, Cosine(RATE), CLIP, job.dtype, job.recompute, aux=AUX)


def run_train_proof(rank: int, job: TrainJob) -> RankTrain:
    """Body of a rank.

    Raises:
        InputError: a checkpoint that does not load.
    """
    from meshwright.runtime.checkpoint import TORCH_DTYPES, load
    from meshwright.runtime.folder import read_folder
    from meshwright.runtime.mesh import build_mesh
    from meshwright.runtime.mutate_train import train_mutation
    from meshwright.runtime.record import Recorder
    from meshwright.runtime.train.init import random_weights
    from meshwright.runtime.train.state import build_state
    from meshwright.runtime.train.step import train_step

    placement, at = job.placement, job.placement.coordinate(rank)
    mistake = train_mutation(job.mutation, placement) if job.mutation else None
    model = read_folder(job.folder)
    out = RankTrain(rank)
    mesh, dtype = build_mesh(placement, rank), TORCH_DTYPES[job.dtype]
    with mistake.planted(mesh) if mistake else nullcontext():
        if job.drawn is None:
            weights = load(model, placement, at, dtype)
        else:
            weights = {n: x.to(dtype) for n, x in random_weights(model, placement, at, job.drawn).items()}
        state = build_state(mesh, weights, model.settings, options_of(job))
        del weights
        recorder = None if job.reference else Recorder(placement, rank, matmuls=True)
        keep = (_Writer if job.reference else _Holder)(job, at, out)
        began = time.perf_counter()
        with recorder or _choices(job):
            for step in range(job.steps):
                state.on_gradients = partial(_at_gradients, keep, state, recorder) if step == 0 else None
                with scope(step=step, fresh=True):
                    result = train_step(state, batch_of(job, at))
                out.losses.append(result.loss)
                out.norms.append(result.grad_norm)
                out.tokens = result.tokens
                if step == 0:
                    keep.take("weight", (piece for piece in state.pieces() if piece.kind == "weight"))
        out.seconds = time.perf_counter() - began
        if not job.reference:
            out.peak_bytes = _peak(state, batch_of(job, at))
    keep.close()
    out.ledger = recorder.ledger() if recorder is not None else None
    return out


def _at_gradients(keep: _Keep, state: TrainState, recorder: Recorder | None) -> None:
    """Between the reductions and clipping: gradients are whole, and everything that stays is there."""
    from meshwright.runtime.train_memory import stored_bytes

    if recorder is not None:
        for term, tensors in state.data.resident().items():
            recorder.hold(term, None, stored_bytes(tensors))
    keep.take("gradient", state.data.gradients())


def _peak(state: TrainState, batch: Batch) -> int:
    """Most bytes of passing tensors, in one more step that no recorder sees (it would keep what was handed off)."""
    from meshwright.runtime.train.step import train_step
    from meshwright.runtime.train_memory import PassingBytes

    passing = PassingBytes(x for tensors in state.data.resident().values() for x in tensors)
    state.on_gradients = passing.stop
    with passing:
        train_step(state, batch)
    return passing.peak_bytes


@contextmanager
def _choices(job: TrainJob) -> Iterator[None]:
    """In the one process: write the experts of every token, by its sequence in the global batch and its position."""
    from meshwright.runtime.models.moe import MixtureOfExperts

    chosen: dict[int, dict[tuple[int, int], list[int]]] = {}
    visit, seq, each = MixtureOfExperts.visit, len(job.ids[0]) - 1, job.placement.layout.micro_batch

    def noted(self: MixtureOfExperts, x_TD: Tensor, ids_TK: Tensor, whole: int) -> Tensor:
        first = (where().microbatch or 0) * each
        for row, ids in enumerate(ids_TK.tolist()):
            chosen.setdefault(self.layer, {})[job.order[first + row // seq], row % seq] = ids
        return visit(self, x_TD, ids_TK, whole)

    with mock.patch.object(MixtureOfExperts, "visit", noted):
        yield
    write_choices(chosen, routing_of(job.numbers))


class _Keep(Protocol):
    """What becomes of a rank's gradients and weights."""

    def take(self, kind: str, pieces: Iterable[LocalPiece]) -> None:
        """Gradients or weights of the first step."""

    def close(self) -> None:
        """The steps are over."""


class _Writer:
    """The one process: it has whole tensors and writes them."""

    def __init__(self, job: TrainJob, at: Coordinate, out: RankTrain) -> None:
        from meshwright.runtime.checkpoint import own

        self.job, self.out = job, out
        self.shapes = {name: shard.shape for name, shard in own(job.placement, at)}
        self.tensors: dict[str, Tensor] = {}

    def take(self, kind: str, pieces: Iterable[LocalPiece]) -> None:
        """Copy them."""
        for piece in pieces:
            x = piece.tensor.detach().double().reshape(self.shapes[piece.name]).clone()
            self.tensors[f"{kind}/{piece.name}"] = x
            self.out.lengths[f"{kind}/{piece.name}"] = float(x.norm()), x.numel()

    def close(self) -> None:
        """Write the file."""
        from safetensors.torch import save_file

        save_file(self.tensors, self.job.numbers)


class _Holder:
    """A rank of the layout: it holds its runs against the file."""

    def __init__(self, job: TrainJob, at: Coordinate, out: RankTrain) -> None:
        from safetensors import safe_open

        from meshwright.runtime.checkpoint import own

        self.out, self.shards = out, dict(own(job.placement, at))
        self.file = safe_open(job.numbers, framework="pt", device="cpu")

    def take(self, kind: str, pieces: Iterable[LocalPiece]) -> None:
        """Hold them against the whole tensors' slices that the placement gives this rank."""
        from meshwright.runtime.checkpoint import cut

        for piece in pieces:
            shard, count = self.shards[piece.name], piece.tensor.numel()
            stored: Any = self.file.get_slice(f"{kind}/{piece.name}")  # type: ignore[no-untyped-call]
            whole = cut(stored, shard).flatten()
            there = whole[piece.start : piece.start + count]
            ours = piece.tensor.detach().flatten().double()
            far = float((ours - there).square().sum()) if ours.shape == there.shape else inf
            far = far if isfinite(far) else inf
            self.out.runs.append(Run(kind, piece.name, shard.intervals, piece.start, count, far))

    def close(self) -> None:
        """Nothing is left to do."""

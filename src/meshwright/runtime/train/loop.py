"""The training loop of one rank: weights, steps, checkpoints, and what is told meanwhile."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.ledger import store
from meshwright.runtime.checkpoint import load as load_weights
from meshwright.runtime.job import own_device
from meshwright.runtime.launch.torchrun import started_by_torchrun
from meshwright.runtime.mesh import build_mesh
from meshwright.runtime.record import Recorder
from meshwright.runtime.train import checkpoint
from meshwright.runtime.train.checkpoint import Checkpoints
from meshwright.runtime.train.data import Samples
from meshwright.runtime.train.init import random_weights
from meshwright.runtime.train.job import TrainJob
from meshwright.runtime.train.progress import Progress, Row, token_flops
from meshwright.runtime.train.state import TrainState, build_state
from meshwright.runtime.train.step import StepResult, train_step
from meshwright.runtime.train.watch import Watch
from meshwright.specs.atlas.devices import match_device

LEDGER_FOLDER = "ledger-step-"


@dataclass(frozen=True, slots=True)
class Summary:
    """What one rank says at the end.

    Attributes:
        rank: of the world. layout: of this session. step: steps done. loss: of the last one; None: none was made.
        tokens: read in this session. total_s: of its steps.
        checkpoint: the last one.
    """

    rank: int
    layout: str
    step: int
    loss: float | None
    tokens: int
    total_s: float
    checkpoint: Path | None


def run_train(rank: int, job: TrainJob) -> Summary:
    """Body of a rank: load, then step by step; a checkpoint when one is due and at the end."""
    device = own_device(job.device, rank)
    torch.manual_seed(job.settings.seed)
    state, position = _begin(rank, job, device)
    loop = _Loop(rank, job, state, position, device)
    return loop.run()


def _begin(rank: int, job: TrainJob, device: str) -> tuple[TrainState, int]:
    """The state that the run begins from, and the position in the data."""
    placement, options = job.placement, job.settings.options()
    coordinate = placement.coordinate(rank)
    mesh = build_mesh(placement, rank, device)
    if job.resume is not None:
        folder, step, position = job.resume
        state = build_state(mesh, None, job.model.settings, options)
        checkpoint.load(folder, state.pieces(), placement, coordinate)
        state.loaded()
        state.step = state.data.optimizer.steps = step
        return state, position
    if job.random:
        weights = random_weights(job.model, placement, coordinate, job.settings.seed)
        weights = {name: tensor.to(device) for name, tensor in weights.items()}
    else:
        weights = load_weights(job.model, placement, coordinate, torch.float32, device)
    return build_state(mesh, weights, job.model.settings, options), 0


class _Loop:
    """The steps of one rank."""

    def __init__(self, rank: int, job: TrainJob, state: TrainState, position: int, device: str) -> None:
        self.rank, self.job, self.state, self.position, self.device = rank, job, state, position, device
        self.settings, layout = job.settings, job.placement.layout
        self.samples = Samples(job.corpus, self.settings.seq, self.settings.seed)
        self.checkpoints = (
            Checkpoints(job.base, job.placement, rank, self.settings.keep) if job.base is not None else None
        )
        self.watch = Watch(job.traces, rank, layout.world, job.timeout_s, started_by_torchrun())
        self.progress = Progress(self.settings.steps, state.step, job.base) if rank == 0 else None
        self.peak = _peak(device, self.settings.dtype, layout.world)
        self.flops = token_flops(job.placement.spec, self.settings.seq)

    def run(self) -> Summary:
        """All steps that are left."""
        began, tokens, result = self.state.step, 0, None
        total = 0.0
        while self.state.step < self.settings.steps:
            start = time.perf_counter()
            number = self.state.step + 1
            with self.watch.step(number):
                result = self._step(number)
            took = time.perf_counter() - start
            total, tokens = total + took, tokens + result.tokens
            if self.progress is not None:
                self.progress.tell(self._row(number, result, took))
            if self.settings.save_every and number % self.settings.save_every == 0:
                self._save()
        if self.state.step > began or self.job.resume is None:
            self._save()
        if self.checkpoints is not None:
            self.checkpoints.wait()
        if self.progress is not None:
            self.progress.close()
        last = self.checkpoints.published if self.checkpoints is not None else None
        layout = str(self.job.placement.layout)
        return Summary(self.rank, layout, self.state.step, result.loss if result else None, tokens, total, last)

    def _step(self, number: int) -> StepResult:
        """One step; its ledger is written when it was asked for."""
        at = self.state.mesh.coordinate.dp
        batch = self.samples.batch(self.position, self.settings.global_batch, self.job.placement.layout.dp, at)
        record = number == self.job.ledger and self.job.base is not None
        if record and self.checkpoints is not None:
            self.checkpoints.wait()
        recorder = Recorder(self.job.placement, self.rank, matmuls=True) if record else None
        with recorder or nullcontext():
            result = train_step(self.state, batch.to(self.device))
        if recorder is not None and self.job.base is not None:
            folder = self.job.base / f"{LEDGER_FOLDER}{number}"
            folder.mkdir(parents=True, exist_ok=True)
            store.write_jsonl(recorder.ledger(), folder / f"rank{self.rank}.jsonl")
        self.position += self.settings.global_batch
        return result

    def _save(self) -> None:
        if self.checkpoints is not None:
            facts = {
                "position": self.position,
                "layout": str(self.job.placement.layout),
                "settings": self.settings.plain(),
                **self.job.facts,
            }
            self.checkpoints.save(self.state.step, self.state.pieces(), facts)

    def _row(self, number: int, result: StepResult, took: float) -> Row:
        rate = result.tokens / took
        mfu = rate * self.flops / self.peak if self.peak else None
        lr = self.state.options.rate.rate(number - 1)
        return Row(number, result.loss, result.grad_norm, lr, result.tokens, took, rate, mfu, result.seconds)


def _peak(device: str, dtype: str, world: int) -> float | None:
    """FLOP/s of all devices together; None where the atlas does not know them."""
    if device == "cpu":
        return None
    known = match_device(torch.cuda.get_device_name(device))
    peak = known.peak({"f32": "tf32"}.get(dtype, dtype)) if known is not None else None
    return peak * world if peak else None

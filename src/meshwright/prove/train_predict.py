"""The prediction of a training proof: what every rank sends, multiplies and holds in a step. Made without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from meshwright import engines
from meshwright.ledger.compare import HAND_OFFS
from meshwright.ledger.schema import Entry, Holding, Ledger, Rank
from meshwright.moves.context import neighbours
from meshwright.plan.executed.activations import activation_peak
from meshwright.plan.executed.holdings import holdings
from meshwright.plan.executed.step import Moved, step_entries, step_of
from meshwright.plan.training_step import microbatches
from meshwright.prove.predict import APART, ENGINE, answer, converted_spec, run_apart
from meshwright.prove.routing import Chosen, Routes, read_routing
from meshwright.specs.layout import parse_layout
from meshwright.specs.placement import AXES, Placement, place
from meshwright.specs.workload import Recompute, Train

#: ``predict.APART`` with the body of this module.
PROGRAM = APART.replace("meshwright.prove.predict", "meshwright.prove.train_predict")


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """Some optimizer steps, as far as a prediction needs to know them.

    Attributes:
        model: folder of the checkpoint. layout: text form.
        seq, global_batch: tokens of a sequence, sequences of a step over all ranks.
        steps: how many. dtype: of parameters, activations and gradients.
        optimizer, recompute: as in ``specs.workload.Train``.
        routing: file with the experts of every token (``prove.routing``), of the first step.
    """

    model: str
    layout: str
    seq: int
    global_batch: int
    steps: int = 1
    dtype: str = "f32"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    recompute: Recompute = "none"
    routing: str | None = None

    def work(self) -> Train:
        """The workload: everything in one dtype, so that there are no master copies."""
        return Train(
            seq=self.seq,
            global_batch=self.global_batch,
            optimizer=self.optimizer,
            recompute=self.recompute,
            param_dtype=self.dtype,
            grad_dtype=self.dtype,
            state_dtype=self.dtype,
            master_weights=False,
        )


def predict(request: TrainRequest) -> Ledger:
    """The ledger of the steps: a class for every rank, with what it holds.

    Raises:
        InputError: an unreadable model, or a batch that does not divide. IllegalLayoutError: the own engine refuses the
            layout.
    """
    layout = parse_layout(request.layout)
    spec = converted_spec(request.model, request.dtype)
    placement = place(spec, layout, engines.profile(ENGINE))
    work = request.work()
    ledger = Ledger(meta={**{k: str(v) for k, v in asdict(request).items()}, "kind": "prove train"})
    chosen = read_routing(request.routing) if request.routing is not None else None
    passes = routes(placement, work, chosen) if spec.moe is not None else []
    for rank in range(layout.world):
        at, name = placement.coordinate(rank), f"rank{rank}"
        ledger.ranks.append(Rank(rank, {axis: getattr(at, axis) for axis in (*AXES, "ep")}, name))
        ledger.holdings += holdings(placement, work, rank)
        peak = activation_peak(step_of(placement, work, rank))
        ledger.holdings += [] if peak is None else [Holding(name, "activations", None, peak, "modelled")]
        entries = step_entries(placement, work, rank, _moved(passes, rank) if passes else None)
        ledger.entries += _steps(entries, request.steps, at.cp, layout.cp)
    return ledger


def routes(placement: Placement, work: Train, chosen: Chosen | None) -> list[Routes]:
    """For every micro-batch what enters on every data replica: whole sequences, dealt over dp in runs."""
    layout = placement.layout
    count, each = microbatches(layout, work), layout.micro_batch
    out = []
    for n in range(count):
        first = {dp: (dp * count + n) * each for dp in range(layout.dp)}
        entering = {dp: tuple((start + i, 0, work.seq) for i in range(each)) for dp, start in first.items()}
        out.append(Routes(placement, 0, n, entering, dict.fromkeys(first, False), chosen))
    return out


def _moved(passes: list[Routes], rank: int) -> Moved:
    return lambda n, layer: passes[n].of(rank, layer)


def _steps(entries: list[Entry], steps: int, place: int, cp: int) -> list[Entry]:
    """The entries of one step as often as there are steps, numbered within their streams; neighbours on the ring."""
    out: list[Entry] = []
    seq: dict[str, int] = {}
    for step in range(steps):
        for entry in entries:
            stream = entry.stream or ""
            number = seq.get(stream, 0)
            seq[stream] = number + 1
            peer = entry.peer
            if entry.group == "cp" and entry.op in HAND_OFFS:
                peer = neighbours(cp, place)[entry.op == "recv"]
            out.append(replace(entry, step=step, seq=number, peer=peer))
    return out


def predict_apart(request: TrainRequest, path: Path, timeout_s: float = 120.0) -> Ledger:
    """``predict`` in a process of its own that cannot import torch; the ledger lies at ``path`` afterwards.

    Raises:
        InputError: the prediction failed; its message.
    """
    return run_apart(PROGRAM, asdict(request), path, timeout_s)


def main() -> None:
    """Body of the process apart."""

    def make(given: Mapping[str, Any]) -> Ledger:
        return predict(TrainRequest(**given))

    answer(make)

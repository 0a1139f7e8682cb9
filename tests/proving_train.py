"""Many proofs of training in one launch: what the tests of ``prove --train`` share, importable by the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.ledger.schema import Ledger
from meshwright.prove.proof import legal
from meshwright.prove.train import TrainProof, alone, in_f32, judge_training, peaks_of
from meshwright.prove.train_predict import TrainRequest, predict
from meshwright.runtime.folder import read_folder
from meshwright.runtime.launch.local import run_local
from meshwright.runtime.models.settings import check_trainable
from meshwright.runtime.mutate_train import train_mutation
from meshwright.runtime.proof import routing_of
from meshwright.runtime.train_proof import RankTrain, TrainJob, run_train_proof
from meshwright.specs.layout import Layout, parse_layout
from tests.proving import Case


def run_train_proofs(rank: int, jobs: Sequence[TrainJob]) -> list[RankTrain]:
    """Body of a rank: one proof after the other."""
    return [run_train_proof(rank, job) for job in jobs]


def train_proofs(
    folder: Path,
    cases: Sequence[Case],
    *,
    numbers: Path,
    seq: int = 16,
    global_batch: int = 8,
    timeout_s: float = 100.0,
) -> list[TrainProof]:
    """The verdicts on layouts of equally many ranks: one launch, one reference for each size of micro-batches."""
    spec = read_folder(folder).spec
    ids = tuple(tuple((7 * n + 5 * t * t + 3) % spec.vocab for t in range(seq + 1)) for n in range(global_batch))
    first = TrainJob(str(folder), legal(spec, Layout()), ids, tuple(range(global_batch)), str(numbers))
    jobs = []
    for case in cases:
        placement = legal(spec, in_f32(parse_layout(case.layout)), check_trainable)
        path = f"{numbers}.{_grouped(placement.layout)}"
        drawn = 1 if case.mutation and train_mutation(case.mutation, placement).drawn else None
        path += ".drawn" * (drawn is not None)
        job = replace(first, placement=placement, mutation=case.mutation, numbers=path, drawn=drawn, **case.options)
        jobs.append(job)
    apart = {job.numbers: alone(job) for job in jobs}
    single = run_local(run_train_proofs, 1, (list(apart.values()),), timeout_s)[0]
    references = dict(zip(apart, single, strict=True))
    ranks = run_local(run_train_proofs, jobs[0].placement.layout.world, (jobs,), timeout_s)
    predicted: dict[str, Ledger] = {}
    out = []
    for number, case in enumerate(cases):
        wanted = in_f32(parse_layout(case.layout))
        routing = routing_of(jobs[number].numbers) if spec.moe is not None else None
        request = TrainRequest(str(folder), str(wanted), seq, global_batch, routing=routing, **case.options)
        if str(request) not in predicted:
            predicted[str(request)] = predict(request)
        proof = TrainProof(spec.name, wanted, wanted.world, "a test", case.mutation, predicted=predicted[str(request)])
        judge_training(proof, references[jobs[number].numbers], [rank[number] for rank in ranks])
        proof.peaks = peaks_of(proof, [rank[number] for rank in ranks])
        out.append(proof)
    return out


def _grouped(layout: Layout) -> int:
    """Sequences of a micro-batch over all replicas: what a balancing loss is taken over."""
    return layout.dp * layout.micro_batch

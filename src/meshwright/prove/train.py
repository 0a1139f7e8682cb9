"""A proof of training: optimizer steps of a layout against one process in fp64, and against their prediction.

::

    rules ──> one process in fp64 (loss, gradients, weights after a step) ─┐
              prediction (a process without torch) ────────────────────────┼──> verdict
              the layout in fp32, every rank recorded ─────────────────────┘

Gradients are those after all reductions and before clipping. The distance of a tensor is the norm of the difference
over the norm, of the whole tensor; where several ranks hold the same elements the farthest of them counts, and elements
that no rank holds are a difference.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, isfinite, sqrt
from pathlib import Path
from typing import Any, Literal

from meshwright.errors import InputError
from meshwright.ledger.compare import compare, merged
from meshwright.prove import proof as proofs
from meshwright.prove.proof import Check, Proof, Say, bytes_check, ledger_checks, legal, predicted_and_run, timed
from meshwright.prove.train_predict import TrainRequest, predict_apart
from meshwright.runtime.folder import read_folder
from meshwright.runtime.launch.local import run_local
from meshwright.runtime.models.settings import check_trainable
from meshwright.runtime.mutate_train import train_mutation
from meshwright.runtime.proof import routing_of
from meshwright.runtime.train_proof import RankTrain, TrainJob, run_train_proof
from meshwright.specs.layout import Fsdp, Layout, parse_layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import place
from meshwright.specs.workload import Recompute

#: Largest distance from one process in fp64, relative, of loss, norm, gradients and weights.
TOLERANCE = 1e-5
#: How many times as far from fp64 as one process in fp32 a gradient may be, and distances that can be rounding at all.
ROUNDING, ROUNDED = 2.0, 1e-3
SEQ = 24
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
OPTIMIZERS = ("adamw", "sgd")
#: What a rank holds that is compared to the byte.
TERMS = ("weights", "gradients", "optimizer")
MAX_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Peak:
    """Most bytes of activations and other passing tensors of a rank in a step; see ``runtime.train_memory``."""

    rank: int
    measured: int
    predicted: int | None

    @property
    def apart(self) -> float:
        """Distance of the measured from the predicted, over the measured; signed."""
        return (self.measured - (self.predicted or 0)) / max(1, self.measured)


@dataclass(slots=True)
class TrainProof(Proof):
    """The verdict on a step of training.

    Attributes:
        peaks: of activations, measured and predicted; no part of the verdict.
    """

    peaks: list[Peak] = field(default_factory=list)

    @property
    def line(self) -> str:
        """The peaks in a line."""
        if not self.peaks:
            return ""
        most = max(self.peaks, key=lambda p: p.measured)
        text = f"activation peak: {most.measured:,} bytes measured (live storages in one more step) on rank {most.rank}"
        if any(p.predicted is None for p in self.peaks):
            return f"{text}; predicted only for dense layers with zero below 3"
        worst = max(self.peaks, key=lambda p: abs(p.apart))
        return f"{text}, {most.predicted:,} predicted; farthest: rank {worst.rank}, {worst.apart:+.1%}"


def prove_training(
    model: str | Path,
    layout: str | Layout,
    *,
    seq: int = SEQ,
    global_batch: int | None = None,
    steps: int = 1,
    recompute: Recompute = "none",
    optimizer: Literal["adamw", "sgd"] = "adamw",
    seed: int = 0,
    mutate: str | None = None,
    timeout_s: float = 600.0,
    say: Say = lambda _: None,
) -> TrainProof:
    """Train a checkpoint for some steps under a layout; hold it against one process and against its prediction.

    Args:
        model: folder with config.json and safetensors weights.
        layout: degrees, schedule, ZeRO stage.
        seq: tokens of a sequence, random ones. global_batch: sequences of a step; None: two micro-batches a replica,
            with stages twice as many as those.
        steps: gradients and weights are those of the first, losses and the ledger those of all.
        recompute, optimizer: as in ``specs.workload.Train``.
        mutate: name of a planted mistake (``runtime.mutate_train``), with which the proof must fail.
        timeout_s: bound on each of the runs. say: is told what is being done.

    Raises:
        IllegalLayoutError: the own engine refuses the layout; nothing was started.
        InputError: a model, batch or mutation that cannot be run.
    """
    folder = str(model)
    wanted = in_f32(parse_layout(layout) if isinstance(layout, str) else layout)
    spec = read_folder(folder).spec
    placement = legal(spec, wanted, check_trainable)
    batch = global_batch or wanted.dp * wanted.micro_batch * 2 * wanted.pp
    check_sizes(spec, seq, batch, steps)
    request = TrainRequest(folder, str(wanted), seq, batch, steps, "f32", optimizer, recompute)
    check_workload(placement, request)
    mistake = train_mutation(mutate, placement) if mutate else None
    scope = f"{steps} step{'s' * (steps > 1)} of {batch} sequences of {seq} tokens, f32, gloo on this machine"
    proof = TrainProof(spec.name, wanted, wanted.world, scope, mutate)
    chance = random.Random(seed)
    ids = tuple(tuple(chance.randrange(spec.vocab) for _ in range(seq + 1)) for _ in range(batch))
    with tempfile.TemporaryDirectory(prefix="meshwright-prove-") as scratch:
        numbers = f"{scratch}/numbers"
        order, drawn = tuple(range(batch)), seed if mistake is not None and mistake.drawn else None
        job = TrainJob(folder, placement, ids, order, numbers, recompute, optimizer, steps)
        job = replace(job, mutation=mutate, drawn=drawn)
        say("one process, in fp64")
        with timed(proof, "one process"):
            reference = run_local(run_train_proof, 1, (alone(job),), timeout_s)[0]
        if spec.moe is not None:
            request = replace(request, routing=routing_of(numbers))
        ranks: list[RankTrain] | None = predicted_and_run(
            proof,
            partial(predict_apart, request, Path(scratch) / "predicted.jsonl", timeout_s),
            partial(run_local, run_train_proof, wanted.world, (job,), timeout_s),
            mistake.says if mistake else None,
            say,
        )
        if ranks is None:
            return proof
        rounding: Mapping[str, float] = {}
        if any(TOLERANCE < w.far < ROUNDED and not w.missing for w in _distances("gradient", reference, ranks)):
            say("one process, in fp32: how far its rounding alone is from fp64")
            with timed(proof, "one process in fp32"):
                plain = replace(alone(job), dtype="f32", reference=False)
                rounding = rounding_of(reference, run_local(run_train_proof, 1, (plain,), timeout_s))
    say("comparing")
    with timed(proof, "comparison"):
        judge_training(proof, reference, ranks, rounding)
        proof.peaks = peaks_of(proof, ranks)
    return proof


def rounding_of(reference: RankTrain, plain: Sequence[RankTrain]) -> dict[str, float]:
    """By gradient how far one process in fp32 is from fp64: nothing but rounding."""
    return {w.name: w.far for w in _distances("gradient", reference, plain)}


def in_f32(layout: Layout) -> Layout:
    """A layout whose ZeRO-3 gathers and reduces in fp32, as a proof computes."""
    if layout.zero < 3:
        return layout
    return layout.with_(fsdp=replace(layout.fsdp or Fsdp(), param_dtype="f32", reduce_dtype="f32"))


def alone(job: TrainJob) -> TrainJob:
    """The same as one process in fp64, without a mistake: a micro-batch is what all replicas have of it together."""
    dp, each = job.placement.layout.dp, job.placement.layout.micro_batch
    placement = place(job.placement.spec, Layout(micro_batch=dp * each), job.placement.profile)
    own = len(job.ids) // dp
    order = tuple(r * own + n + i for n in range(0, own, each) for r in range(dp) for i in range(each))
    return replace(job, placement=placement, order=order, dtype="f64", reference=True, mutation=None)


def check_sizes(spec: ModelSpec, seq: int, global_batch: int, steps: int) -> None:
    """Refuse sizes that no run has.

    Raises:
        InputError: both numbers.
    """
    if min(seq, global_batch, steps) < 1 or seq * global_batch > MAX_TOKENS:
        raise InputError(
            f"{steps} steps of {global_batch} sequences of {seq} tokens; each at least 1, at most {MAX_TOKENS} tokens"
        )
    if spec.max_positions and seq > spec.max_positions:
        raise InputError(f"{seq} tokens exceed the {spec.max_positions} positions of {spec.name}; give a smaller --seq")


def check_workload(placement: Any, request: TrainRequest) -> None:
    """Refuse a batch that the layout does not divide, or a schedule that cannot run as many micro-batches.

    Raises:
        IllegalLayoutError, InputError: both numbers and the way out.
    """
    from meshwright.errors import IllegalLayoutError
    from meshwright.plan.executed.step import table
    from meshwright.plan.training_step import microbatches

    for rule in placement.profile.check(placement.spec, placement.layout, None, request.work()):
        if rule.severity == "illegal":
            raise IllegalLayoutError(f"{rule.message}; {rule.way_out}")
    table(placement.layout, microbatches(placement.layout, request.work()))


def judge_training(
    proof: Proof, reference: RankTrain, ranks: Sequence[RankTrain], rounding: Mapping[str, float] | None = None
) -> None:
    """Fill in the checks of a proof whose prediction is made; ``rounding``: of gradients, by ``rounding_of``."""
    assert proof.predicted is not None
    proof.recorded = merged(rank.ledger for rank in ranks if rank.ledger is not None)
    proof.checks.append(_scalars("loss", reference.losses, [(r.rank, r.losses) for r in ranks]))
    proof.checks.append(_tensors("gradient", reference, ranks, rounding or {}))
    proof.checks.append(_tensors("weight", reference, ranks, {}))
    proof.checks.append(_scalars("gradient norm", reference.norms[:1], [(r.rank, r.norms[:1]) for r in ranks]))
    proof.comparison = compare(proof.predicted, proof.recorded)
    proof.checks += ledger_checks(proof.comparison)
    for term in TERMS:
        proof.checks.append(bytes_check(proof.predicted, proof.recorded, term))


def _scalars(what: str, reference: Sequence[float], found: Sequence[tuple[int, Sequence[float]]]) -> Check:
    """Numbers of every step as every rank reports them."""
    far = [
        (_relative(ours, other), rank, step)
        for rank, values in found
        for step, (ours, other) in enumerate(zip(values, reference, strict=True))
    ]
    worst, rank, step = max(far)
    wrong = sum(distance > TOLERANCE for distance, *_ in far)
    text = f"{worst:.2g} apart (at most {TOLERANCE:g})"
    said = f"rank {rank}, {what} of step {step}: {dict(found)[rank][step]:.6g}, not {reference[step]:.6g}"
    return Check(what, f"{len(far)} on {len(found)} ranks", wrong, text, said if wrong else None)


def _relative(ours: float, other: float) -> float:
    far = abs(ours - other) / abs(other) if other else abs(ours)
    return far if isfinite(far) else inf


@dataclass(frozen=True, slots=True)
class _Worst:
    """The distance of one tensor, and the rank that is farthest off."""

    far: float
    name: str
    rank: int
    missing: int


def _tensors(kind: str, reference: RankTrain, ranks: Sequence[RankTrain], rounding: Mapping[str, float]) -> Check:
    """Every gradient, or every weight after the step.

    ``rounding``: where fp32 alone is far from fp64 (sums over many tokens that nearly cancel), a gradient may be
    ``ROUNDING`` times as far as one process in fp32 is.
    """
    found = list(_distances(kind, reference, ranks))
    allowed = {w.name: max(TOLERANCE, ROUNDING * rounding.get(w.name, 0.0)) for w in found}
    worst = max(found, key=lambda w: (w.missing > 0, w.far / allowed[w.name]))
    wrong = sum(w.far > allowed[w.name] or w.missing > 0 for w in found)
    what = {"gradient": "gradients", "weight": "weights after a step"}[kind]
    text = f"{worst.far:.2g} apart (at most {allowed[worst.name]:.2g})"
    said = f"rank {worst.rank}, {kind} of {worst.name}: {text}"
    if worst.missing:
        said = f"{kind} of {worst.name}: {worst.missing:,} elements are held by no rank"
    return Check(what, f"{len(found)} tensors", wrong, text, said if wrong else None)


def _distances(kind: str, reference: RankTrain, ranks: Sequence[RankTrain]) -> Iterator[_Worst]:
    """Of every tensor the distance of its runs, the farthest copy of each counted."""
    runs: dict[str, dict[tuple[Any, ...], tuple[float, int, int]]] = {}
    for rank in ranks:
        for run in rank.runs:
            if run.kind == kind:
                of = runs.setdefault(run.name, {})
                where = run.region, run.start, run.count
                of[where] = max(of.get(where, (-1.0, 0, 0)), (run.far, -rank.rank, run.count))
    for key, (length, numel) in reference.lengths.items():
        which, _, name = key.partition("/")
        if which != kind:
            continue
        held = list(runs.get(name, {}).values())
        total = sqrt(sum(far for far, *_ in held))
        far = total / length if length else (inf if total else 0.0)
        farthest = -max(held, default=(0.0, 0, 0))[1]
        yield _Worst(far, name, farthest, numel - sum(count for *_, count in held))


def peaks_of(proof: Proof, ranks: Sequence[RankTrain]) -> list[Peak]:
    """Most bytes of passing tensors of every rank, with the prediction where there is one."""
    assert proof.predicted is not None
    known = {h.rank_class: h.bytes for h in proof.predicted.holdings if h.term == "activations"}
    return [Peak(r.rank, r.peak_bytes, known.get(f"rank{r.rank}")) for r in ranks]


def as_json(proof: TrainProof) -> Mapping[str, Any]:
    """As of any proof, with the peaks."""
    peaks = [{"rank": p.rank, "bytes": p.measured, "predicted": p.predicted} for p in proof.peaks]
    return {**proofs.as_json(proof), "kind": "train", "activation_peaks": peaks}

"""Time of a proven layout: what a step takes against what its ledger and a calibration of this machine say.

::

    predicted ledger ──> shapes ──> runtime.microbench on the ranks of the layout ──> ledger.calibrate.fit
                     └─> seconds of every pass ──> schedule of the stages ──> predicted step ──┐
    the layout, unrecorded ──> median of several steps ────────────────────────────────────────┴──> ratio

It is reported and decides nothing: a machine that others use as well is slower at one moment than at another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ledger.calibrate import Calibration, fit, pass_seconds
from meshwright.ledger.schema import Entry, Ledger
from meshwright.runtime.launch.local import run_local
from meshwright.runtime.microbench import BenchJob, Core, Move, microbench
from meshwright.runtime.proof import ProofJob
from meshwright.runtime.stepbench import run_steps
from meshwright.specs.placement import AXES, Placement

#: Tokens that the timed run generates for every prompt.
TIMED_TOKENS = 16
#: Cached tokens and payloads that are measured of every kind: the smallest, the largest and what lies between.
KNOTS = 4
#: Payloads that are measured of every transfer besides, so that its line is known beyond those of the layout.
PAYLOADS = (1 << 12, 1 << 16, 1 << 20)


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured against predicted seconds.

    Attributes:
        decode_s, prefill_s: measured: median of ``steps`` decode steps; the first token.
        predicted_decode_s, predicted_prefill_s: by the calibration.
        steps: how many decode steps were measured.
        calibration: of this machine.
    """

    decode_s: float
    predicted_decode_s: float
    prefill_s: float
    predicted_prefill_s: float
    steps: int
    calibration: Calibration

    @property
    def line(self) -> str:
        """For people; a ratio is predicted over measured."""
        parts = []
        for what, took, said in (
            ("decode step", self.decode_s, self.predicted_decode_s),
            ("prefill", self.prefill_s, self.predicted_prefill_s),
        ):
            if took and said:
                parts.append(f"{what} {_text(took)}, predicted {_text(said)} ({said / took:.2f} of it)")
        return f"time: {'; '.join(parts)}; median of {self.steps} steps, calibrated here, no part of the verdict"

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "decode_s": self.decode_s,
            "predicted_decode_s": self.predicted_decode_s,
            "prefill_s": self.prefill_s,
            "predicted_prefill_s": self.predicted_prefill_s,
            "steps": self.steps,
            "machine": self.calibration.machine,
            "error": dict(self.calibration.error),
        }


def _text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def timing_of(job: ProofJob, predicted: Ledger, timeout_s: float) -> Timing | str:
    """``time_layout``, or why it has no result: nothing that would change a verdict."""
    try:
        return time_layout(job, predicted, timeout_s)
    except MeshwrightError as error:
        return str(error)


def time_layout(job: ProofJob, predicted: Ledger, timeout_s: float) -> Timing:
    """Calibrate this machine for a layout, time its steps, and predict them.

    Raises:
        RankError: a rank failed or was too late.
    """
    placement = job.placement
    world = placement.layout.world
    bench = run_local(microbench, world, (bench_job(job, predicted),), timeout_s)[0]
    calibration = fit(bench)
    measured = run_local(run_steps, world, (replace(job, new_tokens=TIMED_TOKENS),), timeout_s)
    seconds = next(found for found in measured if found)
    said = predicted_steps(calibration, predicted, placement)
    decode, told = seconds[1:], said[1:]
    return Timing(
        median(decode) if decode else 0.0,
        median(told) if told else 0.0,
        seconds[0],
        said[0],
        len(decode),
        calibration,
    )


def bench_job(job: ProofJob, predicted: Ledger) -> BenchJob:
    """What to measure: the shapes of a prediction, thinned out."""
    layout = job.placement.layout
    of_rank = [e for e in predicted.entries if e.count > 0]
    footprint = max(job.placement.weight_bytes(c.coordinate) for c in job.placement.classes)
    sequences = len(job.prompts) // layout.dp
    groups = min(job.micro_batches or layout.pp, sequences)
    return BenchJob(
        job.placement,
        tuple(_products(of_rank)),
        tuple(_cores(of_rank, -(-sequences // groups))),
        tuple(_moves(of_rank)),
        footprint,
        job.dtype,
    )


def _products(entries: Iterable[Entry]) -> list[tuple[int, int, int]]:
    """Every weight with the smallest and the largest number of rows, and the powers of four between."""
    rows: dict[tuple[int, int], set[int]] = {}
    for e in entries:
        if e.op == "matmul" and e.shapes:
            left, right = e.shapes
            experts = right[0] if len(right) == 3 else 1
            rows.setdefault((right[-2], right[-1]), set()).add(max(1, left[0] // max(1, experts)))
    out = []
    for (k, n), found in rows.items():
        low, high = min(found), max(found)
        between = {4**e for e in range(12) if low < 4**e < high}
        out += [(m, k, n) for m in sorted({low, high} | between)]
    return out


def _cores(entries: Iterable[Entry], sequences: int) -> list[Core]:
    """Attention cores of both phases, those with fewest and most cached tokens."""
    found: dict[tuple[str, int, int, int, int], set[tuple[int, int]]] = {}
    for e in entries:
        if e.op == "attention" and e.shapes and len(e.shapes) == 3 and e.phase:
            (tokens, heads, width), (seen, kv_heads, _), (_, _, value) = e.shapes
            found.setdefault((e.phase, heads, kv_heads, width, value), set()).add((tokens, seen))
    out = []
    for (phase, heads, kv_heads, width, value), sizes in found.items():
        for tokens, seen in _thin(sorted(sizes)):
            count = min(sequences, tokens)
            new = max(1, tokens // count)
            out.append(Core(phase, count, new, max(0, seen // count - new), heads, kv_heads, width, value))
    return out


def _moves(entries: Iterable[Entry]) -> list[Move]:
    """Transfers by op and axis, of the smallest to the largest payload; a hand-off once, not on both sides."""
    found: dict[tuple[str, str], set[int]] = {}
    for e in entries:
        if e.group is not None and e.payload_bytes and e.op != "recv":
            found.setdefault((e.op, e.group), set()).add(e.payload_bytes)
    return [
        Move(op, axis, size)
        for (op, axis), sizes in found.items()
        for size in sorted({*_thin(sorted(sizes)), *PAYLOADS})
    ]


def _thin(values: Sequence[Any]) -> list[Any]:
    """The first, the last, and what lies evenly between, ``KNOTS`` in all."""
    if len(values) <= KNOTS:
        return list(values)
    return [values[round(i * (len(values) - 1) / (KNOTS - 1))] for i in range(KNOTS)]


def predicted_steps(c: Calibration, predicted: Ledger, placement: Placement) -> list[float]:
    """Seconds of the prefill and of every step after it, as the first micro-batch of a replica sees them.

    Stages work in order of the passes; a pass waits for the stage before it and, on the first stage, for the tokens of
    the micro-batch's pass before. The slowest rank of a stage decides.
    """
    groups = {axis: getattr(placement.layout, axis) for axis in (*AXES, "ep")}
    stage_of = {r.rank_class: r.coordinate.get("pp", 0) for r in predicted.ranks}
    stages: dict[tuple[int, int, int], float] = {}
    for (name, step, microbatch), seconds in pass_seconds(c, predicted.entries, groups).items():
        key = stage_of.get(name, 0), step or 0, microbatch or 0
        stages[key] = max(stages.get(key, 0.0), seconds)
    layout = placement.layout
    message_s = c.message_s if layout.tp * layout.pp * layout.cp > 1 else 0.0
    ended = schedule(stages, layout.pp, message_s)
    times = [0.0, *(ended[key] for key in sorted(ended) if key[1] == 0)]
    return [b - a for a, b in pairwise(times)]


def schedule(
    stages: Mapping[tuple[int, int, int], float], count: int, message_s: float
) -> dict[tuple[int, int], float]:
    """When every ``(step, micro-batch)`` leaves the last of ``count`` stages; ``stages``: seconds by stage, step and
    micro-batch."""
    free = [0.0] * count
    ended: dict[tuple[int, int], float] = {}
    for step, microbatch in sorted({key[1:] for key in stages}):
        at = ended[step - 1, microbatch] + message_s if (step - 1, microbatch) in ended else 0.0
        for stage in range(count):
            at = max(at, free[stage]) + stages.get((stage, step, microbatch), 0.0)
            free[stage] = at
        ended[step, microbatch] = at
    return ended

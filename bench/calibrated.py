"""Predicted against measured times after a calibration: ``python -m bench.calibrated [--quick] [--device cpu|cuda]``.

The machine is calibrated once on one rank and once on two. Then, with other sizes and layouts than those:

- ``all_reduce`` by size between two ranks, against the measured curve;
- decode steps and prefills of our engine by layout (``prove.timing``: the shapes of the layout are measured first);
- optimizer steps by layout, against ``plan train --on FILE`` of the calibrated machine.

Writes ``bench/results/calibrated.json``; figures mean something only on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from bench.generation.run import SMALL
from bench.speed import commit, machine
from meshwright import api, engines
from meshwright.plan.machine_file import write
from meshwright.prove.calibrate import Measured, bench_jobs, calibrate_here
from meshwright.prove.predict import Request, predict
from meshwright.prove.timing import time_layout
from meshwright.runtime.checkpoint import write_random
from meshwright.runtime.folder import read_folder
from meshwright.runtime.launch.local import run_local
from meshwright.runtime.microbench import Move, microbenches
from meshwright.runtime.proof import ProofJob
from meshwright.specs.layout import parse_layout
from meshwright.specs.placement import Placement, place

RESULTS = Path(__file__).parent / "results" / "calibrated.json"
TIMEOUT_S = 120.0
#: Payloads that lie between those of the calibration.
SIZES = (2048, 12288, 98304, 524288, 2 << 20, 6 << 20, 12 << 20)
#: Layout, prompts, tokens of a prompt.
SERVED = (
    ("tp=1", 1, 64), ("tp=1", 4, 64), ("tp=1", 1, 256), ("tp=2", 1, 64), ("tp=2", 4, 64), ("tp=2", 1, 256),
    ("pp=2", 2, 64), ("pp=2", 4, 64), ("dp=2", 2, 64), ("dp=2", 4, 256),
)  # fmt: skip
#: Layout, tokens of a sequence, sequences of a step.
TRAINED = (("tp=1", 128, 4), ("dp=2", 128, 4), ("dp=2,zero=1", 128, 4), ("tp=2", 128, 4), ("pp=2", 128, 4))
STEPS = 4
#: Aims: largest distance of the median row, by what is predicted.
AIMS = {"all_reduce": 0.15, "decode": 0.15, "train": 0.20}


@dataclass(frozen=True, slots=True)
class Row:
    """One prediction: what, seconds that were measured and predicted."""

    what: str
    case: str
    measured_s: float
    predicted_s: float

    @property
    def off(self) -> float:
        """Distance over the measured time; signed."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class TrainCase:
    """What a rank trains: ``rows`` sequences of ``seq`` tokens of its replica."""

    folder: str
    placement: Placement
    seq: int
    rows: int
    device: str


def all_reduces(two: Measured, device: str, sizes: Sequence[int]) -> list[Row]:
    """Sizes that were not measured, in a run of their own."""
    job = bench_jobs(2, ("f32",), device, quick=True)[0]
    moves = tuple(Move("all_reduce", "tp", size) for size in sizes)
    backend = "nccl" if device == "cuda" else "gloo"
    ledger = run_local(microbenches, 2, ((replace(job, moves=moves, alone=False),),), TIMEOUT_S, backend=backend)[0][0]
    found: dict[int, list[float]] = {}
    for e in ledger.entries:
        if e.op == "all_reduce" and e.payload_bytes and e.started_ns is not None and e.ended_ns is not None:
            found.setdefault(e.payload_bytes, []).append((e.ended_ns - e.started_ns) / e.count * 1e-9)
    c = two.calibration
    return [
        Row("all_reduce", f"{size} B, 2 ranks", median(times), c.transfer_s("all_reduce", size, 2))
        for size, times in found.items()
    ]


def served(folder: str, text: str, prompts: int, tokens: int) -> list[Row]:
    """Decode step and prefill of a layout."""
    layout = parse_layout(text)
    model = read_folder(folder).spec
    ids = tuple(tuple((7 * i + 3 * p) % 8000 + 1 for i in range(tokens)) for p in range(prompts))
    job = ProofJob(folder, place(model, layout, engines.profile("meshwright")), ids, 4, "")
    found = time_layout(job, predict(Request(folder, text, prompts, tokens, 16)), TIMEOUT_S)
    case = f"{text}, {prompts} prompts of {tokens} tokens"
    return [
        Row("decode", case, found.decode_s, found.predicted_decode_s),
        Row("prefill", case, found.prefill_s, found.predicted_prefill_s),
    ]


def train_steps(rank: int, case: TrainCase) -> list[tuple[float, float]]:
    """Body of a rank: seconds and loss of optimizer steps."""
    import torch

    from meshwright.runtime.job import own_device
    from meshwright.runtime.mesh import build_mesh
    from meshwright.runtime.train.data import Batch
    from meshwright.runtime.train.init import random_weights
    from meshwright.runtime.train.options import TrainOptions
    from meshwright.runtime.train.state import build_state
    from meshwright.runtime.train.step import train_step

    device = own_device(case.device, rank)
    model, placement = read_folder(case.folder), case.placement
    weights = random_weights(model, placement, placement.coordinate(rank), 0)
    weights = {name: tensor.to(device) for name, tensor in weights.items()}
    state = build_state(build_mesh(placement, rank, device), weights, model.settings, TrainOptions())
    ids = torch.randint(1, 8000, (case.rows, case.seq + 1), generator=torch.Generator().manual_seed(1))
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).to(device)
    steps = []
    for _ in range(STEPS + 1):
        began = time.perf_counter()
        loss = train_step(state, batch).loss  # a number of the host, so that a device has ended
        steps.append((time.perf_counter() - began, loss))
    return steps


def trained(folder: str, file: Path, text: str, seq: int, batch: int, device: str) -> Row:
    """An optimizer step of a layout, against the plan on the calibrated machine."""
    layout = parse_layout(text)
    placement = place(read_folder(folder).spec, layout, engines.profile("meshwright"))
    case = TrainCase(folder, placement, seq, batch // layout.dp, device)
    backend = "nccl" if device == "cuda" else "gloo"
    steps = run_local(train_steps, layout.world, (case,), TIMEOUT_S, backend=backend)[0]
    measured = median(seconds for seconds, _ in steps[1:])
    work = api.train_workload(seq=seq, global_batch=batch, param_dtype="f32", grad_dtype="f32")
    plan = api.plan_train(folder, str(file), work, layout=text)
    return Row("train", f"{text}, {batch} x {seq} tokens", measured, api.step_time(plan).step.value)


def measure(device: str, quick: bool) -> tuple[list[Row], Measured]:
    """All rows, and the calibration of the whole machine."""
    ranks = 1 if device == "cuda" else 2
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as scratch:
        folder = str(Path(scratch) / "model")
        write_random({**SMALL, "num_hidden_layers": 2} if quick else SMALL, Path(folder), seed=3)
        whole = None
        for count in range(1, ranks + 1):
            whole = calibrate_here(ranks=count, dtypes=("f32",), device=device, quick=quick, timeout_s=TIMEOUT_S)
            file = Path(scratch) / f"{count}.toml"
            write(whole.cluster, whole.calibration, file)
            trains = [t for t in TRAINED if parse_layout(t[0]).world == count]
            rows += [trained(folder, file, *t, device) for t in trains[: 1 if quick else None]]
        assert whole is not None
        if ranks > 1:
            rows += all_reduces(whole, device, SIZES[:2] if quick else SIZES)
        serves = [s for s in SERVED if parse_layout(s[0]).world <= ranks]
        for one in serves[:1] if quick else serves:
            rows += served(folder, *one)
    return rows, whole


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """By what is predicted: how far the row in the middle is off, and the farthest, beside the aim."""
    out: dict[str, Any] = {}
    for what in dict.fromkeys(row.what for row in rows):
        off = sorted(abs(row.off) for row in rows if row.what == what)
        within = sum(o <= AIMS[what] for o in off) if what in AIMS else None
        out[what] = {"rows": len(off), "median": median(off), "worst": off[-1], "aim": AIMS.get(what), "within": within}
    return out


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one case a kind, nothing written")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args()
    began = time.perf_counter()
    rows, whole = measure(given.device, given.quick)
    for row in rows:
        said = f"{row.measured_s * 1e3:10.3f} ms measured {row.predicted_s * 1e3:10.3f} predicted {row.off:+7.1%}"
        print(f"{row.what:11}{row.case:36}{said}")
    found = summary(rows)
    print(json.dumps(found, indent=1))
    if given.quick:
        return
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "seconds": round(time.perf_counter() - began),
        "summary": found,
        "error_of_fit": dict(whole.calibration.error),
        "rows": [
            {"what": r.what, "case": r.case, "measured_s": r.measured_s, "predicted_s": r.predicted_s, "off": r.off}
            for r in rows
        ],
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {RESULTS.name} in {result['seconds']} s")


if __name__ == "__main__":
    main()

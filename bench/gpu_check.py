"""``make gpu-check``: one GPU, calibrated, proven against the CPU, timed and reported, in at most eight minutes.

1. ``calibrate``: products, attention, memory, launches; the cluster file goes to ``out/gpu/here.toml``.
2. Proofs: a generation and some optimizer steps on the device against the same on the CPU, in fp32.
3. A model that fits, random weights: prefill and decode measured, and what the calibration said of them.

One deadline holds for all of it: every part is given what is left of it, and what no longer fits is reported as not
run. The report goes to ``out/gpu/report.json``. One GPU proves nothing about NCCL across ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from bench.calibrated import TrainCase, train_steps
from bench.generation.run import SMALL
from meshwright import engines
from meshwright.errors import InputError, MeshwrightError
from meshwright.plan.machine_file import write
from meshwright.prove.calibrate import Measured, calibrate_here
from meshwright.prove.predict import Request, predict
from meshwright.prove.timing import bench_job, predicted_steps
from meshwright.runtime.checkpoint import write_random
from meshwright.runtime.folder import read_folder
from meshwright.runtime.launch.local import run_local
from meshwright.runtime.microbench import microbenches
from meshwright.runtime.proof import ProofJob
from meshwright.runtime.stepbench import step_seconds
from meshwright.specs.layout import Layout
from meshwright.specs.placement import place

OUT = Path("out/gpu")
#: Seconds for everything; of them kept for ending ranks and writing the report; without which no part begins.
LIMIT_S, RESERVE_S, LEAST_S = 480.0, 10.0, 3.0
#: Share of what is left that the calibration may take, so that the proofs come to their turn.
CALIBRATING = 0.6
#: Seconds that the large model must have left: its weights are made in this process, which nobody ends.
LARGE_S = 90.0
#: A Llama of 1.2 billion parameters (the shape of Llama-3.2-1B), and one for the CPU.
LARGE = {
    **SMALL, "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "dtype": "bfloat16",
}  # fmt: skip
TINY = {**SMALL, "num_hidden_layers": 2}
#: Prompts and tokens of each; tokens that are generated.
LOADS = ((1, 512), (8, 512))
NEW_TOKENS = 16
#: Largest distance of a logit or a loss in fp32 between the devices, over its size.
CLOSE = 2e-3


class NotRun(MeshwrightError):
    """A part for which no time was left."""


@dataclass(slots=True)
class Deadline:
    """The time that all parts share, and what became of each.

    Attributes:
        limit_s: from the beginning to the end. parts: state (``done``, ``not run``, ``failed``), seconds and why.
        until: when what was last allowed to run is cut off.
    """

    limit_s: float
    began: float = field(default_factory=time.perf_counter)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    until: float = float("inf")

    def left_s(self, least_s: float = LEAST_S, share: float = 1.0) -> float:
        """Seconds that a part may still take: this share of all that are left.

        Raises:
            NotRun: fewer than ``least_s``.
        """
        left = self.began + self.limit_s - RESERVE_S - time.perf_counter()
        if left < least_s:
            raise NotRun(f"{max(0.0, left):.0f} s left of {self.limit_s:.0f}, it needs {least_s:.0f}")
        self.until = time.perf_counter() + left * share
        return left * share

    def run(self, name: str, part: Callable[[], Any]) -> Any:
        """What a part returns; None where it was not run, was cut off or failed, which ``parts`` tells."""
        start = time.perf_counter()
        state, why, out = "done", "", None
        try:
            out = part()
        except InputError:
            raise
        except NotRun as error:
            state, why = "not run", str(error)
        except MeshwrightError as error:
            over = time.perf_counter() >= self.until
            state, why = ("not run", "cut off, its time was over") if over else ("failed", str(error)[:300])
        seconds = round(time.perf_counter() - start, 1)
        self.parts[name] = {"state": state, "seconds": seconds, **({"why": why} if why else {})}
        return out


def job_of(folder: str, prompts: int, tokens: int, dtype: str) -> ProofJob:
    """A generation of random prompts in one process."""
    ids = tuple(tuple((7 * i + 3 * p) % 8000 + 1 for i in range(tokens)) for p in range(prompts))
    placement = place(read_folder(folder).spec, Layout(), engines.profile("meshwright"))
    return ProofJob(folder, placement, ids, NEW_TOKENS, "", dtype)


def generated(rank: int, job: ProofJob, device: str) -> tuple[list[float], list[list[float]]]:
    """Body of the rank: seconds of prefill and decode steps (of a second run), logits of the first prompt's tokens."""
    import torch

    from meshwright.runtime.checkpoint import TORCH_DTYPES, load
    from meshwright.runtime.generate import generate
    from meshwright.runtime.job import own_device
    from meshwright.runtime.mesh import build_mesh
    from meshwright.runtime.models.decoder import Decoder

    where, dtype = own_device(device, rank), TORCH_DTYPES[job.dtype]
    model = read_folder(job.folder)
    weights = load(model, job.placement, job.placement.coordinate(rank), dtype, where)
    mesh = build_mesh(job.placement, rank, where)
    decoder = Decoder(mesh, weights, model.settings, dtype)
    with torch.inference_mode():
        made = generate(mesh, decoder, job.prompts, job.new_tokens, keep_logits=True)
        seconds = step_seconds(mesh, decoder, job.prompts, job.new_tokens)
    return seconds, made.logits[0].float().cpu().tolist()


def same(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """Largest distance over the largest value."""
    most = max(abs(v) for row in theirs for v in row)
    return max(abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)) / most


def proofs(folder: str, device: str, deadline: Deadline) -> list[dict[str, Any]]:
    """The device against the CPU in fp32."""
    job = job_of(folder, 2, 24, "f32")
    sides = [run_local(generated, 1, (job, where), deadline.left_s())[0] for where in ("cpu", device)]
    case = TrainCase(folder, job.placement, 64, 4, "cpu")
    cases = [replace(case, device=where) for where in ("cpu", device)]
    steps = [run_local(train_steps, 1, (one,), deadline.left_s())[0] for one in cases]
    losses = [[loss for _, loss in side] for side in steps]
    off = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    far = same(sides[1][1], sides[0][1])
    return [
        {"what": "logits of a generation", "distance": far, "ok": far < CLOSE},
        {"what": "losses of optimizer steps", "distance": off, "ok": off < CLOSE, "losses": losses[1]},
    ]


def timed(folder: str, device: str, dtype: str, prompts: int, tokens: int, deadline: Deadline) -> dict[str, Any]:
    """Prefill and decode, measured and predicted by the shapes of this model on this device."""
    from meshwright.ledger.calibrate import fit

    job = job_of(folder, prompts, tokens, dtype)
    said = predict(Request(folder, "tp=1", prompts, tokens, NEW_TOKENS, dtype))
    shapes = replace(bench_job(job, said), device=device)
    c = fit(run_local(microbenches, 1, ((shapes,),), deadline.left_s())[0][0])
    seconds = run_local(generated, 1, (job, device), deadline.left_s())[0][0]
    steps = predicted_steps(c, said, job.placement)
    return {
        "prompts": prompts,
        "tokens": tokens,
        "prefill_s": seconds[0],
        "predicted_prefill_s": steps[0],
        "decode_s": median(seconds[1:]),
        "predicted_decode_s": median(steps[1:]),
    }


def calibrated(device: str, out: Path, deadline: Deadline, *, tiny: bool) -> Measured:
    """The calibration, and its cluster file in ``out``."""
    found = calibrate_here(
        ranks=1,
        device=device,
        dtypes=("f32",) if device == "cpu" else None,
        quick=tiny,
        timeout_s=deadline.left_s(share=CALIBRATING),
        say=lambda text: print(f"... {text}"),
    )
    write(found.cluster, found.calibration, out / "here.toml", found.remarks)
    return found


def check(device: str, out: Path, *, tiny: bool = False, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """All of it; the report as it is written.

    Args:
        device: ``cuda``; ``cpu`` to try the program itself. out: folder. tiny: a small model and few shapes.
        limit_s: bound on everything together.

    Raises:
        InputError: no such device.
    """
    deadline = Deadline(limit_s)
    out.mkdir(parents=True, exist_ok=True)
    found: Measured | None = deadline.run("calibrate", lambda: calibrated(device, out, deadline, tiny=tiny))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="meshwright-gpu-") as scratch:
        small, large = Path(scratch) / "small", Path(scratch) / "large"
        write_random(TINY, small, seed=3)
        proven = deadline.run("proofs", lambda: proofs(str(small), device, deadline)) or []
        model, dtype = (small, "f32") if tiny else (large, "bf16")
        for prompts, tokens in ((1, 16),) if tiny else LOADS:

            def part(prompts: int = prompts, tokens: int = tokens) -> dict[str, Any]:
                if not model.exists():
                    deadline.left_s(LARGE_S)
                    write_random(LARGE, large, seed=3)
                return timed(str(model), device, dtype, prompts, tokens, deadline)

            row = deadline.run(f"times of {prompts} x {tokens} tokens", part)
            rows += [row] if row is not None else []
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": found.calibration.machine if found is not None else None,
        "device": found.cluster.device.name if found is not None else device,
        "ok": bool(proven) and all(p["ok"] for p in proven) and not _failed(deadline),
        "parts": deadline.parts,
        "proofs": proven,
        "times": rows,
        "error_of_fit": dict(found.calibration.error) if found is not None else {},
        "limit_s": limit_s,
        "seconds": round(time.perf_counter() - deadline.began, 1),
        "says_nothing_of": "NCCL across ranks: one device was used",
    }
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def _failed(deadline: Deadline) -> bool:
    return any(part["state"] == "failed" for part in deadline.parts.values())


def main() -> int:
    """Exit 0: proven; 1: a proof failed, or was not run for lack of time; 2: no device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model and few shapes")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all of it")
    given = parser.parse_args()
    try:
        report = check(given.device, given.out, tiny=given.tiny, limit_s=given.limit)
    except InputError as error:
        sys.stderr.write(f"gpu-check: {error}\n")
        return 2
    for name, part in report["parts"].items():
        if part["state"] != "done":
            print(f"{part['state']:8}{name}: {part['why']}")
    for proof in report["proofs"]:
        print(f"{'ok' if proof['ok'] else 'NOT ok':7}{proof['what']}: {proof['distance']:.1e} apart")
    for row in report["times"]:
        load = f"{row['prompts']} x {row['tokens']} tokens"
        for what in ("prefill", "decode"):
            took, said = row[f"{what}_s"], row[f"predicted_{what}_s"]
            print(f"{what:8}{load:20}{took * 1e3:9.2f} ms, predicted {said * 1e3:9.2f} ({said / took:.2f} of it)")
    print(f"report: {given.out / 'report.json'} after {report['seconds']} s; {report['says_nothing_of']}")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())

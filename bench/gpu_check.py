"""``make gpu-check``: one GPU, calibrated, proven against the CPU, timed and reported, in at most eight minutes.

1. ``calibrate``: products, attention, memory, launches; the cluster file goes to ``out/gpu/here.toml``.
2. Proofs: a generation and some optimizer steps on the device against the same on the CPU, in fp32.
3. A model that fits, random weights: prefill and decode measured, and what the calibration said of them.

The report goes to ``out/gpu/report.json``. One GPU proves nothing about NCCL across ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
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
LIMIT_S = 480.0
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


def proofs(folder: str, device: str) -> list[dict[str, Any]]:
    """The device against the CPU in fp32."""
    job = job_of(folder, 2, 24, "f32")
    sides = [run_local(generated, 1, (job, where), LIMIT_S)[0] for where in ("cpu", device)]
    case = TrainCase(folder, job.placement, 64, 4, "cpu")
    steps = [run_local(train_steps, 1, (replace(case, device=where),), LIMIT_S)[0] for where in ("cpu", device)]
    losses = [[loss for _, loss in side] for side in steps]
    off = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    far = same(sides[1][1], sides[0][1])
    return [
        {"what": "logits of a generation", "distance": far, "ok": far < CLOSE},
        {"what": "losses of optimizer steps", "distance": off, "ok": off < CLOSE, "losses": losses[1]},
    ]


def timed(folder: str, device: str, dtype: str, prompts: int, tokens: int) -> dict[str, Any]:
    """Prefill and decode, measured and predicted by the shapes of this model on this device."""
    from meshwright.ledger.calibrate import fit

    job = job_of(folder, prompts, tokens, dtype)
    said = predict(Request(folder, "tp=1", prompts, tokens, NEW_TOKENS, dtype))
    shapes = replace(bench_job(job, said), device=device)
    c = fit(run_local(microbenches, 1, ((shapes,),), LIMIT_S)[0][0])
    seconds = run_local(generated, 1, (job, device), LIMIT_S)[0][0]
    steps = predicted_steps(c, said, job.placement)
    return {
        "prompts": prompts,
        "tokens": tokens,
        "prefill_s": seconds[0],
        "predicted_prefill_s": steps[0],
        "decode_s": median(seconds[1:]),
        "predicted_decode_s": median(steps[1:]),
    }


def check(device: str, out: Path, *, tiny: bool = False) -> dict[str, Any]:
    """All of it; the report as it is written.

    Args:
        device: ``cuda``; ``cpu`` to try the program itself. out: folder. tiny: a small model and few shapes.

    Raises:
        InputError: no such device. RankError: a part failed or took too long.
    """
    began = time.perf_counter()
    dtypes = ("f32",) if device == "cpu" else None
    found: Measured = calibrate_here(
        ranks=1, device=device, dtypes=dtypes, quick=tiny, timeout_s=LIMIT_S, say=lambda text: print(f"... {text}")
    )
    out.mkdir(parents=True, exist_ok=True)
    write(found.cluster, found.calibration, out / "here.toml", found.remarks)
    with tempfile.TemporaryDirectory(prefix="meshwright-gpu-") as scratch:
        small, large = Path(scratch) / "small", Path(scratch) / "large"
        write_random(TINY, small, seed=3)
        proven = proofs(str(small), device)
        if not tiny:
            write_random(LARGE, large, seed=3)
        model, dtype = (small, "f32") if tiny else (large, "bf16")
        rows = [timed(str(model), device, dtype, *load) for load in (((1, 16),) if tiny else LOADS)]
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": found.calibration.machine,
        "device": found.cluster.device.name,
        "ok": all(p["ok"] for p in proven),
        "proofs": proven,
        "times": rows,
        "error_of_fit": dict(found.calibration.error),
        "seconds": round(time.perf_counter() - began, 1),
        "says_nothing_of": "NCCL across ranks: one device was used",
    }
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def main() -> int:
    """Exit 0: proven; 1: a proof failed; 2: no device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model and few shapes")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    try:
        report = check(given.device, given.out, tiny=given.tiny)
    except InputError as error:
        sys.stderr.write(f"gpu-check: {error}\n")
        return 2
    except MeshwrightError as error:
        sys.stderr.write(f"gpu-check: {error}\n")
        return 1
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

"""How the constants of ``plan/constants/training_time.json`` came to be.

python bench/fit_training_time.py            # fit on all rows, leave layouts and models out, print what came of it
python bench/fit_training_time.py --write    # and write the fitted values into training_time.json

Levenberg-Marquardt in logarithms on log(predicted / measured tokens/s), errors beyond a quarter weighing less (the
square root of a smooth absolute value), each constant held to its documented prior (``prior``, ``spread`` in the JSON
file). Releases of one layout share the weight of one row, and a model's weight grows as the square root of its layouts.
The formulas are those of ``plan.training_time`` over arrays; a test holds both equal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.training_rows import FILE, Case, read_cases  # noqa: E402
from meshwright.plan.training_time import CORNER, STREAM, data_file, rates  # noqa: E402
from meshwright.plan.training_time_work import DataWork, Work, distinct, step_work  # noqa: E402

CONSTANTS = ROOT / "src" / "meshwright" / "plan" / "constants" / "training_time.json"
Array = Any
#: Log error from which a row's pull no longer grows.
SOFT = 0.15
#: Width for devices that no row is of (a choice, not a fit).
ELSEWHERE = 0.5
#: Weight of the priors beside the rows.
HOLD = 0.35
HOST = [Work._fields.index(name) for name in ("kernels", "mixtures")]


@dataclass(frozen=True)
class Counted:
    """Work of every case: [case, stage, phase, field], seconds of gradients and parameters [case, stage, field]."""

    cases: Sequence[Case]
    work: Array
    data: Array
    absent: Array
    present: Array
    layout: Array
    measured: Array
    weight: Array

    def part(self, picked: Sequence[int]) -> Counted:
        """Some of the cases."""
        at = list(picked)
        return Counted(
            [self.cases[i] for i in at], self.work[at], self.data[at], self.absent[at], self.present[at],
            self.layout[at], self.measured[at], self.weight[at],
        )  # fmt: skip


def weights(cases: Sequence[Case]) -> Array:
    """Releases share one row's weight; models weigh as the square root of their layouts."""
    releases = Counter(c.key for c in cases)
    layouts = Counter(key[:2] for key in releases)
    raw = np.array([1 / releases[c.key] / layouts[c.key[:2]] ** 0.5 for c in cases])
    return np.sqrt(raw / raw.mean())


def count(cases: Sequence[Case]) -> Counted:
    """Count the work of every case once: its first, middle and last stage."""
    n = len(cases)
    work, data = np.zeros((n, 3, 3, len(Work._fields))), np.zeros((n, 3, len(DataWork._fields)))
    present, absent, layout = np.zeros((n, 3)), np.zeros(n), np.zeros((n, 4))
    for i, c in enumerate(cases):
        stages = distinct(step_work(c.placement, c.cluster, c.work, c.software.compute).ranks)
        picked = sorted({0, len(stages) // 2, len(stages) - 1})
        for j, at in enumerate(picked):
            rank = stages[at]
            work[i, j] = rank.forward, rank.recompute, rank.backward
            data[i, j] = rank.data
            present[i, j] = 1
        lay = c.placement.layout
        absent[i] = lay.pp - len(picked)
        m = c.work.global_batch // (lay.dp * lay.micro_batch)
        layout[i] = m, lay.virtual, c.software.overlap, c.software.recomputed
    measured = np.array([c.tokens_per_s for c in cases])
    return Counted(cases, work, data, absent, present, layout, measured, weights(cases))


def seconds(c: Mapping[str, float], k: Counted) -> Array:
    """Seconds of every case's step."""
    known: dict[Any, Work] = {}
    for case in k.cases:
        key = (case.cluster.device.name, case.software)
        if key not in known:
            known[key] = rates(c, case.cluster.device, case.software).weights
    rate = np.array([known[case.cluster.device.name, case.software] for case in k.cases])
    host_rate = np.zeros_like(rate)
    host_rate[:, HOST] = rate[:, HOST]
    device = np.einsum("ispf,if->isp", k.work, rate - host_rate)
    host = np.einsum("ispf,if->isp", k.work, host_rate)
    phases = (device**CORNER + host**CORNER) ** (1 / CORNER)
    m, virtual, overlap, again = k.layout.T
    forward = phases[:, :, 0]
    backward = phases[:, :, 2] + phases[:, :, 1] * again[:, None]
    both = (forward + backward) * k.present
    slowest = both.max(1)
    others = both.sum(1) - slowest
    others = others + k.absent * others / np.maximum(k.present.sum(1) - 1, 1)
    d = {name: k.data[:, :, j] for j, name in enumerate(DataWork._fields)}
    units, buckets = np.maximum(d["units"], 1), np.maximum(d["buckets"], 1)
    every = m[:, None] * (d["gather"] + d["gather_again"] + d["scatter"])
    once = d["gradients"] + d["parameters"]
    out = m[:, None] * (
        np.maximum(d["gather"] - forward, 0) + np.maximum(d["gather_again"] + d["scatter"] - backward, 0)
        + (d["gather"] + d["scatter"]) / units
    )  # fmt: skip
    out = out + np.maximum(d["gradients"] - backward, d["gradients"] / buckets)
    out = out + np.maximum(d["parameters"] - forward, 0)
    hidden = np.maximum(every + once - out, 0)
    exposed = np.where(overlap[:, None] > 0, np.maximum(out, 0) + c["contention"] * hidden, every + once) + d["norm"]
    optimizer = d["optimizer"].max(1) / STREAM + c["step"]
    found: Array = m * slowest + others / virtual + (exposed * k.present).max(1) + optimizer
    return found


def errors(c: Mapping[str, float], k: Counted) -> Array:
    """log(predicted / measured) of tokens/s."""
    tokens = np.array([case.work.global_batch * case.work.seq / case.placement.layout.world for case in k.cases])
    found: Array = np.log(tokens / seconds(c, k) / k.measured)
    return found


def priors() -> dict[str, tuple[float, float]]:
    """Prior and spread of every constant."""
    return {name: (e["prior"], e["spread"]) for name, e in data_file()["constants"].items()}


def fit(k: Counted, start: Mapping[str, float] | None = None, rounds: int = 14) -> dict[str, float]:
    """Constants of these cases."""
    known = priors()
    free = [name for name, (_, spread) in known.items() if spread > 0]
    centre = np.log([known[name][0] for name in free])
    spread = np.array([known[name][1] for name in free])
    fixed = {name: prior for name, (prior, _) in known.items()}
    x = centre.copy() if start is None else np.log([start[name] for name in free])

    def of(at: Array) -> dict[str, float]:
        return fixed | dict(zip(free, np.exp(at).tolist(), strict=True))

    def bent(e: Array) -> Array:
        size = SOFT * np.sqrt(2 * (np.sqrt(1 + (e / SOFT) ** 2) - 1))
        return np.sign(e) * size * k.weight

    def residuals(at: Array) -> Array:
        return np.concatenate([bent(errors(of(at), k)), HOLD * SOFT * (at - centre) / spread])

    damp, r = 1e-2, residuals(x)
    for _ in range(rounds):
        jacobian = np.stack([(residuals(x + step) - r) / 1e-3 for step in np.eye(len(x)) * 1e-3], axis=1)
        a, g = jacobian.T @ jacobian, jacobian.T @ r
        for _ in range(6):
            step = -np.linalg.solve(a + damp * np.diag(np.diag(a) + 1e-9), g)
            tried = residuals(x + step)
            if tried @ tried < r @ r:
                x, r, damp = x + step, tried, damp / 4
                break
            damp *= 4
        else:
            break
    return of(x)


def left_out(k: Counted, of: Callable[[Case], object], start: Mapping[str, float], rounds: int = 5) -> Array:
    """Log errors of every row by constants fitted without the rows of the same ``of``."""
    found = np.zeros(len(k.cases))
    names = [of(c) for c in k.cases]
    for name in dict.fromkeys(names):
        out = [i for i, n in enumerate(names) if n == name]
        kept = [i for i, n in enumerate(names) if n != name]
        found[out] = errors(fit(k.part(kept), start, rounds), k.part(out))
    return found


def folds(k: Counted, number: int = 10) -> Callable[[Case], object]:
    """Layouts dealt over folds, all releases of one together."""
    keys = list(dict.fromkeys(c.key for c in k.cases))
    place = {key: (i * 7919) % len(keys) % number for i, key in enumerate(keys)}
    return lambda c: place[c.key]


def model_of(c: Case) -> str:
    """The model of a case, the same one in all sources."""
    name = c.group.partition(" (")[0].partition(" cut to")[0].lower().replace("-", "").replace("_", "").replace(".", "")
    return name.replace("llama31", "llama3")


def write(c: Mapping[str, float], widths: Mapping[str, float]) -> None:
    """Put fitted values and interval widths into the JSON file, one constant a line."""
    data = json.loads(CONSTANTS.read_text())
    entries = data.pop("constants")
    data["width_log"] = {name: round(float(w), 3) for name, w in widths.items()}
    for name, entry in entries.items():
        entry["value"] = float(f"{c[name]:.4g}")
    body = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
    CONSTANTS.write_text(json.dumps(data, indent=1)[:-2] + ',\n "constants": {\n' + body + "\n }\n}\n")


def line(name: str, e: Array) -> str:
    """Median, 90th percentile and largest absolute error in percent, bias, share within 20 %."""
    size = np.abs(np.exp(e) - 1)
    return (
        f"{name[:44]:44} {len(e):4d} {100 * np.median(size):6.1f} {100 * np.quantile(size, 0.9):6.1f} "
        f"{100 * size.max():6.1f} {100 * (np.exp(np.median(e)) - 1):+6.1f} {100 * np.mean(size <= 0.2):5.0f}"
    )


def table(title: str, k: Counted, e: Array, detail: bool = True) -> str:
    """Errors by source, and of Megatron-Bridge by model."""
    lines = [f"{title:44} {'rows':>4} {'median':>6} {'p90':>6} {'worst':>6} {'bias':>6} {'<20%':>5}"]
    for source in dict.fromkeys(c.source for c in k.cases):
        at = [i for i, c in enumerate(k.cases) if c.source == source]
        lines.append(line(source, e[at]))
        if "performance summary" in source and detail:
            for group in sorted({model_of(k.cases[i]) for i in at}):
                lines.append(line(f"  {group}", e[[i for i in at if model_of(k.cases[i]) == group]]))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Fit and print."""
    parser = argparse.ArgumentParser(description="Fit the constants of the training time.")
    shared = Path(os.environ.get("MESHWRIGHT_SHARED", ROOT.parent / "shared")) / "truth" / FILE
    parser.add_argument("--rows", type=Path, default=shared, help="file with the columns of ground_truth.csv")
    parser.add_argument("--write", action="store_true", help="write the values into training_time.json")
    parser.add_argument("--in-sample", action="store_true", help="do not leave anything out")
    parser.add_argument("--worst", type=int, default=0, help="print so many of the worst rows")
    options = parser.parse_args(argv)
    cases, skipped = read_cases(options.rows)
    for reason, number in Counter(s.reason for s in skipped).items():
        print(f"{number} rows left out: {reason}")
    k = count(cases)
    c = fit(k)
    e = errors(c, k)
    print(table("in sample", k, e), flush=True)
    for name, (prior, spread) in priors().items():
        print(f"{name:20} {c[name]:10.4g}  prior {prior:g}" + (f" x/ e^{spread:g}" if spread else " (fixed)"))
    for i in np.argsort(-np.abs(e))[: options.worst]:
        print(f"{e[i]:+.2f} {k.cases[i].name}")
    if options.in_sample:
        return 0
    models = left_out(k, model_of, c)
    print(table("layouts left out (10 folds)", k, left_out(k, folds(k), c)))
    print(table("models left out", k, models))
    size, mixture = np.abs(models), np.array([case.placement.spec.moe is not None for case in cases])
    widths = {"dense": np.quantile(size[~mixture], 0.8), "mixture": np.quantile(size[mixture], 0.8)}
    widths["elsewhere"] = ELSEWHERE
    print("absolute log errors that 80 % of left-out models keep:", {k: round(float(v), 3) for k, v in widths.items()})
    if options.write:
        write(c, widths)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

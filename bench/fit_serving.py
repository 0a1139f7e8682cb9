"""How the constants of ``plan/constants/timing.json`` came to be.

python bench/fit_serving.py                # fit on all rows, leave families and systems out, print what came of it
python bench/fit_serving.py --write        # and write the fitted values into timing.json
python bench/fit_serving.py --quick        # fewer rows and rounds

The fit is a coordinate descent in logarithms on the capped absolute log error, each constant held to a prior with a
documented reason (``serving_fit.PRIORS``, ``timing.json``). Rows are thinned to a few of each model, engine, system and
precision, and every family weighs as the square root of its rows, so that no large set of runs decides alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.serving_fit import PRIORS, TIMING, fit, residuals  # noqa: E402
from bench.serving_rows import Run, read_runs  # noqa: E402
from bench.serving_work import Array, Counts, collect, subset  # noqa: E402


def thinned(runs: Sequence[Run], keep: Callable[[Run], bool], most: int) -> list[int]:
    """Numbers of at most ``most`` runs of each model, engine, system, precision, mode and condition; no cold starts."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, r in enumerate(runs):
        if keep(r) and not r.cold:
            key = (r.family, r.engine, r.system, r.precision, r.mode, r.speculative, r.eager)
            groups.setdefault(key, []).append(i)
    rng = random.Random(0)
    picked = (g if len(g) <= most else rng.sample(g, most) for _, g in sorted(groups.items(), key=str))
    return [i for group in picked for i in group]


def weights(counts: Counts) -> Array:
    """Every family and mode weighs as the square root of its rows."""
    sizes: dict[tuple[str, str], int] = {}
    for r in counts.runs:
        sizes[r.family, r.mode] = sizes.get((r.family, r.mode), 0) + 1
    return np.array([sizes[r.family, r.mode] ** -0.5 for r in counts.runs])


def fitted(counts: Counts, keep: Callable[[Run], bool], most: int, rounds: int) -> dict[str, float]:
    """Constants fitted on the runs to keep."""
    part = subset(counts, thinned(counts.runs, keep, most))
    return fit(part, weights(part), rounds=rounds)


def left_out(counts: Counts, of: Callable[[Run], str], most: int, rounds: int) -> tuple[Array, Array]:
    """Log residuals of TTFT and TPOT of every run, by constants fitted without the runs of the same ``of``."""
    ttft, tpot = np.zeros(len(counts.runs)), np.zeros(len(counts.runs))
    names = np.array([of(r) for r in counts.runs])
    for name in sorted(set(names)):
        c = fitted(counts, lambda r, name=name: of(r) != name, most, rounds)  # type: ignore[misc]
        picked = np.nonzero(names == name)[0]
        ttft[picked], tpot[picked] = residuals(c, subset(counts, list(picked)))
    return ttft, tpot


def line(name: str, ttft: Array, tpot: Array) -> str:
    """Errors in percent: median, 90th percentile, bias of the median."""
    parts = [f"{name[:34]:34} {len(tpot):5d}"]
    for label, logs in (("TPOT", tpot), ("TTFT", ttft)):
        error = np.abs(np.exp(logs) - 1)
        bias = np.exp(np.median(logs)) - 1
        parts.append(
            f"{label} {100 * np.median(error):6.1f} p90 {100 * np.quantile(error, 0.9):6.1f} bias {100 * bias:+6.1f}"
        )
    return "  ".join(parts)


def table(title: str, counts: Counts, ttft: Array, tpot: Array, of: Callable[[Run], str]) -> str:
    """Errors by mode and by group."""
    lines = [title]
    for mode in ("aggregated", "disaggregated"):
        inside = np.array([r.mode == mode for r in counts.runs])
        if inside.any():
            lines.append(line(mode, ttft[inside], tpot[inside]))
        for name in sorted({of(r) for r in counts.runs if r.mode == mode}):
            picked = inside & np.array([of(r) == name for r in counts.runs])
            lines.append(line(f"  {name}", ttft[picked], tpot[picked]))
    return "\n".join(lines)


def quantiles(counts: Counts, ttft: Array, tpot: Array) -> str:
    """Absolute log residuals that 65, 80 and 92 % of a family's rows keep: what interval widths are read from."""
    lines = ["absolute log residuals kept by 65, 80, 92 % of the rows (TPOT | TTFT)"]
    groups: dict[tuple[str, str], list[int]] = {}
    for i, r in enumerate(counts.runs):
        groups.setdefault((r.mode, r.family), []).append(i)
    for key, at in sorted(groups.items()):
        cells = [" ".join(f"{np.quantile(np.abs(v[at]), q):.2f}" for q in (0.65, 0.8, 0.92)) for v in (tpot, ttft)]
        lines.append(f"  {' '.join(key)[:34]:34} {len(at):4d}  {cells[0]} | {cells[1]}")
    return "\n".join(lines)


def write(c: dict[str, float]) -> None:
    """Put fitted values into ``timing.json``, one constant a line."""
    data = json.loads(TIMING.read_text())
    entries = data.pop("constants")
    for name, entry in entries.items():
        entry["value"] = float(f"{c[name]:.4g}")
    body = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
    TIMING.write_text(json.dumps(data, indent=1)[:-2] + ',\n "constants": {\n' + body + "\n }\n}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Fit and print."""
    parser = argparse.ArgumentParser(description="Fit the constants of the serving times.")
    shared = Path(os.environ.get("MESHWRIGHT_SHARED", ROOT.parent / "shared")) / "truth" / "serving_latency.csv"
    parser.add_argument("--rows", type=Path, default=shared, help="file with the columns of serving_latency.csv")
    parser.add_argument("--write", action="store_true", help="write the values into timing.json")
    parser.add_argument("--quick", action="store_true", help="six rows a group and two rounds")
    options = parser.parse_args(argv)
    most, rounds = (6, 2) if options.quick else (15, 3)
    runs, dropped = read_runs(options.rows)
    print(f"{len(runs)} runs; left out: " + "; ".join(f"{n} ({why})" for why, n in dropped.items()))
    counts = collect(runs)
    c = fitted(counts, lambda _: True, most, rounds)
    if options.write:
        write(c)
    print(f"{sum(s > 0 for _, s in PRIORS.values())} constants fitted of {len(PRIORS)}")
    print(table("in sample", counts, *residuals(c, counts), lambda r: r.family), flush=True)
    family = left_out(counts, lambda r: r.family, most, rounds)
    print(table("family left out", counts, *family, lambda r: r.family))
    print(quantiles(counts, *family), flush=True)
    system = left_out(counts, lambda r: r.system, most, rounds)
    print(table("system left out", counts, *system, lambda r: r.system))
    print(quantiles(counts, *system))
    for name, (prior, spread) in PRIORS.items():
        print(f"{name:30} {c[name]:10.4g}  prior {prior:g}" + (f" x/ e^{spread:g}" if spread else " (fixed)"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Training throughput against public measurements: tokens/s of a device, by source, and the layouts picked by it.

Rows that no prediction is made for are counted with their reason (``training_rows.Skipped``): LoRA, and rows
without batch, offload or recomputation. ``held_out`` refits the constants without layouts and without models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import exp
from pathlib import Path

from bench.scoring import ScoreRow
from bench.training_rows import FILE, Case, read_cases
from meshwright.plan.training_time import TrainingTime, training_time

METRIC = "training tokens/s/GPU"
#: How far the measured best may lie above the layout that is predicted best.
CLOSE = 0.05


def predict(case: Case) -> TrainingTime:
    """The product's own prediction of one measured step."""
    return training_time(case.placement, case.cluster, case.work, software=case.software)


@cache
def predicted(truth: Path) -> tuple[tuple[Case, TrainingTime], ...]:
    """Every case of a folder with its prediction."""
    return tuple((case, predict(case)) for case in read_cases(truth / FILE)[0])


def rows(truth: Path) -> list[ScoreRow]:
    """Every training throughput of the table."""
    skipped = read_cases(truth / FILE)[1]
    found = [
        ScoreRow(c.source, c.group, c.name, METRIC, time.tokens_per_s_device, c.tokens_per_s, "tokens/s/GPU")
        for c, time in predicted(truth)
    ]
    return found + [ScoreRow(s.source, "", s.name, METRIC, None, s.measured, s.unit, s.reason) for s in skipped]


@dataclass(frozen=True, slots=True)
class Choice:
    """Layouts of one model, cluster, precision and batch: how many, how far the predicted best lies below the measured
    best (0.03: 3 %), and Spearman's rank correlation."""

    name: str
    layouts: int
    regret: float
    correlation: float


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; ties share their mean."""
    order = sorted(values)
    return [(order.index(v) + 1 + len(order) - order[::-1].index(v)) / 2 for v in values]


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; 0 where one side is constant."""
    x, y = ranks(a), ranks(b)
    mx, my = sum(x) / len(x), sum(y) / len(y)
    up = sum((i - mx) * (j - my) for i, j in zip(x, y, strict=True))
    down = (sum((i - mx) ** 2 for i in x) * sum((j - my) ** 2 for j in y)) ** 0.5
    return up / down if down else 0.0


def choices(cases: Sequence[Case], predicted: Sequence[float]) -> list[Choice]:
    """Groups in which several layouts were measured; releases of one layout count as their mean."""
    groups: dict[tuple[object, ...], dict[tuple[object, ...], list[tuple[float, float]]]] = {}
    for case, p in zip(cases, predicted, strict=True):
        groups.setdefault(case.machine, {}).setdefault(case.key, []).append((p, case.tokens_per_s))
    found = []
    for machine, layouts in groups.items():
        if len(layouts) < 2:
            continue
        means = [tuple(sum(v) / len(v) for v in zip(*pairs, strict=True)) for pairs in layouts.values()]
        best = max(m for _, m in means)
        picked = max(means)[1]
        of = spearman([p for p, _ in means], [m for _, m in means])
        found.append(Choice(" ".join(map(str, machine)), len(means), best / picked - 1, of))
    return found


def chosen(truth: Path) -> list[str]:
    """Lines about the layouts that the prediction would pick."""
    cases = [case for case, _ in predicted(truth)]
    groups = choices(cases, [time.tokens_per_s_device for _, time in predicted(truth)])
    if not groups:
        return []
    near = sum(g.regret <= CLOSE for g in groups)
    mean = sum(g.correlation for g in groups) / len(groups)
    lines = [
        covered(predicted(truth)),
        f"training layouts of one model, cluster and batch: predicted best within {CLOSE:.0%} of the measured best in "
        f"{near} of {len(groups)} groups, rank correlation {mean:.2f}",
    ]
    return lines + [
        f"    {100 * g.regret:5.1f} % below the best of {g.layouts}: {g.name[:100]}"
        for g in sorted(groups, key=lambda g: -g.regret)
        if g.regret > CLOSE
    ]


def covered(timed: Sequence[tuple[Case, TrainingTime]]) -> str:
    """How many measured steps lie inside the stated 80 % interval."""
    inside = 0
    for c, time in timed:
        seconds = c.work.global_batch * c.work.seq / c.placement.layout.world / c.tokens_per_s
        inside += time.step.low <= seconds <= time.step.high
    return f"training steps inside the stated 80 % interval (in sample): {inside} of {len(timed)}"


def held_out(truth: Path) -> list[str]:
    """Errors with layouts, and with whole models, left out of the fit."""
    from bench.fit_training_time import count, fit, folds, left_out, model_of, table

    cases, _ = read_cases(truth / FILE)
    if len(cases) < 100:
        return ["training time: too few rows to refit"]
    counted = count(cases)
    start = fit(counted)
    layouts, models = left_out(counted, folds(counted), start), left_out(counted, model_of, start)
    groups = choices(cases, [c.tokens_per_s * exp(e) for c, e in zip(cases, layouts, strict=True)])
    near = sum(g.regret <= CLOSE for g in groups)
    return [
        table("training time, layouts left out", counted, layouts, detail=False),
        table("training time, models left out", counted, models),
        f"layouts left out: predicted best within {CLOSE:.0%} in {near} of {len(groups)} groups",
    ]

"""How the fitted constants of training memory came to be, and their errors on rows that they were not fitted on.

Every constant has a grid. For each row every combination that touches it is predicted once; a fit takes, constant by
constant, the value with the smallest mean absolute error on the rows of the fitting part. ``held_out`` does so on the
even rows and scores the odd ones, and once for every model with that model left out.
``python -m bench.fit_training_memory DIR`` prints the constants that all rows of DIR give.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from bench.megatron_args import MegatronCase, UndecidableError, read_case
from bench.megatron_memory import predict
from bench.score_training_memory import published_row
from bench.scoring import ScoreRow, Summary, summarize
from meshwright.errors import MeshwrightError

Choice = tuple[float, ...]

#: Constants of Megatron golden rows: fields of TrainEngine, their grid, and which cases they touch.
GOLDEN_GRID: tuple[tuple[str, Choice, Callable[[MegatronCase, str], bool]], ...] = (
    ("boundary_tensors", (1, 2, 3, 4, 5), lambda case, env: case.layout.pp > 1),
    ("fused_logit_bytes", (6, 8, 10, 12, 15), lambda case, env: case.work.fused_cross_entropy),
    ("head_tensors", (0, 3, 7, 10), lambda case, env: case.group == "bert"),
    ("score_bytes", (5, 6, 7), lambda case, env: case.engine.score_bytes > 0),
)

#: Constants of published rows: preset, fields and grids.
PUBLISHED_GRID: dict[str, tuple[str, dict[str, Choice]]] = {
    "SimuMax": ("megatron-core 0.14", {"fused_logit_bytes": (2, 3, 4, 5, 6), "weight_gradient_bytes": (2, 4, 6, 8)}),
    "torchtitan": ("torchtitan", {"fused_logit_bytes": (10, 11, 12, 13, 14)}),
}


@dataclass(frozen=True, slots=True)
class Options:
    """One measured row and what each choice of the constants that touch it predicts."""

    model: str
    row: ScoreRow
    names: tuple[str, ...]
    predicted: Mapping[Choice, float]
    shipped: Choice

    def at(self, constants: Mapping[str, float]) -> float:
        """Prediction under ``constants``; one that was not fitted keeps its shipped value."""
        return self.predicted[tuple(constants.get(n, s) for n, s in zip(self.names, self.shipped, strict=True))]

    def error(self, constants: Mapping[str, float]) -> float:
        """Absolute relative error."""
        return abs(self.at(constants) / self.row.measured - 1)


def signature(case: MegatronCase) -> str:
    """Models of equal dimensions are one model when they are left out."""
    s = case.spec
    moe = s.moe
    experts = f" {moe.experts}x{moe.intermediate}" if moe else ""
    return f"L{len(s.layers)} h{s.hidden} a{s.heads} V{s.vocab}{experts}"


def golden_options(truth: Path) -> list[Options]:
    """Options of every golden row that has an answer (peak only)."""
    table, arguments = truth / "megatron_golden_memory.csv", truth / "megatron_args.jsonl"
    if not table.is_file() or not arguments.is_file():
        return []
    with arguments.open(encoding="utf-8") as file:
        known = {(r := json.loads(line))["test"]: r for line in file}
    out: list[Options] = []
    with table.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            record = known.get(line["test"], {"args": {}, "env": {}})
            try:
                case = read_case(line["test"], line["env"], record["args"], record["env"], line)
                out.append(_golden(case, line))
            except (UndecidableError, MeshwrightError, ValueError):
                continue
    return out


def _golden(case: MegatronCase, line: Mapping[str, str]) -> Options:
    touching = [(name, grid) for name, grid, touches in GOLDEN_GRID if touches(case, line["env"])]
    names = tuple(name for name, _ in touching)
    shipped = tuple(float(getattr(case.engine, name)) for name in names)
    row = ScoreRow(case.group, signature(case), line["test"], "peak", None, float(line["mem_max"]), "bytes")
    grids = [tuple(map(float, sorted({*grid, own}))) for (_, grid), own in zip(touching, shipped, strict=True)]
    predicted = {}
    for choice in product(*grids):
        values = {n: v if n.endswith("logit_bytes") else int(v) for n, v in zip(names, choice, strict=True)}
        changed = MegatronCase(
            case.spec, case.layout, case.work, case.engine.with_(**values), case.group, case.encoder_layers,
            case.encoder_seq,
        )  # fmt: skip
        predicted[choice] = float(predict(changed).peak)
    return Options(signature(case), row, names, predicted, shipped)


def published_options(truth: Path, word: str) -> list[Options]:
    """Options of every published row of one source."""
    table = truth / "ground_truth.csv"
    if not table.is_file():
        return []
    preset, grids = PUBLISHED_GRID[word]
    from meshwright.plan.train_engine import engine_preset

    names = tuple(grids)
    shipped = tuple(float(getattr(engine_preset(preset), name)) for name in names)
    out: list[Options] = []
    with table.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            if word not in line["source"]:
                continue
            predicted: dict[Choice, float] = {}
            row = None
            for choice in product(*grids.values()):
                row = published_row(line, **dict(zip(names, choice, strict=True)))
                if row is None or row.predicted is None:
                    break
                predicted[tuple(map(float, choice))] = row.predicted
            if row is not None and row.predicted is not None:
                out.append(Options(row.group, row, names, predicted, shipped))
    return out


def fit(rows: Sequence[Options]) -> dict[str, float]:
    """The value of every constant with the smallest mean absolute error, one constant after the other (twice)."""
    constants: dict[str, float] = {}
    names = {name for row in rows for name in row.names}
    for name in [*sorted(names), *sorted(names)]:
        touched = [r for r in rows if name in r.names]
        grid = set.intersection(*({c[r.names.index(name)] for c in r.predicted} for r in touched))

        def loss(value: float, touched: list[Options] = touched, name: str = name) -> float:
            return sum(r.error({**constants, name: value}) for r in touched)

        constants[name] = min(sorted(grid), key=loss)
    return constants


def _scored(rows: Sequence[Options], constants: Mapping[str, float]) -> list[ScoreRow]:
    return [
        ScoreRow(r.row.source, r.row.group, r.row.name, r.row.metric, r.at(constants), r.row.measured, r.row.unit)
        for r in rows
    ]


def held_out(truth: Path) -> dict[str, dict[str, Summary]]:
    """Errors on rows that the constants were not fitted on, by source: even fitted, odd scored; leave one model out."""
    sources = {"Megatron golden (all groups)": golden_options(truth)}
    sources |= {word: published_options(truth, word) for word in PUBLISHED_GRID}
    result: dict[str, dict[str, Summary]] = {}
    for name, rows in sources.items():
        if len(rows) < 4:
            continue
        left_out: list[ScoreRow] = []
        for model in sorted({r.model for r in rows}):
            rest = [r for r in rows if r.model != model]
            left_out += _scored([r for r in rows if r.model == model], fit(rest) if rest else {})
        result[name] = {
            "all rows": summarize(_scored(rows, {})),
            "even fitted, odd scored": summarize(_scored(rows[1::2], fit(rows[::2]))),
            "leave one model out": summarize(left_out),
        }
    return result


if __name__ == "__main__":
    import sys

    for source, options in (("golden", golden_options(Path(sys.argv[1]))), *(
        (word, published_options(Path(sys.argv[1]), word)) for word in PUBLISHED_GRID
    )):  # fmt: skip
        print(source, fit(options))

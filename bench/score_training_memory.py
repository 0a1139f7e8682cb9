"""Training memory against public measurements. Constants of each engine: ``plan/constants/training.json``."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.megatron_args import UndecidableError, read_case
from bench.megatron_memory import predict
from bench.scoring import ScoreRow
from bench.training_models import KORTHIKANTI, korthikanti, named
from meshwright.errors import MeshwrightError
from meshwright.plan.train_activations import activations
from meshwright.plan.train_engine import TrainEngine, engine_preset
from meshwright.plan.train_memory import stage_holdings
from meshwright.plan.train_shards import stage_units, train_stages
from meshwright.plan.train_states import states
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.workload import Recompute, Train

GIB = 1 << 30
Row = Mapping[str, str]


def rows(truth: Path) -> list[ScoreRow]:
    """Every row of ``truth`` that states training memory; files that are missing give no rows."""
    found: list[ScoreRow] = []
    golden, table = truth / "megatron_golden_memory.csv", truth / "ground_truth.csv"
    if golden.exists():
        found += golden_rows(golden, truth / "megatron_args.jsonl")
    if table.exists():
        with table.open(newline="", encoding="utf-8") as file:
            found += [row for line in csv.DictReader(file) if (row := published_row(line)) is not None]
    return found


def golden_rows(table: Path, arguments: Path) -> Iterator[ScoreRow]:
    """Megatron-LM's golden values: two figures a row, joined with the tests' arguments by name."""
    known: dict[str, dict[str, dict[str, object]]] = {}
    if arguments.exists():
        with arguments.open(encoding="utf-8") as file:
            for line in file:
                record = json.loads(line)
                known[record["test"]] = record
    with table.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            record = known.get(row["test"], {"args": {}, "env": {}})
            name = f"{row['test']} {row['env']}"
            reason, peak, allocated, group = "", None, None, row["test"].partition("/")[0]
            try:
                case = read_case(row["test"], row["env"], record["args"], record["env"], row)
                predicted = predict(case)
                peak, allocated, group = float(predicted.peak), float(predicted.allocated), case.group
            except (UndecidableError, MeshwrightError, ValueError) as error:
                reason = str(error)[:200]
            for metric, column, value in (("peak", "mem_max", peak), ("allocated", "mem_alloc", allocated)):
                if row.get(column):
                    source = f"Megatron golden {group} {metric}"
                    yield ScoreRow(source, row["test"], name, metric, value, float(row[column]), "bytes", reason)


def _total(spec: ModelSpec, layout: Layout, work: Train, engine: TrainEngine) -> int:
    stages = train_stages(spec, layout)
    return max(sum(h.bytes for h in stage_holdings(spec, s, layout, work, engine, "x")) for s in stages)


def published_row(row: Row, **constants: float) -> ScoreRow | None:
    """One row of the table of published figures, None when it is no training memory.

    ``constants`` replace fields of the source's engine (used by the refits).
    """
    source, metric = row["source"], row["metric"]
    if not ("mem" in metric and row["phase"] == "memory"):
        return None
    predicted: float | None = None
    reason = ""
    try:
        if source.startswith("Korthikanti"):
            predicted = _korthikanti(row)
        elif source.startswith("SimuMax"):
            predicted = _simumax(row, **constants)
        elif source.startswith("torchtitan"):
            predicted = _torchtitan(row, **constants)
        elif source.startswith("Megatron-Bridge"):
            raise UndecidableError("gradient dtype and optimizer precision are not stated")
        else:
            return None
    except (UndecidableError, MeshwrightError, ValueError, KeyError) as error:
        reason = str(error)[:200]
    name = f"{row['model']} tp{row['tp']} pp{row['pp']} dp{row['dp']} cp{row['cp']} seq{row['seq']} {row['note'][:60]}"
    return ScoreRow(source, row["model"], name, metric, predicted, float(row["value"]), row["unit"], reason)


def _int(row: Row, key: str, default: int = 1) -> int:
    return int(row[key]) if row.get(key) else default


def _korthikanti(row: Row) -> float:
    """The paper's own terms: 16-bit weights and gradients, fp32 master and moments; layers only."""
    spec = korthikanti(row["model"])
    seq = KORTHIKANTI[row["model"]][3]
    pp = _int(row, "pp")
    selective = "seqpar_selective" in row["metric"]
    virtual = {8: 3, 35: 3}.get(pp, 1)
    layout = Layout(
        tp=_int(row, "tp"), pp=pp, sp=selective, micro_batch=_int(row, "micro_batch"),
        schedule="interleaved" if virtual > 1 else "1f1b", virtual=virtual,
    )  # fmt: skip
    work = Train(
        seq=seq, global_batch=_int(row, "batch"), recompute="selective" if selective else "none", dropout=0.1,
        attention="unfused", param_dtype="f16", grad_dtype="f32",
    )  # fmt: skip
    engine = TrainEngine(rope_copies=False, workspace_bytes=0)
    if row["metric"] == "mem_param_grad_opt":
        stage = train_stages(spec, layout)[0]
        held = states(stage_units(spec, layout, stage, engine), layout, work, engine)
        return (held.weights + held.gradients + held.optimizer) / GIB
    acts = activations(spec, train_stages(spec, layout)[0], layout, work, engine)
    return acts.parts["layers"] / GIB


def _recompute(note: str) -> Recompute:
    """Recomputation that a note states."""
    if "no recompute" in note:
        return "none"
    return "full" if "full" in note else "selective" if "selective" in note else "none"


def _simumax(row: Row, **constants: float) -> float:
    """Megatron-LM 0.14 on B200: bf16, ZeRO-1, flash attention, fused cross-entropy; the largest rank."""
    spec = named(row["model"])
    tp, ep = _int(row, "tp"), _int(row, "ep")
    layout = Layout(
        tp=tp, pp=_int(row, "pp"), dp=_int(row, "dp"), cp=_int(row, "cp"), ep=ep, etp=1 if ep > 1 else None, sp=tp > 1,
        zero=1, micro_batch=_int(row, "micro_batch"),
    )  # fmt: skip
    work = Train(
        seq=_int(row, "seq"), global_batch=_int(row, "batch"), recompute=_recompute(row["note"]),
        fused_cross_entropy="_cef" in row["note"],
    )  # fmt: skip
    return _total(spec, layout, work, engine_preset("megatron-core 0.14", **constants)) / GIB


def _torchtitan(row: Row, **constants: float) -> float:
    """FSDP2 on H100, torch.compile, fp32 shards, bf16 computation."""
    spec = named(row["model"])
    tp, pp, cp = _int(row, "tp"), _int(row, "pp"), _int(row, "cp")
    full = "full AC" in row["note"] or "4D" in row["note"]
    batch, dp = _int(row, "micro_batch"), _int(row, "dp")
    micro_batches = pp if pp > 1 else 1
    interleaved = pp > 1 and "nterleaved" in row["note"]
    layout = Layout(
        tp=tp, pp=pp, dp=dp, cp=cp, sp=tp > 1, zero=3, micro_batch=max(1, batch // micro_batches),
        schedule="interleaved" if interleaved else "1f1b", virtual=2 if interleaved else 1,
    )  # fmt: skip
    work = Train(
        seq=_int(row, "seq"), global_batch=batch * dp,
        recompute="full" if full else "selective",
    )  # fmt: skip
    engine = engine_preset("torchtitan", async_tp="Async" in row["note"], **constants)
    return _total(spec, layout, work, engine) / GIB

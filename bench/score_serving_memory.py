"""Score serving memory: start-up logs of vLLM in ``ground_truth.csv`` against the predicted ledger.

A row states model, device, layout and (in ``source`` and ``note``) engine version, utilization, context and step
size. A row that leaves out what decides its figure gets no answer, and the reason says what is missing.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from bench.scoring import ScoreRow, Summary, summarize
from bench.serving_models import EXTRA
from meshwright.engines import profile
from meshwright.errors import InputError, MeshwrightError
from meshwright.plan.constants.serving import EngineMemory, engine_memory, version_key
from meshwright.plan.memory import ServeMemory
from meshwright.plan.serve_memory import serve_memory
from meshwright.specs.atlas.devices import find_device
from meshwright.specs.cluster import Cluster, make_cluster
from meshwright.specs.hf.read import model_from_config, read_model
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import place
from meshwright.specs.profile import ServeSettings
from meshwright.specs.units import GIB
from meshwright.specs.workload import Serve

#: Sources whose memory rows are of a vLLM start.
SOURCES = re.compile(r"vllm|club-3090", re.IGNORECASE)
#: What the truth calls a device -> atlas name.
DEVICES = {
    "H100-80G": "H100-SXM",
    "A100-80G": "A100-80G",
    "A100-40G": "A100-40G",
    "A6000-48G": "RTX-A6000",
    "L40S-46G": "L40S",
    "GH200-96G": "GH200-96G",
}
#: Endings that name a fine-tune or a runtime format of a model whose dimensions are the base's.
TAILS = (
    *("-2506", "-2503", "-v0.1", "-v0.3", "-FP8-dynamic", "-FP8", "-quantized.w8a8", "-AWQ"),
    *("-Instruct", "-Chat", "-SFT", "-it"),
)
#: Formats whose linear layers hold one byte a weight, made at load time or before.
BYTE_TAILS = ("-FP8-dynamic", "-FP8", "-quantized.w8a8")
#: Names of the rows that differ from every public name.
ALIASES = {
    "Llama-3.1-8B": "Meta-Llama-3.1-8B",
    "Llama-3.1-70B": "Meta-Llama-3.1-70B",
    "Qwen3.8-27B NVFP4": "Qwen3.6-27B-NVFP4",
    "Llama-4-Scout-17B-16E": "Llama-4-Scout-17B-16E-Instruct",
    "Mixtral-8x7B": "Mixtral-8x7B-v0.1",
    "Qwen2.5-7B": "Qwen2.5-7B-Instruct",
}


@dataclass(frozen=True, slots=True)
class _Run:
    """Settings of one start, as far as the row states them."""

    version: str | None
    utilization: float | None
    context: int | None
    settings: ServeSettings


def _find(note: str, pattern: str) -> str | None:
    found = re.search(pattern, note)
    return found.group(1) if found else None


def _run(row: Mapping[str, str]) -> _Run:
    """Settings from source, note, dtype and context columns."""
    text = f"{row['source']} {row['note']}"
    utilization = _find(row["note"], r"util\w*[ =](0?\.\d+)")
    context = _find(row["note"], r"max_model_len[ =](\d+)") or row.get("seq") or None
    tokens = _find(row["note"], r"max_num_batched_tokens[ =](\d+)")
    kv = _find(row["note"], r"kv-cache-dtype (\w+)")
    dtype = _find(row["note"], r"--dtype (\w+)")
    runtime = _find(row["note"], r"--quantization (\w+)")
    model = row["model"]
    quantization = "fp8" if runtime == "fp8" or (model.endswith(BYTE_TAILS) and row["dtype"] != "bf16") else None
    settings = ServeSettings(
        utilization=float(utilization) if utilization else None,
        max_num_batched_tokens=int(tokens) if tokens else None,
        kv_dtype=kv or "auto",
        dtype=dtype,
        quantization=quantization,
    )
    version = _find(text, r"vLLM v?(\d+\.\d+(?:\.\d+)?)")
    return _Run(version, settings.utilization, int(context) if context else None, settings)


@cache
def _spec(name: str, configs: Path) -> ModelSpec:
    """The model of a row: by name, without its ending, or from the configurations beside the truth.

    Raises:
        InputError: it is not known.
    """
    tries = [name]
    for tail in TAILS:
        tries += [t[: -len(tail)] for t in tries if t.lower().endswith(tail.lower())]
    tries = [t for n in tries for t in (ALIASES.get(n, n), n)]
    for candidate in dict.fromkeys(tries):
        if candidate.lower() in EXTRA:
            return model_from_config(EXTRA[candidate.lower()], candidate, candidate)
        for found in sorted(configs.glob(f"*--{candidate}_config.json")):
            return read_model(str(found))
        try:
            return read_model(candidate, allow_online=False)
        except InputError:
            continue
    raise InputError(f"model {name} is not in the atlas")


def _cluster(row: Mapping[str, str]) -> Cluster:
    """Cluster of the row; the device's memory is the row's where it states it."""
    label = row["gpu"].partition(" ")[0]
    device = find_device(DEVICES.get(label, label))
    stated = _find(row["gpu"], r"\((\d+\.\d+) GiB\)")
    if stated:
        device = replace(device, memory_bytes=int(float(stated) * GIB))
    devices = int(row["n_gpus"] or 1)
    return make_cluster(max(1, devices // 8), min(devices, 8), device)


def _layout(row: Mapping[str, str]) -> Layout:
    tp, pp, dp, ep = (int(row.get(axis) or 1) for axis in ("tp", "pp", "dp", "ep"))
    return Layout(tp=tp, pp=pp, dp=dp, ep=ep)


def _figure(metric: str, memory: ServeMemory, row: Mapping[str, str]) -> float | None:
    """The row's metric from the predicted memory, in the row's unit; None for one that is not predicted."""
    worst = memory.worst if row.get("pp", "1") in {"", "1"} else memory.ranks[0]
    held = worst.weights_bytes + worst.activations_bytes + worst.runtime_bytes
    figures = {
        "weights_memory": worst.weights_bytes / GIB,
        "activation_peak_memory": worst.activations_bytes / GIB,
        "non_torch_memory": sum(h.bytes for h in worst.holdings if h.tensor == "context_and_communicators") / GIB,
        "kv_cache_pool": (worst.capacity_bytes - held) / GIB,
        "kv_cache_tokens": float(memory.kv_cache_tokens),
    }
    if metric in figures:
        return figures[metric]
    if metric.startswith("max_concurrency_at_"):
        return memory.kv_cache_tokens / int(metric.rpartition("_")[2])
    if metric.startswith("kv_cache_needed_for_"):
        return memory.needed_bytes / GIB
    return None


def _answer(row: Mapping[str, str], configs: Path, constants: EngineMemory | None = None) -> tuple[float | None, str]:
    """Prediction and remark of one row; ``constants`` instead of those of the row's version."""
    run, metric = _run(row), row["metric"]
    wanted = _find(metric, r"(?:at|for)_(\d+)")
    if metric not in {"weights_memory"} and not metric.startswith("kv_cache_needed"):
        missing = [n for n, v in (("engine version", run.version), ("utilization", run.utilization)) if v is None]
        if missing and metric != "activation_peak_memory":
            return None, f"not stated: {', '.join(missing)}"
    if row["unit"].startswith("GB (approx)"):
        return None, "rounded figure of an out-of-memory report"
    base = profile("vllm")
    engine = replace(base, version=run.version or base.version)
    spec = _spec(row["model"], configs)
    context = int(wanted) if wanted else run.context or min(spec.max_positions, 32768)
    cluster = _cluster(row)
    settings = run.settings
    longest = _find(row["note"], r"est max len (\d+)")
    if metric.startswith("kv_cache_needed") and longest and settings.max_num_batched_tokens is None:
        # the request grows up to the stated length, so that a step holds at least as many tokens
        settings = replace(settings, max_num_batched_tokens=1 << (int(longest) - 1).bit_length())
    workload = Serve(max_model_len=context)
    memory = serve_memory(place(spec, _layout(row), engine), cluster, workload, settings, constants)
    return _figure(metric, memory, row), ""


def _read(truth_dir: Path) -> list[dict[str, str]]:
    with (truth_dir / "ground_truth.csv").open(newline="", encoding="utf-8") as f:
        return [r for r in csv.DictReader(f) if r["phase"] == "memory" and SOURCES.search(r["source"])]


def rows(truth_dir: Path) -> list[ScoreRow]:
    """One row for every serving-memory figure of ``truth_dir/ground_truth.csv``.

    Raises:
        OSError: the file is not there.
    """
    out: list[ScoreRow] = []
    for row in _read(truth_dir):
        try:
            predicted, reason = _answer(row, truth_dir.parent / "configs")
        except MeshwrightError as error:
            predicted, reason = None, str(error)[:200]
        out.append(_row(row, predicted, reason))
    return out


def _row(row: Mapping[str, str], predicted: float | None, reason: str) -> ScoreRow:
    name = " ".join(filter(None, (row["model"], f"tp={row['tp']}", row["dtype"], row["note"][-40:])))
    return ScoreRow(
        source=row["source"],
        group=row["model"],
        name=name,
        metric=row["metric"],
        predicted=predicted,
        measured=float(row["value"]),
        unit=row["unit"],
        reason=reason,
    )


def _fit(rows_: list[dict[str, str]], configs: Path, base: EngineMemory) -> EngineMemory:
    """Bytes a logit and fixed bytes that fit the activation rows best (least squares of relative errors).

    The peak is a line in both where the sampler decides, so that two probes a row give its coefficients.
    """
    a11 = a12 = a22 = b1 = b2 = 0.0
    for row in rows_:
        measured = float(row["value"])
        origin = _answer(row, configs, replace(base, sampler_bytes=10.0, fixed_bytes=0))[0]
        further = _answer(row, configs, replace(base, sampler_bytes=12.0, fixed_bytes=0))[0]
        if origin is None or further is None:
            continue
        slope = (further - origin) / 2
        if slope <= 0:
            continue
        x, y, z = slope / measured, 1 / measured, (measured - origin) / measured
        a11, a12, a22, b1, b2 = a11 + x * x, a12 + x * y, a22 + y * y, b1 + x * z, b2 + y * z
    determinant = a11 * a22 - a12 * a12
    if a11 == 0:
        return base
    if determinant < 1e-9 * a11 * a22:  # all rows of one vocabulary: the fixed part cannot be told apart
        fixed = base.fixed_bytes / GIB
        more = (b1 - a12 * fixed) / a11
    else:
        more, fixed = (b1 * a22 - b2 * a12) / determinant, (a11 * b2 - a12 * b1) / determinant
    return replace(base, sampler_bytes=10.0 + more, fixed_bytes=int(fixed * GIB))


def left_out_rows(truth_dir: Path) -> list[ScoreRow]:
    """Activation peaks with the two constants of the sampler refitted without the row's model.

    Rows of versions before 0.17 are of one model only and have no other to be fitted on; they are left out.
    """
    configs, base = truth_dir.parent / "configs", engine_memory("vllm", "0.19.0")
    peaks = [
        r
        for r in _read(truth_dir)
        if r["metric"] == "activation_peak_memory" and version_key(_run(r).version or "0") >= (0, 17)
    ]
    out: list[ScoreRow] = []
    for model in dict.fromkeys(r["model"] for r in peaks):
        constants = _fit([r for r in peaks if r["model"] != model], configs, base)
        for row in peaks:
            if row["model"] == model:
                predicted, reason = _answer(row, configs, constants)
                out.append(_row(row, predicted, reason))
    return out


def held_out(truth_dir: Path) -> dict[str, dict[str, Summary]]:
    """Errors of the activation peak as shipped and with every model left out of the fit in turn."""
    try:
        left_out = left_out_rows(truth_dir)
    except FileNotFoundError:
        return {}
    if len(left_out) < 4:
        return {}
    names = {(r.source, r.group, r.name) for r in left_out}
    shipped = [
        r for r in rows(truth_dir) if r.metric == "activation_peak_memory" and (r.source, r.group, r.name) in names
    ]
    return {
        "vLLM activation peak": {"all rows": summarize(shipped), "leave one model out": summarize(left_out)},
    }

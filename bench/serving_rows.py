"""Measured serving rows (``serving_latency.csv``), cleaned: duplicates merged, degrees repaired, labels attached.

A row is one benchmark run: a model on a system with an engine and a layout, C users in a closed loop, and the mean
TTFT and TPOT. What is wrong in the import is repaired or excluded by rules (``exclusion``, ``repaired``); what was
not declared (speculative decoding, eager execution, cold starts) is a list of runs (``SPECULATIVE``, ``EAGER``,
``COLD``). The lists were inferred from the measurements themselves.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

#: System of a row -> device of the atlas.
SYSTEMS = {
    "h100_sxm": "H100-SXM",
    "h200_sxm": "H200",
    "b200_sxm": "B200",
    "b300_sxm": "B300",
    "gb200": "GB200",
    "gb300": "GB300",
    "a100_sxm": "A100-80G",
    "l40s": "L40S",
    "rtx_pro_6000_server": "RTX-PRO-6000-Server",
}
#: What a model's path begins with -> its family (what is left out as a whole).
FAMILIES = (
    ("deepseek", "DeepSeek"),
    ("llama", "Llama"),
    ("gpt-oss", "gpt-oss"),
    ("glm", "GLM"),
    (r"qwen3-\d+b-a\d+b", "Qwen3 MoE"),
    (r"qwen3-\d", "Qwen3 dense"),
)
#: Imports whose degrees are squared where MoE TP equals MoE EP.
SQUARED = re.compile(r"2026-04-06|db-dump")
#: Days on which TensorRT-LLM ran DeepSeek with speculative decoding that the rows do not name.
SPECULATIVE_DAYS = frozenset({"2026-01-14", "2026-02-05", "2026-02-06"})
#: The configuration of the db-dump that ran the same without speculative decoding (see ``_drafting``).
PLAIN_CONFIG = re.compile(r"config_id=87;")


@dataclass(frozen=True, slots=True)
class Pool:
    """Degrees of one worker and how many there are; ``batch``: sequences of one attention replica."""

    tp: int
    pp: int
    dp: int
    moe_tp: int
    moe_ep: int
    workers: int = 1
    batch: int = 1

    @property
    def devices(self) -> int:
        """Devices of one worker."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement.

    Attributes:
        id, engine, version, model, family, system, precision, day: as the row says.
        isl, osl: nominal lengths; ``uniform``: lengths were drawn from [0.8, 1] of them (mean 0.9).
        users: requests in flight, C.
        decode: the worker (aggregated) or the decode pool; ``prefill``: the prefill pool, or None.
        ttft_s, tpot_s: measured means.
        speculative, eager, cold: undeclared conditions; see the head of the module.
        polled: the launch script lets the scheduler look for new requests every 10 (fewer than 16 users) or 30 steps
            (InferenceMAX, SGLang with DeepSeek on Blackwell: ``--scheduler-recv-interval``).
        dp_waits: attention replicas wait for each other's prompts (TensorRT-LLM ``attention_dp_config``).
    """

    id: str
    engine: str
    version: str
    model: str
    family: str
    system: str
    precision: str
    day: str
    isl: int
    osl: int
    uniform: bool
    users: int
    decode: Pool
    prefill: Pool | None
    ttft_s: float
    tpot_s: float
    speculative: bool = False
    eager: bool = False
    cold: bool = False
    polled: bool = False
    dp_waits: bool = False

    @property
    def mode(self) -> str:
        """``aggregated`` or ``disaggregated``."""
        return "disaggregated" if self.prefill else "aggregated"


def family(model: str) -> str:
    """Family of a model path; the name without size and format where it is not listed."""
    name = model.rpartition("/")[2].lower()
    for pattern, found in FAMILIES:
        if re.search(pattern, name):
            return found
    return re.split(r"[-_]\d", name)[0]


def _int(row: Mapping[str, str], key: str) -> int:
    return max(1, int(float(row.get(key) or 1)))


def _pool(row: Mapping[str, str], prefix: str, moe: bool) -> Pool:
    tp, pp, dp = (_int(row, f"{prefix}{k}_size") for k in ("tp", "pp", "attention_dp"))
    moe_tp, moe_ep = (_int(row, f"{prefix}moe_{k}_size") for k in ("tp", "ep"))
    if moe and not row.get(f"{prefix}moe_tp_size") and not row.get(f"{prefix}moe_ep_size"):
        moe_tp, moe_ep = tp * dp, 1
    batch = _int(row, f"{prefix}batch_size")
    pool = Pool(tp, pp, dp, moe_tp, moe_ep, _int(row, f"{prefix}num_workers") if prefix else 1, batch)
    return repaired(pool, row["silicon_data_source"]) if moe else replace(pool, moe_tp=1, moe_ep=1)


def repaired(pool: Pool, source: str) -> Pool:
    """True degrees where the import multiplied them: n devices stand as n x n with MoE TP = MoE EP = n.

    One measurement stands as 8/1/1/8 and as 64/1/8/8 (tp/dp/moe_tp/moe_ep) under two imports, and the ``_tpX_epY``
    of the ids holds the true n in every row that has one.
    """
    n = pool.moe_ep
    if SQUARED.search(source) and pool.moe_tp == n > 1 and pool.tp * pool.dp == n * n:
        tp, dp = (1, n) if pool.dp > 1 else (n, 1)
        return replace(pool, tp=tp, dp=dp, moe_tp=1, batch=max(1, pool.batch * pool.dp // dp))
    return pool


def exclusion(row: Mapping[str, str], run: Run, moe: bool) -> str | None:
    """Why a row cannot be scored; None when it can."""
    pool = run.decode
    if run.prefill is None:
        if pool.tp * pool.dp > 8:
            return "more than 8 devices in one aggregated worker: totals of a disaggregated run"
        if moe and pool.tp * pool.dp != pool.moe_tp * pool.moe_ep:
            return "attention and expert degrees contradict each other"
        if run.family == "gpt-oss" and run.system == "h100_sxm" and run.version == "0.11.2":
            return "gpt-oss on H100 with vLLM 0.11.2: imported with wrong degrees"
        return None
    if "db-dump" not in row["silicon_data_source"]:
        return "disaggregated rows outside the db-dump lost worker counts and attention DP"
    if run.decode.batch * run.decode.workers * run.decode.dp != run.users:
        return "decode batch x workers x DP is not the concurrency"
    return None


def _run(row: Mapping[str, str], moe: bool) -> Run:
    source = row["silicon_data_source"]
    day = re.search(r"measured=(\d{4}-\d\d-\d\d)", source)
    users = re.search(r"silicon_concurrency=(\d+)", source)
    disagg = row["mode"] == "disagg"
    decode = _pool(row, "decode_" if disagg else "", moe)
    uniform = "aic-auto-gap" not in source and not row["model_path"].lower().startswith("qwen/")
    stated = int(users.group(1)) if users else decode.batch * decode.dp * decode.workers
    if not disagg and decode.dp == 1 and stated > decode.batch:
        decode = replace(decode, workers=max(1, stated // decode.batch))
    run = Run(
        id=row["id"], engine=row["backend"], version=row["backend_version"], model=row["model_path"],
        family=family(row["model_path"]), system=row["system"], precision=row["precision"] or "bf16",
        day=day.group(1) if day else "", isl=int(row["isl"]), osl=int(row["osl"]), uniform=uniform, users=stated,
        decode=decode, prefill=_pool(row, "prefill_", moe) if disagg else None,
        ttft_s=float(row["silicon_ttft_ms"]) / 1e3, tpot_s=float(row["silicon_tpot_ms"]) / 1e3,
    )  # fmt: skip
    return _labelled(run)


def _labelled(run: Run) -> Run:
    """Attach what the rows do not declare."""
    deepseek = run.family == "DeepSeek" and run.prefill is None
    speculative = deepseek and run.engine == "trtllm" and run.day in SPECULATIVE_DAYS
    eager = (run.engine == "trtllm" and run.version == "1.3.0rc1") or (
        run.engine == "vllm" and run.version == "0.12.0" and run.family == "Qwen3 MoE"
    )
    cold = (run.engine, run.system, run.precision, run.day, run.isl) == (
        "sglang",
        "b200_sxm",
        "fp4",
        "2025-11-10",
        1024,
    )
    polled = run.family == "DeepSeek" and run.engine == "sglang" and run.system in {"b200_sxm", "b300_sxm"}
    polled = polled and run.prefill is None
    waits = deepseek and run.engine == "trtllm" and run.decode.dp > 1
    return replace(run, speculative=speculative, eager=eager, cold=cold, polled=polled, dp_waits=waits)


def _figures(row: Mapping[str, str]) -> tuple[str, str, str]:
    """What a measurement is known by."""
    return f"{float(row['silicon_ttft_ms']):.6g}", f"{float(row['silicon_tpot_ms']):.6g}", row["mode"]


def _drafting(run: Run) -> bool:
    """SGLang 0.5.9 ran DeepSeek FP8 on eight B200 twice that day; what the plain configuration did not give is MTP."""
    return (run.engine, run.system, run.precision, run.day, run.decode.tp, run.family) == (
        *("sglang", "b200_sxm", "fp8", "2026-03-25", 8, "DeepSeek"),
    ) and run.prefill is None


def read_runs(path: Path) -> tuple[list[Run], dict[str, int]]:
    """Measurements of a file, one a (TTFT, TPOT) pair, and how many rows were left out for which reason.

    Raises:
        FileNotFoundError: no such file.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    plain = {_figures(r) for r in rows if PLAIN_CONFIG.search(r["silicon_data_source"])}
    runs: dict[tuple[str, str, str], Run] = {}
    left_out: dict[str, int] = {}
    for row in sorted(rows, key=lambda r: r["id"]):
        moe = bool(
            re.search(r"deepseek|gpt-oss|glm|-a\d+b|moe|mixtral|kimi|minimax|maverick|scout", row["model_path"].lower())
        )
        run = _run(row, moe)
        why = exclusion(row, run, moe)
        if why:
            left_out[why] = left_out.get(why, 0) + 1
            continue
        key = _figures(row)
        run = replace(run, speculative=run.speculative or (_drafting(run) and key not in plain))
        if key in runs:
            left_out["the same measurement imported before"] = (
                left_out.get("the same measurement imported before", 0) + 1
            )
        else:
            runs[key] = run
    return list(runs.values()), left_out


def families(runs: Sequence[Run]) -> list[str]:
    """Families of some runs, sorted."""
    return sorted({r.family for r in runs})

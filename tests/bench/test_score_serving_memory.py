"""The scorer of serving memory: it reads rows as the truth writes them, and refuses rows that leave too much out."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from bench.score_serving_memory import left_out_rows, rows
from bench.scoring import ScoreRow, summarize

from tests.cases.serving import CONFIGS
from tests.shared import shared_dir

COLUMNS = [
    *("source", "url", "phase", "model", "params_b", "gpu", "n_gpus", "tp", "pp", "dp", "ep", "cp", "dtype", "batch"),
    *("micro_batch", "seq", "isl", "osl", "concurrency", "metric", "value", "unit", "note"),
]
NOTE = "gpu_memory_utilization 0.95, max_model_len 8192, max_num_batched_tokens 8192; "


def write(folder: Path, *given: dict[str, str]) -> Path:
    """A truth folder with the given rows and the configurations of the cases beside it."""
    truth, configs = folder / "truth", folder / "configs"
    truth.mkdir()
    configs.mkdir()
    for name, config in (("Llama-3.1-8B", "llama-3.1-8b"), ("Qwen3-14B", "qwen3-14b"), ("Qwen3-0.6B", "qwen3-0.6b")):
        (configs / f"x--{name}_config.json").write_text(json.dumps(CONFIGS[config]), encoding="utf-8")
    with (truth / "ground_truth.csv").open("w", newline="", encoding="utf-8") as f:
        out = csv.DictWriter(f, COLUMNS, restval="")
        out.writeheader()
        out.writerows({"phase": "memory", "n_gpus": "1", "tp": "1", "unit": "GiB/GPU", **row} for row in given)
    return truth


def log(model: str, metric: str, value: str, version: str = "0.19.0", note: str = NOTE) -> dict[str, str]:
    """A row of a start-up log."""
    source = f"campaign (vLLM {version})"
    return {
        "source": source,
        "model": model,
        "gpu": "H100-80G (79.19 GiB)",
        "metric": metric,
        "value": value,
        "note": note,
    }


def test_rows_are_answered_by_their_own_settings(tmp_path: Path) -> None:
    truth = write(
        tmp_path,
        log("Llama-3.1-8B-Instruct", "weights_memory", "14.99"),
        log("Llama-3.1-8B-Instruct", "weights_memory", "8.49", note=NOTE + "runtime --quantization fp8"),
        log("Llama-3.1-8B-Instruct", "kv_cache_pool", "42.8", note=NOTE + "--dtype float32"),
        log("Llama-3.1-8B-Instruct", "kv_cache_tokens", "952032", note=NOTE + "kv-cache-dtype fp8"),
        log("Qwen3-14B", "activation_peak_memory", "5.64", version="0.16.0"),
        log("Qwen3-14B", "max_concurrency_at_8192", "36.18", version="0.18.0"),
    )
    for row in rows(truth):
        assert row.error is not None, row
        assert abs(row.error) < 0.01, row


def test_rows_that_leave_too_much_out_get_a_reason(tmp_path: Path) -> None:
    truth = write(
        tmp_path,
        log("Llama-3.1-8B", "kv_cache_pool", "50", note="no settings"),
        log("Unheard-of-7B", "weights_memory", "14"),
        {**log("Llama-3.1-8B", "mfu", "0.4"), "phase": "train"},
    )
    missing, unknown = rows(truth)
    assert missing.predicted is None
    assert "utilization" in missing.reason
    assert unknown.predicted is None
    assert "not in the atlas" in unknown.reason


def test_models_are_left_out_one_at_a_time(tmp_path: Path) -> None:
    """A model whose row is wrong by a third pulls the fit of the others and not its own."""
    truth = write(
        tmp_path,
        log("Llama-3.1-8B", "activation_peak_memory", "1.89"),
        log("Qwen3-14B", "activation_peak_memory", "2.23", version="0.18.0"),
        log("Qwen3-0.6B", "activation_peak_memory", "3.2"),
    )
    by_model = {r.group: r for r in left_out_rows(truth)}
    bad = by_model["Qwen3-0.6B"]
    assert bad.error is not None
    assert bad.error < -0.2
    good = by_model["Llama-3.1-8B"]
    assert good.error is not None
    assert good.error > 0.05


def test_targets_on_the_shared_measurements() -> None:
    found = rows(shared_dir("truth", "ground_truth.csv").parent)

    def median(*metrics: str) -> float:
        part: list[ScoreRow] = [r for r in found if r.metric in metrics]
        answer = summarize(part)
        assert answer.median is not None
        return answer.median

    assert median("weights_memory") < 0.01
    assert median("kv_cache_pool", "kv_cache_tokens") < 0.02
    assert median("activation_peak_memory") < 0.03
    answered = [r for r in found if r.predicted is not None]
    assert all(r.reason for r in found if r.predicted is None)
    assert len(answered) == pytest.approx(len(found), abs=12)

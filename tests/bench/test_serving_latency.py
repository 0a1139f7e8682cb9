"""Cleaning of measured serving rows, the score on the sample, and that fit and plan use the same formulas."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.score import SAMPLE
from bench.score_serving_latency import peer_rows, predicted, rows, throughput_pool, throughput_rows
from bench.scoring import summarize
from bench.serving_rows import Pool, family, read_runs, repaired
from bench.serving_specs import spec_of

from tests.shared import shared_dir

HEAD = (
    "id,silicon_data_source,backend,backend_version,model_path,system,precision,mode,isl,osl,batch_size,tp_size,"
    "pp_size,attention_dp_size,moe_tp_size,moe_ep_size,silicon_ttft_ms,silicon_tpot_ms\n"
)


def row(identity: str, source: str, degrees: str, times: str = "100,10", model: str = "deepseek-ai/DeepSeek-R1") -> str:
    what = f"trtllm,1.1,{model},b200_sxm,fp8,agg,1024,1024,8"
    return f"{identity},{source}; silicon_concurrency=8,{what},{degrees},{times}\n"


def test_squared_degrees_are_repaired_in_two_imports_only() -> None:
    squared = Pool(tp=64, pp=1, dp=1, moe_tp=8, moe_ep=8)
    assert repaired(squared, "source_file=2026-04-06.csv") == Pool(8, 1, 1, 1, 8)
    assert repaired(Pool(1, 1, 64, 8, 8, batch=2), "db-dump/2026-04-27") == Pool(1, 1, 8, 1, 8, batch=16)
    assert repaired(squared, "source_file=2026-03-25.csv") == squared
    assert repaired(Pool(4, 1, 1, 2, 2), "source_file=aic") == Pool(4, 1, 1, 2, 2)


def test_rows_are_merged_repaired_and_excluded(tmp_path: Path) -> None:
    text = HEAD
    text += row("a", "source_file=2026-03-25.csv", "8,1,1,1,8")
    text += row("b", "source_file=2026-04-06.csv", "64,1,1,8,8")
    text += row("c", "source_file=2026-03-25.csv", "16,1,1,1,16", "90,9")
    text += row("d", "source_file=2026-03-25.csv", "8,1,1,2,2", "80,8")
    text += row("e", "source_file=2026-03-25.csv", "8,1,1,1,1", "70,7", "meta-llama/Llama-3.1-70B")
    (tmp_path / "serving_latency.csv").write_text(text)
    runs, dropped = read_runs(tmp_path / "serving_latency.csv")
    assert [r.id for r in runs] == ["a", "e"]
    assert runs[0].decode == Pool(8, 1, 1, 1, 8, batch=8)
    assert sorted(dropped.values()) == [1, 1, 1]
    assert any("imported before" in why for why in dropped)


def test_families_and_checkpoints() -> None:
    assert family("Qwen/Qwen3-235B-A22B-FP8") == "Qwen3 MoE"
    assert family("Qwen/Qwen3-32B") == "Qwen3 dense"
    assert family("moonshotai/Kimi-K2.5").startswith("kimi")
    for path, precision, bits in (
        ("meta-llama/Llama-3.1-70B", "fp4", 4),
        ("meta-llama/Llama-3.1-70B", "fp8", 8),
        ("openai/gpt-oss-120b", "fp8", 4),
        ("Qwen/Qwen3-14B", "fp4", 4),
    ):
        quantization = spec_of(path, precision).quantization
        assert quantization is not None
        assert quantization.weight_bits == bits
    assert spec_of("Qwen/Qwen3-32B", "bf16").quantization is None


def test_every_row_of_the_sample_is_answered_and_the_peer_is_beaten() -> None:
    found = rows(SAMPLE)
    assert all(r.predicted is not None for r in found)
    limits = {"serving aggregated: TPOT": 0.15, "serving aggregated: TTFT": 0.35, "serving disaggregated: TPOT": 0.25}
    for source, limit in limits.items():
        s = summarize([r for r in found if r.source == source])
        assert s.median is not None
        assert s.median < limit, source
    sides: dict[str, list[float]] = {"aiconfigurator": [], "ours": []}
    for r in peer_rows(SAMPLE, found):
        if r.error is not None:
            sides["aiconfigurator" if "aiconfigurator" in r.source else "ours"].append(abs(r.error))
    middle = {name: sorted(errors)[len(errors) // 2] for name, errors in sides.items()}
    assert middle["ours"] < 0.7 * middle["aiconfigurator"]


def test_offline_throughput_of_the_sample() -> None:
    found = throughput_rows(SAMPLE)
    assert len(found) == 24
    s = summarize(found)
    assert s.answered == 24
    assert s.median is not None
    assert s.median < 0.35


def test_the_fit_and_the_plan_use_the_same_formulas() -> None:
    pytest.importorskip("numpy")
    from bench.serving_fit import predict
    from bench.serving_work import collect

    from meshwright.plan.timing.compute import constants

    runs, _ = read_runs(SAMPLE / "serving_latency.csv")
    few = runs[::6]
    ttft, tpot = predict(constants(), collect(few))
    known: dict[object, int] = {}
    for i, run in enumerate(few):
        time = predicted(run, known)
        assert time.tpot.value == pytest.approx(tpot[i], rel=0.02), run.id
        assert time.ttft.value == pytest.approx(ttft[i], rel=0.05), run.id


def test_the_shared_rows_keep_the_targets() -> None:
    """Every eighth of the shared runs: medians of the issue."""
    runs, _ = read_runs(shared_dir("truth", "serving_latency.csv"))
    assert len(runs) == 1466
    known: dict[object, int] = {}
    errors: dict[tuple[str, str], list[float]] = {}
    for run in runs[::8]:
        time = predicted(run, known)
        errors.setdefault((run.mode, "tpot"), []).append(abs(time.tpot.value / run.tpot_s - 1))
        errors.setdefault((run.mode, "ttft"), []).append(abs(time.ttft.value / run.ttft_s - 1))
    middle = {key: sorted(v)[len(v) // 2] for key, v in errors.items()}
    assert middle["aggregated", "tpot"] < 0.10
    assert middle["aggregated", "ttft"] < 0.25
    assert middle["disaggregated", "tpot"] < 0.13


def test_mixtures_of_the_throughput_rows_run_attention_as_replicas() -> None:
    """The later page measures "DEP8" where the first one says "TP8": the same run, as its options say."""
    row = {"tp": "8", "pp": "1", "dp": "", "ep": ""}
    assert throughput_pool(row, mixture=True) == Pool(1, 1, 8, 1, 8)
    assert throughput_pool(row, mixture=False) == Pool(8, 1, 1, 1, 1)
    assert throughput_pool({**row, "pp": "2"}, mixture=True) == Pool(8, 2, 1, 1, 1)
    assert throughput_pool({"tp": "1", "pp": "1", "dp": "4", "ep": "4"}, mixture=True) == Pool(1, 1, 4, 1, 4)

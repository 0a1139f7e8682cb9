"""The scorer: what it prints, what it says about missing files, and that the targets hold on the sample."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.fit_training_memory import fit, golden_options, held_out
from bench.scoring import ScoreRow, summarize

from bench import score, score_training_memory
from meshwright.plan.train_engine import TrainEngine
from tests.shared import shared_dir


def _errors(truth: Path) -> dict[str, list[ScoreRow]]:
    return score.by_source(score_training_memory.rows(truth))


def test_summary_of_known_errors() -> None:
    rows = [ScoreRow("s", "g", str(i), "m", 100.0 + i, 100.0, "B") for i in range(10)]
    rows.append(ScoreRow("s", "g", "none", "m", None, 100.0, "B", "why"))
    s = summarize(rows)
    assert (s.rows, s.answered) == (11, 10)
    assert (s.median, s.mean, s.p90) == pytest.approx((0.045, 0.045, 0.09))
    assert s.worst[0].name == "9"
    assert score.reasons(rows) == {"why": 1}


def test_json_has_stable_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert score.main(["--truth", str(score.SAMPLE), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["missing"] == []
    dense = result["sources"]["Megatron golden dense peak"]
    assert {"rows", "answered", "median", "mean", "p90", "worst", "unanswered"} <= set(dense)
    assert set(result["held_out"]["SimuMax"]) == {"all rows", "even fitted, odd scored", "leave one model out"}


def test_missing_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert score.main(["--truth", str(tmp_path)]) == 1
    assert "holds none of" in capsys.readouterr().err
    lines = (score.SAMPLE / "ground_truth.csv").read_text().splitlines(keepends=True)
    (tmp_path / "ground_truth.csv").write_text("".join(x for x in lines if x.startswith(("source", "Korthikanti"))))
    assert score.main(["--truth", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "missing: megatron_golden_memory.csv, megatron_args.jsonl" in out
    assert "Korthikanti" in out


def test_a_broken_row_is_a_reason_not_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "megatron_golden_memory.csv").write_text(
        "test,env,hidden,heads,seq,mbs,mem_alloc,mem_max,url\ngpt/x,dev_dgx_h100,512,8,1024,1,1,2,u\n"
    )
    (tmp_path / "megatron_args.jsonl").write_text('{"test": "gpt/x", "args": {"num-layers": "many"}, "env": {}}\n')
    rows = score_training_memory.rows(tmp_path)
    assert len(rows) == 2
    assert all(r.predicted is None and r.reason for r in rows)


def _targets(truth: Path) -> None:
    found = {name: summarize(rows) for name, rows in _errors(truth).items()}
    for group, median, p90 in (("dense", 0.005, 0.04), ("moe", 0.02, 0.10)):
        s = found[f"Megatron golden {group} peak"]
        assert s.median is not None
        assert s.p90 is not None
        assert s.median < median
        assert s.p90 < p90
    for name, s in found.items():
        if name.startswith("Korthikanti"):
            assert s.answered == s.rows == 3
            assert abs(s.worst[0].error or 1) < 0.001
    simumax = found["SimuMax B200 v1.2 real runs (Megatron-LM 0.14)"]
    assert simumax.median is not None
    assert simumax.median < 0.01
    assert abs(simumax.worst[0].error or 1) < 0.025
    titan = found["torchtitan H100 2024-12"]
    assert titan.median is not None
    assert titan.median < 0.05


def test_targets_hold_on_the_sample() -> None:
    _targets(score.SAMPLE)


@pytest.mark.parametrize(("field", "value"), [("fused_logit_bytes", 14.0), ("weight_gradient_bytes", 20.0)])
def test_targets_see_a_wrong_constant(monkeypatch: pytest.MonkeyPatch, field: str, value: float) -> None:
    real = score_training_memory.engine_preset

    def planted(name: str, **changes: object) -> TrainEngine:
        return real(name, **{**changes, field: value})

    monkeypatch.setattr(score_training_memory, "engine_preset", planted)
    with pytest.raises(AssertionError):
        _targets(score.SAMPLE)


def test_targets_hold_on_the_shared_rows() -> None:
    truth = shared_dir("truth", "megatron_golden_memory.csv").parent
    _targets(truth)
    golden = [r for r in score_training_memory.rows(truth) if r.metric == "peak"]
    assert len(golden) == 318
    assert sum(r.predicted is not None for r in golden) >= 0.9 * len(golden)
    assert all(r.reason for r in golden if r.predicted is None)


def test_refits_return_the_shipped_constants() -> None:
    rows = golden_options(score.SAMPLE)
    found = fit(rows)
    assert found["boundary_tensors"] in {2, 3, 4}
    splits = held_out(score.SAMPLE)
    for source in ("Megatron golden (all groups)", "SimuMax"):
        median = splits[source]["leave one model out"].median
        assert median is not None
        assert median < 0.012

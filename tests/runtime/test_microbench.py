"""What the machine is measured at can be fitted, times real steps, and never touches a verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshwright.ledger.calibrate import DRIVING, LIGHT, Calibration, Transfer, duration_s, fit
from meshwright.ledger.store import read, write
from meshwright.plan.cores import Batch, attention_core
from meshwright.prove import prove, timing
from meshwright.prove.predict import Request, predict
from meshwright.prove.timing import Timing, bench_job, predicted_steps, schedule, timing_of
from meshwright.runtime.folder import read_folder
from meshwright.runtime.launch.local import RankError, run_local
from meshwright.runtime.microbench import BenchJob, Core, Move, core_entry, microbench
from meshwright.runtime.proof import ProofJob
from tests.runtime import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("bench") / "tiny", "llama")


def test_a_ledger_of_measurements_is_complete_and_fits(folder: Path, tmp_path: Path) -> None:
    core = Core("decode", 2, 1, 20, 6, 3, 8, 8)
    moves = (*(Move("all_reduce", "tp", size) for size in (512, 65536)), Move("gather", "tp", 1024))
    job = BenchJob(tiny.placement(folder, "tp=2"), ((1, 72, 51), (16, 72, 51)), (core,), moves, 1 << 20)
    ledger = run_local(microbench, 2, (job,), 60)[0]
    assert all(duration_s(e) is not None for e in ledger.entries)
    driving = set(DRIVING) - {"serve", "sequence"}  # of a server
    found = {e.op for e in ledger.entries} - {LIGHT}  # none where a machine is too busy to tell it from the rest
    assert found == {"copy", "matmul", "attention", "all_reduce", "gather", *driving}
    write(ledger, tmp_path / "bench.jsonl")
    found = fit(read(tmp_path / "bench.jsonl"))
    assert found.ranks == 2
    assert {(t.op, t.ranks, len(t.knots)) for t in found.transfers} == {("all_reduce", 2, 2), ("gather", 2, 1)}
    assert {s.sizes for s in found.work if s.op == "matmul"} == {(1, 72, 51), (16, 72, 51)}
    # Between a tenth and a thousand of today's desktop: a unit that is wrong by 1000 shows.
    assert 1e8 < found.flops_s["f32"] < 1e13
    assert 1e8 < found.bandwidth_bytes_s < 1e13
    assert 1e-7 < found.launch_s < 1e-2
    assert found.layer_s < 1e-1
    assert 1e-6 < found.message_s < 1e-1


@pytest.mark.parametrize("layout", ["tp=2", "pp=2"])
def test_proven_layouts_are_timed(folder: Path, layout: str) -> None:
    """Loose on purpose: the machine may be busy. A figure in a wrong unit is not within 50."""
    proof = prove(folder, layout, timing=True, timeout_s=100)
    assert proof.proven
    assert isinstance(proof.timing, Timing), proof.timing
    t = proof.timing
    assert t.steps == timing.TIMED_TOKENS - 1
    for measured, predicted in ((t.decode_s, t.predicted_decode_s), (t.prefill_s, t.predicted_prefill_s)):
        assert 1 / 50 < predicted / measured < 50, t.line
    assert t.line.startswith("time: decode step ")
    assert t.as_json()["decode_s"] == t.decode_s


def test_a_failure_while_timing_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object) -> list[object]:
        raise RankError("no result of rank 1 within 3 s; all 2 were stopped")

    monkeypatch.setattr(timing, "run_local", late)
    job = ProofJob(str(folder), tiny.placement(folder, "tp=2"), ((1, 2, 3),), 4, "")
    said = timing_of(job, predict(Request(str(folder), "tp=2", 1, 3, 4)), 3)
    assert said == "no result of rank 1 within 3 s; all 2 were stopped"


def test_the_shapes_of_a_prediction_are_measured(folder: Path) -> None:
    """9 heads over 3 KV heads of width 8, 101 MLP columns, 131 rows: tp=2 deals them 6 + 3, 51 + 50, 66 + 65."""
    predicted = predict(Request(str(folder), "tp=2,pp=2", 2, 12, 4))
    job = bench_job(ProofJob(str(folder), tiny.placement(folder, "tp=2,pp=2"), ((0,) * 12,) * 2, 4, ""), predicted)
    assert {(72, 48), (72, 24), (48, 72), (24, 72), (72, 51), (72, 50), (72, 66)} <= {
        (k, n) for _, k, n in job.products
    }
    assert {m for m, k, n in job.products if (k, n) == (72, 51)} == {1, 4, 12}
    assert {m for m, k, n in job.products if (k, n) == (72, 66)} == {1}
    assert {(m.op, m.axis) for m in job.moves} == {("all_reduce", "tp"), ("gather", "tp"), ("send", "pp")}
    assert {m.payload_bytes for m in job.moves if m.op == "send"} == {288, 3456, *timing.PAYLOADS}
    assert {(c.phase, c.sequences, c.new, c.past) for c in job.cores} >= {("prefill", 1, 12, 0), ("decode", 1, 1, 14)}


def test_cores_are_counted_as_the_plan_counts_them(folder: Path) -> None:
    attention = read_folder(folder).spec.layers[0].attention
    assert attention is not None
    for phase, batch in (("prefill", Batch("prefill", 2, 12)), ("decode", Batch("decode", 3, 1, 30))):
        op = attention_core(attention, 6, 3, batch, "f32", "f32", 1)
        entry = core_entry(Core(phase, batch.sequences, batch.new_tokens, batch.past, 6, 3, 8, 8), "f32", 4)
        assert entry.shapes == op.shapes
        assert (entry.flops, entry.payload_bytes) == (op.flops, op.payload)


def test_stages_work_at_once() -> None:
    """Two stages of 1 s, two micro-batches: the pipe fills in 2 s, then a step takes 2 s; alone it takes 2 s too, and
    with three micro-batches 3 s. A message makes a lone micro-batch wait."""

    def ends(microbatches: int, message: float = 0.0, steps: int = 4) -> list[float]:
        stages = {(p, s, m): 1.0 for p in range(2) for s in range(steps) for m in range(microbatches)}
        done = schedule(stages, 2, message)
        return [done[s, 0] for s in range(steps)]

    assert ends(2) == [2, 4, 6, 8]
    assert ends(1) == [2, 4, 6, 8]
    assert ends(3) == [2, 5, 8, 11]
    assert ends(1, 0.5) == [2, 4.5, 7, 9.5]


def test_predicted_steps_add_what_the_driver_takes(folder: Path) -> None:
    """Everything but the driver costs nothing here: 5 layers over 2 stages, 3 and 2."""
    predicted = predict(Request(str(folder), "pp=2", 1, 12, 3))
    free = Transfer("send", 2, 0, 1e30, 0, ((1, 1e-30),))
    c = Calibration("m", 1, {"f32": 1e30}, 1e30, 0.0, 10.0, 1.0, 100.0, transfers=(free,))
    steps = predicted_steps(c, predicted, tiny.placement(folder, "pp=2"))
    assert steps == pytest.approx([52, 152, 152])

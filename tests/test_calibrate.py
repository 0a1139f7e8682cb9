"""calibrate: a file that plan reads and calls calibrated, here and from what others measured; bad input in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright import api
from meshwright.cli.main import app
from meshwright.errors import InputError, MeshwrightError
from meshwright.ledger.calibration_file import read
from meshwright.plan.calibration import part
from meshwright.plan.timing.collective import Wiring, curve
from meshwright.prove.calibrate_from import calibrate_from
from meshwright.specs.cluster import MeasuredBoot, parse_cluster
from meshwright.specs.detect_host import cpu_cluster
from meshwright.specs.probe import Probe
from meshwright.specs.units import GIB
from meshwright.specs.workload import Serve
from tests.ledger.test_nccl_tests import output
from tests.shared import shared_dir


def call(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["calibrate", *words])
    if isinstance(result.exception, MeshwrightError):
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    file = tmp_path_factory.mktemp("calibrate") / "here.toml"
    code, said = call("--quick", "--ranks", "2", "--device", "cpu", "--dtype", "f32", "--out", str(file), "--json")
    assert code == 0, said
    return file


def test_this_machine_is_measured_and_planned_on(here: Path) -> None:
    cluster, c = parse_cluster(str(here)), read(here)
    assert cluster.device.driver is not None
    assert {m.work for m in cluster.device.measured} >= {"dense", "attention"}
    assert {(m.op, m.ranks) for m in cluster.intra.measured} >= {("all_reduce", 2), ("send", 2), ("all_to_all", 2)}
    assert {(t.op, t.knots) for t in c.transfers} == {(m.op, m.knots) for m in cluster.intra.measured}
    assert cluster.device.bandwidth_bytes_s == pytest.approx(c.bandwidth_bytes_s, rel=1e-4)
    (all_reduce,) = (t for t in c.transfers if t.op == "all_reduce")
    for size, seconds in all_reduce.knots:
        assert curve("all_reduce", Wiring(2, 2), cluster).seconds(size) == pytest.approx(seconds, rel=1e-3)
    for on, word in ((str(here), "calibrated"), ("here", "modelled")):
        load = Serve(128, 32, concurrency=2)
        plan = api.plan_serve("smollm2-135m", on, load, layout="tp=2", engine="meshwright")
        assert plan.chosen is not None
        assert plan.chosen.cost.predicted is not None
        assert plan.chosen.cost.predicted.tpot.word == word
    work = api.train_workload(seq=64, global_batch=4, param_dtype="f32")
    assert api.step_time(api.plan_train("smollm2-135m", str(here), work, layout="dp=2")).step.word == "calibrated"


def test_slower_measurements_make_slower_plans(here: Path, tmp_path: Path) -> None:
    """The curve of the file is what is planned with: ten times the latency shows."""
    text, slow = here.read_text(), tmp_path / "slow.toml"
    cluster = parse_cluster(str(here))
    for m in cluster.intra.measured:
        for size, seconds in m.knots:
            text = text.replace(f"[{size}, {seconds!r}]", f"[{size}, {seconds * 10!r}]")
    slow.write_text(text)
    times = [curve("all_reduce", Wiring(2, 2), parse_cluster(str(file))).seconds(4096) for file in (here, slow)]
    assert times[1] == pytest.approx(10 * times[0], rel=0.01)


def test_from_nccl_tests(tmp_path: Path) -> None:
    log, out = tmp_path / "log.txt", tmp_path / "cluster.toml"
    log.write_text(output(8, 2 * 7 / 8))
    code, said = call("--from", str(log), "--out", str(out))
    assert (code, said.startswith("calibrated: 1x8xH100-SXM")) == (0, True), said
    cluster = parse_cluster(str(out))
    assert curve("all_reduce", Wiring(8, 8), cluster).seconds(1 << 20) == pytest.approx(
        20e-6 + (1 << 20) / 100e9, rel=0.01
    )
    assert curve("all_reduce", Wiring(8, 8), cluster).word == "calibrated"
    assert curve("all_reduce", Wiring(4, 4), cluster).word == "modelled"


def test_groups_over_nodes_calibrate_the_link_between_them(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(output(8, 2 * 7 / 8, hosts=2))
    cluster = calibrate_from([tmp_path]).cluster
    assert (str(cluster).startswith("2x4xH100-SXM"), cluster.intra.measured) == (True, ())
    assert [(m.op, m.ranks) for m in cluster.inter.measured] == [("all_reduce", 8)]


def test_from_traces(tmp_path: Path) -> None:
    from tests.doctor.trace_maker import TraceMaker

    m = TraceMaker(4)
    for _ in range(3):
        m.begin()
        for r in m.ranks:
            m.work(r, "forward", 0.01)
        m.meet("all_reduce", 1 << 18, 0.001)
        m.end()
    found = calibrate_from([m.write(tmp_path)], "4xH100").cluster.intra.measured
    assert [(t.op, t.ranks, t.knots[0][0]) for t in found] == [("all_reduce", 4, 1 << 20)]
    assert found[0].knots[0][1] == pytest.approx(0.001, rel=0.1)


def test_traces_over_nodes_name_their_device_and_calibrate_the_link_between_them(tmp_path: Path) -> None:
    """Sixteen ranks on two hosts: a group inside each, one of a pair across, one of all; latency and bandwidth come
    out as they went in, and the time that rank 3 makes the others wait does not."""
    from tests.doctor.trace_maker import TraceMaker

    m = TraceMaker(16)
    for size in (1 << 18, 1 << 20, 1 << 22, 1 << 24):
        m.begin()
        for r in m.ranks:
            m.work(r, "forward", 0.03 if r == 3 else 0.01)
        m.meet("all_reduce", size // 4, 20e-6 + size / 200e9, range(8))
        m.meet("all_reduce", size // 4, 20e-6 + size / 200e9, range(8, 16))
        m.meet("all_gather", size // 4, 50e-6 + size / 40e9, (0, 8))
        m.meet("all_reduce", size // 4, 60e-6 + size / 20e9)
        m.end()
    cluster = calibrate_from([m.write(tmp_path)]).cluster
    assert str(cluster).startswith("2x8xH100-SXM")
    assert [(t.op, t.ranks) for t in cluster.intra.measured] == [("all_reduce", 8)]
    assert [(t.op, t.ranks) for t in cluster.inter.measured] == [("all_gather", 2), ("all_reduce", 16)]
    for t, latency, rate in zip(
        (*cluster.intra.measured, *cluster.inter.measured), (20e-6, 50e-6, 60e-6), (200e9, 40e9, 20e9), strict=True
    ):
        assert t.latency_s == pytest.approx(latency, rel=0.15)
        assert t.bandwidth_bytes_s == pytest.approx(rate, rel=0.05)
        assert t.error < 0.05


def test_from_real_traces() -> None:
    """Eight ranks of DLRM on A100 calibrate; traces of single ranks hold no transfer apart from waiting."""
    incidents = shared_dir() / "incidents"
    found = calibrate_from([incidents / "kineto_dlrm8"], "8xA100-80G").cluster.intra.measured
    assert [(m.op, m.ranks) for m in found] == [("all_reduce", 8), ("all_to_all", 8)]
    assert all(1e9 < m.bandwidth_bytes_s < 300e9 and 0 < m.latency_s < 1e-3 and m.error < 0.3 for m in found)
    with pytest.raises(InputError, match="traces with collectives"):
        calibrate_from([incidents / "kineto_tracelens"], "8xA100-80G")


BOOT = """\
INFO 06-01 [llm_engine.py:237] Initializing a V1 LLM engine (v0.33.0) with config: model='org/m', max_seq_len=8192, \
tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1
(Worker_TP0 pid=1) INFO [gpu_worker.py:1] Free memory on device (cuda:0, 78.60/79.10 GiB) on startup.
(Worker_TP0 pid=1) INFO [gpu_model_runner.py:1] Model loading took 7.5 GiB and 4.2 seconds
(Worker_TP0 pid=1) INFO [gpu_worker.py:1] Actual usage is 7.5 GiB for weight, 1.3 GiB for peak activation, 2.75 GiB \
for non-torch memory
(Worker_TP1 pid=2) INFO [gpu_worker.py:1] Actual usage is 7.5 GiB for weight, 1.3 GiB for peak activation, 2.5 GiB \
for non-torch memory
(EngineCore_0 pid=5) INFO [kv_cache_utils.py:1] GPU KV cache size: 100,000 tokens
"""


def test_from_a_boot_log(tmp_path: Path) -> None:
    """The machine's part goes into the file: memory as the driver reports it, and what lies outside torch."""
    log, out = tmp_path / "boot.log", tmp_path / "c.toml"
    log.write_text(BOOT)
    code, said = call("--from", str(log), "--on", "8xH100", "--out", str(out))
    assert code == 0, said
    assert "memory outside torch of 1 start" in said
    device = parse_cluster(str(out)).device
    assert device.memory_bytes == pytest.approx(79.10 * GIB, rel=1e-6)
    assert device.booted == (MeasuredBoot("vllm", 2, 1, round(2.75 * GIB)),)
    assert (device.peak_flops, device.intra.name) == (parse_cluster("8xH100").device.peak_flops, "nvlink4")
    held = {}
    for where in (str(out), "8xH100"):
        for layout in ("tp=2", "tp=4"):
            made = api.plan_serve("llama-3.1-8b", where, Serve(1024, 256, 8), layout=layout, engine="vllm")
            assert made.chosen is not None
            rows = [h for r in made.chosen.memory.ranks for h in r.holdings if part(h.term, h.tensor) == "non_torch"]
            held[where, layout] = rows[0].bytes
            told = any("as vllm printed it here" in note for note in made.notes)
            assert told == (where != "8xH100" and layout == "tp=2")
    assert held[str(out), "tp=2"] == round(2.75 * GIB) != held["8xH100", "tp=2"]
    assert held[str(out), "tp=4"] == held["8xH100", "tp=4"]


def test_a_boot_log_beside_nccl_tests(tmp_path: Path) -> None:
    (tmp_path / "boot.log").write_text(BOOT)
    (tmp_path / "all_reduce.txt").write_text(output(8, 2 * 7 / 8))
    cluster = calibrate_from([tmp_path]).cluster
    assert [b.outside_bytes for b in cluster.device.booted] == [round(2.75 * GIB)]
    assert [m.op for m in cluster.intra.measured] == ["all_reduce"]


def test_a_boot_log_of_a_device_with_figures_of_its_own(tmp_path: Path) -> None:
    """A name that the atlas knows does not bring the atlas' figures back."""
    (tmp_path / "boot.log").write_text(BOOT)
    own, out = tmp_path / "own.toml", tmp_path / "out.toml"
    own.write_text('[device]\nbase = "H100-SXM"\nbandwidth = "2TB/s"\npeak_tflops = { bf16 = 700 }\n')
    assert call("--from", str(tmp_path / "boot.log"), "--on", str(own), "--out", str(out))[0] == 0
    device = parse_cluster(str(out)).device
    assert (device.bandwidth_bytes_s, device.peak("bf16"), len(device.booted)) == (2e12, 700e12, 1)


def test_a_boot_log_of_another_device_is_refused(tmp_path: Path) -> None:
    (tmp_path / "boot.log").write_text(BOOT)
    with pytest.raises(InputError, match=r"79\.1 GiB, a T4 has"):
        calibrate_from([tmp_path / "boot.log"], "8xT4")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--from", "absent.txt"), "cannot be read|no file|nothing"),
        (("--from", "EMPTY"), "neither nccl-tests"),
        (("--from", "LOG", "--ranks", "2"), "leave out --ranks"),
        (("--on", "8xH100"), "goes with --from"),
        (("--out", "here.json"), "is TOML"),
        (("--device", "tpu"), "--device"),
        (("--dtype", "int7"), "--dtype"),
        (("--ranks", "0"), "--ranks"),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    import re

    (tmp_path / "LOG").write_text(output(4, 1.5))
    (tmp_path / "EMPTY").write_text("hello\n")
    code, said = call(*(str(tmp_path / w) if w in {"LOG", "EMPTY", "absent.txt"} else w for w in words))
    assert code == 2, said
    assert re.search(says, said), said
    assert said.count("\n") <= 1


def test_a_damaged_file_is_told(here: Path, tmp_path: Path) -> None:
    text = here.read_text()
    for old, new in (
        ("knots", "knot"),
        ('"ranks" = 2', '"ranks" = "two"'),
        ('"memory" = ', '"memory" = -'),
        ("driver", "drivers"),
    ):
        bad = tmp_path / "bad.toml"
        bad.write_text(text.replace(old, new))
        with pytest.raises(InputError, match=r"bad\.toml"):
            parse_cluster(str(bad))


def test_json_holds_the_calibration(tmp_path: Path) -> None:
    log = tmp_path / "all_gather.log"
    log.write_text(output(8, 7 / 8, "none"))
    code, said = call("--from", str(log), "--json")
    data = json.loads(said)
    assert (code, sorted(data)) == (0, ["calibration", "cluster", "device", "links", "verdict"])
    assert data["links"]["intra"][0]["op"] == "all_gather"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gpu_check_on_the_cpu(tmp_path: Path) -> None:
    """The program itself, where no GPU is: proofs of a side against itself, times, a report."""
    from bench.gpu_check import check

    report = check("cpu", tmp_path, tiny=True)
    assert report["ok"]
    assert [row["decode_s"] > 0 and row["predicted_decode_s"] > 0 for row in report["times"]] == [True]
    assert json.loads((tmp_path / "report.json").read_text())["says_nothing_of"].startswith("NCCL")


@pytest.mark.parametrize("limit_s", [0.0, 11.0])
def test_gpu_check_ends_at_its_deadline(tmp_path: Path, limit_s: float) -> None:
    """What does not fit is not run, and the report says so; nothing is proven then."""
    import time

    from bench.gpu_check import RESERVE_S, check

    began = time.perf_counter()
    report = check("cpu", tmp_path, tiny=True, limit_s=limit_s)
    assert time.perf_counter() - began < max(limit_s, RESERVE_S)
    assert json.loads((tmp_path / "report.json").read_text())["parts"] == report["parts"]
    assert [p["state"] for p in report["parts"].values()] == ["not run"] * 3
    assert (report["ok"], report["proofs"], report["times"]) == (False, [], [])


def test_a_part_that_is_cut_off_was_not_run_and_one_that_fails_failed() -> None:
    import time

    from bench.gpu_check import RESERVE_S, Deadline

    from meshwright.runtime.launch.local import RankError

    def fails(deadline: Deadline, takes: float) -> None:
        assert deadline.left_s(0.0, share=0.5) <= 0.05
        time.sleep(takes)
        raise RankError("a rank failed")

    for takes, state in ((0.06, "not run"), (0.0, "failed")):
        deadline = Deadline(RESERVE_S + 0.1)
        assert deadline.run("part", lambda d=deadline, t=takes: fails(d, t)) is None  # type: ignore[misc]
        assert deadline.parts["part"]["state"] == state
        assert deadline.run("another", lambda: 3) == 3


def test_gpu_check_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    from bench import gpu_check
    from meshwright.prove import calibrate

    monkeypatch.setattr(calibrate, "detect", lambda: cpu_cluster(Probe()))
    monkeypatch.setattr("sys.argv", ["gpu_check"])
    assert gpu_check.main() == 2
    said = capsys.readouterr().err
    assert (said.startswith("gpu-check: --device cuda: no CUDA device"), said.count("\n")) == (True, 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_adds_to_a_step() -> None:
    """A real server of a small model beside the same steps of the bare engine."""
    pytest.importorskip("torch")
    from meshwright.prove.calibrate_serving import can_serve, serving_entries

    if not can_serve():
        pytest.skip("fastapi or uvicorn is not installed")
    entries = {e.op: e for e in serving_entries("cpu", 120)}
    assert set(entries) == {"serve", "sequence"}
    spent = [(e.ended_ns or 0) - (e.started_ns or 0) for e in entries.values()]
    assert 0 < sum(spent) < 1e9, "nothing is left where other work makes the bare engine slow as well"


def test_planning_counts_what_the_server_adds(here: Path, tmp_path: Path) -> None:
    """A millisecond more a step is a millisecond more between two tokens."""
    text, slow = here.read_text(), tmp_path / "slow.toml"
    assert '"serve_s" = 0.0' in text
    slow.write_text(text.replace('"serve_s" = 0.0', '"serve_s" = 0.01'))
    times = []
    for file in (here, slow):
        plan = api.plan_serve(
            "smollm2-135m", str(file), Serve(128, 32, concurrency=1), layout="tp=1", engine="meshwright"
        )
        assert plan.chosen is not None
        assert plan.chosen.cost.predicted is not None
        times.append(plan.chosen.cost.predicted.tpot.value)
    assert times[1] - times[0] == pytest.approx(0.01, rel=0.01)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_server_that_does_not_come_up_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from meshwright.prove import calibrate, calibrate_serving

    few = calibrate.bench_jobs
    monkeypatch.setattr(calibrate, "bench_jobs", lambda count, dtypes, kind, quick: few(count, dtypes, kind, True))
    monkeypatch.setattr(calibrate_serving, "START_S", 0.0)
    said: list[str] = []
    found = calibrate.calibrate_here(ranks=1, dtypes=("f32",), device="cpu", say=said.append)
    assert said[-1].startswith("left out: the server of the calibration did not come up")
    assert (found.calibration.serve_s, found.calibration.flops_s["f32"] > 0) == (0.0, True)

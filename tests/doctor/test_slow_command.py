"""The command on slow jobs: what is decided by content, the formats, a plan to hold against, redaction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.doctor.judge import judge
from meshwright.doctor.readers.walk import read_incident
from meshwright.errors import InputError
from meshwright.ledger.tracks import LABELS
from tests.doctor.trace_maker import TraceMaker

RUN = CliRunner()
TIMED_OUT = (
    "[rank0]:[E304 05:06:07.000000000 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600077 milliseconds "
    "before timing out.\n"
)
SILENT = (
    "[rank1]:[E304 05:06:08.000000001 ProcessGroupNCCL.cpp:1987] [PG ID 0 PG GUID 0(default_pg) Rank 1] Received a "
    "dump signal due to a collective timeout from  rank 0 and we will try our best to dump the debug info. Last "
    "enqueued NCCL work: 4, last completed NCCL work: 4.\n"
)


def stalled(folder: Path, packed: bool = False) -> Path:
    m = TraceMaker(2)
    for _ in range(3):
        m.begin()
        for r in m.ranks:
            m.data(r, 0.09 if r else 0.0005)
            m.work(r, "forward", 0.01)
            m.work(r, "backward", 0.02)
        m.meet("all_reduce", 1 << 20, 0.001)
        for r in m.ranks:
            m.work(r, "optimizer", 0.002)
        m.end()
    return m.write(folder, packed=packed)


def plan(folder: Path, world: int = 2) -> Path:
    step = {"value": 0.034, "low": 0.03, "high": 0.04}
    parts = {"products": 0.03, "data parallel": 0.002, "optimizer": 0.002, "bubble": 0.0}
    cost = {"predicted_step": {"step_s": step, "parts_s": parts}}
    path = folder / "plan.json"
    path.write_text(json.dumps({"layout": {"text": "dp=2", "world": world}, "cost": cost}))
    return path


def test_text(tmp_path: Path) -> None:
    done = RUN.invoke(app, ["doctor", str(stalled(tmp_path, packed=True))])
    assert done.exit_code == 1, done.output
    assert done.output.startswith("rank 1 waits for data 90.0 of 123 ms of every step;")
    for word in ("A step of each rank", "all_reduce", "last to arrive", "What to do"):
        assert word in done.output


def test_json_adds_up(tmp_path: Path) -> None:
    done = RUN.invoke(app, ["doctor", str(stalled(tmp_path)), "--json"])
    held = json.loads(done.output)
    first = held["findings"][0]
    assert (first["kind"], first["guilty_ranks"], held["healthy"]) == ("input_bound", [1], False)
    assert first["numbers"]["own_s"] == pytest.approx(0.09, rel=0.02)
    for rank in held["times"]["ranks"]:
        for row in rank["steps"]:
            assert sum(row["parts_s"].values()) == pytest.approx(row["seconds"], rel=1e-6)
            assert set(row["parts_s"]) <= set(LABELS)
    assert [c["last"] for c in held["times"]["collectives"]] == [1, 1, 1]
    assert held["times"]["collectives"][1]["wait_s"]["0"] == pytest.approx(0.0895, rel=0.02)


def test_page_and_trace_with_the_plan_above(tmp_path: Path) -> None:
    folder, page, trace = stalled(tmp_path / "t"), tmp_path / "p.html", tmp_path / "p.json"
    args = ["doctor", str(folder), "--html", str(page), "--perfetto", str(trace), "--against", str(plan(tmp_path))]
    done = RUN.invoke(app, args)
    assert done.exit_code == 1, done.output
    rows = [line.split() for line in done.output.splitlines()]
    assert ["data", "0", "us", "45.3", "ms", "+45.3", "ms"] in rows
    assert "outside" in done.output
    html = page.read_text()
    assert html.index(">planned</text>") < html.index(">rank 0</text>") < html.index(">rank 1</text>")
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"planned: dp=2", "rank 0", "rank 1"}
    held = next(e for e in events if e["name"] == "all_reduce" and "args" in e)
    assert held["args"]["last to arrive"] == "rank 1"


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "not readable as JSON"), ("{}", "no predicted step"), (None, "plan is for 64 ranks")],
)
def test_plans_that_do_not_fit(tmp_path: Path, content: str | None, words: str) -> None:
    path = plan(tmp_path, 64)
    if content is not None:
        path.write_text(content)
    done = RUN.invoke(app, ["doctor", str(stalled(tmp_path / "t")), "--against", str(path)])
    assert isinstance(done.exception, InputError)
    assert words in str(done.exception)


def test_a_hang_beside_traces_comes_first(tmp_path: Path) -> None:
    stalled(tmp_path)
    (tmp_path / "train.log").write_text(TIMED_OUT + SILENT)
    finding = judge(read_incident(tmp_path))[0]
    assert (finding.kind, finding.guilty_ranks) == ("host_stuck", (1,))


def test_a_harmless_log_beside_traces_changes_nothing(tmp_path: Path) -> None:
    stalled(tmp_path)
    (tmp_path / "train.log").write_text("step 1 loss 2.0\nstep 2 loss 1.9\n")
    assert judge(read_incident(tmp_path))[0].kind == "input_bound"


def test_redacted(tmp_path: Path) -> None:
    m = TraceMaker(1, world=2)
    m.begin()
    m.work(0, "forward", 0.01)
    m.end()
    folder = m.write(tmp_path)
    text = next(folder.iterdir())
    text.write_text(text.read_text().replace('"node0"', '"node0.corp.example.com"'))
    done = RUN.invoke(app, ["doctor", str(folder), "--json", "--redact"])
    assert "example.com" not in done.output


def test_names_in_traces_stay_data(tmp_path: Path) -> None:
    m = TraceMaker(2)
    m.name = "<script>[bold]x"
    for _ in range(2):
        m.begin()
        for r in m.ranks:
            m.work(r, "forward", 0.01)
        m.meet("<b>[red]all_reduce", 1 << 20, 0.05)
        m.end()
    page = tmp_path / "p.html"
    done = RUN.invoke(app, ["doctor", str(m.write(tmp_path / "t")), "--html", str(page)])
    assert done.exit_code in (0, 1)
    assert "<script>" not in page.read_text()
    assert "<b>[red]" not in page.read_text()

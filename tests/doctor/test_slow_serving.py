"""Metrics of serving engines: a full cache, a queue, an engine that keeps up, over several scrapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.doctor.findings import Finding
from meshwright.doctor.judge import judge
from meshwright.doctor.readers.walk import read_incident

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {usage}
vllm:num_preemptions_total{{engine="0",model_name="m"}} {thrown}
vllm:request_queue_time_seconds_sum{{engine="0",model_name="m"}} 20.0
vllm:request_queue_time_seconds_count{{engine="0",model_name="m"}} 10.0
vllm:time_to_first_token_seconds_sum{{engine="0",model_name="m"}} {first}
vllm:time_to_first_token_seconds_count{{engine="0",model_name="m"}} 10.0
vllm:nixl_xfer_time_seconds_sum{{engine="0",model_name="m"}} 2.0
vllm:nixl_bytes_transferred_sum{{engine="0",model_name="m"}} 8e10
"""
SGLANG = """sglang:num_running_reqs{{model_name="m",tp_rank="0"}} {running}
sglang:num_queue_reqs{{model_name="m",tp_rank="0"}} {waiting}
sglang:token_usage{{model_name="m",tp_rank="0"}} {usage}
sglang:num_retracted_reqs{{model_name="m",tp_rank="0"}} {thrown}
"""


def found(folder: Path, *scrapes: str) -> Finding:
    (folder / "metrics.txt").write_text("".join(scrapes))
    return judge(read_incident(folder))[0]


@pytest.mark.parametrize("text", [VLLM, SGLANG])
def test_a_full_cache(tmp_path: Path, text: str) -> None:
    scrapes = [text.format(running=60, waiting=30, usage=0.99, thrown=100 + 7 * n, first=100.0) for n in range(3)]
    finding = found(tmp_path, *scrapes)
    assert (finding.kind, finding.confidence) == ("kv_pressure", "high")
    assert dict(finding.numbers)["preemptions"] == 14
    assert dict(finding.numbers)["waiting"] == 30


@pytest.mark.parametrize("text", [VLLM, SGLANG])
def test_a_queue(tmp_path: Path, text: str) -> None:
    finding = found(tmp_path, text.format(running=8, waiting=30, usage=0.4, thrown=0, first=25.0))
    assert (finding.kind, finding.confidence) == ("queueing", "medium")
    assert finding.headline.startswith("30 requests wait for engine m/0 while 8 run")


def test_time_in_the_queue_tells_without_a_queue_now(tmp_path: Path) -> None:
    finding = found(tmp_path, VLLM.format(running=8, waiting=0, usage=0.4, thrown=0, first=25.0))
    assert finding.kind == "queueing"
    assert "2 s of 2.5 s to the first token" in finding.headline
    assert any("moves at 40.0 GB/s" in line for line in finding.evidence)


@pytest.mark.parametrize("text", [VLLM, SGLANG])
def test_an_engine_that_keeps_up(tmp_path: Path, text: str) -> None:
    finding = found(tmp_path, text.format(running=8, waiting=0, usage=0.4, thrown=0, first=100.0))
    assert finding.kind == "healthy"


@pytest.mark.parametrize("text", [VLLM, SGLANG])
def test_scrapes_in_files_of_any_name(tmp_path: Path, text: str) -> None:
    """Counters tell which came first: names in the wrong order must not hide the preemptions."""
    for n, name in enumerate("cba"):
        scrape = text.format(running=60, waiting=30, usage=0.99, thrown=100 + 7 * n, first=100.0)
        (tmp_path / f"{name}.txt").write_text(scrape)
    finding = judge(read_incident(tmp_path))[0]
    assert finding.kind == "kv_pressure"
    assert dict(finding.numbers)["preemptions"] == 14


def test_times_and_exemplars_behind_samples(tmp_path: Path) -> None:
    text = VLLM.format(running=8, waiting=30, usage=0.4, thrown=0, first=25.0)
    lines = [line if line.startswith("#") else f"{line} 1790000000.25" for line in text.splitlines()]
    lines[2] += ' # {trace_id="abc"} 0.5 1790000000.0'
    finding = found(tmp_path, "\n".join(lines))
    assert (finding.kind, dict(finding.numbers)["running"]) == ("queueing", 8)

"""The KV cache between prefill and decode, against its link: from ledgers, metrics of connectors, and traces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.doctor.findings import Finding
from meshwright.doctor.judge import judge
from meshwright.doctor.peak import Peak, Peaks, peaks_of
from meshwright.doctor.readers.walk import read_incident
from meshwright.ledger.schema import Entry, Ledger, Rank
from meshwright.ledger.store import write_jsonl
from tests.doctor.trace_maker import TraceMaker

MS = 1_000_000
LINK = Peaks(Peak(450e9, "nvlink4"), Peak(50e9, "ib-400g"), 8, Peak(50e9, "ib-400g"))
METRICS = """vllm:num_requests_running{{engine="0"}} 4
vllm:num_requests_waiting{{engine="0"}} 0
vllm:kv_cache_usage_perc{{engine="0"}} 0.4
vllm:time_to_first_token_seconds_sum{{engine="0"}} {first}
vllm:time_to_first_token_seconds_count{{engine="0"}} {count}
vllm:nixl_xfer_time_seconds_sum{{engine="0"}} {seconds}
vllm:nixl_xfer_time_seconds_count{{engine="0"}} {count}
vllm:nixl_bytes_transferred_sum{{engine="0"}} {size}
vllm:nixl_bytes_transferred_count{{engine="0"}} {count}
vllm:nixl_num_failed_transfers_total{{engine="0"}} 3
"""
SGLANG = """sglang:num_running_reqs{{tp_rank="0"}} 4
sglang:num_queue_reqs{{tp_rank="0"}} 0
sglang:token_usage{{tp_rank="0"}} 0.4
sglang:kv_transfer_latency_ms_sum{{tp_rank="0"}} {ms}
sglang:kv_transfer_latency_ms_count{{tp_rank="0"}} 10
sglang:kv_transfer_total_mb_sum{{tp_rank="0"}} 10240
sglang:time_to_first_token_seconds_sum{{tp_rank="0"}} 10
sglang:time_to_first_token_seconds_count{{tp_rank="0"}} 10
"""


def served(folder: Path, pairs: dict[tuple[int, int], float], size: int = 8 << 20) -> Path:
    """Ledgers of ranks that hand on two prompts of four layers, sent layer by layer and asked for prompt by prompt;
    ``pairs``: bytes a second of each."""
    sides: dict[int, list[Entry]] = {}
    for (source, target), rate in pairs.items():
        took = round(size / rate * 1e9)
        ends = {}
        for layer in range(4):
            for prompt in range(2):
                begun = (2 * layer + prompt) * took
                ends[prompt, layer] = begun + took
                sides.setdefault(source, []).append(_call(source, "send", target, layer, size, begun, begun + took))
        for prompt in range(2):
            for layer in range(4):
                got = _call(target, "recv", source, layer, size, -5 * MS, ends[prompt, layer])
                sides.setdefault(target, []).append(got)
    for rank, rows in sides.items():
        ledger = Ledger(
            rows, [], [Rank(rank, {}, f"rank{rank}", clock_offset_ns=1_790_000_000 * 10**9)], {"world": "4"}
        )
        write_jsonl(ledger, folder / f"rank{rank}.jsonl")
    return folder


def _call(rank: int, op: str, peer: int, layer: int, size: int, begun: int, ended: int) -> Entry:
    e = Entry(
        f"rank{rank}", op, group="0-3", peer=peer, layer=layer, name="KV blocks", payload_bytes=size, state="completed"
    )
    e.enqueued_ns, e.ended_ns, e.dtype, e.source = begun + 10 * MS, ended + 10 * MS, "bfloat16", "record"
    return e


def found(folder: Path, peaks: Peaks | None = None) -> Finding:
    incident = read_incident(folder)
    incident.peaks = peaks
    return judge(incident)[0]


def numbers(finding: Finding) -> dict[str, float]:
    return dict(finding.numbers)


def test_a_ledger_against_its_link(tmp_path: Path) -> None:
    """2 GB/s of 50: 4 %, which no healthy connector is down to."""
    finding = found(served(tmp_path, {(0, 2): 2e9}), LINK)
    assert (finding.kind, finding.guilty_ranks) == ("slow_link", (0, 2))
    assert numbers(finding)["bytes_s"] == pytest.approx(2e9, rel=1e-3)
    assert numbers(finding)["share"] == pytest.approx(0.04, rel=1e-3)
    assert numbers(finding)["bytes"] == 8 * (8 << 20)
    assert "4 % of the peak of ib-400g" in finding.headline


def test_a_ledger_that_fills_its_link_is_healthy(tmp_path: Path) -> None:
    finding = found(served(tmp_path, {(0, 2): 40e9, (1, 3): 41e9}), LINK)
    assert finding.kind == "healthy"
    assert any("80 % of the peak of ib-400g" in line for line in (finding.headline, *finding.evidence))


def test_one_pair_slower_than_its_like_needs_no_plan(tmp_path: Path) -> None:
    finding = found(served(tmp_path, {(0, 2): 20e9, (1, 3): 5e9}))
    assert (finding.kind, finding.guilty_ranks) == ("slow_link", (1, 3))
    assert numbers(finding)["bytes_s"] == pytest.approx(5e9, rel=1e-3)


def metrics(folder: Path, *scrapes: tuple[float, float, float, float]) -> Path:
    keys = ("count", "size", "seconds", "first")
    text = "".join(METRICS.format(**dict(zip(keys, scrape, strict=True))) for scrape in scrapes)
    (folder / "metrics.txt").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("rate", "first_s", "kind"),
    [
        (40e9, 0.3, "healthy"),
        (40e9, 0.02, "bandwidth_bound_comm"),
        (10e9, 0.1, "slow_link"),
        (10e9, 1.0, "healthy"),
        (1e9, 9.0, "slow_link"),
    ],
)
def test_nixl_against_its_link(tmp_path: Path, rate: float, first_s: float, kind: str) -> None:
    """Of two scrapes what came between them counts: before it, transfers were a hundred times slower."""
    each = 400 << 20
    before = (10, 10 * each, 10 * each / rate * 100, 10 * first_s)
    after = (before[0] + 50, before[1] + 50 * each, before[2] + 50 * each / rate, before[3] + 50 * first_s)
    finding = found(metrics(tmp_path, before, after), LINK)
    assert finding.kind == kind, finding.headline
    if kind != "healthy":
        assert numbers(finding)["bytes_s"] == pytest.approx(rate)
        assert numbers(finding)["transfer_s"] == pytest.approx(each / rate)
        assert numbers(finding)["share_of_ttft"] == pytest.approx(each / rate / first_s)
    else:
        assert any(f"moves at {rate / 1e9:.0f}" in line for line in finding.evidence)


def test_without_a_plan_the_link_is_not_known(tmp_path: Path) -> None:
    finding = found(metrics(tmp_path, (10, 4e9, 1.0, 2.0)))
    assert finding.kind == "bandwidth_bound_comm"
    assert finding.unknown[0].startswith("what the link carries: --against")
    assert "100 of 200 ms to the first token" in finding.headline


@pytest.mark.parametrize(("ms", "kind"), [(100, "healthy"), (9000, "slow_link")])
def test_sglang(tmp_path: Path, ms: float, kind: str) -> None:
    (tmp_path / "m.txt").write_text(SGLANG.format(ms=ms))
    finding = found(tmp_path, LINK)
    assert finding.kind == kind
    if kind != "healthy":
        assert numbers(finding)["bytes_s"] == pytest.approx(10240 * (1 << 20) / 9)


def handed(folder: Path, *, training: bool) -> Path:
    m = TraceMaker(2, device=False)
    for _ in range(3):
        m.begin()
        for r in m.ranks:
            m.work(r, "forward", 0.1)
        m.hand_off(0, 1, 4 << 20, 0.002)
        if training:
            for r in m.ranks:
                m.work(r, "backward", 0.1)
        m.end()
    return m.write(folder)


def test_sends_in_traces_of_a_job_that_serves(tmp_path: Path) -> None:
    incident = read_incident(handed(tmp_path / "a", training=False))
    incident.peaks = Peaks(Peak(500e9, "nvlink4"), Peak(50e9, "ib-400g"), 8)
    finding = next(f for f in judge(incident) if f.kind == "slow_link")
    assert finding.guilty_ranks == (0, 1)
    assert numbers(finding)["bytes_s"] == pytest.approx((16 << 20) / 0.002, rel=1e-3)
    assert "of the peak of nvlink4" in finding.headline


def test_sends_of_a_pipeline_that_trains_are_no_cache(tmp_path: Path) -> None:
    incident = read_incident(handed(tmp_path / "a", training=True))
    incident.peaks = Peaks(Peak(500e9, "nvlink4"), Peak(50e9, "ib-400g"), 8)
    assert all(f.kind != "slow_link" for f in judge(incident))


def plan(pools: Sequence[int]) -> dict[str, object]:
    cluster = {
        "intra": "nvlink4",
        "inter": "ib-400g",
        "devices_per_node": 8,
        "intra_bytes_s": 450e9,
        "inter_bytes_s": 50e9,
    }
    layout = [{"layout": {"text": f"tp={world}", "world": world}} for world in pools]
    times = {"ttft_s": {"value": 0.1, "low": 0.08, "high": 0.12}, "tpot_s": {"value": 0.02}}
    parts = {"prefill": 0.04, "transfer": 0.04, "queue for prefill": 0.02}
    cost = {"predicted_step": None, "predicted": {**times, "ttft_parts_s": parts}}
    return {"cluster": cluster, **layout[-1], "cost": cost, **({"prefill": layout[0]} if len(layout) > 1 else {})}


@pytest.mark.parametrize(("pools", "name"), [((2, 4), "nvlink4"), ((4, 8), "ib-400g"), ((8,), None)])
def test_the_link_of_two_pools(pools: Sequence[int], name: str | None) -> None:
    peaks = peaks_of(plan(pools))
    assert peaks is not None
    assert (peaks.pools.name if peaks.pools else None) == name


@pytest.mark.parametrize(
    "cluster", [None, [], {"intra_bytes_s": "fast"}, {"intra_bytes_s": -1, "inter_bytes_s": 1, "devices_per_node": 8}]
)
def test_a_plan_that_tells_no_link(cluster: object) -> None:
    assert peaks_of({"cluster": cluster}) is None


def test_a_plan_to_serve_against_metrics(tmp_path: Path) -> None:
    metrics(tmp_path, (10, 10 * 400e6, 10 * 0.08, 10 * 0.2))
    path = tmp_path / "p" / "plan.json"
    path.parent.mkdir()
    path.write_text(json.dumps(plan((4, 8))))
    done = CliRunner().invoke(app, ["doctor", str(tmp_path / "metrics.txt"), "--against", str(path), "--json"])
    assert done.exit_code == 1, done.output
    said = json.loads(done.output)
    rows = {r["part"]: r for r in said["against"]["rows"]}
    assert rows["KV transfer"]["recorded_s"] == pytest.approx(0.08)
    assert rows["KV transfer"]["predicted_s"] == 0.04
    assert rows["prefill"]["recorded_s"] == pytest.approx(0.12)
    assert said["findings"][0]["kind"] == "slow_link"
    shown = CliRunner().invoke(app, ["doctor", str(tmp_path / "metrics.txt"), "--against", str(path)])
    assert "First token of tp=8: planned 100 ms (80.0 ms to 120 ms), recorded 200 ms: outside" in " ".join(
        shown.output.split()
    )

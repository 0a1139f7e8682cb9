"""Profiler traces in every shape that is found: old and new torch, cut off, broken, packed, with and without words."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from bench.doctor_trace_fuzz import fuzz
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.doctor.readers import events, kineto_rows
from meshwright.doctor.readers.events import Events
from meshwright.doctor.readers.kineto import read_track
from meshwright.doctor.readers.kineto_names import host_kind, kernel_op, op_of
from meshwright.doctor.readers.walk import read_incident
from meshwright.ledger import intervals
from meshwright.ledger.tracks import Track
from tests.doctor.trace_maker import BASE_NS, TraceMaker


def read(document: Any) -> Track:
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    return read_track(io.BytesIO(data), "x")


def one_step(device: bool = True) -> dict[str, Any]:
    m = TraceMaker(1, device=device)
    for _ in range(2):
        m.begin()
        m.data(0, 0.01)
        m.work(0, "forward", 0.02)
        m.work(0, "backward", 0.04)
        m.meet("all_reduce", 1 << 18, 0.005)
        m.work(0, "optimizer", 0.003)
        m.end()
    return m.document(0)


def part(track: Track, label: str) -> float:
    from meshwright.ledger.tracks import breakdown

    return breakdown(track)[0].parts_s.get(label, 0.0)


@pytest.mark.parametrize("size", [1 << 8, 1 << 10, 1 << 22])
@pytest.mark.parametrize("fast", [True, False])
def test_any_stretch_gives_the_same_events(monkeypatch: pytest.MonkeyPatch, size: int, fast: bool) -> None:
    monkeypatch.setattr(events, "STRETCH_BYTES", size)
    if not fast:
        monkeypatch.setattr(events, "_decoder", lambda: None)
    document = one_step() | {"traceName": "after"}
    for indent in (None, 2):
        got = Events(io.BytesIO(json.dumps(document, indent=indent).encode()))
        assert [e for batch in got.batches() for e in batch] == document["traceEvents"]
        assert got.meta == {k: v for k, v in document.items() if k != "traceEvents"}
        assert (got.broken, got.cut) == (0, False)


def test_what_orjson_refuses_is_read() -> None:
    text = (
        json.dumps(one_step()).replace('"device": 0', '"occupancy": NaN').encode().replace(b"softmax", b"soft\xffmax")
    )
    track = read(text)
    assert track.counts["kernels"] == 38
    assert not any("parsed" in line for line in track.lacks)


def test_cut_off_anywhere() -> None:
    data = json.dumps(one_step()).encode()
    whole = len(one_step()["traceEvents"])
    for end in range(len(data) // 3, len(data) - 60, 997):
        track = read(data[:end])
        assert any("cut off" in line for line in track.lacks)
        assert 0 < track.counts["events"] <= whole


def test_a_broken_event_costs_only_itself(tmp_path: Path) -> None:
    document = one_step()
    data = json.dumps(document).encode()
    at = data.index(b'"layer_norm"')
    track = read(data[:at] + b"\x00" + data[at + 1 :])
    assert track.counts["events"] == len(document["traceEvents"]) - 1
    assert any("1 stretches" in line for line in track.lacks)


def test_a_packed_file_that_ends_early(tmp_path: Path) -> None:
    data = gzip.compress(json.dumps(one_step()).encode())
    (tmp_path / "rank0.json.gz").write_bytes(data[: len(data) * 3 // 4])
    incident = read_incident(tmp_path)
    assert any("cut off" in line for line in incident.tracks[0].lacks)


def test_a_bare_list_of_events_has_its_rank_from_the_name(tmp_path: Path) -> None:
    for rank in (3, 5):
        (tmp_path / f"worker{rank}.json").write_text(json.dumps(one_step()["traceEvents"]))
    incident = read_incident(tmp_path)
    assert [t.rank for t in incident.tracks] == [3, 5]
    assert any("no distributedInfo" in line for line in incident.tracks[0].lacks)


def test_names_of_2021(tmp_path: Path) -> None:
    old = {"kernel": "Kernel", "cuda_runtime": "Runtime", "cpu_op": "Operator", "user_annotation": "Operator"}
    document = one_step()
    for event in document["traceEvents"]:
        event["cat"] = old.get(event["cat"], event["cat"])
    track, new = read(document), read(one_step())
    for label in ("forward", "backward", "optimizer", "data", "all_reduce"):
        assert part(track, label) == pytest.approx(part(new, label)), label
    assert [s.number for s in track.steps] == [0, 1]


def test_the_old_profiler_has_no_categories() -> None:
    rows = [
        {"name": "aten::mm", "ph": "X", "ts": 0.0, "dur": 90.0, "tid": 1, "pid": "CPU functions", "args": {}},
        {"name": "sgemm", "ph": "X", "ts": 10.0, "dur": 50.0, "tid": 1, "pid": "CUDA functions", "args": {}},
    ]
    track = read(rows)
    assert track.counts["kernels"] == 1
    assert part(track, "compute") == pytest.approx(50e-6)


def test_times_count_from_the_base() -> None:
    document = one_step()
    assert read(document).steps[0].start_ns == BASE_NS + 10_000_000
    for event in document["traceEvents"]:
        event["ts"] += 1_700_000_000e6
    assert read(document).steps[0].start_ns == pytest.approx(1_700_000_000_010_000_000, abs=1000)


def test_a_device_that_lags_behind_its_host() -> None:
    document = one_step()
    for event in document["traceEvents"]:
        if event["cat"] == "kernel":
            event["ts"] += 300_000
    track = read(document)
    assert part(track, "forward") == pytest.approx(0.02, rel=0.02)
    assert part(track, "all_reduce") == pytest.approx(0.005, rel=0.02)


def test_values_of_wrong_types_are_counted() -> None:
    document = one_step()
    document["traceEvents"] += [
        {"ph": "X", "cat": c, "name": n, "ts": t, "dur": d, "args": a}
        for c, n, t, d, a in (
            ("kernel", "x", "1", 1, {}),
            ("kernel", None, 1, 1, {}),
            ("kernel", "x", 1, -5, {}),
            ("kernel", "x", float("inf"), 1, {}),
            ("cpu_op", ["x"], 1, 1, {}),
            (["kernel"], "x", 1, 1, {}),
            ("kernel", "x", 1, 1, [1]),
        )
    ]
    track = read(document)
    assert any("7 events with values of a wrong type" in line for line in track.lacks)
    assert track.counts["kernels"] == 38


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_float(ncclWorkElem)", "reduce_scatter"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "collective"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)", "all_reduce"),
        ("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_bf16", "all_reduce"),
        ("void multimem_all_reduce_kernel<c10::BFloat16, 16>", "all_reduce"),
        ("ampere_bf16_s16816gemm_bf16_128x64", None),
        ("void at::native::reduce_kernel<512, 1>", None),
        ("triton_red_fused_all_reduce_layer_norm", None),
    ],
)
def test_kernels_that_communicate(name: str, op: str | None) -> None:
    assert kernel_op(name) == op


@pytest.mark.parametrize(
    ("category", "name", "kind"),
    [
        ("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "data"),
        ("user_annotation", "## forward ##", "forward"),
        ("user_annotation", "Optimizer.zero_grad#Adam.zero_grad", "optimizer"),
        ("user_annotation", "save_checkpoint", "checkpoint"),
        ("user_annotation", "## Call CompiledFxGraph abc", None),
        ("user_annotation", "compile_fx.<locals>.fw_compiler_base (dynamo_timed)", "compile"),
        ("python_function", "Python GC", "gc"),
        ("python_function", "torch/nn/modules/module.py(1501): _call_impl", None),
        ("runtime", "hipStreamSynchronize", "sync"),
        ("runtime", "cudaStreamWaitEvent", None),
        ("cpu_op", "aten::mm", "work"),
        ("cpu_op", "c10d::allreduce_", "comm"),
    ],
)
def test_words_of_the_host(category: str, name: str, kind: str | None) -> None:
    assert host_kind(category, name) == kind


def test_spellings_of_operations() -> None:
    names = ("_allgather_base", "nccl:_reduce_scatter_base", "all_to_allv", "allreduce_coalesced", "gloo:broadcast")
    assert [op_of(n) for n in names] == ["all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast"]


SETS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


@settings(deadline=None, max_examples=60)
@given(SETS, SETS)
def test_intervals_against_sets_of_moments(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    import numpy as np

    def made(rows: list[tuple[int, int]]) -> tuple[intervals.Stretches, set[int]]:
        pairs = np.array([(s, s + n) for s, n in rows], np.int64).reshape(-1, 2)
        return intervals.union(pairs[:, 0], pairs[:, 1]), {t for s, n in rows for t in range(s, s + n)}

    (one, plain_one), (two, plain_two) = made(a), made(b)
    assert intervals.length(one) == len(plain_one)
    assert intervals.length(intervals.intersection(one, two)) == len(plain_one & plain_two)
    assert intervals.length(intervals.subtract(one, two)) == len(plain_one - plain_two)
    segments = intervals.layers([one, two])
    times = np.arange(0, 90, 7, dtype=np.int64)
    for n, time in enumerate(times):
        want = [len({t for t in plain_one if t < time}), len({t for t in plain_two - plain_one if t < time})]
        assert segments.sums(times, 2)[n].tolist() == want


def test_mutants_end_in_words() -> None:
    outcome = fuzz(60, seed=3)
    assert outcome.cases == 60
    assert not outcome.failures, outcome.failures[:3]
    assert len(outcome.kinds) > 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_mutants_end_in_words() -> None:
    outcome = fuzz(1000, seed=4)
    assert not outcome.failures, outcome.failures[:3]


def test_the_fuzzer_sees_a_reader_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(*_: object) -> None:
        raise IndexError("planted")

    monkeypatch.setattr(kineto_rows.Rows, "_device", planted)
    assert fuzz(6, seed=3).failures

"""Rows of published training steps, the fit over arrays, and the score, on a table that the test writes."""

from __future__ import annotations

import csv
from math import log
from pathlib import Path

import pytest
from bench.score_training_time import choices, ranks, rows, spearman
from bench.training_rows import MICRO_BATCH, Case, cluster_of, published_flops, read_cases, stages

from meshwright.plan.training_time import constants, training_time

np = pytest.importorskip("numpy")

COLUMNS = [
    "source",
    "url",
    "phase",
    "model",
    "params_b",
    "gpu",
    "n_gpus",
    "tp",
    "pp",
    "dp",
    "ep",
    "cp",
    "dtype",
    "batch",
    "micro_batch",
    "seq",
    "isl",
    "osl",
    "concurrency",
    "metric",
    "value",
    "unit",
    "note",
]
BRIDGE = {
    "source": "NVIDIA Megatron-Bridge performance summary", "phase": "train", "metric": "tokens_per_s_per_gpu",
    "unit": "tokens/s/GPU", "batch": "128", "micro_batch": "1", "seq": "8192", "cp": "1", "tp": "1", "pp": "1",
}  # fmt: skip


def table(path: Path, *lines: dict[str, str]) -> Path:
    """A table with these rows."""
    file = path / "ground_truth.csv"
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, COLUMNS)
        writer.writeheader()
        writer.writerows(lines)
    return file


def llama(dp: int, value: float, note: str = "NeMo 26.04 Pre-Training Performance; VP=n/a; FSDP=0") -> dict[str, str]:
    """A row of Llama 3 8B."""
    return BRIDGE | {
        "model": "LLAMA3_8B", "gpu": "H100", "n_gpus": str(dp), "dp": str(dp), "dtype": "fp8", "value": str(value),
        "note": note,
    }  # fmt: skip


@pytest.fixture
def cases(tmp_path: Path) -> list[Case]:
    """A few rows of two models."""
    qwen = BRIDGE | {
        "model": "Qwen3_30B_a3B", "gpu": "GB200", "n_gpus": "8", "dp": "8", "ep": "8", "dtype": "mxfp8", "seq": "4096",
        "value": "26112", "note": "NeMo 26.06 Pre-Training Performance; VP=n/a; FSDP=0",
    }  # fmt: skip
    big = BRIDGE | {
        "model": "LLAMA3.1_405B", "gpu": "H100", "n_gpus": "64", "tp": "8", "pp": "8", "dp": "1", "dtype": "bf16",
        "value": "60", "note": "NeMo 26.02 Pre-Training Performance; VP=8; FSDP=0",
    }  # fmt: skip
    return read_cases(table(tmp_path, llama(8, 14000.0), qwen, big))[0]


def test_a_row_says_layout_release_and_type(cases: list[Case]) -> None:
    first, qwen, big = cases
    assert first.software.compute == "f8_e4m3"
    assert (first.software.months, qwen.software.months, big.software.months) == (0.0, 2.0, -2.0)
    assert qwen.placement.layout.ep == 8
    assert [len(s.layers) for s in big.placement.stages] == [15, 16, 16, 16, 16, 16, 16, 15]
    assert big.placement.layout.schedule == "interleaved"


def test_the_arrays_of_the_fit_are_the_product(cases: list[Case]) -> None:
    from bench.fit_training_time import count, errors

    found = errors(constants(), count(cases))
    for case, error in zip(cases, found, strict=True):
        own = training_time(case.placement, case.cluster, case.work, software=case.software).tokens_per_s_device
        assert log(own / case.tokens_per_s) == pytest.approx(error, abs=0.02)


def test_the_fit_finds_planted_constants(cases: list[Case]) -> None:
    """Measurements made with slower products are fitted by slower products."""
    from dataclasses import replace

    from bench.fit_training_time import count, fit, priors, seconds

    true = {name: prior for name, (prior, _) in priors().items()} | {"dense.hopper": 0.5}
    counted = count(cases)
    made = seconds(true, counted)
    tokens = [c.work.global_batch * c.work.seq / c.placement.layout.world for c in cases]
    planted = [replace(c, tokens_per_s=t / float(s)) for c, t, s in zip(cases, tokens, made, strict=True)]
    found = fit(count(planted))
    assert found["dense.hopper"] < 0.9 * priors()["dense.hopper"][0]
    assert found["dense.ampere"] == pytest.approx(priors()["dense.ampere"][0], rel=1e-3)


def test_rows_that_cannot_be_timed_are_counted_with_their_reason(tmp_path: Path) -> None:
    tuned = llama(8, 1.0, "NeMo 26.06 LoRA Performance; VP=n/a; FSDP=0")
    card = llama(8, 1.0) | {"source": "Megatron-Bridge cpu-offloading card", "metric": "iteration_time"}
    table(tmp_path, tuned, card, llama(8, 14000.0))
    found = rows(tmp_path)
    assert len(found) == 3
    assert sum(r.predicted is None for r in found) == 2
    assert all(r.reason for r in found if r.predicted is None)
    assert all(r.error is not None and abs(r.error) < 0.5 for r in found if r.predicted is not None)


def test_choices_see_the_best_and_a_wrong_pick(tmp_path: Path) -> None:
    plain = llama(8, 14000.0)
    sharded = llama(8, 10000.0, "NeMo 26.04 Pre-Training Performance; VP=n/a; FSDP=8")
    both = read_cases(table(tmp_path, plain, sharded))[0]
    right, wrong = choices(both, [2.0, 1.0])[0], choices(both, [1.0, 2.0])[0]
    assert (right.regret, right.correlation) == pytest.approx((0.0, 1.0))
    assert (wrong.regret, wrong.correlation) == pytest.approx((0.4, -1.0))


def test_rank_correlation() -> None:
    assert ranks([3.0, 1.0, 3.0]) == [2.5, 1.0, 2.5]
    assert spearman([1, 2, 3, 4], [10, 20, 40, 30]) == pytest.approx(0.8)
    assert spearman([1, 1], [1, 2]) == 0.0


def test_stages_that_do_not_divide() -> None:
    assert stages(80, 4) == ()
    assert stages(126, 16) == (7, *[8] * 14, 7)
    assert stages(61, 4) == (16, 16, 16, 13)


def test_conventions_of_published_flops() -> None:
    layers, h, seq, vocab = 2, 1024, 512, 1000
    products = 12 * layers * h * h
    whole_attention = 2 * layers * seq * h
    by_hand = 6 * (products + whole_attention + h * vocab)
    assert published_flops((layers, h, 8), seq, vocab, 3) == pytest.approx(by_hand)
    assert set(MICRO_BATCH.values()) <= {1, 2, 4}


def test_clusters_of_racks_and_nodes() -> None:
    rack, nodes = cluster_of("GB200", 256), cluster_of("H100-80G", 64)
    assert (rack.nodes, rack.devices_per_node) == (4, 64)
    assert (nodes.nodes, nodes.devices_per_node) == (8, 8)
    assert (cluster_of("H100", 8, 0.5).device.peak("bf16") or 0) == pytest.approx(
        0.5 * (nodes.device.peak("bf16") or 0)
    )

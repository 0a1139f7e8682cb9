"""Fits find the figures that a ledger was made from, time other ledgers by them, and survive a file and its reader."""

from __future__ import annotations

import json
from dataclasses import replace
from math import log
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.ledger.calibrate import (
    Calibration,
    Sample,
    Transfer,
    fit,
    interpolated,
    line,
    pass_seconds,
    passed_bytes,
    sizes_of,
)
from meshwright.ledger.calibration_file import MAX_FILE_BYTES, as_dict, from_dict, read, write
from meshwright.ledger.schema import Entry, Ledger

PEAK, BANDWIDTH = 50e9, 20e9


def timed(op: str, seconds: float, *, count: int = 1, **fields: object) -> Entry:
    entry = Entry("rank0", op, count=count, started_ns=1000, ended_ns=1000 + round(seconds * count * 1e9))
    for name, value in fields.items():
        setattr(entry, name, value)
    return entry


def product(m: int, k: int, n: int, seconds: float, dtype: str = "f32") -> Entry:
    moved = 4 * (m * k + k * n + m * n)
    shapes = ((m, k), (k, n))
    return timed("matmul", seconds, shapes=shapes, dtype=dtype, flops=2 * m * k * n, payload_bytes=moved)


def machine_product(m: int, k: int, n: int) -> Entry:
    """A product on a machine that reaches a quarter of its roofline below 16 rows and all of it from there."""
    best = max(2 * m * k * n / PEAK, 4 * (m * k + k * n + m * n) / BANDWIDTH)
    return product(m, k, n, best / (0.25 if m < 16 else 1.0))


def machine() -> Ledger:
    ledger = Ledger(meta={"machine": "a test", "ranks": "2", "group.tp": "2"})
    ledger.entries += [machine_product(m, 1024, 512) for m in (1, 2, 4, 8, 16, 64, 256, 4096)]
    ledger.entries.append(timed("copy", 0.1, payload_bytes=round(BANDWIDTH * 0.1)))
    ledger.entries += [
        timed("all_reduce", 20e-6 + size / 5e9, group="tp", payload_bytes=size) for size in (1024, 1 << 16, 1 << 22)
    ]
    for op, seconds in (("launch", 2e-6), ("layer", 50e-6), ("pass", 300e-6), ("message", 80e-6)):
        ledger.entries.append(timed(op, seconds))
    return ledger


@pytest.fixture(scope="module")
def fitted() -> Calibration:
    return fit(machine())


def test_the_figures_that_made_the_ledger_are_found(fitted: Calibration) -> None:
    assert fitted.machine == "a test"
    assert fitted.ranks == 2
    assert fitted.flops_s["f32"] == pytest.approx(PEAK, rel=1e-3)
    assert fitted.bandwidth_bytes_s == pytest.approx(BANDWIDTH, rel=1e-6)
    assert (fitted.launch_s, fitted.layer_s, fitted.pass_s, fitted.message_s) == pytest.approx((2e-6, 5e-5, 3e-4, 8e-5))
    (transfer,) = fitted.transfers
    assert (transfer.op, transfer.ranks) == ("all_reduce", 2)
    assert transfer.latency_s == pytest.approx(20e-6, rel=1e-3)
    assert transfer.bandwidth_bytes_s == pytest.approx(5e9, rel=1e-3)
    assert transfer.error < 1e-3


def test_measured_shapes_come_back_and_shapes_between_lie_between(fitted: Calibration) -> None:
    for m in (1, 8, 16, 4096):
        entry = machine_product(m, 1024, 512)
        assert entry.ended_ns is not None
        assert fitted.seconds(entry) == pytest.approx((entry.ended_ns - 1000) * 1e-9, rel=1e-3)
    near, far = machine_product(3, 1024, 512), machine_product(1024, 1000, 500)
    for entry, slack in ((near, 0.1), (far, 0.3)):
        assert entry.ended_ns is not None
        assert fitted.seconds(entry) == pytest.approx((entry.ended_ns - 1000) * 1e-9, rel=slack)
    assert fitted.error["matmul"] < 1


def test_repetitions_and_dtypes_that_were_not_measured(fitted: Calibration) -> None:
    entry = machine_product(16, 1024, 512)
    once = fitted.seconds(entry)
    assert fitted.seconds(replace(entry, count=7)) == pytest.approx(7 * once)
    assert fitted.seconds(replace(entry, dtype="bf16")) == pytest.approx(once)
    norm = Entry("r", "norm", payload_bytes=2_000_000, shapes=((10, 10),), dtype="f32")
    assert fitted.seconds(norm) == pytest.approx(1e-4)


def test_transfers_between_and_beyond_what_was_measured(fitted: Calibration) -> None:
    def reduce(size: int, ranks: int = 2) -> float:
        return fitted.seconds(Entry("r", "all_reduce", group="tp", payload_bytes=size), ranks)

    assert reduce(1 << 16) == pytest.approx(20e-6 + (1 << 16) / 5e9, rel=1e-4)
    assert reduce(1 << 26) == pytest.approx(20e-6 + (1 << 26) / 5e9, rel=1e-3)
    assert reduce(8) == reduce(1024)
    assert reduce(1 << 20, 1) == 0
    # 8 ranks: three rounds for one, and 7/8 of the payload sent where it was 1/2.
    want = 3 * 20e-6 + (1 << 22) / 5e9 * (7 / 8) / (1 / 2)
    assert reduce(1 << 22, 8) == pytest.approx(want, rel=1e-3)
    gather = Entry("r", "gather", group="tp", payload_bytes=1024)
    assert fitted.seconds(gather, 2) == pytest.approx(reduce(1024))
    with pytest.raises(InputError, match="no send was measured"):
        fitted.seconds(Entry("r", "send", group="pp", payload_bytes=8), 2)


def test_passes_are_sums_with_the_driver(fitted: Calibration) -> None:
    rows = [replace(machine_product(16, 1024, 512), layer=n, step=0, microbatch=1, count=2) for n in (0, 1, 1)]
    key = "rank0", 0, 1
    plain = pass_seconds(fitted, rows, {}, driver=False)
    assert plain == {key: pytest.approx(6 * fitted.seconds(replace(rows[0], count=1)))}
    whole = pass_seconds(fitted, rows, {})
    assert whole[key] - plain[key] == pytest.approx(fitted.pass_s + 2 * fitted.layer_s)


def test_what_lies_between_products_takes_their_inputs_and_outputs(fitted: Calibration) -> None:
    ledger = machine()
    ledger.entries.append(timed("light", 1e-3, payload_bytes=2_000_000))
    c = fit(ledger)
    assert fitted.light_bytes_s == 0.0
    assert c.light_bytes_s == pytest.approx(2e9)
    rows = [replace(machine_product(16, 1024, 512), step=0, microbatch=0, count=3)]
    experts = replace(rows[0], shapes=((16, 1024), (8, 1024, 512)), payload_bytes=2 * (16 * 1536 + 8 * 1024 * 512))
    assert passed_bytes(rows[0]) == pytest.approx(4 * 16 * (1024 + 512))
    assert passed_bytes(experts) == pytest.approx(2 * 16 * (1024 + 512)), "the width of an element is that of the entry"
    more = pass_seconds(c, rows, {})["rank0", 0, 0] - pass_seconds(fitted, rows, {})["rank0", 0, 0]
    assert more == pytest.approx(3 * 4 * 16 * 1536 / 2e9)
    assert from_dict(as_dict(c)) == c


def test_what_a_server_adds_to_a_step_is_read(fitted: Calibration) -> None:
    ledger = machine()
    ledger.entries += [timed("serve", 1e-3), timed("sequence", 2e-4)]
    found = fit(ledger)
    assert (fitted.serve_s, fitted.sequence_s) == (0.0, 0.0)
    assert (found.serve_s, found.sequence_s) == pytest.approx((1e-3, 2e-4))


@given(
    st.floats(1e-6, 1e-2),
    st.floats(1e6, 1e12),
    st.lists(st.integers(0, 30), min_size=2, max_size=8, unique=True),
)
@settings(max_examples=60, deadline=None)
def test_a_line_is_found_again(latency: float, rate: float, exponents: list[int]) -> None:
    knots = [(2**e, latency + 2**e / rate) for e in sorted(exponents)]
    a, b, error = line(knots)
    assert error < 1e-6
    for size, seconds in knots:
        assert a + size / b == pytest.approx(seconds, rel=1e-5)


def test_a_line_never_runs_backwards() -> None:
    latency, rate, _ = line([(1000, 5e-5), (2000, 4e-5), (4000, 3e-5)])
    assert 0 <= latency <= 3e-5
    assert rate > 0
    assert line([(1000, 5e-5)]) == (5e-5, pytest.approx(2e7), 0)


def test_interpolation_is_exact_at_a_sample_and_stays_within_all() -> None:
    samples = [Sample("matmul", "f32", None, (m, 64, 64), e) for m, e in ((1, 0.1), (8, 0.4), (64, 0.9))]
    assert interpolated(samples, (8, 64, 64)) == 0.4
    assert 0.1 < interpolated(samples, (3, 64, 64)) < 0.9


def test_sizes_of_experts_and_attention() -> None:
    experts = Entry("r", "matmul", shapes=((32, 64), (4, 64, 128)))
    assert sizes_of(experts) == (32, 4, 64, 128)
    core = Entry("r", "attention", shapes=((6, 8, 16), (90, 2, 16), (90, 2, 16)))
    assert sizes_of(core) == (6, 90, 8, 16)


def test_a_ledger_without_times_is_refused() -> None:
    ledger = machine()
    for entry in ledger.entries:
        entry.ended_ns = None
    with pytest.raises(InputError, match="memory traffic"):
        fit(ledger)
    ledger = machine()
    ledger.entries = [e for e in ledger.entries if e.op != "matmul"]
    with pytest.raises(InputError, match="matrix product"):
        fit(ledger)


def test_the_median_counts() -> None:
    ledger = machine()
    ledger.entries += [timed("pass", 1.0), timed("pass", 310e-6)]
    assert fit(ledger).pass_s == pytest.approx(310e-6)


@pytest.mark.parametrize("name", ["here.toml", "here.json"])
def test_files_come_back_whole(fitted: Calibration, tmp_path: Path, name: str) -> None:
    write(fitted, tmp_path / name)
    assert read(tmp_path / name) == fitted


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "version '2'"),
        ({"bandwidth_bytes_s": -1.0}, "no calibration"),
        ({"bandwidth_bytes_s": 0.0}, "rate of 0"),
        ({"flops_s": {"f32": float("nan")}}, "no calibration"),
        ({"work": [{"op": "matmul"}]}, "no calibration"),
        ({"work": "text"}, "no calibration"),
        ({"ranks": "many"}, "no calibration"),
        ({"transfers": [{"op": "send", "ranks": 2, "knots": [[2, 1.0], [1, 1.0]]}]}, "no calibration"),
    ],
)
def test_a_file_that_is_none_is_one_line(fitted: Calibration, change: dict[str, object], says: str) -> None:
    raw = {**json.loads(json.dumps(as_dict(fitted))), **change}
    with pytest.raises(InputError, match=says) as caught:
        from_dict(raw, "x")
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path / "none.toml")
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(InputError, match="no calibration"):
        read(tmp_path / "a.json")
    (tmp_path / "b.toml").write_text("= what")
    with pytest.raises(InputError):
        read(tmp_path / "b.toml")
    (tmp_path / "c.toml").write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(InputError, match="larger than"):
        read(tmp_path / "c.toml")
    with pytest.raises(InputError, match="cannot be written"):
        write(Calibration("m", 1, {"f32": 1.0}, 1.0), tmp_path / "no" / "where.toml")


def test_between_knots_a_curve_is_straight_in_logarithms() -> None:
    t = Transfer("send", 2, 0.0, 1e9, 0.0, ((100, 1e-5), (10_000, 1e-3)))
    assert log(t.seconds(1000)) == pytest.approx((log(1e-5) + log(1e-3)) / 2)

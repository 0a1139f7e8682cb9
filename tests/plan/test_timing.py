"""Times of single entries: measured curves are read back, scaled ones keep their bounds, rooflines keep theirs."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise
from math import exp, log
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.ledger.calibrate import Calibration, Sample
from meshwright.plan.machine_file import measured_cluster, write
from meshwright.plan.timing.closed_loop import Host, Load, Steps, closed_loop, pools
from meshwright.plan.timing.collective import (
    Wiring,
    collective_seconds,
    curve,
    small_all_reduce_seconds,
    table,
)
from meshwright.plan.timing.compute import (
    constants,
    efficiency,
    op_seconds,
    op_time,
    peak_flops,
    roofline,
    unit_dtype,
    work_seconds,
)
from meshwright.plan.timing.estimate import Seconds, spread, total, weakest
from meshwright.plan.wire import compute
from meshwright.specs.atlas.devices import find_device
from meshwright.specs.cluster import MeasuredPoint, MeasuredShare, parse_cluster

H200 = parse_cluster("1x8xH200")


def test_measured_points_are_read_back() -> None:
    """``interconnect.csv``: all_reduce of 8 H200 and H100 at 512 MiB, in microseconds."""
    for link, cluster in (("nvlink4", "1x8xH200"), ("nvlink5", "1x8xB200"), ("pcie4", "1x8xL40S")):
        for ranks in (2, 4, 8):
            for size, us in zip(table()["sizes"], table()["links"][link]["all_reduce"][str(ranks)], strict=True):
                found = collective_seconds("all_reduce", Wiring(ranks, ranks), size, parse_cluster(cluster))
                assert found.value == pytest.approx(us * 1e-6, rel=1e-9)
                assert found.word == "calibrated"
                assert found.low < found.value < found.high


def test_a_gather_is_counted_by_what_enters_on_a_rank() -> None:
    entered = table()["sizes"][-1] / 8
    us = table()["links"]["nvlink4"]["all_gather"]["8"][-1]
    assert collective_seconds("all_gather", Wiring(8, 8), entered, H200).value == pytest.approx(us * 1e-6)


def test_the_four_node_curve_is_read_back_within_a_third() -> None:
    """The only measured curve across nodes; its shape is scaled, so its own points come back nearly."""
    cluster, reference = parse_cluster("4x8xB200@ib-400g"), table()["across"]
    for size, us in zip(reference["bytes"], reference["us"], strict=True):
        found = collective_seconds("all_reduce", Wiring(32, 8), size, cluster)
        assert found.word == "modelled"
        assert 0.75 < found.value / (us * 1e-6) < 1.34


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"])
@pytest.mark.parametrize(
    ("on", "members", "near"),
    [
        ("1x8xH100-SXM", 6, 6),
        ("4x8xH100-SXM@ib-400g", 32, 8),
        ("1x4xRTX-4090", 4, 4),
        ("9x4xGB200", 36, 4),
        ("2x8xT4", 16, 8),
    ],
)
def test_more_bytes_never_take_less(op: str, on: str, members: int, near: int) -> None:
    cluster = parse_cluster(on)
    sizes = [2.0**e for e in range(38)]
    times = [collective_seconds(op, Wiring(members, near), size, cluster).value for size in sizes]
    assert all(b >= a * 0.7 for a, b in pairwise(times)), "measured curves have dents, but no cliffs"
    assert times[-1] > 10 * times[0] > 0
    assert curve(op, Wiring(members, near), cluster).word == "modelled" or on == "1x4xRTX-4090"


def test_leaving_the_node_and_sharing_a_port_cost() -> None:
    inside = collective_seconds("all_reduce", Wiring(8, 8), 1 << 26, parse_cluster("2x8xH100-SXM@ib-400g")).value
    across = collective_seconds("all_reduce", Wiring(8, 4), 1 << 26, parse_cluster("2x4xH100-SXM@ib-400g")).value
    slow = collective_seconds("all_reduce", Wiring(8, 4), 1 << 26, parse_cluster("2x4xH100-SXM@ib-100g")).value
    assert inside < across < slow
    assert collective_seconds("all_reduce", Wiring(1, 1), 1 << 26, H200) == Seconds(0.0, 0.0, 0.0, "exact")


def test_small_sums_take_the_engines_kernel_large_ones_nccl() -> None:
    wiring = Wiring(8, 8)
    share = 0.5
    small, large = 1 << 14, 1 << 27
    nccl = curve("all_reduce", wiring, H200)
    assert small_all_reduce_seconds(wiring, small, share, H200) < 0.7 * nccl.seconds(small)
    assert small_all_reduce_seconds(wiring, large, share, H200) == nccl.seconds(large)
    pcie = parse_cluster("1x8xL40S")
    assert small_all_reduce_seconds(wiring, small, share, pcie) == curve("all_reduce", wiring, pcie).seconds(small)


def test_the_rack_is_one_domain() -> None:
    rack = parse_cluster("2x4xGB200")
    assert small_all_reduce_seconds(Wiring(8, 4), 1 << 14, 0.5, rack) < curve("all_reduce", Wiring(8, 4), rack).seconds(
        1 << 14
    )


def test_a_roofline_is_above_both_roofs_and_below_their_sum() -> None:
    for moved, flops in ((1e9, 1e6), (1e6, 1e12), (1e9, 3e11)):
        found = roofline(moved, flops, 1e12, 3e14, 4.0)
        reading, computing = moved / 1e12, flops / 3e14
        assert max(reading, computing) <= found <= reading + computing


def test_a_wide_product_reaches_its_efficiency() -> None:
    device = find_device("H100-SXM")
    n = 16384
    op = compute("matmul", "mlp.up", ((n, n), (n, n)), "bf16", 3 * n * n * 2, 2 * n**3)
    peak = device.peak("bf16")
    assert peak is not None
    share = 2 * n**3 / peak / op_seconds(op, device)
    e = efficiency(device, "dense", "bf16")
    assert 0.9 * e.compute < share <= e.compute
    found = op_time(op, device)
    assert found.word == "calibrated"
    assert op_time(op, find_device("A100-80G")).word == "modelled"


def test_weights_without_a_unit_are_unpacked() -> None:
    assert unit_dtype(find_device("H100-SXM"), "fp4") == "bf16"
    assert unit_dtype(find_device("B200"), "fp4") == "fp4"
    assert (
        efficiency(find_device("H100-SXM"), "experts", "fp4").memory
        < efficiency(find_device("H100-SXM"), "experts", "bf16").memory
    )


def test_every_constant_lies_near_its_documented_prior() -> None:
    from meshwright.plan.timing.compute import _file

    for name, entry in _file()["constants"].items():
        assert entry["why"], name
        if entry["spread"]:
            assert abs(log(entry["value"] / entry["prior"])) < 3 * entry["spread"], name
        else:
            assert entry["value"] == entry["prior"], name
    assert len(constants()) < 60


def test_words_and_sums() -> None:
    parts = [spread(1.0, 0.1, "exact"), spread(2.0, 0.2, "modelled")]
    whole = total(parts)
    assert whole.value == 3.0
    assert whole.word == "modelled"
    assert whole.low == pytest.approx(exp(-0.1) + 2 * exp(-0.2))
    assert weakest([]) == "exact"
    assert spread(2.0, 0.1).times(2).high == pytest.approx(4 * exp(0.1))


STEPS = Steps(dec=0.02, low=0.015, prompt=0.1, each=0.08, floor=0.05)
LOAD = Load(running=16, asked=16, isl=1000, osl=500, budget=8192, alone=0.0, lockstep=0.1, cluster=0.0)
HOST = Host(request=0.03, wait=0.5, queue=1.0)


def test_one_user_waits_for_nobody() -> None:
    t = closed_loop(STEPS, LOAD._replace(running=1, asked=1), HOST)
    assert t.tpot == STEPS.dec
    assert t.ttft == pytest.approx(0.1 + 0.01 + 0.03 + 0.1 * t.busy, rel=0.03)


def test_more_users_and_fewer_places_take_longer() -> None:
    times = [closed_loop(STEPS, LOAD._replace(running=n, asked=n), HOST) for n in (1, 4, 16, 64)]
    assert [t.ttft for t in times] == sorted(t.ttft for t in times)
    assert [t.tpot for t in times] == sorted(t.tpot for t in times)
    full = closed_loop(STEPS, LOAD._replace(asked=32), HOST)
    assert full.place_wait == pytest.approx(500 * full.tpot)


def test_lockstep_moves_waiting_from_tokens_to_first_tokens() -> None:
    steady = closed_loop(STEPS, LOAD._replace(alone=1.0), HOST)
    locked = closed_loop(STEPS, LOAD._replace(alone=1.0, lockstep=1.0), HOST)
    assert locked.ttft > steady.ttft
    assert locked.tpot < steady.tpot


def test_formulas_take_arrays() -> None:
    numpy = pytest.importorskip("numpy")
    running = numpy.array([1.0, 16.0, 64.0])
    arrays = closed_loop(STEPS, LOAD._replace(running=running, asked=running), HOST, numpy.maximum, numpy.minimum)
    for i, n in enumerate(running):
        one = closed_loop(STEPS, LOAD._replace(running=float(n), asked=float(n)), HOST)
        assert arrays.ttft[i] == pytest.approx(one.ttft, rel=1e-12)
        assert arrays.tpot[i] == pytest.approx(one.tpot, rel=1e-12)


def test_prefill_limits_the_pools_when_it_is_too_small() -> None:
    few = pools(STEPS, users=64, lanes=1, replicas=2, osl=100, transfer=0.05, host=HOST, lockstep=0.1)
    many = pools(STEPS, users=64, lanes=16, replicas=2, osl=100, transfer=0.05, host=HOST, lockstep=0.1)
    assert few.bound > 0 == many.bound
    assert few.running < many.running
    assert few.ttft > many.ttft
    assert few.tpot <= many.tpot
    # Little's law of the whole loop: users = rate x time inside, and the rate is that of the one lane.
    assert 64 / (few.ttft + 100 * few.tpot) == pytest.approx(1 / STEPS.prompt, rel=0.02)


def test_measured_points_stand_for_the_roofline_of_a_device() -> None:
    """At a point what was measured there, between two of them in between, beyond the last ones as at their ends."""
    given = ((0.5, 1.0, 30e-6, 1e-9), (2.0, 0.25, 50e-6, 0.0), (128.0, 0.9, 0.0, 0.0))
    points = tuple(MeasuredPoint(*point) for point in given)
    device = replace(find_device("H100-SXM"), measured=(MeasuredShare("dense", "bf16", 0.6, 0.8, points),))
    rate, peak = device.bandwidth_bytes_s, peak_flops(device, "bf16")

    def seconds(intensity: float, moved: float = 1e9) -> float:
        return work_seconds(moved, intensity * moved, 4096, device, "dense", "bf16")

    for intensity, share, besides, _ in points:
        best = max(1e9 / rate, intensity * 1e9 / peak)
        assert seconds(intensity) == pytest.approx(best / share + besides)
    assert seconds(1.0) == pytest.approx(1e9 / rate / 0.5 + 40e-6), "the geometric mean of 1 and 0.25"
    assert seconds(0.1) == pytest.approx(seconds(0.5))
    more = work_seconds(1e9, 0.5e9, 4096, device, "dense", "bf16", outputs=1e6)
    assert more == pytest.approx(seconds(0.5) + 1e6 * 1e-9)
    assert work_seconds(0.0, 0.0, 0, device, "dense", "bf16") == 0.0


def test_points_are_fitted_to_measured_shapes_and_kept_by_the_file(tmp_path: Path) -> None:
    """Products that reach half of the bandwidth and take 40 us besides, and 80 ns for each output: a wide one takes
    longer than a narrow one of as many bytes. Many rows reach all of the peak."""
    flops, rate = 50e9, 20e9
    samples = []
    for m, share, besides, output in ((1, 0.5, 40e-6, 80e-9), (4096, 1.0, 0.0, 0.0)):
        for k, n in ((256, 256), (256, 1024), (1024, 256), (1024, 1024), (4096, 4096)):
            moved, work = 4 * (m * k + k * n + m * n), 2 * m * k * n
            best = max(moved / rate, work / flops)
            took = best / share + besides + output * m * n
            samples.append(Sample("matmul", "f32", None, (m, k, n), best / took, took))
    c = Calibration("a test", 1, {"f32": flops}, rate, work=tuple(samples))
    cluster = measured_cluster(parse_cluster("1xH100-SXM"), c)
    (found,) = cluster.device.measured
    near = functools.partial(pytest.approx, rel=1e-3)
    assert found.points[0] == (0.5, near(0.5), near(40e-6), near(80e-9))
    assert found.points[-1][1:] == (near(1.0), pytest.approx(0.0, abs=1e-7), pytest.approx(0.0, abs=1e-12))
    write(cluster, c, tmp_path / "here.toml")
    assert parse_cluster(str(tmp_path / "here.toml")).device.measured == cluster.device.measured
    bad = (tmp_path / "here.toml").read_text().replace('"points" = [[0.5, ', '"points" = [[1e9, ')
    (tmp_path / "bad.toml").write_text(bad)
    with pytest.raises(InputError, match="ascend"):
        parse_cluster(str(tmp_path / "bad.toml"))

"""nccl-tests output of several versions and operations: ranks, operation, payload and time; bad text in one line."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.ledger.calibrate import transfers_of
from meshwright.ledger.nccl_tests import looks_so, read

HEAD = "# nThread 1 nGpus 1 minBytes 8 maxBytes 134217728 step: 8(factor)\n#\n# Using devices\n"


def output(
    ranks: int, factor: float, redop: str = "sum", *, root: bool = True, hosts: int = 1, prefix: str = ""
) -> str:
    """A run of three sizes: 20 us and 100 GB/s."""
    lines = HEAD.splitlines()
    for r in range(ranks):
        host = f"node-{r * hosts // ranks}"
        lines.append(f"#  Rank {r:2d} Group  0 Pid  31{r:03d} on {host:>10} device  {r} [0x1b] NVIDIA H100 80GB HBM3")
    lines += ["#       size         count      type   redop    root     time   algbw   busbw #wrong"]
    for size in (8192, 1 << 20, 1 << 28):
        us = 20 + size / 100e9 * 1e6
        alg = size / us / 1e3
        part = f"{us:.2f} {alg:.2f} {alg * factor:.2f} 0"
        at = "    -1" if root else ""
        lines.append(f"{size:12d} {size // 4:12d}     float  {redop:>6} {at} {part} {part}")
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 41.7"]
    return "\n".join(prefix + line for line in lines)


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("prefix", ["", "[1,0]<stdout>:"])
def test_all_reduce_is_told_by_its_bandwidths(root: bool, prefix: str) -> None:
    text = output(8, 2 * 7 / 8, root=root, prefix=prefix)
    assert looks_so(text)
    ledger = read(text, "log.txt")
    assert (ledger.meta["ranks"], ledger.meta["nodes"], ledger.meta["device"]) == ("8", "1", "NVIDIA H100 80GB HBM3")
    (found,) = transfers_of(ledger)
    assert (found.op, found.ranks, [size for size, _ in found.knots]) == ("all_reduce", 8, [8192, 1 << 20, 1 << 28])
    assert found.latency_s == pytest.approx(20e-6, rel=0.02)
    assert found.bandwidth_bytes_s == pytest.approx(100e9, rel=0.02)
    assert found.error < 0.02


def test_of_a_gather_the_piece_counts() -> None:
    ledger = read(output(4, 3 / 4, "none"), "all_gather.txt")
    assert {(e.op, e.payload_bytes) for e in ledger.entries} == {
        ("all_gather", s // 4) for s in (8192, 1 << 20, 1 << 28)
    }


def test_several_runs_and_nodes() -> None:
    named = "# Collective test starting: alltoall_perf\n" + output(8, 7 / 8, "none", hosts=2)
    ledger = read(output(4, 3 / 4) + "\n" + named.replace(HEAD, "") + "\n", "x.log")
    assert {e.op for e in ledger.entries} >= {"reduce_scatter"}
    two = read(named, "x.log")
    assert (two.meta["nodes"], {e.op for e in two.entries}, {e.group for e in two.entries}) == (
        "2",
        {"all_to_all"},
        {"8x2"},
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("algbw busbw", "no row with a time"),
        (output(4, 3 / 4, "none"), "name the file after it"),
        ("\n".join(line for line in output(1, 1.0).splitlines() if "Rank" not in line), "Rank  0"),
    ],
)
def test_bad_output_is_one_line(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as error:
        read(text, "log.txt")
    assert "\n" not in str(error.value)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_output_never_breaks_the_reader(data: st.DataObject) -> None:
    text = output(4, 1.5)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(text)))
        junk = data.draw(st.sampled_from(["", "\0", "-1", "nan", "inf", "9" * 30, "\n#", "  Rank ", "\x1b["]))
        text = text[:at] + junk + text[at + data.draw(st.integers(0, 40)) :]
    try:
        ledger = read(text, "log.txt")
    except InputError:
        return
    assert all(e.payload_bytes and e.ended_ns and e.ended_ns > 0 for e in ledger.entries)

"""NCCL Inspector files: the last to arrive has the shortest time; a communicator slower than its like is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from meshwright.doctor.findings import Finding
from meshwright.doctor.judge import judge
from meshwright.doctor.readers.walk import read_incident


def found(folder: Path, took_us: Callable[[str, int, int], int], groups: tuple[str, ...] = ("0xa",)) -> Finding:
    for rank in range(4):
        rows = []
        for group in groups:
            for number in range(1, 11):
                perf = {"coll": "AllReduce", "coll_sn": number, "coll_msg_size_bytes": 1 << 26}
                perf |= {"coll_exec_time_us": took_us(group, rank, number)}
                meta = {"dump_timestamp_us": 1_748_030_377_000_000 + number, "hostname": f"n{group}", "pid": 9}
                header = {"id": group, "rank": rank, "n_ranks": 4, "nnodes": 1}
                rows.append({"header": header, "metadata": meta, "coll_perf": perf})
        (folder / f"r{rank}.log").write_text("\n".join(json.dumps(r, indent=1) for r in rows))
    return judge(read_incident(folder))[0]


def test_the_shortest_time_is_of_the_last_to_arrive(tmp_path: Path) -> None:
    finding = found(tmp_path, lambda group, rank, number: 1000 if rank == 2 else 9000)
    assert (finding.kind, finding.guilty_ranks, finding.waiting_ranks) == ("compute_straggler", (2,), (0, 1, 3))
    numbers = dict(finding.numbers)
    assert abs(numbers["wait_s"] - 0.008) < 1e-6
    assert abs(numbers["own_s"] - 0.001) < 1e-6


def test_a_slow_communicator(tmp_path: Path) -> None:
    speeds = {"0xa": 1000, "0xb": 1010, "0xc": 4000}
    finding = found(tmp_path, lambda group, rank, number: speeds[group] + (rank + number) % 4, tuple(speeds))
    assert (finding.kind, finding.group) == ("slow_link", "0xc")
    assert abs(dict(finding.numbers)["share"] - 0.25) < 0.02
    assert "n0xc" in finding.headline


def test_even_ones_are_healthy(tmp_path: Path) -> None:
    finding = found(tmp_path, lambda group, rank, number: 1000 + (rank * number) % 5)
    assert finding.kind == "healthy"
    assert "all_reduce 101 GB/s" in finding.headline


def test_places_in_a_communicator_become_ranks_of_the_job(tmp_path: Path) -> None:
    """Two of four ranks in a communicator of their own: the process of its place 1 is rank 3 in that of all ranks."""
    for rank in range(4):
        rows = []
        for group, place, count in (("0xall", rank, 4), *((("0xpair", rank - 2, 2),) if rank > 1 else ())):
            for number in range(1, 11):
                late = group == "0xpair" and rank == 3
                perf = {"coll": "AllGather", "coll_sn": number, "coll_msg_size_bytes": 1 << 24}
                perf |= {"coll_exec_time_us": 1000 if late or group == "0xall" else 9000}
                meta = {"dump_timestamp_us": 1_748_030_377_000_000 + number, "hostname": "n", "pid": 50 + rank}
                header = {"id": group, "rank": place, "n_ranks": count, "nnodes": 1}
                rows.append({"header": header, "metadata": meta, "coll_perf": perf})
        (tmp_path / f"{'wxyz'[rank]}.log").write_text("\n".join(json.dumps(r) for r in rows))
    finding = judge(read_incident(tmp_path))[0]
    assert (finding.kind, finding.guilty_ranks, finding.waiting_ranks) == ("compute_straggler", (3,), (2,))
    assert finding.headline.startswith("rank 3 of communicator 0xpair comes last in 10 of 10")


def test_bus_bandwidth_of_pieces(tmp_path: Path) -> None:
    """The Inspector counts the piece of a rank: its own example, 2 GiB of eight ranks in 41,057 us, is 366 GB/s."""
    for rank in range(8):
        perf = {"coll": "ReduceScatter", "coll_sn": 1231, "coll_msg_size_bytes": 2147483648, "coll_exec_time_us": 41057}
        row = {"header": {"id": "0xe", "rank": rank, "n_ranks": 8}, "metadata": {"pid": rank}, "coll_perf": perf}
        (tmp_path / f"{rank}.log").write_text(json.dumps(row))
    assert "reduce_scatter 366 GB/s" in judge(read_incident(tmp_path))[0].headline

"""NCCL's own output: init, transports, warnings, the order of calls; RAS, Inspector and metrics."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from meshwright.doctor.readers.walk import read_incident
from tests.doctor import log_maker as make
from tests.doctor.test_readers_lines import of, read
from tests.shared import shared_dir

RAS_TEXT = """
Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (2.05s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4       7-8        32        32   RUNNING  INCOMPLETE
    1         8         4         1         4        32   RUNNING  MISMATCH

Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 10.0.0.3 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21

Warnings
========

#1-3 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  3 ranks have launched up to operation 6650
  1 rank has launched up to operation 6649
  Rank 2 -- GPU 2 managed by process 483074 on node 10.0.0.1
"""


def test_world_ranks_transports_and_networks(tmp_path: Path) -> None:
    incident = read(tmp_path, make.interleave([make.nccl_lines(r, 8) for r in range(8)]))
    assert incident.world == 8
    assert {f.rank for f in of(incident, "comm_init") if f.data["stage"] == "complete"} == set(range(8))
    channels = [f for f in of(incident, "nccl_info") if f.data["topic"] == "channel"]
    assert {(f.rank, f.data["transport"], f.data["channels"]) for f in channels} == {
        (r, "SHM/direct", 2) for r in range(8)
    }
    topics = {(str(f.data["topic"]), f.data.get("network")) for f in of(incident, "nccl_info")}
    assert {("network", "Socket"), ("ib", None)} <= topics
    assert {f.data["value"] for f in of(incident, "env")} == {"2.27.3+cuda12.8"}


def test_init_that_some_ranks_never_finish(tmp_path: Path) -> None:
    lines = [line for r in range(4) for line in make.nccl_lines(r, 4) if r % 2 == 0 or "COMPLETE" not in line]
    stages = {(f.rank, f.data["stage"]) for f in of(read(tmp_path, lines), "comm_init")}
    assert stages == {(0, "start"), (1, "start"), (2, "start"), (3, "start"), (0, "complete"), (2, "complete")}


def test_order_of_calls_becomes_traces(tmp_path: Path) -> None:
    calls = [("AllReduce", 1024), ("AllGather", 16), ("AllReduce", 8)]
    streams = [make.nccl_lines(r, 4, calls[: 2 if r == 3 else 3]) for r in range(4)]
    incident = read(tmp_path, make.interleave(streams))
    assert {r: len(t) for r, t in incident.traces.items()} == {0: 3, 1: 3, 2: 3, 3: 2}
    trace = incident.traces[1]
    signatures = [incident.signatures[s] for s in trace.signature]
    assert [(s.op, s.shapes_in, s.dtype) for s in signatures] == [
        ("all_reduce", ((1024,),), "Float"),
        ("all_gather", ((16,),), "Float"),
        ("all_reduce", ((8,),), "Float"),
    ]
    assert incident.groups[trace.group[0]].members == (0, 1, 2, 3)
    assert (list(trace.seq), trace.settled, trace.recorder) == ([0, 1, 2], False, "nccl_log")


def test_calls_of_subgroups_by_their_communicator(tmp_path: Path) -> None:
    lines = []
    for rank in range(4):
        lines += make.nccl_lines(rank, 4)
        head = f"node0:{9000 + rank}:{9100 + rank} [{rank}] NCCL INFO "
        pair = f"comm 0x77{rank} rank {rank % 2} nranks 2 cudaDev {rank} nvmlDev {rank} busId 1 commId 0xfee{rank // 2}"
        lines += [
            f"{head}ncclCommSplit {pair} - Init COMPLETE",
            f"{head}Broadcast: opCount 0 sendbuff 0x1 recvbuff 0x2 count 5 datatype 9 op 0 root 1 comm 0x77{rank} "
            "[nranks=2] stream 0x5",
        ]
    incident = read(tmp_path, lines)
    groups = {r: incident.groups[t.group[0]].members for r, t in incident.traces.items()}
    assert groups == {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    signature = incident.signatures[incident.traces[0].signature[0]]
    assert (signature.op, signature.peer, signature.dtype) == ("broadcast", 1, "BFloat16")


def test_calls_without_init_lines_are_said_to_be_nobodys(tmp_path: Path) -> None:
    lines = [line for line in make.nccl_lines(0, 2, [("AllReduce", 1)]) if "opCount" in line]
    incident = read(tmp_path, lines)
    assert not incident.traces
    assert any("NCCL_DEBUG_SUBSYS=INIT,COLL" in line for line in incident.lacks)


@pytest.mark.parametrize(
    ("text", "kind", "hint"),
    [
        ("Error: failed to extend /dev/shm/nccl-a to 9637892 bytes, error: No space left on device (28)", "shm", "shm"),
        (
            "NET/IB : Got completion from peer 10.0.0.2<1> with status=12 opcode=0 len=0 vendor err 129",
            "nccl_warn",
            "ib",
        ),
        ("Bootstrap : no socket interface found", "nccl_warn", "interface"),
        ("Message truncated : received 524288 bytes instead of 65536", "nccl_warn", "size_mismatch"),
        ("Duplicate GPU detected : rank 27 and rank 19 both on CUDA device 53000", "nccl_warn", "duplicate_gpu"),
        ("socketProgress: Connection closed by remote peer gpu-03<1>", "nccl_warn", "peer_gone"),
        ("Cuda failure 'an illegal memory access was encountered'", "nccl_warn", "cuda"),
    ],
)
def test_warnings(tmp_path: Path, text: str, kind: str, hint: str) -> None:
    line = f"[2026-03-04 05:06:07] node0:9002:9102 [2] misc/x.cc:72 (ncclX) NCCL WARN {text}"
    (fact,) = of(read(tmp_path, [*make.nccl_lines(2, 4), "", line]), kind)
    assert (fact.rank, fact.data["hint"]) == (2, hint)
    assert bool(fact.data.get("consequence")) == (hint == "peer_gone")


def test_ras_text(tmp_path: Path) -> None:
    (tmp_path / "ras.txt").write_text(RAS_TEXT)
    incident = read_incident(tmp_path)
    (missing,) = of(incident, "ras_missing")
    assert (missing.rank, missing.data["comm_id"], incident.world) == (21, "cf264af53edbe986", 32)
    (process,) = of(incident, "ras_process")
    assert (process.data["pid"], process.data["dead"]) == (3487984, True)
    (counts,) = of(incident, "ras_counts")
    assert (counts.data["behind"], counts.data["counts"], counts.data["whole_job"]) == (
        [2],
        {"6650": 3, "6649": 1},
        False,
    )
    assert counts.rank is None


def test_ras_json_and_monitor(tmp_path: Path) -> None:
    def row(rank: int, count: int) -> dict[str, object]:
        return {
            "rank": rank,
            "pid": 100 + rank,
            "status": {"async_error": 0},
            "collective_counts": {"AllReduce": count},
        }

    status = {"unresponsive": True, "considered_dead": False}
    comm = {"hash": "0xae", "size": 4, "ranks": [row(0, 9), row(1, 9), row(2, 8)]}
    comm["missing_ranks"] = [{"rank": 3, "host": "h", "pid": 103, "status": status}]
    answer = {
        "nccl_version": "2.29.1",
        "timestamp": "2026-03-04 05:06:07",
        "communicators_count": 1,
        "communicators": [comm],
    }
    (tmp_path / "a.json").write_text(json.dumps(answer, indent=2))
    event = {
        "timestamp": "2026-03-04 05:06:09",
        "event": "PEER_DEAD",
        "peer": {"host": "h", "pid": 103, "cuda_devs": [1]},
    }
    (tmp_path / "b.json").write_text(json.dumps(event) + "\n" + json.dumps(event))
    incident = read_incident(tmp_path)
    assert [(f.rank, f.data["dead"]) for f in of(incident, "ras_missing")] == [(3, False)]
    assert [(f.data["behind"], f.data["op"]) for f in of(incident, "ras_counts")] == [([2], "AllReduce")]
    assert [f.data["event"] for f in of(incident, "ras_process")] == ["PEER_DEAD"] * 2


def test_inspector_keeps_the_last_of_each_rank(tmp_path: Path) -> None:
    rows = []
    for rank in range(4):
        for seq in range(100 if rank != 2 else 97):
            perf = {"coll": "AllReduce", "coll_sn": seq, "coll_msg_size_bytes": 1 << 20, "coll_exec_time_us": 50 + seq}
            meta = {"dump_timestamp_us": 1_772_600_000_000_000 + seq, "hostname": "h", "pid": 7 + rank}
            rows.append(
                json.dumps({"header": {"id": "0x7f", "rank": rank, "n_ranks": 4}, "metadata": meta, "coll_perf": perf})
            )
    (tmp_path / "x.log").write_text("\n".join(rows))
    found = {f.rank: f.data for f in of(read_incident(tmp_path), "inspector")}
    assert {r: d["seq"] for r, d in found.items()} == {0: 99, 1: 99, 2: 96, 3: 99}
    assert (found[2]["operations"], found[2]["slowest_us"], found[2]["size_bytes"]) == (97, 146, 1 << 20)


@pytest.mark.parametrize("hung", [(), (0, 2, 5), tuple(range(8))])
def test_metrics_of_a_hang(tmp_path: Path, hung: tuple[int, ...]) -> None:
    lines = ["# HELP x y", "# TYPE XPU_TIMER_COMMON_HANG gauge"]
    lines += [f'XPU_TIMER_COMMON_HANG{{ip="10.0.0.1",local_rank="{r}",rank="{r}"}} {int(r in hung)}' for r in range(8)]
    found = of(read(tmp_path, lines, "m.prom"), "metric")
    assert {f.rank for f in found} == set(range(8))
    assert {f.rank for f in found if f.data.get("hung")} == set(hung)


@pytest.mark.parametrize(("name", "count"), [("all", 8), ("some", 3), ("0", 0)])
def test_stored_metrics(tmp_path: Path, name: str, count: int) -> None:
    shutil.copy(shared_dir("incidents", "xpu_timer", f"xpu_timer_metric_{name}.prom"), tmp_path / "dump.bin")
    found = of(read_incident(tmp_path), "metric")
    assert len({f.rank for f in found if f.data.get("hung")}) == count


def test_stored_ras_examples(tmp_path: Path) -> None:
    """The excerpts of NCCL's own documentation, taken out of its page."""
    page = shared_dir("incidents", "nccl_formats", "ras.rst").read_text()
    start = page.index('{\n    "nccl_version"')
    (tmp_path / "q").write_text(page[start : page.index("\n\nAs can be observed", start)])
    shutil.copy(shared_dir("incidents", "nccl_formats", "ras.rst"), tmp_path / "r")
    incident = read_incident(tmp_path)
    assert {(f.rank, f.data["nranks"]) for f in of(incident, "ras_missing")} == {(1, 2), (21, 32)}
    (counts,) = of(incident, "ras_counts")
    assert counts.data["behind"] == [0, 2, 3, 4, 5, 7]
    assert any(f.data.get("event") == "PEER_DEAD" for f in of(incident, "ras_process"))

"""Hang logs of real cases, rebuilt: what a reader must take out of each so that the cause can be told.

Figures are those of ``cases.csv`` (C...) and of ``real_hangs.md`` in the shared data; the lines are made here.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

from tests.doctor import log_maker as make
from tests.doctor.test_readers_lines import of, read
from tests.shared import shared_dir


def figures(case: str) -> list[int]:
    """The numbers that the table gives for a case."""
    with shared_dir("cases", "cases.csv").open(newline="") as table:
        row = next(row for row in csv.DictReader(table) if row["id"] == case)
    return [int(word.replace(",", "")) for word in re.findall(r"\d[\d,]*", row["numbers"])]


def test_first_collective_of_one_element_on_every_rank(tmp_path: Path) -> None:
    """C101: TP=2, the very first all_reduce times out: nobody is behind, nothing ever completed."""
    seq, numel, timeout, completed = figures("C101")
    lines = make.interleave([make.watchdog_lines("2.6", r, seq=seq, numel=numel, enqueued=seq) for r in range(2)])
    incident = read(tmp_path, lines)
    timeouts = of(incident, "watchdog_timeout")
    assert {(f.rank, f.data["seq"], f.data["numel_in"], f.data["timeout_ms"]) for f in timeouts} == {
        (r, seq, numel, timeout) for r in range(2)
    }
    assert {f.data["last_completed"] for f in of(incident, "pg_status")} == {completed}


def test_start_up_of_a_training_job(tmp_path: Path) -> None:
    """C107: SeqNum=5 of one element at start-up, in the form of torch 2.1 without a global rank."""
    seq, numel = figures("C107")
    (fact,) = of(read(tmp_path, make.watchdog_lines("2.1", 0, seq=seq, numel=numel)), "watchdog_timeout")
    assert (fact.data["seq"], fact.data["numel_in"], fact.data["rank_from"]) == (seq, numel, "place in group")


def test_ranks_one_collective_apart(tmp_path: Path) -> None:
    """C106: rank 0 waits at 5730 and rank 3 at 5729 in a broadcast of 16 ranks."""
    ahead, behind, numel = figures("C106")
    lines = make.watchdog_lines("2.6", 0, seq=ahead, op="BROADCAST", numel=numel)
    lines += make.watchdog_lines("2.6", 3, seq=behind, op="BROADCAST", numel=numel)
    found = of(read(tmp_path, make.interleave([lines[:2], lines[2:]])), "watchdog_timeout")
    assert {(f.rank, f.data["op"], f.data["seq"]) for f in found} == {(0, "broadcast", ahead), (3, "broadcast", behind)}


def test_a_number_after_a_week(tmp_path: Path) -> None:
    """C104: numbers of seven digits after seven days."""
    (seq,) = figures("C104")
    (fact,) = of(read(tmp_path, make.watchdog_lines("2.1", 2, seq=seq)), "watchdog_timeout")
    assert fact.data["seq"] == seq


def test_two_ranks_on_one_device(tmp_path: Path) -> None:
    """C272: ranks 27 and 19 on one PCI device; NCCL says so itself."""
    text = "Duplicate GPU detected : rank 27 and rank 19 both on CUDA device 53000"
    (fact,) = of(read(tmp_path, [f"node2:99:101 [3] init.cc:872 (ncclX) NCCL WARN {text}"]), "nccl_warn")
    assert (fact.data["hint"], fact.rank) == ("duplicate_gpu", None)


def test_init_that_odd_ranks_never_finish(tmp_path: Path) -> None:
    """C275: TP8 over two nodes, even local ranks finish the init, odd ones block in it."""
    streams = [[x for x in make.nccl_lines(r, 8) if r % 2 == 0 or "COMPLETE" not in x] for r in range(8)]
    facts = of(read(tmp_path, make.interleave(streams)), "comm_init")
    done = {f.rank for f in facts if f.data["stage"] == "complete"}
    assert {f.rank for f in facts if f.data["stage"] == "start"} - done == {1, 3, 5, 7}


def test_meeting_of_two_of_eight(tmp_path: Path) -> None:
    """C279: data-parallel engines dial their own loopback, two of eight clients come."""
    joined, expected, seconds = figures("C279")[:3]
    reason = f"Timed out after {seconds} seconds waiting for clients. {joined}/{expected} clients joined."
    error = f"torch.distributed.DistStoreError: {reason}"
    (fact,) = of(read(tmp_path, make.traceback_lines(error, [("main", "/w/serve.py", 3)])), "rendezvous")
    assert (fact.data["joined"], fact.data["expected"]) == (joined, expected)


def test_the_silent_rank_of_eight(tmp_path: Path) -> None:
    """real_hangs 3: seven ranks enqueued 59998, rank 7 stands at 59957 and prints no time-out of its own."""
    streams = [[*make.watchdog_lines("2.6", r), make.dump_signal_line(r, None, 59998, 59957)] for r in range(7)]
    streams.append([make.dump_signal_line(7, 3, 59957, 59957)])
    incident = read(tmp_path, make.interleave(streams))
    assert {f.rank for f in of(incident, "watchdog_timeout")} == set(range(7))
    counts = {f.rank: f.data["last_enqueued"] for f in of(incident, "dump_signal")}
    assert counts == {**dict.fromkeys(range(7), 59998), 7: 59957}


def test_three_operations_at_one_place(tmp_path: Path) -> None:
    """real_hangs 15: the desync is plain from three ranks' logs alone."""
    calls = [("BROADCAST", 64), ("BROADCAST", 24_000_000), ("ALLREDUCE", 8)]
    streams = [make.watchdog_lines("2.5", r, seq=9, op=op, numel=n) for r, (op, n) in enumerate(calls)]
    found = of(read(tmp_path, make.interleave(streams)), "watchdog_timeout")
    assert {(f.rank, f.data["op"], f.data["numel_in"]) for f in found} == {
        (0, "broadcast", 64),
        (1, "broadcast", 24_000_000),
        (2, "all_reduce", 8),
    }


def test_rank_killed_while_others_time_out(tmp_path: Path) -> None:
    """real_hangs 22: the kernel took a rank; the time-outs of the others are only what follows."""
    streams = [make.watchdog_lines("2.6", r) for r in range(7)]
    (tmp_path / "syslog").write_text(
        "Mar  4 04:56:00 gpu-03 kernel: Out of memory: Killed process 14750 (python) anon-rss:9kB\n"
    )
    incident = read(tmp_path, [*make.interleave(streams), *make.torchrun_table(7, 7, 14750, -9)])
    (oom,) = of(incident, "oom")
    assert oom.rank == 7
    timeouts = of(incident, "watchdog_timeout")
    assert oom.at is not None
    assert all(f.at is not None and f.at > oom.at for f in timeouts)

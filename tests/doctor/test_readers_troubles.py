"""Deaths, memory, gloo, launchers: which rank, what it was, and what merely follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doctor import log_maker as make
from tests.doctor.test_readers_lines import of, read


def test_device_out_of_memory(tmp_path: Path) -> None:
    error = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 2 has a total capacity of 79 GiB"
    )
    incident = read(tmp_path, make.traceback_lines(error, [("main", "/w/t.py", 9)], 2))
    (fact,) = of(incident, "oom")
    assert (fact.rank, fact.data["scope"], fact.data["gpu"]) == (2, "device", 2)
    assert fact.data["tried_bytes"] == int(2.5 * 2**30)
    assert of(incident, "exception")[0].data["call_site"] == "/w/t.py:9"


@pytest.mark.parametrize(
    "line",
    [
        "kernel: [12345.678901] Out of memory: Killed process 14750 (python) total-vm:1kB, anon-rss:2048kB",
        "kernel: Memory cgroup out of memory: Killed process 14750 (python) total-vm:1kB, anon-rss:2048kB",
        "[12345.678901] Out of memory: Killed process 14750, UID 1000, (python) total-vm:1kB, anon-rss:2048kB",
    ],
)
def test_oom_killer_names_a_pid_that_torchrun_knows(tmp_path: Path, line: str) -> None:
    (tmp_path / "dmesg.txt").write_text(f"Mar  4 05:06:00 gpu-03 {line}\n")
    incident = read(tmp_path, make.torchrun_table(13, 5, 14750, -9))
    (fact,) = of(incident, "oom")
    assert (fact.rank, fact.data["scope"], fact.data["resident_bytes"]) == (13, "host", 2048 * 1024)
    assert fact.data["cgroup"] is ("cgroup" in line)
    table = [f for f in of(incident, "killed") if f.data.get("launcher") == "torchrun"]
    assert [(f.rank, f.data["signal"], f.data["host"], f.data["first_observed"]) for f in table] == [
        (13, "SIGKILL", "gpu-03", True)
    ]


@pytest.mark.parametrize(
    ("code", "name"), [(-9, "SIGKILL"), (-11, "SIGSEGV"), (-7, "SIGBUS"), (-6, "SIGABRT"), (-15, "SIGTERM")]
)
def test_torchrun_table(tmp_path: Path, code: int, name: str) -> None:
    agent = (
        f"E0304 05:06:07.620000 2606 site-packages/torch/distributed/elastic/multiprocessing/api.py:869] failed "
        f"(exitcode: {code}) local_rank: 5 (pid: 14750) of binary: /usr/bin/python"
    )
    found = of(read(tmp_path, [agent, *make.torchrun_table(13, 5, 14750, code, name)]), "killed")
    assert {f.rank for f in found} == {13}, "the agent's line has no rank; the table's pid gives it"
    assert {f.data["signal"] for f in found} == {name}
    assert all(bool(f.data.get("consequence")) == (name in ("SIGABRT", "SIGTERM")) for f in found)


def test_ordinary_exit_is_not_a_death(tmp_path: Path) -> None:
    incident = read(tmp_path, make.torchrun_table(3, 3, 99, 1))
    assert not of(incident, "killed")
    (fact,) = of(incident, "exited")
    assert (fact.rank, fact.data["exitcode"]) == (3, 1)


@pytest.mark.parametrize("tag", ["bare", "wall clock", "compose", "cri"])
def test_table_behind_tags(tmp_path: Path, tag: str) -> None:
    found = of(read(tmp_path, make.tagged(tag, 0, make.torchrun_table(6, 2, 77, -9))), "killed")
    assert [f.rank for f in found if f.data.get("launcher")] == [6]


def test_table_and_crash_as_torch_2_13_prints_them(tmp_path: Path) -> None:
    """The crash and its stack carry no tag; the rank that was only told to end does."""
    crash = [
        "Fatal Python error: Segmentation fault",
        "",
        "Current thread 0x00007f3517c96b80 (most recent call first):",
    ]
    crash += ['  File "/w/t.py", line 11 in <module>', ""]
    table = [
        line.replace("(pid: 20694)", "(pid: 20694)  (SIGSEGV)")
        for line in make.torchrun_table(1, 1, 20694, -11, "SIGSEGV")
    ]
    incident = read(tmp_path, [*crash, "[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:60615", *table])
    ranks = {(f.kind, f.rank) for f in incident.facts}
    assert {("killed", 1), ("stack", None), ("gloo_error", 0)} <= ranks
    assert ("killed", 0) not in ranks


def test_table_across_a_piece_of_the_file(tmp_path: Path) -> None:
    from meshwright.doctor.readers.text import PIECE

    table = make.text(make.torchrun_table(13, 5, 14750, -9))
    at = table.index(b"  exitcode")
    for before in (at, at + 3, at - 20):
        (tmp_path / "job.log").write_bytes(b"x" * 99 + b"\n" + b"y" * (PIECE - 101 - before) + b"\n" + table)
        found = of(read(tmp_path, ["z"], "other.log"), "killed")
        assert 13 in {f.rank for f in found}


def test_other_launchers(tmp_path: Path) -> None:
    lines = [
        "mpirun noticed that process rank 3 with PID 0 on node gpu-01 exited on signal 9 (Killed).",
        "srun: error: node3: task 5: Out Of Memory",
        *make.traceback_lines(
            "torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated with signal SIGSEGV",
            [("main", "/w/t.py", 1)],
        ),
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been OOM Killed.",
        "ray.exceptions.WorkerCrashedError: The worker died unexpectedly while executing this task. Worker PID: 4242",
    ]
    incident = read(tmp_path, lines)
    found = {f.source.rsplit(":", 1)[1]: f for f in of(incident, "killed")}
    assert (found["1"].rank, found["1"].data["signal"]) == (3, "SIGKILL")
    assert (found["2"].data["tasks"], found["2"].data["out_of_memory"]) == ("5", True)
    assert (found["6"].data["local_rank"], found["6"].data["signal"]) == (2, "SIGSEGV")
    assert found["8"].data["pid"] == 4242
    assert [f.source.rsplit(":", 1)[1] for f in of(incident, "oom")] == ["7"]


def test_gloo_errors_are_consequences_but_for_sizes(tmp_path: Path) -> None:
    where = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534]"
    lines = [
        f"[rank0]: RuntimeError: {where} Connection closed by peer [10.0.0.2]:2345",
        f"[rank1]: RuntimeError: {where} Timed out waiting 6000ms for recv operation to complete",
        "[rank2]: what():  [enforce fail at ../gloo/pair.cc:446] op.preamble.length <= op.nbytes. 8192 vs 4096",
        f"[rank3]: RuntimeError: {where} Gloo connectFullMesh failed with Connection refused",
    ]
    incident = read(tmp_path, lines)
    found = {f.rank: f.data for f in of(incident, "gloo_error")}
    assert [found[r]["error"] for r in range(4)] == ["closed_by_peer", "timed_out", "size_mismatch", "connect_failed"]
    assert [bool(found[r].get("consequence")) for r in range(4)] == [True, True, False, False]
    assert (found[0]["peer"], found[1]["wait_ms"], found[2]["sizes"]) == ("10.0.0.2", 6000, [8192, 4096])
    assert {f.rank: bool(f.data.get("consequence")) for f in of(incident, "exception")} == {0: True, 1: True, 3: False}


def test_lost_gpu_and_program_fault(tmp_path: Path) -> None:
    lines = [
        "Mar  4 05:06:00 gpu-03 kernel: NVRM: Xid (PCI:0000:53:00): 79, pid='<unknown>', GPU has fallen off the bus.",
        "Mar  4 05:06:00 gpu-03 kernel: NVRM: Xid (PCI:0000:53:00): 31, pid=4242, Ch 00000008, MMU Fault",
    ]
    lost, fault = sorted(of(read(tmp_path, lines), "xid"), key=lambda f: -int(str(f.data["xid"])))
    assert (lost.data["xid"], lost.data["lost_gpu"], lost.data["host"]) == (79, True, "gpu-03")
    assert (fault.data["xid"], fault.data["lost_gpu"], fault.data["pid"]) == (31, False, 4242)


def test_meeting_that_failed(tmp_path: Path) -> None:
    lines = ["torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 2/8 clients joined."]
    (fact,) = of(read(tmp_path, lines), "rendezvous")
    assert (fact.data["joined"], fact.data["expected"]) == (2, 8)


def test_shared_memory(tmp_path: Path) -> None:
    lines = [
        "RuntimeError: DataLoader worker (pid 5) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory. Please try to raise your shared memory limit.",
        "host:1:2 [0] misc/shmutils.cc:72 (ncclShmOpen) NCCL WARN Error: failed to extend /dev/shm/nccl-abc to 9 bytes",
        "INFO 03-04 05:06:07 [shm_broadcast.py:466] No available shared memory broadcast block found in 60 seconds.",
    ]
    incident = read(tmp_path, lines)
    assert len(of(incident, "shm")) == 2
    assert len(of(incident, "engine_wait")) == 1


def test_quiet_log_says_nothing(tmp_path: Path) -> None:
    lines = [
        f"2026-03-04 05:06:{i % 60:02d},000 INFO step {i} loss 0.1, errors 0, exit of the loop in {i} steps"
        for i in range(2000)
    ]
    incident = read(tmp_path, lines)
    assert not incident.facts
    assert not incident.lacks


def test_environment_differs(tmp_path: Path) -> None:
    for rank, name in ((0, "eth0"), (1, "ib0")):
        lines = [f"NCCL_SOCKET_IFNAME={name}", "NCCL_API_KEY=s3cret", "HF_TOKEN=s3cret", "PyTorch version: 2.13.0+cpu"]
        (tmp_path / f"env_rank{rank}.txt").write_bytes(make.text(lines))
    incident = read(tmp_path, ["x"])
    values = {(f.rank, f.data["name"]): f.data["value"] for f in of(incident, "env")}
    assert values[0, "NCCL_SOCKET_IFNAME"] == "eth0"
    assert values[1, "NCCL_SOCKET_IFNAME"] == "ib0"
    assert values[0, "torch_version"] == "2.13.0+cpu"
    assert not any("s3cret" in f.text or "s3cret" in str(f.data) for f in incident.facts)

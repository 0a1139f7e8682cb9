"""Lines of watchdogs in every generation, behind every launcher's tag, from many ranks in one file."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from meshwright.doctor.incident import Fact, Incident
from meshwright.doctor.readers.clock import Clock
from meshwright.doctor.readers.prefix import peel
from meshwright.doctor.readers.walk import read_incident
from tests.doctor import log_maker as make


def read(tmp_path: Path, lines: list[str], name: str = "job.log") -> Incident:
    (tmp_path / name).write_bytes(make.text(lines))
    return read_incident(tmp_path)


def of(incident: Incident, kind: str) -> list[Fact]:
    return [f for f in incident.facts if f.kind == kind]


@pytest.mark.parametrize("tag", sorted(make.TAGS))
@pytest.mark.parametrize("generation", make.GENERATIONS)
def test_timeout_of_every_generation_behind_every_tag(tmp_path: Path, generation: str, tag: str) -> None:
    lines = make.interleave([make.tagged(tag, r, make.watchdog_lines(generation, r)) for r in (0, 3, 11)])
    found = of(read(tmp_path, lines), "watchdog_timeout")
    assert len(found) == 3
    ranks = {f.rank for f in found}
    if generation >= "2.3" or tag in ("torchrun rank", "srun", "mpirun", "bare", "cri", "wall clock"):
        assert ranks == {0, 3, 11}
    else:
        assert ranks == {None}, "a place in an unknown group behind a tag of an unknown process is no rank"
    for fact in found:
        assert (fact.data["op"], fact.data["timeout_ms"], fact.data["backend"]) == ("all_reduce", 600000, "nccl")
        if generation >= "1.13":
            assert fact.data["seq"] == 59958
        if generation >= "2.1":
            assert (fact.data["numel_in"], fact.data["numel_out"]) == (8388608, 8388608)
        else:
            assert fact.data["shape"] == [8388608]


@pytest.mark.parametrize("generation", ["2.3", "2.5", "2.6"])
def test_status_names_the_group_and_gives_it_to_the_timeout(tmp_path: Path, generation: str) -> None:
    group = (5, "37", "TENSOR_MODEL_PARALLEL_GROUP", 1)
    incident = read(tmp_path, make.watchdog_lines(generation, 9, seq=41, enqueued=43, group=group))
    (status,) = of(incident, "pg_status")
    (timeout,) = of(incident, "watchdog_timeout")
    assert status.rank == timeout.rank == 9
    counts = {k: status.data[k] for k in ("seq", "last_enqueued", "last_completed")}
    assert counts == {"seq": 41, "last_enqueued": 43, "last_completed": 40}
    assert status.data["group_name"] == timeout.data["group_name"] == "37"
    assert status.data["group_rank"] == 1
    assert status.data["group"] == ("37" if generation == "2.3" else "TENSOR_MODEL_PARALLEL_GROUP")


@pytest.mark.parametrize("lib", ["NCCL", "HCCL", "MCCL", "CNCL"])
def test_clones_of_nccl(tmp_path: Path, lib: str) -> None:
    (fact,) = of(read(tmp_path, make.watchdog_lines("2.6", 2, lib=lib)), "watchdog_timeout")
    assert (fact.rank, fact.data["backend"]) == (2, lib.lower())


def test_dump_signal_is_the_voice_of_the_silent_rank(tmp_path: Path) -> None:
    lines = [make.dump_signal_line(7, 3, 59957, 59957), make.dump_signal_line(3, None, 59998, 59957)]
    told, own = of(read(tmp_path, lines), "dump_signal")
    assert (told.rank, told.data["from_rank"], told.data["last_enqueued"]) == (7, 3, 59957)
    assert (own.rank, own.data["own"], own.data["last_enqueued"]) == (3, True, 59998)


def test_newer_words_of_the_dump_signal_and_other_backends(tmp_path: Path) -> None:
    line = make.dump_signal_line(7, 3, 5, 4).replace("NCCL work", "hccl work")
    (fact,) = of(read(tmp_path, [line]), "dump_signal")
    assert (fact.data["last_enqueued"], fact.data["last_completed"]) == (5, 4)


def test_heartbeat_is_not_a_timeout(tmp_path: Path) -> None:
    tag = "[rank4]:[F304 05:06:07.1 ProcessGroupNCCL.cpp:1557] [PG ID 0 PG GUID 0(default_pg) Rank 4] "
    lines = [
        tag + "[PG ID 0] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring",
        tag
        + "Heartbeat monitor timed out! Process will be terminated after dumping debug info. workMetaList_.size()=121",
        tag + "Could not acquire GIL within 300 ms on exit, possible GIL induced hang",
    ]
    incident = read(tmp_path, lines)
    stuck, dead, gil = sorted(of(incident, "heartbeat"), key=lambda f: f.source)
    assert (stuck.rank, stuck.data["stuck_s"], dead.data["pending"], gil.data["gil"]) == (4, 480, 121, True)
    assert not of(incident, "watchdog_timeout")


def test_progress_bar_before_the_line(tmp_path: Path) -> None:
    line = make.watchdog_lines("2.6", 6)[0]
    incident = read(
        tmp_path, [f"Epoch 10/10: 240it [05:55,  1.47s/it, loss=2.29]{line}", f"50%|#####\r99%|######{line}"]
    )
    assert [f.rank for f in of(incident, "watchdog_timeout")] == [6]


def test_echo_in_what_is_not_a_second_rank(tmp_path: Path) -> None:
    line = make.watchdog_lines("2.6", 9, group=(2, "9", "TP", 1))[0]
    echo = "  what():  " + line.split("] ", 1)[1]
    incident = read(tmp_path, [line, "terminate called after throwing an instance of 'c10::DistBackendError'", echo])
    assert [f.rank for f in of(incident, "watchdog_timeout")] == [9]


def test_repeats_are_counted_not_kept(tmp_path: Path) -> None:
    (fact,) = of(read(tmp_path, [make.watchdog_lines("2.6", 1)[0]] * 5), "watchdog_timeout")
    assert fact.data["times"] == 5


def test_three_hundred_ranks_in_one_log(tmp_path: Path) -> None:
    streams = [make.tagged("torchrun", r, make.watchdog_lines("2.6", r)) for r in range(300) if r != 217]
    streams.append(make.tagged("torchrun", 217, [make.dump_signal_line(217, 3, 59957, 59957)]))
    streams.append([f"[rank{r}]: 2026-03-04 05:06:07,000 INFO step {r}" for r in range(300)] * 3)
    incident = read(tmp_path, make.interleave(streams))
    assert {f.rank for f in of(incident, "watchdog_timeout")} == set(range(300)) - {217}
    assert {f.rank for f in of(incident, "dump_signal")} == {217}


def test_tag_of_a_launcher_learns_its_rank_from_other_lines(tmp_path: Path) -> None:
    actor = make.TAGS["ray"](5)
    lines = [actor + make.watchdog_lines("2.6", 13)[0], actor + "RuntimeError: CUDA error: an illegal memory access"]
    (fact,) = of(read(tmp_path, lines), "exception")
    assert (fact.rank, fact.data["rank_from"]) == (13, "same process")


def test_local_rank_becomes_global_only_with_a_constant_offset(tmp_path: Path) -> None:
    lines = ["[default3]:" + make.watchdog_lines("2.6", 11)[0], "[default5]:ValueError: x"]
    assert [f.rank for f in of(read(tmp_path, lines), "exception")] == [13]
    lines.insert(0, "[default3]:" + make.watchdog_lines("2.6", 19)[0])
    assert [f.rank for f in of(read(tmp_path, lines), "exception")] == [None]


def test_name_of_a_file_counts_only_where_the_content_names_no_rank(tmp_path: Path) -> None:
    fact = of(read(tmp_path, ["ValueError: x"], "rank_6.log"), "exception")[0]
    assert (fact.rank, fact.data["rank_from"], fact.source) == (6, "file name", "rank_6.log:1")
    lines = ["[rank2]: ValueError: y", "ValueError: x"]
    assert 6 not in {f.rank for f in of(read(tmp_path, lines, "rank_6.log"), "exception")}


@pytest.mark.parametrize("name", ["node_3.log", "slurm-12345.out", "run.7.log", "worker_3.log"])
def test_number_of_a_node_or_a_job_is_not_a_rank(tmp_path: Path, name: str) -> None:
    assert of(read(tmp_path, ["ValueError: x"], name), "exception")[0].rank is None


def test_a_family_of_names_is(tmp_path: Path) -> None:
    (tmp_path / "worker_4.log").write_text("ValueError: y\n")
    assert {f.rank for f in of(read(tmp_path, ["ValueError: x"], "worker_3.log"), "exception")} == {3, 4}


def test_untagged_lines_of_one_log_are_nobodys(tmp_path: Path) -> None:
    """As torchrun prints it: rank 0 raises with its tag, rank 1's stack comes without one."""
    stack = make.faulthandler_lines([[("load", "/w/loader.py", 35)]])
    lines = [*stack, *make.traceback_lines("RuntimeError: Timed out waiting 6000ms for recv", [("f", "/w/t.py", 3)], 0)]
    (fact,) = of(read(tmp_path, lines), "stack")
    assert (fact.rank, fact.data["maybe_rank"]) == (None, 0)


def test_untagged_lines_of_one_log_a_rank_are_its_own(tmp_path: Path) -> None:
    for rank in range(3):
        stack = make.faulthandler_lines([[("load", "/w/loader.py", 30 + rank)]])
        (tmp_path / f"{'xyz'[rank]}.log").write_bytes(make.text([*stack, f"[rank{rank}]: ValueError: x"]))
    found = of(read(tmp_path, ["no rank here"]), "stack")
    assert {(f.rank, f.data["call_site"]) for f in found} == {(r, f"/w/loader.py:{30 + r}") for r in range(3)}


@pytest.mark.parametrize("tag", ["compose", "srun", "kubectl"])
def test_a_container_of_many_ranks_is_not_one_process(tmp_path: Path, tag: str) -> None:
    lines = make.tagged(tag, 0, [*make.watchdog_lines("2.6", 3), "Traceback (most recent call last):", "ValueError: x"])
    assert [f.rank for f in of(read(tmp_path, lines), "exception")] == [None]


def test_facts_are_bounded_first_and_last_kept(tmp_path: Path) -> None:
    lines = [make.watchdog_lines("2.6", 1, seq=n)[0] for n in range(1, 2001)]
    incident = read(tmp_path, lines)
    seqs = sorted(int(str(f.data["seq"])) for f in of(incident, "watchdog_timeout"))
    assert (seqs[0], seqs[-1]) == (1, 2000)
    assert len(seqs) == 32
    assert any("1968 facts" in line for line in incident.lacks)


def test_monitored_barrier_desync_report_and_fingerprints_name_ranks(tmp_path: Path) -> None:
    lines = [
        "[rank0]:[E304 05:06:07.1 ProcessGroupGloo.cpp:138] Rank 1, 5 failed to pass monitoredBarrier in 30000 ms",
        "\t  - [2] finished collective #57, but didn't join collective #58 (count from 1)",
        "[rank0]: RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=2373, OpType=ALLREDUCE, TensorShape=[256], TensorDtypes=Float, "
        "TensorDeviceTypes=TensorOptions(dtype=float)), but Rank 1 is running collective: CollectiveFingerPrint("
        "SequenceNumber=2373, OpType=BROADCAST, TensorShape=[2048], TensorDtypes=Float)",
    ]
    incident = read(tmp_path, lines)
    assert of(incident, "missing_at_barrier")[0].data == {"ranks": [1, 5], "timeout_ms": 30000}
    assert of(incident, "desync_report")[0].data["ranks"] == [2]
    assert of(incident, "desync_report")[0].data["seq"] == 58
    sides = of(incident, "fingerprint_mismatch")[0].data["sides"]
    assert [(s["rank"], s["op"], s["shape"]) for s in sides] == [(0, "all_reduce", [256]), (1, "broadcast", [2048])]


def test_times() -> None:
    clock = Clock.of(datetime(2026, 3, 5, tzinfo=UTC).timestamp())
    want = datetime(2026, 3, 4, 5, 6, 7, 500_000, tzinfo=UTC).timestamp()
    for line in (
        "2026-03-04T05:06:07.5Z stderr F x",
        "2026-03-04T07:06:07.500+02:00 x",
        "[2026-03-04 05:06:07,500] x",
        "[rank1]:[E304 05:06:07.500000000 ProcessGroupNCCL.cpp:1] x",
        "E0304 05:06:07.500000 2606 torch/x.py:8] x",
        "Mar  4 05:06:07.5 gpu-03 kernel: x",
    ):
        assert peel(line, clock).at == pytest.approx(want, abs=1e-3), line
    assert peel("no date here", clock).at is None


def test_a_date_without_a_year_is_never_in_the_future() -> None:
    clock = Clock.of(datetime(2026, 1, 2, tzinfo=UTC).timestamp())
    at = peel("[rank1]:[E1231 23:00:00.0 ProcessGroupNCCL.cpp:1] x", clock).at
    assert at == datetime(2025, 12, 31, 23, tzinfo=UTC).timestamp()


def test_two_processes_on_one_line(tmp_path: Path) -> None:
    lines = [make.watchdog_lines("2.6", r)[0] for r in (3, 4, 5)]
    incident = read(tmp_path, ["".join(lines)])
    assert {f.rank for f in of(incident, "watchdog_timeout")} == {3, 4, 5}


def test_json_of_a_container(tmp_path: Path) -> None:
    rows = [
        json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-03-04T05:06:07.25Z"})
        for line in [
            "step 1",
            *make.watchdog_lines("2.6", 6),
            *make.traceback_lines("ValueError: x", [("f", "/w/t.py", 3)], 2),
        ]
    ]
    incident = read(tmp_path, rows)
    (timeout,), (error,) = of(incident, "watchdog_timeout"), of(incident, "exception")
    assert (timeout.rank, timeout.at) == (6, datetime(2026, 3, 4, 5, 6, 7, 250_000, tzinfo=UTC).timestamp())
    assert (error.rank, error.data["call_site"]) == (2, "/w/t.py:3")


def test_traceback_behind_vllms_logger(tmp_path: Path) -> None:
    tag = "(Worker_TP1 pid=77) ERROR 03-04 05:06:07 [multiproc_executor.py:596] "
    lines = [tag + line for line in make.traceback_lines("ValueError: x", [("f", "/w/t.py", 3)])]
    other = [line.replace("TP1 pid=77", "TP2 pid=78").replace("t.py", "u.py") for line in lines]
    found = of(read(tmp_path, make.interleave([lines, other])), "exception")
    assert {(f.data["pid"], f.data["call_site"]) for f in found} == {(77, "/w/t.py:3"), (78, "/w/u.py:3")}


def test_error_that_names_nccls_version_is_an_error(tmp_path: Path) -> None:
    line = "[rank1]: DistBackendError: NCCL error in: x.cpp:9, remote process exited, NCCL version 2.27.3"
    (fact,) = of(read(tmp_path, [line]), "exception")
    assert (fact.rank, fact.data["consequence"]) == (1, True)


def test_a_place_in_a_group_is_no_global_rank(tmp_path: Path) -> None:
    lines = ["[E ProcessGroupNCCL.cpp:915] [Rank 3] NCCL watchdog thread terminated with exception: x, error: y"]
    assert not [f for f in read(tmp_path, lines).facts if f.rank == 3 and "rank_from" not in f.data]


def test_two_processes_that_claim_one_place_are_in_different_groups(tmp_path: Path) -> None:
    """Before torch 2.3 two pairs of tensor-parallel ranks both print places 0 and 1."""
    lines = [line for place in (0, 1) for line in make.watchdog_lines("2.1", place)]
    assert {f.rank for f in of(read(tmp_path, lines), "watchdog_timeout")} == {0, 1}
    assert {f.rank for f in of(read(tmp_path, [*lines, *lines]), "watchdog_timeout")} == {None}
    echo = "  what():  " + lines[0].split("] ", 1)[1]
    assert {f.rank for f in of(read(tmp_path, [*lines, echo]), "watchdog_timeout")} == {0, 1}

"""What spans lines: tracebacks of interleaved ranks, stacks of faulthandler and py-spy, of the failed collective."""

from __future__ import annotations

import json
from pathlib import Path

from meshwright.doctor.incident import Frame
from meshwright.doctor.readers.frames import describe, own_frame
from tests.doctor import log_maker as make
from tests.doctor.test_readers_lines import of, read

TORCH = "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


def test_tracebacks_of_eight_interleaved_ranks(tmp_path: Path) -> None:
    streams = [
        make.traceback_lines(
            f"ValueError: shard {r}", [("main", "/w/train.py", 10), ("load", "/w/loader.py", 30 + r)], r
        )
        for r in range(8)
    ]
    for seed in range(5):
        found = of(read(tmp_path, make.interleave(streams, seed)), "exception")
        assert {(f.rank, f.data["message"], f.data["call_site"]) for f in found} == {
            (r, f"shard {r}", f"/w/loader.py:{30 + r}") for r in range(8)
        }
        assert all(f.data["first"] for f in found)


def test_the_first_error_of_a_rank_is_marked(tmp_path: Path) -> None:
    lines = make.traceback_lines("KeyError: 'a'", [("main", "/w/t.py", 1)], 2)
    lines += make.traceback_lines("RuntimeError: later", [("main", "/w/t.py", 2)], 2)
    lines += make.traceback_lines("RuntimeError: other", [("main", "/w/t.py", 3)], 4)
    found = of(read(tmp_path, lines), "exception")
    assert {(f.rank, f.data["message"]) for f in found if f.data.get("first")} == {(2, "'a'"), (4, "other")}


def test_chained_tracebacks_say_what_follows(tmp_path: Path) -> None:
    lines = [
        *make.traceback_lines("KeyError: 'a'", [("get", "/w/t.py", 1)]),
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        *make.traceback_lines("RuntimeError: wrapped", [("main", "/w/t.py", 9)]),
        "step 3 loss 0.1",
    ]
    first, second = sorted(of(read(tmp_path, lines), "exception"), key=lambda f: int(f.source.rsplit(":", 1)[1]))
    assert (first.data["type"], first.data["call_site"], first.data.get("follows")) == ("KeyError", "/w/t.py:1", None)
    assert (second.data["type"], second.data["call_site"], second.data["follows"]) == (
        "RuntimeError",
        "/w/t.py:9",
        True,
    )


def test_library_frames_are_not_the_users_line(tmp_path: Path) -> None:
    frames = [("main", "/w/train.py", 72), ("wrapper", TORCH, 83), ("all_reduce", TORCH, 3174)]
    (fact,) = of(read(tmp_path, make.traceback_lines("RuntimeError: x", frames, 1)), "exception")
    assert (fact.data["call_site"], fact.data["function"], fact.data["where"]) == (
        "/w/train.py:72",
        "main",
        "collective",
    )


def test_a_traceback_cut_off_is_still_a_place(tmp_path: Path) -> None:
    lines = make.traceback_lines("x", [("main", "/w/train.py", 72)], 1)[:-1]
    (fact,) = of(read(tmp_path, lines), "exception")
    assert (fact.rank, fact.data["cut"], fact.data["call_site"]) == (1, True, "/w/train.py:72")


def test_stack_of_the_failed_collective(tmp_path: Path) -> None:
    frames = [("all_reduce", TORCH, 3174), ("wrapper", TORCH, 83), ("_all_reduce", "/w/tp.py", 8472)]
    lines = make.failed_stack_lines(3, frames)
    lines[2:2] = make.watchdog_lines("2.6", 5)
    incident = read(tmp_path, lines)
    (fact,) = of(incident, "collective_stack")
    assert (fact.rank, fact.data["call_site"], len(fact.data["frames"])) == (3, "/w/tp.py:8472", 3)
    assert [f.rank for f in of(incident, "watchdog_timeout")] == [5]


def test_recorder_off_is_said(tmp_path: Path) -> None:
    line = (
        "[rank1]:[E304 05:06:07.1 ProcessGroupNCCL.cpp:670] Stack trace of the failed collective not found, "
        "potentially because FlightRecorder is disabled."
    )
    assert [f.rank for f in of(read(tmp_path, [line]), "recorder_off")] == [1]


def test_faulthandler_main_thread_is_the_last(tmp_path: Path) -> None:
    lines = make.faulthandler_lines(
        [[("wait", "threading.py", 327)], [("read", "/w/loader.py", 35), ("main", "/w/t.py", 7)]]
    )
    worker, main = sorted(of(read(tmp_path, lines, "rank5.stderr"), "stack"), key=lambda f: bool(f.data["main"]))
    assert main.data["call_site"] == "/w/loader.py:35"
    assert (main.rank, main.data["rank_from"]) == (5, "file name")
    assert worker.data["main"] is False


def test_pyspy_file_of_many_processes(tmp_path: Path) -> None:
    stuck = [("read", "ssl.py", 1166), ("fetch", "requests/sessions.py", 600), ("load_batch", "loader.py", 35)]
    waits = [("all_reduce", "torch/distributed/distributed_c10d.py", 3174), ("step", "train.py", 72)]
    lines = [*make.pyspy_lines(400, stuck, "python train.py --rank 7"), "", *make.pyspy_lines(401, waits)]
    incident = read(tmp_path, lines, "stacks.txt")
    found = {f.data["pid"]: f for f in of(incident, "stack") if f.data["main"]}
    assert found[400].rank == 7
    assert found[401].rank is None
    assert (found[401].data["call_site"], found[401].data["where"]) == ("train.py:72", "collective")
    assert [tuple(f) for f in found[400].data["frames"]][2] == ("load_batch", "loader.py", 35)


def test_pyspy_pid_becomes_a_rank_by_nccls_lines(tmp_path: Path) -> None:
    (tmp_path / "nccl.log").write_bytes(make.text(make.nccl_lines(3, 8)))
    incident = read(tmp_path, make.pyspy_lines(9003, [("load", "loader.py", 35)]), "stacks.txt")
    (fact,) = [f for f in of(incident, "stack") if f.data["main"]]
    assert (fact.rank, fact.data["rank_from"], incident.world) == (3, "pid", 8)


def test_pyspy_within_a_log(tmp_path: Path) -> None:
    lines = ["step 1", *make.pyspy_lines(77, [("load_batch", "loader.py", 35)]), "step 2"]
    lines = ["noise"] * 2000 + lines
    incident = read(tmp_path, lines)
    assert [f.data["call_site"] for f in of(incident, "stack")] == ["loader.py:35"]


def test_pyspy_json(tmp_path: Path) -> None:
    frames = [
        {"name": "load", "filename": "/w/loader.py", "line": 35},
        {"name": "main", "filename": "/w/t.py", "line": 1},
    ]
    threads = [{"pid": 5, "thread_id": 5, "thread_name": "MainThread", "active": False, "frames": frames}]
    (tmp_path / "dump_rank2.json").write_text(json.dumps(threads))
    (fact,) = of(read(tmp_path, ["x"]), "stack")
    assert (fact.rank, fact.data["call_site"], fact.data["main"]) == (2, "/w/loader.py:35", True)


def test_places_that_threads_wait_in() -> None:
    def where(*frames: tuple[str, str, int]) -> object:
        return describe([Frame(*f) for f in frames]).get("where")

    user = ("main", "/w/t.py", 1)
    assert where(("synchronize", "torch/cuda/streams.py", 219), user) == "device_sync"
    assert where(("_try_get_data", "torch/utils/data/dataloader.py", 1170), user) == "data_loading"
    assert where(("save", "torch/serialization.py", 600), user) == "checkpoint"
    assert where(("barrier", "torch/distributed/distributed_c10d.py", 5), user) == "collective"
    assert where(user, ("barrier", "torch/distributed/distributed_c10d.py", 5)) is None
    assert own_frame([Frame("wait", "threading.py", 3), Frame("f", "pkg/mod.py", 4)]) == Frame("f", "pkg/mod.py", 4)
    assert own_frame([Frame("wait", "threading.py", 3)]) is None

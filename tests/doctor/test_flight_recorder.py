"""Flight Recorder dumps of all generations, and hostile ones."""

from __future__ import annotations

import json
import os
import pickle
import struct
from typing import Any

import pytest

from bench import doctor_fuzz
from meshwright.doctor.hang import diagnose
from meshwright.doctor.incident import COMPLETED, UNKNOWN, Incident
from meshwright.doctor.readers import flight_recorder, fr_join, fr_pickle, fr_pool
from meshwright.doctor.readers.fr_rows import Tables, op_of
from meshwright.errors import InputError

from .fr_maker import Simulator, dump
from .fr_mistakes import GUILTY, LAYOUTS, MISTAKES, source


def _dumps(mistake: str = "skipped call", name: str = "tp4dp2", **options: Any) -> list[dict[str, Any]]:
    sim = Simulator(MISTAKES[mistake][2](LAYOUTS[name]())).run()
    return [dump(sim, rank, **options) for rank in range(sim.job.world)]


def _incident(dumps: list[Any], as_json: bool = False, protocol: int = 2) -> Incident:
    incident = Incident()
    data = [json.dumps(d).encode() if as_json else pickle.dumps(d, protocol=protocol) for d in dumps]
    flight_recorder.read_many([source(f"d_{r}", d) for r, d in enumerate(data)], incident)
    return incident


def test_pickle_of_any_protocol_and_json_say_the_same() -> None:
    dumps = _dumps()
    for row in dumps:
        for entry in row["entries"]:
            entry.pop("frames")
    texts = {
        str(diagnose(_incident(dumps, as_json, protocol))[0])
        for as_json, protocol in ((False, 2), (False, 4), (False, 5), (True, 0))
    }
    assert len(texts) == 1
    assert "skipped" in texts.pop()


def _older(dumps: list[dict[str, Any]], version: str) -> list[dict[str, Any]]:
    """The same dumps as older releases wrote them."""
    for row in dumps:
        row["version"], row["nccl_version"] = version, row.pop("comm_lib_version")
        if version < "2.5":
            row.pop("pg_status")
        for entry in row["entries"]:
            if version < "2.4":
                entry["seq_id"] = entry.pop("p2p_seq_id") or entry["collective_seq_id"]
                entry.pop("collective_seq_id")
                entry["pg_name"] = entry.pop("process_group")[0]
                for key in ("is_p2p", "input_dtypes", "output_dtypes", "timeout_ms"):
                    entry.pop(key)
    return dumps


@pytest.mark.parametrize("version", ["2.3", "2.4", "2.7", "2.9"])
@pytest.mark.parametrize("mistake", ["skipped call", "host stands still", "another shape"])
def test_layouts_of_older_releases(version: str, mistake: str) -> None:
    found = diagnose(_incident(_older(_dumps(mistake), version)))[0]
    assert (found.kind, set(found.guilty_ranks)) == MISTAKES[mistake][:2]


def test_names_of_operations() -> None:
    assert op_of("nccl:recv 0<-8") == ("nccl", "recv", 0, 8)
    assert op_of("nccl:send 3->1") == ("nccl", "send", 3, 1)
    assert op_of("nccl:_all_gather_base") == ("nccl", "all_gather", None, None)
    assert op_of("gloo:allreduce")[:2] == ("gloo", "all_reduce")
    assert op_of("nccl:all_reduce_barrier")[1] == "barrier"


def test_gloo_has_no_group_table_and_no_states() -> None:
    """Members come from the rows of all ranks; retired says that a call is over, well or not."""
    dumps = _dumps("host stands still", "dp8")
    for row in dumps:
        row["pg_config"] = {"": {"name": "", "desc": "", "ranks": "[]"}}
        for entry in row["entries"]:
            entry["profiling_name"] = entry["profiling_name"].replace("nccl:", "gloo:")
            entry["retired"], entry["state"] = True, "scheduled"
    incident = _incident(dumps)
    assert set(incident.traces[0].state) == {UNKNOWN}
    assert {g.members for g in incident.groups.rows if g.members} == {tuple(range(8))}
    found = diagnose(incident)[0]
    assert (found.kind, set(found.guilty_ranks), found.confidence) == ("host_stuck", {GUILTY}, "medium")
    assert any("send and recv" in u for u in found.unknown)


def test_hand_offs_repeat_the_number_of_the_collective_before_them() -> None:
    dumps = _dumps("none", "tp2pp2dp2")
    for row in dumps:
        for entry in row["entries"]:
            if entry["is_p2p"]:
                entry["collective_seq_id"] = 3
    assert diagnose(_incident(dumps))[0].kind == "healthy"


def test_calls_of_one_number_are_one_coalesced_call() -> None:
    dumps = _dumps("none", "dp8")
    for row in dumps:
        row["entries"] = [e for entry in row["entries"] for e in (entry, {**entry, "op_id": 9000})]
    assert diagnose(_incident(dumps))[0].kind == "healthy"


def test_what_a_dump_says_about_itself() -> None:
    whole = _incident(_dumps("skipped call", "dp8", ring=6)).traces[0]
    assert (whole.wrapped, whole.active_only, whole.rank_from) == (True, False, "content")
    active = _incident(_dumps("skipped call", "dp8", active_only=True)).traces[0]
    assert (active.wrapped, active.active_only) == (False, True)
    assert COMPLETED in _incident(_dumps("none", "dp8")).traces[0].state


def test_two_dumps_of_one_rank() -> None:
    sim = Simulator(MISTAKES["host stands still"][2](LAYOUTS["tp4dp2"]())).run()
    early = [dump(sim, r, ring=2000) for r in range(8)]
    for row in early:
        row["entries"] = row["entries"][:10]
    both = early[:4] + [dump(sim, r) for r in range(8)]
    incident = Incident()
    flight_recorder.read_many([source(f"d{n}x", pickle.dumps(d, protocol=2)) for n, d in enumerate(both)], incident)
    assert set(diagnose(incident)[0].guilty_ranks) == {GUILTY}
    assert any("two dumps" in lack for lack in incident.lacks)


def test_numbers_in_file_names() -> None:
    names = {
        "nccl_trace_rank_container-node02_5": 5,
        "_dump_14": 14,
        "a/b/trace_0.json": 0,
        "x.tar!/comm_lib_trace_rank_12": 12,
        "rank3_of_8.pickle": 3,
        "noname": None,
    }
    assert {n: fr_join.number_in_name(n) for n in names} == names


HOSTILE = {
    "calls a function": b"cos\nsystem\n(S'touch /tmp/x'\ntR.",
    "names a class": b"\x80\x02cbuiltins\neval\n.",
    "a memo of gigabytes": b"\x80\x02}r\xff\xff\xff\x7f.",
    "a buffer of terabytes": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
    "a text of exabytes": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b".",
    "an outside object": b"\x80\x02Pid\n.",
    "an extension": b"\x80\x02\x82\x01.",
    "calls a dict": b"\x80\x02}(K\x01tR.",
    "cut off": b"\x80\x02}(U\x07entries",
    "empty": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused(name: str) -> None:
    with pytest.raises(InputError):
        fr_pickle.loads(HOSTILE[name], "f")


def test_tuples_nested_deep_enough_to_crash_are_read_apart() -> None:
    deep = b"\x80\x02})" + b"\x85" * 400_000 + b"K\x01s."
    assert not fr_pickle.nests_safely(deep)
    incident = Incident()
    flight_recorder.read_many([source("dump_0", deep)], incident)
    assert incident.traces == {}
    assert len(incident.lacks) == 1


def test_a_worker_that_dies_loses_only_its_file() -> None:
    taken, lost = [], []

    def parse(index: int, tables: Tables) -> Any:
        if index == 3:
            os.kill(os.getpid(), 9)
        raise InputError(f"file {index}")

    fr_pool.read_all(9, parse, lambda index, message, worker: taken.append(index), lambda *failed: lost.append(failed))
    assert lost == [(3, "its process was ended by signal 9")]
    assert sorted(taken) == [0, 1, 2, 4, 5, 6, 7, 8]


def test_lists_shared_a_million_times_are_refused_quickly() -> None:
    shared: list[Any] = [1]
    for _ in range(40):
        shared = [shared, shared]
    row = _dumps("none", "dp8")[0]
    row["entries"][0]["input_sizes"] = shared
    incident = _incident([row])
    assert any("1 rows are not a recorder's" in lack for lack in incident.lacks)


def test_recognised_by_content_not_by_name() -> None:
    dumps = _dumps("none", "dp8")
    assert flight_recorder.sniff(pickle.dumps(dumps[0], protocol=2)[:4096], "x.log")
    assert flight_recorder.sniff(json.dumps(dumps[0]).encode()[:4096], "x")
    assert not flight_recorder.sniff(b'{"traceEvents": []}', "nccl_trace_rank_0")
    assert not flight_recorder.sniff(pickle.dumps({"weights": 1}), "nccl_trace_rank_0")


def test_mutated_dumps_neither_crash_nor_hang_nor_run() -> None:
    """A sample; ``python bench/doctor_fuzz.py`` does 100,000."""
    outcome = doctor_fuzz.run(1000, seed=7)
    assert outcome.failures == []
    assert outcome.cases == 1000
    assert outcome.refused > 100, "mutations that change nothing test nothing"

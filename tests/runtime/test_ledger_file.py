"""What a ledger file holds when its process ends in any way: every call is there before the backend sees it."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshwright.ledger import store
from meshwright.ledger.schema import Entry
from meshwright.runtime import ledger_file
from meshwright.runtime.ledger_file import LedgerFile, _row
from meshwright.runtime.record import Recorder


def _forked(body: Callable[[], None]) -> int:
    """Run in a child process, which imports nothing anew; its process id."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        try:
            body()
        finally:
            os._exit(0)
    return pid


def _enter(path: Path, way: str) -> None:
    """Five calls, of which the last never ends; then the process does."""
    recorder = Recorder(rank=3)
    with mock.patch.object(ledger_file, "PERIOD_S", 0.05 if way == "written" else 30.0):
        LedgerFile(recorder, path)
        assert recorder.on_entry is not None
        for number in range(5):
            entry = Entry("rank3", "all_reduce", stream="0-3", group="0-3", state="scheduled")
            recorder.add(entry)
            recorder.on_entry()
            if number < 4:
                entry.state = "completed"
        if way == "written":
            time.sleep(0.6)
    os.abort() if way == "abort" else os.kill(os.getpid(), signal.SIGKILL)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [row for line in path.read_text().splitlines() if (row := json.loads(line)).get("table") == "entries"]


@pytest.mark.parametrize("way", ["kill", "abort", "written"])
def test_calls_outlive_their_process(tmp_path: Path, way: str) -> None:
    path = tmp_path / "rank3.jsonl"
    _, status = os.waitpid(_forked(lambda: _enter(path, way)), 0)
    assert os.WIFSIGNALED(status)
    rows = _rows(path)
    assert [row["seq"] for row in rows] == [0, 1, 2, 3, 4]
    ended = "completed" if way == "written" else "scheduled"
    assert [row["state"] for row in rows] == [ended] * 4 + ["scheduled"]
    assert json.loads(path.read_text().splitlines()[0])["version"]
    assert '"table":"ranks"' in path.read_text()


def test_a_row_is_what_the_store_writes() -> None:
    entry = Entry("rank0", "send", stream="pp", group="pp", shapes=((8, 2), ()), dtype="f32", peer=1, splits=(3, 0))
    entry.call_site, entry.layer, entry.enqueued_ns = 'a"b\u00e9.py:3', 4, 17
    assert json.loads(_row(entry)) == json.loads("".join(store.row_lines("entries", [entry])))


def test_a_file_that_cannot_grow_never_stops_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    file = LedgerFile(recorder, tmp_path / "a.jsonl")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    recorder.add(Entry("rank0", "barrier", stream="0-1", group="0-1", state="scheduled"))
    assert recorder.on_entry is not None
    recorder.on_entry()
    file._write()
    monkeypatch.undo()
    file.close()
    assert len(_rows(tmp_path / "a.jsonl")) == 1


def _failing(folder: Path, rank: int) -> None:
    """A call that the other rank never enters and that is given up."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    recorder = Recorder(rank=rank)
    file = LedgerFile(recorder, folder / f"rank{rank}.jsonl")
    where, patience = f"file://{folder}/store", timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=patience)
    twin = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    with recorder:
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2), group=twin)
        if rank == 0:
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(3), group=twin)
        else:
            time.sleep(4)
    file.close()


def test_a_call_that_failed_never_completed_and_twins_have_names(tmp_path: Path) -> None:
    pids = [_forked(partial(_failing, tmp_path, rank)) for rank in range(2)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    rows = _rows(tmp_path / "rank0.jsonl")
    assert [row["group"] for row in rows] == ["0,1", "0,1 (2)", "0,1 (2)"]
    assert [row["state"] for row in rows] == ["completed", "completed", "scheduled"]
    assert "ended_ns" not in rows[-1]

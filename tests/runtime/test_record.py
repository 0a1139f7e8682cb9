"""The recorder sees what the hand count says, of any program, and its files outlive the program."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from meshwright.ledger.schema import Entry, Ledger
from meshwright.ledger.store import read
from meshwright.runtime import c10d
from meshwright.runtime.record import Recorder, scope
from meshwright.runtime.scope import where

PROGRAM = Path(__file__).with_name("recorded_program.py")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start(words: list[str], port: int, rank: int, world: int = 2) -> subprocess.Popen[str]:
    """A rank as torchrun starts it."""
    env = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "meshwright.record", *words]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[Ledger]:
    """The ledgers of both ranks of the program."""
    out, port = tmp_path_factory.mktemp("ledger"), _free_port()
    ranks = [start(["--out", str(out), str(PROGRAM), "--flag", "x"], port, rank) for rank in range(2)]
    try:
        said = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 3], said
    assert "arguments --flag x" in said[0][0]
    return [read(out / f"rank{rank}.jsonl") for rank in range(2)]


def part(ledger: Ledger, name: str, *phases: str) -> list[Entry]:
    return [e for e in ledger.entries if e.name == name and (not phases or e.phase in phases)]


def ops(entries: list[Entry]) -> Counter[str]:
    return Counter(e.op for e in entries)


def test_the_reducer_of_ddp_is_seen(recorded: list[Ledger]) -> None:
    """One bucket of 8 x 16 + 16 x 4 = 192 gradients a step."""
    for ledger in recorded:
        sums = [e for e in part(ledger, "ddp", "backward") if e.op == "all_reduce"]
        assert [(e.step, e.shapes, e.dtype, e.payload_bytes, e.wire_bytes) for e in sums] == [
            (step, ((192,),), "f32", 768, 768) for step in range(3)
        ]
        assert {e.group for e in sums} == {"0,1"}


def test_fsdp_gathers_and_scatters_as_counted(recorded: list[Ledger]) -> None:
    """Each of 3 layers is gathered in the forward and again in the backward, and its gradient scattered once."""
    for ledger in recorded:
        for step in range(2):
            rows = [e for e in part(ledger, "fsdp") if e.step == step]
            forward, backward = ([e for e in rows if e.phase == p] for p in ("forward", "backward"))
            assert ops(forward) == {"all_gather": 3}
            assert ops(backward) == {"all_gather": 3, "reduce_scatter": 3}
            assert {(e.op, e.payload_bytes) for e in rows if e.phase != "optimizer"} == {
                ("all_gather", 4 * 64 // 2),
                ("reduce_scatter", 4 * 64),
            }


def test_collectives_inside_dtensor_are_seen(recorded: list[Ledger]) -> None:
    """Clipping reduces the norms of the shards; a hook above the backend's key misses it."""
    for ledger in recorded:
        rows = part(ledger, "fsdp", "optimizer")
        assert ops(rows) == {"all_reduce": 2}, "one a step"


def test_a_pipeline_hands_off_every_micro_batch_once(recorded: list[Ledger]) -> None:
    """4 micro-batches: activations one way, gradients the other. What goes before agrees on shapes."""
    for ledger, peer in zip(recorded, (1, 0), strict=True):
        rows = [e for e in part(ledger, "pipeline") if e.dtype == "f32"]
        assert ops(rows) == {"send": 4, "recv": 4}
        assert {(e.peer, e.shapes, e.payload_bytes) for e in rows} == {(peer, ((2, 8),), 64)}


def test_every_plain_collective_has_its_payload(recorded: list[Ledger]) -> None:
    expected = [
        ("send", "recv", ((3, 4),), "bf16", 24),
        ("all_to_all", "all_to_all", ((3, 4),), "f32", 48),
        ("gather", "gather", ((2,),), "f32", 8),
        ("scatter", "scatter", ((2,),), "f32", 16),
        ("reduce", "reduce", ((5,),), "f32", 20),
        ("reduce_scatter", "reduce_scatter", ((4,),), "f32", 16),
        ("all_gather", "all_gather", ((2,),), "f32", 8),
        ("all_gather", "all_gather", ((6,),), "f32", 24),
        ("send", "send", ((7,),), "f32", 28),
        ("recv", "recv", ((7,),), "f32", 28),
        ("barrier", "barrier", None, None, 0),
    ]
    for rank, ledger in enumerate(recorded):
        rows = [(e.op, e.shapes, e.dtype, e.payload_bytes) for e in part(ledger, "plain")]
        assert rows == [(e[rank], *e[2:]) for e in expected]


def test_splits_and_roots_say_what_a_rank_sends(recorded: list[Ledger]) -> None:
    """Rank 0 keeps 8 and sends 4 elements, rank 1 keeps 12 and sends none; a root of a gather sends nothing."""
    found = [{e.op: e for e in part(ledger, "plain")} for ledger in recorded]
    assert [(f["all_to_all"].splits, f["all_to_all"].wire_bytes) for f in found] == [((8, 4), 16), ((0, 12), 0)]
    assert [(f["gather"].peer, f["gather"].wire_bytes) for f in found] == [(0, 0), (0, 8)]
    assert [(f["scatter"].peer, f["scatter"].wire_bytes) for f in found] == [(0, 8), (0, 0)]
    assert [(f["reduce"].peer, f["reduce"].wire_bytes) for f in found] == [(1, 20), (1, 0)]


def test_entries_have_times_states_and_lines(recorded: list[Ledger]) -> None:
    lines = PROGRAM.read_text(encoding="utf-8").splitlines()
    for ledger in recorded:
        for e in ledger.entries:
            assert e.enqueued_ns is not None
            assert e.ended_ns is not None, e
            assert e.enqueued_ns <= e.ended_ns
            assert (e.state, e.source) == ("completed", "record")
            assert e.call_site is not None
            file, _, line = e.call_site.rpartition(":")
            assert Path(file) == PROGRAM
            assert lines[int(line) - 1].strip()
        seqs = [e.seq for e in ledger.entries if e.group == "0,1"]
        assert seqs == list(range(len(seqs)))
        assert ledger.ranks[0].clock_offset_ns is not None


HANGING = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(3))
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(5))
import time
time.sleep(60)
"""


def written(path: Path) -> int:
    """Entries of all_reduce that a file holds so far."""
    return path.read_text(encoding="utf-8").count('"all_reduce"') if path.is_file() else 0


def test_the_file_of_a_killed_rank_ends_in_what_it_waited_for(tmp_path: Path) -> None:
    program = tmp_path / "hang.py"
    program.write_text(HANGING)
    port = _free_port()
    ranks = [start(["--out", str(tmp_path), str(program)], port, rank) for rank in range(2)]
    wanted = {0: 2, 1: 1}
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(0.5)
            files = {rank: tmp_path / f"rank{rank}.jsonl" for rank in wanted}
            counted = all(written(files[rank]) == count for rank, count in wanted.items())
            if counted and all('"completed"' in file.read_text(encoding="utf-8") for file in files.values()):
                break  # what became of a call is written a moment after the call itself
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
        for rank in ranks:
            rank.communicate()
    waiting, gone = (read(tmp_path / f"rank{rank}.jsonl").entries for rank in range(2))
    assert [(e.shapes, e.state) for e in waiting] == [(((3,),), "completed"), (((5,),), "scheduled")]
    assert [(e.shapes, e.state) for e in gone] == [(((3,),), "completed")]


@pytest.mark.parametrize(
    ("words", "env", "line"),
    [
        (["nowhere.py"], {}, "error: program 'nowhere.py' is no file\n"),
        ([str(PROGRAM)], {"RANK": "two"}, "error: RANK='two' in the environment is not a rank; "),
        (["--out", os.devnull + "/x", str(PROGRAM)], {}, "cannot be written"),
    ],
)
def test_bad_input_is_one_line(words: list[str], env: dict[str, str], line: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "meshwright.record", *words],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert line in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_products_are_seen_whatever_they_are_called(mode: type) -> None:
    x, w, b = torch.ones(2, 5, 8), torch.ones(3, 8), torch.ones(3)
    with Recorder(matmuls=True) as recorder, mode(), scope(layer=4, phase="decode"):
        torch.nn.functional.linear(x, w)
        torch.nn.functional.linear(x, w, b)
        x[0] @ w.T
        torch.einsum("td,nd->tn", x[0], w)
        with scope(name="attention core"):
            torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    rows = [e for e in recorder.entries if e.op == "matmul"]
    assert [e.shapes for e in rows] == [((10, 8), (8, 3))] * 2 + [((5, 8), (8, 3))] * 2
    assert [e.flops for e in rows] == [480, 480, 240, 240]
    assert {(e.layer, e.phase, e.dtype, e.stream) for e in rows} == {(4, "decode", "f32", "compute")}


def test_products_are_not_recorded_unless_asked_for() -> None:
    with Recorder() as recorder:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert recorder.entries == []


def test_scopes_nest_and_end() -> None:
    with scope(layer=3, phase="decode"):
        with scope(name="inner", layer=4):
            assert where()[:3] == (4, "decode", "inner")
        assert where()[:3] == (3, "decode", None)
        with scope(fresh=True, phase="backward"):
            assert where() == (None, "backward", None, None, None)
        assert where()[:3] == (3, "decode", None)
    assert where() == (None,) * 5


def test_every_op_of_this_torch_is_known() -> None:
    """A new op of the namespace must be described before it can be missed."""
    assert set(c10d.op_names()) == set(c10d.DESCRIBE)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([0, 1], "0,1"), ([3, 2, 1, 0], "0-3"), ([0, 8, 16], "0-16:8"), ([0, 1, 5], "0,1,5"), ([7], "7")],
)
def test_groups_without_a_name_go_by_their_ranks(ranks: list[int], text: str) -> None:
    assert c10d.ranks_text(ranks) == text


@pytest.mark.slow
def test_torchrun_starts_it_too(tmp_path: Path) -> None:
    program = tmp_path / "sum.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(3))\n"
        "dist.destroy_process_group()\n"
    )
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(_free_port()),
    ]
    done = subprocess.run(
        [*launch, "-m", "meshwright.record", "--out", str(tmp_path / "out"), str(program)],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert [(e.op, e.shapes) for e in read(tmp_path / "out" / f"rank{rank}.jsonl").entries] == [
            ("all_reduce", ((3,),))
        ]

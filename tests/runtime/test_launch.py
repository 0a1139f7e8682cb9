"""Ranks end cleanly: the cause is shown in one line, all end within the timeout, none is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Thread, current_thread
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.errors import IllegalLayoutError, InputError
from meshwright.runtime.launch import local
from meshwright.runtime.launch.local import RankError, run_local
from meshwright.runtime.launch.rank import follows
from meshwright.runtime.launch.torchrun import started_by_torchrun
from meshwright.runtime.mesh import build_mesh
from tests.shared import ROOT


def _work(rank: int, how: str, folder: str) -> int:
    """Leave the process id behind, then fail in some way in the middle of a run."""
    Path(folder, str(rank)).write_text(str(os.getpid()))
    x = torch.ones(3)
    dist.all_reduce(x)
    if how == "raise" and rank == 1:
        raise ValueError("the first cause\nand more")
    if how == "input" and rank == 2:
        raise InputError("model.safetensors: truncated")
    if how == "kill" and rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit" and rank == 0:
        os._exit(7)
    if how == "hang" and rank == 0:
        time.sleep(60)
    if how == "memory" and rank == 1:
        torch.empty(1 << 60)
    if how == "python" and rank == 1:
        raise MemoryError
    dist.all_reduce(x)
    return int(x[0])


def _pids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in folder.iterdir()]


def _gone(pids: list[int]) -> bool:
    """Whether none of the processes is alive, after at most three seconds."""
    for _ in range(60):
        alive = [pid for pid in pids if Path(f"/proc/{pid}").exists() and _state(pid) != "Z"]
        if not alive:
            return True
        time.sleep(0.05)
    return False


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def _many(rank: int) -> list[torch.Tensor]:
    return [torch.full((3,), float(number)) for number in range(400)]


def test_a_result_of_many_tensors_leaves_no_file_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    results = run_local(_many, 2, (), 30)
    assert [float(x.sum()) for x in results[1]] == [3.0 * number for number in range(400)]
    assert len(os.listdir("/proc/self/fd")) < before + 20


def _no_result(rank: int) -> object:
    return lambda: rank


def test_a_result_that_can_not_be_sent_is_said() -> None:
    with pytest.raises(RankError, match=r"^rank [01] of 2 failed: .*pickle"):
        run_local(_no_result, 2, (), 30)


def test_results_come_in_rank_order(tmp_path: Path) -> None:
    assert run_local(_work, 3, ("", str(tmp_path)), 60) == [9, 9, 9]
    assert _gone(_pids(tmp_path))


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ("raise", RankError, r"^rank 1 of 3 failed: ValueError: the first cause \(test_launch.py:\d+\); the other 2 "),
        ("input", InputError, "^model.safetensors: truncated$"),
        (
            "kill",
            RankError,
            r"^rank 2 of 3 was ended by signal 9 \(Killed\), as the kernel does when memory runs out; ",
        ),
        (
            "exit",
            RankError,
            "^rank 0 of 3 left with exit code 7 before it had a result; the other 2 ranks were stopped",
        ),
        ("memory", RankError, r"^rank 1 of 3 failed: out of memory \([\d,]+ bytes were asked for\); the other 2 "),
        ("python", RankError, r"^rank 1 of 3 failed: out of memory \(MemoryError\); the other 2 "),
    ],
)
def test_the_cause_is_named_and_all_end(tmp_path: Path, how: str, error: type[Exception], said: str) -> None:
    began = time.monotonic()
    with pytest.raises(error, match=said) as caught:
        run_local(_work, 3, (how, str(tmp_path)), 60)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 30
    assert _gone(_pids(tmp_path))


def test_a_rank_that_hangs_ends_with_the_timeout(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match="within 5 s"):
        run_local(_work, 2, ("hang", str(tmp_path)), 5)
    assert time.monotonic() - began < 15
    assert _gone(_pids(tmp_path))


def test_a_taken_port(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"^port {port} on 127.0.0.1 is taken; choose another"):
            run_local(_work, 2, ("", str(tmp_path)), 30, port=port)
    assert run_local(_work, 2, ("", str(tmp_path)), 60, port=port) == [4, 4]


def test_a_launcher_that_is_killed_takes_its_ranks_along(tmp_path: Path) -> None:
    program = (
        "import sys; from tests.runtime.test_launch import _work, run_local; run_local(_work, 2, ('hang', sys.argv[1]))"
    )
    script = tmp_path / "launch.py"
    script.write_text(f"if __name__ == '__main__':\n    {program}\n")
    folder = tmp_path / "pids"
    folder.mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, str(script), str(folder)], env=env, cwd=ROOT) as launcher:
        for _ in range(600):
            if len(list(folder.iterdir())) == 2 and all(f.read_text() for f in folder.iterdir()):
                break
            time.sleep(0.05)
        pids = _pids(folder)
        launcher.kill()
    assert len(pids) == 2
    assert _gone(pids)


def test_what_follows_from_a_lost_peer_is_not_the_cause() -> None:
    assert follows(ConnectionResetError("reset"))
    assert follows(RuntimeError("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:2"))
    assert not follows(RuntimeError("shape '[2]' is invalid"))
    assert not follows(ValueError("gloo/transport"))


def test_number_of_ranks_is_bounded() -> None:
    for world in (0, 65):
        with pytest.raises(InputError, match=f"{world} local ranks"):
            run_local(_work, world)


def test_another_number_of_ranks_than_the_layout_has(tmp_path: Path) -> None:
    from tests.runtime import tiny

    job = tiny.job(tiny.write(tmp_path / "m", "even"), "tp=2")
    with pytest.raises(IllegalLayoutError, match="needs 2 ranks, 1 were started"):
        build_mesh(job.placement, 0)


def test_torchrun_is_known_by_its_environment() -> None:
    full: dict[str, Any] = dict.fromkeys(
        ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"), "1"
    )
    assert started_by_torchrun(full)
    for name in full:
        assert not started_by_torchrun({k: v for k, v in full.items() if k != name})


def test_no_file_of_the_folder_it_is_started_in_is_run(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("open('ran', 'w')")
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text(
        "import sys, meshwright.runtime.launch.local as local\n"
        "from contextlib import nullcontext\n"
        "if __name__ == '__main__':\n"
        "    if sys.argv[1:]:\n"
        "        local._no_modules_from_here = nullcontext\n"
        "    print(local.run_local(len, 1))\n"
    )

    def ran(*words: str) -> bool:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"} | {"PYTHONPATH": str(ROOT / "src")}
        subprocess.run([sys.executable, str(script), *words], cwd=tmp_path, env=env, capture_output=True, timeout=60)
        return (tmp_path / "ran").exists()

    assert not ran()
    assert ran("unprotected"), "the file would have been found"


def test_starts_from_several_threads_leave_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    inside = Barrier(2)

    def slowly() -> None:
        with suppress(BrokenBarrierError):
            inside.wait(0.3)
        if current_thread() is threads[1]:
            time.sleep(0.1)

    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", slowly)
    threads = [Thread(target=local.start_server) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert "PYTHONSAFEPATH" not in os.environ

"""Runs live cases: imports torch once, then forks a launcher a case, which forks the ranks (torchrun's own machinery).

``python -m tests.doctor.live.zygote FOLDER NAME ...`` leaves FOLDER/NAME/{dumps,ledgers,stacks,logs}. A job hangs when
no rank has made a call for a while. ``NAME@PROGRAM`` runs a reproduction on two ranks instead: what it printed is left
in FOLDER/NAME/out.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist  # noqa: F401 - imported before the fork
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

import meshwright.runtime.ledger_file
import meshwright.runtime.record
import meshwright.runtime.transport  # noqa: F401
from meshwright.record import record

from .programs import EXPECTED

PROGRAM = str(Path(__file__).with_name("programs.py"))
#: Seconds without a new call after which a job hangs, and the bound on a case.
QUIET_S, LIMIT_S = 2.5, 90.0


def rank_main(name: str, folder: str) -> None:
    """One rank, as ``python -m meshwright.record`` runs it."""
    torch.set_num_threads(1)
    try:
        record(["--out", f"{folder}/ledgers", PROGRAM, name])
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def launch(name: str, folder: Path) -> None:
    """All ranks of a case, until they hang or one dies."""
    world = EXPECTED[name][2]
    for kind in ("dumps", "stacks", "ledgers", "logs"):
        (folder / kind).mkdir(parents=True)
    log = os.open(folder / "logs" / "launcher.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    env = {"WORLD_SIZE": str(world), "LIVE_FOLDER": str(folder), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    context = start_processes(
        name="live",
        entrypoint=rank_main,
        args={rank: (name, str(folder)) for rank in range(world)},
        envs={rank: {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)},
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "run"), redirects=Std.ALL),
        start_method="fork",
    )
    until, seen, since = time.monotonic() + LIMIT_S, -1, time.monotonic()
    while time.monotonic() < until:
        result = context.wait(timeout=0.2, period=0.05)
        if result is not None:
            if result.is_failed():
                sys.stderr.write(f"{ChildFailedError(name, result.failures)}\n")
            break
        ledgers = list((folder / "ledgers").iterdir())
        size = sum(path.stat().st_size for path in ledgers) if len(ledgers) == world else -1
        if size != seen:
            seen, since = size, time.monotonic()
        elif size > 0 and time.monotonic() - since > QUIET_S:
            break
    pids = list(context.pids().values())
    (folder / "dump").touch()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    for _ in range(40):
        if len(list((folder / "dumps").iterdir())) >= world or result is not None:
            break
        time.sleep(0.05)
    time.sleep(0.7)
    context.close(signal.SIGKILL)
    for path in (folder / "run").rglob("stderr.log"):
        path.rename(folder / "logs" / f"stderr_{path.parent.name}")


def reproduce(program: str, folder: Path) -> None:
    """Two ranks of a rendered program; what they print is kept."""
    folder.mkdir(parents=True)
    namespace = runpy.run_path(program, run_name="reproduction")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            out = os.open(folder / "out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(out, 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            torch.set_num_threads(1)
            try:
                namespace["run"](rank, port)
            finally:
                os._exit(1)
        pids.append(pid)
    until = time.monotonic() + 15 + 3 * namespace["WAIT_S"]
    while pids and time.monotonic() < until:
        pids = [pid for pid in pids if os.waitpid(pid, os.WNOHANG) == (0, 0)]
        time.sleep(0.05)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main() -> None:
    """All cases at once: they mostly wait."""
    folder, running = Path(sys.argv[1]), []
    if any("dumps" in EXPECTED.get(word, ("", "", 0, ""))[3] for word in sys.argv[2:]):
        # A dump with stacks imports this, which takes seconds; once for all ranks.
        importlib.import_module("torch._inductor.codecache")
    for word in sys.argv[2:]:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            name, _, program = word.partition("@")
            try:
                reproduce(program, folder / name) if program else launch(name, folder / name)
            except BaseException as error:
                (folder / f"{name}.failed").write_text(repr(error))
            finally:
                os._exit(0)
        running.append(pid)
    for pid in running:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()

"""One rank of a dry-run, from the fork to its end: environment, patches, the script, what it says when it leaves."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.runtime.lockstep.link import Link
from meshwright.runtime.lockstep.scratch import ForbiddenWriteError, Guard

#: Largest file that a rank may write.
MAX_FILE_BYTES = 4 * 2**30
_PR_SET_PDEATHSIG = 1
#: Trackers and hubs stay off the network.
OFFLINE = {
    "WANDB_MODE": "disabled", "WANDB_DISABLED": "true", "WANDB_SILENT": "true", "COMET_MODE": "DISABLED",
    "NEPTUNE_MODE": "debug", "CLEARML_OFFLINE_MODE": "1", "SWANLAB_MODE": "disabled", "MLFLOW_TRACKING_URI": "mlruns",
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1",
    "TRACKIO_DISABLED": "1", "PYTHONDONTWRITEBYTECODE": "1", "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_USE_AGENT_STORE": "False",
}  # fmt: skip
#: Where libraries keep files of their own.
_FOLDERS = ("TMPDIR", "MPLCONFIGDIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "WANDB_DIR", "NUMBA_CACHE_DIR")


@dataclass(frozen=True, slots=True)
class Place:
    """Where and as which rank the script runs."""

    rank: int
    world: int
    local_world: int
    script: str
    is_module: bool
    args: tuple[str, ...]
    env: dict[str, str]
    home: Path
    scratch: Path
    port: int
    steps: int | None


class _EnoughError(BaseException):
    """The steps asked for are done."""


def main(place: Place, sock: socket.socket) -> None:
    """Run the script as one rank and never return."""
    end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.dont_write_bytecode = True
    link = Link(sock)
    guard: Guard | None = None
    report: dict[str, Any]
    try:
        _redirect(place)
        _environment(place)
        guard = Guard(place.scratch, place.home)
        guard.install()
        mode = _patch(place, link, guard)
        with mode:
            _run(place)
        report = {"how": "finished"}
    except _EnoughError:
        report = {"how": "stopped"}
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        report = {"how": "raised", "why": f"sys.exit({stop.code!r})"[:300]} if code else {"how": "finished"}
    except BaseException as error:
        report = _described(error, place)
    if guard is not None and guard.refused is not None:
        report = {"how": "raised", "refused": guard.refused}
    sys.stdout.flush()
    sys.stderr.flush()
    link.tell(say="exit", **report)
    os._exit(0)


def end_with_parent(by: signal.Signals) -> None:
    """Get a signal when the parent ends, whatever ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)


def _redirect(place: Place) -> None:
    """Output into a file of scratch, input from nowhere; a signal writes where the rank is."""
    out = os.open(place.scratch / f"rank{place.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    stacks = open(place.scratch / f"rank{place.rank}.stack", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR2, stacks, all_threads=False)


def _environment(place: Place) -> None:
    """What torchrun sets for a worker (torch/distributed/elastic/agent/server/local_elastic_agent.py)."""
    local = place.rank % place.local_world
    node, nodes = place.rank // place.local_world, -(-place.world // place.local_world)
    os.environ.update(OFFLINE)
    os.environ.update(place.env)
    os.environ.update(
        RANK=str(place.rank), LOCAL_RANK=str(local), WORLD_SIZE=str(place.world), GROUP_RANK=str(node),
        NODE_RANK=str(node), GROUP_WORLD_SIZE=str(nodes), LOCAL_WORLD_SIZE=str(place.local_world),
        ROLE_RANK=str(place.rank), ROLE_WORLD_SIZE=str(place.world), ROLE_NAME="default", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(place.port), TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
    )  # fmt: skip
    for name in _FOLDERS:
        os.environ[name] = str(place.scratch / "tmp")
    for name in ("CUDA_VISIBLE_DEVICES", "PYTHONSAFEPATH", "PYTHONUNBUFFERED"):
        os.environ.pop(name, None)
    os.chdir(place.scratch / "cwd")


def _patch(place: Place, link: Link, guard: Guard) -> Any:
    """All patches; the mode to run under."""
    import torch

    from meshwright.runtime.lockstep import groups, refuse, shim
    from meshwright.runtime.lockstep.hook import Hook

    torch.set_num_threads(1)
    hook = Hook(link, place.rank, _shower(place))
    refuse.install()
    mode = shim.install(place.rank % place.local_world, place.local_world)
    groups.install(hook, place.rank, place.world)
    guard.watch_writers()
    _spawn(place)
    hook.install()
    _count_steps(place, link)
    return mode


def _shower(place: Place) -> Callable[[str], str]:
    """File names as the user knows them: relative to the folder the check runs in."""
    mirror, home = str(place.scratch / "cwd") + os.sep, str(place.home) + os.sep

    def shown(name: str) -> str:
        full = os.path.abspath(name)
        for prefix in (mirror, home):
            if full.startswith(prefix):
                return full[len(prefix) :]
        return full

    return shown


def _count_steps(place: Place, link: Link) -> None:
    """Tell every optimizer step; with a bound, stop behind the last."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    counts: dict[int, int] = {}

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        counts[id(optimizer)] = counts.get(id(optimizer), 0) + 1
        done = max(counts.values())
        link.tell(say="step", steps=done)
        if place.steps is not None and done >= place.steps:
            raise _EnoughError

    register_optimizer_step_post_hook(stepped)


def _spawn(place: Place) -> None:
    """A script that spawns its ranks itself gets the one that this process is."""
    import torch.multiprocessing

    from meshwright.runtime.lockstep.refuse import CannotRunError

    def spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, *rest: Any, **more: Any) -> None:
        if nprocs != place.local_world:
            raise CannotRunError(
                f"mp.spawn of {nprocs} processes; the check runs {place.local_world}: --world {nprocs}"
            )
        fn(place.rank % place.local_world, *args)

    mp: Any = torch.multiprocessing
    mp.spawn = mp.start_processes = spawn


def _run(place: Place) -> None:
    """The script as ``python script.py`` runs it."""
    if place.is_module:
        sys.argv = [place.script, *place.args]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(place.script, run_name="__main__", alter_sys=True)
        return
    sys.argv = [place.script, *place.args]
    sys.path.insert(0, os.path.dirname(os.path.abspath(place.script)))
    runpy.run_path(place.script, run_name="__main__")


def _described(error: BaseException, place: Place) -> dict[str, Any]:
    """What a rank says of the exception that ended it: its last line, and the innermost line of the user's own."""
    from meshwright.runtime.callsite import is_users
    from meshwright.runtime.lockstep.refuse import CannotRunError

    shown = _shower(place)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    site = f"{shown(frames[-1].filename)}:{frames[-1].lineno}" if frames else None
    line = (str(error).strip().splitlines() or [""])[0][:300]
    text = f"{type(error).__name__}: {line}" if line else type(error).__name__
    refused = str(error) if isinstance(error, CannotRunError | ForbiddenWriteError) else None
    traceback.print_exception(error, limit=-20)
    return {"how": "raised", "why": text, "site": site, "refused": refused}

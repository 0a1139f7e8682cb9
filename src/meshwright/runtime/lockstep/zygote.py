"""The process that imports torch once and forks the ranks of one dry-run after another.

Reads a request a line from standard input (JSON, see ``run.py``) and answers with a line. It has one thread and runs
nothing of the user's itself; only the packages that a script names and that are known to be slow to import are
imported here, before the fork.
"""

from __future__ import annotations

import ast
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright.runtime.lockstep import coordinator
from meshwright.runtime.lockstep.rank import OFFLINE, Place, end_with_parent, main
from meshwright.runtime.lockstep.scratch import mirror

#: Imported for every script.
_TORCH = (
    "torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.utils.data",
    "torch.nn.parallel", "torch.distributed.device_mesh", "torch._dynamo", "torch.utils.serialization",
    "meshwright.runtime.lockstep.hook", "meshwright.runtime.lockstep.groups", "meshwright.runtime.lockstep.shim",
    "meshwright.runtime.lockstep.refuse",
)  # fmt: skip
#: Imported where a script imports the package.
_PACKAGES = {
    "accelerate": ("accelerate",),
    "datasets": ("datasets",),
    "numpy": ("numpy",),
    "transformers": ("transformers", "transformers.trainer", "transformers.models.llama.modeling_llama"),
}
_TAIL_BYTES = 2000
_MAX_SCRIPT_BYTES = 4 << 20


def serve() -> None:
    """Answer requests until standard input ends."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    end_with_parent(signal.SIGTERM)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.update(OFFLINE)
    _load(_TORCH)
    answers.write(json.dumps({"ready": True}) + "\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


def _load(names: tuple[str, ...]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            continue


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run one request in a scratch folder of its own."""
    scratch = Path(os.path.realpath(tempfile.mkdtemp(prefix="meshwright-check-")))
    began = time.monotonic()
    try:
        home = Path(request["home"])
        (scratch / "tmp").mkdir()
        mirror(home, scratch)
        for name in sorted(_imports(home / request["script"])):
            _load((name,) if name.startswith("torch.") else _PACKAGES.get(name.partition(".")[0], ()))
        loaded, used = time.monotonic(), _cpu_s()
        answer = _run(request, home, scratch)
        took = {"import": loaded - began, "run": time.monotonic() - loaded, "cpu": _cpu_s() - used}
        answer["seconds"] = took
        return answer
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _cpu_s() -> float:
    """CPU time of this process and of all children that have ended."""
    return sum(os.times()[:4])


def _imports(script: Path) -> set[str]:
    """Modules that a script imports, by its text."""
    try:
        if script.stat().st_size > _MAX_SCRIPT_BYTES:
            return set()
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def _run(request: dict[str, Any], home: Path, scratch: Path) -> dict[str, Any]:
    world = int(request["world"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks: list[coordinator.Rank] = []
    gc.collect()
    gc.freeze()  # what is there now stays shared: collections of the ranks do not touch it
    for number in range(world):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for rank in ranks:
                rank.sock.close()
            place = Place(
                number, world, request["local_world"], request["script"], request["is_module"],
                tuple(request["args"]), request["env"], home, scratch, port, request["steps"],
            )  # fmt: skip
            try:
                main(place, theirs)
            finally:
                os._exit(70)
        theirs.close()
        ranks.append(coordinator.Rank(number, pid, ours))
    serving = coordinator.Coordinator(ranks, request["timeout_s"], request["memory_bytes"], scratch)
    try:
        ending = serving.run()
    finally:
        serving.close()
    return {
        "how": ending.how,
        "verdict": asdict(ending.verdict) if ending.verdict else None,
        "unsafe": asdict(ending.unsafe) if ending.unsafe else None,
        "stacks": ending.where,
        "memory_bytes": ending.memory_bytes,
        "exits": [r.exit for r in ranks],
        "steps": max(r.steps for r in ranks),
        "operations": serving.matcher.matched,
        "shifts": serving.matcher.shifts()[:3],
        "leftovers": serving.matcher.leftovers()[:20],
        "tails": [_tail(scratch / f"rank{n}.log") for n in range(world)],
    }


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    serve()

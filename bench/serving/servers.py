"""Servers that are measured: the own one and vLLM on CPU, each on one core's threads, from their start to their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench import vllm_cpu
from meshwright.judge.handoff import free_port
from meshwright.runtime.load.client import Target, target_of

ROOT = Path(__file__).parents[2]
START_S, END_S = 600.0, 30.0
#: Sequences under way, and tokens of one: the same for both servers.
SEQUENCES, LENGTH = 64, 512


@dataclass(frozen=True, slots=True)
class Server:
    """One that is up.

    Attributes:
        target: where. healthy_s: from the start of its process until ``/health`` said so. pid: of its first process.
    """

    target: Target
    healthy_s: float
    pid: int

    def metrics(self) -> dict[str, float]:
        """Values of ``/metrics``, histograms left out."""
        url = self.target.url
        with urllib.request.urlopen(f"http://{url.hostname}:{url.port}/metrics", timeout=30) as answer:
            lines = [
                line for line in answer.read().decode().splitlines() if line and line[0] != "#" and "{" not in line
            ]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def memory_bytes(self) -> int:
        """Resident bytes of all its processes, as of proc(5)."""
        return sum(_resident(pid) for pid in _tree(self.pid))

    def cpu_s(self) -> float:
        """CPU seconds that all its processes have used: they bear the load of others better than seconds do."""
        return sum(_cpu_s(pid) for pid in _tree(self.pid))


def installed(kind: str) -> bool:
    """Whether it can be started here."""
    return kind == "own" or bool(os.environ.get("MESHWRIGHT_VLLM_PYTHON"))


@contextmanager
def serving(kind: str, model: Path) -> Iterator[Server]:
    """A server that is up; it ends with the block.

    Args:
        kind: ``own``, ``vllm`` (its defaults) or ``vllm eager`` (without compiled graphs). model: folder.

    Raises:
        SystemExit: it ended, or was not healthy in time; with the end of what it printed.
    """
    port = free_port()
    words, extra = _command(kind, model, port)
    with tempfile.TemporaryDirectory(prefix="meshwright-server-") as folder, Path(folder, "log").open("w+") as log:
        began = time.monotonic()
        process = subprocess.Popen(
            words, env={**os.environ, **extra}, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            cwd=folder, start_new_session=True,
        )  # fmt: skip
        try:
            while not _healthy(port):
                if process.poll() is not None or time.monotonic() - began > START_S:
                    log.seek(0)
                    raise SystemExit(f"{kind} did not come up:\n{log.read()[-2000:]}")
                time.sleep(0.05)
            took = time.monotonic() - began
            yield Server(target_of(f"http://127.0.0.1:{port}", None, None, 300.0), took, process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _command(kind: str, model: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Words and extra environment."""
    threads = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if kind == "own":
        words = [
            sys.executable, "-m", "meshwright", "run", "serve", str(model), "--layout", "tp=1", "--dtype", "f32",
            "--port", str(port), "--max-sequences", str(SEQUENCES), "--max-len", str(LENGTH), "--no-prefix-cache",
        ]  # fmt: skip
        return words, threads | {"PYTHONPATH": str(ROOT / "src")}
    python = os.environ["MESHWRIGHT_VLLM_PYTHON"]
    words = [
        python, "-c", vllm_cpu.START, "serve", str(model), "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--skip-tokenizer-init", "--max-model-len", str(LENGTH), "--max-num-seqs", str(SEQUENCES),
        "--no-enable-prefix-caching",
    ]  # fmt: skip
    more = ["--enforce-eager"] if kind == "vllm eager" else []
    bind = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    return [*words, *more], threads | bind | {"PATH": f"{Path(python).parent}:{os.environ['PATH']}"}


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _tree(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for at in found:
        for path in Path(f"/proc/{at}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, path.read_text().split())
    return found


def _resident(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _cpu_s(pid: int) -> float:
    with suppress(OSError):
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return 0.0

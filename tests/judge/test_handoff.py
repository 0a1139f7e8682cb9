"""The hand-off to a real engine: started as planned, waited for, compared, ended with everything it started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from bench.vllm_cpu import START
from typer.testing import CliRunner

from meshwright.api import plan_serve
from meshwright.cli.main import app
from meshwright.errors import InputError, MeshwrightError
from meshwright.judge.handoff import EngineFailed, Running, Start, start_of
from meshwright.plan.memory import ServeMemory
from meshwright.specs.command import Command
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve
from tests.engines.vllm.test_started_for_real import TINY

#: A server that prints, starts a child, answers /health after a while; or dies as engines do.
STUB = """
import http.server, subprocess, sys, time
args = sys.argv
port = int(args[args.index("--port") + 1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
if "--die" in args:
    print("(EngineCore pid=7) RuntimeError: No common block size for 16", flush=True)
    print("Traceback: RuntimeError: Engine core initialization failed", flush=True)
    sys.exit(3)
time.sleep(0.5)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def stub(folder: Path) -> str:
    (folder / "stub.py").write_text(STUB)
    return f"{sys.executable} {folder / 'stub.py'}"


def child_of(log: Path) -> int:
    return int(log.read_text().split("child ")[1].split()[0])


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def gone(pid: int) -> bool:
    """Whether a process ends within some seconds."""
    end = time.monotonic() + 10
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


def test_the_planned_command_is_started_healthy_and_ended_with_its_children(tmp_path: Path) -> None:
    log = tmp_path / "boot.log"
    words = ["run", "serve", "smollm2-135m", "--engine", "vllm-0.32", "--on", "1x2xA100-40G", "--layout", "tp=1"]
    got = CliRunner().invoke(app, [*words, "--program", stub(tmp_path), "--log", str(log), "--once", "--port", "0"])
    assert got.exit_code == 0, (got.output, got.exception)
    assert "--tensor-parallel-size 1" in got.output
    assert "healthy after" in got.output
    assert "not compared" in got.output
    assert gone(child_of(log))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_no_engine_outlives_us(tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "boot.log"
    words = ["run", "serve", "smollm2-135m", "--engine", "vllm-0.32", "--on", "1x2xA100-40G", "--layout", "tp=1"]
    command = [
        sys.executable,
        "-m",
        "meshwright",
        *words,
        "--program",
        stub(tmp_path),
        "--log",
        str(log),
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as ours:
        assert ours.stdout is not None
        assert any("healthy after" in line for line in ours.stdout)
        ours.send_signal(number)
        assert ours.wait(30) == 0
    assert gone(child_of(log))


def test_a_second_interrupt_ends_the_patience(tmp_path: Path) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    running = Running(Start((sys.executable, "-c", deaf), {}, (), 9), tmp_path / "log")
    end = time.monotonic() + 30
    while "up" not in (tmp_path / "log").read_text() and time.monotonic() < end:
        time.sleep(0.05)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start what runs behind them deaf to it
    try:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        running.stop()
    finally:
        signal.signal(signal.SIGINT, before)
    assert running.process.returncode == -signal.SIGKILL
    assert time.monotonic() - began < 30


def test_health_is_asked_directly_and_of_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    log = tmp_path / "boot.log"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} on 127.0.0.1 is taken"):
            Running(Start((*stub(tmp_path).split(), "--port", str(port)), {}, (), port), log)
    running = Running(Start((*stub(tmp_path).split(), "--port", str(port)), {}, (), port), log)
    try:
        assert running.wait_healthy(30, print) < 30
    finally:
        running.stop()


def test_who_answers_no_http_is_not_healthy(tmp_path: Path) -> None:
    loop = "while 1: s.accept()[0].send(b'no\\n\\n')"
    code = f"import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n{loop}"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    running = Running(Start((sys.executable, "-c", code, str(port)), {}, (), port), tmp_path / "log")
    try:
        with pytest.raises(EngineFailed, match="not healthy within 2 s"):
            running.wait_healthy(2, print)
    finally:
        running.stop()


def test_an_engine_that_dies_is_told_by_its_first_error(tmp_path: Path) -> None:
    log = tmp_path / "boot.log"
    start = Start((*stub(tmp_path).split(), "--die", "--port", "9"), {}, (), 9)
    running = Running(start, log)
    try:
        with pytest.raises(EngineFailed, match=r"exit code 3 after \d+ s: RuntimeError: No common block size for 16"):
            running.wait_healthy(30, print)
    finally:
        running.stop()
    assert gone(child_of(log))


def test_an_engine_that_is_never_healthy_is_given_up(tmp_path: Path) -> None:
    running = Running(Start((sys.executable, "-c", "import time; time.sleep(600)"), {}, (), 9), tmp_path / "log")
    try:
        with pytest.raises(EngineFailed, match="not healthy within 1 s"):
            running.wait_healthy(1, print)
    finally:
        running.stop()
    assert running.process.returncode is not None


def test_an_engine_listens_on_loopback_unless_told_otherwise() -> None:
    serve = [Command(None, "serve", "vllm serve x")]
    assert start_of(serve, [], ["--y"], 1).words == ("vllm", "serve", "x", "--y", "--host", "127.0.0.1", "--port", "1")
    assert start_of(serve, [], [], 1, "0.0.0.0").words[-4:-2] == ("--host", "0.0.0.0")


def test_what_cannot_be_started_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs a shell"):
        start_of([Command(None, "serve", "vllm serve x | tee log")], [], [], 1)
    with pytest.raises(InputError, match="no command that serves on this node"):
        start_of([Command(1, "serve", "vllm serve x")], [], [], 1)
    with pytest.raises(InputError, match="cannot be started"):
        Running(Start(("no-such-engine",), {}, (), 1), tmp_path / "log")
    got = CliRunner().invoke(app, ["run", "serve", "smollm2-135m", "--engine", "vllm", "--dtype", "f32"])
    assert isinstance(got.exception, MeshwrightError)
    assert "--dtype belong to our own engine" in str(got.exception)


def test_a_plan_that_does_not_work_is_not_started() -> None:
    got = CliRunner().invoke(
        app, ["run", "serve", "llama-3.1-70b", "--engine", "vllm", "--on", "1x1xA100-40G", "--layout", "tp=1"]
    )
    assert got.exit_code == 1
    assert "starting" not in got.output


def test_the_cache_of_the_plan_is_in_words_on_cpu() -> None:
    plan = plan_serve("smollm2-135m", "1x2xCPU", Serve(), layout="tp=1")
    assert plan.chosen is not None
    memory = plan.chosen.memory
    assert isinstance(memory, ServeMemory)
    assert f"--kv-cache-memory-bytes {memory.kv_pool_bytes}" in plan.commands[0].text
    gpu = plan_serve("smollm2-135m", "1x1xA100-40G", Serve(), layout="tp=1")
    assert "--kv-cache-memory-bytes" not in gpu.commands[0].text


def test_blocks_on_cpu_are_those_that_its_attention_takes() -> None:
    plan = plan_serve("smollm2-135m", "1x2xCPU", Serve(), layout="tp=1")
    assert "--block-size 128" in plan.commands[0].text
    words = ["check", "--on", "1x2xCPU", "--", "vllm", "serve", "HuggingFaceTB/SmolLM2-135M"]
    refused = CliRunner().invoke(app, [*words, "--block-size", "16"])
    assert refused.exit_code == 1
    assert "--block-size 16 is no multiple of 32" in refused.output
    assert "is no multiple" not in CliRunner().invoke(app, [*words, "--block-size", "64"]).output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_vllm_is_started_queried_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = os.environ.get("MESHWRIGHT_VLLM_PYTHON")
    if not python:
        pytest.skip("MESHWRIGHT_VLLM_PYTHON does not name the Python of an environment with vLLM")
    openai = pytest.importorskip("openai")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "start.py").write_text(START)
    for name, value in (
        ("VLLM_CPU_OMP_THREADS_BIND", "0"), ("VLLM_HOST_IP", "127.0.0.1"),
        ("HF_HUB_OFFLINE", "1"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    small = ServeSettings(utilization=0.2)
    plan = plan_serve(
        str(tmp_path), "1x2xCPU", Serve(isl=64, osl=64), layout="tp=1", engine="vllm-0.32", settings=small
    )
    flags = ["--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager"]
    start = start_of(plan.commands, [python, str(tmp_path / "start.py")], flags, 18231)
    running = Running(start, tmp_path / "boot.log", tmp_path)
    try:
        running.wait_healthy(800, print)
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none")
        got = client.completions.create(
            model=str(tmp_path), prompt=[1, 2, 3], max_tokens=4, temperature=0,
            extra_body={"return_token_ids": True, "detokenize": False, "ignore_eos": True},
        )  # fmt: skip
        assert len(got.choices[0].token_ids) == 4
    finally:
        running.stop()
    from meshwright.engines.vllm import ENGINE
    from meshwright.judge.boot import compare, lines_of
    from meshwright.report.as_json import plan_json

    log = ENGINE.read_log(lines_of(running.log))
    assert log is not None
    rows = {row.term: row for row in compare(log, plan_json(plan))}
    for term in ("kv_cache", "kv_cache_tokens"):  # the log of the CPU build prints nothing else of memory
        row = rows[term]
        assert row.predicted is not None
        assert row.printed is not None
        exact = term == "kv_cache_tokens"  # bytes are printed with two digits
        assert row.printed == row.predicted if exact else abs(row.printed / row.predicted - 1) < 0.01

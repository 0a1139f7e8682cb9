"""Load on a server of known delays: what is injected is what is measured."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.errors import InputError
from meshwright.runtime.load.arrivals import fixed, poisson, read_trace, together
from meshwright.runtime.load.client import Timed, target_of
from meshwright.runtime.load.outcome import outcome, read_plan, spread
from meshwright.runtime.load.run import Prompts, drive

#: Delays of the server, much longer than what a busy machine adds to them.
FIRST_S, EACH_S = 0.3, 0.15


class Handler(BaseHTTPRequestHandler):
    """A server that waits FIRST_S, then a token every EACH_S; prompts that begin with 13 break off, with 14 fail.

    With 15 it counts its tokens in another way than the API does, with 16 it says infinitely many, with 17 its stream
    has no end, with 18 it is nested too deeply.
    """

    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[dict[str, Any]]] = []
    under_way, most = 0, 0
    lock = threading.Lock()

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "stub"}]}).encode()
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            Handler.under_way += 1
            Handler.most = max(Handler.most, Handler.under_way)
            self.seen.append(asked)
        first = asked["prompt"][0]
        self.send_response(503 if first == 14 else 200)
        self.send_header("Connection", "close")
        self.end_headers()
        if first == 14:
            self.wfile.write(json.dumps({"error": {"message": "full"}}).encode())
        elif first == 16:
            self.wfile.write(b'data: {"choices": [{"text": "x"}], "usage": {"completion_tokens": Infinity}}\n\n')
        elif first == 17:
            with suppress(OSError):
                while True:
                    self.wfile.write(b": still here\n\n" * 1000)
        elif first == 18:
            self.wfile.write(b"data: " + b"[" * 100_000 + b"\n\n")
        else:
            time.sleep(FIRST_S)
            for i in range(asked["max_tokens"]):
                if i:
                    time.sleep(EACH_S)
                self._event({"choices": [{"text": "x"}]})
                if first == 13:
                    break
            else:
                key = "tokens" if first == 15 else "completion_tokens"
                self._event({"choices": [], "usage": {key: asked["max_tokens"]}})
                self.wfile.write(b"data: [DONE]\n\n")
        with self.lock:
            Handler.under_way -= 1
        self.close_connection = True

    def _event(self, body: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Handler.seen, Handler.under_way, Handler.most = [], 0, 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_what_the_server_waits_is_what_is_measured(server: str) -> None:
    timed = drive(target_of(server, None, None, 30), fixed(4, 5, 8, 4), Prompts(12))
    got = outcome(timed, ttft_s=60, tpot_s=60)
    assert got.failed == 0
    assert got.ttft is not None
    assert got.tpot is not None
    assert FIRST_S <= got.ttft.percentiles[50] < 2 * FIRST_S
    assert EACH_S <= got.tpot.percentiles[50] < 2 * EACH_S
    assert [t.tokens for t in timed] == [4] * 5
    assert got.goodput_s == got.requests_s
    assert outcome(timed, ttft_s=FIRST_S / 2).goodput_s == 0
    sent = [t.sent_s for t in timed]
    assert all(b - a > 0.2 for a, b in pairwise(sent)), "an open loop does not wait for answers"
    assert all(a["ignore_eos"] and a["stream"] and len(a["prompt"]) == 8 for a in Handler.seen)


def test_a_closed_loop_keeps_so_many_under_way(server: str) -> None:
    drive(target_of(server, "stub", None, 30), together(7, 3, 1), Prompts(12), 3)
    assert Handler.most == 3
    assert len(Handler.seen) == 7


def test_answers_that_fail_or_break_off_are_counted_and_not_averaged(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Prompts, "of", lambda self, number, tokens: [12 + number])
    got = outcome(drive(target_of(server, None, None, 30), together(4, 1, 2), Prompts(), 4))
    assert (got.requests, got.failed) == (4, 3)
    assert sorted(got.errors) == ["503: full", "KeyError: 'completion_tokens'", "ValueError: the stream broke off"]
    assert got.ttft is not None
    assert got.ttft.count == 1


def test_a_hostile_stream_is_an_error_of_its_request(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prompts, "of", lambda self, number, tokens: [16 + number])
    got = outcome(drive(target_of(server, None, None, 30), together(3, 1, 2), Prompts(), 3))
    assert (got.requests, got.failed) == (3, 3)
    kinds = [error.split(":")[0] for error in sorted(got.errors)]
    assert kinds == ["OverflowError", "RecursionError", "ValueError"]
    assert any("the stream has no end after 10016 lines" in error for error in got.errors)


def test_an_interrupted_run_sends_no_more(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seconds: float) -> None:
        if threading.current_thread() is threading.main_thread() and len(Handler.seen) == 2:
            raise KeyboardInterrupt
        sleep(max(0.01, seconds))

    sleep = time.sleep
    monkeypatch.setattr("meshwright.runtime.load.run.MAX_UNDER_WAY", 1)
    monkeypatch.setattr("meshwright.runtime.load.run.time.sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        drive(target_of(server, None, None, 30), fixed(1e3, 500, 1, 2), Prompts())
    sleep(3 * (FIRST_S + EACH_S))
    assert len(Handler.seen) <= 3


def test_arrivals_are_those_of_the_rate_and_the_seed() -> None:
    got = poisson(5.0, 20_000, 1, 1, seed=3)
    assert got == poisson(5.0, 20_000, 1, 1, seed=3) != poisson(5.0, 20_000, 1, 1, seed=4)
    gaps = [b.at_s - a.at_s for a, b in pairwise(got)]
    mean = sum(gaps) / len(gaps)
    assert abs(mean - 0.2) < 0.006
    assert abs((sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5 / mean - 1) < 0.05, "exponential gaps"


def test_percentiles_by_hand() -> None:
    got = spread([float(i) for i in range(1, 101)])
    assert got is not None
    assert (got.mean, got.percentiles) == (50.5, {50: 50.0, 90: 90.0, 99: 99.0})
    one = Timed(0.0, 1, 0.0, 1.0, 4.0, 4)
    assert (one.ttft_s, one.tpot_s, one.total_s) == (1.0, 1.0, 4.0)


def test_a_trace_is_read_and_what_is_none_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [{"at_s": 2.5, "input_tokens": 3, "output_tokens": 4}, {"at_s": 0, "input_tokens": 1, "output_tokens": 1}]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert [a.at_s for a in read_trace(file)] == [0.0, 2.5]
    for text in ("", "[]", '{"at_s": NaN, "input_tokens": 1, "output_tokens": 1}', '{"at_s": 1}', "[" * 9999):
        file.write_text(text)
        with pytest.raises(InputError, match=r"trace\.jsonl"):
            read_trace(file)
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path / "none")


def test_the_command_compares_with_a_plan(server: str, tmp_path: Path) -> None:
    plan, page = tmp_path / "plan.json", tmp_path / "load.html"
    times = {"value": FIRST_S, "low": FIRST_S / 2, "high": FIRST_S * 9, "word": "modelled"}
    plan.write_text(json.dumps({"verdict": "fits: <b>", "cost": {"predicted": {"ttft_s": times}}}))
    words = ["run", "load", server, "--rate", "9", "--requests", "3", "--isl", "4", "--osl", "2", "--warmup", "0"]
    got = CliRunner().invoke(app, [*words, "--against", str(plan), "--html", str(page), "--vocabulary", "12"])
    assert got.exit_code == 0, got.output
    assert "3 of 3 requests answered" in got.output
    assert "inside 150 to 2,700" in got.output
    assert "http" not in page.read_text().split("<body>")[0]
    told = json.loads(CliRunner().invoke(app, [*words, "--json", "--vocabulary", "12"]).stdout)
    assert told["requests"] == len(told["samples"]) == 3
    assert told["ttft"]["percentiles"].keys() == {"p50", "p90", "p99"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--rate, --concurrency or --trace"),
        (["--rate", "1", "--concurrency", "1"], "--rate, --concurrency or --trace"),
        (["--rate", "0"], "--rate"),
        (["--rate", "1", "--against", "nothing.json"], "nothing.json"),
        (["--rate", "1", "--model", "other"], "'other' is not served; it has stub"),
    ],
)
def test_bad_input_is_told_in_a_line(server: str, words: list[str], says: str) -> None:
    got = CliRunner().invoke(app, ["run", "load", server, *words])
    assert isinstance(got.exception, InputError)
    assert says in str(got.exception)


def test_no_server_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is the server running"):
        target_of("http://127.0.0.1:9", None, None, 5)
    with pytest.raises(InputError, match="no address"):
        target_of("ftp://x", None, None, 5)
    bad = tmp_path / "p.json"
    bad.write_text("{}")
    with pytest.raises(InputError, match="no predicted times"):
        read_plan(bad)

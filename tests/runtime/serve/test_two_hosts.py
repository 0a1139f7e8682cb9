"""Two hosts, as network namespaces with a slow link between them, under Ray: tp inside a host, stages across."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.two_hosts import ADDRESSES, NoHosts, hosts, inside

from meshwright.runtime.launch.ray import interface_of, shortage
from tests.runtime import tiny

ENV = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stages_across_two_hosts_and_tp_inside_say_what_one_process_says(checkpoint: Callable[[str], Path]) -> None:
    pytest.importorskip("ray")
    folder = checkpoint("even")
    ray = str(Path(sys.executable).with_name("ray"))
    start = ["start", "--num-cpus=2", "--disable-usage-stats", "--object-store-memory=100000000"]
    try:
        with hosts() as (a, b):
            at = f"{ADDRESSES[0]}:6399"
            head = [
                ray,
                *start,
                "--head",
                f"--node-ip-address={ADDRESSES[0]}",
                "--port=6399",
                "--include-dashboard=false",
            ]
            run(inside(a, head))
            run(inside(b, [ray, *start, f"--address={at}", f"--node-ip-address={ADDRESSES[1]}"]))
            words = [
                sys.executable,
                "-m",
                "meshwright",
                "run",
                "serve",
                str(folder),
                "--launch",
                "ray",
                "--address",
                at,
            ]
            too_wide = inside(a, [*words, "--layout", "tp=4", "--port", "0"])
            refused = subprocess.run(too_wide, capture_output=True, text=True, env=ENV, timeout=200)
            assert refused.returncode == 1
            assert "a tp group needs 4 CPU on one node, and no node of the Ray cluster has that" in refused.stderr
            serving = subprocess.Popen(inside(a, [*words, "--layout", "tp=2,pp=2", "--port", "8231"]), env=ENV)
            try:
                body = json.dumps({"prompt": [5, 99, 17], "max_tokens": 6, "temperature": 0, "return_token_ids": True})
                got = json.loads(asked(a, body))
            finally:
                serving.terminate()
                serving.wait(60)
            sent = subprocess.run(
                inside(a, ["sh", "-c", "cat /sys/class/net/mwhost-a/statistics/tx_bytes"]),
                capture_output=True,
                text=True,
            )
    except NoHosts as error:
        pytest.skip(f"no two hosts here: {error}")
    assert got["choices"][0]["token_ids"] == tiny.oracle(folder, ((5, 99, 17),), 6)[0][0]
    assert int(sent.stdout) > 10_000


def run(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, env=ENV, timeout=120)
    assert done.returncode == 0, done.stdout[-800:] + done.stderr[-800:]


def asked(host: str, body: str) -> str:
    """The answer of the server, once it is there."""
    program = (
        "import sys, urllib.request as u; r = u.Request('http://127.0.0.1:8231/v1/completions', sys.argv[1].encode());"
        "print(u.urlopen(r, timeout=60).read().decode())"
    )
    end = time.monotonic() + 300
    while True:
        done = subprocess.run(
            inside(host, [sys.executable, "-c", program, body]), capture_output=True, text=True, timeout=100
        )
        if done.returncode == 0 or time.monotonic() > end:
            assert done.returncode == 0, done.stderr[-500:]
            return done.stdout
        time.sleep(2)


def test_a_shortage_is_told_before_anything_waits() -> None:
    nodes = {"10.0.0.1": {"CPU": 2.0}, "10.0.0.2": {"CPU": 2.0, "GPU": 1.0}}
    assert shortage([{"CPU": 2.0, "GPU": 0.0}] * 2, nodes) == ""
    assert shortage([{"CPU": 4.0, "GPU": 0.0}], nodes) == (
        "a tp group needs 4 CPU on one node, and no node of the Ray cluster has that (10.0.0.1 has 2 CPU, 10.0.0.2 has "
        "2 CPU and 1 GPU); take a smaller tp, or larger nodes"
    )
    assert "3 groups of ranks need 6 CPU, the cluster has 4 CPU" in shortage([{"CPU": 2.0}] * 3, nodes)
    assert "no node" in shortage([{"CPU": 1.0}], {})


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == ("lo" if sys.platform == "linux" else None)
    assert interface_of("203.0.113.9") is None

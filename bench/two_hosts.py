"""Two hosts on this machine: network namespaces joined by a link of a given speed; tp and pp across it, measured.

    sudo python -m bench.two_hosts MODEL [--link 1gbit] [--out bench/results/two_hosts.json]

Each host is a network namespace; between them lies a veth pair whose both ends send through ``tc tbf``. The same
greedy generation runs under torchrun with one rank a host, once with tp=2 and once with pp=2 across the link, and with
both ranks on one host; ratios are of medians of runs that alternate. Predictions are those of ``plan serve`` for the
own engine on two such nodes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Addresses of the hosts.
ADDRESSES = ("10.77.0.1", "10.77.0.2")
#: Ports of torchrun's rendezvous, one a run: a worker of the next run could meet the store of the last one.
PORTS = itertools.count(29541)
RUN_S = 240
NEW, LENGTH, PROMPTS = 24, 32, 8


class NoHosts(Exception):
    """Namespaces cannot be made here; the message says why."""


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise NoHosts(f"ip {' '.join(words)}: {done.stderr.strip()[:120]}")


@contextmanager
def hosts(rate: str = "1gbit", prefix: str = "mwhost") -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a link; their names. All their processes end with them.

    Raises:
        NoHosts: the right or the tools to make them are missing.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NoHosts(f"{tool} is not installed")
    if os.geteuid():
        raise NoHosts("making network namespaces needs root")
    names = (f"{prefix}a", f"{prefix}b")
    ends = tuple(map(end_of, names))
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", end, "up")
            limit = ["tc", "qdisc", "add", "dev", end, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            done = subprocess.run(inside(name, limit), capture_output=True, text=True, timeout=20)
            if done.returncode:
                raise NoHosts(f"tc: {done.stderr.strip()[:120]}")
        yield names
    finally:
        for name in names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, timeout=20)
            for pid in found.stdout.split():
                subprocess.run(["kill", "-9", pid], capture_output=True, timeout=20)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def end_of(host: str) -> str:
    """A host's end of the link."""
    return f"{host[:-1]}-{host[-1]}"


def inside(host: str, words: Sequence[str]) -> list[str]:
    """A command on a host."""
    return ["ip", "netns", "exec", host, *words]


def generation(where: Sequence[str], layout: str, model: Path) -> dict[str, Any]:
    """One generation of two ranks, on the hosts ``where``: its JSON."""
    nodes = len(where)
    prompts = [",".join(str(1 + (7 * p + 3 * i) % 900) for i in range(LENGTH)) for p in range(PROMPTS)]
    words = [
        "run",
        "generate",
        str(model),
        "--layout",
        layout,
        "--max-new-tokens",
        str(NEW),
        "--json",
        "--dtype",
        "f32",
    ]
    words += [word for prompt in prompts for word in ("--prompt-ids", prompt)]
    running, port = [], str(next(PORTS))
    for number, host in enumerate(where):
        launch = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node", str(2 // nodes),
            "--node-rank", str(number), "--master-addr", ADDRESSES[0], "--master-port", port, "-m", "meshwright",
        ]  # fmt: skip
        env = {**os.environ, "GLOO_SOCKET_IFNAME": end_of(host), "OMP_NUM_THREADS": "1"}
        running.append(
            subprocess.Popen(
                inside(host, [*launch, *words]), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
            )
        )
    said = [process.communicate(timeout=RUN_S) for process in running]
    if any(process.returncode for process in running):
        raise SystemExit(f"{layout}: {said[0][1][-800:]} {said[-1][1][-800:]}")
    found: dict[str, Any] = json.loads(said[0][0].strip().splitlines()[-1])
    return found


def predicted(layout: str, model: Path, link: str, nodes: int) -> float:
    """Seconds of a token that the plan says, one replica with all prompts."""
    from meshwright.api import plan_serve
    from meshwright.specs.workload import Serve

    on = f"{nodes}x{2 // nodes}xCPU" + (f"@{link}" if nodes > 1 else "")
    plan = plan_serve(str(model), on, Serve(LENGTH, NEW, concurrency=PROMPTS), layout=layout, engine="meshwright")
    if plan.chosen is None or plan.chosen.cost.predicted is None:
        raise SystemExit(f"{layout} on {on}: {plan.verdict}")
    return plan.chosen.cost.predicted.tpot.value


def measure(model: Path, rate: str, link: str, runs: int) -> dict[str, Any]:
    """All cases, alternating; medians and the plan's word."""
    cases = {
        "tp=2 across": ("tp=2", 2),
        "pp=2 across": ("pp=2", 2),
        "tp=2 inside": ("tp=2", 1),
        "pp=2 inside": ("pp=2", 1),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    tokens: dict[str, Any] = {}
    with hosts(rate) as names:
        for _ in range(runs):
            for name, (layout, nodes) in cases.items():
                got = generation(names[:nodes], layout, model)
                times[name].append((got["total_s"] - got["first_token_s"]) / (NEW - 1))
                tokens[name] = got["tokens"]
    same = all(t == tokens["tp=2 inside"] for t in tokens.values())
    rows = {
        name: {
            "measured_tpot_s": round(statistics.median(times[name]), 6),
            "predicted_tpot_s": round(predicted(layout, model, link, nodes), 6),
        }
        for name, (layout, nodes) in cases.items()
    }
    return {"link": rate, "prompts": PROMPTS, "length": LENGTH, "new": NEW, "same_tokens": same, "cases": rows}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--link", default="eth-1g", help="name of such a link in the atlas")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    try:
        out = measure(asked.model, asked.rate, asked.link, asked.runs)
    except NoHosts as error:
        raise SystemExit(f"no hosts: {error}") from None
    out |= {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "load": os.getloadavg()[0]}
    text = json.dumps(out, indent=2) + "\n"
    if asked.out:
        asked.out.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()

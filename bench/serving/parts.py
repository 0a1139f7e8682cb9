"""The parts of the bench of serving: goodput beside vLLM, times beside the plan's, a long run."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.serving.servers import ROOT, Server, installed, serving
from meshwright.runtime.load.arrivals import Arrival, poisson, together
from meshwright.runtime.load.outcome import Outcome, Predicted, outcome, read_plan
from meshwright.runtime.load.run import Prompts, drive

#: Tokens of a prompt and of an answer, of every request of the first two parts.
ISL, OSL = 128, 64
#: Targets of goodput.
TTFT_S, TPOT_S = 2.0, 0.1
#: Closed loop by which the capacity of a server is found.
CONCURRENCY, WARM = 16, 4
VOCABULARY = 8000
#: Shares of the capacity: offered to both servers, and at which the plan is held against the server.
OFFERED, HELD = (0.5, 0.9, 1.2), (0.3, 0.6, 0.9)
#: Between two looks at the memory of a long run.
LOOK_S = 5.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is run.

    Attributes:
        model: folder. seconds: of one load. rounds: of starts of every server. minutes: of the long run.
        against: kind of the other server. seed: of arrivals and prompts. quick: a calibration of few shapes.
    """

    model: Path
    seconds: float = 30.0
    rounds: int = 3
    minutes: float = 60.0
    against: str = "vllm"
    seed: int = 1
    quick: bool = False


def goodput(wanted: Wanted) -> dict[str, Any]:
    """Both servers in turns, each started anew every round, at the same offered loads; time to healthy of both.

    Raises:
        SystemExit: the other one is not installed, or one does not come up.
    """
    if not installed(wanted.against):
        raise SystemExit("MESHWRIGHT_VLLM_PYTHON names no Python with vLLM")
    kinds = ("own", wanted.against)
    healthy: dict[str, list[float]] = {kind: [] for kind in kinds}
    full: dict[str, float] = {}
    for kind in kinds:
        with serving(kind, wanted.model) as server:
            healthy[kind].append(server.healthy_s)
            full[kind] = capacity(server, together(_count(wanted.seconds, 4.0), ISL, OSL), wanted.seed)
        _say(f"{kind}: healthy after {healthy[kind][0]:.1f} s, capacity {full[kind]:.2f} requests/s")
    found: dict[str, dict[float, list[dict[str, Any]]]] = {kind: {share: [] for share in OFFERED} for kind in kinds}
    base = full[wanted.against]
    for number in range(wanted.rounds):
        for kind in kinds if number % 2 == 0 else kinds[::-1]:
            with serving(kind, wanted.model) as server:
                healthy[kind].append(server.healthy_s)
                warm(server, wanted.seed)
                for share in OFFERED:
                    rate = share * base
                    due = poisson(rate, _count(wanted.seconds, rate), ISL, OSL, wanted.seed + number)
                    before = server.cpu_s()
                    result = outcome(drive(server.target, due, _prompts(number)), TTFT_S, TPOT_S)
                    used = (server.cpu_s() - before) / len(due)
                    found[kind][share].append(row(result) | {"cpu_s_a_request": round(used, 4)})
                    _say(f"round {number + 1}, {kind} at {rate:.2f}/s: {found[kind][share][-1]}")
    loads = [
        {
            "offered_per_s": round(share * base, 3),
            "ratio": round(_mid(found["own"][share]) / max(1e-9, _mid(found[wanted.against][share])), 3),
            **{kind: found[kind][share] for kind in kinds},
        }
        for share in OFFERED
    ]
    return {
        "isl": ISL, "osl": OSL, "targets_s": [TTFT_S, TPOT_S], "capacity_per_s": _rounded(full),
        "healthy_s": {kind: [round(s, 2) for s in healthy[kind]] for kind in kinds},
        "healthy_ratio": round(median(healthy["own"]) / median(healthy[wanted.against]), 3), "loads": loads,
    }  # fmt: skip


def predicted(wanted: Wanted, scratch: Path) -> dict[str, Any]:
    """A calibration of this machine, then TTFT and TPOT as planned on it beside what clients measure."""
    here = scratch / "here.toml"
    began = time.monotonic()
    quick = ["--quick"] if wanted.quick else []
    _meshwright("calibrate", "--dtype", "f32", "--device", "cpu", "--ranks", "1", "--out", str(here), *quick)
    took = time.monotonic() - began
    rows = []
    with serving("own", wanted.model) as server:
        full = capacity(server, together(_count(wanted.seconds, 4.0), ISL, OSL), wanted.seed)
        _say(f"calibrated in {took:.0f} s; capacity {full:.2f} requests/s")
        for share in HELD:
            rate = round(share * full, 3)
            due = poisson(rate, _count(2 * wanted.seconds, rate), ISL, OSL, wanted.seed)
            came = round(len(due) / due[-1].at_s, 3)  # a minute's arrivals are some percent more or less than asked
            measured = outcome(drive(server.target, due, _prompts(wanted.seed)))
            rows.append(beside(share, came, measured, planned(wanted.model, here, came, scratch)))
            _say(json.dumps(rows[-1]))
    return {"isl": ISL, "osl": OSL, "calibration_s": round(took, 1), "capacity_per_s": round(full, 3), "loads": rows}


def planned(model: Path, here: Path, rate: float, scratch: Path) -> Predicted:
    """What ``plan serve`` says of the own engine on the calibrated machine at a rate."""
    file = scratch / "plan.json"
    file.write_text(
        _meshwright(
            "plan", "serve", str(model), "--on", str(here), "--engine", "meshwright", "--layout", "tp=1", "--isl",
            str(ISL), "--osl", str(OSL), "--rate", str(rate), "--json",
        )
    )  # fmt: skip
    return read_plan(file)


def beside(share: float, rate: float, measured: Outcome, said: Predicted) -> dict[str, Any]:
    """Means, measured and planned, and how far the plan is off."""
    out: dict[str, Any] = {"share": share, "rate_per_s": rate, "requests": measured.requests, "failed": measured.failed}
    for name, spread, plan in (("ttft", measured.ttft, said.ttft_s), ("tpot", measured.tpot, said.tpot_s)):
        is_, planned_s = (spread.mean if spread is not None else None), (plan or {}).get("value")
        off = round(planned_s / is_ - 1, 3) if is_ and planned_s is not None else None
        out[name] = {
            "measured_s": is_,
            "median_s": spread and spread.percentiles[50],
            "planned_s": planned_s,
            "off": off,
        }
    return out


def soak(wanted: Wanted) -> dict[str, Any]:
    """Requests of mixed lengths at 90 % of the capacity for some minutes: failures, growth, blocks left over."""
    with serving("own", wanted.model) as server:
        full = capacity(server, mixed(_count(wanted.seconds, 4.0), 1e9, wanted.seed), wanted.seed)
        rate = 0.9 * full
        due = mixed(max(2, round(60 * wanted.minutes * rate)), rate, wanted.seed + 1)
        _say(f"capacity {full:.2f} requests/s; {len(due)} requests at {rate:.2f}/s")
        looks = Looks(server)
        result = outcome(drive(server.target, due, _prompts(wanted.seed + 1), None, _progress(len(due))))
        looks.stop()
        time.sleep(1)
        metrics = server.metrics()
    return {
        "minutes": round(result.seconds / 60, 2), "capacity_per_s": round(full, 3), "offered_per_s": round(rate, 3),
        "requests": result.requests, "errors": result.errors, **row(result), "memory": looks.growth(),
        "restarts": metrics["meshwright_engine_restarts_total"],
        "blocks_left": metrics["meshwright_kv_cache_usage_perc"],
        "preemptions": metrics["meshwright_num_preemptions_total"],
    }  # fmt: skip


def mixed(count: int, rate: float, seed: int) -> list[Arrival]:
    """A Poisson process of requests of 8 to 256 prompt tokens and 4 to 96 new ones."""
    rng = random.Random(seed)
    return [
        Arrival(a.at_s, round(8 * 2 ** rng.uniform(0, 5)), round(4 * 2 ** rng.uniform(0, 4.58)))
        for a in poisson(rate, count, 1, 1, seed)
    ]


class Looks:
    """Looks at the memory of a server until it is stopped."""

    def __init__(self, server: Server) -> None:
        self.seen: list[int] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(server,), daemon=True)
        self._thread.start()

    def _watch(self, server: Server) -> None:
        while not self._over.wait(LOOK_S):
            self.seen.append(server.memory_bytes())

    def stop(self) -> None:
        """No more."""
        self._over.set()
        self._thread.join()

    def growth(self) -> dict[str, Any]:
        """Medians of the second and of the last quarter, bytes, and by how much the latter is more."""
        quarter = len(self.seen) // 4
        if not quarter:
            return {"looks": len(self.seen)}
        second, last = median(self.seen[quarter : 2 * quarter]), median(self.seen[-quarter:])
        return {
            "looks": len(self.seen), "second_quarter_bytes": round(second), "last_quarter_bytes": round(last),
            "growth": round(last / second - 1, 5), "highest_bytes": max(self.seen),
        }  # fmt: skip


def capacity(server: Server, due: Sequence[Arrival], seed: int) -> float:
    """Requests a second of a closed loop, after it is warm."""
    warm(server, seed)
    return outcome(drive(server.target, due, _prompts(seed), CONCURRENCY)).requests_s


def warm(server: Server, seed: int) -> None:
    """Some requests that do not count."""
    drive(server.target, together(WARM, ISL, OSL), _prompts(seed + 1000), WARM)


def row(result: Outcome) -> dict[str, Any]:
    """What is noted of a load."""
    spreads = {name: getattr(result, name) for name in ("ttft", "tpot")}
    return {
        "failed": result.failed, "answered_per_s": round(result.requests_s, 3),
        "goodput_per_s": None if result.goodput_s is None else round(result.goodput_s, 3),
        "tokens_per_s": round(result.tokens_s, 1), "late_s": round(result.late_s, 4),
        **{f"{name}_s": None if s is None else _rounded(asdict(s)) for name, s in spreads.items()},
    }  # fmt: skip


def _rounded(values: Any) -> Any:
    """Floats to a tenth of a millisecond."""
    if isinstance(values, dict):
        return {key: _rounded(value) for key, value in values.items()}
    return round(values, 4) if isinstance(values, float) else values


def _mid(rows: Sequence[dict[str, Any]]) -> float:
    return float(median(r["goodput_per_s"] for r in rows))


def _count(seconds: float, rate: float) -> int:
    return max(CONCURRENCY, round(seconds * rate))


def _prompts(seed: int) -> Prompts:
    return Prompts(VOCABULARY, seed)


def _progress(count: int) -> Any:
    told = [time.monotonic()]

    def say(ended: int, failed: int) -> None:
        if time.monotonic() - told[0] > 30:
            told[0] = time.monotonic()
            _say(f"{ended} of {count} ended, {failed} failed")

    return say


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _meshwright(*words: str) -> str:
    """Output of a command; a plan that says no (exit 1) is one as well.

    Raises:
        SystemExit: it failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *words], capture_output=True, text=True, cwd=ROOT, timeout=900
    )
    if done.returncode and not (words[0] == "plan" and done.returncode == 1 and done.stdout):
        raise SystemExit(f"meshwright {' '.join(words)}: {done.stderr.strip()[-500:]}{done.stdout.strip()[-500:]}")
    return done.stdout

"""Mutated profiler traces, tables of jobs, metrics and ledgers of serving engines, read and judged in this process: no
traceback, bounded time and memory.

    python bench/doctor_trace_fuzz.py [COUNT] [SEED]      default 5000 0

Half of the mutations change bytes of the file (flips, cuts, repetitions, insertions), half change values of events
(other types, huge and negative numbers, nested lists). A case is one job of two ranks, one of them mutated; what is
found is written out as text and JSON as well.
"""

from __future__ import annotations

import io
import json
import random
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any, BinaryIO, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from tests.doctor import job_maker
from tests.doctor.trace_maker import TraceMaker

from bench import fuzzing
from bench.fuzzing import Outcome
from meshwright.doctor.incident import Incident
from meshwright.doctor.judge import judge
from meshwright.doctor.readers import Source, kineto, ledger, serving_metrics, straggler
from meshwright.errors import InputError
from meshwright.report.doctor import as_json, as_text

_BYTES = [
    b"}",
    b"]",
    b"[",
    b"{",
    b'"',
    b",",
    b"\\",
    b"\x00",
    b"\xff\xfe",
    b"NaN",
    b"1e999",
    b"[" * 500,
    b"}, {",
    b"null",
]
_VALUES: list[Any] = [
    None, True, -1, 0, 1 << 31, 1 << 63, 1 << 200, -(1 << 70), 1.5, float("nan"), float("inf"), 1e300, "", "x" * 3000,
    "\x00", "[0, 1, 99999999]", "[" + "0, " * 5000 + "...]", [], {}, [[]], [[[[]]]], {"a": []}, ["0", "x"], "[bold]",
    "NaN", [1 << 80], {"traceEvents": []}, "ProfilerStep#99999999999", "nccl:all_reduce",
]  # fmt: skip


def documents() -> list[dict[str, Any]]:
    """Small jobs: on devices and on CPU."""
    out = []
    for device in (True, False):
        m = TraceMaker(2, device=device)
        for _ in range(2):
            m.begin()
            for r in m.ranks:
                m.data(r, 0.05 if r else 0.001)
                m.work(r, "forward", 0.01, 3)
                m.host(r, "Python GC", 0.001, "python_function")
                m.host(r, "cudaStreamSynchronize", 0.001, "cuda_runtime")
                m.work(r, "backward", 0.01, 3)
            m.meet("all_reduce", 1 << 18, 0.001, named=not device)
            m.meet("all_to_all", 1 << 10, 0.001)
            m.hand_off(0, 1, 100, 0.001)
            m.end()
        out += [m.document(r) for r in m.ranks]
    return out


def table() -> bytes:
    """A small pipelined job as parquet."""
    import polars as pl

    target = io.BytesIO()
    pl.DataFrame(job_maker.rows(2, 2, 3, 2, lambda *at: 0.1)).write_parquet(target)
    return target.getvalue()


def _bytes(data: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.randint(1, 4)):
        at, length = chance.randrange(len(data) + 1), chance.randrange(1, 400)
        how = chance.randrange(5)
        if how == 0:
            data = data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
        elif how == 1:
            data = data[:at]
        elif how == 2:
            data = data[:at] + data[at + length :]
        elif how == 3:
            data = data[:at] + data[max(0, at - length) : at] + data[at:]
        else:
            data = data[:at] + chance.choice(_BYTES) + data[at:]
    return data


def _values(document: dict[str, Any], chance: random.Random) -> bytes:
    copy = json.loads(json.dumps(document))
    for _ in range(chance.randint(1, 12)):
        target: Any = copy if chance.random() < 0.1 else chance.choice(copy["traceEvents"] or [{}])
        while isinstance(target, dict) and target:
            key = chance.choice(list(target))
            if isinstance(target[key], dict) and chance.random() < 0.7:
                target = target[key]
                continue
            if key != "traceEvents":
                target[key] = deepcopy(chance.choice(_VALUES))
            break
    return json.dumps(copy).encode()


def serving() -> tuple[bytes, tuple[bytes, bytes]]:
    """Three scrapes of an engine with its connector, and the ledgers of two ranks that hand the KV cache on."""
    names = ["num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total", "nixl_num_failed_transfers_total"]
    for name in ("time_to_first_token_seconds", "nixl_xfer_time_seconds", "nixl_bytes_transferred"):
        names += [f"{name}_sum", f"{name}_count"]
    scrapes = "".join(f'vllm:{name}{{engine="0"}} {3**n}\n' for n in range(3) for name in names)
    ledgers = []
    for rank, op in enumerate(("send", "recv")):
        place = {"rank_class": f"rank{rank}", "op": op, "peer": 1 - rank, "group": "0-1", "name": "KV blocks"}
        size = {"payload_bytes": 1 << 20, "layer": 3, "table": "entries", "state": "completed"}
        times = [{"enqueued_ns": 10**9 * n, "ended_ns": 10**9 * n + 10**6} for n in range(4)]
        rows = [{"version": 1, "meta": {"world": "2"}}, {"table": "ranks", "rank": rank, "clock_offset_ns": 5}]
        ledgers.append("\n".join(json.dumps(r) for r in [*rows, *({**place, **size, **t} for t in times)]).encode())
    return scrapes.encode(), (ledgers[0], ledgers[1])


def _served(chance: random.Random, incident: Incident) -> None:
    """One of both, mutated."""
    metrics, ledgers = serving()
    if chance.random() < 0.5:
        serving_metrics.read(_source("m.txt", _bytes(metrics, chance)), incident)
        return
    mutant = chance.randrange(2)
    data = [_bytes(text, chance) if r == mutant else text for r, text in enumerate(ledgers)]
    ledger.read_many([_source(f"{r}.jsonl", text) for r, text in enumerate(data)], incident)


def _source(name: str, data: bytes) -> Source:
    return Source(name, data[:4096], lambda: cast(BinaryIO, io.BytesIO(data)), len(data))


def case(chance: random.Random, papers: list[dict[str, Any]], parquet: bytes) -> str:
    """One incident; the kind of its first finding."""
    incident = Incident()
    try:
        draw = chance.random()
        if draw < 0.1:
            _served(chance, incident)
        elif draw < 0.2:
            straggler.read(_source("t.parquet", _bytes(parquet, chance)), incident)
        else:
            first = 2 * chance.randrange(2)
            mutant = chance.randrange(2)
            for r in range(2):
                data = json.dumps(papers[first + r]).encode()
                if r == mutant:
                    data = _bytes(data, chance) if chance.random() < 0.5 else _values(papers[first + r], chance)
                kineto.read(_source(f"{r}", data), incident)
            incident.tracks = kineto.settle(incident.tracks)
    except InputError as error:
        incident.lack(str(error))
    findings = judge(incident)
    Console(file=io.StringIO(), width=100).print(as_text(findings, incident))
    json.dumps(as_json(findings, incident))
    return findings[0].kind


def fuzz(count: int, seed: int = 0) -> Outcome:
    """Run the cases."""
    papers, parquet = documents(), table()
    return fuzzing.fuzz(count, lambda number, _: case(random.Random(f"{seed}:{number}"), papers, parquet), seed=seed)


def main() -> int:
    """Run and print; exit 1 on a failure."""
    count, seed = (int(a) for a in (*sys.argv[1:3], *("5000", "0")[len(sys.argv) - 1 :]))
    outcome = fuzz(count, seed)
    print(json.dumps({**vars(outcome), "kinds": dict(outcome.kinds)}, indent=2))
    return bool(outcome.failures)


if __name__ == "__main__":
    raise SystemExit(main())

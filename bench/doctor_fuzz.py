"""Mutated Flight Recorder dumps, read and judged in this process: no crash, no hang, no code run, bounded memory.

    python bench/doctor_fuzz.py [COUNT] [SEED]      default 100000 0

Half of the mutations change bytes of the file (flips, cuts, insertions of opcodes that call or allocate), half change
the data in it (other types, huge numbers, shared and nested lists) before it is written again. Every case is one
incident of three dumps, one of them mutated.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import fuzzing
from bench.fuzzing import Outcome
from meshwright.doctor.hang import diagnose
from meshwright.doctor.incident import Incident
from meshwright.doctor.readers import Source, flight_recorder

MARK = "MESHWRIGHT_FUZZ_RAN"

_CODES = [
    b"cos\nputenv\n(V" + MARK.encode() + b"\nV1\ntR",
    b"cbuiltins\nexec\n(Vimport os; os.environ['" + MARK.encode() + b"']='1'\ntR",
    b"r\xff\xff\xff\x7f",
    b"q\xff",
    b"\x8b\xff\xff\xff\x7f",
    b"\x8d" + struct.pack("<Q", 1 << 40),
    b"\x96" + struct.pack("<Q", 1 << 40),
    b"\x8e" + struct.pack("<Q", 1 << 62),
    b"\x95" + struct.pack("<Q", 1 << 62),
    b"\x85" * 300,
    b"]" * 300,
    b"(" * 50,
    b"2",
    b"0",
    b".",
    b"R",
    b"b",
    b"\x81",
    b"\x93",
    b"i__main__\nX\n",
    b"Pid\n",
    b"\x8f",
    b"\x82\x01",
]
_VALUES: list[Any] = [
    None, True, -1, 0, 1 << 31, 1 << 63, 1 << 200, -(1 << 70), 1.5, float("nan"), float("inf"), "", "x" * 3000, "\x00",
    "[0, 1, 99999999]", "[" + "0," * 5000 + "0]", b"bytes", [], {}, [[]], [[[[]]]], {"a": []}, ["0", "x"], (1, 2, 3),
]  # fmt: skip


def plain(rank: int, world: int = 3, rows: int = 12) -> dict[str, Any]:
    """A small healthy dump with collectives and hand-offs."""
    entries = []
    for i in range(rows):
        p2p = i % 4 == 3
        peer = (rank + 1) % world
        entries.append(
            {
                "record_id": i,
                "pg_id": 0,
                "process_group": ("0", "default_pg"),
                "collective_seq_id": i - i // 4,
                "p2p_seq_id": i // 4 if p2p else 0,
                "op_id": i,
                "profiling_name": f"nccl:send {rank}->{peer}" if p2p else "nccl:all_reduce",
                "time_created_ns": 1_758_610_505_000_000_000 + i,
                "input_sizes": [[4, 5]],
                "output_sizes": [[4, 5]],
                "input_dtypes": ["Float"],
                "output_dtypes": ["Float"],
                "state": "completed" if i < rows - 2 else "scheduled",
                "retired": i < rows - 2,
                "timeout_ms": 600_000,
                "is_p2p": p2p,
                "frames": [{"name": "main", "filename": "/job/train.py", "line": i % 5}],
            }
        )
    own = f"g{rank}"
    return {
        "version": "2.10",
        "comm_lib_version": "2.27.3",
        "pg_config": {
            "0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(world)))},
            own: {"name": own, "desc": "own", "ranks": f"[{rank}]"},
        },
        "pg_status": {"0": {f"last_{w}_collective": rows for w in ("enqueued", "started", "completed")}},
        "entries": entries,
    }


def _bytes_changed(data: bytes, chance: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        at = chance.randrange(len(out)) if out else 0
        how = chance.randrange(6)
        if how == 0 and out:
            out[at] = chance.randrange(256)
        elif how == 1 and out:
            out[at] ^= 1 << chance.randrange(8)
        elif how == 2:
            del out[at : at + chance.randrange(1, 40)]
        elif how == 3:
            out[at:at] = chance.choice(_CODES)
        elif how == 4:
            out[at:at] = out[chance.randrange(len(out) + 1) :][: chance.randrange(60)]
        elif chance.random() < 0.3:
            del out[at:]
    return bytes(out)


def _places(value: Any, out: list[tuple[Any, Any]]) -> None:
    if isinstance(value, dict | list):
        for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
            out.append((value, key))
            _places(inner, out)


def _data_changed(data: dict[str, Any], chance: random.Random, depth: int) -> Any:
    places: list[tuple[Any, Any]] = []
    _places(data, places)
    for _ in range(chance.choice((1, 1, 2, 6, 30))):
        holder, key = chance.choice(places)
        how = chance.randrange(5)
        if how == 0 and isinstance(holder, dict):
            holder.pop(key, None)
        elif how == 1 and isinstance(holder, list):
            holder.extend(holder[-1:] * chance.randrange(1, 50))
        elif how == 2:
            nested: list[Any] = [1]
            for _ in range(depth):
                nested = [nested, nested]  # shared, so that copying it naively would take for ever
            _put(holder, key, nested)
        else:
            _put(holder, key, chance.choice(_VALUES))
    return data if chance.random() < 0.98 else chance.choice(_VALUES)


def _put(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, dict) or key < len(holder):
        holder[key] = value


def mutated(rank: int, chance: random.Random) -> bytes:
    """One mutated dump."""
    data = plain(rank)
    as_json = chance.random() < 0.25
    if chance.random() < 0.5:
        data = _data_changed(data, chance, 3 if as_json else 24)
        if not as_json:
            return pickle.dumps(data, protocol=chance.choice((2, 4)))
        try:
            return json.dumps(data, default=str).encode()
        except (ValueError, RecursionError):
            return b"{}"
    whole = json.dumps(data).encode() if as_json else pickle.dumps(data, protocol=chance.choice((2, 4)))
    return _bytes_changed(whole, chance)


def _source(name: str, data: bytes) -> Source:
    return Source(name, data[:4096], lambda: io.BytesIO(data), len(data))


def run(count: int, seed: int = 0, progress: bool = False) -> Outcome:
    """Read and judge ``count`` mutated incidents."""
    os.environ.pop(MARK, None)
    healthy = [pickle.dumps(plain(rank), protocol=2) for rank in range(3)]

    def case(number: int, out: Outcome) -> str:
        try:
            return _judged(random.Random(seed * 1_000_003 + number), healthy, out)
        finally:
            if os.environ.pop(MARK, None):
                out.failures.append(f"case {number} of seed {seed}: code of the dump ran")

    return fuzzing.fuzz(count, case, seed=seed, progress=progress)


def _judged(chance: random.Random, healthy: list[bytes], out: Outcome) -> str:
    """One incident with a mutated dump; the kind of its first finding."""
    victim = chance.randrange(3)
    data = [*healthy]
    data[victim] = mutated(victim, chance)
    incident = Incident()
    flight_recorder.sniff(data[victim][:4096], "dump")
    flight_recorder.read_many([_source(f"dump_{r}", d) for r, d in enumerate(data)], incident)
    findings = diagnose(incident)
    json.dumps([f.to_json() for f in findings])
    out.refused += any("dump_" in lack and ": " in lack for lack in incident.lacks)
    return findings[0].kind


if __name__ == "__main__":
    words = [int(word) for word in sys.argv[1:]]
    result = run(words[0] if words else 100_000, words[1] if len(words) > 1 else 0, progress=True)
    print(json.dumps({**result.__dict__, "failures": result.failures[:50]}, indent=1))
    sys.exit(bool(result.failures))

"""Mutated logs and archives through the doctor's readers, in this process: ``python -m bench.doctor_fuzz_text``.

Every input is read as a file of a folder would be. A crash is any exception, a hang more than ``MOST_S`` seconds for
one input; memory is what the process holds in the end and at its peak. Exit 1 on any of them.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import resource
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import BinaryIO, cast

from tests.doctor.log_maker import samples

from meshwright.doctor.incident import Incident
from meshwright.doctor.readers import HEAD_BYTES, Source
from meshwright.doctor.readers.archives import Limits
from meshwright.doctor.readers.walk import BUG, Walk

#: Seconds of CPU for one input of a few KiB.
MOST_S = 2.0
#: Growth of the process over the whole run.
MOST_BYTES = 256 << 20

#: Pieces that readers react to, put in at random places.
WORDS = (
    b"Traceback (most recent call last):\n",
    b'  File "x.py", line 99999999999999999999, in f\n',
    b"[rank99999999999]:[E999 99:99:99.999999999 ProcessGroupNCCL.cpp:1] ",
    b"[Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=",
    b"node:1:2 [0] NCCL INFO ",
    b"opCount ffffffffffffffff sendbuff (nil) recvbuff (nil) count 1 datatype 255 op 0 root -1 comm 0x1 [nranks=0]",
    b"exitcode  : -9 (pid: 1)\n",
    b"PK\x03\x04",
    b"\x1f\x8b\x08",
    b"ustar",
    b"((((((((((((((((",
    b"[[[[[[[[[[[[[[[[",
    b"{" * 40,
    b"\r\r\r\n\n\n",
    b"\x1b[31m",
    b"\xff\xfe\x00",
    b"9" * 400,
    b"0000-00-00 00:00:00,000000000+99:99 ",
    b"  rank      : 1 (local_rank: 2)\n",
    b", " * 300,
)


@dataclass(slots=True)
class Outcome:
    """What a run found."""

    inputs: int = 0
    crashes: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    most_facts: int = 0


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to eight changes: bits, bytes, pieces cut, doubled, moved, words put in, the end cut off."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(out) + 1)
        size = min(len(out) - at, 1 << rng.randrange(10))
        match rng.randrange(7):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(out):
                out[at] = rng.randrange(256)
            case 2:
                del out[at : at + size]
            case 3:
                out[at:at] = out[at : at + size] * rng.randint(1, 4)
            case 4:
                out[at:at] = rng.choice(WORDS)
            case 5:
                out[at : at + size] = rng.randbytes(size)
            case _:
                del out[max(1, len(out) - size) :]
    return bytes(out)


def read(name: str, data: bytes) -> Incident:
    """Read bytes as the doctor reads a file."""
    incident = Incident()
    walk = Walk(incident, Limits(free_bytes=8 << 20), None)
    walk.take(Source(name, data[:HEAD_BYTES], lambda: cast(BinaryIO, io.BytesIO(data)), len(data)), 1.7e9)
    walk.finish()
    return incident


def fuzz(count: int, seed: int = 0) -> Outcome:
    """Read ``count`` mutated inputs."""
    rng, outcome = random.Random(seed), Outcome()
    seeds = sorted(samples().items())
    for number in range(count):
        name, data = seeds[number % len(seeds)]
        data = mutate(data, rng)
        start = time.process_time()
        try:
            incident = read(name, data)
            if bugs := [line for line in incident.lacks if BUG in line]:
                raise RuntimeError(bugs[0])
            outcome.most_facts = max(outcome.most_facts, len(incident.facts))
        except Exception:
            if len(outcome.crashes) < 20:
                outcome.crashes.append(f"{number} {name}: {traceback.format_exc(limit=-3)}")
        took = time.process_time() - start
        outcome.slowest_s = max(outcome.slowest_s, took)
        if took > MOST_S and len(outcome.slow) < 20:
            outcome.slow.append(f"{number} {name}: {took:.1f} s")
        outcome.inputs += 1
    return outcome


def main() -> int:
    """Run and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    fuzz(50, options.seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.process_time()
    outcome = fuzz(options.count, options.seed)
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    for line in (*outcome.crashes, *outcome.slow):
        print(line, file=sys.stderr)
    result = {
        "inputs": outcome.inputs,
        "crashes": len(outcome.crashes),
        "slow": len(outcome.slow),
        "slowest_s": round(outcome.slowest_s, 3),
        "growth_bytes": growth,
        "cpu_s": round(time.process_time() - start, 1),
    }
    print(json.dumps(result))
    return 1 if outcome.crashes or outcome.slow or growth > MOST_BYTES else 0


if __name__ == "__main__":
    sys.exit(main())

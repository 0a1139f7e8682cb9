"""Many random cases one after the other: what came of them, the slowest, and how much memory they took."""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

#: What a case may take (an ordinary one takes a few milliseconds), and all of them in memory.
CASE_LIMIT_S = 10.0
GROWTH_LIMIT_BYTES = 512 << 20


@dataclass
class Outcome:
    """What came of it."""

    cases: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    slowest_s: float = 0.0
    growth_bytes: int = 0
    failures: list[str] = field(default_factory=list)


def fuzz(count: int, case: Callable[[int, Outcome], str], *, seed: int, progress: bool = False) -> Outcome:
    """Run ``case(number, outcome)`` so often; what it returns is counted, what it raises is a failure."""
    out, before = Outcome(), _resident_bytes()
    for number in range(count):
        begun = time.perf_counter()
        try:
            out.kinds[case(number, out)] += 1
        except Exception as error:
            out.failures.append(f"case {number} of seed {seed}: {type(error).__name__}: {str(error)[:200]}")
        took = time.perf_counter() - begun
        out.slowest_s = max(out.slowest_s, took)
        if took > CASE_LIMIT_S:
            out.failures.append(f"case {number} of seed {seed}: {took:.1f} s")
        out.cases += 1
        if progress and number % 5000 == 4999:
            sys.stderr.write(f"{number + 1} of {count}, {len(out.failures)} failures, slowest {out.slowest_s:.2f} s\n")
    out.growth_bytes = _resident_bytes() - before
    if out.growth_bytes > GROWTH_LIMIT_BYTES:
        out.failures.append(f"memory grew by {out.growth_bytes} bytes")
    return out


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

"""When requests come and how long they are: a Poisson process, a fixed beat, a trace file, or as soon as others end."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import InputError

MAX_REQUESTS = 1_000_000
MAX_TRACE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Attributes:
        at_s: seconds from the start; with a closed loop 0 for all.
        input_tokens, output_tokens: of its prompt, and asked for.
    """

    at_s: float
    input_tokens: int
    output_tokens: int


def poisson(rate: float, requests: int, input_tokens: int, output_tokens: int, seed: int) -> list[Arrival]:
    """Arrivals with exponential gaps, ``rate`` a second on average."""
    rng, at, out = random.Random(seed), 0.0, []
    for _ in range(requests):
        out.append(Arrival(at, input_tokens, output_tokens))
        at += rng.expovariate(rate)
    return out


def fixed(rate: float, requests: int, input_tokens: int, output_tokens: int) -> list[Arrival]:
    """Arrivals one beat apart."""
    return [Arrival(i / rate, input_tokens, output_tokens) for i in range(requests)]


def together(requests: int, input_tokens: int, output_tokens: int) -> list[Arrival]:
    """Requests of a closed loop: each comes when one before it has ended."""
    return [Arrival(0.0, input_tokens, output_tokens)] * requests


def read_trace(path: Path) -> list[Arrival]:
    """A trace: one JSON object a line with ``at_s``, ``input_tokens``, ``output_tokens``; sorted by time.

    Raises:
        InputError: it cannot be read, or a line is not such an object.
    """
    try:
        if path.stat().st_size > MAX_TRACE_BYTES:
            raise InputError(f"{path}: {path.stat().st_size} bytes; at most {MAX_TRACE_BYTES} are read")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not text; a JSON object a line is needed") from None
    rows = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not 1 <= len(rows) <= MAX_REQUESTS:
        raise InputError(f"{path}: {len(rows)} requests; 1 to {MAX_REQUESTS} are needed")
    return sorted((_row(path, number, line) for number, line in rows), key=lambda a: a.at_s)


def _row(path: Path, number: int, line: str) -> Arrival:
    try:
        raw = json.loads(line)
        found = Arrival(float(raw["at_s"]), int(raw["input_tokens"]), int(raw["output_tokens"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        found = Arrival(-1.0, 0, 0)
    if not (math.isfinite(found.at_s) and found.at_s >= 0 and found.input_tokens > 0 and found.output_tokens > 0):
        raise InputError(
            f'{path}, line {number}: {line[:40]!r} is no request; write {{"at_s": 0.5, "input_tokens": 128, '
            '"output_tokens": 64}'
        )
    return found

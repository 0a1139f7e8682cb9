"""What a run of load amounts to: percentiles, throughput, goodput, and how far a plan was off."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.runtime.load.client import Timed

PERCENTILES = (50, 90, 99)
MAX_PLAN_BYTES = 64 << 20
#: A client that sends later than this, at the 99th percentile, did not keep its schedule.
LATE_S = 0.05


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of something, seconds; ``count`` values."""

    count: int
    mean: float
    percentiles: dict[int, float]


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a plan said, seconds: means and percentiles of TTFT and TPOT, None where it says none."""

    verdict: str
    ttft_s: dict[str, float] | None
    tpot_s: dict[str, float] | None


@dataclass(slots=True)
class Outcome:
    """A run of load.

    Attributes:
        requests, failed: sent, and without a whole answer. errors: how often each.
        seconds: from the first request to the last token.
        ttft, tpot, total, gap: of requests that were answered; ``gap``: between neighbouring pieces of a stream.
        requests_s, tokens_s: answered requests, and their tokens, a second.
        goodput_s: requests a second within the targets; None without targets.
        late_s: 99th percentile of how late requests were sent. predicted: of a plan, None without one.
    """

    requests: int
    failed: int
    errors: dict[str, int]
    seconds: float
    ttft: Spread | None
    tpot: Spread | None
    total: Spread | None
    gap: Spread | None
    requests_s: float
    tokens_s: float
    goodput_s: float | None
    late_s: float
    predicted: Predicted | None = None
    samples: list[Timed] = field(default_factory=list)


def spread(values: Sequence[float]) -> Spread | None:
    """Mean and percentiles (nearest rank); None without a value."""
    if not values:
        return None
    ordered = sorted(values)
    at = {p: ordered[min(len(ordered) - 1, math.ceil(p / 100 * len(ordered)) - 1)] for p in PERCENTILES}
    return Spread(len(ordered), sum(ordered) / len(ordered), at)


def outcome(timed: Sequence[Timed], ttft_s: float | None = None, tpot_s: float | None = None) -> Outcome:
    """Sum up a run; ``ttft_s``, ``tpot_s``: targets of goodput, each request must meet those that are given."""
    good = [t for t in timed if t.error is None]
    began = min((t.sent_s for t in timed), default=0.0)
    seconds = max((t.last_s or t.sent_s for t in timed), default=0.0) - began
    span = max(seconds, 1e-9)

    def within(t: Timed) -> bool:
        first = ttft_s is None or (t.ttft_s is not None and t.ttft_s <= ttft_s)
        return first and (tpot_s is None or t.tpot_s is None or t.tpot_s <= tpot_s)

    late = spread([max(0.0, t.sent_s - t.due_s) for t in timed])
    return Outcome(
        len(timed),
        len(timed) - len(good),
        dict(Counter(t.error for t in timed if t.error is not None).most_common(20)),
        seconds,
        spread([t.ttft_s for t in good if t.ttft_s is not None]),
        spread([t.tpot_s for t in good if t.tpot_s is not None]),
        spread([t.total_s for t in good if t.total_s is not None]),
        spread([gap for t in good for gap in t.gaps_s]),
        len(good) / span,
        sum(t.tokens for t in good) / span,
        sum(map(within, good)) / span if ttft_s is not None or tpot_s is not None else None,
        late.percentiles[99] if late is not None else 0.0,
        samples=list(timed),
    )


def read_plan(path: Path) -> Predicted:
    """What ``plan serve --json`` predicted.

    Raises:
        InputError: it cannot be read, or predicts no times.
    """
    try:
        if path.stat().st_size > MAX_PLAN_BYTES:
            raise InputError(f"{path}: {path.stat().st_size} bytes; at most {MAX_PLAN_BYTES} are read")
        raw = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path}: no JSON; write it with meshwright plan serve ... --json > plan.json") from None
    cost = raw.get("cost") if isinstance(raw, dict) else None
    found = cost.get("predicted") if isinstance(cost, dict) else None
    if not isinstance(found, dict):
        raise InputError(
            f"{path}: no predicted times; it must be the JSON of a plan serve with --rate or --concurrency"
        )
    return Predicted(str(raw.get("verdict", ""))[:400], _times(found, "ttft"), _times(found, "tpot"))


def _times(found: dict[str, Any], name: str) -> dict[str, float] | None:
    """Mean, bounds and percentiles of a predicted time."""
    row, more = found.get(f"{name}_s"), found.get(f"{name}_percentiles_s")
    out: dict[str, float] = {}
    for given in (row, more):
        if isinstance(given, dict):
            out |= {
                str(k): float(v) for k, v in given.items() if isinstance(v, int | float) and not isinstance(v, bool)
            }
    return out or None

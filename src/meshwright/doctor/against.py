"""``--against plan.json``: what a step should cost by its plan, part by part, beside what was recorded.

The plan is what ``meshwright plan train --json`` wrote. Its parts are brought to those that a recording can tell:
computation, optimizer, transfers that nothing hides, waiting (which a plan only knows as the bubble of a pipeline), and
what no plan has in it, data and pauses. A plan to serve is held against ``/metrics``: the first token with its queue
and the transfer of the KV cache, and the tokens after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.doctor import slow_cache
from meshwright.doctor.incident import Incident
from meshwright.doctor.slow_view import view_of
from meshwright.errors import InputError

MAX_BYTES = 64 << 20
#: Part -> names in the plan, and labels of a recording.
PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "computation": (
        ("products", "experts", "head", "attention", "recurrent", "elementwise", "recompute"),
        ("forward", "backward", "compute", "copy"),
    ),
    "optimizer": (("optimizer",), ("optimizer",)),
    "launch and idle": (("launch",), ("launch", "idle")),
    "transfer": (("tensor parallel", "context parallel", "expert parallel", "hand-offs", "data parallel"), ()),
    "waiting": (("bubble",), ()),
    "data": ((), ("data",)),
    "pauses": ((), ("gc", "compile", "checkpoint", "sync")),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One part; seconds a step, recorded as the mean of ranks."""

    part: str
    predicted_s: float
    recorded_s: float


@dataclass(frozen=True, slots=True)
class Against:
    """The comparison.

    Attributes:
        layout: of the plan. low_s, predicted_s, high_s: of the step. recorded_s: of the step. rows: largest
            difference first. what: is compared: ``Step``, or ``First token`` of a plan to serve.
    """

    layout: str
    predicted_s: float
    low_s: float
    high_s: float
    recorded_s: float
    rows: tuple[Row, ...]
    what: str = "Step"

    @property
    def within(self) -> bool:
        """Whether the recorded step lies in the predicted interval."""
        return self.low_s <= self.recorded_s <= self.high_s


def read_plan(path: Path) -> dict[str, Any]:
    """The JSON of a plan.

    Raises:
        InputError: unreadable, or without predicted times.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"--against {path}: {path.stat().st_size} bytes; at most {MAX_BYTES} are read")
        plan = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"--against {path}: not readable as JSON ({str(error)[:60]})") from None
    step, first = _at(plan, "cost", "predicted_step", "step_s"), _at(plan, "cost", "predicted", "ttft_s")
    if _number(_at(step, "value")) is None and _number(_at(first, "value")) is None:
        raise InputError(
            f"--against {path}: no predicted step or first token in it; write one: meshwright plan train ... --json"
        )
    return dict(plan)


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _number(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9
    return float(value) if good else None


def compare(incident: Incident, plan: Mapping[str, Any]) -> Against:
    """A recorded step beside the planned one.

    Raises:
        InputError: nothing recorded tells of a step, or the job has another number of ranks.
    """
    if _at(plan, "cost", "predicted_step") is None:
        return _served(incident, plan)
    if not any(t.steps for t in incident.tracks):
        raise InputError("--against needs profiler traces; none was found")
    view = view_of(incident)
    world = _at(plan, "layout", "world")
    if isinstance(world, int) and view.world > 1 and world != view.world:
        raise InputError(
            f"--against: the plan is for {world} ranks, the traces are of a job of {view.world}; plan its layout with "
            "meshwright plan train --layout ... --json"
        )
    step = _at(plan, "cost", "predicted_step")
    parts = {str(k): n for k, v in (_at(step, "parts_s") or {}).items() if (n := _number(v)) is not None}
    exposed = sum(sum(p.exposed_s for p in rows) / len(rows) for rows in view.parts.values()) / len(view.parts)
    wait = view.wait_s() if view.meetings else 0.0
    measured = {"transfer": max(0.0, exposed - wait), "waiting": wait}
    rows = []
    for part, (names, labels) in PARTS.items():
        recorded = measured.get(part, view.mean_s(*labels) if labels else 0.0)
        rows.append(Row(part, sum(parts.get(n, 0.0) for n in names), recorded))
    rows.sort(key=lambda r: -abs(r.recorded_s - r.predicted_s))
    return _against(plan, _at(step, "step_s"), view.step_s, rows)


def _against(
    plan: Mapping[str, Any], interval: Any, recorded_s: float, rows: Sequence[Row], what: str = "Step"
) -> Against:
    value, low, high = (_number(_at(interval, k)) for k in ("value", "low", "high"))
    layout = str(_at(plan, "layout", "text") or "")[:200]
    known = value or 0.0
    return Against(layout, known, low or known, high or known, recorded_s, tuple(rows), what)


def _served(incident: Incident, plan: Mapping[str, Any]) -> Against:
    """The first token by its queue, the transfer of the cache and the rest, and the tokens after it; means of engines.

    Raises:
        InputError: no metrics of an engine with times to the first token.
    """
    scrapes = list(slow_cache.engines(incident).values())
    first = _mean([slow_cache.mean_grown(facts, "ttft_s") for facts in scrapes])
    if first is None:
        raise InputError(
            "--against: a plan to serve is held against /metrics with times to the first token; none found"
        )
    queue = _mean([slow_cache.mean_grown(facts, "queue_s") for facts in scrapes]) or 0.0
    move = _mean([m.each_s for m in slow_cache.moved(incident) if m.what == slow_cache.CACHE]) or 0.0
    said = _at(plan, "cost", "predicted", "ttft_parts_s") or {}
    parts = {str(k): n for k, v in said.items() if (n := _number(v)) is not None}
    waits = sum(n for k, n in parts.items() if k.startswith("queue"))
    moves = parts.get("transfer", 0.0)
    rest = max(0.0, sum(parts.values()) - waits - moves)
    rows = [
        Row("queue", waits, queue),
        Row("KV transfer", moves, move),
        Row("prefill", rest, max(0.0, first - queue - move)),
    ]
    after = _mean([slow_cache.mean_grown(facts, "tpot_s") for facts in scrapes])
    if after is not None:
        rows.append(
            Row("each token after it", _number(_at(plan, "cost", "predicted", "tpot_s", "value")) or 0.0, after)
        )
    rows.sort(key=lambda r: -abs(r.recorded_s - r.predicted_s))
    return _against(plan, _at(plan, "cost", "predicted", "ttft_s"), first, rows, "First token")


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None

"""``--against plan.json``: what a step should cost by its plan, part by part, beside what was recorded.

The plan is what ``meshwright plan train --json`` wrote. Its parts are brought to those that a recording can tell:
computation, optimizer, transfers that nothing hides, waiting (which a plan only knows as the bubble of a pipeline), and
what no plan has in it, data and pauses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
            difference first.
    """

    layout: str
    predicted_s: float
    low_s: float
    high_s: float
    recorded_s: float
    rows: tuple[Row, ...]

    @property
    def within(self) -> bool:
        """Whether the recorded step lies in the predicted interval."""
        return self.low_s <= self.recorded_s <= self.high_s


def read_plan(path: Path) -> dict[str, Any]:
    """The JSON of a training plan.

    Raises:
        InputError: unreadable, or without a predicted step.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"--against {path}: {path.stat().st_size} bytes; at most {MAX_BYTES} are read")
        plan = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"--against {path}: not readable as JSON ({str(error)[:60]})") from None
    step = _at(plan, "cost", "predicted_step")
    if not isinstance(step, Mapping) or _number(_at(step, "step_s", "value")) is None:
        raise InputError(f"--against {path}: no predicted step in it; write one: meshwright plan train ... --json")
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
        InputError: no trace tells of a step, or the job has another number of ranks.
    """
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
    value = _number(_at(step, "step_s", "value")) or 0.0
    low, high = (_number(_at(step, "step_s", k)) for k in ("low", "high"))
    layout = str(_at(plan, "layout", "text") or "")[:200]
    return Against(layout, value, low or value, high or value, view.step_s, tuple(rows))

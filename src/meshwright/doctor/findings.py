"""What the doctor says: one ``Finding`` a cause, the earliest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: Why a job is slow (``doctor.slow``); the others say why it hangs.
SLOW_KINDS = (
    "input_bound",
    "launch_bound",
    "sync_bound",
    "compute_straggler",
    "latency_bound_comm",
    "bandwidth_bound_comm",
    "slow_link",
    "stage_imbalance",
    "sequence_imbalance",
    "expert_imbalance",
    "throttled",
    "gc_pauses",
    "tiny_buckets",
    "queueing",
    "kv_pressure",
)
KINDS = (
    "host_stuck",
    "device_stuck",
    "wrong_op",
    "wrong_shape",
    "wrong_dtype",
    "wrong_splits",
    "skipped_call",
    "extra_call",
    "group_order",
    "p2p_order",
    "dead_rank",
    "uneven_inputs",
    "all_arrived",
    "slow_not_stuck",
    "environment_mismatch",
    *SLOW_KINDS,
    "healthy",
    "unknown",
)
CONFIDENCES = ("high", "medium", "low")


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause.

    Attributes:
        kind: one of ``KINDS``.
        guilty_ranks: global ranks that caused it, ascending; empty when nobody did or nobody can tell.
        waiting_ranks: global ranks that wait because of it, ascending.
        call_site: ``file:line`` in the user's program, None when not recorded.
        since: Unix seconds at which the first rank began to wait, None when unknown.
        confidence: ``high``, ``medium``, ``low``.
        headline: one sentence: who did what, where.
        evidence: what it rests on, one line each.
        unknown: what is missing to be surer, one line each.
        advice: what to do, and what does not help.
        alternative: another reading that fits as well, in one sentence.
        group: label of the process group, None where it is about none.
        seq: number of the call in its group.
        op: the operation.
        expected, found: what the majority called and what the guilty ones did, for people.
        consequences: what is seen as well but merely follows, one line each.
        numbers: what was measured, (name with its unit, value).
    """

    kind: str
    guilty_ranks: tuple[int, ...] = ()
    waiting_ranks: tuple[int, ...] = ()
    call_site: str | None = None
    since: float | None = None
    confidence: str = "low"
    headline: str = ""
    evidence: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    alternative: str | None = None
    group: str | None = None
    seq: int | None = None
    op: str | None = None
    expected: str | None = None
    found: str | None = None
    consequences: tuple[str, ...] = ()
    numbers: tuple[tuple[str, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data: every field by its name, tuples as lists, numbers as an object."""
        values = {name: getattr(self, name) for name in self.__slots__}
        plain = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
        return plain | {"numbers": dict(self.numbers)}


def ranks_text(ranks: Sequence[int], limit: int = 8) -> str:
    """``rank 3``, ``ranks 0-6 and 9``: runs are folded, long lists cut with their count."""
    runs: list[str] = []
    ordered = sorted(set(ranks))
    start = 0
    for place in range(1, len(ordered) + 1):
        if place == len(ordered) or ordered[place] != ordered[place - 1] + 1:
            first, last = ordered[start], ordered[place - 1]
            runs += (
                [str(first)] if first == last else [f"{first}-{last}"] if last > first + 1 else [f"{first}", f"{last}"]
            )
            start = place
    if not runs:
        return "no rank"
    word = "rank" if len(ordered) == 1 else "ranks"
    if len(runs) > limit:
        return f"{word} {', '.join(runs[:limit])}, ... ({len(ordered)} in all)"
    return f"{word} {runs[0]}" if len(runs) == 1 else f"{word} {', '.join(runs[:-1])} and {runs[-1]}"

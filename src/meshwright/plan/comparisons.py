"""What people ask of a layout, answered with the numbers of both: why one TP 8 and not two TP 4, TP 2 x PP 2 or TP 4 on
half the devices; why no TP across nodes; whether expert parallelism or attention data parallelism pays here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from meshwright.plan.memory import ServeMemory
from meshwright.plan.plan import Candidate, Reason, Rejected
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout, product
from meshwright.specs.units import binary

#: Comparisons that are shown with a plan.
MOST = 3


@dataclass(frozen=True, slots=True)
class Question:
    """One question: its code, and whether another layout is what it asks about."""

    code: str
    asks: Callable[[Layout, Layout], bool]


def _same(a: Layout, b: Layout, *axes: str) -> bool:
    return all(getattr(a, axis) == getattr(b, axis) for axis in axes)


def questions(cluster: Cluster, mixture: bool) -> tuple[Question, ...]:
    """Questions in the order in which they are answered: ``(chosen, other)``."""
    node = cluster.devices_per_node
    kept = () if mixture else ("ep",)
    asked = [
        Question("replicas_or_tp", lambda a, b: _traded(a, b, "dp", "tp") and _same(a, b, "pp", *kept)),
        Question("stages_or_tp", lambda a, b: _traded(a, b, "pp", "tp") and _same(a, b, "dp", *kept)),
        Question("fewer_devices", lambda a, b: 2 * b.tp == a.tp and _same(a, b, "pp", "dp", *kept)),
        Question("tp_inside_or_across", lambda a, b: a.tp <= node < b.tp),
    ]
    if mixture:
        asked[0] = Question(
            "attention_dp_or_tp",
            lambda a, b: a.world == b.world and min(a.dp, b.dp) == 1 < max(a.dp, b.dp) and a.pp == b.pp,
        )
        asked.insert(0, Question("experts_whole_or_cut", lambda a, b: a.ep != b.ep and _same(a, b, "tp", "pp", "dp")))
    return tuple(asked)


def _traded(a: Layout, b: Layout, one: str, other: str) -> bool:
    """Whether ranks moved from one axis to another: equal product, another split."""
    left, right = getattr(a, one) * getattr(a, other), getattr(b, one) * getattr(b, other)
    return bool(left == right and getattr(a, one) != getattr(b, one))


def compare(
    cluster: Cluster, chosen: Candidate, works: Sequence[Candidate], rejected: Sequence[Rejected] = ()
) -> tuple[Reason, ...]:
    """Answers that the costed (or refused) layouts hold, at most ``MOST``, one a question: the fastest other layout."""
    out = []
    for question in questions(cluster, chosen.placement.spec.moe is not None):
        found = next(_answers(question, chosen, works, rejected), None)
        if found is not None:
            out.append(found)
    return tuple(out[:MOST])


def _answers(
    question: Question, chosen: Candidate, works: Sequence[Candidate], rejected: Sequence[Rejected]
) -> Iterator[Reason]:
    fastest = sorted(works, key=lambda c: -c.cost.tokens_per_s)
    for other in fastest:
        if other.layout != chosen.layout and question.asks(chosen.layout, other.layout):
            yield _reason(question.code, chosen, other)
    for refused in rejected:
        if question.asks(chosen.layout, refused.layout):
            text = (
                f"{product(chosen.layout)} rather than {product(refused.layout)}: that does not work, {refused.reason}"
            )
            yield Reason(question.code, text, {"world": float(refused.layout.world)})


def _reason(code: str, chosen: Candidate, other: Candidate) -> Reason:
    """Both layouts in numbers, and what makes the difference."""
    a, b = chosen.cost, other.cost
    faster = a.tokens_per_s / b.tokens_per_s - 1 if b.tokens_per_s else 0.0
    per_device = faster
    if chosen.layout.world != other.layout.world and b.tokens_per_s:
        per_device = a.tokens_per_s * other.layout.world / (b.tokens_per_s * chosen.layout.world) - 1
    text = (
        f"{product(chosen.layout)} and {product(other.layout)}: a decode step takes {a.step_s * 1e3:,.2f} and "
        f"{b.step_s * 1e3:,.2f} ms at the peaks ({a.wire_share:.0%} and {b.wire_share:.0%} on links) for "
        f"{a.requests:,} and {b.requests:,} requests a replica, {a.tokens_per_s:,.0f} and "
        f"{b.tokens_per_s:,.0f} tokens/s"
    )
    if chosen.layout.world != other.layout.world:
        text += f", {_percent(per_device)} a device"
    text += f"; {_because(chosen, other)}"
    numbers = {
        "step_s": a.step_s,
        "other_step_s": b.step_s,
        "tokens_per_s": a.tokens_per_s,
        "other_tokens_per_s": b.tokens_per_s,
        "wire_share": a.wire_share,
        "other_wire_share": b.wire_share,
    }
    return Reason(code, text, numbers)


def _percent(change: float) -> str:
    return "the same" if abs(change) < 0.005 else f"{abs(change):.0%} {'more' if change > 0 else 'less'}"


def _because(chosen: Candidate, other: Candidate) -> str:
    """What differs most: memory traffic, links, or room for requests."""
    a, b = chosen.cost, other.cost
    parts = {
        f"{binary(b.bytes_read)} of memory traffic a step against {binary(a.bytes_read)}": (a.bytes_read, b.bytes_read),
        f"{binary(b.wire_bytes)} on links a step against {binary(a.wire_bytes)}": (a.wire_bytes, b.wire_bytes),
    }
    if isinstance(chosen.memory, ServeMemory) and isinstance(other.memory, ServeMemory):
        most, less = chosen.memory.max_requests, other.memory.max_requests
        parts[f"caches for {less:,} requests against {most:,}"] = (most, less)
    ratio = {text: max(x, y) / max(1.0, min(x, y)) for text, (x, y) in parts.items()}
    return "the second has " + max(ratio, key=lambda text: ratio[text])

"""What people ask of a layout, answered with the predicted figures of both: why one TP 8 and not two TP 4, TP 2 x PP 2
or TP 4 on half the devices; why no TP across nodes; whether expert parallelism or attention data parallelism pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.plan.choose import TIE, difference, named
from meshwright.plan.plan import Reason, Rejected
from meshwright.plan.search.serve import Probe
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout, product

if TYPE_CHECKING:
    from meshwright.plan.search.serve_pools import SplitFound
    from meshwright.plan.serve_context import ServeContext

#: Comparisons that are shown with a plan.
MOST = 4


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
        Question("tp_inside_or_across", lambda a, b: a.tp <= node < b.tp),
        Question("fewer_devices", lambda a, b: 2 * b.tp == a.tp and _same(a, b, "pp", "dp", *kept)),
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
    ctx: ServeContext, chosen: Probe, works: Sequence[Probe], rejected: Sequence[Rejected] = ()
) -> tuple[Reason, ...]:
    """Answers that the predicted (or refused) layouts hold, at most ``MOST``, one a question: the best other layout."""
    out = []
    for question in questions(ctx.cluster, ctx.spec.moe is not None):
        found = next(_answers(question, chosen, works, rejected), None)
        if found is not None:
            out.append(found)
    return tuple(out[:MOST])


def _answers(
    question: Question, chosen: Probe, works: Sequence[Probe], rejected: Sequence[Rejected]
) -> Iterator[Reason]:
    best = sorted(works, key=lambda p: (not p.best.meets, -p.best.goodput))
    for other in best:
        if other.layout != chosen.layout and question.asks(chosen.layout, other.layout):
            yield _reason(question.code, chosen.settled(), other.settled())
    for refused in rejected:
        if question.asks(chosen.layout, refused.layout):
            text = (
                f"{product(chosen.layout)} rather than {product(refused.layout)}: that does not work, {refused.reason}"
            )
            yield Reason(question.code, text, {"world": float(refused.layout.world)})


def _reason(code: str, chosen: Probe, other: Probe) -> Reason:
    """Both layouts in predicted numbers, and what makes the difference."""
    judged = chosen.ctx.judged
    a, b = chosen.best, other.best
    at = f"{a.requests * chosen.copies:,} and {b.requests * other.copies:,} requests in flight"
    text = _answer(code, chosen, other) + (
        f"{named(chosen)} and {named(other)}: a token is predicted to take {a.time.tpot.value * 1e3:,.2f} and "
        f"{b.time.tpot.value * 1e3:,.2f} ms with {at}, {_share(chosen):.0%} and {_share(other):.0%} of it on links"
    )
    if judged and not b.meets:
        text += f"; within the targets the first serves {a.goodput:,.0f} tokens/s, the second breaks them"
    else:
        within = " within the targets" if judged else ""
        text += f", {a.goodput:,.0f} and {b.goodput:,.0f} tokens/s{within}"
    per_device = _per_device(chosen, other)
    if chosen.devices != other.devices and b.goodput:
        text += f", {_percent(per_device)} a device"
    text += _because(chosen, other)
    numbers = {
        "tpot_s": a.time.tpot.value,
        "other_tpot_s": b.time.tpot.value,
        "tokens_per_s": a.goodput,
        "other_tokens_per_s": b.goodput,
        "wire_share": _share(chosen),
        "other_wire_share": _share(other),
        "per_device": per_device,
    }
    return Reason(code, text, numbers)


def _answer(code: str, chosen: Probe, other: Probe) -> str:
    """Yes or no in front of the numbers, where the question has one."""
    subject, larger = {
        "experts_whole_or_cut": ("EP", chosen.layout.ep > other.layout.ep),
        "attention_dp_or_tp": ("DP attention", chosen.layout.dp > other.layout.dp),
        "tp_inside_or_across": ("TP across nodes", False),
    }.get(code, ("", True))
    if not subject:
        return ""
    ahead = _per_device(chosen, other) if other.best.meets else 1.0
    if abs(ahead) < TIE:
        return f"{subject} makes no difference: "
    return f"{subject} {'pays' if (ahead > 0) == larger else 'does not pay'}: "


def _share(probe: Probe) -> float:
    """Part of a token's predicted time that is communication."""
    time = probe.best.time
    return dict(time.tpot_parts).get("communication", 0.0) / time.tpot.value


def _per_device(a: Probe, b: Probe) -> float:
    """How much more goodput a device of the first has."""
    if not b.best.goodput:
        return 0.0
    return a.best.goodput * b.devices / (b.best.goodput * a.devices) - 1


def _percent(change: float) -> str:
    return "the same" if abs(change) < 0.005 else f"{abs(change):.0%} {'more' if change > 0 else 'less'}"


def _because(chosen: Probe, other: Probe) -> str:
    """What the second layout loses by (or the first, where the second is better)."""
    if other.best.goodput > chosen.best.goodput and other.best.meets:
        text = difference(other, chosen)
        return f"; at the same load the first has {text}" if text else ""
    text = difference(chosen, other)
    return f"; at the same load the second has {text}" if text else ""


def split_reason(chosen: Probe, found: SplitFound | None, *, taken: bool = False) -> tuple[Reason, ...]:
    """Whether separate prefill and decode pools pay here; nothing where none was searched or works. ``taken``: they
    are what the plan is of."""
    if found is None or not chosen.best.goodput:
        return ()
    split, time = found.best, found.time
    more = split.goodput / chosen.best.goodput - 1
    pays = f"{more:.0%} more" if more >= 0.005 else "the same" if more > -0.005 else f"{-more:.0%} less"
    first, each = time.ttft.value * 1e3, time.tpot.value * 1e3
    text = (
        f"separate pools: {split.name} would serve {split.goodput:,.0f} tokens/s ({pays}) with {split.users:,} "
        f"requests in flight, the first token in {first:,.0f} ms ({split.waiting:.0%} of it waiting for a prefill "
        f"worker), then one every {each:,.2f} ms: no prompt comes between tokens"
    )
    if taken:
        text += f"; one pool: {named(chosen)} with {chosen.best.goodput:,.0f} tokens/s"
    elif more >= 0.005:
        text += "; --split takes them"
    numbers = {
        "tokens_per_s": split.goodput,
        "prefill_workers": float(split.prefill_workers),
        "decode_workers": float(split.decode_workers),
        "users": float(split.users),
        "ttft_s": time.ttft.value,
        "tpot_s": time.tpot.value,
    }
    return (Reason("separate_pools", text, numbers),)

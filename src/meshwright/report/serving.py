"""Tables of a serving search in the terminal: layouts side by side by predicted figures, ratios of two pools."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any, NamedTuple

from meshwright.plan.plan import Candidate, Plan
from meshwright.plan.search.serve import Probe, ServeFound
from meshwright.plan.search.serve_pools import Split, SplitFound
from meshwright.specs.layout import product
from meshwright.specs.workload import Serve

#: Ratios of workers that are shown.
MAX_RATIOS = 9
#: Layouts of a search that are written out.
MAX_RANKED = 48


class LayoutRow(NamedTuple):
    """One deployment by predicted figures.

    Attributes:
        name: ``"4 copies of TP 8"``. devices: of all copies. requests: in flight over all of them.
        ttft_s, tpot_s: means. tokens_s_device: output tokens a second and device; goodput_s_device: of the requests
        that keep both targets (the same without targets). said: how it compares.
    """

    name: str
    devices: int
    requests: int
    ttft_s: float
    tpot_s: float
    tokens_s_device: float
    goodput_s_device: float
    said: str


def layout_row(plan: Plan, candidate: Candidate, said: str) -> LayoutRow | None:
    """A layout at its load; None without a prediction."""
    time, work = candidate.cost.predicted, plan.workload
    if time is None or not isinstance(work, Serve):
        return None
    layout, copies = candidate.layout, candidate.copies
    name = product(layout) if copies == 1 else f"{copies} copies of {product(layout)}"
    good = time.goodput(work.ttft_s, work.tpot_s) * work.osl / layout.world
    inside = round(time.asked * layout.dp) * copies
    tokens = time.tokens_per_s.value / layout.world
    return LayoutRow(
        name, layout.world * copies, inside, time.ttft.value, time.tpot.value, tokens, good, said
    )  # fmt: skip


def split_row(split: Split, time_s: tuple[float, float], osl: int, said: str) -> LayoutRow:
    """Two pools as one deployment; ``time_s``: mean first and further token."""
    rate = split.users / (time_s[0] + max(osl - 1, 1) * time_s[1]) * osl / split.devices
    return LayoutRow(
        split.name, split.devices, split.users, *time_s, rate, split.goodput / split.devices, said
    )  # fmt: skip


def layout_rows(plan: Plan) -> Iterator[LayoutRow]:
    """The chosen layout, the runners-up, and the best separate pools."""
    if plan.chosen is not None:
        yield from filter(None, [layout_row(plan, plan.chosen, "given" if plan.motive == "given" else "chosen")])
    for other in plan.alternatives:
        yield from filter(None, [layout_row(plan, other.candidate, other.lost_by)])
    found = plan.served.split if plan.served is not None else None
    if found is not None and isinstance(plan.workload, Serve) and plan.served is not None:
        best = plan.served.ranked[0].best.goodput
        more = found.best.goodput / best - 1 if best else 0.0
        said = f"separate pools, {abs(more):.0%} {'more' if more > 0 else 'less'} goodput"
        yield split_row(found.best, (found.time.ttft.value, found.time.tpot.value), plan.workload.osl, said)


def judged(plan: Plan) -> bool:
    """Whether the plan has a latency target."""
    work = plan.workload
    return isinstance(work, Serve) and (work.ttft_s is not None or work.tpot_s is not None)


def cells(row: LayoutRow, within: bool) -> list[str]:
    """A row as text; ``within``: with goodput."""
    speed = row.goodput_s_device if within else row.tokens_s_device
    first = "no end" if row.ttft_s == inf else f"{row.ttft_s * 1e3:,.0f}"
    return [
        row.name, f"{row.devices:,}", f"{row.requests:,}", first, f"{row.tpot_s * 1e3:,.1f}", f"{speed:,.0f}", row.said
    ]  # fmt: skip


def head(within: bool) -> list[str]:
    """Columns of ``cells``; goodput: tokens of requests that keep the targets."""
    speed = "goodput/GPU" if within else "tok/s/GPU"
    return ["Layouts", "GPUs", "in flight", "TTFT ms", "TPOT ms", speed, "compared"]


def ratio_rows(found: SplitFound, osl: int) -> Iterator[list[str]]:
    """Workers of both sides against what they serve: the best of the pair of layouts for each number."""
    rows = found.ratios
    few = {round(i * (len(rows) - 1) / (MAX_RATIOS - 1)) for i in range(MAX_RATIOS)} if rows else set()
    for split in [s for i, s in enumerate(rows) if i in few or s == found.best]:
        mark = "chosen" if split == found.best else ""
        row = split_row(split, (split.ttft_s, split.tpot_s), osl, "")
        yield [
            f"{split.prefill_workers} : {split.decode_workers}", f"{split.devices:,}", f"{split.users:,}",
            f"{split.ttft_s * 1e3:,.0f}", f"{split.waiting:.0%}", f"{split.tpot_s * 1e3:,.1f}",
            f"{row.tokens_s_device:,.0f}", f"{row.goodput_s_device:,.0f}", mark,
        ]  # fmt: skip


RATIO_HEAD = (
    "Workers", "GPUs", "in flight", "TTFT ms", "waiting", "TPOT ms", "tok/s/GPU", "goodput/GPU", "",
)  # fmt: skip


def served_json(found: ServeFound) -> dict[str, Any]:
    """The search over layouts and loads with stable keys; see docs/plan.md."""
    counts = {name: getattr(found, name) for name in ("size", "illegal", "unfit", "costed")}
    pareto = [{**layout_key(f.probe), **f.point._asdict(), "users_s": f.point.users_s} for f in found.front]
    ranked = [
        {
            **layout_key(p),
            "requests": p.best.requests,
            "best_requests": p.best.most,
            "limit": p.best.limit,
            "meets": p.best.meets,
            "goodput_tokens_s": p.best.goodput,
            "goodput_tokens_s_device": p.best.goodput / p.devices,
            "ttft_s": None if p.best.time.ttft.value == inf else p.best.time.ttft.value,
            "tpot_s": p.best.time.tpot.value,
        }
        for p in found.ranked[:MAX_RANKED]
    ]
    return {**counts, "pareto": pareto, "ranked": ranked, "split": found.split and split_json(found.split)}


def layout_key(probe: Probe) -> dict[str, Any]:
    """What a point is of."""
    return {"layout": str(probe.layout), "copies": probe.copies}


def split_json(found: SplitFound) -> dict[str, Any]:
    """The best pools, predicted, and the ratios of their layouts."""
    best, time = found.best, found.time
    return {
        **_split_json(best),
        "predicted": {"ttft_s": time.ttft.json(), "tpot_s": time.tpot.json(), "tokens_per_s": time.tokens_per_s.json()},
        "tried": found.tried,
        "ratios": [_split_json(s) for s in found.ratios],
    }


def _split_json(split: Split) -> dict[str, Any]:
    return {
        "prefill": str(split.prefill.layout),
        "decode": str(split.decode.layout),
        "prefill_workers": split.prefill_workers,
        "decode_workers": split.decode_workers,
        "devices": split.devices,
        "requests": split.users,
        "ttft_s": split.ttft_s,
        "tpot_s": split.tpot_s,
        "waiting": split.waiting,
        "goodput_tokens_s": split.goodput,
        "goodput_tokens_s_device": split.goodput / split.devices,
    }

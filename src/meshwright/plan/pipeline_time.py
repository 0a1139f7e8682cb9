"""Seconds of m micro-batches through a pipeline whose stages take unequal time, in closed form.

A step takes as long as its slowest path. With 1F1B every stage gives one: its own m forwards and backwards, what the
stages in front of it do before its first forward and behind its last backward, and its two waits for the stages behind
it: after its first forwards and before its last backwards. Interleaved, idle times are a v-th. Tests compare with
``moves.pipeline.simulate``: equal for equal stages and where the last one is the slowest; for stages drawn at random
under 5 % too short (interleaved: 9 % off). With equal stages these are (p-1)/(m+p-1) and (p-1)/(v m+p-1) of
``moves.pipeline.bubble``.

Split backwards and folded pipelines go at the pace of the slowest stage and idle by lines in its forward F and backward
B; their coefficients were read off the simulated tables, and equal them for every p and m as long as B >= F.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.moves.pipeline import FOLDED, schedule, simulate
from meshwright.specs.layout import Layout

#: Idle time a F + c B, as (a, c).
Line = tuple[float, float]


def idle_lines(name: str, p: int, m: int) -> tuple[Line, Line]:
    """The two lines whose larger value is the time that a schedule with split backwards idles.

    ZB-H1: (p-1) F while B <= 2 F (Qi et al. 2023, arXiv 2401.10241, section 2.2), more with fewer micro-batches than
    stages. ZBV settles from 2 p - 1 micro-batches on, DualPipeV is defined from 2 p on.
    """
    if name == "zb-h1":
        short = max(p - m, 0)
        return (p - 1.0, short / 2), (short, (p - 1) / 2)
    if name == "dualpipev":
        return ((p - 1) / 2, 0.0), (-0.5, (p - 1) / 4)
    n = min(m, 2 * p - 1)
    if n <= p:
        return ((2 * p - 1 - n) / 2, (2 * p - 1 - n) / 4), (p - n, (p - 1) / 2)
    if 2 * n < 3 * p:
        return ((n - 1) / 2, (4 * p - 1 - 3 * n) / 4), (0.0, (2 * p - 1 - n) / 2)
    return ((n - 2) / 2, (p + 1 - n) / 4), (0.0, (p - 1) / 4)


def split_backward(layout: Layout) -> bool:
    """Whether ``idle_lines`` describes the schedule."""
    return layout.schedule in FOLDED or (layout.schedule == "zb-h1" and layout.virtual == 1)


def pipeline_seconds(layout: Layout, m: int, stages: Sequence[tuple[float, float]]) -> float:
    """Seconds of m micro-batches through stages of (forward, backward) seconds each (of all their chunks)."""
    p, (forward, backward) = layout.pp, max(stages, key=sum)
    slowest = forward + backward
    if p == 1:
        return m * slowest
    if split_backward(layout):
        return m * slowest + max(a * forward + c * backward for a, c in idle_lines(layout.schedule, p, m))
    if layout.schedule == "zb-h1":
        return _simulated(layout, m, forward, backward)
    if layout.schedule == "gpipe":
        more = max(f for f, _ in stages) + max(b for _, b in stages)
        return sum(map(sum, stages)) + (m - 1) * more
    front, behind, worst = 0.0, sum(map(sum, stages)), 0.0
    for index, (f, b) in enumerate(stages):
        behind -= f + b
        worst = max(worst, m * (f + b) + (front + waits(f, b, behind, p - 1 - index, m)) / layout.virtual)
        front += f + b
    return worst


def waits(forward: float, backward: float, behind: float, after: int, m: int) -> float:
    """Time that a stage of 1F1B waits for the ``after`` stages behind it, which take ``behind`` together."""
    if m > after:
        return max(0.0, behind - after * forward) + max(0.0, behind - after * backward)
    return max(0.0, behind - (m - 1) * min(forward, backward))


def _simulated(layout: Layout, m: int, forward: float, backward: float) -> float:
    """ZB-H1 with several chunks a rank: its table, beyond 4 p micro-batches in the steady state."""
    v = layout.virtual
    few = min(m, 4 * layout.pp)
    table = schedule(layout.schedule, layout.pp, few, v)
    return simulate(table, forward / v, backward / v).makespan + (m - few) * (forward + backward)

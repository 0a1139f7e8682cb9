"""The full search for a training layout: space, memory, cost, front, best rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from meshwright.plan.search import legal
from meshwright.plan.search.columns import MODES, SCHEDULES, Columns
from meshwright.plan.search.evaluate import Coster
from meshwright.plan.search.pareto import front, lost_by
from meshwright.plan.search.space import LEFT_OUT, space
from meshwright.plan.train_candidates import EXPLAINED, SPARE, TIE
from meshwright.plan.train_engine import TrainEngine
from meshwright.plan.training_time import PARTS
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import EngineProfile
from meshwright.specs.workload import Recompute, Train

if TYPE_CHECKING:
    from meshwright.plan.search.columns import Floats, Ints


@dataclass(frozen=True, slots=True)
class Point:
    """One layout of the search.

    Attributes:
        layout, recompute: with the least recompute that fits.
        tokens_per_s_device, step_s: predicted. free_bytes: left on the fullest rank.
        lost_by, lost_s: the part of the step in which it loses most to the best, and how much.
        parts: seconds of the step by part (``training_time.PARTS``).
    """

    layout: Layout
    recompute: Recompute
    tokens_per_s_device: float
    free_bytes: float
    step_s: float
    lost_by: str
    lost_s: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found.

    Attributes:
        size, illegal, uneven, unfit, tight, costed: layouts of the space (recompute left out), refused by the engine
            or without a table of their schedule, left out because ranks of a stage hold unequal shares, too large for
            a device, left out because others leave more room (``train_candidates.SPARE``), costed.
        best: best first, at most ``keep``, one for every (tp, pp, cp, ep, etp, zero).
        pareto: tokens/s/device against free memory, fastest first.
        rivals: by axis (``EXPLAINED``) the fastest layout that is cut along it where the best is not, and is not where
            the best is; None: none of them fits. Axes along which no layout of the space is cut are absent.
        left_out: what the space does not hold, and why.
    """

    size: int
    illegal: int
    uneven: int
    unfit: int
    tight: int
    costed: int
    best: tuple[Point, ...]
    pareto: tuple[Point, ...]
    rivals: Mapping[str, Point | None] = field(default_factory=dict)
    left_out: tuple[tuple[str, str], ...] = LEFT_OUT


def available(profile: EngineProfile, work: Train) -> bool:
    """Whether the search can be asked: masks for the engine's rules, no ``recompute_layers``, numpy installed."""
    from importlib.util import find_spec

    return legal.known(profile, work) and work.recompute_layers is None and find_spec("numpy") is not None


def search_training(
    spec: ModelSpec,
    cluster: Cluster,
    work: Train,
    profile: EngineProfile,
    engine: TrainEngine,
    *,
    recompute_fixed: bool = False,
    keep: int = 32,
) -> Found:
    """Cost every layout of the space that the engine takes and that fits.

    Args:
        spec, cluster, work, profile, engine: as ``plan_train``.
        recompute_fixed: keep ``work.recompute``; else each layout has the least recompute that fits.
        keep: rows of ``Found.best``.
    """
    import numpy as np

    whole = space(spec, cluster, work, profile)
    coster = Coster(spec, profile, cluster, work, engine)
    runs = whole.legal.take(coster.scheduled(whole.legal))
    x = runs.take(coster.even(runs))
    counts = Found(whole.size, whole.size - len(runs), len(runs) - len(x), len(x), 0, 0, (), ())
    if not len(x):
        return counts
    modes = [MODES.index(work.recompute)] if recompute_fixed else list(range(len(MODES)))
    need, memory = coster.memory(x)[modes], cluster.device.memory_bytes
    unfit = int((need.min(axis=0) > memory).sum())
    roomy = need <= (1 - SPARE) * memory
    fits = roomy if roomy.any() else need <= memory
    rows = np.flatnonzero(fits.any(axis=0))
    if not len(rows):
        return counts
    least = fits[:, rows].argmax(axis=0)
    mode, free = np.array(modes)[least], memory - need[least, rows]
    y = x.take(rows)
    cost = coster.cost(y, mode)
    order = ranked(y, cost["tokens_per_s"])
    best, top = _distinct(y, order, keep), front(cost["tokens_per_s"], -free)
    rivals = {axis: _rival(axis, x, y, cost["tokens_per_s"], int(order[0])) for axis in EXPLAINED}
    shown = [*best, *top.tolist(), *(row for row in rivals.values() if row is not None and row >= 0)]
    shown = list(dict.fromkeys(shown))
    parts = coster.cost(y.take(np.array(shown)), mode[shown], parts=True)
    points = _Points(y, mode, parts, free, shown, cluster.devices)
    return replace(
        counts,
        unfit=unfit,
        tight=len(x) - len(rows) - unfit,
        costed=len(rows),
        best=tuple(map(points.at, best)),
        pareto=tuple(map(points.at, top.tolist())),
        rivals={a: points.at(r) if r >= 0 else None for a, r in rivals.items() if r is not None},
    )


def _rival(axis: str, x: Columns, y: Columns, tokens_per_s: Floats, best: int) -> int | None:
    """The fastest row on the other side of an axis than the best; -1: none of ``x`` fits; None: there is none."""
    import numpy as np

    cut = bool(getattr(y, axis)[best] > 1)
    if not ((getattr(x, axis) > 1) != cut).any():
        return None
    other = np.flatnonzero((getattr(y, axis) > 1) != cut)
    return int(other[tokens_per_s[other].argmax()]) if len(other) else -1


def ranked(x: Columns, tokens_per_s: Floats) -> Ints:
    """Rows in the order of ``plan.train.rank_key``: throughput in steps, then
    ``train_candidates.simplicity``."""
    import numpy as np

    behind = 1.0 - tokens_per_s / tokens_per_s.max()
    plain = x.schedule != SCHEDULES.index("1f1b")
    knobs = (x.replicas > 1) | (x.reshard == 0) | (x.split > 0)
    degrees = (x.pp, x.tp, x.ep, x.micro_batch, x.etp)
    simple = (x.pp * x.tp * x.cp, x.zero == 3, knobs, plain, *degrees, x.zero != 1)
    return np.lexsort((behind, *reversed(simple), (behind / TIE).astype(np.int64)))


def _distinct(x: Columns, order: Ints, keep: int) -> list[int]:
    seen: set[tuple[int, ...]] = set()
    out: list[int] = []
    for i in order:
        key = tuple(int(axis[i]) for axis in (x.tp, x.pp, x.cp, x.ep, x.etp, x.zero))
        if key not in seen:
            seen.add(key)
            out.append(int(i))
            if len(out) == keep:
                break
    return out


@dataclass(frozen=True, slots=True)
class _Points:
    """Rows that are shown: ``shown`` gives their numbers, ``cost`` has one entry for each, the best first."""

    x: Columns
    mode: Ints
    cost: dict[str, Floats]
    free: Floats
    shown: list[int]
    devices: int

    def _parts(self, at: int) -> dict[str, float]:
        return {name: float(self.cost[name][at]) for name in PARTS}

    def at(self, row: int) -> Point:
        """One row as a point."""
        at = self.shown.index(row)
        parts = self._parts(at)
        text, seconds = lost_by(self._parts(0), parts) if at else ("", 0.0)
        return Point(
            self.x.layout(row),
            MODES[int(self.mode[row])],
            float(self.cost["tokens_per_s"][at]) / self.devices,
            float(self.free[row]),
            float(self.cost["step_s"][at]),
            text,
            seconds,
            parts,
        )

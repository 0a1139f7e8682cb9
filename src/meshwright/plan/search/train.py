"""The full search for a training layout: space, memory, cost, front, best rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshwright.plan.search import legal
from meshwright.plan.search.columns import MODES, SCHEDULES, Columns
from meshwright.plan.search.evaluate import Coster
from meshwright.plan.search.pareto import front, lost_by
from meshwright.plan.search.space import space
from meshwright.plan.train_engine import TrainEngine
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import EngineProfile
from meshwright.specs.workload import Recompute, Train

if TYPE_CHECKING:
    from meshwright.plan.search.columns import Floats, Ints

#: Throughputs closer than this are a tie, which the simpler layout wins (as in ``plan.train``).
TIE = 0.02


@dataclass(frozen=True, slots=True)
class Point:
    """One layout of the search.

    Attributes:
        layout, recompute: with the least recompute that fits.
        tokens_per_s_device: upper bound. free_bytes: left on the fullest rank.
        step_s: lower bound. lost_by, lost_s: the part of the step in which it loses most to the best, and how much.
    """

    layout: Layout
    recompute: Recompute
    tokens_per_s_device: float
    free_bytes: float
    step_s: float
    lost_by: str
    lost_s: float


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found.

    Attributes:
        size, illegal, uneven, unfit, costed: layouts of the space (recompute left out), refused by the engine or
            without a table of their schedule, left out because ranks of a stage hold unequal shares, too large for a
            device, costed.
        best: most promising first, at most ``keep``, one for every (tp, pp, cp, ep, etp, zero).
        pareto: tokens/s/device against free memory, fastest first.
    """

    size: int
    illegal: int
    uneven: int
    unfit: int
    costed: int
    best: tuple[Point, ...]
    pareto: tuple[Point, ...]


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
    counts = Found(whole.size, whole.size - len(runs), len(runs) - len(x), len(x), 0, (), ())
    if not len(x):
        return counts
    modes = [MODES.index(work.recompute)] if recompute_fixed else list(range(len(MODES)))
    need = coster.memory(x)[modes]
    fits = need <= cluster.device.memory_bytes
    rows = np.flatnonzero(fits.any(axis=0))
    if not len(rows):
        return counts
    least = fits[:, rows].argmax(axis=0)
    mode, free = np.array(modes)[least], cluster.device.memory_bytes - need[least, rows]
    y = x.take(rows)
    cost = coster.cost(y, mode)
    order = ranked(y, cost["tokens_per_s"])
    points = _Points(y, mode, cost, free, int(order[0]), cluster.devices)
    best = [points.at(i) for i in _distinct(y, order, keep)]
    pareto = [points.at(int(i)) for i in front(cost["tokens_per_s"], -free)]
    return replace(counts, unfit=len(x) - len(rows), costed=len(rows), best=tuple(best), pareto=tuple(pareto))


def ranked(x: Columns, tokens_per_s: Floats) -> Ints:
    """Rows in the order of ``plan.train.rank_key``: throughput in steps, then simplicity (a plain schedule, no
    sharded parameters, few cuts, small micro-batches)."""
    import numpy as np

    behind = 1.0 - tokens_per_s / tokens_per_s.max()
    plain = x.schedule != SCHEDULES.index("1f1b")
    stated = (x.replicas > 1) | (x.reshard == 0)
    simple = (x.pp * x.tp * x.cp, x.zero == 3, stated, plain, x.pp, x.tp, x.ep, x.micro_batch, x.etp, x.zero != 1)
    steps = (behind / TIE).astype(np.int64)
    return np.lexsort((behind, *reversed(simple), steps))


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
    x: Columns
    mode: Ints
    cost: dict[str, Floats]
    free: Floats
    best: int
    devices: int

    def at(self, row: int) -> Point:
        """One row as a point."""
        text, seconds = lost_by(self.cost, self.best, row)
        return Point(
            self.x.layout(row),
            MODES[int(self.mode[row])],
            float(self.cost["tokens_per_s"][row]) / self.devices,
            float(self.free[row]),
            float(self.cost["step_s"][row]),
            text if row != self.best else "",
            seconds if row != self.best else 0.0,
        )

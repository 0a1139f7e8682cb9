"""A set of training layouts as columns, and each row as a ``Layout`` again."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, get_args

from meshwright.specs.layout import Fsdp, Layout, Schedule
from meshwright.specs.workload import Recompute

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]
    Mask = NDArray[np.bool_]

#: Names behind the numbers in the columns ``schedule`` and ``recompute``.
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
MODES: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True, slots=True)
class Columns:
    """One array an axis, all of one length; ``etp`` 0 stands for None, ``schedule`` is a place in ``SCHEDULES``.

    ``replicas`` and ``reshard``: the FSDP knobs (1 and 1 without them). ``split``: a place in ``splits``, the
    ``stage_layers`` that some row has; 0 is the engine's own.
    """

    tp: Ints
    pp: Ints
    dp: Ints
    cp: Ints
    ep: Ints
    etp: Ints
    sp: Ints
    zero: Ints
    replicas: Ints
    reshard: Ints
    schedule: Ints
    virtual: Ints
    micro_batch: Ints
    split: Ints
    splits: tuple[tuple[int, ...], ...] = field(default=((),), kw_only=True)

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, index: Any) -> Columns:
        """The rows of an index or a mask."""
        return replace(Columns(*(getattr(self, name)[index] for name in AXES)), splits=self.splits)

    @property
    def stage(self) -> Ints:
        """Ranks of a pipeline stage."""
        return self.tp * self.dp * self.cp

    @property
    def expert_cut(self) -> Ints:
        """``etp`` with None read as tp."""
        import numpy as np

        return np.where(self.etp > 0, self.etp, self.tp)

    def layout(self, row: int) -> Layout:
        """One row as a layout."""
        at = {name: int(getattr(self, name)[row]) for name in AXES}
        return _layout(at, self.splits[at["split"]])


#: Columns in order.
AXES = tuple(f.name for f in fields(Columns) if f.name != "splits")


def _layout(at: dict[str, int], stage_layers: tuple[int, ...]) -> Layout:
    knobs = None
    if at["zero"] == 3 and (at["replicas"] > 1 or not at["reshard"]):
        knobs = Fsdp(reshard_after_forward=bool(at["reshard"]), replicas=at["replicas"])
    return Layout(
        tp=at["tp"],
        pp=at["pp"],
        dp=at["dp"],
        cp=at["cp"],
        ep=at["ep"],
        etp=at["etp"] or None,
        sp=bool(at["sp"]),
        zero=at["zero"],
        fsdp=knobs,
        schedule=SCHEDULES[at["schedule"]],
        virtual=at["virtual"],
        micro_batch=at["micro_batch"],
        stage_layers=stage_layers,
    )


def columns_of(layouts: Iterable[Layout]) -> Columns:
    """Columns of some layouts (of those that the columns can hold: no ``dcp`` and ``cp_kind``, no other FSDP knobs)."""
    import numpy as np

    rows = []
    splits: dict[tuple[int, ...], int] = {(): 0}
    for x in layouts:
        knobs = x.fsdp or Fsdp()
        degrees = (x.tp, x.pp, x.dp, x.cp, x.ep, x.etp or 0, int(x.sp), x.zero)
        sharded = (knobs.replicas, int(knobs.reshard_after_forward))
        split = splits.setdefault(x.stage_layers, len(splits))
        rows.append((*degrees, *sharded, SCHEDULES.index(x.schedule), x.virtual, x.micro_batch, split))
    table = np.array(rows, dtype=np.int64).reshape(len(rows), len(AXES))
    return replace(Columns(*(np.ascontiguousarray(table[:, i]) for i in range(len(AXES)))), splits=tuple(splits))


def empty() -> Columns:
    """No layouts."""
    return columns_of(())


def joined(parts: list[Columns]) -> Columns:
    """Sets of layouts with the same ``splits`` one behind the other."""
    import numpy as np

    if not parts:
        return empty()
    arrays = (np.concatenate([getattr(p, name) for p in parts]) for name in AXES)
    return replace(Columns(*arrays), splits=parts[0].splits)


def blocks(*axes: Ints) -> Iterator[NDArray[np.int64]]:
    """Rows that agree on some axes, block by block."""
    import numpy as np

    code = np.zeros_like(axes[0])
    for axis in axes:
        code = code * (int(axis.max(initial=0)) + 1) + axis
    order = np.argsort(code, kind="stable")
    edges = np.flatnonzero(np.diff(code[order])) + 1
    bounds = [0, *edges.tolist(), len(order)]
    yield from (order[a:b] for a, b in pairwise(bounds) if b > a)

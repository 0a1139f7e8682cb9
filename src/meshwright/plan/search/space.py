"""The space of training layouts that use a whole cluster, as columns.

Axes: tp divides a node; pp, cp and dp share out the rest; ep and etp; sp on and off beside tp; ZeRO-0 to 3, FSDP with
and without resharding and with one replica a node (HSDP); schedules with their model chunks; micro-batches. Recompute
is no axis here: the least that fits is taken (``memory``). A stage holds whole nodes, or a node whole stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from meshwright.plan.search.columns import SCHEDULES, Columns, joined
from meshwright.plan.search.legal import legal
from meshwright.specs.cluster import Cluster
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import EngineProfile
from meshwright.specs.workload import Train

if TYPE_CHECKING:
    from meshwright.plan.search.columns import Ints, Mask

#: Pipelines deeper than this are not looked at, nor context groups wider (Llama 3 405B: 16 and 16,
#: arXiv:2407.21783, table 4), nor micro-batches larger.
MAX_STAGES = 64
MAX_CONTEXT = 16
MICRO_BATCHES = (1, 2, 4, 8)
#: Fewest tokens of a sequence on one rank for which it is cut over cp.
LEAST_TOKENS = 1024
#: Schedule and model chunks a rank.
SCHEDULED = (
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("gpipe", 1),
    ("zb-h1", 1),
    ("zbv", 1),
    ("dualpipev", 1),
)
#: ZeRO stage, resharding after the forward, one replica of the sharded group a node.
SHARDED = ((0, 1, False), (1, 1, False), (2, 1, False), (3, 1, False), (3, 0, False), (3, 1, True))


@dataclass(frozen=True, slots=True)
class Space:
    """Legal layouts, and how many were looked at in all.

    Attributes:
        legal: columns of the legal ones. size: layouts of the space, recompute left out. illegal: those refused.
    """

    legal: Columns
    size: int
    illegal: int


@dataclass(frozen=True, slots=True)
class Base:
    """Degrees that use the whole cluster."""

    tp: int
    pp: int
    cp: int
    dp: int


def bases(spec: ModelSpec, cluster: Cluster, work: Train) -> Iterator[Base]:
    """Degrees of tp, pp, cp and dp whose product is the cluster, stages aligned with nodes."""
    world, node = cluster.devices, cluster.devices_per_node
    for tp in (t for t in range(1, node + 1) if node % t == 0):
        for pp in (p for p in range(1, min(len(spec.layers), world // tp, MAX_STAGES) + 1) if world % (tp * p) == 0):
            stage = world // pp
            if stage % node and node % stage:
                continue
            cp = 1
            while cp <= MAX_CONTEXT and (cp == 1 or work.seq // cp >= LEAST_TOKENS):
                if stage % (tp * cp) == 0:
                    yield Base(tp, pp, cp, stage // (tp * cp))
                cp *= 2


def expert_rows(spec: ModelSpec) -> list[tuple[int, int]]:
    """``(ep, etp)`` to look at; etp 0: the engine's own choice."""
    most = max((layer.moe.experts for layer in spec.layers if layer.moe), default=1)
    degrees = [1]
    while degrees[-1] * 2 <= most:
        degrees.append(degrees[-1] * 2)
    return [(ep, etp) for ep in degrees for etp in ((0, 1) if ep > 1 else (0,))]


def space(spec: ModelSpec, cluster: Cluster, work: Train, profile: EngineProfile) -> Space:
    """Every layout of the space that the engine takes.

    What experts and batches forbid whatever the rest is falls first and as whole blocks; every rule is asked for what
    is left.
    """
    import numpy as np

    own = list(bases(spec, cluster, work))
    if not own:
        return Space(Columns(*(np.zeros(0, dtype=np.int64) for _ in fields(Columns))), 0, 0)
    experts = [(ep, etp, sp) for ep, etp in expert_rows(spec) for sp in (0, 1)]
    small = [(etp, sp) == (0, 0) for _, etp, sp in experts]  # with tp 1 there is nothing else to choose
    steps = [(SCHEDULES.index(name), v, b) for name, v in SCHEDULED for b in MICRO_BATCHES]
    node = cluster.devices_per_node
    base = np.array([(b.tp, b.pp, b.cp, b.dp) for b in own], dtype=np.int64)
    a, c = len(experts), len(steps)

    def ask(count: int, **given: Ints) -> Mask:
        rows = {f.name: np.ones(len(own) * count, dtype=np.int64) for f in fields(Columns)}
        rows |= {"etp": np.zeros_like(rows["tp"]), "sp": np.zeros_like(rows["tp"]), "zero": np.zeros_like(rows["tp"])}
        rows["sp"] = (np.repeat(base[:, 0], count) > 1).astype(np.int64)
        rows["schedule"] = np.full_like(rows["tp"], SCHEDULES.index("1f1b"))
        rows |= dict(zip(("tp", "pp", "cp", "dp"), (np.repeat(base[:, i], count) for i in range(4)), strict=True))
        return legal(spec, Columns(**(rows | given)), profile, cluster, work).reshape(len(own), count)

    tiled = [np.tile(np.array(column, dtype=np.int64), len(own)) for column in zip(*experts, strict=True)]
    # FSDP shards as widely as it can here, because some engines lay experts inside the sharded group.
    takes_experts = ask(a, ep=tiled[0], etp=tiled[1], sp=tiled[2], zero=np.full(len(own) * a, 3))
    takes_experts &= np.array(small) | (base[:, :1] > 1)
    runs = np.array(steps)
    # Schedules with several chunks need stages; the engine's own rules on schedules are asked below.
    takes_steps = work.global_batch % (base[:, 3:] * runs[:, 2]) == 0
    takes_steps &= (base[:, 1:2] > 1) | (runs[:, 0] == SCHEDULES.index("1f1b"))
    parts, size = [], 0
    for number, at in enumerate(own):
        ranks = at.dp * at.cp
        inside = max(1, node // (at.tp * at.cp))
        zeros = [
            (zero, at.dp // inside if one_node else 1, reshard)
            for zero, reshard, one_node in SHARDED
            if (ranks > 1 or zero == 0) and (not one_node or (1 < inside < at.dp and at.dp % inside == 0))
            if reshard or at.pp == 1
        ]
        size += (a if at.tp > 1 else sum(small)) * len(zeros) * (c if at.pp > 1 else len(MICRO_BATCHES))
        e, s = np.flatnonzero(takes_experts[number]), np.flatnonzero(takes_steps[number])
        if not len(e) or not len(s):
            continue
        i, j, k = (x.ravel() for x in np.meshgrid(e, np.arange(len(zeros)), s, indexing="ij"))
        ez, zz, sz = np.array(experts), np.array(zeros), runs
        same = (np.full(len(i), n, dtype=np.int64) for n in (at.tp, at.pp, at.dp, at.cp))
        parts.append(Columns(*same, *ez[i].T, *zz[j].T, *sz[k].T))
    found = joined(parts) if parts else Columns(*(np.zeros(0, dtype=np.int64) for _ in fields(Columns)))
    found = found.take(legal(spec, found, profile, cluster, work))
    return Space(found, size, size - len(found))

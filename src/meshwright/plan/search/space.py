"""The space of training layouts that use a whole cluster, as columns.

Axes: tp divides a node; pp, cp and dp share out the rest; ep and etp; sp on and off beside tp; ZeRO-0 to 3, FSDP with
and without resharding and with one replica a node (HSDP); schedules with their model chunks; stages as the engine
splits them and with lighter ends; micro-batches. Recompute is no axis here: the least that fits is taken (``memory``).
A stage holds whole nodes, or a node whole stages. What is left out, and why: ``LEFT_OUT``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshwright.plan.search.columns import SCHEDULES, Columns, empty, joined
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
#: Fewest tokens of a sequence that cp leaves on a rank: the fewest of all measured steps with cp that the constants of
#: ``training_time`` were fitted on, and there predictions are already up to 9 % too fast.
LEAST_TOKENS = 4096
#: Schedule and model chunks a rank.
SCHEDULED = (
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("interleaved", 8),
    ("zb-h1", 1),
    ("zbv", 1),
    ("dualpipev", 1),
)
#: Schedules that are looked at with lighter ends as well; the folded ones have both ends on one stage.
RELIEVED = ("1f1b", "interleaved", "zb-h1")
#: ZeRO stage, resharding after the forward, one replica of the sharded group a node.
SHARDED = ((0, 1, False), (1, 1, False), (2, 1, False), (3, 1, False), (3, 0, False), (3, 1, True))
#: What the space does not hold, and why.
LEFT_OUT = (
    ("tp across nodes", "every layer would send its activations over the network four times"),
    ("gpipe", "takes as long as 1f1b and holds all micro-batches"),
    (f"pp beyond {MAX_STAGES}, cp beyond {MAX_CONTEXT}", "no published run goes there"),
    (f"cp that leaves a rank fewer than {LEAST_TOKENS:,} tokens", "no such step was measured"),
    ("more than 8 chunks a rank, other hand-made stage_layers", "each shortens the bubble by less than the last"),
    ("micro-batches other than 1, 2, 4, 8", "sizes between them behave as their neighbours"),
    ("offload, recompute of some layers, FSDP wrap and prefetch", "stated by the user, not searched"),
)


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


def lighter_ends(layers: int, stages: int, ends: int) -> tuple[int, ...]:
    """Layers a stage when the last stage (``ends`` 1) or both ends (2) have one less than an equal share of the others,
    as Llama 3 405B was trained (arXiv:2407.21783, section 3.3.2: 126 layers on 16 stages); empty where that cannot be.
    """
    base, extra = divmod(layers + ends, stages)
    sizes = [base + (i < extra) for i in range(stages)]
    sizes[-1] -= 1
    sizes[0] -= ends - 1
    return tuple(sizes) if ends < stages and min(sizes) >= 1 else ()


@dataclass(frozen=True, slots=True)
class _Axes:
    """Axes beside the degrees.

    Attributes:
        experts: [A, 3]: ep, etp, sp. splits: every ``stage_layers``.
        steps: by pp: [S, 4]: schedule, chunks, micro-batch, place in ``splits``.
    """

    experts: Ints
    splits: tuple[tuple[int, ...], ...]
    steps: dict[int, Ints]


def _axes(spec: ModelSpec, profile: EngineProfile, depths: Iterable[int]) -> _Axes:
    import numpy as np

    experts = np.array([(ep, etp, sp) for ep, etp in expert_rows(spec) for sp in (0, 1)], dtype=np.int64)
    splits: dict[tuple[int, ...], int] = {(): 0}
    steps = {}
    for pp in sorted(set(depths)):
        usual = tuple(profile.split_layers(len(spec.layers), pp))
        found = {lighter_ends(len(spec.layers), pp, ends): None for ends in (1, 2)}
        uneven = [splits.setdefault(sizes, len(splits)) for sizes in found if sizes and sizes != usual]
        rows = [
            (SCHEDULES.index(name), v, b, split)
            for name, v in (SCHEDULED if pp > 1 else SCHEDULED[:1])
            for split in (0, *(uneven if name in RELIEVED else ()))
            for b in MICRO_BATCHES
        ]
        steps[pp] = np.array(rows, dtype=np.int64)
    return _Axes(experts, tuple(splits), steps)


def _takes_experts(
    spec: ModelSpec, cluster: Cluster, work: Train, profile: EngineProfile, axes: _Axes, base: Ints
) -> Mask:
    """[bases, A]: which experts' degrees the engine takes whatever the rest is.

    Asked without stages, and with FSDP because some engines lay experts inside the sharded group.
    """
    import numpy as np

    many = len(axes.experts)
    ones = np.ones(len(base) * many, dtype=np.int64)
    tp, _, cp, dp = (np.repeat(base[:, i], many) for i in range(4))
    ep, etp, sp = (np.tile(axes.experts[:, i], len(base)) for i in range(3))
    plain = ones * SCHEDULES.index("1f1b")
    asked = Columns(tp, ones, dp, cp, ep, etp, sp, ones * 3, ones, ones, plain, ones, ones, ones * 0)
    found = legal(spec, asked, profile, cluster, work).reshape(len(base), many)
    return np.asarray(found & (_simple(axes) | (base[:, :1] > 1)))


def _simple(axes: _Axes) -> Mask:
    """Rows of ``experts`` that tp 1 has: there is nothing else to choose."""
    import numpy as np

    return np.asarray((axes.experts[:, 1] == 0) & (axes.experts[:, 2] == 0))


def _sharded(at: Base, node: int) -> list[tuple[int, int, int]]:
    """ZeRO stage, replicas and resharding to look at."""
    inside = max(1, node // (at.tp * at.cp))
    return [
        (zero, at.dp // inside if one_node else 1, reshard)
        for zero, reshard, one_node in SHARDED
        if (at.dp * at.cp > 1 or zero == 0) and (not one_node or (1 < inside < at.dp and at.dp % inside == 0))
        if reshard or at.pp == 1
    ]


def space(spec: ModelSpec, cluster: Cluster, work: Train, profile: EngineProfile) -> Space:
    """Every layout of the space that the engine takes.

    What experts and batches forbid whatever the rest is falls first and as whole blocks; every rule is asked for what
    is left.
    """
    import numpy as np

    own = list(bases(spec, cluster, work))
    if not own:
        return Space(empty(), 0, 0)
    axes = _axes(spec, profile, (b.pp for b in own))
    base = np.array([(b.tp, b.pp, b.cp, b.dp) for b in own], dtype=np.int64)
    takes_experts, simple = _takes_experts(spec, cluster, work, profile, axes, base), _simple(axes)
    parts, size = [], 0
    for at, taken in zip(own, takes_experts, strict=True):
        zeros, steps = np.array(_sharded(at, cluster.devices_per_node)), axes.steps[at.pp]
        size += (len(simple) if at.tp > 1 else int(simple.sum())) * len(zeros) * len(steps)
        e, s = np.flatnonzero(taken), np.flatnonzero(work.global_batch % (at.dp * steps[:, 2]) == 0)
        i, j, k = (x.ravel() for x in np.meshgrid(e, np.arange(len(zeros)), s, indexing="ij"))
        same = (np.full(len(i), n, dtype=np.int64) for n in (at.tp, at.pp, at.dp, at.cp))
        parts.append(Columns(*same, *axes.experts[i].T, *zeros[j].T, *steps[k].T))
    found = replace(joined(parts), splits=axes.splits)
    found = found.take(legal(spec, found, profile, cluster, work))
    return Space(found, size, size - len(found))

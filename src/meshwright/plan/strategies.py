"""What each strategy would do for this model on this cluster: what it cuts, what it sends, where it belongs.

Each row is one axis alone at a natural degree; the bytes are counted by the predicted ledger of that layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshwright.errors import IllegalLayoutError, InputError
from meshwright.ledger.schema import Entry
from meshwright.plan.cores import Batch
from meshwright.plan.forward import forward_entries
from meshwright.plan.training_step import training_entries
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import Placement, place
from meshwright.specs.profile import EngineProfile
from meshwright.specs.workload import Serve, Train, Workload


@dataclass(frozen=True, slots=True)
class StrategyRow:
    """One strategy for one model and cluster.

    Attributes:
        strategy: ``TP``, ``PP``, ``DP``, ``EP``, ``SP``, ``CP``, ``DCP``, ``ZeRO-1``, ``ZeRO-2``, ``ZeRO-3``.
        layout: the layout that was counted, None where there is none.
        cuts: what it divides among ranks.
        pattern: its communication, counted: ``160 x all_reduce``.
        payload_bytes, wire_bytes: a token (serving, decode, one sequence; summed over pipeline stages) or a step
            (training, the busiest rank): what enters its collectives, and what a rank sends. None: not counted.
        per: ``token`` or ``step``.
        belongs: where the traffic belongs, in plain words.
        note: why it was not counted, or what to know; empty.
    """

    strategy: str
    layout: Layout | None
    cuts: str
    pattern: str
    payload_bytes: int | None
    wire_bytes: int | None
    per: str
    belongs: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Strategy:
    name: str
    cuts: str
    belongs: str
    layouts: Callable[[_Setting], Iterator[Layout]]
    axes: frozenset[str]
    serves: bool = True
    trains: bool = True


@dataclass(frozen=True, slots=True)
class _Setting:
    """What natural degrees depend on."""

    spec: ModelSpec
    cluster: Cluster
    workload: Workload

    @property
    def devices(self) -> int:
        """At least two, so that a strategy has something to do."""
        return max(2, self.cluster.devices)

    @property
    def node(self) -> int:
        return max(2, self.cluster.devices_per_node)

    def divisors(self, largest: int) -> Iterator[int]:
        """Divisors of ``largest`` above one, from the largest."""
        return (n for n in range(largest, 1, -1) if largest % n == 0)

    def inside(self) -> Iterator[int]:
        """Degrees inside a node: its divisors first, then what else fits it."""
        yield from self.divisors(self.node)
        yield from (n for n in range(self.node - 1, 1, -1) if self.node % n)

    def batch_shards(self) -> Iterator[int]:
        """Data-parallel degrees that the devices and the global batch allow, from the largest."""
        batch = self.workload.global_batch if isinstance(self.workload, Train) else 0
        return (n for n in self.divisors(self.devices) if batch % n == 0)


def _tp(s: _Setting) -> Iterator[Layout]:
    return (Layout(tp=n) for n in s.inside())


def _pp(s: _Setting) -> Iterator[Layout]:
    yield Layout(pp=s.cluster.nodes if s.cluster.nodes > 1 else 2)
    yield Layout(pp=2)


def _dp(s: _Setting) -> Iterator[Layout]:
    return (Layout(dp=n) for n in s.batch_shards())


def _ep(s: _Setting) -> Iterator[Layout]:
    if s.spec.moe is None:
        return
    for n in s.batch_shards():
        yield from (Layout(dp=n, ep=e) for e in range(n, 1, -1) if n % e == 0)


def _sp(s: _Setting) -> Iterator[Layout]:
    return (Layout(tp=n, sp=True) for n in s.inside())


def _cp(s: _Setting) -> Iterator[Layout]:
    return (Layout(cp=n) for n in s.divisors(s.node))


def _dcp(s: _Setting) -> Iterator[Layout]:
    for n in s.inside():
        yield from (Layout(tp=n, dcp=d) for d in range(n, 1, -1) if n % d == 0)


def _zero(stage: int) -> Callable[[_Setting], Iterator[Layout]]:
    return lambda s: (Layout(dp=n, zero=stage) for n in s.batch_shards())


_DP_AXES = frozenset({"dp", "dp+cp", "edp"})

STRATEGIES = (
    _Strategy(
        "TP",
        "every weight matrix, heads and KV cache of every layer",
        "inside the node: every layer waits for it twice, so it needs NVLink",
        _tp,
        frozenset({"tp"}),
    ),
    _Strategy(
        "PP",
        "the layers: each stage holds a run of them with its KV cache",
        "across nodes: one hand-off a boundary bears a slow link; costs a bubble",
        _pp,
        frozenset({"pp"}),
    ),
    _Strategy(
        "DP",
        "the requests or the batch; every replica holds the whole model, so it saves no memory",
        "across nodes: serving replicas do not talk; training sums gradients once a step",
        _dp,
        _DP_AXES,
    ),
    _Strategy(
        "EP",
        "the experts; attention is replicated over the batch shards",
        "only with experts; inside the node if it can, else over a fast network between nodes",
        _ep,
        frozenset({"ep", "dp", "dp+cp"}),
    ),
    _Strategy(
        "SP",
        "activations between the blocks, along the sequence, on top of TP",
        "inside the node with TP: the same bytes as its all_reduces, less activation memory",
        _sp,
        frozenset({"tp"}),
    ),
    _Strategy(
        "CP",
        "the tokens of a long sequence with their activations",
        "inside the node first, across nodes when K and V blocks hide behind attention; long contexts only",
        _cp,
        frozenset({"cp"}),
    ),
    _Strategy(
        "DCP",
        "the KV cache along the sequence, inside the TP group where KV heads would be copied",
        "inside the node with TP; when TP exceeds the KV heads (or MLA) and cache is scarce",
        _dcp,
        frozenset({"dcp"}),
        trains=False,
    ),
    _Strategy(
        "ZeRO-1",
        "optimizer states over the batch shards",
        "across nodes: the bytes of plain DP (reduce_scatter + all_gather once a step)",
        _zero(1),
        _DP_AXES,
        serves=False,
    ),
    _Strategy(
        "ZeRO-2",
        "optimizer states and gradients over the batch shards",
        "across nodes; reduces after every micro-batch, so few micro-batches",
        _zero(2),
        _DP_AXES,
        serves=False,
    ),
    _Strategy(
        "ZeRO-3",
        "parameters, gradients and optimizer states over the batch shards (FSDP)",
        "fast links: gathers every layer twice a micro-batch; replicate across nodes (HSDP) if they are slow",
        _zero(3),
        _DP_AXES,
        serves=False,
    ),
)


def strategies(spec: ModelSpec, cluster: Cluster, workload: Workload, profile: EngineProfile) -> list[StrategyRow]:
    """One row a strategy, each alone at a natural degree: the node for TP, SP, CP and DCP, the nodes for PP, all
    devices for DP, EP and ZeRO; where that is illegal, the next smaller degree.

    Args:
        spec, cluster, workload: the case. profile: engine that places and communicates.
    """
    setting = _Setting(spec, cluster, workload)
    return [_row(strategy, setting, profile) for strategy in STRATEGIES]


def _row(s: _Strategy, setting: _Setting, profile: EngineProfile) -> StrategyRow:
    train = isinstance(setting.workload, Train)
    per = "step" if train else "token"

    def empty(note: str) -> StrategyRow:
        return StrategyRow(s.name, None, s.cuts, "none", None, None, per, s.belongs, note)

    if train and not s.trains:
        return empty("only for inference")
    if not train and not s.serves:
        return empty("only for training: inference holds no gradients and no optimizer states")
    if s.name == "EP" and setting.spec.moe is None:
        return empty("this model has no experts")
    reasons: list[str] = []
    for layout in s.layouts(setting):
        try:
            placement = place(setting.spec, layout, profile)
            return _counted(s, placement, setting.workload, per)
        except (IllegalLayoutError, InputError) as error:
            reasons.append(str(error))
    if not reasons:
        return empty("no degree above one divides the devices and the batch")
    return empty(f"{profile.name} cannot: {reasons[0]}")


def _counted(s: _Strategy, placement: Placement, workload: Workload, per: str) -> StrategyRow:
    if isinstance(workload, Serve):
        context = s.name in {"CP", "SP"}
        batch = Batch("prefill", 1, workload.isl) if context else Batch("decode", 1, 1, workload.isl)
        entries = forward_entries(placement, batch)
        share = workload.isl if context else 1
    else:
        entries = training_entries(placement, workload)
        share = 1
    mine = [e for e in entries if e.group is not None and e.group.split("_")[0] in s.axes]
    stages = {c.coordinate.pp: c.name for c in reversed(placement.classes)}
    if per == "token":
        rows = [e for e in mine if e.rank_class in stages.values()]
    else:
        rows = max(([e for e in mine if e.rank_class == c.name] for c in placement.classes), key=_wire)
    counts: dict[str, int] = {}
    for e in rows:
        counts[e.op] = counts.get(e.op, 0) + e.count
    counts.pop("recv", None)
    pattern = " + ".join(f"{n:,} x {op}" for op, n in counts.items()) or "none"
    payload = sum((e.payload_bytes or 0) * e.count for e in rows if e.op != "recv")
    note = "counted over a prefill, shared out over its tokens" if share > 1 else ""
    if s.name == "DP" and isinstance(workload, Serve):
        note = "replicas are independent" + ("; with experts shared between them see EP" if placement.spec.moe else "")
        if rows:
            note = f"{placement.profile.name} cuts every expert over tp x dp, so its replicas are not independent"
    layout = placement.layout
    return StrategyRow(s.name, layout, s.cuts, pattern, payload // share, _wire(rows) // share, per, s.belongs, note)


def _wire(entries: list[Entry]) -> int:
    return sum((e.wire_bytes or 0) * e.count for e in entries)

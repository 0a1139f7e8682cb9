"""What one layer, one end of the model and one hand-off do on a rank, once for every distinct way of cutting them.

A space of a million layouts cuts layers in a few hundred ways: by tp, cp, ep, etp, sp and micro-batch. Each is counted
by the functions that fill and time the row ledger (``layer_ops``, ``backward_ops``, ``OpCounter``); ``step`` combines
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import lcm, prod
from typing import TYPE_CHECKING

from meshwright.plan.backward import backward_ops
from meshwright.plan.cores import Batch
from meshwright.plan.forward import embedding_ops, has_label
from meshwright.plan.layer_ops import Context, ffn_ops, mixer_ops
from meshwright.plan.products import Held, Kind, held
from meshwright.plan.search.columns import Columns
from meshwright.plan.timing.collective import Wiring
from meshwright.plan.training_step import loss_ops
from meshwright.plan.training_time_work import OpCounter, Work
from meshwright.plan.training_time_work import Part as Ran
from meshwright.plan.wire import Op, Ways, parts, ways
from meshwright.specs.cluster import Cluster
from meshwright.specs.dtypes import DTYPE_BYTES
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import Placement, Shard, place
from meshwright.specs.profile import EngineProfile
from meshwright.specs.shares import ExpertGrid
from meshwright.specs.workload import Train

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from meshwright.plan.search.columns import Floats, Ints


@dataclass(frozen=True, slots=True)
class Cut:
    """One way of cutting layers: degrees, the engine's grid of experts, sequence parallelism, micro-batch.

    Attributes:
        etp: as the layout states it, 0 for the engine's choice; ``grid_etp``: ranks that share an expert.
    """

    tp: int
    cp: int
    ep: int
    etp: int
    grid_etp: int
    sp: int
    micro_batch: int

    def layout(self, *, etp: int | None) -> Layout:
        """The smallest layout that cuts layers so."""
        dp = lcm(self.ep * (etp or self.grid_etp), self.tp) // self.tp
        return Layout(
            tp=self.tp,
            dp=dp,
            cp=self.cp,
            ep=self.ep,
            etp=etp,
            sp=bool(self.sp),
            zero=3,
            micro_batch=self.micro_batch,
        )


def grid_etp(x: Columns, profile: EngineProfile) -> Ints:
    """``specs.shares.expert_tp`` over columns."""
    import numpy as np

    alone = np.ones_like(x.tp)
    for axis in profile.moe_tp_over:
        alone = alone * getattr(x, axis)
    beside = x.tp
    if profile.ep_fills:
        beside = np.maximum(1, x.stage // x.ep)
    elif profile.ep_whole:
        beside = np.ones_like(x.tp)
    else:
        beside = np.where((x.dp * x.cp) % x.ep, 1, x.tp)
    return np.where(x.etp > 0, x.etp, np.where(x.ep == 1, alone, beside))


def cuts_of(x: Columns, profile: EngineProfile) -> tuple[list[Cut], Ints, Ints]:
    """Distinct cuts of some layouts, the cut of every row, and the grid's etp of every row."""
    import numpy as np

    grid = grid_etp(x, profile)
    axes = (x.tp, x.cp, x.ep, x.etp, grid, x.sp, x.micro_batch)
    code = np.zeros_like(x.tp)
    for axis in axes:
        code = code * (int(axis.max(initial=0)) + 1) + axis
    _, first, number = np.unique(code, return_index=True, return_inverse=True)
    cuts = [Cut(*(int(axis[i]) for axis in axes)) for i in first]
    return cuts, number, grid


class Wired:
    """Wiring of a cut: groups inside a stage, seen from its first rank, when stages and nodes are aligned."""

    def __init__(self, cut: Cut, cluster: Cluster) -> None:
        self.per_node = cluster.devices_per_node
        self.shape = {
            "tp": (1, cut.tp),
            "cp": (cut.tp, cut.cp),
            "etp": (1, cut.grid_etp),
            "ep": (cut.grid_etp, cut.ep),
        }

    def of(self, group: str) -> Wiring:
        """Wiring of a group: members ``stride`` ranks apart.

        Raises:
            KeyError: a group whose members depend on more than the cut.
        """
        stride, members = self.shape[group]
        return Wiring(members, min(members, -(-self.per_node // stride)))


@dataclass(slots=True)
class Holder:
    """What the first rank holds under one (tp, ep, etp): products by pattern, and the ends of the model."""

    placement: Placement
    held: Held
    kinds: list[Kind]
    ends: tuple[int, ...]
    alike: bool


@dataclass(frozen=True, slots=True)
class Works:
    """Work of K cuts and P patterns of layers (see ``specs.model.ModelSpec.patterns``), W wide.

    Attributes:
        layer: [K, P, 3, W]: forward, backward and attention core of one micro-batch.
        first, last: [K, 2, W]: embedding, and final norm, head and loss, forward and backward.
    """

    layer: Floats
    first: Floats
    last: Floats

    def rated(self, weights: Floats) -> Works:
        """The same times ``weights`` ([W, V])."""
        return Works(self.layer @ weights, self.first @ weights, self.last @ weights)


@dataclass(frozen=True, slots=True)
class Tables:
    """Counts of K cuts and P patterns of layers.

    Attributes:
        work: by field of ``training_time_work.Work``.
        hidden_bytes: [K]: of the tensor handed from stage to stage.
        parameters: [K, P, 2]: elements of a layer, dense and expert.
        norms: [K, P]: elements of a layer's norms. end_norms: [K]: of those behind the last layer.
        embedding, vocabulary, tail, tied, other: [K]: see ``_ends``.
        held: [K]: number of the (tp, ep, etp) on which all counts of elements depend.
    """

    work: Works
    hidden_bytes: Ints
    parameters: Ints
    norms: Ints
    end_norms: Ints
    embedding: Ints
    vocabulary: Ints
    tail: Ints
    tied: Ints
    other: Ints
    held: Ints


@dataclass(slots=True)
class Counter:
    """Fills the tables of one model, engine, cluster and workload."""

    spec: ModelSpec
    profile: EngineProfile
    cluster: Cluster
    work: Train
    compute: str
    holders: dict[tuple[int, int, int], Holder] = field(default_factory=dict)
    known: dict[object, NDArray[np.float64]] = field(default_factory=dict)
    ways: Ways = field(init=False)

    def __post_init__(self) -> None:
        self.ways = ways(self.profile)

    def holder(self, cut: Cut) -> Holder:
        """The placement behind a cut, remembered."""
        key = (cut.tp, cut.ep, cut.grid_etp)
        if key not in self.holders:
            layout = Cut(cut.tp, 1, cut.ep, 0, cut.grid_etp, int(cut.tp > 1), 1).layout(etp=cut.grid_etp)
            placement = place(self.spec, layout, self.profile, sections=("decoder", "vision"))
            own = held(placement, placement.classes[0].coordinate, {})
            first = {pattern: layer for layer, pattern in reversed([*enumerate(self.spec.patterns)])}
            kinds = [own.kinds[first[pattern]] for pattern in sorted(first)]
            self.holders[key] = Holder(placement, own, kinds, _ends(own.ends), len(placement.classes) == 1)
        return self.holders[key]

    def context(self, cut: Cut) -> Context:
        """What ``training_step`` counts layers with."""
        train = self.work
        return Context(
            cut.layout(etp=cut.etp or None),
            ExpertGrid(cut.grid_etp, cut.ep, 1),
            self.ways,
            self.spec.hidden,
            train.param_dtype,
            train.param_dtype,
            Batch("forward", cut.micro_batch, train.seq),
            weight_dtype=train.param_dtype,
            marks=True,
        )

    def count(self, cuts: list[Cut]) -> Tables:
        """Tables of some cuts."""
        import numpy as np

        patterns, k, fields = len(set(self.spec.patterns)), len(cuts), len(Work._fields)
        layer, ends = np.zeros((k, patterns, 3, fields)), np.zeros((2, k, 2, fields))
        whole = np.zeros((8, k), dtype=np.int64)
        parameters = np.zeros((k, patterns, 2), dtype=np.int64)
        norms = np.zeros((k, patterns), dtype=np.int64)
        numbers: dict[tuple[int, int, int], int] = {}
        for i, cut in enumerate(cuts):
            at = self.holder(cut)
            tokens = parts(cut.micro_batch * self.work.seq, cut.cp)
            for p, kind in enumerate(at.kinds):
                for key, make in self._blocks(cut, tokens, p, kind):
                    if key not in self.known:
                        c = self.context(cut)
                        self.known[key] = np.array(self._layer(c, make(c), self._counter(cut)))
                    layer[i, p] += self.known[key]
                parameters[i, p], norms[i, p] = kind.parameters, sum(kind.norms)
            ends[:, i] = self._ends(cut, tokens, at)
            held_tokens = parts(tokens, cut.tp) if cut.sp and cut.tp > 1 else tokens
            handed = held_tokens * self.spec.hidden * DTYPE_BYTES[self.work.param_dtype]
            number = numbers.setdefault((cut.tp, cut.ep, cut.grid_etp), len(numbers))
            whole[:, i] = (handed, *at.ends, number)
        hidden, end_norms, embedding, vocabulary, tail, tied, other, held = whole
        return Tables(
            work=Works(layer, *ends),
            hidden_bytes=hidden,
            parameters=parameters,
            norms=norms,
            end_norms=end_norms,
            embedding=embedding,
            vocabulary=vocabulary,
            tail=tail,
            tied=tied,
            other=other,
            held=held,
        )

    def _counter(self, cut: Cut) -> OpCounter:
        moe = self.spec.moe
        wired = Wired(cut, self.cluster)
        return OpCounter(wired, self.cluster, self.work, self.compute, topk=moe.topk if moe is not None else 1)

    def _blocks(
        self, cut: Cut, tokens: int, p: int, kind: Kind
    ) -> tuple[tuple[object, Callable[[Context], list[Op]]], ...]:
        """Parts of a layer, each with all that it depends on: mixers on cp and micro-batch apart, the rest only on the
        tokens of a rank."""
        some = (p, cut.tp, cut.sp, tokens)
        spread = (cut.ep, cut.grid_etp) if kind.layer.moe is not None else ()
        return (
            (("mixer", p, cut.tp, cut.sp, cut.cp, cut.micro_batch), lambda c: mixer_ops(c, kind)),
            (("ffn", *some, *spread), lambda c: ffn_ops(c, kind)),
            (("norms", *some), lambda c: [c.norm("norm", width) for width in kind.norms]),
        )

    def _ends(self, cut: Cut, tokens: int, at: Holder) -> NDArray[np.float64]:
        """Embedding and head, forward and backward."""
        import numpy as np

        key = ("ends", cut.tp, cut.sp, tokens)
        if key not in self.known:
            c, counter, rows = self.context(cut), self._counter(cut), []
            for ops in (embedding_ops(c, at.held.ends), loss_ops(at.placement, c, at.held.ends)):
                back = backward_ops(c, ops, self.work.attention, self.work.grad_dtype)
                both = (("forward", ops), ("backward", back))
                rows.append([counter.count(Ran(phase, False, some, 1))[0] for phase, some in both])
            self.known[key] = np.array(rows)
        return self.known[key]

    def _layer(self, c: Context, forward: list[Op], counter: OpCounter) -> list[Work]:
        """Forward, backward and attention core of one part of a layer."""
        back = backward_ops(c, forward, self.work.attention, self.work.grad_dtype)
        core = [op for op in forward if op.op == "attention"]
        lists = (("forward", forward), ("backward", back), ("backward", core))
        return [counter.count(Ran(phase, True, ops, 1))[0] for phase, ops in lists]


def _numel(shard: Shard) -> int:
    return shard.family.elements * prod(shard.shape)


def _ends(ends: tuple[Shard, ...]) -> tuple[int, ...]:
    """Elements of the norms behind the last layer, of all embeddings, of the one over the vocabulary, of what lies
    behind the last layer; the size of the table that tied ends sum; elements of all other ends."""
    norm = sum(s.shape[0] for s in ends if s.family.role == "norm")
    embeddings = [s for s in ends if s.family.role == "embedding"]
    tables = [s for s in embeddings if has_label(s, "vocab")]
    tail = sum(_numel(s) for s in ends if s.family.role in {"norm", "head"})
    embedding = sum(map(_numel, embeddings))
    other = sum(map(_numel, ends)) - embedding - tail
    return norm, embedding, sum(map(_numel, tables)), tail, prod(tables[0].shape) if tables else 0, other

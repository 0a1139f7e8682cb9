"""Planted mistakes of training inside the model: the forward, and mostly the loss, stay right while gradients go wrong.

Each is one that a runtime was reported to have; see ``runtime.mutate_train`` for the list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from meshwright.runtime.train_mutation import Patch, TrainMutation
from meshwright.specs.placement import Placement, Shard

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.runtime.mesh import Mesh

TRAIN = "meshwright.runtime.train"
MOE = "meshwright.runtime.models.moe"


def _unless(told: str, holds: Callable[[Placement], bool]) -> Callable[[Placement], str | None]:
    return lambda p: None if holds(p) else told


def _labels(p: Placement, label: str) -> bool:
    return any(segment.label == label for f in p.spec.families for dim in f.dims for segment in dim)


_sums = _unless("tp of at least 2 without sp", lambda p: p.layout.tp > 1 and not p.layout.sp)
_tp = _unless("tp of at least 2", lambda p: p.layout.tp > 1)
_sp = _unless("sp", lambda p: p.layout.tp > 1 and p.layout.sp)
_cp = _unless("cp of at least 2", lambda p: p.layout.cp > 1)
_ring = _unless("cp of at least 2 on the ring", lambda p: p.layout.cp > 1 and p.layout.cp_kind != "ulysses")
_moe = _unless("a mixture of experts", lambda p: p.spec.moe is not None)
_nothing = _unless("", lambda _: True)
_head_norms = _unless(
    "tp of at least 2 and norms of query and key heads (Qwen3)",
    lambda p: p.layout.tp > 1 and any(f.role == "attention" and not f.op for f in p.spec.families),
)
_copies = _unless(
    "more ranks of tp than KV heads",
    lambda p: any(0 < layer.attention.kv_heads < p.layout.tp for layer in p.spec.layers if layer.attention),
)
_travels = _unless(
    "experts that tokens of several data ranks meet at",
    lambda p: p.spec.moe is not None and p.cuts.grid.ep * p.cuts.grid.etp > p.layout.tp,
)
_slices = _unless(
    "experts over dp and tp without sp",
    lambda p: (
        p.spec.moe is not None
        and p.layout.tp > 1
        and not p.layout.sp
        and p.cuts.grid.etp == 1
        and p.cuts.grid.ep > p.layout.tp
    ),
)
_copied_routers = _unless(
    "a mixture of experts whose routers see the same tokens on several ranks of tp",
    lambda p: p.spec.moe is not None and p.layout.tp > 1 and p.cuts.grid.ep * p.cuts.grid.etp <= p.layout.tp,
)
_biased = _unless(
    "tp of at least 2 and a bias behind a row-parallel product",
    lambda p: p.layout.tp > 1 and any(f.part == "bias" and f.op in {"o", "down"} for f in p.spec.families),
)


def _edge(method: str, back: Callable[[Tensor, Mesh], Tensor]) -> Patch:
    """Another backward of ``enter`` or ``leave``."""

    def patches(mesh: Mesh) -> list[Any]:
        from meshwright.runtime.train import edges

        original = getattr(edges.TrainEdges, method)

        def wrong(self: Any, x: Tensor, name: str, *rest: Any) -> Tensor:
            moved = edges.moved

            def other(y: Tensor, there: Any, _: Any, name: str) -> Tensor:
                return moved(y, there, lambda dy: back(dy, mesh), name)

            with mock.patch.object(edges, "moved", other):
                out: Tensor = original(self, x, name, *rest)
            return out

        return [mock.patch.object(edges.TrainEdges, method, wrong)]

    return patches


def _summed(dy: Tensor, mesh: Mesh) -> Tensor:
    from meshwright.runtime.train.edges import summed

    return summed(dy, mesh.group("tp"))


def _unsummed(hit: Callable[[Shard], bool]) -> Patch:
    """Gradients of some parameters are taken for whole although every rank of tp has a part."""

    def patches(_: Mesh) -> list[Any]:
        from meshwright.runtime.train import shared

        original = shared.axis_of

        def axis_of(placement: Placement, shard: Shard) -> str | None:
            return None if hit(shard) else original(placement, shard)

        return [mock.patch(f"{TRAIN}.model.axis_of", axis_of), mock.patch(f"{TRAIN}.shared.axis_of", axis_of)]

    return patches


def _every_bias(mesh: Mesh) -> list[Any]:
    """Every rank of tp adds a bias before the sum."""
    from meshwright.runtime.train import edges

    def wrong(original: Any) -> Any:
        def leave(self: Any, x: Tensor, name: str, bias: Tensor | None = None) -> Tensor:
            out: Tensor = original(self, x if bias is None else x + bias, name)
            return out

        return leave

    classes = (edges.TrainEdges, edges.TrainSequenceEdges)
    return [mock.patch.object(edge, "leave", wrong(edge.leave)) for edge in classes]


def _own_rows(_: Mesh) -> list[Any]:
    """Every rank normalises over its own rows of the vocabulary."""
    return [mock.patch(f"{TRAIN}.loss.{name}", lambda x, group: x) for name in ("all_reduce", "all_max")]


def _counted_labels(_: Mesh) -> list[Any]:
    """Tokens whose label is to be ignored are part of the loss."""
    return [mock.patch(f"{TRAIN}.loss.IGNORED", -1)]


def _late_shift(_: Mesh) -> list[Any]:
    """The last token of every chunk of a sequence has no label, as when labels are shifted behind the cut."""
    from meshwright.runtime.train import batch

    original = batch.rows_at

    def rows_at(x: Tensor, at: Tensor, fill: int) -> Tensor:
        out = original(x, at, fill)
        if fill == batch.IGNORED:
            out.view(x.shape[0], 2, -1)[:, :, -1] = batch.IGNORED
        return out

    return [mock.patch.object(batch, "rows_at", rows_at)]


def _stay_home(_: Mesh) -> list[Any]:
    """Gradients of keys and values are kept where they are found, for the block that lies there."""
    from meshwright.runtime.train import ring

    def add(self: Any, own: Tensor) -> None:
        known = self._coming[0] if self._coming is not None else 0
        self._coming = own + known, ()

    return [mock.patch.object(ring._Home, "add", add)]


def _one_step_short(_: Mesh) -> list[Any]:
    """Gradients of keys and values stop one place before home."""
    from meshwright.runtime.train import ring

    original = ring._Home.add
    steps: dict[int, int] = {}

    def add(self: Any, own: Tensor) -> None:
        steps[id(self)] = steps.get(id(self), 0) + 1
        if steps[id(self)] < self.cp.size:
            original(self, own)
        else:
            self._coming = own + self._taken(), ()
            del steps[id(self)]

    return [mock.patch.object(ring._Home, "add", add)]


def _contiguous(_: Mesh) -> list[Any]:
    """Positions are those of contiguous shards while tokens are dealt in balanced ones."""
    from meshwright.runtime.train import batch

    original = batch.train_batch

    def train_batch(mesh: Mesh, *rest: Any, **options: Any) -> Any:
        import torch

        out = original(mesh, *rest, **options)
        each = out.tokens // out.sequences
        at = torch.arange(each, device=mesh.device) + mesh.group("cp").index * each
        return replace(out, positions_T=at.repeat(out.sequences))

    return [mock.patch(f"{TRAIN}.{module}.train_batch", train_batch) for module in ("batch", "step")]


def _detached(_: Mesh) -> list[Any]:
    """The weights of the experts have no gradient, so that the router learns nothing from the loss."""
    from meshwright.runtime.models import moe

    original = moe.weighted
    return [mock.patch(f"{MOE}.weighted", lambda y_TKD, weights_TK: original(y_TKD, weights_TK.detach()))]


def _one_way(_: Mesh) -> list[Any]:
    """Rows reach their experts without a way back for their gradients."""
    from meshwright.runtime.parallel.expert import AllToAll
    from meshwright.runtime.train.experts import TrainAllToAll

    def send(self: Any, x: Tensor, to: Any, frm: Any) -> Tensor:
        return AllToAll._send(self, x.detach(), to, frm)

    return [mock.patch.object(TrainAllToAll, "_send", send)]


def _left_out(_: Mesh) -> list[Any]:
    """Experts without tokens are left out, and have no gradient instead of one of zero."""

    def through(experts: Any, rows: Tensor, counts: Any) -> Tensor:
        import torch

        pairs = zip(experts, rows.split(list(counts)), strict=True)
        pieces = [expert(x) for expert, x in pairs if x.shape[0]]
        return torch.cat(pieces) if pieces else rows

    return [mock.patch(f"{MOE}.through", through)]


def _doubled_experts(_: Mesh) -> list[Any]:
    """Gradients of experts count twice, as when they are divided by the wrong number of data ranks."""
    from meshwright.runtime.models import moe

    original = moe.through

    def through(experts: Any, rows: Tensor, counts: Any) -> Tensor:
        out = original(experts, rows, counts)
        if not out.requires_grad:
            return out
        # Twice the gradient of the experts, and that of the rows as it was.
        return out + (original(experts, rows.detach(), counts) - out.detach())

    return [mock.patch(f"{MOE}.through", through)]


def _own_share(_: Mesh) -> list[Any]:
    """The balancing loss counts the choices of this rank only."""
    return [mock.patch(f"{TRAIN}.balance.all_reduce", lambda x, group: x)]


def _every_copy(_: Mesh) -> list[Any]:
    """Every rank of tp adds the whole balancing loss, and the gradients of all are summed."""
    from meshwright.runtime.train import balance

    original = balance.train_router

    def train_router(*rest: Any, **options: Any) -> Any:
        return replace(original(*rest, **options), copies=1)

    return [mock.patch(f"{TRAIN}.model.train_router", train_router)]


def _own_slice(_: Mesh) -> list[Any]:
    """A rank keeps the gradient of its slice of the tokens to itself."""
    from meshwright.runtime.train import edges

    def cut(self: Any, x: Tensor, low: int, high: int, name: str) -> Tensor:
        return x[low:high]

    return [mock.patch.object(edges.TrainEdges, "cut", cut)]


def _role(role: str, *, op: bool = True) -> Callable[[Shard], bool]:
    return lambda s: s.family.role == role and (op or not s.family.op)


GRADIENT_MISTAKES: tuple[TrainMutation, ...] = (
    TrainMutation(
        "unsummed-input-gradient", "no sum over tp where a block begins", _sums, _edge("enter", lambda dy, _: dy)
    ),
    TrainMutation("summed-output-gradient", "a sum over tp more, where a block ends", _sums, _edge("leave", _summed)),
    TrainMutation(
        "unsummed-kv-copies",
        "gradients of KV heads that several ranks hold are not summed",
        _copies,
        _unsummed(lambda s: s.family.op in {"k", "v"}),
    ),
    TrainMutation("unsummed-norms", "norm gradients are not summed over tp", _sp, _unsummed(_role("norm"))),
    TrainMutation(
        "unsummed-head-norms",
        "gradients of norms of query and key heads are not summed over tp",
        _head_norms,
        _unsummed(_role("attention", op=False)),
    ),
    TrainMutation("bias-on-every-rank", "a bias is added on every rank of tp", _biased, _every_bias),
    TrainMutation("own-vocabulary-loss", "the loss sees the rank's own vocabulary only", _tp, _own_rows),
    TrainMutation("ignored-labels-count", "tokens without a label are part of the loss", _nothing, _counted_labels),
    TrainMutation("labels-shifted-late", "labels are shifted behind the cut of cp", _cp, _late_shift),
    TrainMutation("ring-gradients-stay", "gradients of keys and values do not travel", _ring, _stay_home),
    TrainMutation("ring-one-short", "gradients of keys and values end one place short", _ring, _one_step_short),
    TrainMutation("contiguous-positions", "positions of contiguous shards with balanced ones", _cp, _contiguous),
    TrainMutation("detached-router", "the weights of experts have no gradient", _moe, _detached),
    TrainMutation("one-way-dispatch", "gradients do not travel back from experts", _travels, _one_way),
    TrainMutation("idle-experts-left-out", "experts without tokens have no gradient", _moe, _left_out),
    TrainMutation("doubled-expert-gradients", "gradients of experts count twice", _moe, _doubled_experts),
    TrainMutation("own-balance", "the balancing loss counts the rank's own choices", _moe, _own_share),
    TrainMutation("balance-of-every-copy", "ranks of tp each add the balancing loss", _copied_routers, _every_copy),
    TrainMutation("own-slice-gradient", "gradients of slices of tokens are not gathered", _slices, _own_slice),
)

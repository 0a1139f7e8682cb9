"""Planted mistakes in the step around the model: micro-batches, sums of gradients, clipping, ZeRO, the optimizer, first
weights. Loss and forward stay right with most of them.

Each is one that a runtime was reported to have; see ``runtime.mutate_train`` for the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from meshwright.runtime.train_mutation import Needs, Patch, TrainMutation
from meshwright.specs.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from meshwright.runtime.mesh import Group, Mesh
    from meshwright.runtime.train.batch import TrainBatch

TRAIN = "meshwright.runtime.train"
DATA = f"{TRAIN}.data_parallel"


def _need(wanted: str, has: Callable[[Placement], bool]) -> Needs:
    """Needs a placement that ``has`` something, which is called ``wanted``."""
    return lambda p: None if has(p) else wanted


def _scaled_by_micro_batches(_: Mesh) -> list[Any]:
    """Every micro-batch's loss counts as the whole step's."""
    from meshwright.runtime.train.pipeline import Outcome, Pipeline

    run = Pipeline.run

    def scaled(self: Pipeline, batches: Sequence[Any], scale: float, watch: Any = None) -> Outcome:
        return run(self, batches, scale * len(batches), watch)

    return [mock.patch.object(Pipeline, "run", scaled)]


def _local_count(mesh: Mesh) -> list[Any]:
    """A mean of means: a rank divides by its own number of valid tokens."""
    from meshwright.runtime.train import step

    count, data = step.count_tokens, mesh.placement.layout.dp * mesh.placement.layout.cp

    def local(mesh: Mesh, batches: Sequence[TrainBatch]) -> int:
        count(mesh, batches)
        return max(1, sum(b.valid for b in batches) * data)

    return [mock.patch(f"{TRAIN}.step.count_tokens", local)]


def _late_weights(_: Mesh) -> list[Any]:
    """Weight gradients that were put off are made when the optimizer has run."""
    from meshwright.runtime.later import Later
    from meshwright.runtime.train.data_parallel import Bucketed
    from meshwright.runtime.train.stage import Stage

    left: list[Later] = []
    update = Bucketed.update

    def keep(self: Stage, number: int) -> None:
        left.append(self._passes.pop(number).later)

    def then(self: Bucketed, rate: float, most: float | None = None) -> float:
        norm = update(self, rate, most)
        while left:
            left.pop(0).run()
        return norm

    return [mock.patch.object(Stage, "weights", keep), mock.patch.object(Bucketed, "update", then)]


def _drawn_by_rank(mesh: Mesh) -> list[Any]:
    """First weights come from a generator that knows the rank."""
    from meshwright.runtime.train import init

    drawn = init._drawn

    def by_rank(name: str, family: Any, seed: int, *rest: Any) -> Tensor:
        return drawn(name, family, seed + mesh.rank, *rest)

    return [mock.patch(f"{TRAIN}.init._drawn", by_rank)]


def _sums(axis: str, times: int) -> Patch:
    """The sum of copies' gradients over an axis counts ``times`` times; 0: it is left out."""

    def patches(_: Mesh) -> list[Any]:
        from meshwright.runtime.train import data_parallel

        summed = data_parallel.sum_copies

        def sum_copies(gradient: Tensor, group: Group) -> None:
            hit = group.axis == axis
            if not hit or times:
                summed(gradient, group)
            if hit and times > 1:
                gradient.mul_(times)

        places = (DATA, "meshwright.runtime.train.fsdp")
        return [mock.patch(f"{place}.sum_copies", sum_copies) for place in places]

    return patches


def _unreduced(_: Mesh) -> list[Any]:
    """Data ranks keep what they found themselves."""
    from meshwright.runtime.train.flat import Flat, ScatteredEach, ScatteredOnce

    return [mock.patch.object(kind, "_reduce", return_value=None) for kind in (Flat, ScatteredEach, ScatteredOnce)]


def _last_only(_: Mesh) -> list[Any]:
    """Every micro-batch overwrites the gradient of the one before."""
    from meshwright.runtime.train.flat import Flat

    take = Flat.take

    def last(self: Flat, number: int) -> None:
        if self.parameters[number].tensor.grad is not None:
            self.fresh.add(number)
        take(self, number)

    return [mock.patch.object(Flat, "take", last)]


def _in_bf16(_: Mesh) -> list[Any]:
    """Gradients are rounded to bf16 before they are reduced."""
    import torch

    from meshwright.runtime.train.flat import Flat

    launch = Flat.launch

    def rounded(self: Flat) -> None:
        whole = self._open()
        whole.copy_(whole.to(torch.bfloat16))
        launch(self)

    return [mock.patch.object(Flat, "launch", rounded)]


def _local_norm(_: Mesh) -> list[Any]:
    """The norm is that of the rank's own gradients."""
    from meshwright.runtime.train import clip

    whole = clip.total_norm

    def local(pieces: Any, world: Group, *rest: Any) -> float:
        whole(pieces, world, *rest)
        return whole(pieces, replace(world, ranks=world.ranks[:1], index=0, pg=None), *rest)

    return [mock.patch("meshwright.runtime.train.clip.total_norm", local)]


def _copies_counted(_: Mesh) -> list[Any]:
    """Every rank counts all it holds, copies too."""
    return [mock.patch("meshwright.runtime.train.parameters.counted", return_value=True)]


def _decayed_norms(_: Mesh) -> list[Any]:
    """Weight decay pulls on norms, biases and embeddings as on matrices."""
    return [mock.patch("meshwright.runtime.train.parameters.decays", return_value=True)]


def _wrong_piece(_: Mesh) -> list[Any]:
    """Every rank updates the piece of its neighbour."""
    from meshwright.runtime.train.flat import ScatteredOnce

    def bounds(self: ScatteredOnce) -> tuple[int, int, int]:
        from meshwright.moves.buckets import piece

        each, size = piece(self.numel, self.group.size), self.group.size
        place = (self.group.index + 1) % size
        return place * each, (place + 1) * each, size * each

    return [mock.patch.object(ScatteredOnce, "_bounds", bounds)]


def _extra_sum(_: Mesh) -> list[Any]:
    """A sum that nothing needs, before the optimizer. The numbers stay right."""
    import torch

    from meshwright.runtime.collectives import all_reduce
    from meshwright.runtime.train.data_parallel import Bucketed

    finish = Bucketed.finish_gradients

    def more(self: Bucketed) -> None:
        finish(self)
        all_reduce(torch.zeros(1), self.groups["world"])

    return [mock.patch.object(Bucketed, "finish_gradients", more)]


def _whole_gradients(_: Mesh) -> list[Any]:
    """A rank keeps gradients whole beside its piece. The numbers stay right."""
    import torch

    from meshwright.runtime.train.flat import ScatteredEach

    allocate = ScatteredEach._allocate

    def whole(self: ScatteredEach) -> None:
        allocate(self)
        kept = torch.zeros_like(self.weight, dtype=self.master.dtype)
        self.gradient = kept[: self.gradient.numel()]

    return [mock.patch.object(ScatteredEach, "_allocate", whole)]


def _ends(p: Placement) -> bool:
    return p.spec.tied and sum(stage.embedding for stage in p.stages) > 1


def _split(p: Placement) -> bool:
    return p.layout.pp > 1 and p.layout.schedule in {"zb-h1", "zbv", "dualpipev"} and p.layout.zero < 3


def _data(p: Placement) -> bool:
    return p.layout.dp * p.layout.cp > 1


_anywhere = _need("", lambda _: True)
_many = _need("at least 2 ranks", lambda p: p.layout.world > 1)
_stages = _need("pp of at least 2", lambda p: p.layout.pp > 1)
_replicas = _need("dp or cp of at least 2", _data)
_reduced = _need("dp or cp of at least 2 with zero below 3", lambda p: _data(p) and p.layout.zero < 3)
_dealt = _need("dp or cp of at least 2 with zero=1 or 2", lambda p: _data(p) and p.layout.zero in {1, 2})
_scattered = _need("dp or cp of at least 2 with zero=2", lambda p: _data(p) and p.layout.zero == 2)
_flat = _need("zero below 3", lambda p: p.layout.zero < 3)
_put_off = _need("pp of at least 2 with a zero-bubble schedule and zero below 3", _split)
_tied = _need("a model with tied embeddings and its ends on two stages", _ends)
_copies = _need("tp of at least 2, or tied ends on two stages", lambda p: p.layout.tp > 1 or _ends(p))
_routed = _need("a mixture of experts with tp of at least 2", lambda p: p.spec.moe is not None and p.layout.tp > 1)

STEP_MISTAKES = (
    TrainMutation("times-micro-batches", "every micro-batch's mean counts whole", _stages, _scaled_by_micro_batches),
    TrainMutation("own-token-count", "each rank divides the loss by its own tokens", _replicas, _local_count),
    TrainMutation("only-last-micro-batch", "gradients of earlier micro-batches are lost", _flat, _last_only),
    TrainMutation("late-weight-gradients", "put off weight gradients miss the optimizer", _put_off, _late_weights),
    TrainMutation("unreduced-gradients", "gradients are not summed over data ranks", _reduced, _unreduced),
    TrainMutation("gradients-in-bf16", "gradients are rounded to bf16 on the way", _flat, _in_bf16),
    TrainMutation("unsummed-router", "routers keep the gradients of a rank's experts", _routed, _sums("tp", 0)),
    TrainMutation("tied-embedding-missed", "the two uses of a table learn apart", _tied, _sums("pp_tied", 0)),
    TrainMutation("tied-embedding-doubled", "the gradient of a tied table counts twice", _tied, _sums("pp_tied", 2)),
    TrainMutation("clip-norm-per-rank", "gradients are clipped by a norm of their rank", _many, _local_norm),
    TrainMutation("clip-norm-counts-copies", "copies count in the norm", _copies, _copies_counted),
    TrainMutation("decayed-norms", "weight decay pulls on norms", _anywhere, _decayed_norms),
    TrainMutation("wrong-zero-shard", "ranks update each other's pieces", _dealt, _wrong_piece),
    TrainMutation("whole-gradients-kept", "gradients stay whole, with right numbers", _scattered, _whole_gradients),
    TrainMutation("extra-sum", "a sum that nothing needs, with right numbers", _many, _extra_sum),
    TrainMutation("weights-drawn-by-rank", "first weights depend on the rank", _many, _drawn_by_rank, drawn=True),
)

"""Planted mistakes in a mixture of experts: routing, dispatch, experts, their sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from meshwright.runtime.mutation import Mutation
from meshwright.specs.placement import Coordinate, Placement, Shard

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.moves.expert import Exchange
    from meshwright.runtime.mesh import Group, Mesh
    from meshwright.runtime.models.decoder import Decoder
    from meshwright.runtime.parallel.expert import Ticket

MOE = "meshwright.runtime.models.moe"
TENSOR = "meshwright.runtime.parallel.tensor"


def _experts(p: Placement, _: int) -> str | None:
    return None if p.spec.moe is not None else "a mixture of experts"


def _renormalised(p: Placement, _: int) -> str | None:
    """Weights of GPT-OSS sum to 1 already."""
    right = p.spec.moe is not None and p.spec.model_type != "gpt_oss"
    return None if right else "a mixture of experts whose weights may be renormalised"


def _shared(p: Placement, _: int) -> str | None:
    has = any(layer.moe is not None and layer.moe.shared_intermediate for layer in p.spec.layers)
    return None if has else "a model with shared experts (DeepSeek)"


def _ep(p: Placement, _: int) -> str | None:
    return None if p.spec.moe is not None and p.cuts.grid.ep > 1 else "ep of at least 2"


def _travels(p: Placement, _: int) -> str | None:
    grid = p.cuts.grid
    right = p.spec.moe is not None and grid.ep > 1 and grid.ep * grid.etp > p.layout.tp
    return None if right else "ep around several data ranks (dp=2,ep=2)"


def _partial(p: Placement, new_tokens: int) -> str | None:
    """Experts inside the tp group, or cut over it: their results are partial sums."""
    summed = p.layout.tp > 1 and (p.cuts.grid.etp > 1 or _travels(p, new_tokens) is not None)
    return None if p.spec.moe is not None and summed else "experts inside, or cut over, a tp of at least 2"


def _on_first(decoder: Decoder, name: str, make: Callable[[Any], Any]) -> list[Any]:
    """Replace an attribute of the first sparse layer of the stage."""
    return [mock.patch.object(block, name, make(getattr(block, name))) for block in decoder.sparse[:1]]


def _lost(_: Mesh, __: Decoder) -> list[Any]:
    """The first row of every pass does not come back from its expert."""
    from meshwright.runtime.models import moe

    original = moe.weighted

    def weighted(y_TKD: Tensor, weights_TK: Tensor) -> Tensor:
        y_TKD[:1, :1] = 0
        return original(y_TKD, weights_TK)

    return [mock.patch(f"{MOE}.weighted", weighted)]


def _twice(_: Mesh, __: Decoder) -> list[Any]:
    """Sender and receiver both apply the weights."""
    from meshwright.runtime.models import moe

    original = moe.weighted
    return [mock.patch(f"{MOE}.weighted", lambda y_TKD, weights_TK: original(y_TKD, weights_TK**2))]


def _neighbour(_: Mesh, __: Decoder) -> list[Any]:
    """Every token visits the expert after the best one it chose."""
    from meshwright.runtime.models.moe import Router

    original = Router.choose

    def choose(self: Router, scores_TE: Tensor) -> Tensor:
        ids_TK = original(self, scores_TE)
        ids_TK[:, 0] = (ids_TK[:, 0] + 1) % scores_TE.shape[1]
        return ids_TK

    return [mock.patch.object(Router, "choose", choose)]


def _flipped(_: Mesh, decoder: Decoder) -> list[Any]:
    """Weights are renormalised where they should not be, and the other way round."""

    def flip(router: Any) -> Any:
        return replace(router, how=replace(router.how, renormalise=not router.how.renormalise))

    return [mock.patch.object(block, "router", flip(block.router)) for block in decoder.sparse]


def _uncorrected(_: Mesh, decoder: Decoder) -> list[Any]:
    """Experts are chosen by their scores alone."""
    return [mock.patch.object(b, "router", replace(b.router, correction=None)) for b in decoder.sparse]


def _corrects(p: Placement, _: int) -> str | None:
    has = any(f.role == "router" and f.part == "bias" and not f.op for f in p.spec.families)
    return None if has else "a router with a bias for the choice (DeepSeek-V3)"


def _unshared(_: Mesh, decoder: Decoder) -> list[Any]:
    """The shared experts of the first sparse layer are left out."""
    return _on_first(decoder, "shared", lambda _: None)


def _others(p: Placement, at: Coordinate) -> Placement:
    """A rank loads its experts one number off (the last rank: one before)."""
    shards = []
    for shard in p.shards(at):
        shards.append(_next_experts(shard) if shard.family.role == "expert" else shard)
    moved = replace(p)
    moved.known[at.pp, p.place(at)] = tuple(shards)
    return moved


def _next_experts(shard: Shard) -> Shard:
    if shard.experts:
        step = 1 if shard.experts[-1] + 1 < shard.family.experts else -1
        return replace(shard, experts=tuple(e + step for e in shard.experts))
    (low, high), *_ = shard.intervals[0]
    step = 1 if high < shard.family.shape[0] else -1
    return replace(shard, intervals=(((low + step, high + step),), *shard.intervals[1:]))


def _unsummed(_: Mesh, decoder: Decoder) -> list[Any]:
    """The sum over tp behind the experts of one layer is left out."""
    from meshwright.runtime import collectives
    from meshwright.runtime.scope import where

    original, first = collectives.all_reduce, [block.layer for block in decoder.sparse[:1]]

    def all_reduce(x: Tensor, group: Group) -> Tensor:
        here = where()
        return x if here.layer in first and here.name == "experts output" else original(x, group)

    return [mock.patch(f"{TENSOR}.all_reduce", all_reduce)]


def _misread(_: Mesh, __: Decoder) -> list[Any]:
    """The counts that arrive are read in the wrong order of experts: rows go through other experts."""
    from meshwright.runtime.parallel.expert import AllToAll

    original = AllToAll._exchanged

    def exchanged(self: AllToAll, *rest: Any) -> Exchange:
        right = original(self, *rest)
        return replace(right, received=tuple(counts[::-1] for counts in right.received))

    return [mock.patch.object(AllToAll, "_exchanged", exchanged)]


def _unsorted(_: Mesh, __: Decoder) -> list[Any]:
    """Results go back as they lie, expert by expert, not as their rows arrived, member by member."""
    import torch

    from meshwright.runtime.parallel.expert import AllToAll

    original = AllToAll.combine

    def combine(self: AllToAll, y_RD: Tensor, ticket: Ticket) -> Tensor:
        return original(self, y_RD, replace(ticket, arrived_R=torch.arange(y_RD.shape[0], device=y_RD.device)))

    return [mock.patch.object(AllToAll, "combine", combine)]


EXPERT_MISTAKES = (
    Mutation("lost-token", "one row a pass does not come back from its expert", _experts, patch=_lost),
    Mutation("wrong-expert", "tokens visit the expert after their best one", _experts, patch=_neighbour),
    Mutation("weights-applied-twice", "routing weights are applied before and after", _experts, patch=_twice),
    Mutation("flipped-renormalisation", "routing weights are renormalised wrongly", _renormalised, patch=_flipped),
    Mutation("uncorrected-choice", "the bias of the router's choice is left out", _corrects, patch=_uncorrected),
    Mutation("dropped-shared-experts", "the shared experts of one layer are left out", _shared, patch=_unshared),
    Mutation("experts-off-by-one", "every rank holds experts one number off", _ep, place=_others),
    Mutation("unsummed-experts", "the sum over tp behind the experts is left out", _partial, patch=_unsummed),
    Mutation("misread-counts", "arriving counts are read in the wrong order of experts", _travels, patch=_misread),
    Mutation("unsorted-return", "results go back in the order of experts, not of arrival", _travels, patch=_unsorted),
)

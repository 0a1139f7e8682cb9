"""Planted mistakes of sequence and context parallelism, and of norms around the sums over tp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from meshwright.moves.context import Piece
from meshwright.runtime.mutation import Mutation
from meshwright.specs.placement import Placement

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.runtime.mesh import Group, Mesh
    from meshwright.runtime.models.decoder import Decoder

CONTEXT = "meshwright.runtime.parallel.context"
SEQUENCE = "meshwright.runtime.parallel.sequence"


def _tp(p: Placement, _: int) -> str | None:
    return None if p.layout.tp > 1 else "tp of at least 2"


def _sp(p: Placement, _: int) -> str | None:
    return None if p.layout.sp and p.layout.tp > 1 else "sp=on with tp of at least 2"


def _cp(p: Placement, _: int) -> str | None:
    return None if p.layout.cp > 1 else "cp of at least 2"


def _ring(p: Placement, _: int) -> str | None:
    return None if p.layout.cp > 1 and p.layout.cp_kind != "ulysses" else "cp of at least 2 on the ring"


def _contiguous(mesh: Mesh, decoder: Decoder) -> list[Any]:
    """A place takes its two chunks for neighbours in the prompt: their positions are those of the unbalanced order."""
    import torch

    original, place = decoder.rotary, mesh.group("cp").index

    def rotary(batch: Any) -> Any:
        if batch.phase != "prefill":
            return original(batch)
        starts = [pieces[-1].start + place * rows for pieces, rows in zip(batch.pieces, batch.lengths, strict=True)]
        at = [start + i for start, rows in zip(starts, batch.lengths, strict=True) for i in range(rows)]
        return original(replace(batch, positions_T=torch.tensor(at, device=batch.positions_T.device)))

    return [mock.patch.object(decoder, "rotary", rotary)]


def _skipped_block(mesh: Mesh, _: Decoder) -> list[Any]:
    """What the first step of the ring brings is not attended to."""
    from meshwright.moves.context import owner
    from meshwright.runtime.parallel.context import ContextParallel

    original, cp = ContextParallel._block, mesh.group("cp")
    skipped = owner(1, cp.size, cp.index)

    def block(self: ContextParallel, found: Any, q: Tensor, k: Tensor, v: Tensor, other: int, *rest: Any) -> None:
        if other != skipped:
            original(self, found, q, k, v, other, *rest)

    return [mock.patch.object(ContextParallel, "_block", block)]


def _unscaled_merge(_: Mesh, __: Decoder) -> list[Any]:
    """Parts are averaged, whatever their shares of the denominator."""
    import torch

    def mean(parts: Sequence[Any], _: Tensor) -> Tensor:
        return torch.stack([p.out for p in parts]).mean(0)

    return [mock.patch(f"{CONTEXT}.sum_of", mean)]


def _all_visible(_: Mesh, __: Decoder) -> list[Any]:
    """Rows behind the last token are taken for keys."""
    import torch

    from meshwright.moves import context

    def keys(pieces: Sequence[Piece], cp: int, place: int) -> list[int]:
        return [at for piece in pieces for at in context.dealt(piece, cp, place)]

    def visible(at: Tensor, of: Tensor, _: int | None) -> Tensor:
        return torch.ones((*at.shape, of.shape[-1]), dtype=torch.bool, device=at.device)

    return [mock.patch(f"{CONTEXT}.visible", visible), mock.patch("meshwright.runtime.serve.dealt.keys", keys)]


def _first_mixer(decoder: Decoder) -> bool:
    """Whether this is the sum after the attention of the first layer of the stage."""
    from meshwright.runtime.scope import where

    return where().layer == decoder.layers[0] and where().name == "mixer output"


def _own_chunk(_: Mesh, decoder: Decoder) -> list[Any]:
    """A rank keeps its rows of its own partial result and sums nothing."""
    from meshwright.runtime import collectives

    def scatter(x: Tensor, group: Group) -> Tensor:
        if not _first_mixer(decoder):
            return collectives.reduce_scatter_rows(x, group)
        return x.chunk(group.size)[group.index].clone()

    return [mock.patch(f"{SEQUENCE}.reduce_scatter_rows", scatter)]


def _wrong_share(_: Mesh, decoder: Decoder) -> list[Any]:
    """Every rank adds the neighbour's rows of the sum to its own residual."""
    from meshwright.runtime import collectives

    def scatter(x: Tensor, group: Group) -> Tensor:
        turned = x.roll(x.shape[0] // group.size, 0) if _first_mixer(decoder) else x
        return collectives.reduce_scatter_rows(turned, group)

    return [mock.patch(f"{SEQUENCE}.reduce_scatter_rows", scatter)]


def _unreduced_norm(_: Mesh, decoder: Decoder) -> list[Any]:
    """The norm before the first feed-forward block sees this rank's partial sum; the residual is right."""
    edges, first = decoder.edges, decoder.layers[0]
    original = type(edges).leave
    missing: list[Tensor] = []

    def leave(self: Any, partial: Tensor, name: str, bias: Tensor | None = None) -> Tensor:
        from meshwright.runtime.scope import where

        if where().layer != first or name != "mixer output":
            return original(self, partial, name, bias)
        own = partial.clone()
        out = original(self, partial, name, bias)
        rows = out.shape[0]
        if rows != own.shape[0]:
            own = own[rows * self.tp.index :][:rows]
        missing[:] = [own - out[: own.shape[0]]]
        return out

    block = decoder.blocks[first]
    half = len(block.norms) // 2
    norm = block.norms[half]

    def unreduced(x: Tensor) -> Tensor:
        wrong = x.clone()
        wrong[: missing[0].shape[0]] += missing[0]
        return norm(wrong)

    norms: Any = (*block.norms[:half], unreduced, *block.norms[half + 1 :])
    blocks = {**decoder.blocks, first: replace(block, norms=norms)}
    return [mock.patch.object(type(edges), "leave", leave), mock.patch.object(decoder, "blocks", blocks)]


CONTEXT_MISTAKES = (
    Mutation("unreduced-norm", "a norm is taken before the sum over tp", _tp, patch=_unreduced_norm),
    Mutation("own-chunk-only", "a rank keeps its rows of its own partial result", _sp, patch=_own_chunk),
    Mutation("neighbours-share", "a rank takes its neighbour's rows of a sum", _sp, patch=_wrong_share),
    Mutation("unbalanced-positions", "balanced chunks get positions of the unbalanced order", _cp, patch=_contiguous),
    Mutation("skipped-ring-block", "a block that came round is not attended to", _ring, patch=_skipped_block),
    Mutation("merge-without-rescale", "parts are averaged without their log-sums", _cp, patch=_unscaled_merge),
    Mutation("no-causal-mask", "queries see later keys and filled-up rows", _cp, patch=_all_visible),
)

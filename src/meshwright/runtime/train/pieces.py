"""What a rank offers to a checkpoint: runs of its local tensors, and where they lie in the whole ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from meshwright.moves.reshard import Box, run_boxes, whole_boxes
from meshwright.runtime.checkpoint import own
from meshwright.runtime.train.parameters import counted
from meshwright.specs.placement import Coordinate, Placement

#: Kinds of values that are kept of a parameter: itself (its fp32 master copy where there is one) and what the optimizer
#: remembers of it.
KINDS = ("weight", "exp_avg", "exp_avg_sq", "momentum")


@dataclass(frozen=True, slots=True)
class LocalPiece:
    """A run of the elements of one local tensor: what ZeRO or FSDP leaves a rank of it, or all of it.

    Attributes:
        name: checkpoint name of the parameter. kind: one of ``KINDS``.
        tensor: the values; live storage, from which a save copies and into which a load copies.
        start: index of its first element in the row-major local tensor, which is what the placement gives the rank
            (``specs.placement.Shard.intervals``, joined).
    """

    name: str
    kind: str
    tensor: Tensor
    start: int = 0


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A box of one whole tensor.

    Attributes:
        key: name in the checkpoint, ``kind/name of the parameter``.
        tensor: its values, of the box's extents; a view of what the rank holds.
        box: where it lies. shape: of the whole tensor.
        write: whether this rank may write it (one of several that hold the same does).
    """

    key: str
    tensor: Tensor
    box: Box
    shape: tuple[int, ...]
    write: bool = True


def key_of(kind: str, name: str) -> str:
    """Name of a tensor in the checkpoint."""
    return f"{kind}/{name}"


def whole_piece(key: str, tensor: Tensor) -> TensorPiece:
    """All of a tensor as one box."""
    shape = tuple(tensor.shape)
    return TensorPiece(key, tensor, Box((0,) * len(shape), shape), shape)


def tensor_pieces(pieces: Iterable[LocalPiece], placement: Placement, coordinate: Coordinate) -> Iterator[TensorPiece]:
    """Boxes of the whole tensors that a rank's runs are.

    Raises:
        ValueError: a run leaves its tensor, or a name that the rank does not hold.
    """
    held = dict(own(placement, coordinate))
    writes: dict[int, bool] = {}
    for piece in pieces:
        if piece.name not in held:
            raise ValueError(f"{piece.name} is not held by the rank at {coordinate}")
        shard = held[piece.name]
        if id(shard) not in writes:
            writes[id(shard)] = counted(placement, coordinate, shard)
        flat = piece.tensor.detach().view(-1)
        for first, box in run_boxes(shard.shape, piece.start, piece.start + flat.numel()):
            values = flat.narrow(0, first - piece.start, box.numel).view(box.sizes)
            for local, whole in whole_boxes(box, shard.intervals):
                part = values
                for d, (a, b, base) in enumerate(zip(local.start, local.stop, box.start, strict=True)):
                    part = part.narrow(d, a - base, b - a)
                yield TensorPiece(key_of(piece.kind, piece.name), part, whole, shard.family.shape, writes[id(shard)])

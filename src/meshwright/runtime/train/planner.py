"""What torch.distributed.checkpoint is told: which rank writes which box, which stored boxes a piece is read from."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from meshwright.errors import InputError
from meshwright.moves.reshard import Box, disjoint
from meshwright.runtime.train.pieces import TensorPiece

#: Key of the state dict under which the copies lie: as one entry, because DCP logs every entry at length.
COPIES = "boxes"


class SaveBoxes(SavePlanner):
    """Plans a save of boxes: of several ranks that hold one, the one with the least to write so far writes it.

    Args:
        pieces: of this rank, by an id under which ``state_dict[COPIES]`` holds the copy that is written.
    """

    def __init__(self, pieces: Mapping[str, TensorPiece]) -> None:
        self.pieces = pieces
        self.values: Mapping[str, Any] = {}
        self.ids = {MetadataIndex(p.key, p.box.start): name for name, p in pieces.items()}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take in the copies."""
        self.values = state_dict[COPIES]

    def create_local_plan(self) -> SavePlan:
        """Every box that this rank may write."""
        return SavePlan([_write_item(piece) for piece in self.pieces.values() if piece.write])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Deal the boxes out, and say what there is.

        Raises:
            ValueError: the boxes of a tensor do not make it up.
        """
        holders: dict[tuple[MetadataIndex, torch.Size], list[int]] = {}
        items: dict[tuple[MetadataIndex, torch.Size], WriteItem] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                assert item.tensor_data is not None
                key = (item.index, item.tensor_data.chunk.sizes)
                items.setdefault(key, item)
                holders.setdefault(key, []).append(rank)
        plans: list[list[WriteItem]] = [[] for _ in all_plans]
        load = [0] * len(all_plans)
        entries: dict[str, Any] = {}
        for key, item in items.items():
            rank = min(holders[key], key=lambda r: (load[r], r))
            data = item.tensor_data
            assert data is not None
            load[rank] += data.chunk.sizes.numel() * data.properties.dtype.itemsize
            plans[rank].append(item)
            entry = entries.setdefault(item.index.fqn, TensorStorageMetadata(data.properties, data.size, []))
            entry.chunks.append(data.chunk)
        for name, entry in entries.items():
            _whole(name, entry)
        return [SavePlan(own) for own in plans], Metadata(entries)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The values of a box."""
        return self.values[self.ids[write_item.index]]  # type: ignore[no-any-return]


def _write_item(piece: TensorPiece) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(piece.box.start), torch.Size(piece.box.sizes))
    data = TensorWriteData(chunk, TensorProperties(piece.tensor.dtype), torch.Size(piece.shape))
    return WriteItem(MetadataIndex(piece.key, piece.box.start), WriteItemType.SHARD, tensor_data=data)


def _whole(name: str, entry: TensorStorageMetadata) -> None:
    boxes = [_box(chunk) for chunk in entry.chunks]
    held = sum(box.numel for box in boxes)
    if held != entry.size.numel() or not disjoint(boxes):
        raise ValueError(f"checkpoint: the ranks hold {held} of {entry.size.numel()} values of {name}")


def _box(chunk: ChunkStorageMetadata) -> Box:
    return Box(tuple(chunk.offsets), tuple(a + n for a, n in zip(chunk.offsets, chunk.sizes, strict=True)))


class LoadBoxes(LoadPlanner):
    """Plans a load: every piece is put together from the stored boxes that it meets.

    Args:
        pieces: of this rank, to be filled.
        where: of what the checkpoint is called in errors.
    """

    def __init__(self, pieces: Sequence[TensorPiece], where: str) -> None:
        self.pieces, self.where = pieces, where
        self.metadata: Metadata | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take in what is stored."""
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Overlaps of every piece with the stored boxes.

        Raises:
            InputError: a tensor is missing or has another shape.
        """
        assert self.metadata is not None
        items = []
        stored: dict[str, list[Box]] = {}
        for number, piece in enumerate(self.pieces):
            entry = self.metadata.state_dict_metadata.get(piece.key)
            if not isinstance(entry, TensorStorageMetadata):
                raise InputError(f"{self.where}: {piece.key} is not in the checkpoint")
            if tuple(entry.size) != piece.shape:
                shapes = ("x".join(map(str, shape)) for shape in (entry.size, piece.shape))
                raise InputError(f"{self.where}: {piece.key} is {next(shapes)}, the model has {next(shapes)}")
            if piece.key not in stored:
                stored[piece.key] = [_box(chunk) for chunk in entry.chunks]
            for box in stored[piece.key]:
                met = piece.box.overlap(box)
                if met is not None:
                    items.append(_read_item(number, piece, box, met))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Checkpoints hold tensors only."""
        raise InputError(f"{self.where}: holds more than tensors")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of a piece that an item fills."""
        part = self.pieces[int(read_item.dest_index.index or 0)].tensor
        for d, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(d, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """The values are in place already."""


def _read_item(number: int, piece: TensorPiece, stored: Box, met: Box) -> ReadItem:
    """What of a stored box a piece takes."""
    return ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex(piece.key, piece.box.start, number),
        torch.Size(met.moved(piece.box.start, -1).start),
        MetadataIndex(piece.key, stored.start),
        torch.Size(met.moved(stored.start, -1).start),
        torch.Size(met.sizes),
    )

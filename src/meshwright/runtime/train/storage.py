"""Files of a checkpoint for torch.distributed.checkpoint: one file of raw values a rank, one index as JSON.

DCP's own file format keeps its index and every tensor as a pickle. A checkpoint may come from a stranger, so here
nothing is unpickled: values lie as they are in memory, the index is JSON and is held against the files before a byte of
it is used. Every chunk has a checksum.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from meshwright.errors import InputError
from meshwright.moves.reshard import Box, disjoint
from meshwright.runtime.train.folders import INDEX, read_json, write_json

VERSION = 1
#: Element types by their names in the index.
DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "u8": torch.uint8,
    "i64": torch.int64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: Bytes to whose multiple a chunk begins, so that it can be mapped as any type.
ALIGN = 64


@dataclass(frozen=True, slots=True)
class Where:
    """Bytes of one chunk: its file, where it begins, its checksum (CRC-32)."""

    file: str
    at: int
    crc: int


class Writer(StorageWriter):
    """Writes the chunks of this rank's plan into one file, and on the coordinator the index.

    Args:
        folder: of the checkpoint; exists already.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Every rank is told the name of its file."""
        return [SavePlan(plan.items, f"rank-{rank:05d}.bin", plan.planner_data) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and have on the disk the values of every item."""
        results = []
        with (self.folder / plan.storage_data).open("wb") as file:
            for item in plan.items:
                values = planner.resolve_data(item)
                assert isinstance(values, Tensor)
                data = values.contiguous().view(-1).view(torch.uint8).numpy().data
                file.write(bytes(-file.tell() % ALIGN))
                where = Where(plan.storage_data, file.tell(), zlib.crc32(data))
                file.write(data)
                results.append(WriteResult(item.index, len(data), where))
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, when every rank's file is on the disk."""
        found = {result.index: result.storage_data for of_rank in results for result in of_rank}
        tensors = {}
        for key, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            chunks = []
            for chunk in entry.chunks:
                where = found[MetadataIndex(key, chunk.offsets)]
                chunks.append([list(chunk.offsets), list(chunk.sizes), where.file, where.at, where.crc])
            tensors[key] = {"dtype": _NAMES[entry.properties.dtype], "shape": list(entry.size), "chunks": chunks}
        write_json(self.folder / INDEX, {"format": "meshwright checkpoint", "version": VERSION, "tensors": tensors})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a folder."""
        return Path(checkpoint_id).is_dir()


class Reader(StorageReader):
    """Reads the chunks that a plan asks for from the files, mapped into memory.

    Args:
        folder: of the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.where: Mapping[MetadataIndex, Where] = {}
        self.metadata: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads but the index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, held against the files.

        Raises:
            InputError: missing, hostile, or files that are shorter than it says.
        """
        if self.metadata is None:
            self.metadata, self.where = _read_index(self.folder)
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what every item asks for into its tensor.

        Raises:
            InputError: values that do not have the checksum of the index.
        """
        assert self.metadata is not None
        entries = self.metadata.state_dict_metadata
        by_chunk: dict[MetadataIndex, list[Any]] = {}
        for item in plan.items:
            by_chunk.setdefault(item.storage_index, []).append(item)
        maps: dict[str, mmap] = {}
        for index, items in sorted(by_chunk.items(), key=lambda pair: self._at(pair[0])):
            entry = entries[index.fqn]
            assert isinstance(entry, TensorStorageMetadata)
            assert index.offset is not None
            sizes = next(c.sizes for c in entry.chunks if c.offsets == index.offset)
            values = self._chunk(maps, index, entry.properties.dtype, sizes)
            for item in items:
                part = values
                for d, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(d, start, length)
                target = planner.resolve_tensor(item)
                target.copy_(part)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _at(self, index: MetadataIndex) -> tuple[str, int]:
        where = self.where[index]
        return where.file, where.at

    def _chunk(self, maps: dict[str, mmap], index: MetadataIndex, dtype: torch.dtype, sizes: torch.Size) -> Tensor:
        """One stored chunk, checked."""
        where = self.where[index]
        if where.file not in maps:
            with (self.folder / where.file).open("rb") as file:
                maps[where.file] = mmap(file.fileno(), 0, access=ACCESS_COPY)
        data = memoryview(maps[where.file])[where.at : where.at + prod(sizes) * dtype.itemsize]
        if zlib.crc32(data) != where.crc:
            raise InputError(
                f"{self.folder / where.file}: {index.fqn[:80]} at byte {where.at} does not have the checksum of "
                f"{INDEX}; the checkpoint is damaged, resume from another"
            )
        return torch.frombuffer(data, dtype=dtype).view(sizes)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a folder."""
        return Path(checkpoint_id).is_dir()


def _read_index(folder: Path) -> tuple[Metadata, dict[MetadataIndex, Where]]:
    """The index of a checkpoint, checked against its files."""
    path = folder / INDEX
    raw = read_json(path)
    if raw.get("version") != VERSION or not isinstance(raw.get("tensors"), dict):
        raise InputError(f"{path}: version {str(raw.get('version'))[:20]!r}; this release reads version {VERSION}")
    lengths: dict[str, int] = {}
    entries: dict[str, Any] = {}
    where: dict[MetadataIndex, Where] = {}
    for key, row in raw["tensors"].items():
        dtype, shape, chunks = _row(path, key, row)
        entry = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), [])
        for box, at in chunks:
            _inside(folder, lengths, at, box.numel * dtype.itemsize)
            entry.chunks.append(ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.sizes)))
            where[MetadataIndex(key, box.start)] = at
        entries[key] = entry
    return Metadata(entries), where


def _row(path: Path, key: str, row: Any) -> tuple[torch.dtype, tuple[int, ...], list[tuple[Box, Where]]]:
    """One tensor of the index: type, shape, chunks.

    Raises:
        InputError: malformed, chunks outside the tensor, over each other, or not the whole of it.
    """
    try:
        dtype, shape = DTYPES[row["dtype"]], _numbers(row["shape"])
        chunks = []
        for offsets, sizes, file, at, crc in row["chunks"]:
            start, extent = _numbers(offsets), _numbers(sizes)
            box = Box(start, tuple(a + n for a, n in zip(start, extent, strict=True)))
            _numbers((at, crc))
            chunks.append((box, Where(file, at, crc)))
        boxes = [box for box, _ in chunks]
        whole = Box((0,) * len(shape), shape)
        right = all(0 < box.numel == getattr(whole.overlap(box), "numel", 0) for box in boxes) and disjoint(boxes)
        plain = all(
            isinstance(w.file, str) and w.file == Path(w.file).name and w.file.endswith(".bin") for _, w in chunks
        )
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{path}: the entry of {key[:80]!r} is malformed") from None
    if not plain or any(where.at % ALIGN for _, where in chunks):
        raise InputError(f"{path}: {key[:80]!r} lies in {chunks[0][1].file!r:.60}; a .bin file beside it is needed")
    held = sum(box.numel for box in boxes)
    if not right or held != whole.numel:
        how = f"hold {held} of its {whole.numel} values" if right else "lie outside it or over each other"
        raise InputError(f"{path}: chunks of {key[:80]!r} {how}; the index is damaged")
    return dtype, shape, chunks


def _numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if len(numbers) > 16 or not all(type(n) is int and 0 <= n < 1 << 48 for n in numbers):
        raise ValueError("whole numbers are needed")
    return numbers


def _inside(folder: Path, lengths: dict[str, int], at: Where, size: int) -> None:
    """Refuse a chunk that its file is too short for."""
    path = folder / at.file
    if at.file not in lengths:
        try:
            lengths[at.file] = path.stat().st_size
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}); the checkpoint is not whole") from None
    if at.at + size > lengths[at.file]:
        raise InputError(
            f"{path}: {lengths[at.file]} bytes, {INDEX} promises {at.at + size} or more; truncated, resume from "
            "another checkpoint"
        )

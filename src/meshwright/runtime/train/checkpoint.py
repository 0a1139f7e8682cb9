"""Checkpoints of a training run through torch.distributed.checkpoint: asynchronous, atomic, for any other layout.

::

    checkpoints = Checkpoints(base, placement, rank)          # collective
    checkpoints.save(step, pieces, facts)                     # copies, then writes while training goes on
    checkpoints.wait()                                        # until the last one is published
    facts = read_facts(folder); load(folder, pieces, placement, coordinate)

A tensor is stored once, under ``kind/name``, as the boxes that ranks hold of it; see ``moves.reshard``. Beside the
tensors lies ``state.json``: step, position in the data, settings, and the model with its fingerprint.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save

from meshwright.errors import InputError, MeshwrightError
from meshwright.runtime.train import folders
from meshwright.runtime.train.pieces import LocalPiece, TensorPiece, tensor_pieces, whole_piece
from meshwright.runtime.train.planner import COPIES, LoadBoxes, SaveBoxes
from meshwright.runtime.train.storage import Reader, Writer
from meshwright.specs.placement import Coordinate, Placement

#: Checkpoints that are kept.
KEEP = 2
#: Key of the state of the random generator.
RANDOM = "random/cpu"


class Checkpoints:
    """Writes the checkpoints of one run. Every rank makes one and calls it alike.

    Args:
        base: folder of the run. placement, rank: of this run.
        keep: how many of the last checkpoints stay.

    Raises:
        InputError: the folder cannot be made.
    """

    def __init__(self, base: Path, placement: Placement, rank: int, keep: int = KEEP) -> None:
        self.base, self.placement, self.rank, self.keep = base, placement, rank, keep
        self.coordinate = placement.coordinate(rank)
        self.last: int | None = None
        self._under_way: Future[Any] | None = None
        #: Ranks agree about a save by a group of their own, so that training's own calls go on beside it.
        self._group = dist.new_group(backend="gloo", group_desc="checkpoint") if dist.is_initialized() else None
        if rank == 0:
            try:
                base.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(f"--checkpoint {base}: cannot be made ({error.strerror})") from None
            folders.clean(base)
        self._meet()

    @property
    def published(self) -> Path | None:
        """The last checkpoint of the folder; None: there is none."""
        return folders.latest(self.base)

    def save(self, step: int, pieces: Iterable[LocalPiece], facts: Mapping[str, Any]) -> None:
        """Copy what this rank holds and write it while training goes on; waits for the save before it.

        Args:
            step: steps done.
            pieces: of this rank.
            facts: what is written into ``state.json``, from rank 0.

        Raises:
            InputError: the save before it could not be written.
        """
        self.wait()
        if step == self.last:
            return
        folder = folders.saving(self.base, step)
        if self.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            folders.write_json(folder / folders.STATE, {"version": 1, "step": step, **facts})
        self._meet()
        boxes = list(tensor_pieces(pieces, self.placement, self.coordinate))
        boxes += [_random_state()] if self.rank == 0 else []
        named = {f"{number:06d} {piece.key}": piece for number, piece in enumerate(boxes)}
        _quiet()
        done = async_save(
            {COPIES: {name: piece.tensor for name, piece in named.items() if piece.write}},
            storage_writer=Writer(folder),
            planner=SaveBoxes(named),
            process_group=self._group,
            no_dist=self._group is None,
        )
        assert isinstance(done, Future)
        if self.rank == 0:
            done = _then(done, lambda: folders.publish(self.base, step, self.keep))
        self._under_way, self.last = done, step

    def wait(self) -> None:
        """Wait until the last save is published.

        Raises:
            InputError: it could not be written.
        """
        if self._under_way is None:
            return
        done, self._under_way = self._under_way, None
        with _said(f"checkpoint of step {self.last} in {self.base}"):
            done.result()

    def _meet(self) -> None:
        """Every rank waits for the first: its folder is there."""
        if self._group is not None:
            dist.barrier(self._group)


def _then(future: Future[Any], act: Any) -> Future[Any]:
    """A future that is done when ``act`` was called behind another one."""
    out: Future[Any] = Future()

    def behind(done: Future[Any]) -> None:
        try:
            done.result()
            out.set_result(act())
        except BaseException as error:
            out.set_exception(error)

    future.add_done_callback(behind)
    return out


def load(
    folder: Path, pieces: Iterable[LocalPiece], placement: Placement, coordinate: Coordinate, *, random: bool = True
) -> None:
    """Fill this rank's tensors from a checkpoint of any layout. Not collective: a rank reads what it needs.

    Args:
        folder: of one checkpoint. pieces: of this rank; their tensors are written into.
        placement, coordinate: of the layout that is loaded into.
        random: also set the random generator.

    Raises:
        InputError: something is missing, of another shape, truncated or damaged.
    """
    boxes = list(tensor_pieces(pieces, placement, coordinate))
    generator = _random_state()
    fill(folder, [*boxes, generator] if random else boxes)
    if random:
        torch.set_rng_state(generator.tensor)


def fill(folder: Path, boxes: list[TensorPiece]) -> None:
    """Fill boxes of whole tensors from a checkpoint.

    Raises:
        InputError: as ``load``.
    """
    _quiet()
    reader = Reader(folder)
    reader.read_metadata()  # here, where DCP does not wrap what is wrong with it
    with _said(str(folder)):
        dcp_load({}, storage_reader=reader, planner=LoadBoxes(boxes, str(folder)), no_dist=True)


def stored(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a checkpoint, by key.

    Raises:
        InputError: as ``load``.
    """
    return {key: tuple(entry.size) for key, entry in Reader(folder).read_metadata().state_dict_metadata.items()}  # type: ignore[union-attr]


def whole(folder: Path, key: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """One whole tensor of a checkpoint.

    Raises:
        InputError: as ``load``.
    """
    tensor = torch.empty(stored(folder)[key], dtype=dtype)
    fill(folder, [whole_piece(key, tensor)])
    return tensor


def _random_state() -> TensorPiece:
    return whole_piece(RANDOM, torch.get_rng_state())


@contextmanager
def _said(where: str) -> Iterator[None]:
    """Errors of a save or load as one line."""
    try:
        yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, MeshwrightError):
            raise cause from None
        if isinstance(cause, OSError):
            raise InputError(f"{where}: {cause.strerror or cause}") from None
        raise RuntimeError(f"{where}: {cause}") from cause
    except OSError as error:
        raise InputError(f"{where}: {error.strerror or error}") from None


def _quiet() -> None:
    """DCP warns that a save without process groups is one of a single process, which it is; a thread says so."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)

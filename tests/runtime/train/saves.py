"""Saves and loads of many ranks in one process, through the same planner and files as a live run's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from meshwright.runtime.checkpoint import load, own
from meshwright.runtime.folder import Model
from meshwright.runtime.train.checkpoint import fill
from meshwright.runtime.train.pieces import LocalPiece, tensor_pieces
from meshwright.runtime.train.planner import COPIES, SaveBoxes
from meshwright.runtime.train.storage import Writer
from meshwright.specs.placement import Placement

KINDS = ("weight", "exp_avg", "exp_avg_sq")


def whole(model: Model, placement: Placement, kind: str, rank: int) -> dict[str, Tensor]:
    """A rank's local tensors of one kind, in fp32: the stored weights, and numbers that tell kinds apart."""
    factor = KINDS.index(kind) + 1
    weights = load(model, placement, placement.coordinate(rank), torch.float32)
    return {name: factor * tensor for name, tensor in weights.items()}


def empty(placement: Placement, rank: int) -> dict[str, Tensor]:
    """Room of the same shapes."""
    return {name: torch.zeros(s.shape) for name, s in own(placement, placement.coordinate(rank))}


def pieces(placement: Placement, rank: int, tensors: dict[str, dict[str, Tensor]]) -> Iterator[LocalPiece]:
    """What a rank offers: everything without ZeRO, else one run of each tensor, padded cuts of its flat elements."""
    layout, at = placement.layout, placement.coordinate(rank)
    held = dict(own(placement, at))
    for kind, of_kind in tensors.items():
        for name, tensor in of_kind.items():
            ranks = placement.group("edp" if held[name].family.role == "expert" else "dp+cp", at)
            count = len(ranks) if layout.zero else 1
            flat = tensor.view(-1)
            each = -(-flat.numel() // count)
            start = min(flat.numel(), each * ranks.index(rank)) if layout.zero else 0
            yield LocalPiece(name, kind, flat[start : start + each], start)


def save(folder: Path, placement: Placement, tensors: list[dict[str, dict[str, Tensor]]]) -> None:
    """Save what all ranks hold, as DCP has them do it."""
    folder.mkdir(parents=True)
    planners, values = [], []
    for rank, held in enumerate(tensors):
        boxes = list(tensor_pieces(pieces(placement, rank, held), placement, placement.coordinate(rank)))
        named = {str(number): box for number, box in enumerate(boxes)}
        planners.append(SaveBoxes(named))
        values.append({name: box.tensor for name, box in named.items() if box.write})
    for planner, own_values in zip(planners, values, strict=True):
        planner.set_up_planner({COPIES: own_values})
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    writer = Writer(folder)
    results = [
        writer.write_data(plan, planner).wait()
        for plan, planner in zip(writer.prepare_global_plan(plans), planners, strict=True)
    ]
    writer.finish(metadata, results)


def read(folder: Path, placement: Placement) -> list[dict[str, dict[str, Tensor]]]:
    """What all ranks of a placement hold behind a load."""
    out = []
    for rank in range(placement.layout.world):
        held = {kind: empty(placement, rank) for kind in KINDS}
        offered = pieces(placement, rank, held)
        fill(folder, list(tensor_pieces(offered, placement, placement.coordinate(rank))))
        out.append(held)
    return out

"""Random first weights, the same whatever the layout: every tensor has a generator of its own, named by the seed."""

from __future__ import annotations

import hashlib
from itertools import product

import torch
from torch import Tensor

from meshwright.runtime.checkpoint import own
from meshwright.runtime.folder import Model
from meshwright.specs.placement import Coordinate, Placement, Shard
from meshwright.specs.tensors import TensorFamily

#: Spread of matrices where the configuration does not say (``initializer_range`` of transformers).
SPREAD = 0.02


def random_weights(
    model: Model, placement: Placement, coordinate: Coordinate, seed: int, spread: float = SPREAD
) -> dict[str, Tensor]:
    """This rank's slices by checkpoint name, fp32.

    Matrices are normal with ``spread``, norms leave their input as it is, biases are zero (as ``_init_weights`` of
    transformers' Llama does). A tensor is drawn whole and cut, so the slices do not depend on the layout.
    """
    still = 1.0 - model.settings.norm_offset
    return {name: _cut(_drawn(name, s.family, seed, spread, still), s) for name, s in own(placement, coordinate)}


def _drawn(name: str, family: TensorFamily, seed: int, spread: float, still: float) -> Tensor:
    """One whole tensor."""
    if family.part != "weight":
        return torch.zeros(family.shape)
    if family.role == "norm" or len(family.shape) == 1:
        return torch.full(family.shape, still)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(family.shape, generator=generator) * spread


def _cut(whole: Tensor, shard: Shard) -> Tensor:
    """The intervals of a shard, joined."""
    pieces = [whole[tuple(slice(a, b) for a, b in cut)] for cut in product(*shard.intervals)]
    split = next((d for d, cuts in enumerate(shard.intervals) if len(cuts) > 1), 0)
    return torch.cat(pieces, dim=split) if len(pieces) > 1 else pieces[0].clone()

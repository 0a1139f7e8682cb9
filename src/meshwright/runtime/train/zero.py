"""The data parallelism that a layout asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.errors import InputError
from meshwright.runtime.checkpoint import TORCH_DTYPES
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.train.data_parallel import (
    DataOptions,
    DataParallel,
    Replicated,
    ShardedGradients,
    ShardedStates,
)
from meshwright.runtime.train.parameters import Chunk, describe
from meshwright.specs.layout import Fsdp

_STAGES = {0: Replicated, 1: ShardedStates, 2: ShardedGradients}


def make(mesh: Mesh, chunks: Sequence[Chunk], options: DataOptions) -> DataParallel:
    """Data parallelism of a rank by ``Layout.zero``. All ranks call it, in the same order as their other collectives.

    Args:
        mesh: with the groups of ``data_groups.data_mesh``. chunks: of this rank; their parameters hold what training
            starts from. From now on their storage belongs to the returned object.
        options: see there.

    Raises:
        InputError: fp16 working parameters.
    """
    layout = mesh.placement.layout
    knobs = layout.fsdp or Fsdp()
    refuse_half(options.param_dtype, *(TORCH_DTYPES[d] for d in (knobs.param_dtype, knobs.reduce_dtype)))
    parameters = describe(mesh, chunks)
    if deals_parameters(mesh):
        from meshwright.runtime.train.fsdp import FullySharded

        return FullySharded(mesh, chunks, parameters, options)  # type: ignore[arg-type]
    return _STAGES.get(layout.zero, Replicated)(parameters, mesh.groups, options)


def deals_parameters(mesh: Mesh) -> bool:
    """Whether parameters themselves are dealt out: ZeRO-3 over more than one rank."""
    return mesh.placement.layout.zero == 3 and max(mesh.group(axis).size for axis in ("dp+cp", "edp")) > 1


def refuse_half(*dtypes: torch.dtype | None) -> None:
    """Refuse fp16: its range needs loss scaling, which nothing here does; bf16 has the range of fp32.

    Raises:
        InputError: fp16.
    """
    if torch.float16 in dtypes:
        raise InputError("training in f16 needs loss scaling, which is not done here; use bf16 or f32")

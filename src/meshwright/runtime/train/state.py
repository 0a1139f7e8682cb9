"""What one rank trains: model chunks, where their parameters and gradients live, the executor of its schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from meshwright.moves.pipeline import Table, schedule
from meshwright.runtime.checkpoint import TORCH_DTYPES, own
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.models.settings import Settings
from meshwright.runtime.train.balance import Balance
from meshwright.runtime.train.data_groups import data_mesh
from meshwright.runtime.train.data_groups import make as make_group
from meshwright.runtime.train.data_parallel import DataOptions, DataParallel
from meshwright.runtime.train.groups import training_mesh
from meshwright.runtime.train.model import TrainChunk, build_chunks
from meshwright.runtime.train.options import TrainOptions
from meshwright.runtime.train.pieces import LocalPiece
from meshwright.runtime.train.pipeline import Pipeline
from meshwright.runtime.train.stage import Stage
from meshwright.runtime.train.zero import deals_parameters, make
from meshwright.specs.layout import Fsdp, Layout
from meshwright.specs.placement import chunk_places


@dataclass(slots=True)
class TrainState:
    """What one rank trains.

    Attributes:
        mesh: with the groups of training.
        chunks: of this rank, in the order of the model.
        data: sums, optimizer, and where parameters live between steps.
        options: numbers of the run.
        step: steps done.
        on_gradients: called when gradients are whole, before they are clipped.
    """

    mesh: Mesh
    chunks: list[TrainChunk]
    data: DataParallel
    options: TrainOptions
    step: int = 0
    on_gradients: Callable[[], None] | None = None
    _pipelines: dict[int, Pipeline] = field(default_factory=dict, repr=False)

    def pipeline(self, microbatches: int) -> Pipeline:
        """The executor for a number of micro-batches.

        Raises:
            InputError: the schedule has no table for it.
        """
        if microbatches not in self._pipelines:
            layout = self.mesh.placement.layout
            stages = {place: Stage(chunk) for place, chunk in zip(self.places, self.chunks, strict=True)}
            table = step_table(layout, microbatches)
            pp, back = self.mesh.group("pp"), self.mesh.groups.get("pp_back")
            self._pipelines[microbatches] = Pipeline(table, stages, pp, self.mesh.device, back)
        return self._pipelines[microbatches]

    @property
    def places(self) -> tuple[int, ...]:
        """Places in the model of this rank's chunks."""
        return chunk_places(self.mesh.placement.layout)[self.mesh.coordinate.pp]

    def pieces(self) -> Iterator[LocalPiece]:
        """Live storage of everything a checkpoint holds: values, moments, untrained states."""
        yield from self.data.pieces()
        for chunk in self.chunks:
            for name, tensor in chunk.states().items():
                yield LocalPiece(name, "weight", tensor)

    def loaded(self) -> None:
        """The pieces were written: bring them into the working parameters. Collective."""
        self.data.loaded()


def step_table(layout: Layout, microbatches: int) -> Table:
    """The table that a layout's step runs; without stages micro-batches follow each other.

    Raises:
        InputError: the schedule has no table for these numbers.
    """
    return schedule(layout.schedule if layout.pp > 1 else "1f1b", layout.pp, microbatches, layout.virtual)


def build_state(
    mesh: Mesh, weights: Mapping[str, Tensor] | None, settings: Settings, options: TrainOptions
) -> TrainState:
    """The state of one rank before its first step. Collective: it makes the groups of training.

    Args:
        mesh: of ``build_mesh``. weights: this rank's slices by checkpoint name (``checkpoint.load``), in fp32 (fp64 for
            proofs); None: zeros, to be written through ``TrainState.pieces``. settings: of the model.
    """
    mesh = data_mesh(training_mesh(mesh))
    if mesh.device.type == "cuda" and mesh.placement.layout.pp > 1:
        back = make_group(mesh, "pp_back", lambda at: mesh.placement.group("pp", at))
        mesh = replace(mesh, groups={**mesh.groups, "pp_back": back})
    if weights is None:
        weights = dict(_zeros(mesh, options))
    chunks = build_chunks(
        mesh,
        weights,
        settings,
        recompute=options.recompute,
        recompute_layers=options.recompute_layers,
        balance=Balance(options.aux, options.bias_rate),
    )
    dtype = TORCH_DTYPES[options.dtype]
    data = make(mesh, chunks, DataOptions(options.optimizer, dtype))
    hidden = computed_in(mesh, dtype)
    for chunk in chunks:
        chunk.dtype = hidden
    return TrainState(mesh, chunks, data, options)


def computed_in(mesh: Mesh, dtype: torch.dtype) -> torch.dtype:
    """Type of hidden states: that of the parameters when a chunk runs, which ZeRO-3 has its own word on."""
    if dtype == torch.float64 or not deals_parameters(mesh):
        return dtype
    return TORCH_DTYPES[(mesh.placement.layout.fsdp or Fsdp()).param_dtype]


def _zeros(mesh: Mesh, options: TrainOptions) -> Iterator[tuple[str, Tensor]]:
    """Room for every tensor of this rank."""
    dtype = torch.float64 if options.dtype == "f64" else torch.float32
    for name, shard in own(mesh.placement, mesh.coordinate):
        yield name, torch.zeros(shard.shape, dtype=dtype, device=mesh.device)

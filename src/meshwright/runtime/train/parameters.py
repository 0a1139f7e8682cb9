"""What data parallelism, the optimizer and the clip norm must know of every parameter of a rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from meshwright.runtime.mesh import Mesh
from meshwright.specs.cuts import Place
from meshwright.specs.placement import Coordinate, Placement, Shard

#: Axes over which gradients of copies are summed after the data ranks, in this order: copies of a KV head, tp, ranks of
#: one expert, first and last stage of a tied embedding.
SUMS = ("kv", "tp", "etp", "pp_tied")


class Chunk(Protocol):
    """What is asked of a model chunk (``model.TrainChunk``)."""

    @property
    def layers(self) -> Iterable[nn.Module]:
        """Its decoder layers, in order of the model."""

    @property
    def sums(self) -> Mapping[str, str]:
        """By name the axis over which the gradients of copies must be summed, where there is one."""

    @property
    def experts(self) -> Collection[str]:
        """Names of the parameters that only the ranks of ``edp`` hold alike."""

    def weights(self) -> Mapping[str, nn.Parameter]:
        """Parameters by checkpoint name."""

    def held(self, name: str) -> Shard:
        """What the placement says of one."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a rank, as it is cut by the placement.

    Attributes:
        name: in the checkpoint.
        tensor: the parameter itself.
        chunk: number of the first chunk of the rank that holds it.
        unit: place in the chunk's forward: 0 embedding, then the layers, then final norm and head.
        expert: its copies are on the ranks of ``edp``, not of ``dp+cp``.
        decay: weight decay applies.
        counted: no rank of another place on tp (inside an expert) or of an earlier stage counts it in norms.
        sums: axes over which gradients of copies are summed.
        shared: a later chunk of the rank uses it too.
    """

    name: str
    tensor: nn.Parameter
    chunk: int = 0
    unit: int = 0
    expert: bool = False
    decay: bool = True
    counted: bool = True
    sums: tuple[str, ...] = ()
    shared: bool = False

    @property
    def late(self) -> bool:
        """Whether its gradient is whole only when all backwards of the step are over, or is summed afterwards."""
        return bool(self.sums) or self.shared


def describe(mesh: Mesh, chunks: Sequence[Chunk]) -> tuple[Parameter, ...]:
    """Parameters of all chunks of a rank that are trained, each once, in order of the model.

    Args:
        mesh: with the groups of ``data_groups.data_mesh``. chunks: of this rank.
    """
    uses = [{id(tensor) for tensor in chunk.weights().values()} for chunk in chunks]
    found: dict[int, Parameter] = {}
    for number, chunk in enumerate(chunks):
        layers = [{id(tensor) for tensor in layer.parameters()} for layer in chunk.layers]
        for name, tensor in chunk.weights().items():
            if id(tensor) in found or not tensor.requires_grad:
                continue
            shard = chunk.held(name)
            within = [place for place, own in enumerate(layers, 1) if id(tensor) in own]
            ends = 0 if shard.family.role == "embedding" else len(layers) + 1
            found[id(tensor)] = Parameter(
                name,
                tensor,
                number,
                within[0] if within else ends,
                name in chunk.experts,
                decays(shard),
                counted(mesh.placement, mesh.coordinate, shard),
                _sums(mesh, chunk.sums.get(name), shard),
                sum(id(tensor) in used for used in uses) > 1,
            )
    return tuple(found.values())


def _sums(mesh: Mesh, axis: str | None, shard: Shard) -> tuple[str, ...]:
    """Axes of one parameter with more than one rank."""
    tied = {"pp_tied"} if shard.family.role == "embedding" and not shard.layers else set()
    return tuple(a for a in SUMS if a in {axis} | tied and mesh.group(a).size > 1)


def decays(shard: Shard) -> bool:
    """Whether weight decay applies: to matrices, but not to norms, biases and embeddings.

    A head that is its own matrix decays; one that is tied to the embedding does not.
    """
    family = shard.family
    return len(family.shape) >= 2 and family.role not in {"norm", "embedding"} and family.part != "bias"


def counted(placement: Placement, at: Coordinate, shard: Shard) -> bool:
    """Whether no other rank with the same place among the data ranks counts the same elements before this one.

    The same elements are held on several places of tp (norms, replicated KV heads) or inside an expert, and on both
    stages of a tied embedding.
    """
    place = placement.place(at)
    if not shard.layers and any(_holds(placement, stage, at, shard) for stage in range(at.pp)):
        return False
    if shard.family.role == "expert":
        before = [Place(place.tp, etp, place.ep) for etp in range(place.etp)]
    else:
        before = [Place(tp, place.etp, place.ep) for tp in range(place.tp)]
    return all(placement.cuts.intervals(shard.family, other)[0] != shard.intervals for other in before)


def _holds(placement: Placement, stage: int, at: Coordinate, shard: Shard) -> bool:
    there = placement.at(stage, placement.flat(at))
    return any(other.family is shard.family for other in placement.shards(there))

"""Where every tensor and every layer boundary lives: ``place(spec, layout, profile)``.

The one table that planner, loader, runtime, checkpointer and tests read. It knows dimension labels and axes,
no names and no engines.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import EngineProfile
from meshwright.specs.tensors import TensorFamily


@dataclass(frozen=True, slots=True, order=True)
class Coordinate:
    """A rank's place on every axis; ``ep`` follows from the others (see ``Placement.coordinate``)."""

    dp: int = 0
    pp: int = 0
    cp: int = 0
    tp: int = 0
    ep: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage: its decoder layers (``layers``, checkpoint numbers, in order) and its ends."""

    index: int
    layers: tuple[int, ...]
    embedding: bool
    head: bool


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds of one family.

    Attributes:
        family: the row of the tensor table.
        intervals: for every dimension the half-open element ranges held, in order (several where a fused
            dimension is cut segment by segment).
        layers: layers held; () for a family outside layers.
        experts: expert numbers held; () for a family that is not one of many experts.
        padding: elements by which the engine pads the dimension 0 interval (vocabulary), stored but empty.
    """

    family: TensorFamily
    intervals: tuple[tuple[tuple[int, int], ...], ...]
    layers: tuple[int, ...]
    experts: tuple[int, ...]
    padding: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one held tensor, padding included."""
        sizes = [sum(stop - start for start, stop in dim) for dim in self.intervals]
        if sizes and self.padding:
            sizes[0] += self.padding
        return tuple(sizes)


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks that hold and do the same: a name, one member's coordinate, how many there are, the first rank."""

    name: str
    coordinate: Coordinate
    first_rank: int
    ranks: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of one model under one layout by one engine."""

    spec: ModelSpec
    layout: Layout
    profile: EngineProfile
    stages: tuple[Stage, ...]
    classes: tuple[RankClass, ...]

    def coordinate(self, rank: int) -> Coordinate:
        """Coordinate of a rank, by the profile's rank order."""
        raise NotImplementedError

    def rank(self, coordinate: Coordinate) -> int:
        """Rank at a coordinate (``ep`` is ignored)."""
        raise NotImplementedError

    def group(self, axis: str, coordinate: Coordinate) -> tuple[int, ...]:
        """Ranks of the group of ``axis`` (tp, pp, dp, cp, ep, or joined: ``dp+cp``) that holds ``coordinate``."""
        raise NotImplementedError

    def shards(self, coordinate: Coordinate) -> tuple[Shard, ...]:
        """Everything that the rank at ``coordinate`` holds of the weights (before ZeRO or FSDP)."""
        raise NotImplementedError

    def weight_bytes(self, coordinate: Coordinate) -> int:
        """Bytes of ``shards(coordinate)``."""
        raise NotImplementedError

    def class_of(self, rank: int) -> RankClass:
        """The rank class of a rank."""
        raise NotImplementedError


def place(spec: ModelSpec, layout: Layout, profile: EngineProfile) -> Placement:
    """Place ``spec`` under ``layout`` as ``profile`` does.

    Raises:
        IllegalLayoutError: the profile refuses the layout (its first illegal rule, both numbers, the way out).
    """
    raise NotImplementedError

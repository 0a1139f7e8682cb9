"""ZeRO-3 as torch's ``fully_shard`` executes it around the chunks of a rank (FSDP2, torch 2.13).

A unit is a layer, or the rest of a chunk (the root), or with ``wrap=model`` the whole chunk. Every parameter is dealt
out by its first dimension, each padded to equal rows; a unit travels as one buffer of these pieces. ``prefetch`` units
are gathered ahead: in the forward before the layer runs that comes so many before, in the backward likewise the other
way. Roots keep their parameters from forward to backward. Under a pipeline a chunk is gathered once a step and reduced
once at its end, root first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.moves.chunks import Chunk
from meshwright.plan.data_parallel import knobs
from meshwright.plan.executed.parameters import Parameter
from meshwright.plan.executed.reduction import Reduction, named
from meshwright.plan.wire import Op, collective
from meshwright.specs.layout import Fsdp

#: A layer with what is sent at its place, None for the root.
Placed = tuple[int | None, list[Op]]


@dataclass(frozen=True, slots=True)
class Sharded:
    """The units of one chunk."""

    reduction: Reduction
    chunk: Chunk

    @property
    def knobs(self) -> Fsdp:
        """Of the layout."""
        return knobs(self.reduction.placement.layout)

    @property
    def once(self) -> bool:
        """Gathered and reduced once a step."""
        return self.reduction.placement.layout.pp > 1

    @property
    def by_layer(self) -> bool:
        """Layers are units."""
        return self.knobs.wrap == "layer"

    def _unit(self, layer: int | None) -> list[Parameter]:
        dealt = self.reduction.dealt[self.chunk.place]
        return [p for p in dealt if p.layer == layer] if self.by_layer else dealt

    def _groups(self, unit: Sequence[Parameter]) -> Iterator[tuple[str, int, str]]:
        """Group, elements of this rank's padded pieces and name of what a unit sends: dense, then experts apart."""
        axes = dict.fromkeys(self.reduction.shard_axis(p) for p in sorted(unit, key=lambda p: p.expert))
        for axis in axes:
            numel = sum(self.reduction.rows(p)[1] for p in unit if self.reduction.shard_axis(p) == axis)
            yield axis, numel, "expert " if axis == "edp" else ""

    def _gather(self, layer: int | None) -> Placed:
        r, ops = self.reduction, list[Op]()
        for axis, numel, kind in self._groups(self._unit(layer)):
            name, n = named(r.placement, r.at, axis)
            ops += collective("all_gather", f"{kind}parameters", name, n, (numel,), self.knobs.param_dtype)
        return layer, ops

    def _scatter(self, layer: int | None) -> list[Placed]:
        r, out = self.reduction, list[Placed]()
        for axis, numel, kind in self._groups(self._unit(layer)):
            name, n = named(r.placement, r.at, axis)
            dtype = self.knobs.reduce_dtype
            out.append((layer, collective("reduce_scatter", f"{kind}gradients", name, n, (n * numel,), dtype)))
            if axis.endswith("_shard"):
                name, n = named(r.placement, r.at, axis.replace("_shard", "_replicate"))
                out.append((None, collective("all_reduce", f"{kind}gradient pieces", name, n, (numel,), dtype)))
        return out

    def forward(self, layer: int | None, microbatch: int) -> list[Placed]:
        """Gathers before a layer's forward, or (None) before the chunk begins."""
        if self.once and microbatch:
            return []
        ahead, layers = self.knobs.prefetch, self.chunk.layers
        if layer is None:
            first = layers[:ahead] if self.by_layer else ()
            return [self._gather(None), *(self._gather(n) for n in first)]
        if not self.by_layer:
            return []
        next_ = layers.index(layer) + ahead
        return [self._gather(layers[next_])] if next_ < len(layers) else []

    def backward(self, layer: int | None) -> list[Placed]:
        """Gathers before a layer's backward, or (None) before that of the chunk begins."""
        if self.once or not (self.by_layer and self.knobs.reshard_after_forward):
            return []
        ahead, layers = self.knobs.prefetch, self.chunk.layers[::-1]
        if layer is None:
            return [self._gather(n) for n in layers[:ahead]]
        next_ = layers.index(layer) + ahead
        return [self._gather(layers[next_])] if next_ < len(layers) else []

    def reduced(self, layer: int | None) -> list[Placed]:
        """What is sent when the backward of a layer, or (None) of the chunk, is over."""
        return [] if self.once or (layer is not None and not self.by_layer) else self._scatter(layer)

    def at_the_end(self) -> list[Placed]:
        """What is reduced once a step."""
        units = (None, *(self.chunk.layers if self.by_layer else ()))
        return [placed for unit in units for placed in self._scatter(unit)] if self.once else []

"""Which pipeline stages differ: by layers of each pattern, ends of the model and neighbours."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from meshwright.moves.pipeline import FOLDED
from meshwright.plan.train_memory import fullest
from meshwright.plan.train_shards import TrainStage, train_stages
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import chunk_places
from meshwright.specs.profile import EngineProfile
from meshwright.specs.shares import part


@dataclass(frozen=True, slots=True)
class Part:
    """One model chunk of a rank: layers of each pattern, whether it begins or ends the model, and whether it sends
    activations to, and gradients back to, another stage."""

    layers: tuple[int, ...]
    first: bool
    last: bool
    on: bool
    back: bool


@dataclass(frozen=True, slots=True)
class StageKind:
    """Stages that do the same: their chunks, and how many layers these have."""

    parts: tuple[Part, ...]
    placed: int

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of each pattern over all chunks."""
        return tuple(map(sum, zip(*(part.layers for part in self.parts), strict=True)))

    @property
    def first(self) -> bool:
        """Whether a chunk begins the model."""
        return any(part.first for part in self.parts)

    @property
    def last(self) -> bool:
        """Whether a chunk ends the model."""
        return any(part.last for part in self.parts)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Kinds of stages, each where it comes first, and runs of equal stages: ``(kind, how many)``."""

    kinds: tuple[StageKind, ...]
    runs: tuple[tuple[int, int], ...]


def pipeline_of(spec: ModelSpec, layout: Layout, profile: EngineProfile) -> Pipeline:
    """Stages of a layout as its placement has them: ``stage_layers`` are dealt evenly over the chunks of a stage."""
    places = chunk_places(layout)
    count = sum(map(len, places))
    sizes = list(profile.split_layers(len(spec.layers), count))
    for total, own in zip(layout.stage_layers, places, strict=False):
        for number, place in enumerate(own):
            low, high = part(total, len(own), number)
            sizes[place] = high - low
    chunks = [range(sum(sizes[:place]), sum(sizes[: place + 1])) for place in range(count)]
    owner = {place: stage for stage, own in enumerate(places) for place in own}
    order = []
    for stage, own in enumerate(places):
        row = []
        for place in own:
            back, on = (owner.get(p) not in {None, stage} for p in (place - 1, place + 1))
            row.append(Part(pattern_counts(spec, chunks[place]), place == 0, place == count - 1, on, back))
        order.append(StageKind(tuple(row), sum(sizes[place] for place in own)))
    kinds = list(dict.fromkeys(order))
    runs: list[tuple[int, int]] = []
    for kind in map(kinds.index, order):
        known = runs.pop()[1] if runs and runs[-1][0] == kind else 0
        runs.append((kind, known + 1))
    return Pipeline(tuple(kinds), tuple(runs))


def pattern_counts(spec: ModelSpec, layers: range | tuple[int, ...]) -> tuple[int, ...]:
    """How many of the layers are of each pattern."""
    found = Counter(spec.patterns[i] for i in layers)
    return tuple(found[p] for p in range(len(spec.pattern_families)))


def memory_stages(spec: ModelSpec, layout: Layout) -> list[TrainStage]:
    """The stages one of which is the fullest, as ``train_memory`` looks at them; those left out behind which an earlier
    one holds at least as many layers of every pattern in every chunk (no more is in flight later)."""
    kept: list[tuple[TrainStage, list[tuple[int, ...]]]] = []
    for stage in fullest(spec, train_stages(spec, layout)):
        counts = [pattern_counts(spec, chunk) for chunk in stage.chunks]
        plain = not stage.head and layout.schedule not in FOLDED
        if not (plain and any(_holds(more, counts) for _, more in kept)):
            kept.append((stage, counts))
    return [stage for stage, _ in kept]


def _holds(more: list[tuple[int, ...]], less: list[tuple[int, ...]]) -> bool:
    return all(m >= n for a, b in zip(more, less, strict=True) for m, n in zip(a, b, strict=True))

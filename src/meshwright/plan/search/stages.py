"""Which pipeline stages differ: by layers of each pattern, ends of the model and neighbours."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from meshwright.plan.train_memory import fullest
from meshwright.plan.train_shards import TrainStage, train_stages
from meshwright.plan.training_step import chunk_places
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import EngineProfile


@dataclass(frozen=True, slots=True)
class Part:
    """One model chunk of a rank: layers of each pattern, whether it begins or ends the model, and how many other
    stages it hands activations to or takes them from."""

    layers: tuple[int, ...]
    first: bool
    last: bool
    neighbours: int


def parts_of(spec: ModelSpec, layout: Layout, profile: EngineProfile) -> list[tuple[Part, ...]]:
    """Distinct stages as ``training_step`` runs them, each by its chunks."""
    places = chunk_places(layout)
    if all(len(p) == 1 for p in places):
        sizes = profile.split_layers(len(spec.layers), layout.pp)
        starts = [sum(sizes[:i]) for i in range(layout.pp)]
        chunks = [[range(start, start + size)] for start, size in zip(starts, sizes, strict=True)]
    else:
        chunks = [[range(c[0], c[0] + len(c)) for c in s.chunks] for s in train_stages(spec, layout)]
    owner = {place: stage for stage, own in enumerate(places) for place in own}
    last = len(owner) - 1
    out = []
    for stage, own in enumerate(places):
        row = []
        for place, layers in zip(own, chunks[stage], strict=True):
            near = (owner.get(place - 1), owner.get(place + 1))
            row.append(
                Part(
                    pattern_counts(spec, layers),
                    place == 0,
                    place == last,
                    sum(n is not None and n != stage for n in near),
                )
            )
        out.append(tuple(row))
    return list(dict.fromkeys(out))


def pattern_counts(spec: ModelSpec, layers: range | tuple[int, ...]) -> tuple[int, ...]:
    """How many of the layers are of each pattern."""
    found = Counter(spec.patterns[i] for i in layers)
    return tuple(found[p] for p in range(len(spec.pattern_families)))


def memory_stages(spec: ModelSpec, layout: Layout) -> list[TrainStage]:
    """The stages one of which is the fullest, as ``train_memory`` looks at them."""
    return fullest(spec, train_stages(spec, layout))

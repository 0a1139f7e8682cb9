"""Which pipeline stages differ: by layers of each pattern, ends of the model and neighbours."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from meshwright.moves.pipeline import FOLDED
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
    """Distinct stages as ``training_step`` runs them, each by its chunks; those left out that do no more of anything
    than another, which is then the slower one."""
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
    found = list(dict.fromkeys(out))
    return [a for a in found if not any(a != b and _covers(b, a) for b in found)]


def _covers(more: tuple[Part, ...], less: tuple[Part, ...]) -> bool:
    """Whether a stage does at least all that another does, chunk by chunk."""
    return all(
        a.first >= b.first
        and a.last >= b.last
        and a.neighbours >= b.neighbours
        and all(m >= n for m, n in zip(a.layers, b.layers, strict=True))
        for a, b in zip(more, less, strict=True)
    )


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

"""Model chunks of every pipeline stage: which layers each holds, and to which stages it hands on.

A *place* is the number of a chunk in the order in which the model runs through all of them; it is the ``chunk`` of the
actions in ``moves.pipeline``.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.specs.placement import Placement, chunk_places


@dataclass(frozen=True, slots=True)
class Chunk:
    """One model chunk of a rank.

    Attributes:
        place: number of the chunk in the order of the model.
        layers: decoder layers, checkpoint numbers. first, last: whether it begins with the embedding, ends with the
            head.
        before, behind: stages of the chunks before and behind it; None where there is none, or it is the same stage.
    """

    place: int
    layers: tuple[int, ...]
    first: bool
    last: bool
    before: int | None
    behind: int | None


def model_chunks(placement: Placement) -> list[list[Chunk]]:
    """For every stage its chunks, in the order in which the model runs through them."""
    places = chunk_places(placement.layout)
    owner = {place: stage for stage, own in enumerate(places) for place in own}
    last = len(owner) - 1
    out = []
    for stage, own in enumerate(places):
        row = []
        for place, layers in zip(own, placement.stages[stage].chunks, strict=True):
            near = [owner.get(place - 1), owner.get(place + 1)]
            before, behind = (n if n is not None and n != stage else None for n in near)
            row.append(Chunk(place, layers, place == 0, place == last, before, behind))
        out.append(row)
    return out

"""Chunks of every stage: whole model once, neighbours that name each other, weights of every chunk placed."""

from __future__ import annotations

import pytest

from meshwright.engines.own.profile import OWN
from meshwright.errors import IllegalLayoutError
from meshwright.moves.chunks import model_chunks
from meshwright.specs.build import decoder
from meshwright.specs.layout import parse_layout
from meshwright.specs.placement import place

TIED = decoder(hidden=64, layers=10, heads=4, kv_heads=2, vocab=128, ffn=64, tied=True)
LAYOUTS = (
    "pp=1",
    "pp=3",
    "pp=3,stage_layers=5+4+1",
    "pp=2,virtual=3,schedule=interleaved",
    "pp=4,virtual=2,schedule=zbv",
    "pp=3,schedule=dualpipev",
    "pp=2,schedule=zbv,stage_layers=7+3",
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_hold_every_layer_once_in_order(layout: str) -> None:
    stages = model_chunks(place(TIED, parse_layout(layout), OWN))
    chunks = sorted((c for row in stages for c in row), key=lambda c: c.place)
    assert [n for c in chunks for n in c.layers] == list(range(10))
    assert all(c.layers for c in chunks)
    assert [c.first for c in chunks] == [True] + [False] * (len(chunks) - 1)
    assert [c.last for c in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_neighbours_name_each_other(layout: str) -> None:
    stages = model_chunks(place(TIED, parse_layout(layout), OWN))
    owner = {c.place: stage for stage, row in enumerate(stages) for c in row}
    for stage, row in enumerate(stages):
        for chunk in row:
            for near, at in ((chunk.before, chunk.place - 1), (chunk.behind, chunk.place + 1)):
                assert near == (owner[at] if at in owner and owner[at] != stage else None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_is_given_the_weights_of_all_its_chunks(layout: str) -> None:
    placement = place(TIED, parse_layout(layout), OWN)
    for stage, row in enumerate(model_chunks(placement)):
        shards = placement.shards(placement.at(stage, 0))
        layers = {n for s in shards for n in s.layers}
        assert layers == {n for c in row for n in c.layers}
        ends = {s.family.role for s in shards if not s.layers}
        embeds = any(c.first or c.last for c in row)
        assert ("embedding" in ends) == embeds
        assert ("norm" in ends) == any(c.last for c in row)


def test_more_chunks_than_layers_are_refused() -> None:
    with pytest.raises(IllegalLayoutError, match="10"):
        place(TIED, parse_layout("pp=6,schedule=zbv,virtual=2"), OWN)
